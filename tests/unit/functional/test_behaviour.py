"""What every function withstands: dtypes, odd shapes, NaN, compilers, transforms, and arguments that it must refuse."""

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint

import plimsoll.unit.functional as U  # noqa: N812  (as torch's F)
from plimsoll.errors import ArgumentError, UnsupportedTensorError
from tests.support.cases import each

CONSTRAINTS = ("gmean", "hmean", "amean", "to_output_scale", "to_grad_input_scale")
Function = Callable[..., Tensor]
# The function, the shape of what comes as a batch (its first dimension), and those of further tensors.
PARAMETERS: dict[str, tuple[Function, tuple[int, ...], list[tuple[int, ...]]]] = {
    "linear": (U.linear, (4, 6), [(5, 6), (5,)]),
    "linear_readout": (U.linear_readout, (4, 6), [(5, 6), (5,)]),
    "conv1d": (U.conv1d, (4, 3, 8), [(5, 3, 3), (5,)]),
    "conv2d": (lambda x, w, b, **k: U.conv2d(x, w, b, 2, 1, **k), (4, 4, 6, 6), [(6, 2, 3, 3), (6,)]),
    "conv_transpose2d": (lambda x, w, b, **k: U.conv_transpose2d(x, w, b, 2, **k), (4, 4, 5, 5), [(4, 3, 2, 2), (3,)]),
    "layer_norm": (lambda x, w, b: U.layer_norm(x, (6,), w, b), (4, 6), [(6,), (6,)]),
    "rms_norm": (lambda x, w: U.rms_norm(x, (6,), w), (4, 6), [(6,)]),
    "group_norm": (lambda x, w, b: U.group_norm(x, 2, w, b), (4, 6, 3), [(6,), (6,)]),
    "batch_norm": (
        lambda x, w, b: U.batch_norm(x, torch.zeros(6, dtype=x.dtype), torch.ones(6, dtype=x.dtype), w, b),
        (4, 6),
        [(6,), (6,)],
    ),
}
PARAMETERS["conv2d"] = (lambda x, w, b, **k: U.conv2d(x, w, b, 2, 1, groups=2, **k), (4, 4, 6, 6), [(6, 2, 3, 3), (6,)])
SHARED: dict[str, tuple[Function, tuple[int, ...], list[tuple[int, ...]]]] = {
    "matmul": (U.matmul, (4, 5, 6), [(6, 3)]),
    "gelu": (U.gelu, (4, 6), []),
    "gelu 2": (lambda x, **k: U.gelu(x, "tanh", mult=2.0, **k), (4, 6), []),
    "silu": (U.silu, (4, 6), []),
    "relu": (U.relu, (4, 6), []),
    "tanh": (U.tanh, (4, 6), []),
    "sigmoid": (U.sigmoid, (4, 6), []),
    "silu_glu": (lambda x, **k: U.silu_glu(*x.chunk(2, -1), **k), (4, 6), []),
    "softmax": (lambda x, **k: U.softmax(x, -1, **k), (4, 6), []),
    "log_softmax": (lambda x, **k: U.log_softmax(x, -1, mult=0.5, **k), (4, 6), []),
    "attention": (
        lambda x, **k: U.scaled_dot_product_attention(x, x + 1, x.cos(), is_causal=True, **k),
        (4, 2, 5, 6),
        [],
    ),
    "add": (lambda x, **k: U.add(x, x.cos(), x.sin(), weights=(1, 2, -1), **k), (4, 6), []),
    "dropout": (lambda x, **k: U.dropout(x, 0.5, False, **k), (4, 6), []),
    "avg_pool1d": (lambda x, **k: U.avg_pool1d(x, 2, **k), (4, 3, 6), []),
    "avg_pool2d": (lambda x, **k: U.avg_pool2d(x, 2, **k), (4, 3, 6, 6), []),
    "adaptive_avg_pool2d": (lambda x, **k: U.adaptive_avg_pool2d(x, (2, 3), **k), (4, 3, 6, 6), []),
    "max_pool1d": (lambda x, **k: U.max_pool1d(x, 2, **k), (4, 3, 6), []),
    "max_pool2d": (lambda x, **k: U.max_pool2d(x, 2, **k), (4, 3, 6, 6), []),
}
PLAIN: dict[str, tuple[Function, tuple[int, ...], list[tuple[int, ...]]]] = {
    "residual": (
        lambda x: U.residual_add(
            *[f(t) for f, t in zip((torch.sin, torch.cos), U.residual_split(x, 0.3), strict=True)], 0.3
        ),
        (4, 6),
        [],
    ),
}
LOSSES: dict[str, tuple[Function, tuple[int, ...], list[tuple[int, ...]]]] = {
    "cross_entropy": (lambda x: U.cross_entropy(x, torch.zeros(x.shape[0], dtype=torch.long)), (4, 6), []),
    "nll_loss": (lambda x: U.nll_loss(x, torch.zeros(x.shape[0], dtype=torch.long)), (4, 6), []),
    "binary": (lambda x: U.binary_cross_entropy_with_logits(x, torch.ones_like(x), mult=2.0), (4, 6), []),
    "mse_loss": (lambda x: U.mse_loss(x, torch.zeros_like(x)), (4, 6), []),
}
FUNCTIONS = PARAMETERS | SHARED | PLAIN
ALL = FUNCTIONS | LOSSES


