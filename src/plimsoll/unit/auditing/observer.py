"""Observer of all operations of a forward pass, and of their gradients.

- A function of `unit.functional`, or a line of a converted model, is an operation with multiplications around it. It is
  one row, with the last result.
- A re-entrant checkpoint runs its part without gradients, and again in the backward pass, where the gradients come. The
  second run completes the rows of the first. (The other kind of checkpoint keeps the graph of the first run.)
"""

import contextlib
import functools
import linecache
import os
import re
import sys
import sysconfig
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from plimsoll.errors import PlimsollError
from plimsoll.spectrum import Spectrum, measure
from plimsoll.unit.auditing.result import Absence

# -- names and call sites of operations --------------------------------------------------------------------------------

# Python's own stack has the module that runs, the user's line, and the operation with factors that a call is part of.
# So nothing has to be hooked. An operation with its factors is one call of a function of `unit.functional`. In a
# converted model it is one line of a module's code.

_TORCH = str(Path(torch.__file__).parent) + os.sep
_OURS = str(Path(__file__).parents[2]) + os.sep
_FUNCTIONAL = str(Path(__file__).parents[1] / "functional") + os.sep
_LIBRARIES = tuple({str(Path(sysconfig.get_paths()[key])) + os.sep for key in ("stdlib", "platstdlib")})
_INSTALLED = tuple({str(Path(sysconfig.get_paths()[key])) + os.sep for key in ("purelib", "platlib")})

_GENERATED = "<plimsoll.unit.convert "  # start of the file names of converted models' code
_SCALES_ITSELF = re.compile(r"\s*(\w+) = ((?:scaled|sized)\(\1, |\1 \* )")

_CALLS, _FUNCTION, _LINE, _USER, _OTHER = "calls a module", "a function", "a line", "the user's", "other"


@dataclass(slots=True)
class CallSite:
    """Place that an operation was called from."""

    module: nn.Module | None = None  # innermost module that runs
    source: str | None = None  # line of the user's code, "file:line"
    # The frame itself, not its id: a new frame may get the id of one that is gone.
    # Frame of the function of `unit.functional`, or of the converted module's code, that the call is part of.
    call: FrameType | None = None
    function: str = ""  # name of that function
    line: int = 0  # line of that code

    def part_of(self, other: "CallSite") -> bool:
        """Return whether both are parts of one operation and its factors."""
        if self.call is None or self.call is not other.call:
            return False
        return self.line == other.line or (self.line == other.line + 1 and self._scales_itself())

    def _scales_itself(self) -> bool:
        """Return whether the line multiplies the value of the line before by its factor."""
        assert self.call is not None
        return bool(_SCALES_ITSELF.match(linecache.getline(self.call.f_code.co_filename, self.line)))


def find_call_site(until: CodeType) -> CallSite:
    """Return the call site of the current operation, below the frame of `until`."""
    site = CallSite()
    frame: FrameType | None = cast("Any", sys)._getframe(1)  # noqa: SLF001
    while frame is not None and frame.f_code is not until:
        code = frame.f_code
        kind = _kind(code.co_filename)
        if kind is _USER:
            if site.source is None:
                site.source = f"{code.co_filename}:{frame.f_lineno}"
        elif kind is _FUNCTION or kind is _LINE:
            if site.module is None:
                _take_call(site, frame, of_line=kind is _LINE)
        elif kind is _CALLS and code.co_name == "_call_impl" and site.module is None:
            module = frame.f_locals.get("self")
            if isinstance(module, nn.Module):
                site.module = module
        frame = frame.f_back
    return site


def _take_call(site: CallSite, frame: FrameType, *, of_line: bool) -> None:
    site.call, site.function, site.line = frame, frame.f_code.co_name, frame.f_lineno if of_line else 0
    if of_line:
        site.function = ""
        site.source = site.source or f"{frame.f_code.co_filename}:{frame.f_lineno}"


@functools.lru_cache(maxsize=4096)
def _kind(file: str) -> str:
    """Return whose file it is."""
    if file.startswith(_TORCH):
        return _CALLS if file.endswith(os.path.join("nn", "modules", "module.py")) else _OTHER  # noqa: PTH118
    if file.startswith(_FUNCTIONAL):
        return _FUNCTION
    if file.startswith(_GENERATED):
        return _LINE
    library = file.startswith(_LIBRARIES) and not file.startswith(_INSTALLED)
    if library or file.startswith(("<frozen", "<eval_with_key")):
        return _OTHER
    return _OTHER if file.startswith(_OURS) else _USER


# Python's operators, and functions whose name in Python is not that in torch's dispatcher.
_OTHER_NAMES = {
    "invert": "bitwise_not",
    "truediv": "div",
    "true_divide": "div",
    "divide": "div",
    "multiply": "mul",
    "subtract": "sub",
    "cross_entropy_loss": "cross_entropy",
    "residual_add": "add",
    "linear_readout": "linear",
    "concat": "cat",
    "concatenate": "cat",
    "convolution": "conv",
    "_softmax": "softmax",
    "_log_softmax": "log_softmax",
    "nll_loss_nd": "nll_loss",
    "special_softmax": "softmax",
    "native_layer_norm": "layer_norm",
    "native_group_norm": "group_norm",
    "native_dropout": "dropout",
    "_native_batch_norm_legit": "batch_norm",
    "Scaled": "scaled",
    "Sized": "scaled",
    "Fp8Product": "linear",
    "feature_dropout": "dropout2d",
}
_OPERATORS = frozenset(("add", "sub", "mul", "truediv", "matmul", "pow", "floordiv", "mod", "div"))

