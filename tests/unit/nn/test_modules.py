"""Every module: torch's class, arguments and state; unit scale both ways; draws, kinds, odd inputs, refusals."""

import copy
import inspect
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from plimsoll.errors import ArgumentError, UnsupportedTensorError
from plimsoll.unit import nn as unn
from plimsoll.unit.formulas import Factors
from plimsoll.unit.optim.parameter_kinds import kinds_of
from tests.support.cases import each

# Name to a module and an input of unit scale, large enough that a standard deviation is sure to 3 %.
MODULES = {
    "Linear": (lambda **k: unn.Linear(96, 96, **k), (512, 96)),
    "LinearReadout": (lambda **k: unn.LinearReadout(96, 96, **k), (512, 96)),
    "Conv1d": (lambda **k: unn.Conv1d(24, 24, 5, padding=2, **k), (16, 24, 200)),
    "Conv2d": (lambda **k: unn.Conv2d(24, 24, 3, padding=1, padding_mode="circular", **k), (8, 24, 24, 24)),
    "ConvTranspose2d": (lambda **k: unn.ConvTranspose2d(24, 24, 2, stride=2, constraint=None, **k), (8, 24, 24, 24)),
    "LayerNorm": (lambda **k: unn.LayerNorm(96, **k), (512, 96)),
    "RMSNorm": (lambda **k: unn.RMSNorm(96, **k), (512, 96)),
    "GroupNorm": (lambda **k: unn.GroupNorm(4, 24, **k), (8, 24, 24, 24)),
    "BatchNorm2d": (lambda **k: unn.BatchNorm2d(24, **k), (8, 24, 24, 24)),
    "GELU": (lambda **_: unn.GELU(constraint=None), (512, 96)),
    "SiLU": (lambda **_: unn.SiLU(constraint=None), (512, 96)),
    "ReLU": (lambda **_: unn.ReLU(constraint=None), (512, 96)),
    "Tanh": (lambda **_: unn.Tanh(constraint=None), (512, 96)),
    "Sigmoid": (lambda **_: unn.Sigmoid(constraint=None), (512, 96)),
    "Softmax": (lambda **_: unn.Softmax(-1, constraint=None), (512, 96)),
    "Dropout": (lambda **_: unn.Dropout(0.2), (512, 96)),
    "AvgPool2d": (lambda **_: unn.AvgPool2d(2, constraint=None), (8, 24, 24, 24)),
    "MaxPool2d": (lambda **_: unn.MaxPool2d(2, constraint=None), (8, 24, 24, 24)),
    "AdaptiveAvgPool2d": (lambda **_: unn.AdaptiveAvgPool2d(6, constraint=None), (8, 24, 24, 24)),
    "MLP": (lambda **k: unn.MLP(96, **k), (512, 96)),
}
SMALL_OUTPUT = {"LinearReadout": 96**-0.5}  # its rule: fan_in ** -1, not ** -1/2
PLAIN = [name for name in MODULES if hasattr(nn, name)]
WITH_PARAMETERS = [name for name, (make, _) in MODULES.items() if list(make().parameters())]
every = pytest.mark.parametrize("name", MODULES)


def made(name, **keywords):
    torch.manual_seed(0)
    make, shape = MODULES[name]
    return make(**keywords), torch.randn(shape)


def rms(x):
    return x.double().square().mean().sqrt().item()


@every
def test_every_tensor_is_at_unit_scale(name):
    module, x = made(name)
    x.requires_grad_()
    y = module(x)
    y.backward(torch.randn_like(y))
    assert y.double().std().item() == pytest.approx(SMALL_OUTPUT.get(name, 1.0), rel=0.08)
    assert rms(x.grad) == pytest.approx(1.0, rel=0.1)
    # A bias's gradient has as many values as there are outputs, some 24: sure to 45 % at three deviations.
    for parameter in module.parameters():
        assert rms(parameter.grad) == pytest.approx(1.0, rel=0.1 if parameter.dim() > 1 else 0.5)


