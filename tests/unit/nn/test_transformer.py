"""Attention, transformer layers and stacks: torch's masks and state, true gradients, shares by depth."""

import copy
import itertools
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from plimsoll.errors import ArgumentError
from plimsoll.unit import nn as unn
from plimsoll.unit.optim import AdamW
from plimsoll.unit.optim.parameter_kinds import kinds_of, traits_of
from tests.support.cases import each

WIDTH, HEADS, LENGTH, BATCH = 16, 4, 6, 3
LAYER = {"dim_feedforward": 32, "dropout": 0.0, "activation": "gelu", "batch_first": True}
CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
PADDING = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
PADDING[1, 4:] = True
FLOAT = torch.randn(BATCH * HEADS, LENGTH, LENGTH, generator=torch.Generator().manual_seed(1))
MASKS = {
    "none": {},
    "boolean": {"attn_mask": CAUSAL},
    "causal": {"attn_mask": CAUSAL, "is_causal": True},
    "float": {"attn_mask": FLOAT},
    "padding": {"key_padding_mask": PADDING},
    "float padding": {"key_padding_mask": torch.zeros(BATCH, LENGTH).masked_fill(PADDING, -torch.inf)},
    "causal padding": {"attn_mask": CAUSAL, "is_causal": True, "key_padding_mask": PADDING},
    "boolean padding": {"attn_mask": CAUSAL, "key_padding_mask": PADDING},
}


def pair(scaled=True, **keywords):
    """A unit-scaled attention, and torch's whose weights have the factors in them. Without biases."""
    torch.manual_seed(0)
    ours = unn.MultiheadAttention(WIDTH, HEADS, bias=False, constraint="to_output_scale", **keywords).double()
    theirs = nn.MultiheadAttention(WIDTH, HEADS, bias=False, **keywords).double()
    theirs.load_state_dict({name: w * w.shape[-1] ** -0.5 for name, w in ours.state_dict().items()})
    return ours, theirs


def ratio(ours, theirs):
    """The one number between two tensors; NaN where there is none."""
    found = (ours * theirs).sum() / theirs.square().sum()
    return found.item() if torch.allclose(ours, theirs * found, rtol=1e-7, atol=1e-9) else float("nan")


@each("mask", MASKS)
@each("same", [True, False], ids=["self", "cross"])
@each("weights", [True, False])
@pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask:UserWarning")
def test_attention_is_torchs_times_a_factor(mask, same, weights):
    ours, theirs = pair(batch_first=True)
    x = torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64)
    memory = x if same else torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64)
    arguments = {name: m.double() if m is not True and m.is_floating_point() else m for name, m in MASKS[mask].items()}
    mine, my_weights = ours(x, memory, memory, need_weights=weights, **arguments)
    other, their_weights = theirs(x, memory, memory, need_weights=weights, **arguments)
    assert ratio(mine, other) > 1.0
    if weights:
        torch.testing.assert_close(my_weights, their_weights)
        each, _ = ours(x, memory, memory, average_attn_weights=False, **arguments)[1], None
        torch.testing.assert_close(each.mean(1), their_weights)
        assert not my_weights.requires_grad
    else:
        assert my_weights is None


@each("keywords", [{}, {"batch_first": True}, {"kdim": 8, "vdim": 12}], ids=str)
@each("single", [True, False])
def test_attention_takes_torchs_layouts_and_widths(keywords, single):
    ours, theirs = pair(**keywords)
    shapes = [(LENGTH,), (5,), (5,)] if single else [(LENGTH, 5), (5, 5), (5, 5)]
    if keywords.get("batch_first"):
        shapes = [shape[::-1] for shape in shapes]
    widths = (WIDTH, keywords.get("kdim", WIDTH), keywords.get("vdim", WIDTH))
    q, k, v = (torch.randn(*s, w, dtype=torch.float64) for s, w in zip(shapes, widths, strict=True))
    mine, my_weights = ours(q, k, v)
    other, their_weights = theirs(q, k, v)
    assert mine.shape == other.shape and ratio(mine, other) > 1.0
    torch.testing.assert_close(my_weights, their_weights)


