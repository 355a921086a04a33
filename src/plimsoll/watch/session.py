"""State of a watch: due collections, targets of measurements, contained failures.

Taps, parameter readers, the step boundary and the recorder all hold the session. The session holds the model weakly.
Nothing here raises into training: `contained` turns any failure into one warning and an event.
"""

import contextlib
import functools
import os
import threading
import weakref
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from typing import Any, ClassVar, Concatenate, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor, nn

from plimsoll import kernels
from plimsoll.errors import PlimsollError
from plimsoll.formats import get_element
from plimsoll.runs import Event, RunWriter, Scalars
from plimsoll.spectrum.measurement import plain
from plimsoll.tensor_collections import OF_MODULES
from plimsoll.text import warn_user
from plimsoll.watch.hooks import torch_hooks
from plimsoll.watch.ranks.ranks import Ranks
from plimsoll.watch.sample import Pool, Rows, Sample
from plimsoll.watch.settings import COLLECTIONS, Settings

P = ParamSpec("P")
R = TypeVar("R")
_PLAIN = frozenset({Tensor, nn.Parameter})
_PlainSeries = tuple[torch.dtype, torch.device, int]


class ShadowStep(Protocol):
    """The calls that a watch makes to its shadow steps (`shadow.shadow_step`)."""

    def forward_begins(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A training forward of the root module begins."""
        ...

    def forward_ends(self, output: Any) -> None:
        """A forward of the root module has returned."""
        ...

    def begin_transformed(self) -> None:
        """The model is called inside a `torch.func` transform, and not in a forward of its own."""
        ...

    def backward_begins(self) -> None:
        """A backward begins."""
        ...

    def backward_ends(self) -> None:
        """A backward has ended."""
        ...

    def end_step(self) -> None:
        """The step has ended."""
        ...

    def detach(self) -> None:
        """Remove all hooks and release what is kept."""
        ...

    def meet(self, module: str, role: str, tensors: list[tuple[str, Tensor]]) -> None:
        """A tap meets tensors of a repetition."""
        ...

    def see(self, name: str, x: Tensor, recomputing: bool) -> None:
        """A tap meets a tensor of the real step."""
        ...

    @property
    def due(self) -> bool:
        """True if the present step has a shadow."""
        ...

    def see_compiled(self, site: tuple[str, int], names: Sequence[str], x: Tensor, *, gradient: bool) -> None:
        """Compiled code runs, and meets a tensor of the real step, or its gradient."""
        ...

    def compare_gradients(self, grads: Mapping[str, Tensor], narrowed: Mapping[str, torch.dtype]) -> None:
        """The optimizer is about to read these gradients."""
        ...


class StepSchedule:
    """Collections due in the step. Plain bools, since compiled code guards on them."""

    def __init__(self) -> None:
        self.weights = self.gradients = self.optimizer = self.updates = False
        self.activations = self.activation_gradients = False
        self.forward = False  # either of the two above: what a tap asks first
        self.traced = False  # taps keep references to what they do not measure (`origin`)


class WatchSession:
    """State of one watch."""

    # True while a shadow step's repetition runs, or another one, of whichever watch: nothing of it is recorded.
    repeating: ClassVar[bool] = False
    repetitions: ClassVar[int] = 0

    def __init__(self, model: nn.Module, name: str, settings: Settings, writer: RunWriter, ranks: Ranks) -> None:
        self.model = weakref.ref(model)
        self.name, self.settings, self.writer, self.ranks = name, settings, writer, ranks
        self.step = 0
        self.due = StepSchedule()
        self._intervals = set(settings.intervals.values())
        self.on_request = 0  # so many steps are sampled whole, the present one included
        self.open = True
        self.pool = Pool(settings.block)
        self.sample: Sample | None = None
        self.ring_only: frozenset[str] = frozenset()  # collections that this step has for the recorder alone
        self.muted = False
        self._mutes = 0  # that have not ended
        self._held: dict[str, bool] = {}  # what was due when muted
        self.live = False  # inside a training forward of the root
        self.live_thread = 0  # whose forward that is
        self.left = False  # in a child of the process that watches
        self.elsewhere: set[int] = set()  # threads whose last backward was another model's
        self.shadow: ShadowStep | None = None
        self.at_close: list[Callable[[], None]] = []  # called first when the watch closes
        self.collections: list[str] = []  # by series number
        self.names: list[str] = []  # of tensors, by series number
        self._series: dict[tuple[str, str, torch.dtype, bool], int] = {}
        self._plain_series: dict[str, dict[str, _PlainSeries]] = {name: {} for name in COLLECTIONS}
        self._said: set[str] = set()
        _sessions.add(self)

    def is_elsewhere(self) -> bool:
        """Return True if this thread's backward is another model's.

        A thread of its own may train this model meanwhile.
        """
        # Autograd writes gradients without Python's lock: reading one meanwhile can crash.
        return bool(self.elsewhere) and threading.get_ident() in self.elsewhere

    def plan(self, step: int, number: int | None = None) -> None:
        """Set the collections due at the step; `number`: the count for the intervals."""
        if not self.on_request and self._is_idle(step, number):
            if self.sample is not None or self.due.forward:
                self._clear()
            return
        wanted = {name for name in COLLECTIONS if self.on_request or self.settings.due(name, step, number)}
        wanted &= self.settings.intervals.keys()
        recorded = frozenset(self.settings.recorded) - wanted
        for name in COLLECTIONS:
            setattr(self.due, name, self.open and (name in wanted or name in recorded))
        self.due.forward = self.due.activations or self.due.activation_gradients
        self.ring_only = recorded
        if any(getattr(self.due, name) for name in COLLECTIONS):
            self.sample = Sample(step, self.pool)
        else:
            self.sample = None

    def _is_idle(self, step: int, number: int | None) -> bool:
        """Return True if nothing is due at the step; one look, since most steps are such."""
        settings, count = self.settings, step if number is None else number
        if settings.recorded or count < settings.warmup or settings.shadows(step):
            return False
        return all(count % every for every in self._intervals)

    def _clear(self) -> None:
        for name in (*COLLECTIONS, "forward"):
            setattr(self.due, name, False)
        self.ring_only, self.sample = frozenset(), None

    def take(self, collection: str) -> None:
        """Make one more collection due in the current step."""
        if not self.open or self.muted:
            return
        setattr(self.due, collection, True)
        self.ring_only -= {collection}
        if self.sample is None:
            self.sample = Sample(self.step, self.pool)

    def plan_forward(self, step: int, number: int | None = None) -> None:
        """Set the next forward's due flags for compiled code, which reads them early."""
        if self.on_request <= 1 and self._is_idle(step, number):
            self.due.activations = self.due.activation_gradients = self.due.forward = False
            return
        for name in OF_MODULES:
            scheduled = self.on_request > 1 or self.settings.due(name, step, number)
            asked = (scheduled and name in self.settings.intervals) or name in self.settings.recorded
            setattr(self.due, name, self.open and asked)
        self.due.forward = self.due.activations or self.due.activation_gradients

    def mute(self) -> None:
        """Record nothing until as many calls of `unmute` have come."""
        with _lock:
            self._mutes += 1
            if self._mutes == 1:
                self._held = {name: flag for name, flag in vars(self.due).items() if flag}
                for name in self._held:
                    setattr(self.due, name, False)
                self.muted = True

    def unmute(self) -> None:
        """End one `mute`."""
        with _lock:
            self._mutes -= 1
            if self._mutes == 0:
                for name in self._held:
                    setattr(self.due, name, self.open)
                self.muted = self.left

    def shut(self) -> None:
        """Stop all measurements."""
        self.open = False
        if self.sample is not None:
            self.sample.release()  # hooks in the graph may keep the sample alive
        self._clear()

    def leave(self) -> None:
        """Stop all measuring, recording and printing, in a forked child."""
        # Torch's threads do not outlive a fork, so that measuring could wait for ever.
        self.shut()
        self.left = self.muted = True
        self.due.traced = self.live = False
        self.at_close.clear()

    def series_of(self, collection: str, name: str, x: Tensor, dtype: torch.dtype | None = None) -> int:
        """The number of a series; `dtype` is a narrower one that the values came through."""
        wanted, is_plain = dtype or x.dtype, type(x) in _PLAIN
        known = self._plain_series[collection].get(name)
        if is_plain and known is not None and known[0] is wanted and known[1] == x.device:
            return known[2]
        sharded = not is_plain and hasattr(x, "placements")
        number = self._series_of(collection, name, wanted, sharded)
        if not sharded:
            self._plain_series[collection][name] = wanted, x.device, number
        return number

    def _series_of(self, collection: str, name: str, dtype: torch.dtype, sharded: bool) -> int:
        key = (collection, name, dtype, sharded)
        known = self._series.get(key)
        if known is not None:
            return known
        shared = sharded or self.ranks.shared(collection)
        number = self.writer.series(collection, name, format=get_element(key[2], "watch").name, shared=shared)
        while len(self.collections) <= number:
            self.collections.append("")
            self.names.append("")
        self.collections[number], self.names[number] = collection, name
        self._series[key] = number
        return number

    def gather(
        self, collection: str, named: Mapping[str, Tensor], narrowed: Mapping[str, torch.dtype]
    ) -> tuple[list[str], dict[torch.device, tuple[list[Tensor], list[int]]]]:
        """Return the readable names, and by device their tensors and series numbers.

        The tensors are plain ones.

        Args:
            collection: Name of the collection.
            named: Tensors by name. Those that are not floating are left out; of complex ones it is said.
            narrowed: Narrower dtypes that values came through, by name.
        """
        known = self._plain_series[collection]
        names: list[str] = []
        ready: dict[torch.device, tuple[list[Tensor], list[int]]] = {}
        device: torch.device | None = None
        tensors, series = list[Tensor](), list[int]()
        for name, x in named.items():
            entry = known.get(name)
            # Of a tensor as it was the last time this takes half a microsecond, and all the rest three.
            if (
                entry is None or entry[0] is not x.dtype or entry[1] != x.device or type(x) not in _PLAIN
                or x.layout is not torch.strided or x.is_neg() or name in narrowed
            ):  # fmt: skip
                # Integer tensors, such as counts of steps, are left out. Of complex ones an event says so.
                plain = self.readable(x, collection, name) if x.is_floating_point() or x.is_complex() else None
                if plain is None:
                    continue
                number = self.series_of(collection, name, x, narrowed.get(name))
            else:
                plain, number = x, entry[2]
            if plain.device != device:
                device = plain.device
                tensors, series = ready.setdefault(device, ([], []))
            names.append(name)
            tensors.append(plain)
            series.append(number)
        return names, ready

    def series_in(self, collections: Collection[str]) -> set[int]:
        """The numbers of all series of these collections."""
        return {number for number, name in enumerate(self.collections) if name in collections}

    def readable(self, x: Tensor, what: str, name: str = "") -> Tensor | None:
        """Return the plain tensor to measure, not detached; None, said once, without one."""
        if type(x) in _PLAIN and x.layout == torch.strided and not (x.is_meta or x.is_neg() or x.is_complex()):
            return x
        try:
            return plain(x, "")
        except PlimsollError as error:
            # What it is called is in two parts, which are put together when something is said.
            what = f"{what} {name}".strip()
            self.say("not measured", f"{what}: {error}", once=what)
            return None

    def measure(self, x: Tensor, collection: str = "", name: str = "") -> tuple[Rows, int]:
        """Measure a plain tensor into a fresh row; return the rows and the row's number.

        On a GPU one of a tap, which gives its name, may be measured later: the row has no counts before `flush`.
        """
        assert self.sample is not None
        rows = self.sample.rows(x.device)
        bank, row, number = rows.take()
        if rows.queue is not None and name and rows.enqueue(x, number, (collection, name)):
            return rows, number
        if self.settings.block:  # what is measured one by one is activations and gradients
            kernels.measure_into([x], bank, [row], accumulate=False, block=self.settings.block)
        else:
            rows.measure_one(x, bank, row)
        return rows, number

    def flush(self) -> None:
        """Measure what taps have queued; a forward or a backward has ended."""
        if self.sample is None:
            return
        try:
            self.sample.flush()
        except Exception as error:  # noqa: BLE001  (P2: a launch that fails must not stop training)
            self.failed("measure", error, loses=OF_MODULES)
        for collection, name in self.pool.trials.take_lost():
            what = f"{collection} {name}"
            message = f"{what}: expected values that stay until the forward or the backward ends; they were changed"
            self.say("not measured", f"{message}. They are measured at once from here on.", once=f"changed {what}")

    def has_room(self, tensors: int = 1, size_bytes: int = 0) -> bool:
        """Return True if the sample has room for more tensors and bytes; say once if not."""
        sample = self.sample
        if sample is None:
            return False
        many, much = sample.entries + tensors, sample.size_bytes + size_bytes
        if many <= self.settings.max_tensors and much <= self.settings.max_bytes:
            return True
        if sample.fold():
            return self.has_room(tensors, size_bytes)
        self.say(
            "capped",
            f"a sample of {many:,} tensors or {much / 2**20:,.0f} MB is more than max_tensors="
            f"{self.settings.max_tensors:,} or max_bytes={self.settings.max_bytes:,} allow: the rest is left out. "
            "Raise them, or watch less with include= and collect=.",
            once="capped",
            warn=True,
        )
        return False

    def say(self, kind: str, message: str, *, once: str | None = None, warn: bool = False, **details: object) -> None:
        """Records an event; with `once`, one of that key only."""
        if once is not None:
            if once in self._said:
                return
            self._said.add(once)
        self.writer.write(Event(step=self.step, kind=kind, message=message, details=details))
        if warn:
            warn_user(f"plimsoll: {message}")

    def say_transformed(self) -> None:
        """Record once that calls of the model inside transforms are left out."""
        self.say(
            "not measured",
            "calls of the model inside a torch.func transform (vmap, grad, jacrev) are not measured: their tensors "
            "have no values of their own. All other calls are",
            once="transforms",
        )

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Records numbers of a step."""
        self.writer.write(Scalars(step=step, values=values))

    def failed(self, where: str, error: Exception, *, loses: Sequence[str] = ()) -> None:
        """Contain a failure of the watch itself, so that training continues.

        Args:
            where: What has failed.
            error: How.
            loses: Collections that are not recorded, or not whole, if it fails in a step in which they are due.
        """
        message = f"{where} failed and was left out ({type(error).__name__}: {error})"
        lost = [name for name in loses if getattr(self.due, name)]
        once = f"{where}: {type(error).__name__}"
        first = once not in self._said
        self._said.add(once)
        # The user is warned once. The run has one more event if what fails fails in a sampled step later.
        details = {"collections": lost} if lost else {}
        self.say("failure", message, once=f"{once} {lost}", warn=first, **details)


_sessions: "weakref.WeakSet[WatchSession]" = weakref.WeakSet()
_lock = threading.Lock()  # around what several threads count


def _after_fork() -> None:
    global _lock  # noqa: PLW0603  (another thread may have held it)
    _lock = threading.Lock()
    WatchSession.repeating, WatchSession.repetitions = False, 0
    for session in list(_sessions):
        session.leave()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@contextlib.contextmanager
def nothing_recorded() -> Generator[None]:
    """Context in which no watch of this process records anything."""
    begin_repetition()
    try:
        with watches_muted():
            yield
    finally:
        end_repetition()


def begin_repetition() -> None:
    """Record nothing in any watch until as many calls of `end_repetition` have come."""
    with _lock:
        WatchSession.repetitions += 1
        WatchSession.repeating = True


def end_repetition() -> None:
    """End one `begin_repetition`."""
    with _lock:
        WatchSession.repetitions = max(0, WatchSession.repetitions - 1)  # a fork may have ended it
        WatchSession.repeating = WatchSession.repetitions > 0


@contextlib.contextmanager
def watches_muted() -> Generator[None]:
    """Context in which the present watches record nothing; one begun inside does."""
    # By identity, since each session has several listeners.
    of_listeners = [getattr(listener, "session", None) for listener in torch_hooks.listeners()]
    sessions = list({id(session): session for session in of_listeners if isinstance(session, WatchSession)}.values())
    for session in sessions:
        session.mute()
    try:
        yield
    finally:
        for session in sessions:
            session.unmute()


def contained(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R | None]:
    """Contain the exceptions of a method of an object with a `session`: record each once."""
    return contained_reader()(method)


def contained_reader(
    *collections: str,
) -> Callable[[Callable[Concatenate[Any, P], R]], Callable[Concatenate[Any, P], R | None]]:
    """Contain a method that reads these collections, as `contained` does: its failure names them as lost."""

    def contains(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R | None]:
        @functools.wraps(method)
        def harmless(self: Any, *args: P.args, **kwargs: P.kwargs) -> R | None:
            try:
                return method(self, *args, **kwargs)
            except Exception as error:  # noqa: BLE001  (P2: whatever fails in watching must not stop training)
                self.session.failed(method.__qualname__.removeprefix("_"), error, loses=collections)
                return None

        return harmless

    return contains