@each("name", PLAIN)
def test_it_is_torchs_module_with_torchs_arguments_and_state(name):
    torchs, ours = getattr(nn, name), getattr(unn, name)
    assert issubclass(ours, torchs)
    positional = [p for p in inspect.signature(torchs).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    mine = [p for p in inspect.signature(ours).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    if positional and name != "Softmax":  # dim must be given: torch's None is deprecated
        assert [(p.name, p.default) for p in mine] == [(p.name, p.default) for p in positional]
    module, x = made(name)
    for parameter in module.parameters():
        nn.init.uniform_(parameter)
    arguments = {"Linear": (96, 96), "LayerNorm": (96,), "RMSNorm": (96,), "GroupNorm": (4, 24), "BatchNorm2d": (24,)}
    if name in arguments:
        theirs = torchs(*arguments[name])
        theirs.load_state_dict(module.state_dict())
        module.load_state_dict(theirs.state_dict())
        expected = theirs(x)
        got = module(x)
        scale = 1.0 if name != "Linear" else 96**-0.5
        torch.testing.assert_close(got, expected * scale, rtol=1e-4, atol=1e-4)
        for buffer, other in zip(module.buffers(), theirs.buffers(), strict=True):
            torch.testing.assert_close(buffer, other)
        torch.testing.assert_close(module.eval()(x), theirs.eval()(x) * scale, rtol=1e-4, atol=1e-4)


@each("name", WITH_PARAMETERS)
def test_parameters_are_drawn_by_kind_also_after_the_meta_device(name):
    module, x = made(name, device="meta")
    assert all(p.is_meta for p in module.parameters())
    module = module.to_empty(device="cpu")
    for item in module.modules():
        if hasattr(item, "reset_parameters"):
            item.reset_parameters()
    kinds = kinds_of(module)
    assert set(kinds) == {n for n, _ in module.named_parameters()}
    for parameter_name, parameter in module.named_parameters():
        if kinds[parameter_name] in ("weight", "readout"):
            assert parameter.mean().item() == pytest.approx(0.0, abs=0.1)
            assert parameter.std().item() == pytest.approx(1.0, rel=0.1)
        else:
            assert torch.equal(parameter, torch.full_like(parameter, float(kinds[parameter_name] == "norm")))
    assert module(x).isfinite().all()


@every
def test_copies_and_compiled_ones_compute_the_same(name):
    module, x = made(name)
    twins = {"copy": copy.deepcopy(module), "pickle": pickle.loads(pickle.dumps(module))}
    results = {}
    for key, item in {"own": module, **twins, "compiled": module}.items():
        call = torch.compile(item, fullgraph=True, backend="aot_eager") if key == "compiled" else item
        leaf = x[:4].clone().requires_grad_()
        torch.manual_seed(3)
        y = call(leaf)
        (y * torch.arange(y.numel()).reshape(y.shape)).sum().backward()
        results[key] = (y.detach(), leaf.grad, kinds_of(item))
    for key, (y, gradient, kinds) in results.items():
        if name == "Dropout" and key == "compiled":
            continue  # other random numbers
        torch.testing.assert_close(y, results["own"][0])
        torch.testing.assert_close(gradient, results["own"][1])
        assert kinds == results["own"][2]
    torch.compiler.reset()


@every
@each("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_other_dtypes(name, dtype):
    module, x = made(name)
    module, x = module.to(dtype), x[:4].to(dtype).requires_grad_()
    y = module(x)
    y.sum().backward()
    assert y.dtype == x.grad.dtype == dtype
    assert all(p.grad.dtype == dtype and p.grad.isfinite().all() for p in module.parameters())


@every
def test_odd_batches(name):
    module, x = made(name)
    one = module(x[:1])
    assert one.isfinite().all()
    strided = x.repeat(1, *(2,) * (x.dim() - 1))[tuple(slice(0, size) for size in x.shape)]
    assert not strided.is_contiguous()
    torch.manual_seed(5)
    expected = module(x)
    torch.manual_seed(5)
    torch.testing.assert_close(module(strided), expected, rtol=1e-4, atol=1e-5)
    if name not in ("BatchNorm2d", "MaxPool2d"):  # torch itself takes no empty batch there
        empty = x[:0].requires_grad_()
        y = module(empty)
        y.sum().backward()
        assert empty.grad.shape == empty.shape and not y.numel()
        assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in module.parameters() if p.grad is not None)


@every
def test_nan_is_seen(name):
    module, x = made(name)
    x[..., 0] = torch.nan
    assert module(x).isnan().any()


@each("name", WITH_PARAMETERS)
def test_frozen_parameters_stay_and_let_gradients_through(name):
    module, x = made(name)
    module.requires_grad_(False)
    leaf = x[:4].requires_grad_()
    module(leaf).sum().backward()
    assert leaf.grad is not None and all(p.grad is None for p in module.parameters())


@each("name", ["Linear", "Conv2d", "MLP", "LayerNorm", "GELU"])
def test_a_checkpoint_recomputes_the_same(name):
    module, x = made(name)
    gradients = []
    for run in (module, lambda x: checkpoint(module, x, use_reentrant=False)):
        leaf = x.clone().requires_grad_()
        run(leaf).square().sum().backward()
        gradients.append(leaf.grad)
    assert torch.equal(*gradients)


class TestEmbedding:
    def test_rows_and_gradient_are_at_unit_scale(self):
        torch.manual_seed(0)
        table = unn.Embedding(200, 64)
        y = table(torch.randint(200, (4000,)))
        y.backward(torch.randn_like(y))
        assert rms(y) == pytest.approx(1.0, rel=0.05) and rms(table.weight.grad) == pytest.approx(1.0, rel=0.05)
        assert kinds_of(table) == {"weight": "embedding"}

    def test_options_are_torchs(self):
        table = unn.Embedding(10, 4, padding_idx=3, max_norm=1.0, sparse=True)
        y = table(torch.tensor([3, 5]))
        assert torch.equal(y[0], torch.zeros(4)) and y[1].norm() <= 1 + 1e-5
        y.sum().backward()
        assert table.weight.grad.is_sparse
        assert kinds_of(unn.Embedding.from_pretrained(torch.ones(3, 2), freeze=False)) == {"weight": "embedding"}

    def test_a_table_tied_to_a_readout_has_the_scale_of_each_use(self):
        torch.manual_seed(0)
        tokens = torch.randint(50, (64,))
        untied = nn.Sequential(unn.Embedding(50, 32), unn.LinearReadout(32, 50, bias=False))
        untied[1].weight.data.copy_(untied[0].weight.data)
        tied = copy.deepcopy(untied)
        tied[1].weight = tied[0].weight
        outputs = []
        for model in (tied, untied):
            outputs.append(model(tokens))
            unn.CrossEntropyLoss()(outputs[-1], tokens.flip(0)).backward()
        assert torch.equal(*outputs)
        torch.testing.assert_close(tied[0].weight.grad, untied[0].weight.grad + untied[1].weight.grad)


class TestLosses:
    def test_values_are_torchs_and_gradients_begin_at_unit_scale(self):
        torch.manual_seed(0)
        logits, classes = torch.zeros(2000, 20, requires_grad=True), torch.randint(20, (2000,))
        loss = unn.CrossEntropyLoss(label_smoothing=0.0, reduction="mean")(logits, classes)
        loss.backward()
        torch.testing.assert_close(loss, nn.CrossEntropyLoss()(logits, classes))
        assert rms(logits.grad) == pytest.approx(1.0, rel=1e-5)
        x, y = torch.randn(2000, 20, requires_grad=True), torch.randn(2000, 20)
        loss = unn.MSELoss()(x, y)
        loss.backward()
        torch.testing.assert_close(loss, nn.MSELoss()(x, y))
        assert rms(x.grad) == pytest.approx(1.0, rel=0.03)

    def test_arguments_reach_the_function(self):
        torch.manual_seed(0)
        logits, classes, weight = torch.randn(64, 5), torch.randint(5, (64,)), torch.rand(5)
        classes[:9] = 2
        settings = {"weight": weight, "ignore_index": 2, "reduction": "sum", "label_smoothing": 0.1}
        expected = nn.CrossEntropyLoss(**settings)(logits * 3, classes)
        torch.testing.assert_close(unn.CrossEntropyLoss(**settings, mult=3.0)(logits, classes), expected)
        assert unn.MSELoss(reduction="none")(logits, logits).shape == logits.shape


def test_own_factors_replace_the_ideal_ones():
    own = Factors(output=2.0, inputs=(3.0,), weight=5.0)
    layer, x = unn.Linear(4, 4, factors=own), torch.randn(7, 4, requires_grad=True)
    layer(x).sum().backward()
    torch.testing.assert_close(layer(x), 2 * nn.functional.linear(x, layer.weight, layer.bias))
    torch.testing.assert_close(x.grad, 3 * layer.weight.sum(0).expand(7, 4))
    torch.testing.assert_close(layer.bias.grad, torch.full((4,), 35.0))
    assert "factors=Factors(output=2.0" in repr(layer)


def test_the_chain_of_an_mlp_has_one_product_each_way():
    for sizes in ((32, 128, 32), (32, 64, 96)):
        mlp = unn.MLP(*sizes)
        up, down = mlp.linear1.factors, mlp.linear2.factors
        assert up.output * down.output == pytest.approx(up.inputs[0] * down.inputs[0], rel=1e-12)
    free = unn.MLP(32, 64, 96, constraint=None).linear2.factors
    assert free.output == 1 / 8 and free.inputs[0] == pytest.approx(96**-0.5)


@each(
    ("call", "message"),
    [
        (
            lambda: unn.Linear(2, 2, constraint="mean"),
            "Linear: expected constraint to be None, 'gmean'.* got constraint='mean'",
        ),
        (lambda: unn.Conv2d(2, 2, 1, constraint="mean"), "Conv2d: expected constraint"),
        (lambda: unn.GELU(mult=0.0), r"GELU: expected mult to be a number from 2\*\*-32 to 2\*\*32; got 0.0 \(float\)"),
        (
            lambda: unn.Softmax(-1, mult=True),
            r"Softmax: expected mult to be a number from 2\*\*-32 to 2\*\*32; got True \(bool\)",
        ),
        (lambda: unn.CrossEntropyLoss(mult=float("inf")), "CrossEntropyLoss: expected mult .* got inf"),
        (lambda: unn.ReLU(inplace=True), "ReLU: expected inplace=False, .* got inplace=True"),
        (lambda: unn.SiLU(True), "SiLU: expected inplace=False"),
        (lambda: unn.Dropout(0.1, True), "Dropout: expected inplace=False"),
        (lambda: unn.AvgPool2d(2, divisor_override=3), "AvgPool2d: expected divisor_override=None, .* got 3"),
        (lambda: unn.MaxPool2d(2, return_indices=True), "MaxPool2d: expected return_indices=False"),
        (
            lambda: unn.ConvTranspose2d(2, 2, 2, padding_mode="circular"),
            "expected padding_mode='zeros', .* got 'circular'",
        ),
        (lambda: unn.MLP(2, activation="swish"), "MLP: expected activation to be one of relu, gelu, .* got 'swish'"),
        (lambda: unn.MLP(2, activation=torch.sin), "MLP: expected activation"),
    ],
)
def test_refusals(call, message):
    with pytest.raises(ArgumentError, match=message):
        call()


def test_integers_and_complex_numbers_have_no_scale():
    with pytest.raises(UnsupportedTensorError, match="linear: expected a floating-point tensor"):
        unn.Linear(2, 2)(torch.ones(1, 2, dtype=torch.long))