def test_causal_needs_no_mask_and_nothing_later_is_seen():
    ours, _ = pair(batch_first=True)
    x = torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64)
    for need_weights, padding in itertools.product((True, False), (None, torch.zeros(BATCH, LENGTH, dtype=torch.bool))):
        whole = ours(x, x, x, need_weights=need_weights, is_causal=True, key_padding_mask=padding)[0]
        part = x[:, :2]
        short = None if padding is None else padding[:, :2]
        first = ours(part, part, part, need_weights=need_weights, is_causal=True, key_padding_mask=short)[0]
        assert ratio(whole[:, :2], first) > 0.5


def test_sharper_attention_by_mult():
    torch.manual_seed(0)
    x = torch.randn(BATCH, LENGTH, WIDTH)
    ours = unn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    flat = ours(x, x, x, average_attn_weights=False)[1].max(-1).values.mean()
    ours.mult = 8.0
    assert ours(x, x, x, average_attn_weights=False)[1].max(-1).values.mean() > flat + 0.2


@pytest.mark.parametrize("is_causal", [True, False])
def test_self_attention_is_near_unit_scale(is_causal):
    torch.manual_seed(0)
    x = torch.randn(16, 64, 64, requires_grad=True)
    y, _ = unn.MultiheadAttention(64, 4, batch_first=True, bias=False)(x, x, x, need_weights=False, is_causal=is_causal)
    y.backward(torch.randn_like(y))
    assert 0.5 < y.std() < 1.5 and 0.5 < x.grad.std() < 1.5


def layers():
    for first, kind in itertools.product((True, False), ("encoder", "decoder")):
        made = unn.TransformerEncoderLayer if kind == "encoder" else unn.TransformerDecoderLayer
        yield pytest.param(kind, made, first, id=f"{kind}-{'pre' if first else 'post'}")


def numeric(loss, x, direction, step=1e-5):
    with torch.no_grad():
        return ((loss(x + step * direction) - loss(x - step * direction)) / (2 * step)).item()


@each(("kind", "made", "first"), list(layers()))
def test_gradients_are_true_up_to_one_factor(kind, made, first):
    torch.manual_seed(0)
    layer = made(WIDTH, HEADS, **LAYER, norm_first=first).double()
    inputs = [torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64) for _ in range(1 + (kind == "decoder"))]
    out = torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64)
    for i in range(len(inputs)):
        leaves = [x.clone().requires_grad_() for x in inputs]
        (layer(*leaves) * out).sum().backward()

        def loss(x, i=i):
            return (layer(*inputs[:i], x, *inputs[i + 1 :]) * out).sum()

        ratios = []
        for _ in range(4):
            direction = torch.randn_like(inputs[i])
            ratios.append((leaves[i].grad * direction).sum().item() / numeric(loss, inputs[i], direction))
        assert ratios == pytest.approx([ratios[0]] * 4, rel=1e-4)
        assert i or ratios[0] == pytest.approx(1.0, rel=1e-4)  # along the stream there is no factor left at all


@each(("kind", "made", "first"), list(layers()))
def test_layers_have_torchs_state_and_survive_copies(kind, made, first):
    ours = made(WIDTH, HEADS, **LAYER, norm_first=first)
    theirs = getattr(nn, made.__name__)(WIDTH, HEADS, **LAYER, norm_first=first)
    assert isinstance(ours, type(theirs))
    assert {k: v.shape for k, v in ours.state_dict().items()} == {k: v.shape for k, v in theirs.state_dict().items()}
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert set(kinds_of(ours)) == set(ours.state_dict())
    x = torch.randn(BATCH, LENGTH, WIDTH)
    arguments = (x, x) if kind == "decoder" else (x,)
    expected = ours(*arguments)
    for twin in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert torch.equal(twin(*arguments), expected) and isinstance(twin.activation, unn.GELU)
        assert twin.taus == ours.taus and kinds_of(twin) == kinds_of(ours)
    with torch.no_grad():  # torch's layer would take its fused path here, without factors
        torch.testing.assert_close(ours.eval()(*arguments), expected)


