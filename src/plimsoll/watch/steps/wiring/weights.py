"""Facts on a model in training: its weights and gradients, and its mode.

Weights and gradients are judged by a few values, compared with earlier ones:

- at the first step, what each data-parallel rank begins with;
- ten steps later, layers whose units are copies of each other, and move as one;
- weights that are written between two steps so that the update of the first one is undone;
- gradients of micro-batches that are rounded away as they are added up in 16 bits;
- gradients that are clipped before all micro-batches of a step are added up;
- steps between which the state of an optimizer is lost.

Nothing here waits for a device: numbers are read on the background thread, as soon as they are there.
"""

import itertools
import math
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from plimsoll.kernels.device_value import DeviceValue
from plimsoll.kernels.dtypes import FORMATS, SIXTEEN_BIT
from plimsoll.runs import Event, Record
from plimsoll.watch.names import clean
from plimsoll.watch.session import WatchSession

_MOST_KEPT = 256  # of a list or dict: more are data
_LAST = 0.9  # of running statistics that are of the last batch: torch's momentum is not the share that is kept
_KINDS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_LAYERS = 256  # whose rows are compared
_SIDE = 16  # rows, and values of each
_NEAR = 1e-3  # of how far the weights have moved: rows that are nearer to each other move as one
_FIRST = 16  # weights of which each rank records the first values
_VALUES = 256  # of a weight or a gradient that is followed from step to step
_STREAK = 3  # steps on end
_LEFT = 2.0**-5  # of an update: averages with a decay of 0.97 or more leave less
_CLIPPED = 8  # steps in which it is looked for clipping
_MANY = 64  # micro-batches, from which on a 16-bit sum may be too coarse for one of them
_UNDONE, _EXACT = 0.99, 0.9  # of the values; exactly what they were are those that a mask or a grid holds


