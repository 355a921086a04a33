"""The shadow step: the same batch once more in FP32, which tells zeros made by underflow from structural ones.

On such a step each forward of the root is noted: its arguments, the random generators, the buffers. Taps tell which of
the activations and of their gradients are zero (one byte a value, until the backward has ended), and hooks on the
root's outputs keep the gradients that arrive there. When the backward ends, the forward is repeated in FP32, and the
kept gradients are sent back through it: at the real step's scale, so that zeros compare as they are. A real zero that
is nonzero in the repetition has *underflowed*; one that is zero there too is *structural*; where the repetition has NaN
it is neither. Parameters' gradients are added up over the step's backwards, and compared with those that the optimizer
is given.

A tensor is found again by the name of its tap and how many times that name had been called. A series of which any part
was not found again is left out: its fractions would be wrong. Where weights or inputs changed before the repetition, or
the repetition fails, nothing of the step is told but an event, of the kind "shadow".
"""

import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from plimsoll.errors import ArgumentError
from plimsoll.kernels.device_value import DeviceValue
from plimsoll.watch.names import clean, tensors_in
from plimsoll.watch.ranks.ranks import Ranks
from plimsoll.watch.sample import Sample
from plimsoll.watch.session import WatchSession, contained
from plimsoll.watch.settings import SHADOWED, Settings
from plimsoll.watch.shadow.capture import CapturedCall, CapturedForward, watch_calls
from plimsoll.watch.shadow.replay import borrowed, draws_by_dtype, fresh_inputs, in_fp32, leaf, tensors_of
from plimsoll.watch.shadow.rng_state import RandomState

_backward_running = cast("Any", torch)._C._current_graph_task_id  # noqa: SLF001  (see _taps)
_UNSEEN = "no forward of the model was seen (it runs inside compiled code, or its parts are called by themselves)"
_NO_GRADIENT = "no gradient came back to a tensor that the model returned"


def check(settings: Settings, ranks: Ranks) -> None:
    """Raises `ArgumentError` where a shadow step was asked for and cannot be."""
    if settings.shadow_every is None:
        return
    if ranks.world > 1:
        raise ArgumentError(
            f"watch: expected one process where shadow_every is given; got world_size={ranks.world}, "
            f"shadow_every={settings.shadow_every}. One rank alone cannot repeat a step that all take together: "
            "leave shadow_every out, and tell underflow from structural zeros in a run of one process."
        )
    if not set(SHADOWED) & settings.intervals.keys():
        raise ArgumentError(
            f"watch: expected collect to have some of {', '.join(SHADOWED)} where shadow_every is given; got "
            f"collect={list(settings.intervals)}. Collect one of them, or leave shadow_every out."
        )


def attach(core: WatchSession, root: nn.Module, begin: Callable[[], None]) -> None:
    """Gives the watch its shadow steps, where they were asked for. `begin` is told that a training forward begins."""
    if core.settings.shadow_every is not None:
        core.shadow = Shadow(core, root, begin)


