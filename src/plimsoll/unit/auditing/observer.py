"""What sees every operation of a forward, and the gradient of what it gave.

A torch-function mode hears of each function that Python calls, and a hook on the function's result hears of its
gradient. What no such mode hears of is a `torch.autograd.Function`: while an audit runs, `apply` is replaced for the
thread that runs it. Two things come of that:

- A function of `unit.functional`, and a line of a converted model, is an operation and multiplications around it. It
  is one row: whatever it gave last.
- A re-entrant checkpoint runs its part without gradients and once more in the backward, where the gradients come. Its
  second run fills in the rows of its first. (The other kind of checkpoint keeps the first run's graph: nothing to do.)
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from plimsoll.errors import PlimsollError
from plimsoll.spectrum import Spectrum, measure
from plimsoll.unit.auditing.call_site import Place, look
from plimsoll.unit.auditing.operation_names import BOOKKEEPING, canonical, factor_rank, moves, operation_of
from plimsoll.unit.auditing.rows import Absence

# Composite functions of torch that call others in Python: their insides are what is of interest.
_OPENED = (functional.multi_head_attention_forward,)


@dataclass(slots=True, kw_only=True, eq=False)
class Entry:
    """A row in the making."""

    operation: str
    place: Place
    output: int = 0
    moved: bool = False
    value: Tensor | None = None  # until it is measured
    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    forward: Spectrum | None = None
    backward: Spectrum | None = None
    absence: Absence | None = None


@dataclass(slots=True, eq=False)
class Region:
    """What a re-entrant checkpoint runs: the entries of its first run."""

    entries: list[Entry] = field(default_factory=list[Entry])
    runs: int = 0


class Observer(TorchFunctionMode):
    """Gathers entries, in program order, while it is entered."""

    def __init__(self, until: CodeType) -> None:
        super().__init__()
        self.entries: list[Entry] = []
        self.unmeasured: list[str] = []  # operations whose results hold values that cannot be measured
        self._until = until
        self._thread = threading.get_ident()
        self._quiet = False
        self._pending: Entry | None = None  # of a function of ours that has not returned
        self._regions: list[Region] = []
        self._again: Iterator[Entry] | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._quiet:
            return func(*args, **kwargs)
        if func in _OPENED:
            with self:
                return _without_its_check(func)(*args, **kwargs)
        self._settle_before()
        given = _floating((args, kwargs))
        versions = [_version(x) for x in given]
        result = func(*args, **kwargs)
        name = operation_of(func)
        self._saw(name, given, versions, args[0] if name == "setitem" else result)
        return result

    @contextlib.contextmanager
    def listening(self) -> Generator[None]:
        """Inside, this thread's operations are seen, those of autograd functions written in Python too."""
        original: Any = torch.autograd.Function.__dict__["apply"]
        observer = self

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            call = functools.partial(original.__get__(None, cls), **kwargs)
            return observer._applied(cls, call, args)

        cast("Any", torch.autograd.Function).apply = classmethod(apply)
        try:
            with self:
                yield
                self.settle()
        finally:
            cast("Any", torch.autograd.Function).apply = original

    @contextlib.contextmanager
    def quietly(self) -> Generator[None]:
        """Inside, nothing is seen."""
        before, self._quiet = self._quiet, True
        try:
            yield
        finally:
            self._quiet = before

    def take(self, name: str, x: Tensor) -> Entry:
        """An entry for a tensor that no operation gave: an input."""
        entry = Entry(operation=name, place=Place(), value=x)
        self._measure(entry)
        return entry

    def settle(self) -> None:
        """What the last function of ours gave is final."""
        entry, self._pending = self._pending, None
        if entry is not None:
            self._measure(entry)

    # -- what is called ------------------------------------------------------------------------------------------------

    def _applied(self, cls: Any, call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if self._quiet or threading.get_ident() != self._thread or cls.__name__ in BOOKKEEPING:
            return call(*args)
        if cls is CheckpointFunction:
            return call(self._region(args[0]), *args[1:])
        self._settle_before()
        given = _floating(args)
        versions = [_version(x) for x in given]
        with self.quietly():
            result = call(*args)
        self._saw(canonical(cls.__name__), given, versions, result)
        return result

    def _settle_before(self) -> None:
        if self._pending is not None and not look(self._until).part_of(self._pending.place):
            self.settle()

    def _saw(self, name: str, given: Sequence[Tensor], versions: Sequence[int], result: Any) -> None:
        found = _floating(result)
        if not found:
            return
        place = look(self._until)
        moved = moves(name) or not given
        if place.call is not None:
            self._part(place, name, found[0])
            return
        for index, x in enumerate(found):
            again = moved or _is_given(x, given, versions)
            entry = Entry(operation=name, place=place, output=index, moved=again, value=x)
            self._measure(entry)

    def _part(self, place: Place, name: str, x: Tensor) -> None:
        """A part of an operation with factors: what it gives is the result, as long as no other part follows."""
        operation = canonical(place.function) or name
        before = self._pending
        if before is not None and not place.function and factor_rank(name) < factor_rank(before.operation):
            operation = before.operation
        self._pending = Entry(operation=operation, place=place, moved=moves(operation), value=x)

    def _measure(self, entry: Entry) -> None:
        """Measures an entry's value, and lets its gradient be measured; in a second run, for the entry of the first."""
        x, entry.value = entry.value, None
        assert x is not None
        with self.quietly():
            if self._again is not None:
                _listen(self, _same(self._again, entry), x)
                return
            seen = spectrum_of(x)
            if seen is None:
                self.unmeasured.append(entry.operation)
                return
            entry.forward, entry.shape, entry.dtype = seen, tuple(x.shape), x.dtype
            self.entries.append(entry)
            for region in self._regions:
                region.entries.append(entry)
            _listen(self, entry, x)

    # -- re-entrant checkpoints ----------------------------------------------------------------------------------------

    def _region(self, function: Callable[..., Any]) -> Callable[..., Any]:
        region = Region()

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            region.runs += 1
            with self._first(region) if region.runs == 1 else self._second(region):
                return function(*args, **kwargs)

        return run

    @contextlib.contextmanager
    def _first(self, region: Region) -> Generator[None]:
        self._regions.append(region)
        try:
            yield
            self.settle()
        finally:
            self._regions.pop()

    @contextlib.contextmanager
    def _second(self, region: Region) -> Generator[None]:
        before, self._again = self._again, iter(region.entries)
        try:
            with self.listening():
                yield
        finally:
            self._again = before


def spectrum_of(x: Tensor) -> Spectrum | None:
    """What a tensor holds, both parts of complex numbers; None where there are no values to measure."""
    try:
        x = x.detach()
        x = x.to_dense() if x.layout is not torch.strided else x
        return measure(torch.view_as_real(x.resolve_conj()) if x.is_complex() else x)
    except (PlimsollError, NotImplementedError):
        return None


def _listen(observer: Observer, entry: Entry | None, x: Tensor) -> None:
    if entry is None:
        return
    if not x.requires_grad:
        entry.absence = "frozen" if torch.is_grad_enabled() else "no_grad"
        return
    entry.absence = "never came"

    def came(gradient: Tensor) -> None:
        with observer.quietly():
            entry.backward = spectrum_of(gradient)
            entry.absence = None

    cast("Any", x).register_hook(came)


def _same(again: Iterator[Entry], entry: Entry) -> Entry | None:
    """The first run's entry for one of the second: both come in the same order."""
    return next((first for first in again if first.operation == entry.operation), None)


def _floating(value: Any) -> list[Tensor]:
    """The tensors of an argument or a result that hold real or complex numbers."""
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() or value.is_complex() else []
    if isinstance(value, (list, tuple, set)):
        return [x for item in cast("Sequence[Any]", value) for x in _floating(item)]
    if isinstance(value, Mapping):
        return [x for item in cast("Mapping[Any, Any]", value).values() for x in _floating(item)]
    return []


def _version(x: Tensor) -> int:
    return -1 if x.is_inference() else x._version  # noqa: SLF001


def _is_given(x: Tensor, given: Sequence[Tensor], versions: Sequence[int]) -> bool:
    """Whether it is an input as it was, or a view of one: nothing was written there."""
    for other, version in zip(given, versions, strict=True):
        if other is x or _memory(other) == _memory(x) != 0:
            return _version(other) == version
    return False


def _memory(x: Tensor) -> int:
    try:
        return x.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # one without memory of its own
        return 0


@functools.cache
def _without_its_check(function: FunctionType) -> Callable[..., Any]:
    """The function without its first lines' question for modes, which would lead back here: the same code otherwise."""
    names: dict[str, Any] = {**function.__globals__, "has_torch_function": _never}
    opened = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    opened.__kwdefaults__ = function.__kwdefaults__
    return opened


def _never(*_: object) -> bool:
    return False
