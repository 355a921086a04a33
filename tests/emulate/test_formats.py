"""emulate(forward=, backward=): formats at the operands of products, or at every operation, against casts by hand."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import plimsoll as pl
from plimsoll.errors import ArgumentError, FormatError, UnsupportedTensorError
from tests.support.cases import each

W, G = "e4m3", "e5m2"
BLOCKS = ("mxfp8_e4m3", "mxfp6_e2m3", "mxfp4", "nvfp4")
FP32, BF16 = torch.float32, torch.bfloat16


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape, requires_grad=True)


def both(
    call: Callable[..., Tensor], *inputs: Tensor, after: bool = True, **keywords: Any
) -> tuple[Tensor, list[Tensor]]:
    """The result under the emulation, and its inputs' gradients for a fixed gradient."""
    with pl.emulate(**keywords):
        y = call(*inputs)
        if not after:
            return y, list(torch.autograd.grad(y, inputs, slope(y)))
    return y, list(torch.autograd.grad(y, inputs, slope(y)))


def slope(y: Tensor) -> Tensor:
    return torch.linspace(-3, 3, y.numel(), dtype=y.dtype).view_as(y).clone()


@each("after", [True, False])
@each("fmt", [W, "e3m2", "e5m3", *BLOCKS])
def test_a_linear_rounds_both_operands_and_the_gradient_along_what_each_product_sums_over(
    fmt: str, after: bool
) -> None:
    back = G if fmt == W else fmt
    blocks = fmt in BLOCKS

    def q(x: Tensor, axis: int) -> Tensor:
        return pl.cast(x, fmt, axis=axis) if blocks else pl.cast(x, fmt)

    def g(x: Tensor, axis: int) -> Tensor:
        return pl.cast(x, back, axis=axis) if blocks else pl.cast(x, back)

    x, w, b = leaf(40, 70), leaf(33, 70), leaf(33)
    y, (dx, dw, db) = both(F.linear, x, w, b, forward=fmt, backward=back, after=after)
    dy = slope(y)
    assert torch.equal(y, q(x, 1) @ q(w, 1).T + b)
    assert torch.equal(dx, g(dy, 1) @ q(w, 0))
    assert torch.equal(dw, (q(x, 0).T @ g(dy, 0)).T)
    assert torch.equal(db, dy.sum(0))  # no operand of a product


def q(x: Tensor) -> Tensor:
    return pl.cast(x, W)


FORMS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    "mm": (torch.mm, lambda a, b: q(a) @ q(b), ((3, 4), (4, 5))),
    "bmm": (torch.bmm, lambda a, b: q(a) @ q(b), ((2, 3, 4), (2, 4, 5))),
    "broadcast": (torch.matmul, lambda a, b: q(a) @ q(b), ((2, 1, 3, 4), (3, 4, 5))),
    "folded": (torch.matmul, lambda a, b: q(a) @ q(b), ((2, 3, 4), (4, 5))),
    "row": (torch.matmul, lambda a, b: q(a) @ q(b), ((4,), (2, 4, 5))),
    "column": (torch.matmul, lambda a, b: q(a) @ q(b), ((2, 3, 4), (4,))),
    "mv": (torch.mv, lambda a, b: q(a) @ q(b), ((3, 4), (4,))),
    "dot": (torch.dot, lambda a, b: q(a) @ q(b), ((4,), (4,))),
    "addmm": (
        lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2),
        lambda c, a, b: 2 * (q(a) @ q(b)) + 0.5 * c,
        ((5,), (3, 4), (4, 5)),
    ),
    "baddbmm": (torch.baddbmm, lambda c, a, b: q(a) @ q(b) + c, ((2, 3, 5), (2, 3, 4), (2, 4, 5))),
    "addbmm": (torch.addbmm, lambda c, a, b: (q(a) @ q(b)).sum(0) + c, ((3, 5), (2, 3, 4), (2, 4, 5))),
    "addmv": (torch.addmv, lambda c, a, b: q(a) @ q(b) + c, ((3,), (3, 4), (4,))),
    "addr": (torch.addr, lambda c, a, b: torch.outer(q(a), q(b)) + c, ((3, 4), (3,), (4,))),
    "einsum": (lambda a, b: torch.einsum("bij,bkj->bik", a, b), lambda a, b: q(a) @ q(b).mT, ((2, 3, 4), (2, 5, 4))),
    "tensordot": (lambda a, b: torch.tensordot(a, b, dims=1), lambda a, b: q(a) @ q(b), ((3, 4), (4, 5))),
    "conv2d": (F.conv2d, lambda x, w: F.conv2d(q(x), q(w)), ((2, 3, 6, 6), (4, 3, 3, 3))),
    "conv1d": (
        lambda x, w, b: F.conv1d(x, w, b, padding="same"),
        lambda x, w, b: F.conv1d(q(x), q(w), padding=1) + b[:, None],
        ((2, 3, 6), (4, 3, 3), (4,)),
    ),
    "conv3d": (
        lambda x, w: F.conv3d(x, w, groups=2),
        lambda x, w: F.conv3d(q(x), q(w), groups=2),
        ((1, 2, 4, 4, 4), (4, 1, 2, 2, 2)),
    ),
    "transposed": (
        lambda x, w: F.conv_transpose2d(x, w, stride=2),
        lambda x, w: F.conv_transpose2d(q(x), q(w), stride=2),
        ((1, 3, 4, 4), (3, 2, 3, 3)),
    ),
    "conv_tbc": (torch.conv_tbc, lambda x, w, b: torch.conv_tbc(q(x), q(w), 0 * b) + b, ((5, 2, 3), (3, 3, 4), (4,))),
}  # fmt: skip


