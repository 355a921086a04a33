"""Check of the script's own operations in a few whole steps: those that lose what they are given.

- Differences of 16-bit numbers that are equal but for their last digit.
- Products, quotients, sums and casts in FP16 that are infinite, or zero, although what goes in is neither.
- Sums in place of 16-bit numbers that are too large to take what is added.
- Sines and remainders of numbers so large that their neighbours are turns apart.
- Whole numbers that wrap, or are zero since a cast cuts fractions off.

A module's output may look sound while a number inside of it has no digit left. Such operations are most often written
out in a script, and the modules and functions of torch take care of theirs. So a `TorchFunctionMode` receives each
function that Python calls from the end of an optimizer's step to the next one. Unlike a dispatch mode it changes
nothing in what torch computes, but for the fast path of attention in evaluation mode, which it steps aside for.
"""

import math
import os
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext

from plimsoll.kernels.device_value import DeviceValue
from plimsoll.kernels.dtypes import FLOATING, FORMATS, SIXTEEN_BIT
from plimsoll.kernels.operators.checks import is_transformed
from plimsoll.watch.call_site import Place, look, owner_of
from plimsoll.watch.hooks.autograd_graph import backward_running
from plimsoll.watch.hooks.torch_hooks import has_compiler
from plimsoll.watch.names import clean
from plimsoll.watch.parameters.updates import spacing
from plimsoll.watch.session import contained
from plimsoll.watch.steps.wiring.checks import Fact, FollowedOptimizer, Training, TrainingCheck
from plimsoll.watch.taps.compiled_taps import is_capturing
from plimsoll.watch.thread_casts import as_written

_AFTER = (1, 7, 31, 127)  # steps of an optimizer: first weights may be a cause at first, and a good fit later
_MOST_LOOKS = 512  # at operations in one step
_ALL = 6  # of the first calls of a line are looked at
_MOST_VALUES = 1 << 16  # of one operation
_MOST_AGAIN = 1 << 22  # values of an operation that is computed again, or whose inputs are all read
_FEWEST = 16  # values without which nothing is judged
_SOME = 1 / 64  # of the differences are not zero
_NEAR = 4  # distances between neighbours: half of the differences that are not zero are no larger
_APART = 2.0  # radians between neighbours: which angle it was, is then left to rounding
_FP16_NORMAL = 2.0**-14  # where all results are smaller, what became zero does not only look small beside them
_FP16_LEAST = 2.0**-25  # this and less is rounded to zero
_ARRIVED = 16  # distances between neighbours: an average is no further from what it follows
_CASTS = ("to", "type", "type_as", "float", "half", "byte", "char", "short")  # functions
_BETWEEN = ("overrides.py", "_tensor.py", "functional.py")  # files of torch between its function and who calls it
_BYTES = (torch.int8, torch.uint8)
_PLAIN = (Tensor, nn.Parameter, nn.Buffer)

_Arguments = tuple[Any, ...]


class _Call(NamedTuple):
    """An operation that has returned.

    Attributes:
        name: Of the function, of operators without underscores.
        func: The function of torch.
        arguments: Those by place; of a cast, what is cast.
        keywords: Those by name.
        result: What it has returned.
        formats: The dtype of each argument that is a tensor: the narrow one, of a number that was widened before.
    """

    name: str
    func: Any
    arguments: _Arguments
    keywords: Mapping[str, Any]
    result: Tensor
    formats: list[torch.dtype]


class _Last(NamedTuple):
    """The last operation, until the next one: its result and its site; call and place, if it was not looked at yet."""

    result: "weakref.ref[Tensor]"
    site: "_Site"
    call: _Call | None
    place: Place | None


class _Kind(NamedTuple):
    """One way in which an operation loses what it is given: from this share and number of its values on.

    Attributes:
        functions: Names of functions of torch, of operators without underscores.
        results: Dtypes of their results.
        look: Returns two numbers: values that are lost, and values that are judged. None: it does not apply.
        share: Of the values that are judged.
        least: Number of them.
        undone: Functions that make good for it, if the next one takes the result.
        anywhere: Whether it is looked for under `no_grad`, too. There many differences and tables are only looked at.
    """

    functions: tuple[str, ...]
    results: tuple[torch.dtype, ...]
    look: Callable[[_Call], Tensor | None]
    share: float = 0.0
    least: int = 1
    undone: tuple[str, ...] = ()
    anywhere: bool = False