class Shadow:
    """The shadow steps of one watch."""

    def __init__(self, core: WatchSession, root: nn.Module, begin: Callable[[], None]) -> None:
        self.core, self._begin = core, begin
        self._running: tuple[CapturedCall, Counter[str], list[Tensor]] | None = None
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
        self._gradients: dict[str, Tensor] = {}
        self._counts = ZeroCounts()
        self._left_out: set[int] = set()  # series
        self._kept_bytes = 0
        self._reason: str | None = None
        self._taken = False

    @property
    def due(self) -> bool:
        """Whether the present step has a shadow."""
        return self.core.open and self.core.settings.shadows(self.core.step)

    # -- the real step -------------------------------------------------------------------------------------------------

    @contained
    def forward_begins(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A training forward of the root begins."""
        if not self.due or WatchSession.repeating:
            return
        if self.core.ranks.data_parallel > 1:
            self._reason = "the model has become data-parallel since the watch was made"
            return
        if all(p.grad is None for p in model.parameters()):
            self._gradients.clear()  # of a closure's earlier calls
        self._calls.append(CapturedCall(model, args, kwargs))

    @contained
    def forward_ends(self, output: Any) -> None:
        """A forward of the root has returned, real or repeated."""
        found = [x for _, x in tensors_in(output)]
        if self._running is not None:
            self._running[2].extend(found)
        elif self._calls and not WatchSession.repeating and not self._calls[-1].ended:
            call = self._calls[-1]
            call.ended = True
            for index, x in enumerate(found):
                if x.requires_grad:  # one that is returned twice counts twice: no zero changes by that
                    call.hook(x, functools.partial(self._arrives, call, index))

    def _around(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of the root through a compiled one, whose hooks may not be heard (if they are, that call counts)."""
        root = self.core.model()
        if root is None or WatchSession.repeating or not (root.training and torch.is_grad_enabled()):
            return call(*args, **kwargs)
        self._begin()
        self.forward_begins(root, args, kwargs)
        output = None
        try:
            output = call(*args, **kwargs)
        finally:
            self.forward_ends(output)
        return output

    @contained
    def _arrives(self, call: CapturedCall, index: int, g: Tensor) -> None:
        if call in self._calls:
            call.gradients[index] = g.detach()

    @contained
    def see(self, name: str, x: Tensor, recomputing: bool) -> None:
        """A tap has seen a tensor of the real step."""
        if not self._calls or not self.due:
            return
        core, call = self.core, self._calls[-1]
        seen = call.sight(name, x)
        plain = core.readable(x, name)
        if plain is None:
            return
        if core.due.activations and not recomputing:
            seen.series.append(core.series_of("activations", name, x))
            if not seen.noted:
                seen.noted, seen.zeros = True, self._zeros(plain)
        if core.due.activation_gradients and x.requires_grad:
            seen.names.append(name)
            if len(seen.names) == 1:
                call.hook(x, functools.partial(self._gradient, call, seen))

    @contained
    def _gradient(self, call: CapturedCall, seen: CapturedForward, g: Tensor) -> None:
        plain = self.core.readable(g, seen.names[0])
        if call in self._calls and plain is not None:
            seen.gradient_series = [self.core.series_of("activation_gradients", name, g) for name in seen.names]
            seen.gradient_zeros = self._zeros(plain)

    def _zeros(self, x: Tensor) -> Tensor:
        self._kept_bytes += x.numel()
        if self._kept_bytes <= self.core.settings.max_bytes:
            return x == 0
        self.core.say(
            "capped",
            f"a shadow step's zeros take more than max_bytes={self.core.settings.max_bytes:,}, one byte a value: the "
            "rest is left out. Raise it, or watch less with include= and collect=.",
            once="shadow zeros", warn=True,
        )  # fmt: skip
        return x.new_empty(0, dtype=torch.bool)  # which nothing compares with

    # -- the repetition ------------------------------------------------------------------------------------------------

    def backward_ends(self) -> None:
        """A backward has ended: repeats the forwards that it came to."""
        if _backward_running() != -1:
            return  # a checkpoint's, in the midst of another
        for call in self._calls:
            if call.gradients and self._reason is None:
                self._reason = call.spoiled(self.core.model())
            if call.gradients and self._reason is None:
                try:
                    self._repeat(call)
                except Exception as error:  # noqa: BLE001  (P2: whatever fails in watching must not stop training)
                    self._reason = f"it raised {type(error).__name__}"
                    self.core.failed("the shadow step", error)
            call.gradients.clear()

    def _repeat(self, call: CapturedCall) -> None:
        root = self.core.model()
        assert root is not None
        leaves = {id(p): leaf(p) for p in root.parameters()}
        after, outputs = RandomState(call.devices), list[Tensor]()
        WatchSession.repeating = True
        try:
            dropouts = call.listen(root) if draws_by_dtype(call.devices) else None
            self._running = (call, Counter(), outputs)
            with in_fp32(call.devices, dropouts), borrowed(root, leaves, call.buffers):
                call.random.restore()
                args, kwargs = inputs = fresh_inputs(call.inputs)
                root(*args, **kwargs)
                wanted = [x for x in (*leaves.values(), *tensors_of(inputs)) if x.requires_grad]
                call.send_back(outputs, wanted)
        finally:
            self._running, WatchSession.repeating = None, False
            after.restore()
        self._taken = True
        self._add(leaves, root)

    def _add(self, leaves: Mapping[int, Tensor], root: nn.Module) -> None:
        """Adds a repetition's gradients of the parameters to the step's."""
        if not self.core.due.gradients:
            return
        for raw, p in root.named_parameters():
            g, name = leaves[id(p)].grad, clean(raw)
            if g is not None and not self._has_hooks(name, p):
                self._gradients[name] = self._gradients[name] + g if name in self._gradients else g

    def _has_hooks(self, name: str, p: Tensor) -> bool:
        """Whether the user's hooks may have changed the real gradient."""
        if getattr(p, "_backward_hooks", None):
            self.core.say(
                "shadow", f"the gradient of {name} is not compared: it has hooks of its own", once=f"hooks {name}"
            )
            return True
        return False

    @contained
    def meet(self, module: str, role: str, tensors: list[tuple[str, Tensor]]) -> None:
        """A tap sees tensors of a repetition."""
        if self._running is None:
            return
        call, times, _ = self._running
        for path, x in tensors:
            name = f"{module}:{role}{path}"
            seen = call.seen.get((name, times[name]))
            times[name] += 1
            if seen is not None:
                self._compare(seen, x)

    def _compare(self, seen: CapturedForward, x: Tensor) -> None:
        if seen.zeros is not None and self._counts.add(seen.series, seen.zeros, x.detach()):
            seen.zeros = None
        if seen.gradient_zeros is not None and x.requires_grad:
            x.register_hook(functools.partial(self._compare_gradient, seen))

    def _compare_gradient(self, seen: CapturedForward, g: Tensor) -> None:
        zeros = seen.gradient_zeros
        if zeros is not None and self._counts.add(seen.gradient_series, zeros, g):
            seen.gradient_zeros = None

    # -- what is told --------------------------------------------------------------------------------------------------

    @contained
    def compare_gradients(self, grads: Mapping[str, Tensor], narrowed: Mapping[str, torch.dtype]) -> None:
        """The parameters' gradients are being read: as the optimizer is given them."""
        if not self.due:
            return
        for name, g in grads.items():
            expected = self._gradients.pop(name, None)
            if expected is None or self._reason is not None:
                continue
            values = g.coalesce().values() if g.is_sparse else g
            plain = self.core.readable(values, name)
            if plain is not None:
                series = self.core.series_of("gradients", name, values, None if g.is_sparse else narrowed.get(name))
                self._counts.add_gradient(series, plain, expected, absent=g.numel() - values.numel())

    @contained
    def end_step(self) -> None:
        """The step has ended: its counts go beside what the sample has of the same series."""
        calls, reason = self._calls, self._reason
        if self.due and not (self._taken and reason is None):
            reason = reason or (_NO_GRADIENT if calls else _UNSEEN)
            self.core.say("shadow", f"shadow step not taken: {reason}")
        elif self.due and self.core.sample is not None:
            for call in calls:
                self._left_out.update(call.unmatched())
            self._counts.enter(self.core.sample, self._left_out)
        for call in calls:
            call.release()
        self._start()


class ZeroCounts:
    """Pairs of counts, by device and series."""

    def __init__(self) -> None:
        self._found: dict[torch.device, dict[int, Tensor]] = {}

    def add(self, series: Iterable[int], zeros: Tensor, repeated: Tensor) -> bool:
        """Compares real zeros with the values of the repetition; whether they can be compared."""
        if zeros.shape != repeated.shape or zeros.device != repeated.device:
            return False
        self._add(series, _pair(zeros, repeated))
        return True

    def add_gradient(self, series: int, values: Tensor, repeated: Tensor, *, absent: int) -> None:
        """Compares a parameter's gradient; of a sparse one what is stored, while `absent` others are zero in both."""
        if repeated.is_sparse:
            repeated = repeated.coalesce().values()
        if values.shape == repeated.shape and values.device == repeated.device:
            pair = _pair(values == 0, repeated)
            pair[1] += absent
            self._add([series], pair)

    def _add(self, series: Iterable[int], pair: Tensor) -> None:
        found = self._found.setdefault(pair.device, {})
        for number in series:
            found[number] = found[number] + pair if number in found else pair

    def enter(self, sample: Sample, left_out: Collection[int]) -> None:
        """Puts the counts beside the sample's entries, one of each series (its entries are added up when written)."""
        for device, found in self._found.items():
            rows = sample.rows(device)
            entries = {number: entry for entry, number in enumerate(rows.series)}
            told = [number for number in found if number in entries and number not in left_out]
            if not told:
                continue
            counts = DeviceValue(torch.stack([found[number] for number in told]))
            for row, number in enumerate(told):
                rows.extras.append(("underflowed", entries[number], _Cell(counts, row, 0)))
                rows.extras.append(("structural", entries[number], _Cell(counts, row, 1)))


class _Cell(DeviceValue):
    """One number of a table that is there later."""

    __slots__ = ("_place", "_table")

    def __init__(self, table: DeviceValue, row: int, column: int) -> None:
        self._table, self._place = table, (row, column)

    def ready(self) -> bool:
        return self._table.ready()

    def value(self) -> float:
        return float(self._table.tensor()[self._place])


def _pair(zeros: Tensor, repeated: Tensor) -> Tensor:
    """int64[2]: zeros that are nonzero in the repetition, and those that are zero there too. NaN is neither."""
    return torch.stack([(zeros & (repeated.abs() > 0)).sum(), (zeros & (repeated == 0)).sum()])