def tensors(name: str, dtype: torch.dtype = torch.float32, batch: int = 4) -> list[Tensor]:
    _, shape, more = ALL[name]
    return [torch.randn(each, dtype=dtype, requires_grad=True) for each in [(batch, *shape[1:]), *more]]


def gradients(function: Function, given: list[Tensor]) -> tuple[Tensor, ...]:
    out = function(*given)
    return (out.detach(), *torch.autograd.grad(out, given, torch.full_like(out, 0.5)))


@each("name", ALL)
@each("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtypes_stay_and_values_are_those_of_wide_ones(name: str, dtype: torch.dtype) -> None:
    function, given = ALL[name][0], tensors(name, dtype)
    wide = gradients(function, [x.detach().double().requires_grad_() for x in given])
    for found, expected in zip(gradients(function, given), wide, strict=True):
        assert found.dtype == dtype
        close = 100 * torch.finfo(dtype).eps
        torch.testing.assert_close(found.double(), expected, rtol=close, atol=close * (1 + expected.abs().max().item()))


@each("name", FUNCTIONS)
@each("batch", [0, 1])
def test_batches_of_none_and_of_one(name: str, batch: int) -> None:
    if batch == 0 and name == "batch_norm":
        pytest.skip("torch's own batch norm has no batch of none")
    function, given = ALL[name][0], tensors(name, batch=batch)
    out, *found = gradients(function, given)
    assert out.shape[0] == batch and all(g.isfinite().all() for g in found)
    assert all(g.abs().sum() > 0 or batch == 0 for g in found if g.numel() and name != "relu")


@each("name", LOSSES)
def test_losses_of_no_rows_are_torchs_nan(name: str) -> None:
    (x,) = tensors(name, batch=0)
    loss = LOSSES[name][0](x)
    loss.backward()
    assert loss.isnan() and x.grad.shape == x.shape


@each("name", ALL)
def test_strides_do_not_matter(name: str) -> None:
    function, (x, *rest) = ALL[name][0], tensors(name)
    strided = torch.randn(*x.shape[::-1]).permute(*range(x.dim() - 1, -1, -1)).copy_(x.detach()).requires_grad_()
    assert x.dim() == 1 or not strided.is_contiguous()
    for found, expected in zip(gradients(function, [strided, *rest]), gradients(function, [x, *rest]), strict=True):
        torch.testing.assert_close(found, expected)


@each("name", ALL)
def test_nan_is_seen(name: str) -> None:
    function, given = ALL[name][0], tensors(name)
    with torch.no_grad():
        given[0].view(-1)[0] = float("nan")
    assert function(*given).isnan().any()


@each("constraint", CONSTRAINTS)
@each("name", SHARED)
def test_with_a_constraint_the_gradient_is_exact(name: str, constraint: str) -> None:
    function, given = SHARED[name][0], tensors(name, torch.float64, batch=2)
    assert gradcheck(lambda *x: function(*x, constraint=constraint), given)


@each("name", PARAMETERS)
def test_with_a_constraint_the_inputs_gradient_is_exact_and_the_parameters_is_in_proportion(name: str) -> None:
    function, (x, *rest) = PARAMETERS[name][0], tensors(name, torch.float64, batch=2)
    shared = {} if "norm" in name else {"constraint": "gmean"}
    assert gradcheck(lambda x: function(x, *[w.detach() for w in rest], **shared), [x])
    for w in rest:
        out = function(x, *rest, **shared)
        (found,) = torch.autograd.grad(out.square().sum(), w, retain_graph=True)
        true = torch.stack([slope(lambda: function(x, *rest, **shared).square().sum(), w, i) for i in range(w.numel())])
        ratio = found.flatten() / true
        torch.testing.assert_close(ratio, ratio.mean().expand_as(ratio), rtol=1e-4, atol=1e-6)


def slope(value: Callable[[], Tensor], w: Tensor, i: int, step: float = 1e-5) -> Tensor:
    with torch.no_grad():
        kept, ends = w.view(-1)[i].item(), []
        for at in (kept + step, kept - step):
            w.view(-1)[i] = at
            ends.append(value())
        w.view(-1)[i] = kept
    return (ends[0] - ends[1]) / (2 * step)


def test_a_residual_branch_has_an_exact_gradient_and_unit_gradients_inside() -> None:
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    assert gradcheck(PLAIN["residual"][0], [x])
    branch, skip = U.residual_split(x, 0.01)
    seen: list[Tensor] = []
    branch = branch * 1
    branch.register_hook(seen.append)
    U.residual_add(branch, skip, 0.01).backward(torch.ones(3, 5, dtype=torch.float64))
    assert seen[0].eq(1).all() and torch.allclose(x.grad, torch.full_like(x, 0.01**0.5 * 0.01**0 * 1.0 + 0.99**0.5))


@each("name", ["gelu", "softmax", "add", "silu_glu"])
def test_twice_differentiable(name: str) -> None:
    function, given = SHARED[name][0], tensors(name, torch.float64, batch=2)
    assert gradgradcheck(lambda *x: function(*x, constraint="gmean"), given)


@each("name", FUNCTIONS)
def test_compiled_without_a_break_and_once_for_all_batches(name: str) -> None:
    torch._dynamo.reset()
    count = CompileCounterWithBackend("aot_eager")
    function = ALL[name][0]
    compiled = torch.compile(function, fullgraph=True, backend=count)
    for batch in (4, 7, 11):
        given = tensors(name, batch=batch)
        torch._dynamo.mark_dynamic(given[0], 0)
        for found, expected in zip(gradients(compiled, given), gradients(function, given), strict=True):
            torch.testing.assert_close(found, expected)
    assert count.frame_count == 1


@each("name", LOSSES)
def test_losses_compile(name: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(LOSSES[name][0], fullgraph=True, backend="aot_eager")
    given = tensors(name)
    for found, expected in zip(gradients(compiled, given), gradients(LOSSES[name][0], given), strict=True):
        torch.testing.assert_close(found, expected)


@each("name", FUNCTIONS)
def test_vmap(name: str) -> None:
    if name in ("batch_norm", "max_pool1d", "max_pool2d", "attention"):
        pytest.skip("torch's own function has no rule, or warns, under vmap")
    function, given = ALL[name][0], [x.detach() for x in tensors(name)]
    several = torch.stack([given[0], given[0] + 1, -given[0]])
    mapped = torch.vmap(lambda x: function(x, *given[1:]))(several)
    torch.testing.assert_close(mapped, torch.stack([function(x, *given[1:]) for x in several]))


@each("name", ["linear", "attention", "residual"])
def test_checkpoint(name: str) -> None:
    function, given = ALL[name][0], tensors(name)
    again = gradients(lambda *x: checkpoint(function, *x, use_reentrant=False), given)
    for found, expected in zip(again, gradients(function, given), strict=True):
        torch.testing.assert_close(found, expected)


def test_frozen_parameters_have_no_gradient() -> None:
    x, w, b = tensors("linear")
    w.requires_grad_(False)
    U.linear(x, w, b).sum().backward()
    assert w.grad is None and x.grad is not None and b.grad is not None


def test_a_long_product_does_not_overflow_in_fp16() -> None:
    a, b = torch.randn(4, 65_536).half(), torch.randn(4, 65_536).half()
    out = U.linear(a, b)
    assert out.isfinite().all() and out.abs().max() < 30
    logits = torch.randn(20_000, 10).half().requires_grad_()
    loss = U.cross_entropy(logits, torch.zeros(20_000, dtype=torch.long))  # the losses' sum is above 65,504
    loss.backward()
    expected = torch.nn.functional.cross_entropy(logits.float(), torch.zeros(20_000, dtype=torch.long))
    torch.testing.assert_close(loss.float(), expected, rtol=2e-3, atol=0)
    assert (logits.grad == 0).float().mean() < 1e-3


@each("reduction", ["mean", "sum", "none"])
@each(
    "arguments",
    [
        {},
        {"ignore_index": 1},
        {"label_smoothing": 0.2},
        {"weight": torch.tensor([1.0, 2.0, 0.5])},
        {"weight": torch.tensor([1.0, 2.0, 0.5]), "ignore_index": 2, "label_smoothing": 0.1},
    ],
)
@each("extra", [(), (4,)])
def test_a_loss_has_torchs_value(reduction: str, arguments: dict[str, Any], extra: tuple[int, ...]) -> None:
    x, target = torch.randn(7, 3, *extra), torch.randint(3, (7, *extra))
    expected = torch.nn.functional.cross_entropy(2 * x, target, reduction=reduction, **arguments)
    torch.testing.assert_close(U.cross_entropy(x, target, reduction=reduction, mult=2.0, **arguments), expected)
    if "label_smoothing" not in arguments:
        log = x.log_softmax(1)
        expected = torch.nn.functional.nll_loss(log, target, reduction=reduction, **arguments)
        torch.testing.assert_close(U.nll_loss(log, target, reduction=reduction, **arguments), expected)


def test_a_weighted_loss_in_fp64_is_torchs_in_fp64() -> None:
    x, target = torch.randn(7, 3, dtype=torch.float64).log_softmax(1), torch.tensor([1, 0, 2, 0, 2, 1, 0])
    weight = torch.tensor([0.1, 0.7, 0.3], dtype=torch.float64)  # none of them is a value of FP32, nor is their sum
    for name in ("cross_entropy", "nll_loss"):
        own, torchs = (getattr(functions, name)(x, target, weight) for functions in (U, torch.nn.functional))
        torch.testing.assert_close(own, torchs, rtol=1e-12, atol=0)


def test_sizes_may_be_those_that_torch_takes() -> None:
    x = torch.randn(2, 3, 6, 8)
    assert torch.equal(U.avg_pool2d(x, np.int64(2)), U.avg_pool2d(x, 2))
    kernel = torch.randn(4, 3, 3, 3)
    assert torch.equal(U.conv2d(x, kernel, stride=np.int64(2)), U.conv2d(x, kernel, stride=2))
    assert torch.equal(U.adaptive_avg_pool2d(x, (None, 4)), U.adaptive_avg_pool2d(x, (6, 4)))


def test_a_loss_of_soft_targets_has_torchs_value() -> None:
    x, target = torch.randn(7, 3), torch.rand(7, 3)
    torch.testing.assert_close(U.cross_entropy(x, target), torch.nn.functional.cross_entropy(x, target))
    torch.testing.assert_close(U.mse_loss(x, target), torch.nn.functional.mse_loss(x, target))
    expected = torch.nn.functional.binary_cross_entropy_with_logits(x, target, pos_weight=torch.tensor([1.0, 2, 3]))
    torch.testing.assert_close(
        U.binary_cross_entropy_with_logits(x, target, pos_weight=torch.tensor([1.0, 2, 3])), expected
    )


def test_given_factors_stand_in_for_the_ideal_ones() -> None:
    x, w, b = tensors("linear")
    given = U.Factors(output=2.0, inputs=(3.0,), weight=5.0)
    out, of_x, of_w, of_b = gradients(lambda *t: U.linear(*t, factors=given), [x, w, b])
    plain = gradients(torch.nn.functional.linear, [x, w, b])
    for found, expected, factor in zip((out, of_x, of_w, of_b), plain, (2, 3, 5, 5), strict=True):
        torch.testing.assert_close(found, expected * factor)
    for name in ("conv1d", "conv_transpose2d"):
        out, *_ = gradients(lambda *t, f=PARAMETERS[name][0]: f(*t, factors=given), tensors(name))
        assert out.isfinite().all()
    found = U.matmul(x, w.T, factors=U.Factors(output=2.0, inputs=(1.0, 1.0)))
    torch.testing.assert_close(found, 2 * x @ w.T)
    q = torch.randn(2, 5, 4)
    found = U.scaled_dot_product_attention(q, q, q, factors=U.Factors(output=2.0, inputs=(1.0, 1.0, 1.0)))
    torch.testing.assert_close(found, 2 * torch.nn.functional.scaled_dot_product_attention(q, q, q))


@each("name", ALL)
@each("dtype", [torch.int32, torch.complex64])
def test_other_kinds_of_tensors_are_refused(name: str, dtype: torch.dtype) -> None:
    function, shape, more = ALL[name]
    with pytest.raises((UnsupportedTensorError), match=r"expected a floating-point tensor; got"):
        function(torch.ones(shape, dtype=dtype), *[torch.ones(each) for each in more])


@each("name", [*SHARED, "linear", "conv1d", "conv2d", "conv_transpose2d", "linear_readout"])
def test_other_constraints_are_refused(name: str) -> None:
    with pytest.raises(ArgumentError, match=r"\w+: expected constraint to be None, 'gmean', .*; got constraint='mean'"):
        ALL[name][0](*tensors(name), constraint="mean")


X = torch.ones(2, 4)
IMAGE, KERNEL = torch.ones(2, 3, 8, 8), torch.ones(4, 3, 3, 3)
REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: U.gelu(X, "erf"), "gelu: expected approximate to be 'none' or 'tanh'; got approximate='erf'"),
    (lambda: U.gelu(X, mult=0.0), "gelu: expected mult to be a number from 2**-32 to 2**32; got 0.0 (float)"),
    (lambda: U.silu(X, mult=float("inf")), "silu: expected mult to be a number from 2**-32 to 2**32; got inf"),
    (lambda: U.tanh(X, mult=1e300), "tanh: expected mult to be a number from 2**-32 to 2**32; got 1e+300 (float)"),
    (lambda: U.tanh(X, mult=1e-300), "tanh: expected mult to be a number from 2**-32 to 2**32; got 1e-300"),
    (
        lambda: U.conv1d(torch.ones(5), KERNEL[0]),
        "conv1d: expected an input of 2 or 3 dimensions, and a weight of 3; got",
    ),
    (lambda: U.conv2d(IMAGE, torch.ones(4)), "and a weight of 4; got shapes (2, 3, 8, 8) and (4,)"),
    (lambda: U.conv2d(IMAGE, KERNEL, groups=0), "conv2d: expected groups to be a whole number above 0; got groups=0"),
    (lambda: U.conv2d(IMAGE, KERNEL, stride=0), "conv2d: expected stride to be one or 2 whole numbers above 0"),
    (lambda: U.conv2d(IMAGE, KERNEL, dilation=(1, 1, 1)), "conv2d: expected dilation to be one or 2 whole numbers"),
    (
        lambda: U.conv2d(IMAGE, KERNEL, padding=(1, 1, 1)),
        "conv2d: expected padding to be one number or 2; got (1, 1, 1)",
    ),
    (lambda: U.conv_transpose2d(IMAGE, KERNEL, groups=0), "conv_transpose2d: expected groups to be a whole number"),
    (lambda: U.avg_pool2d(IMAGE, "a"), "avg_pool2d: expected kernel_size to be one or 2 whole numbers above 0"),
    (lambda: U.max_pool2d(IMAGE, 2, (1, 2, 3)), "above 0; got stride=(1, 2, 3). Use 2, for example."),
    (lambda: U.adaptive_avg_pool2d(IMAGE, (2, 2, 2)), "adaptive_avg_pool2d: expected output_size to be one or 2 whole"),
    (
        lambda: U.softmax(X, -1, mult=True),
        "softmax: expected mult to be a number from 2**-32 to 2**32; got True (bool)",
    ),
    (
        lambda: U.cross_entropy(X, X, mult=-1),
        "cross_entropy: expected mult to be a number from 2**-32 to 2**32; got -1 (int)",
    ),
    (
        lambda: U.cross_entropy(X, X, reduction="avg"),
        "cross_entropy: expected reduction to be 'mean', 'sum' or 'none'; got reduction='avg'",
    ),
    (lambda: U.mse_loss(X, X[0]), "mse_loss: expected input and target of one shape; got (2, 4) and (4,)"),
    (
        lambda: U.scaled_dot_product_attention(X, X, X, scale=0.0),
        "scaled_dot_product_attention: expected scale to be a finite number other than 0; got 0.0 (float)",
    ),
    (lambda: U.scaled_dot_product_attention(X, X, X, scale=math.nan), "other than 0; got nan (float)"),
    (lambda: U.adaptive_avg_pool2d(torch.ones(1, 4, 4), 0), "to divide the input's 4 x 4; got 0 x 0"),
    (lambda: U.dropout(X, 1.5), "dropout: expected the share to drop between 0 and 1; got 1.5"),
    (
        lambda: U.residual_split(X, 1.0),
        "residual_split: expected tau between 0 and 1, the branch's share of the variance; got 1.0",
    ),
    (
        lambda: U.residual_add(X, X, "a"),
        "residual_add: expected tau between 0 and 1, the branch's share of the variance; got 'a'",
    ),
    (
        lambda: U.add(X, X, weights=(1.0,)),
        "add: expected 2 finite weights, one for each operand, none of them zero; got (1.0,)",
    ),
    (lambda: U.add(X, X, weights=(1.0, 0)), "add: expected 2 finite weights"),
    (lambda: U.add(1.0, 2.0), "add: expected a tensor among the operands; got (1.0, 2.0)"),
    (lambda: U.dropout(X, 0.5, True, True), "dropout: expected inplace=False, since the result has another scale"),
    (lambda: U.silu_glu(X, X[0]), "silu_glu: expected input and gate of one shape; got (2, 4) and (4,)"),
    (lambda: U.avg_pool2d(X[None], 2, divisor_override=3), "avg_pool2d: expected no divisor_override"),
    (
        lambda: U.adaptive_avg_pool2d(torch.ones(1, 5, 5), 2),
        "adaptive_avg_pool2d: expected output_size to divide the input's 5 x 5; got 2 x 2",
    ),
    (lambda: U.linear(X, X, factors=2.0), "linear: expected factors to be Factors with 1 input(s); got 2.0"),
    (
        lambda: U.matmul(X, X.T, factors=U.Factors(output=1.0, inputs=(1.0,))),
        "matmul: expected factors to be Factors with 2 input(s)",
    ),
]