class _Site(NamedTuple):
    """An operation of the script: a place in its code, and what may be lost there."""

    file: str
    line: int
    instruction: int  # of the function: a line may hold several operations
    kind: str


@dataclass(slots=True)
class _Seen:
    """What was seen of a site.

    Attributes:
        place: File and line.
        text: The text of the line.
        module: The module that runs there, which is not kept alive.
        formats: The dtypes of what goes in.
        looks: In the present step.
        shares: Of values that were lost, for each step that shows it.
        lost: The numbers of those steps that had too many of them.
        is_said: True once it was recorded.
    """

    place: str | None
    text: str
    module: "weakref.ref[nn.Module] | None"
    formats: str
    looks: list[DeviceValue] = field(default_factory=list[DeviceValue])
    shares: list[float] = field(default_factory=list[float])
    lost: list[int] = field(default_factory=list[int])
    is_said: bool = False


class _Listened:
    """What is known of the functions that have returned in the step that is listened to."""

    def __init__(self) -> None:
        self.looks = _MOST_LOOKS  # that are left
        self.calls: Counter[_Site] = Counter()
        self.widened: dict[int, tuple[weakref.ref[Tensor], torch.dtype]] = {}  # by identity: what came from 16 bits
        self.last: _Last | None = None
        self.new: set[int] = set()  # memory of results
        self.decayed: set[int] = set()  # memory of what was multiplied in place by less than 1

    def format_of(self, x: Tensor) -> torch.dtype:
        """Return a tensor's dtype, or the narrow one that it was widened from."""
        ref, dtype = self.widened.get(id(x), (None, x.dtype))
        return dtype if ref is not None and ref() is x and x.dtype == torch.float32 else x.dtype

    def note(self, name: str, args: _Arguments, tensors: list[Tensor], result: Tensor) -> None:
        """Note 16-bit results whose memory is new, and those that were made smaller in place."""
        if result.dtype not in SIXTEEN_BIT:
            return
        memory = _memory(result)
        if name in ("mul_", "imul"):
            least = 0.5 * 2.0 ** -FORMATS[result.dtype].mantissa_bits  # a smaller change may be rounded away
            if not (len(args) > 1 and isinstance(args[1], float) and abs(args[1]) > 1 - least):
                self.decayed.add(memory)
        elif all(_memory(x) != memory for x in tensors):
            self.new.add(memory)

    def keeps(self, total: Tensor) -> bool:
        """Return True for a tensor of earlier steps that nothing but sums has changed in this one."""
        memory = _memory(total)
        return memory not in self.new and memory not in self.decayed

    def is_due(self, site: _Site) -> bool:
        """Return True at the first calls of an operation in a loop, and at calls 8, 16, 32 and so on."""
        self.calls[site] += 1
        calls = self.calls[site]
        is_due = self.looks > 0 and (calls <= _ALL or not calls & (calls - 1))
        self.looks -= is_due
        return is_due


