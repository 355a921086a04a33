"""`guard_adam`: protects Adam with 16-bit state from the effects of rounding.

Three things break with 16-bit state. The usual epsilon of 1e-8 is zero in float16, so an idle weight becomes 0/0.
Squares of gradients below about 2e-4 are zero in float16, so after a period of small or zero gradients the next
gradient is divided by nothing and the update explodes. In bfloat16 the second moment cannot decay, because 0.999 of it
rounds back to it.

The correction for the second failure needs no new constant. By Cauchy and Schwarz no sequence of gradients can make the
first moment larger than

    (1 - b1) / sqrt(1 - b2) / sqrt(1 - b1**2 / b2)         7.27 for betas of 0.9 and 0.999

times the root of the second, in exact arithmetic. If the next step's moments would break that bound, rounding has
removed part of the second moment, and it is raised to the bound. Sound moments are not changed.
"""

import math
import warnings
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from plimsoll.checks import one_of
from plimsoll.errors import ArgumentError
from plimsoll.formats import Format, get
from plimsoll.kernels.dtypes import SIXTEEN_BIT

Epsilon = Literal["refuse", "raise"]
_SLACK = 1.01  # float32 rounding stays within it; smaller errors of a 16-bit moment are ignored


def guard_adam(optimizer: Optimizer, *, epsilon: Epsilon = "refuse") -> "AdamGuard":
    """Guard an Adam with 16-bit state until `AdamGuard.remove`.

    An update is then at most 7.27 learning rates (for the usual betas), and no weight becomes 0/0. The guard cannot
    restore squares below the format's range: their second moment is a lower bound, and the step can be smaller than
    Adam's. `MasterWeights`, `StochasticWeights` and `KahanWeights` have float32 state and need no guard.

    Args:
        optimizer: A torch.optim.Adam or AdamW. Parameters that are not 16-bit are left alone.
        epsilon: Action if epsilon rounds to zero in a parameter's dtype. "refuse" raises an error. "raise" sets the
            group's epsilon to the smallest positive number of that dtype (5.96e-8 in float16), and warns.

    >>> weight = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    >>> optimizer = torch.optim.Adam([weight], lr=0.01, eps=1e-4)
    >>> guard = guard_adam(optimizer)
    >>> weight.grad = torch.tensor([1e-4, 1e-3], dtype=torch.float16)  # their squares, times 0.001, are zero
    >>> optimizer.step()
    >>> guard.raised
    2
    """
    if not isinstance(optimizer, torch.optim.Adam):
        raise ArgumentError(
            f"guard_adam: expected torch.optim.Adam or AdamW; got {type(optimizer).__name__}. Optimizers over float32 "
            "values (MasterWeights, StochasticWeights, KahanWeights) need no guard; for others there is none."
        )
    one_of("guard_adam", "epsilon", epsilon, ("refuse", "raise"))
    groups = [(group, {p.dtype for p in group["params"]}.intersection(SIXTEEN_BIT)) for group in optimizer.param_groups]
    if not any(dtypes for _, dtypes in groups):
        raise ArgumentError(
            "guard_adam: expected 16-bit parameters; got none. Adam of float32 parameters has float32 state, and needs "
            "no guard."
        )
    for group, dtypes in groups:
        for dtype in sorted(dtypes, key=str):
            _check_betas(group, dtype)
            _check_epsilon(group, dtype, epsilon)
    return AdamGuard(optimizer)


