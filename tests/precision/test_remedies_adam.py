import math

import pytest
import torch
from torch import Tensor, nn

from plimsoll.errors import ArgumentError
from plimsoll.precision import MasterWeights
from plimsoll.precision.workarounds import guard_adam, largest_ratio
from tests.support.cases import each

RATIO = largest_ratio(0.9, 0.999)
EPSILON = 2.0**-24
modes = pytest.mark.parametrize("foreach", [False, True])


def half(values: list[float] | Tensor) -> nn.Parameter:
    return nn.Parameter(torch.as_tensor(values).half())


def step(optimizer: torch.optim.Optimizer, weight: nn.Parameter, gradient: Tensor) -> Tensor:
    """By how much the step changed each weight, in float64."""
    before = weight.detach().double()
    weight.grad = gradient.to(weight.dtype)
    optimizer.step()
    return weight.detach().double() - before


def test_the_bound_is_reached_by_no_sequence_of_gradients_and_nearly_by_one() -> None:
    # Gradients in the ratio (b1 / b2) ** k, k steps back, are those for which Cauchy and Schwarz hold with equality.
    age = torch.arange(4000, dtype=torch.float64)
    worst = (0.9 / 0.999) ** age
    torch.manual_seed(0)
    for gradients in (worst, torch.randn(4000).double(), torch.ones(4000).double()):
        first = 0.1 * (0.9**age * gradients).sum()
        second = 0.001 * (0.999**age * gradients.square()).sum()
        assert first / second.sqrt() <= RATIO * (1 + 1e-12)
    assert 0.1 * (0.9**age * worst).sum() / (0.001 * (0.999**age * worst**2).sum()).sqrt() > RATIO * 0.999
    assert pytest.approx(7.27, abs=0.005) == RATIO


@modes
def test_a_small_gradient_after_a_spell_of_none_does_not_explode(foreach: bool) -> None:
    lr, moved = 2.0**-6, {}
    for guarded in (False, True):
        weight = half([0.0] * 4)
        optimizer = torch.optim.Adam([weight], lr=lr, eps=EPSILON, foreach=foreach)
        guard = guard_adam(optimizer) if guarded else None
        for _ in range(50):
            step(optimizer, weight, torch.zeros(4))
        moved[guarded] = step(optimizer, weight, torch.tensor([1e-6, 1e-4, 1e-3, 1e-2])).abs()
        assert guard is None or guard.raised > 0
    # Their squares times 0.001 are zero: the first moment is divided by epsilon alone.
    assert moved[False].max() > 100 * RATIO * lr
    assert (moved[True] <= RATIO * lr * 1.01).all() and (moved[True][1:] > 0).all()


@modes
def test_the_very_first_step_is_guarded(foreach: bool) -> None:
    weight = half([0.0] * 2)
    optimizer = torch.optim.Adam([weight], lr=2.0**-6, eps=EPSILON, foreach=foreach)
    guard = guard_adam(optimizer)
    assert (step(optimizer, weight, torch.tensor([1e-3, 1e-4])).abs() <= RATIO * 2.0**-6).all()
    assert guard.raised == 2


@modes
@each("amsgrad", [False, True])
@each("decay", [0.0, 0.1])
def test_no_update_is_ever_larger_than_the_bound(foreach: bool, amsgrad: bool, decay: float) -> None:
    torch.manual_seed(1)
    lr = 2.0**-8
    weight = half(torch.zeros(500))
    optimizer = torch.optim.Adam([weight], lr=lr, eps=EPSILON, amsgrad=amsgrad, foreach=foreach, weight_decay=decay)
    guard_adam(optimizer)
    for number in range(60):
        idle = torch.rand(500) < 0.3
        size = torch.exp2(torch.empty(500).uniform_(-24, 3))
        gradient = torch.where(idle, 0, torch.randn(500) * size) if number % 20 > 6 else torch.zeros(500)
        change = step(optimizer, weight, gradient)
        assert weight.isfinite().all()
        assert (change.abs() <= RATIO * lr * 1.02 + weight.detach().double().abs() * 2.0**-10).all()