class Operations(TrainingCheck):
    """The script's operations, between an optimizer's step and its next one."""

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self._mode: _Listening | None = None
        self._optimizer: FollowedOptimizer | None = None  # whose next step is waited for
        self._begun = 0  # of the steps in which it listens
        self._step = _Listened()
        self._seen: dict[_Site, _Seen] = {}
        self.session.at_close.append(self._stop)

    def step_ends(self, optimizer: Any, followed: FollowedOptimizer) -> None:
        """An optimizer's step has returned: listen, if this is one of the steps for it."""
        if self._mode is not None or self._begun == len(_AFTER) or followed.steps < _AFTER[self._begun]:
            return
        self._begun += 1
        if _only_devices() and not has_compiler():  # another mode, or a compiled function, would notice
            self._step, self._optimizer = _Listened(), followed
            self._mode = _Listening(self._returned)
            self._mode.start()

    def step_begins(self, optimizer: Any, followed: FollowedOptimizer) -> None:
        """An optimizer's step is called: judge, if it is the one that was waited for."""
        if followed is self._optimizer:
            self._stop()
            self._judge(at_end=False)
        elif self._optimizer is None:
            self._stop()

    def closes(self) -> None:
        """The watch closes: what was seen in a single step is judged by that."""
        self._judge(at_end=True)

    # If the script has entered a mode since and is still in it, ours waits for the end of that one, and does nothing.
    def _stop(self) -> None:
        self._optimizer = None
        if self._mode is not None and self._mode.stop():
            self._mode, self._step = None, _Listened()

    @contained
    def _returned(
        self, func: Any, args: _Arguments, keywords: Mapping[str, Any], result: Tensor, frame: FrameType
    ) -> None:
        """A function of torch has returned a tensor to this frame: look at it if it is one of those that may lose."""
        step, name = self._step, str(getattr(func, "__name__", ""))
        name = name[2:-2] if name.startswith("__") and name.endswith("__") else name
        last, step.last = step.last, None
        tensors = [x for x in (*args, *keywords.values()) if isinstance(x, Tensor)]
        if last is not None and not any(x is last.result() for x in tensors):
            last = None
        if not _can_be_read(result, *tensors):
            return
        if last is not None and name in _KINDS[last.site.kind].undone:
            self._forget(last.site)
        elif last is not None and last.call is not None and result.is_floating_point():
            self._look_at(last.site, last.call, last.place)
        step.note(name, args, tensors, result)
        if name in _CASTS and tensors:
            args, keywords, tensors = args[:1], {}, tensors[:1]
            if tensors[0].dtype in SIXTEEN_BIT:
                step.widened[id(result)] = weakref.ref(result), tensors[0].dtype
        if name in _BY_FUNCTION and (script := _frame_of_script(frame)) is not None:
            call = _Call(name, func, args, keywords, result, [step.format_of(x) for x in tensors])
            for kind in _BY_FUNCTION[name]:
                site = _Site(script.f_code.co_filename, script.f_lineno, script.f_lasti, kind)
                self._meet(site, call, "" if last is None else last.site.kind)

    # Whole numbers wrap on purpose in hashes, checksums, hues, and differences of which `where` takes the right one. So
    # those alone are looked at of which floating numbers are made at once. The difference of a difference is what a sum
    # has rounded away, to be added later: `(new - old) - added`. Much may be added to few counts.
    def _meet(self, site: _Site, call: _Call, before: str) -> None:
        kind, compensates = _KINDS[site.kind], site.kind == before == "difference"
        if call.result.dtype not in kind.results or (call.result.numel() < _FEWEST and site.kind != "sum"):
            return
        if compensates or not (kind.anywhere or torch.is_grad_enabled()):
            return
        if (site.kind == "sum" and not self._step.keeps(call.result)) or not self._step.is_due(site):
            return
        if site.kind == "wrap":
            self._step.last = _Last(weakref.ref(call.result), site, call, look())
        else:
            self._look_at(site, call)
            if kind.undone:
                self._step.last = _Last(weakref.ref(call.result), site, None, None)

    def _look_at(self, site: _Site, call: _Call, place: Place | None = None) -> None:
        with torch.no_grad(), as_written(call.result.device.type):
            counted = _KINDS[site.kind].look(call)
        if counted is not None:
            if site not in self._seen:
                names = [FORMATS[x].name if x in FORMATS else str(x).removeprefix("torch.") for x in call.formats]
                place = place or look()
                module = None if place.module is None else weakref.ref(place.module)
                self._seen[site] = _Seen(place.shown, place.text, module, " and ".join(dict.fromkeys(names)))
            self._seen[site].looks.append(DeviceValue(counted))

    def _forget(self, site: _Site) -> None:
        if site in self._seen and self._seen[site].looks:
            self._seen[site].looks.pop()

    # A step of its own is no proof: what is lost in most of the steps that show it, and in two of them, is no chance.
    # If the training had only one of these steps, that one decides.
    def _judge(self, *, at_end: bool) -> None:
        now = [(site, seen, seen.looks) for site, seen in self._seen.items() if seen.looks]
        everything = list(self._seen.items())
        for _, seen in everything:
            seen.looks = []
        model = self.training.model()
        modules = cast("Iterable[tuple[str, nn.Module]]", () if model is None else model.named_modules())
        names = {id(module): clean(name) or "model" for name, module in modules}
        step = self.session.step

        def read() -> list[Fact]:
            for site, seen, looks in now:
                lost, judged = cast("list[int]", torch.stack([v.tensor() for v in looks]).sum(dim=0).tolist())
                kind = _KINDS[site.kind]
                if judged >= _FEWEST:
                    seen.shares.append(lost / judged)
                    if lost >= max(kind.least, kind.share * judged):
                        seen.lost.append(step)
            return [_fact(site, seen, names) for site, seen in everything if _is_new(seen, at_end=at_end)]

        if now or at_end:
            self.facts.record_from(read, size_bytes=400 * (1 + len(now)))


