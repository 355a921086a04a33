"""Checks of the weights that a training begins with, and of what happens to weights and state between steps.

- At the first step, what each data-parallel rank begins with.
- There too, gains of norms and outliers that come from how the weights were drawn.
- Layers that are frozen, and hold what torch has drawn for them.
- Ten steps later, layers whose units are copies of each other, and move as one.
- Weights that are written between two steps so that the update of the first one is undone.
- Steps between which the state of an optimizer is lost.

A few values are compared with earlier ones. Nothing here waits for a device: numbers are read on the background
thread, as soon as they are there.
"""

import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from plimsoll.kernels.device_value import DeviceValue
from plimsoll.watch.names import clean
from plimsoll.watch.parameters.optimizer_tensors import innermost
from plimsoll.watch.steps.wiring.checks import (
    NORMS,
    REPEATS,
    Fact,
    FollowedOptimizer,
    OptimizerCheck,
    Training,
    TrainingCheck,
    is_plain,
    living,
    some_values,
)

_KINDS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_LAYERS = 256  # whose rows are compared
_LATER = 10  # steps after the first, when they are
_SIDE = 16  # rows, and values of each
_NEAR = 1e-3  # of how far the weights have moved: rows that are nearer to each other move as one
_FORWARDS = frozenset(kind.forward for kind in NORMS)  # of a subclass with its own, the gain may be 1 + weight
_FEW, _ENOUGH = 16, 64  # gains of a norm, and of all norms: means of fewer say little
_ERRORS = 4  # standard errors, by which what was drawn may differ from what was to be expected
_CORNER = 256  # rows and columns of a weight in which outliers are looked for
_DRAWN = 64  # weights in which they are
_FAR, _GAP = 20, 4  # deviations of the others at which outliers lie, and times the next magnitude below them
_LEAST, _SHARE = 8, 0.05  # how many there are, and at most which share of the weights
_READ, _MOST_FROZEN = 2**16, 64  # values of each frozen layer, and layers, that are held against torch's draw
_FEWEST_DRAWN = 150  # values of all of them, without which chance may look like it
_LONG, _SHORT = 200, 50  # steps for which they must have been frozen, and with which it is judged when the watch closes
_FIRST = 16  # weights of which each rank records the first values
_LEFT = 2.0**-5  # of an update: averages with a decay of 0.97 or more leave less
_MOST_TRAININGS = 64  # of one watch, that are recorded: one for each task would be thousands
_UNDONE, _EXACT = 0.99, 0.9  # of the values; exactly what they were are those that a mask or a grid holds


