"""The first place of NaN or Inf at any step, sampled or not, found at the moment when the loss or a gradient breaks.

Looking at every module's output at every step costs some per cent of a training step. So an idle step keeps no more
than a reference to each output until the backward begins, a weak one beyond the first few megabytes. When the loss that
goes backward is not finite, all is still there: inputs, weights as the forward has used them, and the outputs that are
small or that the backward needs. Then they are looked through, once, in the order in which one makes the other.

The loss must be known without waiting, so this is for models on a CPU that run eagerly. `recorder=` names the
collections that a watch measures at every step elsewhere.
"""

import itertools
import math
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from plimsoll import kernels
from plimsoll.kernels.device_value import DeviceValue
from plimsoll.runs import Event, Record
from plimsoll.watch.hooks import torch_hooks
from plimsoll.watch.names import clean, tensors_among, tensors_in
from plimsoll.watch.parameters.optimizer_tensors import Parameters
from plimsoll.watch.session import WatchSession, contained
from plimsoll.watch.steps.losses import Loss, Losses
from plimsoll.watch.taps.compiled_taps import is_capturing

_MOST_OUTPUTS = 10_000  # that a step's references are kept of
_MOST_EVENTS = 5  # a training that overflows now and then is looked through so often
_NAMED = 20
_HELD_BYTES = 16 << 20  # of outputs that are kept alive up to the backward
_LARGEST_BUFFER = 1 << 20  # values; running statistics are far smaller
_PLAIN = (Tensor, nn.Parameter, nn.Buffer)


_Place = tuple[str, list[str], str]


class Buffers:
    """NaN and Inf that come into a model's buffers: running statistics that overflow their format.

    They are counted at sampled steps, and told apart from those that were there at first (masks) when the device has
    counted.
    """

    def __init__(self, core: WatchSession) -> None:
        self._core = core
        self._at_first: dict[str, DeviceValue] = {}
        self._said: set[str] = set()

    def look(self) -> None:
        """Counts those of now."""
        model = self._core.model()
        if model is None:
            return
        by_device: dict[torch.device, dict[str, Tensor]] = {}
        for raw, x in model.named_buffers():
            name = clean(raw)
            plain = type(x) in _PLAIN and x.layout == torch.strided and not x.is_meta
            if plain and x.is_floating_point() and x.numel() <= _LARGEST_BUFFER and name not in self._said:
                by_device.setdefault(x.device, {})[name] = x.detach()
        for device, named in by_device.items():
            counts = kernels.new_counts(len(named), device)
            for place, x in enumerate(named.values()):
                kernels.count_nonfinite_into([x], counts, place)
            self._hand_over(list(named), DeviceValue(counts))

    def _hand_over(self, names: list[str], counts: DeviceValue) -> None:
        step, key = self._core.step, "\n".join(names)
        before = self._at_first.setdefault(key, counts)
        if before is counts:
            return

        def produce() -> list[Record]:
            more = (counts.tensor() > before.tensor()).numpy()
            found = [name for name, broken in zip(names, more, strict=True) if broken and name not in self._said]
            self._said.update(found)
            if not found:
                return []
            message = f"NaN or Inf came into the buffers {', '.join(found[:3])}, seen at step {step}"
            details: dict[str, object] = {"where": "buffers", "names": found[:_NAMED], "of": len(found)}
            return [Event(step=step, kind="origin", message=message, details=details)]

        self._core.writer.submit(produce, 16 * len(names))