def test_a_refused_inplace_leaves_the_input_alone() -> None:
    x = torch.ones(100)
    with pytest.raises(ArgumentError):
        U.dropout(x, 0.5, inplace=True)
    assert torch.equal(x, torch.ones(100))


@each("shift", [3.0, 3, torch.tensor(3.0, dtype=torch.float64)], ids=["float", "int", "0-d tensor"])
def test_an_operand_of_one_value_moves_a_sum_and_does_not_spread_it(shift: float | Tensor) -> None:
    x, y = (torch.randn(64, 32, dtype=torch.float64) for _ in range(2))
    for constraint in (None, "gmean", "to_output_scale"):
        assert torch.allclose(U.add(x, shift, constraint=constraint), x + 3)
        assert torch.allclose(U.add(shift, x, constraint=constraint), x + 3)
        scale = U.add(x, y, constraint=constraint) / (x + y)
        assert torch.allclose(U.add(x, shift, y, constraint=constraint), (x + y + 3) * scale)
    weighted = U.add(x, shift, y, weights=(3, 2, -4), constraint=None)
    assert torch.allclose(weighted, (3 * x - 4 * y + 6) / 5)


def test_gradients_beside_an_operand_of_one_value() -> None:
    x = torch.randn(64, 32, requires_grad=True)
    bias = torch.tensor(0.5, requires_grad=True)
    gradient = torch.randn(64, 32)
    for constraint, factor in (("gmean", 1.0), (None, (64 * 32) ** -0.5)):
        x.grad = bias.grad = None
        U.add(x, bias, constraint=constraint).backward(gradient)
        assert torch.equal(x.grad, gradient)
        torch.testing.assert_close(bias.grad, gradient.sum() * factor)