# Operations whose results contain the values of their inputs: views, copies, joins, codes.
_MOVES = frozenset(
    """
    adjoint alias as_strided atleast_1d atleast_2d atleast_3d block_diag broadcast_tensors broadcast_to cat chunk
    clone column_stack constant_pad_nd contiguous copy detach diagonal dsplit dstack expand expand_as flatten flip
    fliplr flipud fp8_cast gather getitem hsplit hstack index_select masked_select meshgrid moveaxis movedim narrow
    pad permute pixel_shuffle pixel_unshuffle ravel repeat repeat_interleave reshape reshape_as residual_split
    resolve_conj resolve_neg roll rot90 select setitem slice split split_with_sizes squeeze stack swapaxes swapdims
    t take take_along_dim tensor_split tile transpose unbind unflatten unfold unsqueeze view view_as vsplit vstack
    zero_pad2d
    """.split()
)
# Operations whose results do not depend on the values of their inputs.
_MAKERS = ("new_", "zeros", "ones", "empty", "full", "rand", "arange", "linspace", "eye", "tensor", "as_tensor")
# Operations that the factors around another one consist of. A product may be one too.
_FACTORS = ("scaled", "mul")
# An autograd function of torch's checkpointing, which contains no values.
BOOKKEEPING = frozenset(("_NoopSaveInputs",))


@functools.lru_cache(maxsize=4096)
def operation_of(func: Any) -> str:
    """Return the name of a torch function, which does not depend on how it was called.

    >>> import torch
    >>> [operation_of(f) for f in (torch.Tensor.add_, torch.Tensor.__rsub__, torch.ops.aten.linear.default)]
    ['add', 'sub', 'linear']
    """
    name = str(getattr(func, "__name__", func))
    if name in ("__get__", "__set__"):  # an attribute such as x.mT: the name is on the descriptor
        name = str(getattr(getattr(func, "__self__", None), "__name__", name))
    name = name.split(".")[0]
    if name.startswith("__") and name.endswith("__"):
        name = name[2:-2]
        if name[:1] in ("r", "i") and name[1:] in _OPERATORS:
            name = name[1:]
    else:
        name = name.rstrip("_")
    return _OTHER_NAMES.get(name, name)


# A torch function has one name however it is called: `x + y`, `x.add_(y)`, `torch.add` and `aten.add.Tensor` are all
# "add". So the operations of a model are found again in the converted one.
def canonical(name: str) -> str:
    """Return torch's name of what a function of `unit.functional` computes."""
    return _OTHER_NAMES.get(name.strip("_"), name.strip("_"))


def moves(operation: str) -> bool:
    """Return whether the operation only moves values, or makes them of none."""
    return operation in _MOVES or operation.startswith(_MAKERS)


def factor_rank(operation: str) -> int:
    """Return a rank that is low for likely factors of another operation in a line."""
    return _FACTORS.index(operation) if operation in _FACTORS else len(_FACTORS)


# -- observer ----------------------------------------------------------------------------------------------------------

# Composite functions of torch that call others in Python. Rows are of the operations inside.
_OPENED = (functional.multi_head_attention_forward,)


@dataclass(slots=True, kw_only=True, eq=False)
class Entry:
    """Row that is not complete yet."""

    operation: str
    site: CallSite
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
    """Part that a re-entrant checkpoint runs, with the entries of its first run."""

    entries: list[Entry] = field(default_factory=list[Entry])
    runs: int = 0


