"""Checks of the modes of a model's modules: evaluation mode, and norms that normalise nothing.

- A model that is trained in evaluation mode, and batch norms that have seen no data.
- Frozen batch norms whose running statistics follow the data.
- Norms over a single value, which are their bias whatever comes in.
"""

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any, cast

from torch import Tensor, nn

from plimsoll.kernels.device_value import DeviceValue
from plimsoll.watch.names import clean
from plimsoll.watch.steps.wiring.checks import REPEATS, Fact, FollowedOptimizer, Training, TrainingCheck, listed

_STEPS = 10  # on end: a script may evaluate right before a step
_LAST = 0.9  # of running statistics that are of the last batch: torch's momentum is not the share that is kept
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class EvaluationMode(TrainingCheck):
    """Mode of one model and its modules, at the steps of its optimizers."""

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self._evaluated = 0  # steps on end with the model in evaluation mode
        self._was_training = False  # before that
        self._said = False

    # Batch norms that are frozen on purpose keep the statistics of the data that went before. Those that were never in
    # training mode have a mean of 0 and a variance of 1: they normalise nothing.
    def step_begins(self, optimizer: Any, followed: FollowedOptimizer) -> None:
        """An optimizer's step is called; the tenth on end in evaluation mode is recorded."""
        model = self.training.model()
        if model is None or self._said:
            return
        self._was_training |= model.training
        self._evaluated = 0 if model.training else self._evaluated + 1
        if _STEPS not in (self._evaluated, followed.steps):
            return
        modules = cast("Iterable[tuple[str, nn.Module]]", model.named_modules())
        off = [(clean(name), module) for name, module in modules if not module.training]
        dropouts = [name for name, m in off if isinstance(m, _DROPOUTS) and m.p > 0]
        norms = {
            name: DeviceValue(((m.running_mean == 0).all() & (m.running_var == 1).all()).reshape(1))
            for name, m in off
            if isinstance(m, _NORMS) and m.running_mean is not None and m.running_var is not None
        }
        if norms or (dropouts and not model.training):
            self._said = self._evaluated >= _STEPS or model.training
            self._hand_over(norms, dropouts, whole=not model.training)

    def _hand_over(self, norms: dict[str, DeviceValue], dropouts: list[str], *, whole: bool) -> None:
        was_training = self._was_training

        def read() -> list[Fact]:
            initial = [name for name, value in norms.items() if bool(value.tensor()[0])]
            message = "the model is trained in evaluation mode" if whole else "batch norms are in evaluation mode"
            details = {
                "whole": whole, "later": was_training, "dropouts": dropouts, "norms": list(norms), "initial": initial,
            }  # fmt: skip
            return [Fact("evaluation mode", message, details)]

        self.facts.record_from(read)


class FrozenNorms(TrainingCheck):
    """Batch norms with frozen weights whose running statistics go on to follow the data."""

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self._versions: dict[str, tuple[int, int]] = {}  # of the count of batches and of the weight, at the last look
        self._moved: Counter[str] = Counter()  # looks on end at which batches had been counted

    # An average of another model's weights moves with them, and so may its statistics. The discriminator of a GAN is
    # frozen in half of the steps only. torch writes the running mean without raising its version.
    def step_begins(self, optimizer: Any, followed: FollowedOptimizer) -> None:
        """An optimizer's step is called: in a sampled step, record norms that have followed the data for some time."""
        if self.session.sample is None:
            return
        model = self.training.model()
        found = dict[str, tuple[int, int]]()
        for name, m in cast("Iterable[tuple[str, nn.Module]]", [] if model is None else model.named_modules()):
            if not isinstance(m, _NORMS) or not m.training or m.num_batches_tracked is None or m.momentum == 0:
                continue
            weight = cast("Tensor | None", m.weight)
            if weight is None or any(p.requires_grad for p in m.parameters(recurse=False)):
                continue
            if not m.num_batches_tracked.is_inference() and not weight.is_inference():
                found[name] = m.num_batches_tracked._version, weight._version  # noqa: SLF001  (public in all but name)
        before, self._versions = self._versions, found
        moved = {
            name
            for name, (batches, weight) in found.items()
            if name in before and batches > before[name][0] and weight == before[name][1]
        }
        self._moved = Counter({name: self._moved[name] + 1 for name in moved})
        if norms := sorted(clean(name) for name, looks in self._moved.items() if looks == REPEATS):
            message = f"{listed(norms)} have frozen weights, and running statistics that follow the data"
            self.facts.record("frozen norms follow", message, modules=norms)


class NarrowNorms(TrainingCheck):
    """Norms over a single value."""

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        if narrow := _norms_of_one_value(training.model()):
            self.facts.record("norm of one value", f"{listed(narrow)} normalise single values", modules=narrow)


def _norms_of_one_value(model: nn.Module | None) -> list[str]:
    """Return the norms over a single value, whose outputs are constant."""
    kinds = tuple(kind for name in ("LayerNorm", "RMSNorm") if isinstance(kind := getattr(nn, name, None), type))
    named = cast("Iterable[tuple[str, nn.Module]]", () if model is None else model.named_modules())
    return [
        clean(name) for name, m in named if isinstance(m, kinds) and math.prod(cast("Any", m).normalized_shape) == 1
    ]


def norms_of_last_batch(model: nn.Module | None) -> list[str]:
    """Return the batch norms in training whose running statistics are nearly those of the last batch alone."""
    named = cast("Iterable[tuple[str, nn.Module]]", () if model is None else model.named_modules())
    norms = [(name, cast("Any", m)) for name, m in named if isinstance(m, _NORMS)]
    return [clean(name) for name, m in norms if m.training and m.track_running_stats and (m.momentum or 0) >= _LAST]