@each("maximize", [False, True])
@each("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_sound_moments_are_not_touched(kind: type[torch.optim.Adam], maximize: bool) -> None:
    torch.manual_seed(2)
    gradients = [torch.randn(200) * 8 for _ in range(100)]  # squares that float16 holds
    start, found = torch.randn(200), []
    for guarded in (False, True):
        weight = half(start)
        optimizer = kind([weight], lr=0.01, eps=1e-4, weight_decay=0.1, maximize=maximize)
        guard = guard_adam(optimizer) if guarded else None
        for gradient in gradients:
            step(optimizer, weight, gradient)
        assert guard is None or guard.raised == 0
        found.append([weight.detach(), *optimizer.state[weight].values()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@each("options", [{}, {"amsgrad": True}, {"fused": True}, {"capturable": False, "foreach": True}])
def test_the_state_that_the_guard_begins_is_adams_own(options: dict[str, bool]) -> None:
    found = []
    for guarded in (False, True):
        weight, norm = half([1.0, 2.0]), nn.Parameter(torch.ones(2))
        optimizer = torch.optim.Adam([weight, norm], eps=1e-3, **options)
        if guarded:
            guard_adam(optimizer)
        weight.grad, norm.grad = torch.full((2,), 8.0).half(), torch.ones(2)
        optimizer.step()
        found.append(optimizer.state[weight])
    assert list(found[0]) == list(found[1])
    for name, value in found[0].items():
        assert torch.equal(value, found[1][name]) and value.dtype == found[1][name].dtype


def test_an_epsilon_of_zero_is_refused_or_raised() -> None:
    weight = half([1.0])
    unguarded = torch.optim.Adam([half([1.0])], lr=0.1)
    assert step(unguarded, unguarded.param_groups[0]["params"][0], torch.zeros(1)).isnan().all()  # 0/0
    optimizer = torch.optim.Adam([weight], lr=0.1)
    with pytest.raises(
        ArgumentError, match=r"epsilon that torch.float16 can hold; got eps=1e-08, .* Use eps=5.96e-08 or"
    ):
        guard_adam(optimizer)
    assert optimizer.param_groups[0]["eps"] == 1e-8
    with pytest.warns(UserWarning, match="eps=1e-08 is zero in torch.float16; it is 5.96e-08 from now on"):
        guard_adam(optimizer, epsilon="raise")
    assert optimizer.param_groups[0]["eps"] == EPSILON
    assert step(optimizer, weight, torch.zeros(1)) == 0


def test_fused_steps_add_epsilon_in_float32() -> None:
    weight = half([1.0])
    optimizer = torch.optim.Adam([weight], lr=0.1, fused=True)
    guard_adam(optimizer)
    assert step(optimizer, weight, torch.zeros(1)) == 0


def test_a_second_moment_that_cannot_decay_in_bfloat16_is_told() -> None:
    weight = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    with pytest.warns(UserWarning, match=r"cannot decay in torch.bfloat16: 0.999 of it rounds back.*at most 0.996"):
        guard_adam(torch.optim.Adam([weight]))
    # It is so: of a second moment of 1, 0.999 rounds to 1, and 0.996 does not.
    one = torch.ones(1, dtype=torch.bfloat16)
    assert (one * 3 * 0.999 == one * 3).all() and (one * 3 * 0.996 < one * 3).all()
    guard_adam(torch.optim.Adam([weight], betas=(0.9, 0.995)))


def test_it_can_be_removed() -> None:
    weight = half([0.0])
    optimizer = torch.optim.Adam([weight], lr=0.01, eps=EPSILON)
    guard = guard_adam(optimizer)
    guard.remove()
    assert step(optimizer, weight, torch.full((1,), 1e-3)).abs() > RATIO * 0.01
    assert guard.raised == 0


def test_a_closure_is_refused() -> None:
    weight = half([0.0])
    optimizer = torch.optim.Adam([weight], eps=1e-3)
    guard_adam(optimizer)
    with pytest.raises(ArgumentError, match="expected a step without a closure"):
        optimizer.step(lambda: 0.0)
    with pytest.raises(ArgumentError, match="expected a step without a closure"):
        optimizer.step(closure=lambda: 0.0)
    optimizer.step()


@each(
    ("make", "options", "message"),
    [
        (lambda: torch.optim.SGD([half([1.0])], lr=0.1), {}, "expected torch.optim.Adam or AdamW; got SGD"),
        (
            lambda: MasterWeights(torch.optim.Adam([half([1.0])])),
            {},
            "got MasterWeights. Optimizers over float32 values",
        ),
        (lambda: torch.optim.Adam([nn.Parameter(torch.ones(1))]), {}, "expected 16-bit parameters; got none"),
        (
            lambda: torch.optim.Adam([half([1.0])]),
            {"epsilon": "drop"},
            "epsilon to be 'refuse' or 'raise'; got epsilon='drop'",
        ),
        (
            lambda: torch.optim.Adam([half([1.0])], betas=(0.95, 0.9), eps=1e-3),
            {},
            r"first squared is below the second, .*; got betas=\(0.95, 0.9\)",
        ),
    ],
)
def test_mistakes(make: object, options: dict[str, str], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        guard_adam(make(), **options)


def test_the_ratio_is_finite_for_betas_that_are_taken() -> None:
    assert math.isfinite(largest_ratio(0.9, 0.82))