class FirstWeights(TrainingCheck):
    """Weights at the first step of a training, and ten steps later."""

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self._kept: list[tuple[str, weakref.ref[Tensor], Tensor]] | None = None

    @torch.no_grad()
    def step_begins(self, optimizer: Any, followed: FollowedOptimizer) -> None:
        """An optimizer's step is called; at the first one, keep a few values of each layer."""
        model = self.training.model()
        if followed.steps or self._kept is not None or model is None:
            return
        self._record_rank(model)
        weights = _weights(model, lambda module: isinstance(module, _KINDS))
        some = [(name, p) for name, p in weights[:_LAYERS] if p.requires_grad and _has_rows(p)]
        self._kept = [(name, weakref.ref(p), _rows(p)) for name, p in some]

    def step_ends(self, optimizer: Any, followed: FollowedOptimizer) -> None:
        """An optimizer's step has returned."""
        if followed.steps == _LATER:
            self._look_at_rows()

    # Units that begin as copies of each other get equal gradients, and so they stay copies. Layers that begin at a
    # constant and are none (heads, residual branches, adapters) have rows that differ after a step: what follows them
    # differs. Rows that do not move at all are left out: nothing reaches them.
    @torch.no_grad()
    def _look_at_rows(self) -> None:
        """Record the layers whose rows have moved, and are equal still."""
        for_device: dict[torch.device, list[tuple[str, Tensor]]] = {}
        for name, ref, before in self._kept or ():
            p = ref()
            now = _rows(p) if p is not None and _has_rows(p) else None
            if p is not None and now is not None and now.shape == before.shape and now.device == before.device:
                far = torch.stack([(now - before).abs().amax(), (now - now[:1]).abs().amax()])
                for_device.setdefault(p.device, []).append((name, far))
        self._kept = []
        for found in for_device.values():
            self._hand_over([name for name, _ in found], DeviceValue(torch.stack([far for _, far in found])))

    def _hand_over(self, names: list[str], far: DeviceValue) -> None:
        def read() -> list[Fact]:
            table = cast("list[list[float]]", far.tensor().tolist())
            equal = [n for n, (moved, apart) in zip(names, table, strict=True) if moved > 0 and apart <= _NEAR * moved]
            return [Fact("equal rows", "units are copies of each other", {"parameters": equal})] if equal else []

        self.facts.record_from(read)

    # DistributedDataParallel sends rank 0's weights to all ranks, unless `init_sync` is off. Ranks that drew other
    # weights then average gradients that fit none of their models.
    def _record_rank(self, model: nn.Module) -> None:
        ranks = self.session.ranks
        if (
            ranks.wrapper != "DistributedDataParallel"
            or ranks.data_parallel < 2
            or self.session.settings.ranks != "each"
        ):
            return
        weights = [(clean(raw), p) for raw, p in model.named_parameters() if p.dim() > 1 and is_plain(p)]
        weights = weights[:: -(-len(weights) // _FIRST) or 1]
        # What other ranks record too: of parameters that the wrapper ignores each rank has its own.
        shared = [(name, p) for name, p in weights if ranks.data_index == 0 or not ranks.counts(p)]
        values = {name: DeviceValue(p.detach().reshape(-1)[:_SIDE].float()) for name, p in shared}

        def read() -> list[Fact]:
            listed = {name: cast("list[float]", value.tensor().tolist()) for name, value in values.items()}
            finite = {name: some for name, some in listed.items() if all(math.isfinite(x) for x in some)}
            return [Fact("first weights", "what this rank begins with", {"weights": finite})] if finite else []

        self.facts.record_from(read, size_bytes=4000)


class FirstDraws(TrainingCheck):
    """How the weights were drawn with which a training begins."""

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self._looked = False

    @torch.no_grad()
    def step_begins(self, optimizer: Any, followed: FollowedOptimizer) -> None:
        """An optimizer's step is called; look at the first one."""
        model = self.training.model()
        if not followed.steps and not self._looked and model is not None:
            self._looked = True
            self._look_at_gains(model)
            self._look_at_outliers(model)

    # A loop over all parameters draws gains as it draws weights. Gains that begin at 0 in branches, trained since, have
    # both signs too, but no model has all of its norms in such branches, with deviations that agree as those of one
    # draw do.
    def _look_at_gains(self, model: nn.Module) -> None:
        norms = _weights(model, lambda module: type(module).forward in _FORWARDS)
        norms = [(name, p) for name, p in norms if p.requires_grad and is_plain(p) and p.numel() >= _FEW]
        norms = norms[:: -(-len(norms) // _LAYERS) or 1]
        some = [p.detach().reshape(-1)[:_CORNER].float() for _, p in norms]
        sizes = [len(x) for x in some]
        if len(norms) < 2 or sum(sizes) < _ENOUGH or len({x.device for x in some}) > 1:
            return
        values = DeviceValue(torch.cat(some))

        def read() -> list[Fact]:
            deviation = _drawn_around_zero(torch.split(values.tensor(), sizes))
            details = {"parameters": [name for name, _ in norms], "deviation": deviation}
            return [Fact("gains drawn", "gains of norms lie around zero", details)] if deviation else []

        self.facts.record_from(read, size_bytes=4 * sum(sizes))

    # Outliers of trained weights differ from each other, and values lie between them and the rest. What is written into
    # a weight on purpose (an identity, a row) has an order: as many in each row or column, or all in one.
    def _look_at_outliers(self, model: nn.Module) -> None:
        weights = _weights(model, lambda module: isinstance(module, (*_KINDS, nn.Embedding)))
        weights = [(name, p) for name, p in weights if p.requires_grad and _has_rows(p)]
        weights = weights[:: -(-len(weights) // _DRAWN) or 1]
        for_device: dict[torch.device, list[tuple[str, Tensor]]] = {}
        for name, p in weights:
            corner = p.detach().flatten(1)[:_CORNER, :_CORNER].float().abs()
            if corner.numel() >= _CORNER and corner.shape[1] > 1:
                for_device.setdefault(p.device, []).append((name, _outliers(corner)))
        for found in for_device.values():
            self._record_outliers([name for name, _ in found], DeviceValue(torch.stack([x for _, x in found])))

    def _record_outliers(self, names: list[str], numbers: DeviceValue) -> None:
        def read() -> list[Fact]:
            found: dict[str, list[float]] = {}
            for name, row in zip(names, cast("list[list[float]]", numbers.tensor().tolist()), strict=True):
                value, count, between, rms, of, *spread = row
                scattered = all(few < most and 1 < most <= count / 2 for few, most in (spread[:2], spread[2:]))
                some = _LEAST <= count <= _SHARE * of and not between
                if some and scattered and 0 < _FAR * rms < value < math.inf:
                    found[name] = [value, count / of, value / rms]
            if not found:
                return []
            value, share, deviations = max(found.values(), key=lambda numbers: numbers[2])
            details = {"parameters": list(found), "value": value, "share": share, "deviations": deviations}
            return [Fact("outliers drawn", "a few weights are one value far from the others", details)]

        self.facts.record_from(read)


def _drawn_around_zero(gains: Sequence[Tensor]) -> float:
    """Return the deviation of gains that were drawn around zero; 0 if some were not."""
    largest, sizes = 0.0, {len(x) for x in gains}
    for size in sizes:
        alike = torch.stack([x for x in gains if len(x) == size])
        deviations, together = alike.std(dim=1, correction=0), float(alike.std(correction=0))
        around = (alike.mean(dim=1).abs() <= _ERRORS * deviations / size**0.5) & (deviations > 0)
        around &= (deviations - together).abs() <= _ERRORS * together / (2 * size) ** 0.5
        for signed in (alike, -alike):
            around &= (signed > 0).sum(dim=1) >= size / 8
        if not bool(around.all()):
            return 0.0
        largest = max(largest, together)
    return largest


def _outliers(corner: Tensor) -> Tensor:
    """Return of a matrix of magnitudes the largest, how often and how it is spread, and what there is of the others.

    The largest, its count, the count of those of other values down to a quarter of it, the root mean square of the
    others, the number of all, and the fewest and the most of the largest in a row, then in a column.
    """
    top = corner.amax()
    at = corner == top
    between = (corner > top / _GAP) & ~at
    rest = corner.masked_fill(at, 0.0).square().mean().sqrt()
    spread = [count(at.sum(dim=dim)) for dim in (1, 0) for count in (torch.amin, torch.amax)]
    return torch.stack([top, at.sum(), between.sum(), rest, torch.full_like(top, corner.numel()), *spread])


class FrozenDraws(TrainingCheck):
    """Frozen layers, all of which hold what torch has drawn for them: nothing was loaded into any."""

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self._frozen: dict[str, weakref.ref[nn.Module]] | None = None
        self._trained: dict[str, weakref.ref[nn.Module]] = {}
        self._first: DeviceValue | None = None  # a few values of each weight
        self._moments: DeviceValue | None = None
        self._judged = self._thawed = False

    @torch.no_grad()
    def step_begins(self, optimizer: Any, followed: FollowedOptimizer) -> None:
        """An optimizer's step is called; look at the first one, and at the sampled ones for layers that thaw."""
        model = self.training.model()
        if self._frozen is None and model is not None:
            layers = [(clean(raw), module) for raw, module in _modules(model) if type(module) in _KINDS]
            trained = {name: module for name, module in layers if _weight(module).requires_grad}
            frozen = [(name, m) for name, m in layers if not any(p.requires_grad for p in m.parameters())]
            self._look(dict(frozen[:: -(len(frozen) // _MOST_FROZEN + 1)][::-1]), trained)
        elif self._judged and self._frozen and not self._thawed and self.session.sample is not None:
            self._thawed = not _are_frozen(_alive(self._frozen))
            if self._thawed:
                self.session.say("wiring", "frozen layers are trained now", fact="thawed")

    def step_ends(self, optimizer: Any, followed: FollowedOptimizer) -> None:
        """An optimizer's step has returned."""
        if followed.steps == _LONG:
            self._judge()

    def closes(self) -> None:
        """The watch closes."""
        if self.training.steps >= _SHORT:
            self._judge()

    def _look(self, frozen: Mapping[str, nn.Module], trained: Mapping[str, nn.Module]) -> None:
        weights = [_weight(module) for module in [*frozen.values(), *trained.values()]]
        self._frozen = {}
        if len(frozen) < 2 or not 0 < len(trained) <= _LAYERS:
            return
        if not all(map(is_plain, weights)) or len({p.device for p in weights}) > 1:
            return
        self._frozen = {name: weakref.ref(module) for name, module in frozen.items()}
        self._trained = {name: weakref.ref(module) for name, module in trained.items()}
        self._first = DeviceValue(_first_values(weights))
        self._moments = DeviceValue(torch.stack([_as_drawn(module) for module in frozen.values()]))

    # A teacher or a target network is a copy of what is trained, or follows it. Both are as drawn at first.
    @torch.no_grad()
    def _judge(self) -> None:
        frozen, trained = _alive(self._frozen or {}), _alive(self._trained)
        first, moments = self._first, self._moments
        if self._judged or first is None or moments is None or not frozen or not trained or not _are_frozen(frozen):
            return
        self._judged = True
        weights, owned = [_weight(module) for module in frozen.values()], self.training.owned()
        shapes = [p.shape for p in weights]
        others = [_weight(module).shape for module in trained.values()]
        now = DeviceValue(_first_values(weights)) if all(map(is_plain, weights)) else None
        details = {
            "modules": list(frozen),
            "sizes": [_sides(module) for module in frozen.values()],
            "trained": list(trained),
            "trained_sizes": [_sides(module) for module in trained.values()],
            "in_optimizer": any(id(p) in owned for p in weights),
            "optimizers": ", ".join(dict.fromkeys(each.name for each in self.training.optimizers.values())),
        }

        def read() -> list[Fact]:
            then = first.tensor()
            own, of_others = then[: len(shapes)], then[len(shapes) :]
            copies = any(
                shape == other and torch.equal(mine, theirs)
                for shape, mine in zip(shapes, own, strict=True)
                for other, theirs in zip(others, of_others, strict=True)
            )
            stays = now is not None and torch.equal(own, now.tensor())
            if copies or not stays or not _are_drawn(cast("list[list[float]]", moments.tensor().tolist())):
                return []
            return [Fact("frozen as drawn", "frozen layers hold what torch has drawn for them", details)]

        self.facts.record_from(read, size_bytes=4000)


def _alive(layers: "Mapping[str, weakref.ref[nn.Module]]") -> dict[str, nn.Module]:
    """Return the layers; none if one is gone."""
    found = {name: ref() for name, ref in layers.items()}
    return {} if None in found.values() else cast("dict[str, nn.Module]", found)


def _are_frozen(layers: Mapping[str, nn.Module]) -> bool:
    """Return True if there are layers, and no parameter of any requires gradients."""
    return bool(layers) and not any(p.requires_grad for module in layers.values() for p in module.parameters())


def _as_drawn(module: nn.Module) -> Tensor:
    """Return of a layer's values over torch's bound: the largest magnitude, three moments, the count, the rounding."""
    weight = _weight(module)
    parts = [p.detach().reshape(-1)[:_READ].float() for p in module.parameters()]
    x = torch.cat(parts) * float(weight[0].numel()) ** 0.5
    numbers = [x.abs().amax(), x.mean(), x.square().mean(), x.square().square().mean()]
    return torch.stack([*numbers, torch.full_like(x[0], len(x)), torch.full_like(x[0], torch.finfo(weight.dtype).eps)])


# torch draws weights and biases of linear and convolutional layers evenly, up to the root of 1 over the inputs. The
# moments of trained ones are others, and some of them lie beyond that bound.
def _are_drawn(layers: Sequence[Sequence[float]]) -> bool:
    """Return True if all layers are as torch draws them."""
    for top, mean, square, fourth, count, eps in layers:
        errors = ((mean, 0.0, 1 / 3), (square, 1 / 3, 1 / 5 - 1 / 9), (fourth, 1 / 5, 1 / 9 - 1 / 25))
        if not 1 - 20 / count <= top <= 1 + 4 * eps:
            return False
        if any(abs(value - usual) > _ERRORS * (variance / count) ** 0.5 for value, usual, variance in errors):
            return False
    return sum(row[4] for row in layers) >= _FEWEST_DRAWN


def _first_values(weights: Sequence[Tensor]) -> Tensor:
    """Return the first values of each weight, padded with zeros."""
    rows = [p.detach().reshape(-1)[:_SIDE].float() for p in weights]
    return torch.stack([nn.functional.pad(row, (0, _SIDE - len(row))) for row in rows])


def _weight(module: nn.Module) -> Tensor:
    """Return the weight of a linear or convolutional layer."""
    return cast("nn.Linear", module).weight


def _sides(module: nn.Module) -> list[int]:
    """Return how many features or channels come into a layer, and how many it puts out."""
    if isinstance(module, nn.Linear):
        return [module.in_features, module.out_features]
    conv = cast("nn.Conv2d", module)
    return [conv.in_channels, conv.out_channels]


class Overwrites(OptimizerCheck):
    """Updates of an optimizer that are undone between its steps."""

    def __init__(self, training: Training, followed: FollowedOptimizer) -> None:
        super().__init__(training, followed)
        self._weights = [weakref.ref(p) for p in living(followed.weights) if is_plain(p)]
        self._versions: list[int] = []  # after the last step
        self._before: Tensor | None = None
        self._after: Tensor | None = None
        self._written = 0  # steps on end before which all weights were written
        self._undone: list[DeviceValue] = []  # of steps on end: values moved, undone, and exactly what they were

    # Versions tell whether anything was written at all, at no cost: only then are values compared.
    @torch.no_grad()
    def step_begins(self, optimizer: Any) -> None:
        """The optimizer's step begins."""
        if len(self._undone) == REPEATS:  # compared for good
            self._before = None
            return
        weights = living(self._weights)
        versions = [p._version for p in weights]  # noqa: SLF001  (public in all but name)
        written = len(versions) == len(self._versions) > 0
        written = written and all(a != b for a, b in zip(versions, self._versions, strict=True))
        self._written = self._written + 1 if written else 0
        now = some_values(weights) if self._written >= REPEATS else None
        if now is None or self._after is None or self._before is None or now.shape != self._before.shape:
            self._undone = []
        else:
            update, left = self._after - self._before, now - self._before
            moved = update != 0
            undone = moved & (left.abs() <= _LEFT * update.abs())
            counts = torch.stack([moved.sum(), undone.sum(), (undone & (left == 0)).sum()])
            self._undone.append(DeviceValue(counts))
        self._before, self._after = now, None
        if len(undone := tuple(self._undone)) == REPEATS:
            name = self.followed.name
            message = f"the updates of {name} are undone after each step: something else writes the weights"
            self.facts.record_if("updates undone", message, lambda: _are_undone(undone), optimizer=name)

    @torch.no_grad()
    def step_ends(self, optimizer: Any) -> None:
        """The optimizer's step has returned."""
        weights = living(self._weights)
        self._versions = [p._version for p in weights]  # noqa: SLF001  (likewise)
        self._after = None if self._before is None else some_values(weights)
        if self._after is None or self._before is None or self._after.shape != self._before.shape:
            self._before = self._after = None

    def other_steps(self) -> None:
        """Another optimizer has stepped: what it writes is no undoing."""
        self._versions, self._written = [], 0


def _are_undone(steps: Sequence[DeviceValue]) -> bool:
    """Return True if updates were undone at all of these steps, by other values."""
    counts = [cast("list[int]", step.tensor().tolist()) for step in steps]
    return all(
        moved > 0 and undone >= _UNDONE * moved and exactly < _EXACT * undone for moved, undone, exactly in counts
    )


class ClearedStates(TrainingCheck):
    """Steps between which the optimizers' states were cleared, or begun again by another optimizer."""

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self._stepped: dict[int, _Stepped] = {}  # by the weight's identity
        self._lasted: list[int] = []  # steps, of states on end that were too short
        self._trainings = 0  # that began with other weights than the one before had ended with

    # Second moments are means over 1 / (1 - beta2) steps. A state that is begun again on purpose, as for another phase
    # of the training, lasts longer than that, or is not begun three times on end. With weights that were loaded or
    # drawn again it is another training, as in a cross validation.
    def step_begins(self, optimizer: Any, followed: FollowedOptimizer) -> None:
        """An optimizer's step is called."""
        p, horizon = _first_with_gradient(optimizer)
        before = None if p is None else self._stepped.get(id(p))
        if p is None or before is None or before.weight() is not p:
            return
        if (followed.steps and not horizon) or optimizer.state.get(p):
            return
        del self._stepped[id(p)]
        if p._version != before.version:  # noqa: SLF001  (public in all but name)
            self._lasted = []
            self._begins_again(followed)
            return
        lasted = self.session.step - before.since
        self._lasted = [*self._lasted, lasted] if 0 < lasted < horizon else []
        if len(self._lasted) == REPEATS:
            steps, name = max(self._lasted), followed.name
            message = f"the state of {name} is cleared every {steps} steps or so, or another begins without one"
            self.facts.record("state cleared", message, optimizer=name, steps=steps, times=REPEATS)

    def step_ends(self, optimizer: Any, followed: FollowedOptimizer) -> None:
        """An optimizer's step has returned."""
        p, horizon = _first_with_gradient(optimizer)
        if p is None or (horizon and not optimizer.state.get(p)):
            return
        before = self._stepped.get(id(p))
        if before is None or before.weight() is not p:
            before = self._stepped[id(p)] = _Stepped(weakref.ref(p), self.session.step)
        before.version = p._version  # noqa: SLF001  (likewise)

    def _begins_again(self, followed: FollowedOptimizer) -> None:
        self._trainings += 1
        if self._trainings <= _MOST_TRAININGS:
            message = f"other weights were loaded or drawn, and {followed.name} begins without a state"
            self.facts.record("begun again", message, key=f"begun again {self._trainings}", optimizer=followed.name)


@dataclass(slots=True)
class _Stepped:
    """A weight that an optimizer has stepped."""

    weight: "weakref.ref[Tensor]"
    since: int
    version: int = 0  # as the last step left it


def _first_with_gradient(optimizer: Any) -> tuple[Tensor | None, float]:
    """Return the first weight that has a gradient, and over how many steps an Adam's second moments go, else 0.

    An optimizer around another, such as Lookahead's, has no state of its own, and no weight here.
    """
    if innermost(optimizer) is not optimizer:
        return None, 0.0
    for group in optimizer.param_groups:
        weights: list[Tensor] = group["params"]
        for p in weights:
            if p.grad is not None:
                betas = cast("Sequence[object] | None", group.get("betas"))
                beta = betas[1] if betas is not None and len(betas) > 1 else None
                return p, 1 / (1 - beta) if isinstance(beta, float) and beta < 1 else 0.0
    return None, 0.0


def _modules(model: nn.Module) -> "Iterable[tuple[str, nn.Module]]":
    return cast("Iterable[tuple[str, nn.Module]]", model.named_modules())


def _weights(model: nn.Module, fits: Callable[[nn.Module], bool]) -> list[tuple[str, Tensor]]:
    """Return the weights of the modules that fit.

    Not a module's own `weight`: a parametrized one computes it, and a spectral norm's iteration would go on.
    """
    modules = dict(_modules(model))
    named = [(raw, p) for raw, p in model.named_parameters() if raw.endswith("weight")]
    owners = [(clean(raw), p, modules.get(raw.removesuffix("weight").rstrip("."))) for raw, p in named]
    return [(name, p) for name, p, module in owners if module is not None and fits(module)]


def _has_rows(p: Tensor) -> bool:
    return is_plain(p) and p.dim() > 1 and p.shape[0] > 1


def _rows(p: Tensor) -> Tensor:
    """Sixteen rows from all over a weight, and the first sixteen values of each."""
    rows = p.detach().flatten(1)
    return rows[:: -(-len(rows) // _SIDE), :_SIDE].float().clone()