class FirstWeights:
    """Weights at the first step of a training, and ten steps later."""

    def __init__(self, core: WatchSession) -> None:
        self.core = core
        self._kept: list[tuple[str, weakref.ref[Tensor], Tensor]] | None = None

    @torch.no_grad()
    def first_step_begins(self) -> None:
        """Keep a few values of each layer. Does nothing when called again."""
        model = self.core.model()
        if self._kept is not None or model is None:
            return
        self._record_rank(model)
        # Not a module's own `weight`: a parametrized one computes it, and a spectral norm's iteration would go on.
        modules = dict(_modules(model))
        weights = [
            (clean(raw), p)
            for raw, p in model.named_parameters()
            if raw.endswith("weight") and isinstance(modules.get(raw.removesuffix("weight").rstrip(".")), _KINDS)
        ]
        some = [(name, p) for name, p in weights[:_LAYERS] if p.requires_grad and _has_rows(p)]
        self._kept = [(name, weakref.ref(p), _rows(p)) for name, p in some]

    # Units that begin as copies of each other get equal gradients, and so they stay copies. Layers that begin at a
    # constant and are none (heads, residual branches, adapters) have rows that differ after a step: what follows them
    # differs. Rows that do not move at all are left out: nothing reaches them.
    @torch.no_grad()
    def look_at_rows(self) -> None:
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
        step = self.core.step

        def produce() -> list[Record]:
            table = cast("list[list[float]]", far.tensor().tolist())
            equal = [n for n, (moved, apart) in zip(names, table, strict=True) if moved > 0 and apart <= _NEAR * moved]
            return [fact(step, "equal rows", "units are copies of each other", parameters=equal)] if equal else []

        self.core.writer.submit(produce, 200)

    # DistributedDataParallel sends rank 0's weights to all ranks, unless `init_sync` is off. Ranks that drew other
    # weights then average gradients that fit none of their models.
    def _record_rank(self, model: nn.Module) -> None:
        ranks, step = self.core.ranks, self.core.step
        if ranks.wrapper != "DistributedDataParallel" or ranks.data_parallel < 2 or self.core.settings.ranks != "each":
            return
        weights = [(clean(raw), p) for raw, p in model.named_parameters() if p.dim() > 1 and is_plain(p)]
        weights = weights[:: -(-len(weights) // _FIRST) or 1]
        # What other ranks record too: of parameters that the wrapper ignores each rank has its own.
        shared = [(name, p) for name, p in weights if ranks.data_index == 0 or not ranks.counts(p)]
        values = {name: DeviceValue(p.detach().reshape(-1)[:_SIDE].float()) for name, p in shared}

        def produce() -> list[Record]:
            listed = {name: cast("list[float]", value.tensor().tolist()) for name, value in values.items()}
            finite = {name: some for name, some in listed.items() if all(math.isfinite(x) for x in some)}
            return [fact(step, "first weights", "what this rank begins with", weights=finite)] if finite else []

        self.core.writer.submit(produce, 4000)


class Overwrites:
    """A few weights of an optimizer, to see updates that are undone between steps."""

    def __init__(self, weights: Iterable[Tensor]) -> None:
        self._weights = [weakref.ref(p) for p in weights if is_plain(p)]
        self._versions: list[int] = []  # after the last step
        self._before: Tensor | None = None
        self._after: Tensor | None = None
        self._written = 0  # steps on end before which all weights were written
        self.undone: list[DeviceValue] = []  # of steps on end: values moved, undone, and exactly what they were

    # Versions tell whether anything was written at all, at no cost: only then are values compared.
    @torch.no_grad()
    def step_begins(self) -> None:
        """The optimizer's step begins."""
        if len(self.undone) == _STREAK:  # compared for good
            self._before = None
            return
        weights = living(self._weights)
        versions = [p._version for p in weights]  # noqa: SLF001  (public in all but name)
        written = len(versions) == len(self._versions) > 0
        written = written and all(a != b for a, b in zip(versions, self._versions, strict=True))
        self._written = self._written + 1 if written else 0
        now = some_values(weights) if self._written >= _STREAK else None
        if now is None or self._after is None or self._before is None or now.shape != self._before.shape:
            self.undone = []
        else:
            update, left = self._after - self._before, now - self._before
            moved = update != 0
            undone = moved & (left.abs() <= _LEFT * update.abs())
            counts = torch.stack([moved.sum(), undone.sum(), (undone & (left == 0)).sum()])
            self.undone.append(DeviceValue(counts))
        self._before, self._after = now, None

    @torch.no_grad()
    def step_ends(self) -> None:
        """The optimizer's step has returned."""
        weights = living(self._weights)
        self._versions = [p._version for p in weights]  # noqa: SLF001  (likewise)
        self._after = None if self._before is None else some_values(weights)
        if self._after is None or self._before is None or self._after.shape != self._before.shape:
            self._before = self._after = None

    def forget(self) -> None:
        """Another optimizer has stepped: what it writes is no undoing."""
        self._versions, self._written = [], 0


def are_undone(steps: Sequence[DeviceValue]) -> bool:
    """Return True if updates were undone at all of these steps, by other values."""
    counts = [cast("list[int]", step.tensor().tolist()) for step in steps]
    return all(
        moved > 0 and undone >= _UNDONE * moved and exactly < _EXACT * undone for moved, undone, exactly in counts
    )


class Sums:
    """Some values of an optimizer's 16-bit gradients, while micro-batches are added."""

    def __init__(self, weights: Iterable[Tensor]) -> None:
        chosen = [p for p in weights if p.dtype in SIXTEEN_BIT and is_plain(p)]
        self._weights = [weakref.ref(p) for p in chosen]
        self.format = FORMATS[chosen[0].dtype].name if chosen else ""
        self.backwards = 0  # since the last step
        self._before: Tensor | None = None
        self._changed: dict[int, list[Tensor]] = {}  # values that a backward has changed, by groups of micro-batches

    def step_ends(self) -> None:
        """Another step begins."""
        self.backwards, self._before = 0, None
        self._changed.clear()

    # The second to the fourth backward of a step show how many values one changes; the last four before each power of
    # two, from 64 on, how many it changes still. A gradient that is zero changes nothing early either, and sums of
    # random signs grow by the root of their number: one of 1,024 is far from too small there.
    @torch.no_grad()
    def backward_begins(self) -> None:
        """A backward begins, which may add to the gradients."""
        if not self._weights:
            return
        self.backwards += 1
        group = self._group()
        self._before = some_values(_gradients(self._weights)) if group else None

    @torch.no_grad()
    def backward_ends(self) -> None:
        """A backward has ended."""
        before, self._before = self._before, None
        now = None if before is None else some_values(_gradients(self._weights))
        if before is not None and now is not None and now.shape == before.shape:
            self._changed.setdefault(self._group(), []).append((now != before).sum())

    def counts(self) -> DeviceValue | None:
        """Return the mean numbers of values that early and late backwards changed."""
        last = max(self._changed, default=0)
        if last < _MANY or 4 not in self._changed:
            return None
        means = [torch.stack(self._changed[group]).float().mean() for group in (4, last)]
        return DeviceValue(torch.stack(means))

    def _group(self) -> int:
        """Return the power of two that this backward is just before, or 0."""
        top = 1 << max(self.backwards - 1, 0).bit_length()
        return top if self.backwards > max(top - 4, 1) and (top == 4 or top >= _MANY) else 0


def is_rounded_away(counts: DeviceValue) -> bool:
    """Return True if a late backward changes under half the values an early one does."""
    early, late = cast("list[float]", counts.tensor().tolist())
    return early >= _SIDE and late < early / 2


class Clipping:
    """Some values of an optimizer's gradients, while micro-batches are added in its first steps."""

    def __init__(self, weights: Iterable[Tensor]) -> None:
        self._weights = [weakref.ref(p) for p in weights if is_plain(p)]
        self._steps = 0
        self._before: Tensor | None = None  # when their norm was taken
        self._changed: Tensor | None = None  # values that changed from then to the next backward
        self.found: list[DeviceValue] = []  # of steps on end

    def norm_taken(self) -> None:
        """The norm of gradients was taken: clipping multiplies them next."""
        if self._steps < _CLIPPED and len(self.found) < _STREAK:
            self._before = some_values(_gradients(self._weights))

    # Gradients that were set to None or zero since begin a new sum: it is clipped as a whole.
    def backward_begins(self) -> None:
        """A backward begins, which may add to the gradients."""
        before, self._before = self._before, None
        now = None if before is None else some_values(_gradients(self._weights))
        if before is not None and now is not None and now.shape == before.shape:
            self._changed = ((now != before) & (now != 0)).sum()

    def step_ends(self) -> None:
        """The optimizer's step has returned."""
        self._steps += 1
        if self._changed is not None and len(self.found) < _STREAK:
            self.found.append(DeviceValue(self._changed))
        elif len(self.found) < _STREAK:
            self.found = []
        self._before = self._changed = None


class ClearedStates:
    """Steps between which the optimizers' states were cleared, or begun again by another optimizer."""

    def __init__(self) -> None:
        self._begun: dict[int, tuple[weakref.ref[Tensor], int]] = {}  # weights with a state, and since when
        self._lasted: list[int] = []  # steps, of states on end that were too short

    # Second moments are means over 1 / (1 - beta2) steps. A state that is begun again on purpose, as for another phase
    # of the training, lasts longer than that, or is not begun three times on end.
    def step_begins(self, optimizer: "torch.optim.Optimizer", step: int) -> int | None:
        """An optimizer's step is called; return how many steps states last, at the third that is too short."""
        p, horizon = _first_with_gradient(optimizer)
        begun = None if p is None else self._begun.get(id(p))
        if p is None or begun is None or begun[0]() is not p or optimizer.state.get(p):
            return None
        del self._begun[id(p)]
        lasted = step - begun[1]
        self._lasted = [*self._lasted, lasted] if 0 < lasted < horizon else []
        return max(self._lasted) if len(self._lasted) == _STREAK else None

    def step_ends(self, optimizer: "torch.optim.Optimizer", step: int) -> None:
        """Its step has returned."""
        p, _ = _first_with_gradient(optimizer)
        begun = None if p is None else self._begun.get(id(p))
        if p is not None and (begun is None or begun[0]() is not p) and optimizer.state.get(p):
            self._begun[id(p)] = weakref.ref(p), step


def living(weights: "Iterable[weakref.ref[Tensor]]") -> list[Tensor]:
    """Return the weights that are still there."""
    return [p for ref in weights if (p := ref()) is not None]


def _gradients(weights: "Iterable[weakref.ref[Tensor]]") -> list[Tensor]:
    return [p.grad for p in living(weights) if p.grad is not None and is_plain(p.grad)]


def _first_with_gradient(optimizer: "torch.optim.Optimizer") -> tuple[Tensor | None, float]:
    """Return the first weight of an Adam that has a gradient, and over how many steps its second moments go."""
    for group in optimizer.param_groups:
        betas = cast("Sequence[object] | None", group.get("betas"))
        beta = betas[1] if betas is not None and len(betas) > 1 else None
        if isinstance(beta, float) and beta < 1:
            weights: list[Tensor] = group["params"]
            return next((p for p in weights if p.grad is not None), None), 1 / (1 - beta)
    return None, 0.0


def fact(step: int, name: str, message: str, **details: object) -> Event:
    """Return an event of kind "wiring"."""
    return Event(step=step, kind="wiring", message=message, details={"fact": name, **details})


def _modules(model: nn.Module) -> "Iterable[tuple[str, nn.Module]]":
    return cast("Iterable[tuple[str, nn.Module]]", model.named_modules())


def is_plain(x: Tensor) -> bool:
    """Return True for a tensor that can be read as it lies in memory."""
    plain = type(x) in (Tensor, nn.Parameter) and x.layout == torch.strided and not x.is_meta and not x.is_inference()
    if not plain or not x.numel() or not x.is_contiguous():
        return False
    return x.untyped_storage().nbytes() >= (x.storage_offset() + x.numel()) * x.element_size()  # FSDP frees some


def _has_rows(p: Tensor) -> bool:
    return is_plain(p) and p.dim() > 1 and p.shape[0] > 1


def _rows(p: Tensor) -> Tensor:
    """Sixteen rows from all over a weight, and the first sixteen values of each."""
    rows = p.detach().flatten(1)
    return rows[:: -(-len(rows) // _SIDE), :_SIDE].float().clone()


def some_values(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return first values of tensors, or None if not readable on one device."""
    if not tensors or len({x.device for x in tensors}) > 1 or not all(map(is_plain, tensors)):
        return None
    return torch.cat([x.detach().reshape(-1)[:_VALUES].float() for x in tensors])


# -- models that are trained in evaluation mode, and batch norms that have seen no data --------------------------------

_STEPS = 10  # on end: a script may evaluate right before a step
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class EvaluationMode:
    """Mode of one model and its modules, at the steps of its optimizers."""

    def __init__(self, core: WatchSession) -> None:
        self.core = core
        self._evaluated = 0  # steps on end with the model in evaluation mode
        self._was_training = False  # before that
        self._said = False

    # Batch norms that are frozen on purpose keep the statistics of the data that went before. Those that were never in
    # training mode have a mean of 0 and a variance of 1: they normalise nothing.
    def step_begins(self, steps: int) -> None:
        """An optimizer's step begins, after so many of it; the tenth on end is recorded."""
        model = self.core.model()
        if model is None or self._said:
            return
        self._was_training |= model.training
        self._evaluated = 0 if model.training else self._evaluated + 1
        if _STEPS not in (self._evaluated, steps):
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
        step, later = self.core.step, self._was_training

        def produce() -> list[Record]:
            initial = [name for name, value in norms.items() if bool(value.tensor()[0])]
            message = "the model is trained in evaluation mode" if whole else "batch norms are in evaluation mode"
            details = {
                "fact": "evaluation mode", "whole": whole, "later": later, "dropouts": dropouts, "norms": list(norms),
                "initial": initial,
            }  # fmt: skip
            return [Event(step=step, kind="wiring", message=message, details=details)]

        self.core.writer.submit(produce, 400)


class FrozenNorms:
    """Batch norms with frozen weights whose running statistics go on to follow the data."""

    def __init__(self) -> None:
        self._versions: dict[str, tuple[int, int]] = {}  # of the count of batches and of the weight, at the last look
        self._moved: Counter[str] = Counter()  # looks on end at which batches had been counted

    # An average of another model's weights moves with them, and so may its statistics. The discriminator of a GAN is
    # frozen in half of the steps only. torch writes the running mean without raising its version.
    def look(self, model: nn.Module | None) -> list[str]:
        """Look at a step of an optimizer; return the norms that have followed the data at `_STREAK` looks on end."""
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
        return sorted(clean(name) for name, looks in self._moved.items() if looks == _STREAK)


def all_parameters(model: nn.Module | None) -> list[tuple[str, Tensor]]:
    """Return a model's parameters, and those of modules in plain lists and dicts of it, which torch does not see."""
    if model is None:
        return []
    found: dict[int, tuple[str, Tensor]] = {id(p): (clean(name), p) for name, p in model.named_parameters()}
    for name, module in cast("Iterable[tuple[str, nn.Module]]", model.named_modules()):
        for attribute, value in vars(module).items():
            if attribute.startswith("_") or not isinstance(value, list | tuple | dict):
                continue
            at = f"{clean(name)}.{attribute}".removeprefix(".")
            for inner, p in _parameters_in(cast("Any", value)):
                found.setdefault(id(p), (f"{at}{inner}", p))
    return list(found.values())


def _parameters_in(kept: Mapping[object, object] | Sequence[object]) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters in a list or dict, each with its place."""
    items = kept.items() if isinstance(kept, Mapping) else enumerate(kept)
    for key, item in itertools.islice(items, _MOST_KEPT):
        if isinstance(item, nn.Module):
            yield from ((f"[{key}].{name}", p) for name, p in item.named_parameters())
        elif isinstance(item, nn.Parameter):
            yield f"[{key}]", item


def norms_of_one_value(model: nn.Module | None) -> list[str]:
    """Return the norms over a single value, whose outputs are constant."""
    kinds = tuple(kind for name in ("LayerNorm", "RMSNorm") if isinstance(kind := getattr(nn, name, None), type))
    named = cast("Iterable[tuple[str, nn.Module]]", () if model is None else model.named_modules())
    return [
        clean(name) for name, m in named if isinstance(m, kinds) and math.prod(cast("Any", m).normalized_shape) == 1
    ]


def norms_of_last_batch(model: nn.Module | None) -> list[str]:
    """Return the batch norms in training whose running statistics are nearly those of the last batch alone."""
    named = cast("Iterable[tuple[str, nn.Module]]", () if model is None else model.named_modules())
    kinds = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm
    norms = [(name, cast("Any", m)) for name, m in named if isinstance(m, kinds)]
    return [clean(name) for name, m in norms if m.training and m.track_running_stats and (m.momentum or 0) >= _LAST]