class Origin(torch_hooks.TrainingEvents):
    """Listener of forwards, backwards and steps that records where non-finite values began."""

    def __init__(self, core: WatchSession, parameters: Parameters, losses: Losses, model: nn.Module) -> None:
        self.core, self._parameters, self._losses = core, parameters, losses
        self.outputs: list[tuple[str, str, weakref.ref[Tensor]]] = []
        self._inputs: list[tuple[str, weakref.ref[Tensor]]] = []
        self._held: list[Tensor] = []
        self._room = 0  # bytes
        self._broken = False  # the last loss was not finite
        self._found: tuple[Loss | None, _Place] | None = None  # of a loss that another model may step on
        self._events = 0
        self._scaled = False
        devices = {p.device.type for p in itertools.chain(model.parameters(), model.buffers())}
        core.due.traced = devices <= {"cpu"}
        self._buffers = Buffers(core)
        self._buffers.look()
        core.at_close.append(self._held.clear)

    @contained
    def forward_begins(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The root module is called: what the forward before has left is of no use any more."""
        self.outputs.clear()
        self._held.clear()
        self._room = _HELD_BYTES
        self._inputs = (
            [(path, self._kept(x)) for path, x in tensors_among(args, kwargs)] if self.core.due.traced else []
        )

    @contained
    def sees(self, name: str, output: Any) -> None:
        """A module has returned, in a step that does not sample its output."""
        if not self.core.muted and torch.is_grad_enabled() and len(self.outputs) < _MOST_OUTPUTS:
            for path, x in [("", output)] if type(output) is Tensor else tensors_in(output):
                self.outputs.append((name, path, self._kept(x)))

    def _kept(self, x: Tensor) -> weakref.ref[Tensor]:
        """A reference to a tensor, which is kept alive too while there is room."""
        size = x.numel() * x.element_size()
        if size <= self._room:
            self._room -= size
            self._held.append(x)
        return weakref.ref(x)

    @contained
    def backward_begins(self, tensors: Any) -> None:
        """A backward begins: a loss that is not finite, and was before, is traced back."""
        if self._idle() or not isinstance(tensors, Tensor) or tensors.numel() != 1 or tensors.device.type != "cpu":
            self._held.clear()
            return
        broken = not math.isfinite(float(tensors.detach()))
        whose = self._parameters.reach([tensors]) if broken or self._broken else "ours"  # a walk of the graph
        if whose == "both":
            self._found = (self._losses.running, place) if broken and (place := self._place()) else None
        elif whose != "others":
            if broken and not self._broken and (place := self._place()):
                self._say(*place)
            self._broken = broken
        self._held.clear()

    def backward_ends(self) -> None:
        """A backward has ended."""

    @contained
    def optimizer_begins(self, optimizer: Any) -> None:
        """An optimizer steps: gradients of a finite loss that are not finite are named."""
        if self.core.sample is not None and not self.core.muted and not is_capturing():
            self._buffers.look()
        if self._idle() or self._broken or self._scaled or optimizer not in self._parameters.optimizers:
            return
        if self._found is not None and (loss := self._found[0]) is not None and loss.holders:
            return  # it may be this optimizer's: said when it has stepped
        count = self._parameters.count_nonfinite()
        if count is None or count.device.type != "cpu" or not int(count):
            return
        model = self.core.model()
        named = [] if model is None else [(clean(name), p.grad) for name, p in model.named_parameters()]
        found = [name for name, _ in self._broken_among(((n, g) for n, g in named if g is not None), masked=False)]
        if found:
            ran = {name: place for place, (name, *_) in enumerate(self.outputs)}
            last = max(found, key=lambda name: ran.get(name.rpartition(".")[0], -1))
            first = [last, *(name for name in reversed(found) if name != last)] if ran else found[::-1]
            self._say("gradients", first, "the loss was finite")
        self._broken = True

    def optimizer_ends(self, optimizer: Any) -> None:
        """An optimizer has stepped: what was found of its loss is the model's."""
        self._settle()

    def loss_scaled(self, scaler: Any, loss: Any, scaled: Any) -> None:
        """A scaler has scaled a loss: gradients that overflow are its business."""
        self._scaled = True

    def scaler_step_ends(self, scaler: Any, optimizer: Any) -> None:
        """A scaler's step has returned."""
        self._settle()

    @contained
    def _settle(self) -> None:
        found, _ = self._found or (None, None)
        if self._found is not None and found is not None and found.taken:
            place, self._found = self._found[1], None
            if not self._broken:
                self._say(*place)
            self._broken = True

    def graph_replays(self) -> None:
        """A CUDA graph runs again."""

    def scaler_update_begins(self, scaler: Any) -> None:
        """A scaler is about to change its scale."""

    def scaler_update_ends(self, scaler: Any) -> None:
        """A scaler has changed its scale."""

    def gradients_divided(self, stage: Any, microbatches: int) -> None:
        """A pipeline is about to divide the weights' gradients."""

    def trial(self, stage: Any, begins: bool) -> None:
        """A pipeline's stage runs on made-up values."""

    def process_ends(self, reason: str, message: str, seconds: float) -> None:
        """The process is about to end."""

    # -- the search

    def _place(self) -> "_Place | None":
        """Return the location of the first non-finite value: its kind, its names, and a remark."""
        model = self.core.model()
        if model is None or not (self._inputs or self.outputs):
            return None
        gone = 0  # outputs
        inputs = [(f"{self.core.name}:input{path}", x) for path, ref in self._inputs if (x := ref()) is not None]
        outputs: list[tuple[str, Tensor]] = []
        for name, path, ref in self.outputs:
            x = ref()
            gone += x is None
            if x is not None:
                outputs.append((f"{name}:output{path}", x))
        weights = ((clean(name), p) for name, p in model.named_parameters())
        # Of outputs one is enough: all that follow have it from there.
        for where, named in (("weights", weights), ("input", inputs), ("activations", outputs)):
            found = self._broken_among(named, masked=where != "weights")
            names = [name for name, _ in (itertools.islice(found, 1) if where == "activations" else found)]
            if names:
                return where, names, f"{gone} outputs were gone" if gone else ""
        if not outputs:
            return None
        last = outputs[-1][0]
        whole = last == f"{self.core.name}:output"
        return "loss", [] if whole else [last], "all that is left is finite"

    def _say(self, where: str, names: list[str], more: str) -> None:
        self._events += 1
        step = self.core.step
        place = f" {', '.join(names[:3])}" if names else ""
        message = f"NaN or Inf began at step {step} in {where}{place}" + (f" ({more})" if more else "")
        details: dict[str, object] = {"where": where, "names": names[:_NAMED], "of": len(names)}
        self.core.writer.write(Event(step=step, kind="origin", message=message, details=details))

    def _broken_among(self, named: Iterable[tuple[str, Tensor]], *, masked: bool) -> Iterator[tuple[str, Tensor]]:
        """Those with NaN or Inf; -Inf is none where it may be a mask."""
        for name, x in named:
            if type(x) in _PLAIN and x.device.type == "cpu" and x.is_floating_point():
                values = x.detach()
                if x.layout == torch.strided and bool(
                    (torch.isnan(values) | (values == math.inf) if masked else ~torch.isfinite(values)).any()
                ):
                    yield name, x

    def _idle(self) -> bool:
        if not self.core.due.traced or not self.core.open or self._events >= _MOST_EVENTS:
            return True
        return self.core.muted or self.core.is_elsewhere() or WatchSession.repeating or is_capturing()