def _is_new(seen: _Seen, *, at_end: bool) -> bool:
    """Return True if a site loses for sure, and was not recorded before."""
    return not seen.is_said and 2 * len(seen.lost) > len(seen.shares) and (len(seen.lost) > 1 or at_end)


def _fact(site: _Site, seen: _Seen, names: Mapping[int, str]) -> Fact:
    seen.is_said = True
    module = None if seen.module is None else names.get(id(seen.module()))
    message = f"{seen.place} loses what it is given: {site.kind}"
    return Fact("operation inexact", message, {
        "kind": site.kind, "place": seen.place, "text": seen.text, "formats": seen.formats,
        "share": max(seen.shares), "since": seen.lost[0], "modules": [] if module is None else [module],
    })  # fmt: skip


class _Listening(TorchFunctionMode):
    """The mode itself: hands on what functions of torch have returned, and to which frame."""

    def __init__(self, returned: Callable[..., object]) -> None:
        super().__init__()
        self._returned: Callable[..., object] | None = returned
        self._thread = threading.get_ident()
        self._is_on = False
        self._handle: Any = None

    def start(self) -> None:
        """Listen from now on."""
        self.__enter__()
        self._is_on = True
        _modes.add(self)
        self._handle = nn.modules.module.register_module_forward_pre_hook(self._before_module)

    def stop(self) -> bool:
        """Listen no more, and leave the stack of modes; return True if that was possible, or was done before."""
        self._returned = None
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        top = cast("Any", torch.overrides)._get_current_function_mode()  # noqa: SLF001
        if self._is_on and threading.get_ident() == self._thread and top is self:
            self._is_on = False
            self.__exit__(None, None, None)
        return not self._is_on

    # Modules of attention have a fast path in evaluation mode, which they do not take under a mode like this.
    def _before_module(self, module: nn.Module, _: Any) -> None:
        if not module.training and isinstance(module, _WITH_FAST_PATH) and threading.get_ident() == self._thread:
            self.stop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords: dict[str, Any] = kwargs or {}
        if torch.compiler.is_compiling():  # the first torch.compile of the script came while this listens
            return func(*args, **keywords)
        result = func(*args, **keywords)
        if self._returned is not None and type(result) in _PLAIN:
            self._returned(func, args, keywords, result, cast("Any", sys)._getframe(1))  # noqa: SLF001
        return result


_modes: "weakref.WeakSet[_Listening]" = weakref.WeakSet()
_WITH_FAST_PATH = (nn.MultiheadAttention, nn.TransformerEncoder, nn.TransformerEncoderLayer)


# Workers that load data are often forked in such a step. None of them goes on to listen.
def _after_fork() -> None:
    for mode in list(_modes):
        mode.stop()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _only_devices() -> bool:
    """Return True if no mode is entered but `torch.set_default_device`."""
    stack = cast("Any", torch.overrides)._get_current_function_mode_stack()  # noqa: SLF001
    return all(isinstance(mode, DeviceContext) for mode in stack)


