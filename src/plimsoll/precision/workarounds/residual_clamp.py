"""`clamp_residuals`: clamps and counts values beyond a format's largest number."""

import fnmatch
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from plimsoll.checks import integer, nearest, one_of
from plimsoll.errors import ArgumentError
from plimsoll.formats import BlockFormat, get
from plimsoll.kernels.dtypes import FLOATING
from plimsoll.watch.hooks import torch_hooks

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
    number_format = get(fmt)
    if isinstance(number_format, BlockFormat):
        raise ArgumentError(
            f"clamp_residuals: expected a format of single numbers; got {number_format.name}, whose largest value "
            'depends on the block. Use its element\'s: "fp16", "e4m3".'
        )
    one_of("clamp_residuals", "gradient", gradient, ("zero", "pass"))
    integer("clamp_residuals", "check_every", check_every, low=1, remedy="Use 100.")
    chosen = _matching(model, [modules] if isinstance(modules, str) else list(modules))
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
        self._counts[name] = seen if known is None else known.add_(seen.to(known.device))
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
    number = torch.tensor(limit, dtype=torch.float64).to(dtype)
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


def _matching(model: nn.Module, patterns: list[str]) -> dict[str, nn.Module]:
    named = cast("Iterable[tuple[str, nn.Module]]", model.named_modules())
    known = {name or "model": module for name, module in named}
    chosen: dict[str, nn.Module] = {}
    for pattern in patterns:
        names = [pattern] if pattern in known else [name for name in known if fnmatch.fnmatchcase(name, pattern)]
        if not names:
            near = nearest(pattern, known) or list(known)[:5]
            raise ArgumentError(
                f"clamp_residuals: expected the names of modules; got {pattern!r}, which none has. "
                f"There are, among others: {', '.join(near)}."
            )
        chosen |= {name: known[name] for name in names}
    if not chosen:
        raise ArgumentError("clamp_residuals: expected at least one module; got none. Name some, or globs of names.")
    return chosen
