"""Every function gives unit scale forward and backward, within a bound that is computed from what was measured.

The bound is Student's: so many standard errors (`plimsoll_lab.experiments.unit_factors`) that one sound value of a
million exceeds it. What a formula leaves out is stated beside its case, as a share.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

import plimsoll.unit.functional as U  # noqa: N812  (as torch's F)
from plimsoll.unit import formulas
from plimsoll.unit.formulas import moments
from plimsoll_lab.experiments.unit_factors import Scale, measure_scales
from tests.support.cases import each

RUNS = 24
BOUND = float(stats.t.ppf(1 - 1e-6 / 2, RUNS - 1))
Shapes = list[tuple[int, ...]]
CASES: list[Any] = []


def case(name: str, function: Callable[..., Tensor], *shapes: tuple[int, ...], **known: Any) -> None:
    CASES.append(pytest.param(function, list(shapes), known, id=name))


def assert_unit(scale: Scale, known: float = 1.0, left_out: float = 0.0) -> None:
    # A norm's output does not vary at all: there float32 and the norm's epsilon are what is left.
    bound = BOUND * scale.error + (left_out + 1e-4) * known
    assert bound < 0.15 * known, "a bound so wide shows nothing"
    assert abs(scale.value - known) <= bound, f"{scale.value} is not {known} within {bound}"


def one(parameter: Tensor) -> Tensor:
    """Ones whose gradient is asked for."""
    return 1 + parameter - parameter.detach()


def labels(x: Tensor) -> Tensor:
    return torch.randint(x.shape[1], (x.shape[0],))


for b, m, n in ((64, 48, 96), (7, 129, 33), (1, 256, 64)):
    case(f"linear {b} {m} {n}", lambda x, w: U.linear(x, w, constraint=None), (b, m), (n, m))
case(
    "linear bias",
    lambda x, w, b: U.linear(x, w, b, constraint=None),
    (3, 20, 64),
    (128, 64),
    (128,),
    output=(65 / 64) ** 0.5,
)
case("linear readout", lambda x, w: U.linear_readout(x, w) * 8, (64, 64), (32, 64), inputs=(8, 8))
case("matmul", lambda a, b: U.matmul(a, b, constraint=None), (4, 3, 16, 32), (4, 3, 32, 24))
case("matmul broadcast", lambda a, b: U.matmul(a, b, constraint=None), (6, 1, 16, 32), (3, 32, 24))
case("matmul vector", lambda a, b: U.matmul(a, b, constraint=None), (50, 40, 128), (128,))
case(
    "matmul dot",
    lambda a, b: torch.stack([U.matmul(x, y, constraint=None) for x, y in zip(a, b, strict=True)]),
    (100, 16),
    (100, 16),
)
case(
    "conv1d",
    lambda x, w, b: U.conv1d(x, w, b * 0 + b - b.detach(), constraint=None),
    (4, 8, 128),
    (64, 8, 5),
    (64,),
    left_out=(0, 0.02, 0, 0),
)
case(
    "conv2d",
    lambda x, w: U.conv2d(x, w, padding=1, constraint=None),
    (4, 8, 32, 32),
    (16, 8, 3, 3),
    output=(94 / 96),
    inputs=(94 / 96, 94 / 96),
)
case(
    "conv2d groups stride",
    lambda x, w: U.conv2d(x, w, stride=2, groups=4, constraint=None),
    (4, 16, 41, 41),
    (32, 4, 3, 3),
    left_out=(0, 0.03, 0),
)
case(
    "conv_transpose2d",
    lambda x, w: U.conv_transpose2d(x, w, stride=2, constraint=None),
    (4, 16, 20, 20),
    (16, 8, 4, 4),
    left_out=(0.05, 0, 0),
)
for mult in (0.25, 1.0, 3.0):
    for f in (U.gelu, U.silu, U.tanh, U.sigmoid):
        case(f"{f.__name__} {mult}", lambda x, f=f, mult=mult: f(x, mult=mult, constraint=None), (64, 64))
    case(f"gelu tanh {mult}", lambda x, mult=mult: U.gelu(x, "tanh", mult=mult, constraint=None), (64, 64))
    case(f"silu_glu {mult}", lambda x, g, mult=mult: U.silu_glu(x, g, mult=mult, constraint=None), (64, 64), (64, 64))
    for n in (2, 17, 256):
        case(
            f"softmax {n} {mult}",
            lambda x, m=mult: U.softmax(x, -1, mult=m, constraint=None),
            (10240 // n, n),
            left_out=(0.003, 0.003),
        )
        case(
            f"log_softmax {n} {mult}",
            lambda x, m=mult: U.log_softmax(x, -1, mult=m, constraint=None),
            (10240 // n, n),
            left_out=(0.003, 0.003),
        )
case("softmax first dim", lambda x: U.softmax(x, 0, constraint=None), (50, 100))
case("relu", lambda x: U.relu(x, constraint=None), (64, 64))
for d, s, causal, mult, short in (
    (8, 16, False, 1.0, 0.02),
    (64, 32, False, 1.0, 0.01),
    (64, 128, False, 1.0, 0.01),
    (16, 64, True, 1.0, 0.01),
    (64, 128, True, 1.0, 0.01),
    (32, 48, True, 2.0, 0.02),
    (32, 48, False, 0.5, 0.01),
):
    case(
        f"attention {d} {s} {causal} {mult}",
        lambda q, k, v, c=causal, m=mult: U.scaled_dot_product_attention(q, k, v, is_causal=c, mult=m, constraint=None),
        *[(2, 4, s, d)] * 3,
        left_out=(0.003, short, 0.003, 0.003),
    )
case(
    "attention across",
    lambda q, k, v: U.scaled_dot_product_attention(q, k, v, dropout_p=0.2, constraint=None),
    (4, 4, 24, 32),
    (4, 4, 96, 32),
    (4, 4, 96, 48),
    left_out=(0.003, 0.02, 0.01, 0.003),
)
case(
    "attention groups",
    lambda q, k, v: U.scaled_dot_product_attention(q, k, v, enable_gqa=True, constraint=None),
    (4, 4, 64, 32),
    (4, 2, 64, 32),
    (4, 2, 64, 32),
    left_out=(0.003, 0.01, 0.003, 0.003),
)
case(
    "attention own scale",
    lambda q, k, v: U.scaled_dot_product_attention(q, k, v, scale=0.25, constraint=None),
    *[(4, 4, 64, 32)] * 3,
    left_out=(0.003, 0.02, 0.01, 0.003),
)
case(
    "layer_norm",
    lambda x, w, b: U.layer_norm(x, (96,), one(w), one(b) - 1),
    (400, 96),
    (96,),
    (96,),
    left_out=(0, 0.02, 0.01, 0),
)
case("rms_norm", lambda x, w: U.rms_norm(x, (96,), one(w)), (400, 96), (96,), left_out=(0, 0.02, 0.01))
case(
    "group_norm",
    lambda x, w, b: U.group_norm(x, 4, one(w), one(b) - 1),
    (4, 96, 8, 8),
    (96,),
    (96,),
    left_out=(0, 0.01, 0.01, 0),
)
case(
    "batch_norm",
    lambda x, w, b: U.batch_norm(x, None, None, one(w), one(b) - 1, True),
    (8, 96, 8, 8),
    (96,),
    (96,),
    left_out=(0, 0.01, 0.01, 0),
)
for p in (0.0, 0.1, 0.7):
    case(f"dropout {p}", lambda x, p=p: U.dropout(x, p), (64, 64))
case("embedding", lambda w: U.embedding(torch.randint(0, 37, (20, 20)), w), (200, 32))
case("add", lambda a, b: U.add(a, b, constraint=None), (64, 64), (64, 64))
case(
    "add weights",
    lambda *t: U.add(*t, weights=(1, -2, 3), constraint=None),
    (64, 64),
    (64, 64),
    (1, 64),
    left_out=(0.02, 0, 0, 0),
)
case("avg_pool1d", lambda x: U.avg_pool1d(x, 4, constraint=None), (8, 8, 128))
case("avg_pool2d", lambda x: U.avg_pool2d(x, 3, 2, constraint=None), (4, 8, 33, 33), left_out=(0, 0.04))
case("adaptive_avg_pool2d", lambda x: U.adaptive_avg_pool2d(x, 2, constraint=None), (32, 32, 8, 8))
case("max_pool1d", lambda x: U.max_pool1d(x, 3, constraint=None), (8, 8, 126))
case("max_pool2d", lambda x: U.max_pool2d(x, 2, constraint=None), (4, 8, 32, 32))


@each(("function", "shapes", "known"), CASES)
def test_unit_scale_forward_and_backward(
    function: Callable[..., Tensor], shapes: Shapes, known: dict[str, Any]
) -> None:
    left_out = known.get("left_out", (0.0,) * (1 + len(shapes)))
    found = measure_scales(function, shapes, runs=RUNS)
    assert_unit(found.output, known.get("output", 1.0), left_out[0])
    for scale, expected, short in zip(
        found.inputs, known.get("inputs", (1.0,) * len(shapes)), left_out[1:], strict=True
    ):
        assert_unit(scale, expected, short)


@each("classes", [2, 5, 64])
@each("mult", [1.0, 2.0])
@each("reduction", ["mean", "sum"])
def test_a_loss_of_unit_logits_has_the_gradient_that_integration_says(
    classes: int, mult: float, reduction: str
) -> None:
    found = measure_scales(
        lambda x: U.cross_entropy(x, labels(x), mult=mult, reduction=reduction), [(4000 // classes, classes)], runs=RUNS
    )
    squares = moments(classes, mult).squares
    assert_unit(found.inputs[0], ((1 - 2 / classes + squares) / (1 - 1 / classes)) ** 0.5)


@each("classes", [2, 10, 1000])
def test_the_gradient_of_equal_logits_is_exactly_at_unit_scale(classes: int) -> None:
    logits = torch.zeros(100, classes, dtype=torch.float64, requires_grad=True)
    U.cross_entropy(logits, torch.zeros(100, dtype=torch.long)).backward()
    torch.testing.assert_close(logits.grad.square().mean(), torch.ones((), dtype=torch.float64), rtol=1e-9, atol=0)
    likely = torch.full((100, classes), -1.0, requires_grad=True)
    U.nll_loss(likely, torch.zeros(100, dtype=torch.long)).backward()
    assert likely.grad.square().mean().item() == pytest.approx(1, rel=1e-5)
    assert formulas.cross_entropy(classes) == pytest.approx(classes / (classes - 1) ** 0.5)


def test_other_losses() -> None:
    found = measure_scales(U.mse_loss, [(60, 60), (60, 60)], runs=RUNS)
    assert_unit(found.inputs[0])
    assert_unit(found.inputs[1])
    logits = torch.zeros(50, 3, requires_grad=True)
    U.binary_cross_entropy_with_logits(logits, torch.randint(2, (50, 3)).float()).backward()
    assert logits.grad.abs().eq(1).all()
