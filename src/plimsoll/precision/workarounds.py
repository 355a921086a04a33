"""Workarounds for known failures of low precision: `clamp_residuals` and `guard_adam`."""

import fnmatch
import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self, cast

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer
from torch.utils.hooks import RemovableHandle

from plimsoll.checks import integer, items, nearest, one_of
from plimsoll.errors import ArgumentError
from plimsoll.formats import BlockFormat, Format, get
from plimsoll.kernels.dtypes import FLOATING, SIXTEEN_BIT
from plimsoll.watch.hooks import torch_hooks

# -- `clamp_residuals`: clamps and counts values beyond a format's largest number --------------------------------------

Gradient = Literal["zero", "pass"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Clamped:
    """Counts of a module's outputs: all values, clamped ones, infinite ones."""

    values: int
    clamped: int
    infinite: int


def clamp_residuals(
    model: nn.Module,
    modules: str | Iterable[str],
    fmt: object = "fp16",
    *,
    gradient: Gradient = "zero",
    check_every: int = 100,
    first: bool = False,
) -> "ResidualClamp":
    """Clamp the outputs of modules to a format's largest value, until `remove`.

    Numerics. Values above the largest finite one become it, +Inf included; likewise below its negative. NaN stays. The
    dtype stays, so in float16 only infinities change, and float32 values are limited to what a float16 module can take.
    All floating-point tensors of an output count, also in tuples, lists and dicts.

    A warning reports the first clamped value of each module. On a CPU it comes at once. On other devices, where reading
    the counts would wait for the device, it comes every `check_every` calls and in `counts` and `remove`.

    Args:
        model: The model or any part of it.
        modules: Names or globs, as in ``"blocks.*"``; the root module is "model".
        fmt: The format whose largest value is the limit.
        gradient: Gradient of a clamped value. "zero" is that of a clamp, so nothing pulls the value back. "pass" passes
            the gradient on as if nothing had been clamped, so that training can reduce the value.
        check_every: Calls of a module between two checks of its counts; not used on a CPU.
        first: Run before the modules' other forward hooks, so that these (for example a watch's) see the clamped
            values.

    >>> model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Identity())
    >>> with torch.no_grad():
    ...     _ = model[0].weight.fill_(50_000.0)
    >>> with warnings.catch_warnings(action="ignore"), clamp_residuals(model, "0") as clamp:
    ...     model(torch.tensor([[1.0], [2.0]])).tolist()
    ...     clamp.counts()["0"]
    [[50000.0], [65504.0]]
    Clamped(values=2, clamped=1, infinite=0)
    """
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ArgumentError(f"clamp_residuals: expected a torch.nn.Module; got {type(model).__name__}. Give the model.")
    number_format = get(fmt)
    if isinstance(number_format, BlockFormat):
        raise ArgumentError(
            f"clamp_residuals: expected a format of single numbers; got {number_format.name}, whose largest value "
            'depends on the block. Use its element\'s: "fp16", "e4m3".'
        )
    one_of("clamp_residuals", "gradient", gradient, ("zero", "pass"))
    integer("clamp_residuals", "check_every", check_every, low=1, remedy="Use 100.")
    chosen = _matching(model, [modules] if isinstance(modules, str) else items("clamp_residuals", "modules", modules))
    return ResidualClamp(chosen, number_format.max, gradient, check_every, first=first)


class ResidualClamp:
    """Handle on clamped modules: `counts`, and `remove` or a ``with`` block."""

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        largest: float,
        gradient: Gradient,
        check_every: int,
        *,
        first: bool = False,
    ) -> None:
        self._limit, self._gradient, self._check_every = largest, gradient, check_every
        self._largest = {dtype: _largest_within(largest, dtype) for dtype in FLOATING}
        # Counts are tensors: torch.compile would recompile for every new Python number.
        self._counts: dict[str, Tensor | None] = dict.fromkeys(modules)
        self._calls = dict.fromkeys(modules, 0)
        self._warned: set[str] = set()
        self._handles: list[RemovableHandle] = [
            module.register_forward_hook(self._hook(name), prepend=first) for name, module in modules.items()
        ]
        if first:
            torch_hooks.in_front.update(handle.id for handle in self._handles)

    def counts(self) -> dict[str, Clamped]:
        """Return the counts so far by module. Waits for the device."""
        counts: dict[str, Clamped] = {}
        for name in self._counts:
            counts[name] = self._counts_of(name)
            self._warn_of(name, counts[name])
        return counts

    def remove(self) -> None:
        """Stop clamping, and warn of modules not warned of yet. The counts stay."""
        for handle in self._handles:
            handle.remove()
            torch_hooks.in_front.discard(handle.id)
        self._handles.clear()
        self.counts()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def _hook(self, name: str) -> Callable[[nn.Module, Any, Any], Any]:
        def clamp(_module: nn.Module, _inputs: Any, output: Any) -> Any:
            clamped = _mapped(output, lambda x: self._clamp(name, x))
            if not torch.compiler.is_compiling():
                self._check(name)
            return clamped

        return clamp

    # In deep transformers each layer adds to the residual stream, and after many layers a few values exceed 65,504.
    # FP16 turns them into Inf, and what follows into NaN. Clamping them to the largest value has almost no effect on
    # results.
    def _clamp(self, name: str, x: Tensor) -> Tensor:
        largest = self._largest[x.dtype]
        size = x.detach().abs()
        values = torch.full((), x.numel(), dtype=torch.int64, device=x.device)
        seen = torch.stack([values, (size > largest).sum(), size.isinf().sum()])
        known = self._counts[name]
        if known is not None and torch.compiler.is_compiling():
            known.add_(seen.to(known.device))
        else:  # not in place, since the counts of a call in inference mode cannot be written outside of it
            self._counts[name] = seen if known is None else known + seen.to(known.device)
        if self._gradient == "zero":
            return x.clamp(-largest, largest)
        return cast("Any", _ClampPassing).apply(x, largest)

    def _check(self, name: str) -> None:
        self._calls[name] += 1
        known = self._counts[name]
        if name in self._warned or known is None:
            return
        if known.is_cpu or self._calls[name] % self._check_every == 0:
            self._warn_of(name, self._counts_of(name))

    def _counts_of(self, name: str) -> Clamped:
        known = self._counts[name]
        values, clamped, infinite = (0, 0, 0) if known is None else (int(count) for count in known)
        return Clamped(values=values, clamped=clamped, infinite=infinite)

    def _warn_of(self, name: str, counts: Clamped) -> None:
        if counts.clamped and name not in self._warned:
            self._warned.add(name)
            warnings.warn(
                f"clamp_residuals: {counts.clamped} of {counts.values} values that {name} returned lay beyond "
                f"{self._limit:g}, {counts.infinite} of them infinite. Later ones are clamped and "
                "counted without a warning.",
                stacklevel=2,
            )


