"""The shadow step: the same batch again in FP32, which shows all tensors' errors.

On such a step each forward of the root is noted: its arguments, the random generators, the buffers. Taps keep copies of
the activations and of their gradients until the backward has ended, and hooks on the root's outputs keep the gradients
that arrive there. When the backward ends, the forward is repeated in FP32, and the kept gradients are sent back through
it: at the real step's scale, so that values compare as they are. Each tensor's *error* is its difference from the
repetition's, recorded as sums (`ErrorSums`). A real zero that is nonzero in the repetition has *underflowed*; one that
is zero there too is *structural*; where the repetition has NaN it is neither.

Decisions (routes, classes) are compared too, see `decisions`. A model that makes some is run as it was once more, from
its second shadow step on.
"""

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from plimsoll.errors import ArgumentError
from plimsoll.kernels.operators.checks import is_transformed
from plimsoll.runs import Scalars
from plimsoll.watch.hooks.autograd_graph import backward_running
from plimsoll.watch.names import clean, tensors_in
from plimsoll.watch.session import WatchSession, begin_repetition, contained, end_repetition
from plimsoll.watch.settings import SHADOWED, Settings
from plimsoll.watch.shadow import data_parallel, replay
from plimsoll.watch.shadow.capture import CapturedCall, CapturedForward, watch_calls
from plimsoll.watch.shadow.comparisons import Comparisons, GradientErrors, gradient_row
from plimsoll.watch.shadow.data_parallel import DataParallel, hooks_of_sharding, leaves_of, without_hooks
from plimsoll.watch.shadow.decisions import Decisions, Tally, class_axis, class_choice
from plimsoll.watch.shadow.replay import RandomState, borrowed, draws_by_dtype, fresh_inputs, in_reference, tensors_of

_opened: Counter[str] = Counter()
_UNSEEN = "no forward of the model was seen (it runs inside compiled code, or its parts are called by themselves)"
_TWICE = "a gradient is differentiated itself (create_graph), which the repetition does not do"
OTHER_DRAWS = (
    "compiled code draws other random numbers (for dropout) than eager code: set "
    "torch._inductor.config.fallback_random = True before it is compiled"
)
_TRANSFORMED = "the model was called inside a torch.func transform too, which the repetition does not do"
_NO_GRADIENT = "no gradient came back to a tensor that the model returned"


def check(settings: Settings) -> None:
    """Raises `ArgumentError` where a shadow step was asked for and cannot be."""
    if settings.shadow_every is None:
        return
    if not set(SHADOWED) & settings.intervals.keys():
        raise ArgumentError(
            f"watch: expected collect to have some of {', '.join(SHADOWED)} where shadow_every is given; got "
            f"collect={list(settings.intervals)}. Collect one of them, or leave shadow_every out."
        )


def attach(session: WatchSession, root: nn.Module, begin: Callable[[], None]) -> None:
    """Give the watch its shadow steps if asked for; training forwards call `begin`."""
    if session.settings.shadow_every is not None:
        session.shadow = Shadow(session, root, begin)