def _can_be_read(*tensors: Tensor) -> bool:
    """Return True for plain tensors that torch computes with, outside of backwards and transforms."""
    for x in tensors:
        if type(x) not in _PLAIN or x.layout != torch.strided or x.is_nested or x.is_meta or x.is_inference():
            return False
        if x.is_floating_point() and x.dtype not in FLOATING:
            return False
    return backward_running() == -1 and not is_transformed() and not is_capturing()


def _memory(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _frame_of_script(frame: FrameType | None) -> FrameType | None:
    """Return the frame that has called a function of torch from this one; None if it is not the script's."""
    while frame is not None and frame.f_code.co_filename.endswith(_BETWEEN) and _owner(frame) == "torch":
        frame = frame.f_back
    return frame if frame is not None and _owner(frame) == "user" else None


def _owner(frame: FrameType) -> str:
    return owner_of(frame.f_code.co_filename)


# -- what shows that an operation loses --------------------------------------------------------------------------------


def _some(*tensors: Tensor) -> list[Tensor]:
    """Return values of tensors of one shape, from the same places all over them."""
    shape = tensors[0].shape
    steps = [1] * len(shape)
    while (total := math.prod(left := [-(-n // step) for n, step in zip(shape, steps, strict=True)])) > _MOST_VALUES:
        axis = max(range(len(shape)), key=left.__getitem__)
        steps[axis] *= min(left[axis], -(-total // _MOST_VALUES))
    return [x.detach()[tuple(slice(None, None, step) for step in steps)] for x in tensors]


def _operands(call: _Call) -> list[Tensor]:
    """Return values of two operands and of the result at the same places; none unless there are two."""
    result = call.result
    given = [
        x if isinstance(x, Tensor) else torch.full((), x, device=result.device)
        for x in (*call.arguments, *call.keywords.values())
        if isinstance(x, Tensor | int | float) and not isinstance(x, bool)
    ]
    given = given * 2 if len(given) == 1 else given  # of a square, a cast, a reciprocal
    if len(given) != 2 or any(type(x) not in _PLAIN or (x.device != result.device and x.dim()) for x in given):
        return []
    return _some(*(x.to(result.device).broadcast_to(result.shape) for x in given), result)


def _spacing(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the distance between neighbours in a floating dtype at each value; 0 at zero, which is no rounding."""
    return spacing(x, dtype) * (x != 0)


def _counted(lost: Tensor, judged: Tensor | int) -> Tensor:
    lost = lost.sum()
    return torch.stack([lost, judged.sum() if isinstance(judged, Tensor) else torch.full_like(lost, judged)])


# Whole numbers that a format holds in full are no roundings. Where nearly all differences are zero nothing is known: in
# its first epoch a policy is still the one that drew. Nor are zeros roundings beside large differences: most values may
# be within bounds. An FP32 number less its own rounding is taken on purpose, as the low half of a sum or to feed back
# an error. That is never more than half of the distance, or the whole of it where it was cut off or rounded at random,
# which is done without gradients.
def _differences(call: _Call) -> Tensor | None:
    formats = call.formats
    narrow = [dtype for dtype in formats if dtype in SIXTEEN_BIT]
    is_mixed = len(narrow) < len(formats)
    if call.keywords or len(formats) != 2 or not narrow or not all(dtype in FLOATING for dtype in formats):
        return None
    if any(isinstance(x, nn.Parameter) for x in call.arguments):  # against what it was before
        return None
    found = [x.float() for x in _operands(call)[:2]]
    if not found:
        return None
    distance = torch.maximum(*(_spacing(x, dtype) for x, dtype in zip(found, formats, strict=True)))
    size, difference = torch.maximum(*(x.abs() for x in found)), (found[0] - found[1]).abs()
    held = 2 ** (1 + min(FORMATS[dtype].mantissa_bits for dtype in narrow))
    is_exact = torch.stack([((x == x.round()) & (x.abs() <= held)).all() for x in found]).all()
    judged = (size > 0) & difference.isfinite() & ~is_exact
    own = (0.5 if call.result.requires_grad else 1.0) if is_mixed else 0.0  # of the distance, by its own rounding
    clear = judged & (difference > own * distance)
    judged = judged & (clear.sum() >= _SOME * judged.sum())
    differ = judged & (difference > 0)
    is_near = (differ & (difference <= _NEAR * distance)).sum() * 2 >= differ.sum()
    return _counted(judged & (difference <= distance) & is_near, judged)


def _numbers(call: _Call) -> list[float]:
    """Return the arguments that are numbers of Python."""
    return [x for x in (*call.arguments, *call.keywords.values()) if type(x) in (int, float)]


def _overflows(call: _Call) -> Tensor | None:
    if any(abs(x) > torch.finfo(torch.float16).max for x in _numbers(call)):
        return None
    tensors = [x.detach() for x in call.arguments if isinstance(x, Tensor)]
    if call.name in _SUMMING:
        if not tensors or any(x.numel() > _MOST_AGAIN for x in tensors):
            return None
        (result,), is_finite = _some(call.result), torch.stack([x.isfinite().all() for x in tensors]).all()
    elif found := _operands(call):
        *given, result = found
        is_finite = torch.stack([x.isfinite() & (x != 0) for x in given]).all(dim=0)
        is_finite &= torch.stack([_varies(x, result.isposinf() & is_finite) for x in given]).any()
    else:
        return None
    return _counted(result.isposinf() & is_finite, result.numel())  # masks are of negative ones


def _varies(x: Tensor, where: Tensor) -> Tensor:
    x = x.float()
    return x.masked_fill(~where, -math.inf).amax() > x.masked_fill(~where, math.inf).amin()


def _underflows(call: _Call) -> Tensor | None:
    found = _operands(call) if call.result.requires_grad else []  # else it may be the end of a table of powers
    if not found or any(0 < abs(x) <= _FP16_LEAST for x in _numbers(call)):  # to keep an unused result in the graph
        return None
    judged = (found[0] != 0) & (found[1] != 0)
    return _counted(judged & (found[2] == 0) & (found[2].abs().amax() < _FP16_NORMAL), judged)


# As it is added where a divisor may be zero, it is missed there, and only there.
def _epsilons(call: _Call) -> Tensor | None:
    (added,) = call.arguments[1:2] or (call.keywords.get("min"),)  # of `clamp` the lower bound
    if type(added) is not float or not 0 < added <= _FP16_LEAST:
        return None
    (result,) = _some(call.result)
    return _counted(result == 0, result.numel())


# What is added once more, now to the sum that holds it, shows whether it made a difference the first time. An average
# that has arrived has little to add. Weights and their copies have rules of their own.
def _swallowed(call: _Call) -> Tensor | None:
    given, *parts = (x for x in call.arguments if isinstance(x, Tensor))
    if call.result.requires_grad or isinstance(given, nn.Parameter) or len(parts) != 1 or parts[0].dim() == 0:
        return None
    total, part = (x.float() for x in _some(call.result, parts[0].broadcast_to(call.result.shape)))
    judged = part.isfinite() & total.isfinite()
    if call.name == "lerp_":
        judged = judged & ((part - total).abs() > _ARRIVED * _spacing(total, call.result.dtype))
        part = part - total
    added = part * math.prod(_numbers(call))  # the weight, or the keyword alpha
    judged = judged & (added != 0)
    return _counted(judged & ((total + added).to(call.result.dtype) == total), judged)


def _angles(call: _Call) -> Tensor | None:
    angle = call.arguments[-1] if call.arguments else None  # of `polar` the second argument
    if call.keywords or not isinstance(angle, Tensor) or call.formats[-1] not in (torch.float32, *SIXTEEN_BIT):
        return None
    x = _some(angle)[0].float()
    return _counted((_spacing(x, call.formats[-1]) >= _APART) & x.isfinite(), x.numel())


def _remainders(call: _Call) -> Tensor | None:
    found = _operands(call)
    if not found or call.keywords or call.formats[0] not in (torch.float32, *SIXTEEN_BIT):
        return None
    x, by = found[0].float(), found[1].float()
    return _counted((_spacing(x, call.formats[0]) >= by.abs() / 2) & (by != 0) & x.isfinite(), x.numel())


def _wraps(call: _Call) -> Tensor | None:
    tensors = [x for x in call.arguments if isinstance(x, Tensor)]
    if any(x.is_floating_point() or x.numel() > _MOST_AGAIN for x in tensors):
        return None
    kept = {name: value for name, value in call.keywords.items() if name not in ("dtype", "out")}
    again = call.func(*(x.long() if isinstance(x, Tensor) else x for x in call.arguments), **kept)
    return _counted(again != call.result, call.result.numel())


def _casts(call: _Call) -> Tensor | None:
    x, info = _to_whole(call), torch.iinfo(call.result.dtype)
    return None if x is None else _counted((x.trunc() > info.max) | (x.trunc() < info.min), x.numel())


# Parts of a day, brightness of stars: some are above 1. Where all are below 1/2, rounding would give zeros, too.
def _fractions(call: _Call) -> Tensor | None:
    x = _to_whole(call)
    if x is None:
        return None
    largest = x.abs().amax()
    return _counted((x != 0) & (x.abs() < 1) & (largest <= 1) & (largest >= 0.5), x != 0)


def _to_whole(call: _Call) -> Tensor | None:
    given = call.arguments[0]
    return _some(given)[0].float() if isinstance(given, Tensor) and given.is_floating_point() else None


_PRODUCTS = ("mul", "rmul", "multiply", "square", "pow")
_QUOTIENTS = ("div", "truediv", "rtruediv", "rdiv", "divide", "reciprocal", "rsqrt")
_SUMS = ("add", "sum", "cumsum")
_BOUNDS = ("clamp", "clamp_max", "clip", "minimum", "where", "masked_fill", "nan_to_num")
_SUMMING = ("sum", "cumsum", "matmul", "bmm", "mm", "einsum")  # not value by value
# A difference in place (`sub_`) has lost its operand. Half of the values is more than chance leaves near zero or a
# bound. Angles beyond their digits are the first columns of a table whose others are small. What kernels and
# activations let go to infinity in FP16 are single values. No code may wrap. Larger integers are cells and bins, of
# which the first may have all.
_KINDS = {
    "difference": _Kind(("sub", "rsub", "subtract"), FLOATING, _differences, 0.5, 8, ("detach",)),  # straight through
    "overflow": _Kind(
        (*_PRODUCTS, *_QUOTIENTS, *_SUMMING, "add", *_CASTS), (torch.float16,), _overflows, 0.02, undone=_BOUNDS
    ),
    "underflow": _Kind((*_PRODUCTS, *_CASTS), (torch.float16,), _underflows, 0.5, 8),
    "epsilon": _Kind(("add", "radd", "clamp", "clamp_min", "clip"), (torch.float16,), _epsilons),
    "sum": _Kind(("iadd", "add_", "lerp_"), SIXTEEN_BIT, _swallowed, 0.5, 8, ("sub", "rsub", "sub_", "isub"), True),
    "angle": _Kind(("sin", "cos", "polar"), (*FLOATING, torch.complex64), _angles, 0.01, 8),
    "remainder": _Kind(("remainder", "fmod"), FLOATING, _remainders, 0.5, 8),
    "wrap": _Kind((*_SUMS, "sub", "rsub", "mul", "rmul"), _BYTES, _wraps),
    "cast": _Kind(_CASTS, (*_BYTES, torch.int16), _casts, anywhere=True),
    "fraction": _Kind(_CASTS, _BYTES, _fractions, 0.98, 8, anywhere=True),
}
_BY_FUNCTION = {
    name: [kind for kind, of in _KINDS.items() if name in of.functions]
    for name in {name for kind in _KINDS.values() for name in kind.functions}
}