class _ClampPassing(torch.autograd.Function):
    """Clamp whose gradient passes unchanged."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, largest: float) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        del ctx
        return x.clamp(-largest, largest)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        del ctx
        return g, None


def _largest_within(limit: float, dtype: torch.dtype) -> float:
    """Return the dtype's largest number up to the limit: 65,280 in bfloat16."""
    number = torch.tensor(limit, dtype=torch.float64, device="cpu").to(dtype)
    return float(number if float(number) <= limit else torch.nextafter(number, torch.zeros_like(number)))


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return the structure with its floating-point tensors changed, in the same types."""
    if isinstance(value, Tensor):
        return change(value) if value.dtype in FLOATING else value
    if isinstance(value, dict):
        mapping = cast("dict[Any, Any]", value)
        for key, item in mapping.items():  # in place: another library's mapping may contain more than its items
            mapping[key] = _mapped(item, change)
        return mapping
    if isinstance(value, list):
        return [_mapped(item, change) for item in cast("list[Any]", value)]
    if isinstance(value, tuple):
        items = [_mapped(item, change) for item in cast("tuple[Any, ...]", value)]
        kind: Any = cast("Any", value).__class__
        return kind(*items) if hasattr(kind, "_fields") else kind(items)
    return value


def _matching(model: nn.Module, patterns: list[Any]) -> dict[str, nn.Module]:
    named = cast("Iterable[tuple[str, nn.Module]]", model.named_modules())
    known = {name or "model": module for name, module in named}
    chosen: dict[str, nn.Module] = {}
    for pattern in patterns:
        names: list[str] = []
        if isinstance(pattern, str):
            names = [pattern] if pattern in known else [name for name in known if fnmatch.fnmatchcase(name, pattern)]
        if not names:
            near = nearest(str(pattern), known) or list(known)[:5]
            raise ArgumentError(
                f"clamp_residuals: expected the names of modules; got {pattern!r}, which none has. "
                f"There are, among others: {', '.join(near)}."
            )
        chosen |= {name: known[name] for name in names}
    if not chosen:
        raise ArgumentError("clamp_residuals: expected at least one module; got none. Name some, or globs of names.")
    return chosen


# -- `guard_adam`: protects Adam with 16-bit state from the effects of rounding ----------------------------------------

# Three things break with 16-bit state. The usual epsilon of 1e-8 is zero in float16, so an idle weight becomes 0/0.
# Squares of gradients below about 2e-4 are zero in float16, so after a period of small or zero gradients the next
# gradient is divided by nothing and the update explodes. In bfloat16 the second moment cannot decay, because 0.999 of
# it rounds back to it.
#
# The correction for the second failure needs no new constant. By Cauchy and Schwarz no sequence of gradients can make
# the first moment larger than
#
#     (1 - b1) / sqrt(1 - b2) / sqrt(1 - b1**2 / b2)         7.27 for betas of 0.9 and 0.999
#
# times the root of the second, in exact arithmetic. If the next step's moments would break that bound, rounding has
# removed part of the second moment, and it is raised to the bound. Sound moments are not changed.

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
    if group["fused"] or float(torch.tensor(group["eps"], dtype=dtype, device="cpu")) > 0:
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