class Shadow:
    """The shadow steps of one watch."""

    def __init__(self, session: WatchSession, root: nn.Module, begin: Callable[[], None]) -> None:
        self.session, self._begin = session, begin
        name = session.writer.path.name
        self._name = f"{name}/{_opened[name]}"  # a run that is watched again meets under another name
        _opened[name] += 1
        self._running: tuple[CapturedCall, Counter[str], list[Tensor], Decisions] | None = None
        self._decides = False  # whether a forward has made decisions
        self.evaluates = False  # whether a forward in evaluation mode counts
        self._changes: dict[str, bool] = {}  # whether something changes a tap's tensors in place
        self._undo = watch_calls(root, self._around)
        self._start()

    def detach(self) -> None:
        """Takes back what it has put in anywhere."""
        self._undo()
        for call in self._calls:
            call.release()
        self._start()

    def _start(self) -> None:
        self._calls: list[CapturedCall] = []
        self._gradients = GradientErrors(self.session)
        self._comparisons, self._tally = Comparisons(), Tally()
        self._left_out: set[int] = set()  # series
        self._kept_bytes = 0
        self._reason: str | None = None
        self._transformed = False  # the model was called inside a transform
        self._taken = False
        self._ranks: DataParallel | None = None

    @property
    def due(self) -> bool:
        """True if the present step has a shadow."""
        return self.session.open and self.session.settings.shadows(self.session.step)

    # -- the real step -------------------------------------------------------------------------------------------------

    @contained
    def forward_begins(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A training forward of the root begins."""
        if not self.due or WatchSession.repeating:
            return
        if not self._calls:
            self._ranks = self._meet(model)
        if self._reason is not None:
            return
        self._calls.append(CapturedCall(model, args, kwargs))

    def _meet(self, model: nn.Module) -> DataParallel | None:
        """The ranks that share the model, once all of them have come to this step."""
        ranks = data_parallel.of(model, self.session.ranks)
        if isinstance(ranks, str):
            self._reason = ranks
            return None
        if ranks is not None and not data_parallel.meet(f"{self._name}/{self.session.step}", self.session.ranks.world):
            self._reason = data_parallel.ABSENT
            return None
        return ranks

    @contained
    def forward_ends(self, output: Any) -> None:
        """A forward of the root has returned, real or repeated."""
        outputs = [x for _, x in tensors_in(output)]
        if self._running is not None:
            self._running[2].extend(outputs)
        elif self._calls and not WatchSession.repeating and not self._calls[-1].ended:
            call = self._calls[-1]
            call.ended = True
            for (name, _), seen in call.seen.items():
                if seen.values is not seen.original:  # a copy: the original is not kept alive for longer
                    self._note_changes(name, seen)
            if call.compiled:
                call.drawn = RandomState(call.devices)
            for index, x in enumerate(outputs):
                if x.requires_grad:  # one that is returned twice counts twice: no zero changes by that
                    call.hook(x, functools.partial(self._arrives, call, index))

    def _around(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Wrap a call of the root through a compiled one, whose hooks may not be called.

        If they are, that call counts.
        """
        root = self.session.model()
        trains = root is not None and torch.is_grad_enabled() and (root.training or self.evaluates)
        if root is None or WatchSession.repeating or not trains or is_transformed():
            return call(*args, **kwargs)
        self._begin()
        self.forward_begins(root, args, kwargs)
        output = None
        if self._calls:
            self._calls[-1].compiled = True
        try:
            output = call(*args, **kwargs)
        finally:
            self.forward_ends(output)
        return output

    @contained
    def _arrives(self, call: CapturedCall, index: int, g: Tensor) -> None:
        if call in self._calls:
            # A loss of derivatives reaches the weights by another way than the outputs. The repetition has other
            # gradients then, and sound physics-informed trainings looked like rounding error.
            if torch.is_grad_enabled():  # autograd leaves it on for create_graph alone
                self._reason = self._reason or _TWICE
            call.gradients[index] = g.detach()

    # A tensor is found again by the name of its tap and how many times that name had been called. A series of which any
    # part was not found again is left out: its fractions would be wrong. Where weights or inputs changed before the
    # repetition, or the repetition fails, nothing of the step is recorded but an event, of the kind "shadow".
    @contained
    def see(self, name: str, x: Tensor, recomputing: bool) -> None:
        """A tap has seen a tensor of the real step."""
        if not self._calls or not self.due:
            return
        session, call = self.session, self._calls[-1]
        seen = call.sight(name, x)
        call.note_output(seen, name, session.name)
        plain = session.readable(x, name)
        if plain is None:
            return
        if session.due.activations and not recomputing:
            seen.series.append(session.series_of("activations", name, x))
            if not seen.noted:
                call.keep(seen, self._has_room(plain), copied=self._changes.get(name, True))
        if session.due.activation_gradients and x.requires_grad:
            seen.names.append(name)
            if len(seen.names) == 1:
                call.hook(x, functools.partial(self._gradient, call, seen))

    @contained
    def see_compiled(self, site: tuple[str, int], names: Sequence[str], x: Tensor, *, gradient: bool) -> None:
        """Compiled code has come to a tensor of the real step, or to its gradient."""
        session = self.session
        if not self._calls or WatchSession.repeating:
            return
        if not gradient:
            call = self._calls[-1]
            call.compiled = True
            seen = call.sight_compiled(site, names[0])
            for name in names:
                call.note_output(seen, name, session.name)
            if session.due.activations:
                seen.series = [session.series_of("activations", name, x) for name in names]
                seen.values = self._has_room(x).detach().clone()
            return
        sighted = [seen for call in self._calls if (seen := call.sighted(site)) is not None]
        if sighted and session.due.activation_gradients:
            # Of several forwards the last is the first to get its gradient.
            seen = sighted[-1]
            seen.gradient_series = [session.series_of("activation_gradients", name, x) for name in names]
            seen.gradient, seen.gradient_version = self._has_room(x).detach().clone(), 0

    @contained
    def _gradient(self, call: CapturedCall, seen: CapturedForward, g: Tensor) -> None:
        plain = self.session.readable(g, seen.names[0])
        if call in self._calls and plain is not None:
            seen.gradient_series = [self.session.series_of("activation_gradients", name, g) for name in seen.names]
            # Not a copy: autograd adds to no gradient that somebody holds. What a later hook has changed is left out.
            seen.gradient, seen.gradient_version = self._has_room(plain).detach(), plain._version  # noqa: SLF001

    def _has_room(self, x: Tensor) -> Tensor:
        """Return the tensor; an empty one if there is no room, which nothing compares."""
        self._kept_bytes += x.numel() * x.element_size()
        if self._kept_bytes <= self.session.settings.max_bytes:
            return x
        self.session.say(
            "capped",
            f"a shadow step's activations take more than max_bytes={self.session.settings.max_bytes:,}: the "
            "rest is left out. Raise it, or watch less with include= and collect=.",
            once="shadow copies", warn=True,
        )  # fmt: skip
        return x.new_empty(0)

    # The loss may be one of what the transform returns: a penalty on derivatives, say. Its gradients are not those of
    # the outputs alone then.
    def begin_transformed(self) -> None:
        """The model is called inside a `torch.func` transform."""
        self._transformed = self._transformed or self.due

    # -- the repetition ------------------------------------------------------------------------------------------------

    @contained
    def backward_begins(self) -> None:
        """A backward begins: notes what gradients there are."""
        root = self.session.model()
        if self._calls and root is not None and self.session.due.gradients:
            self._gradients.backward_begins(root)

    def backward_ends(self) -> None:
        """A backward has ended: repeats the forwards that it came to."""
        if backward_running() != -1:
            return  # a checkpoint's, in the midst of another
        calls = [call for call in self._calls if call.gradients]
        root = self.session.model()
        if not calls or root is None or (self._reason is not None and self._ranks is None):
            for call in calls:
                call.gradients.clear()
            return
        spoiled = next(filter(None, (call.spoiled(root) for call in calls)), None)
        transformed = _TRANSFORMED if self._transformed else None
        self._reason = self._reason or spoiled or transformed or replay.missing_memory(root.parameters())
        if self._all_able():
            for call in calls:
                self._try(call)
        for call in calls:
            call.gradients.clear()
        if self.session.due.gradients:
            averaged = self._ranks is None or self._ranks.averages
            if averaged and self._all_able():
                self._compare_gradients_left(root)
            self._gradients.note(root)

    def _all_able(self) -> bool:
        """Return True if this step can be repeated, on all ranks."""
        if self._ranks is not None and not self._ranks.agrees(able=self._reason is None):
            self._reason = self._reason or "another rank could not repeat its part"
        return self._reason is None

    def _try(self, call: CapturedCall) -> None:
        try:
            self._repeat(call)
        except Exception as error:  # noqa: BLE001  (P2: whatever fails in watching must not stop training)
            self._reason = f"it raised {type(error).__name__}"
            self.session.failed("the shadow step", error)

    # Parameters' gradients are added up over the step's backwards. Their errors are those of what the last backward has
    # left, before unscaling and clipping; their zeros are counted in what the optimizer is given.
    @contained
    def _compare_gradients_left(self, root: nn.Module) -> None:
        self._gradients.backward_ends(root, self._ranks)

    def _repeat(self, call: CapturedCall) -> None:
        root = self.session.model()
        assert root is not None
        leaves, sharding = leaves_of(root), hooks_of_sharding(root)
        after, outputs = RandomState(call.devices), list[Tensor]()
        begin_repetition()
        try:
            dropouts, low, high = None, Decisions(), Decisions()
            if draws_by_dtype(call.devices) or self._decides:
                with low:
                    dropouts = call.listen(root)
                dropouts = dropouts if draws_by_dtype(call.devices) else None
            self._running = (call, Counter(), outputs, high)
            with in_reference(call.devices, dropouts), borrowed(root, leaves, call.buffers):
                without_hooks(root, sharding)
                call.random.restore()
                args, kwargs = inputs = fresh_inputs(call.inputs)
                with high:
                    root(*args, **kwargs)
                if call.drawn is not None and not call.drawn.matches(RandomState(call.devices)):
                    self._reason = OTHER_DRAWS
                    return
                wanted = [x for x in (*leaves.values(), *tensors_of(inputs)) if x.requires_grad]
                call.send_back(outputs, wanted)
            self._tally.add_all(low, high)
            self._decides = bool(high.made)
        finally:
            self._running = None
            end_repetition()
            after.restore()
        self._taken = True
        if self.session.due.gradients:
            self._gradients.add({clean(raw): (p, leaves[id(p)].grad) for raw, p in root.named_parameters()})

    @contained
    def meet(self, module: str, role: str, tensors: list[tuple[str, Tensor]]) -> None:
        """A tap sees tensors of a repetition."""
        if self._running is None:
            return
        call, times, _, decisions = self._running
        if role == "input":
            decisions.enter(module)
        else:
            decisions.leave(module)
        for path, x in tensors:
            name = f"{module}:{role}{path}"
            seen = call.seen.get((name, times[name]))
            times[name] += 1
            if seen is not None:
                self._note_changes(name, seen)
                if seen in call.outputs:
                    self._compare_classes(call, seen, x)
                self._compare(seen, x)

    # What follows may change a tensor in place. So a tap's tensors are copied until one forward has shown, by their
    # version, that they stay as they are. Copies took 6 of the 340 ms of a shadow step of benchmarks/microscope.py.
    def _note_changes(self, name: str, seen: CapturedForward) -> None:
        """Note whether a tensor was changed in place since it was met; leave it out if it was and has no copy."""
        if seen.original is None:
            return
        changed = seen.original._version != seen.original_version  # noqa: SLF001  (public in all but name)
        self._changes[name] = changed or self._changes.get(name, False)
        if changed and seen.values is seen.original:
            self._left_out.update(seen.series)
            seen.values = None
        seen.original = None

    def _compare_classes(self, call: CapturedCall, seen: CapturedForward, x: Tensor) -> None:
        index, name = call.outputs[seen]
        g, values = call.gradients.get(index), seen.values
        axis = None if g is None or values is None or values.shape != x.shape else class_axis(g)
        if axis is not None and values is not None:
            self._tally.add(name, class_choice(values, axis), class_choice(x, axis))

    def _compare(self, seen: CapturedForward, x: Tensor) -> None:
        if seen.values is not None and self._comparisons.add(seen.series, seen.values, x):
            seen.values = None
        if seen.gradient is not None and x.requires_grad:
            x.register_hook(functools.partial(self._compare_gradient, seen))

    @contained
    def _compare_gradient(self, seen: CapturedForward, g: Tensor | None) -> None:
        expected, divisor = seen.gradient, self.session.ranks.divisor
        if g is None or expected is None or expected._version != seen.gradient_version:  # noqa: SLF001
            return
        if self._comparisons.add(seen.gradient_series, expected, g, divisor=divisor, carries_scale=True):
            seen.gradient = None

    # -- what is reported ----------------------------------------------------------------------------------------------

    @contained
    def compare_gradients(self, grads: Mapping[str, Tensor], narrowed: Mapping[str, torch.dtype]) -> None:
        """The parameters' gradients are being read: as the optimizer is given them."""
        if not self.due:
            return
        for name, g in grads.items():
            expected, errors, is_left = self._gradients.taken(name, g)
            if expected is None or self._reason is not None:
                continue
            values = g.coalesce().values() if g.is_sparse else g
            plain = self.session.readable(values, "gradients", name)
            if plain is None:
                continue
            absent = g.numel() - values.numel()
            row = (
                errors
                if is_left and errors is not None and not absent
                else gradient_row(plain, expected, errors, absent=absent)
            )
            if row is not None:
                series = self.session.series_of("gradients", name, values, None if g.is_sparse else narrowed.get(name))
                self._comparisons.add_row(series, row, carries_scale=True)

    @contained
    def end_step(self) -> None:
        """The step has ended: its counts go beside what the sample has of the same series."""
        calls, reason = self._calls, self._reason
        if self.due and not (self._taken and reason is None):
            reason = reason or (_NO_GRADIENT if calls else _UNSEEN)
            self.session.say("shadow", f"shadow step not taken: {reason}")
        elif self.due and self.session.sample is not None:
            for call in calls:
                self._left_out.update(call.unmatched())
            self._comparisons.enter(self.session.sample, self._left_out)
            if scalars := self._tally.scalars():
                self.session.writer.write(Scalars(step=self.session.step, values=scalars))
        for call in calls:
            call.release()
        self._start()