def stack(depth=3, **keywords):
    torch.manual_seed(0)
    layer = unn.TransformerEncoderLayer(WIDTH, HEADS, **LAYER, norm_first=True, **keywords)
    return unn.TransformerEncoder(layer, depth, unn.LayerNorm(WIDTH))


def test_shares_fall_along_a_stack_and_all_branches_count_alike():
    encoder = stack(3)
    taus = [tau for layer in encoder.layers for tau in layer.taus]
    assert taus == [1 / 4, 1 / 5, 1 / 6, 1 / 7, 1 / 8, 1 / 9]
    parts = [1.0]
    for tau in taus:
        parts = [part * (1 - tau) for part in parts] + [tau]
    assert (
        sum(parts) == pytest.approx(1) and parts[0] == pytest.approx(1 / 3) and parts[1:] == pytest.approx([1 / 9] * 6)
    )
    decoder = unn.TransformerDecoder(unn.TransformerDecoderLayer(WIDTH, HEADS, **LAYER), 2)
    assert [layer.taus for layer in decoder.layers] == [[1 / 3, 1 / 4, 1 / 5], [1 / 6, 1 / 7, 1 / 8]]


def test_depth_reaches_the_optimizer():
    encoder = stack(4)
    assert {trait.depth for name, trait in traits_of(encoder).items() if name.startswith("layers.")} == {4}
    found = {n: g["lr_factor"] for g in AdamW(encoder, lr=1.0).param_groups for n in g["param_names"]}
    assert found["layers.2.linear2.weight"] == 32**-0.5 / 2 and found["norm.weight"] == 1.0


def test_layers_of_a_stack_start_apart():
    encoder = stack(3)
    weights = [layer.linear1.weight for layer in encoder.layers]
    assert all(not torch.equal(a, b) for a, b in itertools.combinations(weights, 2))
    assert all(weight.std().item() == pytest.approx(1, rel=0.1) for weight in weights)


@pytest.mark.parametrize("depth", [1, 8])
def test_the_stream_stays_at_unit_scale_at_any_depth(depth):
    torch.manual_seed(0)
    encoder = stack(depth)
    encoder.norm = None
    x = torch.randn(16, 12, WIDTH, requires_grad=True)
    y = encoder(x)
    y.backward(torch.randn_like(y))
    assert 0.8 < y.std() < 1.25 and 0.7 < x.grad.std() < 1.4


def test_a_stack_compiles_whole_checkpoints_and_takes_masks():
    encoder = stack(1)
    x = torch.randn(BATCH, LENGTH, WIDTH)
    mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
    expected = encoder(x, mask, is_causal=True)
    compiled = torch.compile(encoder, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, mask, is_causal=True), expected)
    torch.testing.assert_close(encoder(x, is_causal=True), expected)
    again = checkpoint(encoder, x, mask, None, True, use_reentrant=False)
    assert torch.equal(again, expected)
    assert not torch.allclose(encoder(x), expected)
    decoder = unn.TransformerDecoder(unn.TransformerDecoderLayer(WIDTH, HEADS, **LAYER), 2, unn.LayerNorm(WIDTH))
    seen = decoder(x, x, tgt_is_causal=True)
    part = x[:, :3]
    assert seen.shape == x.shape and not torch.allclose(decoder(part, x[:, :3], tgt_is_causal=True), seen[:, :3])
    torch.compiler.reset()


