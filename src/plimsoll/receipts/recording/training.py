"""Training around a step's operations: models, backwards, optimizers, scalers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _python_dispatch as dispatch

from plimsoll.receipts.recording.compiled_code import CompiledCode
from plimsoll.receipts.recording.operations import Entry
from plimsoll.receipts.recording.recorder import Recorder
from plimsoll.receipts.recording.values import Role, dtype_name, size_bytes
from plimsoll.tracing.state_snapshot import Before
from plimsoll.tracing.tensors import Names, parts_of, tensors_in
from plimsoll.watch.hooks import torch_hooks
from plimsoll.watch.names import unwrapped


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """The loss, as the backward got it or, before a loss scaler, as the scaler did."""

    format: str
    producer: Entry | None  # what made it


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """Everything that one step has left."""

    recorder: Recorder
    compiled: CompiledCode
    names: Names
    models: Sequence[nn.Module]
    optimizers: Sequence[Any] = ()
    backwards: int = 0
    loss: Loss | None = None
    scaled: bool = False  # whether a loss scaler has scaled the loss
    activations: int = 0  # bytes alive when a backward began
    gradients: Mapping[int, tuple[str, int]] = field(default_factory=dict[int, "tuple[str, int]"])  # by parameter

    @property
    def entries(self) -> list[Entry]:
        """The operations, in the order in which they first ran."""
        return self.recorder.entries.listed()


class TrainingRecorder(torch_hooks.TrainingEvents):
    """Listener that notes backwards, optimizers and scalers for a recorder."""

    def __init__(self, recorder: Recorder, before: Before | None = None) -> None:
        self._recorder, self._before = recorder, before
        self._models: list[nn.Module] = []
        self.restart()

    def restart(self) -> None:
        """Begin a new step."""
        self.backwards = 0
        self.optimizers: list[Any] = []
        self.scaled = False
        self._loss: Loss | None = None
        self._activations = 0
        self._running = 0
        self._gradients: dict[int, tuple[str, int]] = {}

    def take_models(self, models: Sequence[nn.Module]) -> None:
        """Note models that were not known when the recording began."""
        if [id(model) for model in models] != [id(model) for model in self._models]:
            self.begin(models)

    def begin(self, models: Sequence[nn.Module]) -> None:
        """Note the memory of models: their parameters, buffers and gradients."""
        self._models = list(models)
        self._recorder.fake = any(isinstance(p, FakeTensor) for model in models for p in model.parameters())
        for model in models:
            self._assign(list(model.parameters()), "weights")
            self._assign(list(model.buffers()), "buffers")
        self._assign_gradients()

    def recording(self, models: Sequence[nn.Module], names: Names, compiled: CompiledCode) -> Recording:
        """Return what was recorded, with the names that are known at its end."""
        roots = models_of(models, self._recorder)
        names.learn(self._recorder.roots.values(), self.optimizers)
        return Recording(
            recorder=self._recorder, compiled=compiled, names=names, models=roots,
            optimizers=_outermost(self.optimizers), backwards=self.backwards, loss=self._loss, scaled=self.scaled,
            activations=self._activations, gradients=dict(self._gradients),
        )  # fmt: skip

    # -- events --------------------------------------------------------------------------------------------------------

    def backward_begins(self, tensors: Any) -> None:
        """Note the loss, and how much is alive for the backward."""
        self._running += 1
        if self._running > 1:  # a checkpoint's, within another
            return
        live = self._recorder.memory.live
        self._activations = max(self._activations, live["other"])
        start = next(tensors_in(tensors), None)
        if start is not None and start.numel() == 1 and (self._loss is None or not self.scaled):
            self._loss = self._loss_of(start)

    def backward_ends(self) -> None:
        """Note the gradients."""
        self._running = max(0, self._running - 1)
        if self._running == 0:
            self.backwards += 1
            self._recorder.after_backward = True
            self._assign_gradients()

    def loss_scaled(self, scaler: Any, loss: Any, scaled: Any) -> None:  # noqa: ARG002
        """Note the loss before it is scaled."""
        start = next(tensors_in(loss), None)
        if start is not None:
            self._loss, self.scaled = self._loss_of(start), True
        self._about_to_change("scaler", scaler)

    def optimizer_begins(self, optimizer: Any) -> None:
        """An optimizer steps from now on."""
        self._recorder.stepping += 1
        if not any(optimizer is known for known in self.optimizers):
            self.optimizers.append(optimizer)
        self._assign_state(optimizer)
        self._about_to_change("optimizer", optimizer)

    def optimizer_ends(self, optimizer: Any) -> None:
        """An optimizer's step has returned."""
        self._recorder.stepping = max(0, self._recorder.stepping - 1)
        self._assign_state(optimizer)

    # -- memory --------------------------------------------------------------------------------------------------------

    def _about_to_change(self, what: str, changed: Any) -> None:
        if self._before is not None:
            with cast("Any", dispatch)._disable_current_modes():  # noqa: SLF001
                getattr(self._before, what)(changed)

    def _loss_of(self, x: Tensor) -> Loss:
        known = self._recorder.memory.of(x)
        values = dtype_name(x.dtype) if known is None else known.values
        return Loss(format=values, producer=None if known is None else known.producer)

    def _assign(self, tensors: Sequence[Tensor], role: Role) -> None:
        for x in tensors:
            self._recorder.memory.assign(x, role)

    def _assign_gradients(self) -> None:
        for p in (p for model in self._models for p in model.parameters() if p.grad is not None):
            gradient = cast("Tensor", p.grad)
            self._recorder.memory.assign(gradient, "gradients")
            self._gradients[id(p)] = dtype_name(gradient.dtype), sum(map(size_bytes, parts_of(gradient)))

    def _assign_state(self, optimizer: Any) -> None:
        for state in optimizer.state.values():
            self._assign([x for x in tensors_in(state) if x.dim()], "optimizer")


def _outermost(optimizers: Sequence[Any]) -> tuple[Any, ...]:
    """Return the optimizers without those that another one of them steps inside."""
    inner = {id(getattr(optimizer, "optimizer", None)) for optimizer in optimizers}
    return tuple(optimizer for optimizer in optimizers if id(optimizer) not in inner)


def models_of(given: Sequence[nn.Module], recorder: Recorder) -> list[nn.Module]:
    """Return the step's models: those given, and outermost others with parameters."""
    models = [unwrapped(model) for model in given]
    inside = {id(m) for root in models for m in root.modules()}
    ran = [unwrapped(root) for root in recorder.roots.values()]
    for root in sorted(ran, key=lambda root: -sum(1 for _ in root.modules())):
        if id(root) not in inside and next(root.parameters(), None) is not None:
            models.append(root)
            inside |= {id(m) for m in root.modules()}
    return models