class AdamGuard:
    """Handle on a guarded optimizer: the number of corrections, and `remove`."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._raised: dict[torch.device, Tensor] = {}
        self._handle = optimizer.register_step_pre_hook(self._before)

    @property
    def raised(self) -> int:
        """Number of second moments raised so far. Reading it waits for the device."""
        return sum(int(count) for count in self._raised.values())

    def remove(self) -> None:
        """Stop guarding."""
        self._handle.remove()

    @torch.no_grad()
    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if kwargs.get("closure", args[1] if len(args) > 1 else None) is not None:  # args begin with the optimizer
            raise ArgumentError(
                "guard_adam: expected a step without a closure, since the guard reads gradients before the step; got "
                "one. Run forward and backward before the step."
            )
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.dtype in SIXTEEN_BIT and p.grad is not None:
                    state = cast("dict[str, Any]", optimizer.state[p])
                    if not state:
                        _begin(state, p, group)
                    self._raise_second_moment(state, p, group)

    def _raise_second_moment(self, state: dict[str, Any], p: Tensor, group: dict[str, Any]) -> None:
        first, second = _next_moments(state, p, group)
        second_moment = cast("Tensor", state["exp_avg_sq"])
        floor = (first / (_SLACK * largest_ratio(*_betas(group)))).square_()
        low = second < floor
        # The step multiplies by b2 and rounds. Two more units of the last place cover both.
        margin = 1 + 2 * torch.finfo(second_moment.dtype).eps
        raised = (floor / _betas(group)[1]).mul_(margin).clamp_(min=_smallest(second_moment.dtype))
        second_moment.copy_(torch.where(low, raised, second_moment))
        count = self._raised.setdefault(p.device, torch.zeros((), dtype=torch.int64, device=p.device))
        count.add_(low.sum())


def largest_ratio(b1: float, b2: float) -> float:
    """Return the largest possible first moment, in units of the root of the second."""
    return (1 - b1) / math.sqrt(1 - b2) / math.sqrt(1 - b1 * b1 / b2)


def _next_moments(state: dict[str, Any], p: Tensor, group: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the moments after this step, the second as its dtype represents it."""
    b1, b2 = _betas(group)
    g = cast("Tensor", p.grad).to(torch.float32)
    if group["maximize"]:
        g = -g
    if group["weight_decay"] and not group["decoupled_weight_decay"]:
        g = g + p.to(torch.float32) * group["weight_decay"]
    second_moment = cast("Tensor", state["exp_avg_sq"])
    dtype = second_moment.dtype
    decayed = second_moment.to(torch.float32).mul_(b2).to(dtype).to(torch.float32)  # each operation rounds once
    second = decayed.add_(g.square().mul_(1 - b2)).to(dtype)
    return state["exp_avg"].to(torch.float32).lerp_(g, 1 - b1), second.to(torch.float32)


def _begin(state: dict[str, Any], p: Tensor, group: dict[str, Any]) -> None:
    """Create a parameter's state before Adam does, so that the guard can act."""
    on_device = group["capturable"] or group["fused"]
    state["step"] = torch.zeros((), device=p.device if on_device else "cpu", dtype=torch.float32)
    for name in ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group["amsgrad"] else ())):
        state[name] = torch.zeros_like(p, memory_format=torch.preserve_format)


def _smallest(dtype: torch.dtype) -> float:
    """Return the smallest positive number of the dtype."""
    return cast("Format", get(dtype)).smallest_subnormal


def _betas(group: dict[str, Any]) -> tuple[float, float]:
    b1, b2 = group["betas"]
    return float(b1), float(b2)


def _check_betas(group: dict[str, Any], dtype: torch.dtype) -> None:
    b1, b2 = _betas(group)
    if b1 * b1 >= b2:
        raise ArgumentError(
            f"guard_adam: expected betas whose first squared is below the second, without which no bound holds; got "
            f"betas=({b1}, {b2}). Take a smaller first or a larger second one."
        )
    if 1 - b2 < torch.finfo(dtype).eps / 4:
        warnings.warn(
            f"guard_adam: the second moment cannot decay in {dtype}: {b2} of it rounds back to it, so that it only "
            f"grows. Use StochasticWeights or KahanWeights, whose state is float32, or a second beta of at most "
            f"{1 - torch.finfo(dtype).eps / 2:.3f}.",
            stacklevel=3,
        )


def _check_epsilon(group: dict[str, Any], dtype: torch.dtype, epsilon: Epsilon) -> None:
    if group["fused"] or float(torch.tensor(group["eps"], dtype=dtype)) > 0:
        return  # a fused step adds epsilon in float32
    smallest = _smallest(dtype)
    if epsilon == "refuse":
        raise ArgumentError(
            f"guard_adam: expected an epsilon that {dtype} can hold; got eps={group['eps']}, which is zero there: a "
            f"weight without gradients becomes 0/0. Use eps={smallest:.3g} or more, guard_adam(..., epsilon='raise'), "
            "or MasterWeights, whose state is float32."
        )
    warnings.warn(f"guard_adam: eps={group['eps']} is zero in {dtype}; it is {smallest:.3g} from now on.", stacklevel=3)
    group["eps"] = smallest