def test_unit_stacks_of_ones_own():
    torch.manual_seed(0)
    own = unn.Stack(*(unn.Residual(nn.Sequential(unn.LayerNorm(8), unn.MLP(8))) for _ in range(3)))
    assert [layer.taus for layer in own] == [[1 / 4], [1 / 5], [1 / 6]]
    assert traits_of(own)["0.branch.1.linear1.weight"].depth == 3
    own.append(unn.Residual(unn.MLP(8)))
    own.insert(0, unn.Residual(unn.MLP(8)))
    assert [layer.taus for layer in own] == [[1 / (6 + i)] for i in range(5)]
    del own[0]
    assert [layer.taus for layer in own] == [[1 / (5 + i)] for i in range(4)]
    assert traits_of(own)["0.branch.1.linear1.weight"].depth == 4
    assert own(torch.randn(4, 8)).shape == (4, 8)
    own[0] = unn.Residual(unn.MLP(8))
    own += nn.Sequential(unn.Residual(unn.MLP(8)))
    assert [layer.taus for layer in own] == [[1 / (6 + i)] for i in range(5)]
    part = own[1:3]  # the layers themselves, which stay as they are in the stack
    assert [layer.taus for layer in part] == [[1 / 7], [1 / 8]] and [len(own), own[-1].taus] == [5, [1 / 10]]
    assert traits_of(part)["1.branch.1.linear1.weight"].depth == 5
    own *= 2
    assert [layer.taus for layer in own[:5]] == [[1 / (16 + i)] for i in range(5)]  # every layer is there twice
    nested = unn.Stack(nn.Sequential(unn.Residual(nn.Identity()), unn.Residual(nn.Identity())))
    assert [layer.taus for layer in nested[0]] == [[1 / 2], [1 / 3]]


@each("activation", ["relu", F.relu, F.gelu, F.silu, torch.tanh, torch.sigmoid, unn.SiLU(mult=2.0)])
def test_activations_by_name_function_or_module(activation):
    layer = unn.TransformerEncoderLayer(WIDTH, HEADS, 32, activation=activation)
    wanted = activation if isinstance(activation, str) else getattr(activation, "__name__", "silu")
    assert type(layer.activation).__name__.lower() == wanted


@each(
    ("call", "message"),
    [
        (lambda: unn.MultiheadAttention(8, 2, add_bias_kv=True), "MultiheadAttention: expected add_bias_kv=False"),
        (lambda: unn.MultiheadAttention(8, 2, add_zero_attn=True), "expected add_zero_attn=False, .* got True"),
        (lambda: unn.MultiheadAttention(8, 2, mult=-1.0), "MultiheadAttention: expected mult .* got -1.0"),
        (lambda: unn.MultiheadAttention(8, 2, constraint="mean"), "MultiheadAttention: expected constraint"),
        (
            lambda: unn.MultiheadAttention(8, 2)(
                *[torch.ones(3, 1, 8)] * 3, attn_mask=torch.ones(3, 3, dtype=torch.int)
            ),
            r"expected masks to be boolean or floating point; got torch.int32 of shape \(3, 3\)",
        ),
        (lambda: unn.TransformerEncoderLayer(8, 2, taus=(0.5,)), r"expected taus to be 2 shares, .* got \(0.5,\)"),
        (lambda: unn.TransformerEncoderLayer(8, 2, taus=0.5), "expected taus to be 2 shares, .* got 0.5. Leave"),
        (
            lambda: unn.TransformerDecoderLayer(8, 2, taus=(0.5, 0.5, 1.0)),
            "TransformerDecoderLayer: expected tau between",
        ),
        (lambda: unn.TransformerEncoderLayer(8, 2, activation="swish"), "TransformerEncoderLayer: expected activation"),
        (
            lambda: unn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2), 2),
            "expected a plimsoll.unit.nn.TransformerEnc",
        ),
        (
            lambda: unn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2), 2),
            "expected a plimsoll.unit.nn.TransformerDec",
        ),
        (
            lambda: unn.TransformerEncoder(unn.TransformerEncoderLayer(8, 2), 2, enable_nested_tensor=True),
            "TransformerEncoder: expected enable_nested_tensor=False",
        ),
        (lambda: unn.residual_tau(0, 0), "residual_tau: expected layers to be an integer of at least 1; got layers=0"),
        (lambda: unn.Residual(nn.Identity(), tau=0.0), "Residual: expected tau between 0 and 1"),
    ],
)
def test_refusals(call, message):
    with pytest.raises(ArgumentError, match=message):
        call()