def test_operands_of_one_value_alone_are_terms() -> None:
    a, b = torch.tensor(3.0), torch.tensor(5.0)
    torch.testing.assert_close(U.add(a, b, constraint=None), torch.tensor(8 / 2**0.5))
    torch.testing.assert_close(U.add(a, 5.0), torch.tensor(8.0))


@each("other", [True, "1", 1j])
def test_what_is_no_number_is_not_added(other: object) -> None:
    with pytest.raises(UnsupportedTensorError, match="add: expected a floating-point tensor; got operand 1="):
        U.add(X, other)  # type: ignore[arg-type]


@each(("call", "reported"), REFUSED)
def test_arguments_that_are_refused(call: Callable[[], object], reported: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(reported)):
        call()


def test_a_sequence_may_be_of_any_length() -> None:
    def block(x: Tensor, w: Tensor) -> Tensor:
        branch, skip = U.residual_split(x, 0.3)
        heads = U.linear(branch, w, constraint="to_output_scale").unflatten(-1, (3, 8)).transpose(-2, -3)
        mixed = U.scaled_dot_product_attention(heads, heads.cos(), heads.sin(), is_causal=True, mult=1.5)
        mixed = U.softmax(U.gelu(mixed.transpose(-2, -3).flatten(-2), mult=1.25), -2, mult=0.5)
        return U.residual_add(mixed, skip, 0.3)

    torch._dynamo.reset()
    count = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(block, fullgraph=True, backend=count)
    w = torch.randn(24, 24, requires_grad=True)
    for length in (5, 9, 31):
        x = torch.randn(2, length, 24, requires_grad=True)
        torch._dynamo.mark_dynamic(x, 1)
        for found, expected in zip(gradients(compiled, [x, w]), gradients(block, [x, w]), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert count.frame_count == 1


def test_inductor_computes_the_same() -> None:
    torch._dynamo.reset()
    function = SHARED["gelu"][0]
    given = tensors("gelu")
    compiled = torch.compile(lambda x: function(x, constraint=None), fullgraph=True)
    for found, expected in zip(
        gradients(compiled, given), gradients(lambda x: function(x, constraint=None), given), strict=True
    ):
        torch.testing.assert_close(found, expected)


def test_a_multiplier_may_be_a_symbol() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, m: U.gelu(x, mult=m), fullgraph=True, dynamic=True, backend="aot_eager")
    x = torch.randn(3, 5)
    for mult in (1.0, 0.5, 2.0):
        torch.testing.assert_close(compiled(x, mult), U.gelu(x, mult=mult))


@each("pool", [U.avg_pool2d, U.max_pool2d])
def test_an_empty_stride_of_a_pool_is_its_window_as_in_torch(pool: Callable[..., torch.Tensor]) -> None:
    expected = pool(IMAGE, 2, constraint="to_grad_input_scale")
    for stride in ((), []):
        assert torch.equal(pool(IMAGE, 2, stride, constraint="to_grad_input_scale"), expected)
