"""Checks of the modes of a model's modules: evaluation mode, norms that normalise nothing, outputs that are one vector.

- A model that is trained in evaluation mode, and batch norms that have seen no data.
- Frozen batch norms whose running statistics follow the data.
- Norms over a single value, which are their bias whatever comes in.
- Outputs whose rows differ at first, and become one vector.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn

from plimsoll.kernels.device_value import DeviceValue
from plimsoll.watch.names import clean
from plimsoll.watch.steps.wiring.checks import (
    BATCH_NORMS,
    NORMS,
    REPEATS,
    Fact,
    FollowedOptimizer,
    Training,
    TrainingCheck,
    is_plain,
    listed,
)

_STEPS = 10  # on end: a script may evaluate right before a step
_LAST = 0.9  # of running statistics that are of the last batch: torch's momentum is not the share that is kept
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_ROWS, _LEAST_ROWS = 64, 16  # of a batch that are compared, and without which nothing is
_COLUMNS, _LEAST_COLUMNS = 64, 8  # of a row, likewise
_MOST, _FEW = 0.5, 0.25  # of the rows that are one vector, and so few that it is over
_VARIED = 0.75  # of the vector's values differ from the next one: no one-hot, no code of signs, no plain picture
_DIFFER = 0.9  # of the inputs' rows differ from the next one
_LISTED = 256  # norms with their epsilons


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
            if isinstance(m, BATCH_NORMS) and m.running_mean is not None and m.running_var is not None
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
            if not isinstance(m, BATCH_NORMS) or not m.training or m.num_batches_tracked is None or m.momentum == 0:
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
    """Norms over a single value. The manifest lists the epsilons of all norms, for a rule that has their inputs."""

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        if epsilons := _epsilons(training.model()):
            self.session.writer.write_manifest(norms=epsilons)
        if narrow := _norms_of_one_value(training.model()):
            self.facts.record("norm of one value", f"{listed(narrow)} normalise single values", modules=narrow)


class RowsAlike(TrainingCheck):
    """Outputs of whole models, or of parts that are called by themselves, in sampled steps."""

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self._inputs: dict[int, Tensor] = {}  # by number of rows: which rows differ from the next one
        self._streaks: dict[str, list[int]] = {}  # steps on end at which most rows were alike; known from a first look
        self._said: set[str] = set()

    @torch.no_grad()
    def begins(self, inputs: Iterable[tuple[str, Tensor]]) -> None:
        """A module is called that no other one has called."""
        self._inputs = {}
        for _, x in inputs:
            if (some := _some_rows(x, 1)) is not None:
                differ = (some[1:] != some[:-1]).any(dim=1)
                self._inputs[len(x)] = differ | self._inputs.get(len(x), differ)

    # The sorted columns' middle is the vector that more than half of the rows are, if there is one. Nothing here waits
    # for a device: the background thread reads and compares.
    @torch.no_grad()
    def ends(self, name: str, outputs: Iterable[tuple[str, Tensor]]) -> None:
        """It has returned."""
        inputs, self._inputs = self._inputs, {}
        for path, x in outputs:
            some = _some_rows(x, _LEAST_COLUMNS) if x.is_floating_point() and x.dim() > 1 else None
            differ = inputs.get(len(x)) if some is not None else None
            if some is None or differ is None or differ.device != some.device:
                continue
            middle = some.sort(dim=0).values[len(some) // 2]
            same = (some == middle).all(dim=1).sum()
            varied = (middle[1:] != middle[:-1]).float().mean() >= _VARIED
            counts = DeviceValue(torch.stack([same, differ.float().mean() >= _DIFFER, varied]))
            self._compare(f"{name}:output{path}", counts, len(some))

    def _compare(self, name: str, counts: DeviceValue, rows: int) -> None:
        step = self.session.step

        def read() -> list[Fact]:
            same, *sound = cast("list[int]", counts.tensor().tolist())
            if not all(sound):
                return []
            if name not in self._streaks:
                if same <= 1:
                    self._streaks[name] = []
                return []
            streak, said = self._streaks[name], name in self._said
            if same >= _MOST * rows:
                streak.append(step)
            elif not said or same < _FEW * rows:
                streak.clear()
            if said is (len(streak) >= REPEATS):
                return []
            self._said ^= {name}
            message = f"{same} of {rows} rows of {name} are one vector"
            since = streak[0] if streak else step
            return [
                Fact("rows alike", message, {
                    "modules": [name], "holds": not said, "since": since, "rows": same, "of": rows,
                })
            ]  # fmt: skip

        self.facts.record_from(read)


def _some_rows(x: Tensor, columns: int) -> Tensor | None:
    """Return values of the first rows of a batch, from all over each row; None for fewer rows or columns."""
    if not is_plain(x) or x.dim() == 0 or len(x) < _LEAST_ROWS:
        return None
    rows = x.detach()[:_ROWS].reshape(min(len(x), _ROWS), -1)
    return rows[:, :: 1 + rows.shape[1] // _COLUMNS] if rows.shape[1] >= columns else None


def _norms_of_one_value(model: nn.Module | None) -> list[str]:
    """Return the norms over a single value, whose outputs are constant."""
    kinds = tuple(kind for name in ("LayerNorm", "RMSNorm") if isinstance(kind := getattr(nn, name, None), type))
    named = cast("Iterable[tuple[str, nn.Module]]", () if model is None else model.named_modules())
    return [
        clean(name) for name, m in named if isinstance(m, kinds) and math.prod(cast("Any", m).normalized_shape) == 1
    ]


def _epsilons(model: nn.Module | None) -> dict[str, float]:
    """Return the epsilons of torch's norms, of the first ones of a large model."""
    named = cast("Iterable[tuple[str, nn.Module]]", () if model is None else model.named_modules())
    found = ((clean(name), cast("Any", m).eps) for name, m in named if isinstance(m, NORMS))
    return dict(itertools.islice(((name, eps) for name, eps in found if eps is not None), _LISTED))


def norms_of_last_batch(model: nn.Module | None) -> list[str]:
    """Return the batch norms in training whose running statistics are nearly those of the last batch alone."""
    named = cast("Iterable[tuple[str, nn.Module]]", () if model is None else model.named_modules())
    norms = [(name, cast("Any", m)) for name, m in named if isinstance(m, BATCH_NORMS)]
    return [clean(name) for name, m in norms if m.training and m.track_running_stats and (m.momentum or 0) >= _LAST]