@each("name", FORMS)
def test_every_product_rounds_its_operands(name: str) -> None:
    call, by_hand, shapes = FORMS[name]
    inputs = [leaf(*shape) for shape in shapes]
    y, grads = both(call, *inputs, forward=W)
    z = by_hand(*inputs)
    torch.testing.assert_close(y, z, rtol=1e-5, atol=1e-5)
    # With no backward format the gradient passes straight through the casts, as through fake_quantize.
    straight = by_hand.__globals__["q"]
    by_hand.__globals__["q"] = lambda x: pl.fake_quantize(x, forward=W)
    try:
        expected = torch.autograd.grad(by_hand(*inputs), inputs, slope(y))
    finally:
        by_hand.__globals__["q"] = straight
    for got, wanted in zip(grads, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def test_what_is_added_with_factor_zero_is_not_read() -> None:
    a = torch.randn(3, 3)
    with pl.emulate(forward=W):
        assert torch.equal(torch.addmm(torch.full((3,), torch.nan), a, a, beta=0), q(a) @ q(a))


@each(
    ("name", "shapes"),
    [
        ("mm", [(2, 3, 4), (4, 5)]), ("mm", [(4,), (4, 5)]), ("bmm", [(3, 4), (4, 5)]), ("bmm", [(1, 3, 4), (2, 4, 5)]),
        ("mv", [(3, 4), (4, 1)]), ("dot", [(3, 3), (3, 3)]), ("addmm", [(5,), (2, 3, 4), (4, 5)]),
        ("addmm", [(7, 3, 5), (3, 4), (4, 5)]), ("baddbmm", [(5,), (3, 4), (4, 5)]), ("addr", [(3,), (2, 2), (3,)]),
    ],
)  # fmt: skip
def test_shapes_that_torch_refuses_are_refused(name: str, shapes: list[tuple[int, ...]]) -> None:
    inputs = [torch.ones(shape) for shape in shapes]
    with pytest.raises((RuntimeError, IndexError)) as refused:
        getattr(torch, name)(*inputs)
    with pl.emulate(forward=W), pytest.raises(refused.type) as raised:
        getattr(torch, name)(*inputs)
    assert str(raised.value) == str(refused.value)


def test_a_product_over_nothing_is_zero() -> None:
    x, w = torch.ones(2, 4, 0), torch.ones(3, 0)
    with pl.emulate(forward=W):
        assert torch.equal(x @ w.T, torch.zeros(2, 4, 3)) and torch.equal(F.linear(x[0], w), torch.zeros(4, 3))


def test_bilinear_rounds_the_operands_of_its_two_products() -> None:
    a, b, w, bias = torch.randn(3, 4), torch.randn(3, 5), torch.randn(2, 4, 5), torch.randn(2)
    with pl.emulate(forward=W):
        y = F.bilinear(a, b, w, bias)
    half = torch.einsum("bi,oij->boj", q(a), q(w))
    torch.testing.assert_close(y, torch.einsum("boj,bj->bo", q(half), q(b)) + bias)


@each("fmt", ["mxfp8_e4m3", "nvfp4"])
@each("transposed", [False, True])
def test_a_convolution_in_blocks_rounds_along_the_channels_of_each_group(fmt: str, transposed: bool) -> None:
    convolve = F.conv_transpose1d if transposed else F.conv1d
    x, w = leaf(3, 80, 9), leaf(*((80, 24, 3) if transposed else (48, 40, 3)))
    y, (dx, dw) = both(lambda x, w: convolve(x, w, groups=2), x, w, forward=fmt, backward=fmt)

    def along(x: Tensor, axis: int, grouped: bool = True) -> Tensor:
        if not grouped:
            return pl.cast(x, fmt, axis=axis)
        return torch.cat([pl.cast(part, fmt, axis=axis) for part in x.chunk(2, axis)], axis)

    def native(x: Tensor, w: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
        return torch.autograd.grad(convolve(x, w, groups=2), (x, w), dy)  # type: ignore[return-value]

    dy = slope(y)
    if fmt == "nvfp4":  # its tensor scale is of the whole tensor, so that groups are cast together

        def along(x: Tensor, axis: int, grouped: bool = True) -> Tensor:
            if not grouped:
                return pl.cast(x, fmt, axis=axis)
            return pl.cast(x.unflatten(axis, (2, -1)), fmt, axis=axis + 1).flatten(axis, axis + 1)

    reduced, other = (0, 1) if transposed else (1, 0)
    assert torch.equal(y, convolve(along(x, 1), along(w, reduced, transposed), groups=2))
    assert torch.equal(dx, native(x, along(w, other, not transposed), along(dy, 1))[0])
    assert torch.equal(dw, native(along(x, 0, False), w, along(dy, 0, False))[1])


@each("mask", [None, "bool", "added", "causal", "both", "nothing"])
def test_attention_rounds_the_operands_of_both_products(mask: str | None) -> None:
    x, k, v = leaf(2, 4, 5, 8), leaf(2, 2, 6, 8), leaf(2, 2, 6, 3)
    where = torch.rand(5, 6) > 0.3
    given: dict[str, Any] = {"enable_gqa": True}
    if mask in ("bool", "added", "both", "nothing"):
        where[:, 0] = True
        if mask == "nothing":
            where[2] = False
        given["attn_mask"] = torch.where(where, 0.0, -torch.inf) if mask == "added" else where
    where = where if mask and mask != "causal" else torch.ones(5, 6, dtype=torch.bool)
    if mask in ("causal", "both"):
        given["is_causal"], where = True, where.tril()
    y, grads = both(lambda *qkv: F.scaled_dot_product_attention(*qkv, **given), x, k, v, forward=W)

    def fake(x: Tensor) -> Tensor:
        return pl.fake_quantize(x, forward=W)

    wide_k, wide_v = (one.repeat_interleave(2, 1) for one in (k, v))
    scores = (fake(x) @ fake(wide_k).mT / 8**0.5).masked_fill(~where, -1e30)
    weights = torch.softmax(scores, -1) * where.any(-1, keepdim=True)
    expected = fake(weights) @ fake(wide_v)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    for got, wanted in zip(grads, torch.autograd.grad(expected, (x, k, v), slope(y)), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def test_attention_drops_out_between_its_products() -> None:
    x = torch.randn(1, 2, 16, 4)
    torch.manual_seed(3)
    with pl.emulate(forward=W):
        y = F.scaled_dot_product_attention(x, x, torch.ones_like(x), dropout_p=0.5)
        torch.manual_seed(3)
        assert torch.equal(y, F.scaled_dot_product_attention(x, x, torch.ones_like(x), dropout_p=0.5))
        assert y.std() > 0.05 and F.scaled_dot_product_attention(x, x, torch.ones_like(x)).std() < 0.05


def test_16_bit_tensors_are_rounded_once_more_at_the_end() -> None:
    x, w = torch.randn(4, 64).bfloat16().requires_grad_(), torch.randn(8, 64).bfloat16().requires_grad_()
    y, (dx, _) = both(F.linear, x, w, forward=W, backward=G)
    assert y.dtype is BF16 and torch.equal(y, (q(x).float() @ q(w).float().T).bfloat16())
    assert torch.equal(dx, (pl.cast(slope(y), G).float() @ q(w).float()).bfloat16())


def test_a_precision_and_formats_go_together() -> None:
    x, w = torch.randn(4, 64), nn.Parameter(torch.randn(8, 64))
    with pl.emulate("bf16", forward=W, backward=G) as e:
        y = torch.softmax(F.linear(x, w), -1)
        z = torch.tanh(F.linear(x, w))
    low = (q(x.bfloat16()).float() @ q(w.detach().bfloat16()).float().T).bfloat16()
    assert y.dtype is FP32 and torch.equal(y, torch.softmax(low.float(), -1))
    assert z.dtype is BF16 and torch.equal(z, torch.tanh(low))
    assert e.operations.emulated == {"linear": 2} and e.operations.native == {"tanh": 1}
    with pl.emulate("bf16"), pl.emulate(forward=W, backward=G):  # likewise nested
        assert torch.equal(torch.tanh(F.linear(x, w)), z)


def test_the_inner_context_decides() -> None:
    x = torch.randn(4, 64)
    with pl.emulate(forward=W):
        with pl.emulate(forward="e2m1"):
            inner = x @ x.T
        with pl.emulate("fp32"):
            plain = x @ x.T
        outer = x @ x.T
    assert torch.equal(inner, pl.cast(x, "e2m1") @ pl.cast(x, "e2m1").T)
    assert torch.equal(plain, x @ x.T) and torch.equal(outer, q(x) @ q(x).T)


@each(
    "arguments", [{"rounding": "toward_zero"}, {"scale": 16.0}, {"saturate": False}, {"rounding": "up", "scale": 0.25}]
)
def test_arguments_of_the_cast_are_passed_on(arguments: dict[str, Any]) -> None:
    x = torch.randn(4, 32) * 300
    with pl.emulate(forward=W, **arguments):
        y = x @ x.T
    expected = pl.cast(x, W, **arguments)
    torch.testing.assert_close(
        y, expected @ expected.T, rtol=1e-6, atol=1e-6 * float(y.nan_to_num().abs().max()), equal_nan=True
    )
    assert not torch.allclose(y, q(x) @ q(x).T, rtol=1e-3, equal_nan=True)
    with pl.emulate(forward="mxfp4", scale_rule="ceil"):
        y = x @ x.T
    assert torch.equal(y, pl.cast(x, "mxfp4", scale_rule="ceil") @ pl.cast(x, "mxfp4", scale_rule="ceil").T)


def test_stochastic_rounding_is_seeded_and_fresh_for_every_operand() -> None:
    x = torch.full((64, 64), 1.06)
    eye = torch.eye(64)

    def run(generator: Any) -> list[Tensor]:
        with pl.emulate(forward=W, backward=G, rounding="stochastic", generator=generator):
            first, second = x @ eye, x @ eye
        leaf = x.clone().requires_grad_()
        with pl.emulate(forward=W, backward=G, rounding="stochastic", generator=generator):
            y = leaf @ eye
        y.backward(torch.full_like(y, 1.1))
        return [first, second, leaf.grad]

    got = run(7)
    assert all(torch.equal(a, b) for a, b in zip(got, run(7), strict=True))
    assert not torch.equal(got[0], got[1]) and not torch.equal(got[0], run(8)[0])
    assert set(got[0].unique().tolist()) == {1.0, 1.125} and set(got[2].unique().tolist()) == {1.0, 1.25}
    # The mean of 4096 draws, each off by at most 0.125, is within 0.125 * sqrt(log(2e9) / 2 / 4096) of the value.
    assert abs(got[0].mean() - 1.06) < 0.125 * (21.5 / 8192) ** 0.5
    run(torch.Generator().manual_seed(1))
    torch.manual_seed(5)
    assert torch.equal(run(None)[0], (torch.manual_seed(5), run(None)[0])[1])


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_recomputes_the_same(reentrant: bool) -> None:
    net, x = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), torch.randn(4, 8, requires_grad=True)

    def run(checkpointed: bool) -> list[Tensor]:
        net.zero_grad()
        with pl.emulate(forward="mxfp4", backward=G):
            y = checkpoint(net, x, use_reentrant=reentrant) if checkpointed else net(x)
        y.pow(2).sum().backward()
        return [p.grad.clone() for p in net.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(run(True), run(False), strict=True))


def test_an_lstm_rounds_the_operands_of_its_products() -> None:
    cell, x = nn.LSTM(4, 5, bias=False), torch.randn(2, 3, 4)
    with pl.emulate(forward=W):
        y, (h, c) = cell(x)
    state = torch.zeros(3, 5), torch.zeros(3, 5)
    for now in x:
        i, f, g, o = (q(now) @ q(cell.weight_ih_l0).T + q(state[0]) @ q(cell.weight_hh_l0).T).chunk(4, 1)
        kept = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
        state = torch.sigmoid(o) * torch.tanh(kept), kept
    torch.testing.assert_close(h[0], state[0])
    torch.testing.assert_close(c[0], state[1])
    assert torch.equal(y[-1], h[0])


# -- where formats act -------------------------------------------------------------------------------------------------


def test_named_products_alone_are_rounded() -> None:
    x = torch.randn(4, 16)
    with pl.emulate(forward=W, operations="linear"):
        assert torch.equal(F.linear(x, x), q(x) @ q(x).T) and torch.equal(x @ x.T, x @ x.mT)
    with pl.emulate(forward=W, operations=[torch.einsum, F.conv1d]):
        assert torch.equal(torch.einsum("ij,kj->ik", x, x), q(x) @ q(x).T)
        y = F.conv1d(x[None], x[:, :4, None])
    assert torch.equal(y, F.conv1d(q(x)[None], q(x)[:, :4, None]))


def test_named_operations_are_rounded_in_both_directions() -> None:
    x = torch.randn(8, 16, requires_grad=True)
    with pl.emulate(forward=W, backward=G, operations=("gelu", F.softmax, "relu")) as e:
        y = F.gelu(x)
        z = torch.softmax(x, -1)
        r = torch.relu_(x.detach().clone())
        untouched = torch.tanh(x)
    assert torch.equal(y, q(F.gelu(x))) and torch.equal(z, q(torch.softmax(x, -1))) and torch.equal(r, q(torch.relu(x)))
    assert torch.equal(untouched, torch.tanh(x))
    assert e.operations.emulated == {"gelu": 1, "softmax": 1, "relu_": 1}
    (got,) = torch.autograd.grad(y, x, slope(y))
    (expected,) = torch.autograd.grad(F.gelu(x), x, pl.cast(slope(y), G))
    assert torch.equal(got, expected)


def test_everywhere_means_every_result() -> None:
    x, w = torch.randn(8, 16, requires_grad=True), torch.randn(4, 16)
    with pl.emulate(forward=W, backward=G, operations="all") as e:
        a = x * 1.3 + 0.1
        b = torch.layer_norm(a, (16,))
        c = F.linear(b, w)
        d = c.t().reshape(2, 16).exp_()
        values, indices = d.max(-1)
    by_hand = q(q(x * 1.3) + 0.1)
    assert torch.equal(a, by_hand)
    assert torch.equal(b, q(F.layer_norm(by_hand, (16,))))
    assert torch.equal(c, q(q(b) @ q(w).T)) and torch.equal(d, q(c.t().reshape(2, 16).exp()))
    assert torch.equal(values, d.max(-1).values) and indices.dtype is torch.int64
    assert e.operations.emulated["linear"] == 1 and not e.operations.native
    (got,) = torch.autograd.grad(a, x, slope(a))
    assert torch.equal(got, pl.cast(pl.cast(slope(a), G), G) * 1.3)
    with pl.emulate(forward="mxfp4", operations="all"):
        assert x.detach().sum().item() == x.detach().sum().item()  # no block in a scalar
    out = torch.empty(8, 16)
    with pl.emulate(forward=W, operations="all"):
        assert torch.exp(x.detach(), out=out) is out
    assert torch.equal(out, q(x.detach().exp()))


def test_training_in_fp8_learns() -> None:
    net = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    x, y = torch.randn(64, 16), torch.randint(4, (64,))
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        with pl.emulate(forward=W, backward=G):
            loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]


def test_a_backward_inside_of_a_graph_from_outside_is_not_rounded() -> None:
    x, w = leaf(4, 8), torch.randn(8, 4)
    y = x @ w
    with pl.emulate(forward=W, backward=G, operations="all"):
        (got,) = torch.autograd.grad(y, x, slope(y))
    assert torch.equal(got, slope(y) @ w.T)


# -- mistakes ----------------------------------------------------------------------------------------------------------


@each(
    ("keywords", "message"),
    [
        ({"forward": W, "axis": 0}, r"expected arguments of a cast among rounding, .*; got axis. Blocks run along"),
        ({"precision": "fp16", "rounding": "up"}, "expected rounding with a forward or a backward format; got neither"),
        ({"forward": W, "scale_rule": "ceil"}, "expected scale_rule with a block format only; got 'ceil' with e4m3"),
        ({"forward": W, "rounding": "nearest"}, "emulate: expected rounding to be "),
        ({"forward": W, "scale": -1.0}, "expected scale to be a number above 0; got scale=-1.0"),
        ({"forward": "mxfp4", "saturate": False}, "emulate: expected saturate=True or None for mxfp4"),
        ({"forward": W, "generator": 1}, "expected a generator with rounding='stochastic' only; got generator=1"),
        ({"forward": W, "rounding": "stochastic", "generator": torch.tensor(1)}, "expected generator to be an int or"),
        ({"forward": W, "operations": "gellu"}, "emulate: expected an operation of torch; got 'gellu'. Did you"),
        ({"forward": W, "operations": ()}, r"emulate: expected operations that round; got operations=\(\)"),
        ({"forward": W, "operations": None}, "emulate: expected operations to be an operation or several; got .*None"),
        ({"forward": W, "scale": {"gradients": 2.0}}, "expected scales of what is cast; got one of gradients without"),
        ({"precision": "fp16", "lists": "cuda"}, "emulate: expected lists to be OperationLists; got 'cuda'. Change"),
        ({"precision": "fp16", "operations": "all"}, "expected operations with a forward or a backward format"),
        ({"accumulate": "fp16", "operations": "linear"}, "expected operations with a forward or a backward format"),
        ({"accumulate": "mxfp4"}, "expected accumulate to be an element format; got mxfp4"),
        ({"accumulate": "fp16", "chunk": 0}, "expected chunk to be an integer of at least 1; got chunk=0"),
        ({"forward": W, "chunk": 4}, "expected chunk with an accumulator other than fp32, .*; got chunk=4"),
    ],
)  # fmt: skip
def test_arguments_that_make_no_sense_are_refused(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        pl.emulate(**keywords)


@each("layer, shape", [(nn.Linear(4, 4), (2, 4)), (nn.Conv1d(4, 2, 3), (4, 8))], ids=str)
def test_products_inside_of_transforms_are_refused(layer: nn.Module, shape: tuple[int, ...]) -> None:
    def gradient(x: Tensor) -> Tensor:
        return torch.func.grad(lambda x: layer(x).sum())(x)

    with pl.emulate(forward=W):
        for transformed in (torch.func.vmap(layer), gradient):
            with pytest.raises(UnsupportedTensorError, match=r"emulate: .* outside of torch.func transforms"):
                transformed(torch.randn(2, *shape))


def test_a_format_that_does_not_exist_is_refused() -> None:
    with pytest.raises(FormatError, match="e4n3"):
        pl.emulate(forward="e4n3")


@each("function", [torch.relu_, torch.sigmoid_, torch.tanh_, torch.exp_], ids=lambda f: f.__name__)
def test_a_result_that_is_written_in_place_trains_as_one_that_is_not(function: Callable[[Tensor], Tensor]) -> None:
    x = leaf(8, 8)
    gradients = []
    for called in (function, getattr(torch, function.__name__.removesuffix("_"))):
        with pl.emulate(forward=W, backward=G, operations="all"):
            y = called(x * 1)
            (y * slope(y)).sum().backward()
        gradients.append(x.grad)
        x.grad = None
    assert torch.equal(y.detach(), q(y.detach()))
    torch.testing.assert_close(*gradients, rtol=0.3, atol=0.3)  # the one by the rounded result, the other by its own