class Observer(TorchFunctionMode):
    """Collects entries in program order while it is entered."""

    def __init__(self, until: CodeType) -> None:
        super().__init__()
        self.entries: list[Entry] = []
        self.unmeasured: list[str] = []  # operations whose results cannot be measured
        self._until = until
        self._thread = threading.get_ident()
        self._quiet = False
        self._pending: Entry | None = None  # of an operation with factors that has not returned
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
        inputs = _floating((args, kwargs))
        versions = [_version(x) for x in inputs]
        result = func(*args, **kwargs)
        name = operation_of(func)
        self._record(name, inputs, versions, args[0] if name == "setitem" else result)
        return result

    # A torch-function mode receives each function that Python calls. A hook on the function's result receives the
    # gradient. No such mode receives a `torch.autograd.Function`, so `apply` is replaced while an audit runs, for its
    # thread.
    @contextlib.contextmanager
    def listening(self) -> Generator[None]:
        """Record this thread's operations, autograd functions written in Python included."""
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
        """Record nothing."""
        before, self._quiet = self._quiet, True
        try:
            yield
        finally:
            self._quiet = before

    def take(self, name: str, x: Tensor) -> Entry:
        """Return an entry for an input, which is no operation's result."""
        entry = Entry(operation=name, site=CallSite(), value=x)
        self._measure(entry)
        return entry

    def settle(self) -> None:
        """Measure the result of the pending operation with factors, which is final now."""
        entry, self._pending = self._pending, None
        if entry is not None:
            self._measure(entry)

    # -- calls ---------------------------------------------------------------------------------------------------------

    def _applied(self, cls: Any, call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if self._quiet or threading.get_ident() != self._thread or cls.__name__ in BOOKKEEPING:
            return call(*args)
        if cls is CheckpointFunction:
            return call(self._region(args[0]), *args[1:])
        self._settle_before()
        inputs = _floating(args)
        versions = [_version(x) for x in inputs]
        with self.quietly():
            result = call(*args)
        self._record(canonical(cls.__name__), inputs, versions, result)
        return result

    def _settle_before(self) -> None:
        if self._pending is not None and not find_call_site(self._until).part_of(self._pending.site):
            self.settle()

    def _record(self, name: str, inputs: Sequence[Tensor], versions: Sequence[int], result: Any) -> None:
        outputs = _floating(result)
        if not outputs:
            return
        site = find_call_site(self._until)
        if site.call is not None:
            self._part(site, name, outputs[0])
            return
        moved = moves(name) or not inputs
        for index, x in enumerate(outputs):
            unchanged = moved or _is_input(x, inputs, versions)
            self._measure(Entry(operation=name, site=site, output=index, moved=unchanged, value=x))

    def _part(self, site: CallSite, name: str, x: Tensor) -> None:
        """Take a part of an operation with factors as its result, until the next part."""
        operation = canonical(site.function) or name
        before = self._pending
        if before is not None and not site.function and factor_rank(name) < factor_rank(before.operation):
            operation = before.operation
        self._pending = Entry(operation=operation, site=site, moved=moves(operation), value=x)

    def _measure(self, entry: Entry) -> None:
        """Measure an entry's value, and later its gradient."""
        x, entry.value = entry.value, None
        assert x is not None
        with self.quietly():
            # A second run completes the entry of the first.
            if self._again is not None:
                _measure_gradient(self, _same(self._again, entry), x)
                return
            spectrum = spectrum_of(x)
            if spectrum is None:
                self.unmeasured.append(entry.operation)
                return
            entry.forward, entry.shape, entry.dtype = spectrum, tuple(x.shape), x.dtype
            self.entries.append(entry)
            for region in self._regions:
                region.entries.append(entry)
            _measure_gradient(self, entry, x)

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
    """Return a tensor's spectrum (of both parts if complex), or None."""
    try:
        x = x.detach()
        x = x.to_dense() if x.layout is not torch.strided else x
        return measure(torch.view_as_real(x.resolve_conj()) if x.is_complex() else x)
    except (PlimsollError, NotImplementedError):
        return None


def _measure_gradient(observer: Observer, entry: Entry | None, x: Tensor) -> None:
    if entry is None:
        return
    if not x.requires_grad:
        entry.absence = "frozen" if torch.is_grad_enabled() else "no_grad"
        return
    entry.absence = "never came"

    def came(gradient: Tensor | None) -> None:
        if gradient is None:  # of a result that nothing uses, of an operation with several
            return
        with observer.quietly():
            entry.backward = spectrum_of(gradient)
            entry.absence = None

    cast("Any", x).register_hook(came)


def _same(again: Iterator[Entry], entry: Entry) -> Entry | None:
    """Return the first run's entry for one of the second. Both come in the same order."""
    return next((first for first in again if first.operation == entry.operation), None)


def _floating(value: Any) -> list[Tensor]:
    """Return the tensors of real or complex numbers in an argument or a result."""
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() or value.is_complex() else []
    if isinstance(value, (list, tuple, set)):
        return [x for item in cast("Sequence[Any]", value) for x in _floating(item)]
    if isinstance(value, Mapping):
        return [x for item in cast("Mapping[Any, Any]", value).values() for x in _floating(item)]
    return []


def _version(x: Tensor) -> int:
    return -1 if x.is_inference() else x._version  # noqa: SLF001


def _is_input(x: Tensor, inputs: Sequence[Tensor], versions: Sequence[int]) -> bool:
    """Return whether it is an input, or a view of one, that was not written to."""
    for other, version in zip(inputs, versions, strict=True):
        if other is x or _memory(other) == _memory(x) != 0:
            return _version(other) == version
    return False


def _memory(x: Tensor) -> int:
    try:
        return x.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # meta and sparse tensors have no storage
        return 0


@functools.cache
def _without_its_check(function: FunctionType) -> Callable[..., Any]:
    """Return the function without its first check for torch-function modes."""
    # The check would call the observer again. The code is the same otherwise.
    names: dict[str, Any] = {**function.__globals__, "has_torch_function": _never}
    opened = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    opened.__kwdefaults__ = function.__kwdefaults__
    return opened


def _never(*_: object) -> bool:
    return False
