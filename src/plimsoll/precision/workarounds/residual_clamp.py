"""`clamp_residuals`: values that have added up past a format's largest are brought back to it, counted, and told.

In deep transformers each layer adds to the residual stream, and after enough of them a few values pass 65,504: FP16
makes Inf of them, and NaN of what follows. Clamping them to the largest value has next to no effect on results.
"""

import difflib
import fnmatch
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from plimsoll.errors import ArgumentError
from plimsoll.formats import BlockFormat, get

Gradient = Literal["zero", "pass"]
_CARRIERS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Clamped:
    """What was clamped of a module's outputs: values seen, values clamped, and how many of these were infinite."""

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
    """Clamps what the named modules return to a format's largest value, from now on until `remove`.

    Numerics. Values above the largest finite one, +Inf included, become it; below its negative likewise. NaN stays. The
    dtype stays, so that in float16 only infinities change; in float32 a value is held to what a float16 module
    can take. All floating tensors of an output count, in tuples, lists and dicts too.

    The first time that a module's values are clamped is told by a warning. On a CPU that is at once; elsewhere, looking
    would hold up the device, so it is at every `check_every` calls, and at `counts` and `remove`.

    Args:
        model: the model or any part of it.
        modules: names or globs, as in ``"blocks.*"``; the root module is "model".
        fmt: whose largest value counts.
        gradient: of a clamped value. "zero" is the clamp's own; nothing pulls the value back then. "pass" gives the
            gradient on as if nothing had been clamped, so that training can bring the value down.
        check_every: calls of a module between looks at its counts; not used on a CPU.
        first: before the modules' other forward hooks, so that these (a watch's, say) are given the clamped values.

    >>> model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Identity())
    >>> with torch.no_grad():
    ...     _ = model[0].weight.fill_(50_000.0)
    >>> with warnings.catch_warnings(action="ignore"), clamp_residuals(model, "0") as clamp:
    ...     model(torch.tensor([[1.0], [2.0]])).tolist()
    ...     clamp.counts()["0"]
    [[50000.0], [65504.0]]
    Clamped(values=2, clamped=1, infinite=0)
    """
    found = get(fmt)
    if isinstance(found, BlockFormat):
        raise ArgumentError(
            f"clamp_residuals: expected a format of single numbers; got {found.name}, whose largest value depends on "
            'the block. Use its element\'s: "fp16", "e4m3".'
        )
    if gradient not in {"zero", "pass"}:
        raise ArgumentError(f"clamp_residuals: expected gradient to be 'zero' or 'pass'; got {gradient!r}.")
    if check_every < 1:
        raise ArgumentError(f"clamp_residuals: expected check_every of at least 1; got check_every={check_every}.")
    chosen = _matching(model, [modules] if isinstance(modules, str) else list(modules))
    return ResidualClamp(chosen, found.max, gradient, check_every, first=first)


class ResidualClamp:
    """The handle on clamped modules: `counts` says what was clamped, `remove` (or the end of a ``with``) stops it."""

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
        self._largest = {dtype: _largest_within(largest, dtype) for dtype in _CARRIERS}
        # Values, those clamped, those infinite: tensors, since numbers that change would compile a graph anew.
        self._counts: dict[str, Tensor | None] = dict.fromkeys(modules)
        self._calls = dict.fromkeys(modules, 0)
        self._told: set[str] = set()
        self._handles: list[RemovableHandle] = [
            module.register_forward_hook(self._hook(name), prepend=first) for name, module in modules.items()
        ]

    def counts(self) -> dict[str, Clamped]:
        """By module, what was clamped so far. It waits for the device."""
        found: dict[str, Clamped] = {}
        for name in self._counts:
            found[name] = self._found(name)
            self._tell(name, found[name])
        return found

    def remove(self) -> None:
        """Clamps no more, and tells what was not told yet. The counts stay."""
        for handle in self._handles:
            handle.remove()
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
                self._look(name)
            return clamped

        return clamp

    def _clamp(self, name: str, x: Tensor) -> Tensor:
        largest = self._largest[x.dtype]
        size = x.detach().abs()
        values = torch.full((), x.numel(), dtype=torch.int64, device=x.device)
        seen = torch.stack([values, (size > largest).sum(), size.isinf().sum()])
        known = self._counts[name]
        self._counts[name] = seen if known is None else known.add_(seen.to(known.device))
        if self._gradient == "zero":
            return x.clamp(-largest, largest)
        return cast("Any", _ClampPassing).apply(x, largest)

    def _look(self, name: str) -> None:
        self._calls[name] += 1
        known = self._counts[name]
        if name in self._told or known is None:
            return
        if known.is_cpu or self._calls[name] % self._check_every == 0:
            self._tell(name, self._found(name))

    def _found(self, name: str) -> Clamped:
        known = self._counts[name]
        values, clamped, infinite = (0, 0, 0) if known is None else (int(count) for count in known)
        return Clamped(values=values, clamped=clamped, infinite=infinite)

    def _tell(self, name: str, found: Clamped) -> None:
        if found.clamped and name not in self._told:
            self._told.add(name)
            warnings.warn(
                f"clamp_residuals: {found.clamped} of {found.values} values that {name} returned lay beyond "
                f"{self._limit:g}, {found.infinite} of them infinite; they were clamped, and later ones will be, "
                "counted only.",
                stacklevel=2,
            )


class _ClampPassing(torch.autograd.Function):
    """A clamp whose gradient is passed on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, largest: float) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        del ctx
        return x.clamp(-largest, largest)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        del ctx
        return g, None


def _largest_within(limit: float, dtype: torch.dtype) -> float:
    """The largest number of the dtype that is not above the limit: 65,280 in bfloat16 for float16's 65,504."""
    number = torch.tensor(limit, dtype=torch.float64).to(dtype)
    return float(number if float(number) <= limit else torch.nextafter(number, torch.zeros_like(number)))


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A structure with its floating tensors changed, of the same types."""
    if isinstance(value, Tensor):
        return change(value) if value.dtype in _CARRIERS else value
    if isinstance(value, dict):
        held = cast("dict[Any, Any]", value)
        for key, item in held.items():  # in place: a mapping of another library may hold more than its items
            held[key] = _mapped(item, change)
        return held
    if isinstance(value, list):
        return [_mapped(item, change) for item in cast("list[Any]", value)]
    if isinstance(value, tuple):
        items = [_mapped(item, change) for item in cast("tuple[Any, ...]", value)]
        kind: Any = cast("Any", value).__class__
        return kind(*items) if hasattr(kind, "_fields") else kind(items)
    return value


def _matching(model: nn.Module, patterns: list[str]) -> dict[str, nn.Module]:
    named = cast("Iterable[tuple[str, nn.Module]]", model.named_modules())
    known = {name or "model": module for name, module in named}
    chosen: dict[str, nn.Module] = {}
    for pattern in patterns:
        names = [pattern] if pattern in known else [name for name in known if fnmatch.fnmatchcase(name, pattern)]
        if not names:
            near = difflib.get_close_matches(pattern, known, n=3) or list(known)[:5]
            raise ArgumentError(
                f"clamp_residuals: expected the names of modules; got {pattern!r}, which none has. "
                f"There are, among others: {', '.join(near)}."
            )
        chosen |= {name: known[name] for name in names}
    if not chosen:
        raise ArgumentError("clamp_residuals: expected at least one module; got none. Name some, or globs of names.")
    return chosen
