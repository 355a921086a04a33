"""Weights, gradients, optimizer state and updates: all that is read around an optimizer's step.

Weights are those that the step's forward has used, read before the optimizer changes them; gradients are what the
optimizer is given (after unscaling and clipping), read before its step, or after it where the step itself runs the
backward (a closure). A step that a scaler skips is read when the skip is known, non-finite gradients and all.
"""

import itertools
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from plimsoll import kernels, row_layout
from plimsoll.tensor_collections import BEFORE_UPDATE_OF_PARAMETERS
from plimsoll.watch.hooks.autograd_graph import leaves_of
from plimsoll.watch.names import ROOT, Selection, clean
from plimsoll.watch.parameters.last_bins import in_last_bin
from plimsoll.watch.parameters.updates import UpdateKinds, Updates, kind_of
from plimsoll.watch.session import WatchSession, contained

_FEW = 3  # modules that a name lists


class Parameters:
    """Reader of the model's parameters and of their optimizers, for one watch."""

    def __init__(self, core: WatchSession, selection: Selection) -> None:
        self.core, self._selection = core, selection
        self._names: dict[int, tuple[weakref.ref[Tensor], str | None]] = {}
        self._owned: set[int] = set()  # parameters that some optimizer has
        self._late: set[int] = set()  # those that the model did not have when the watch began
        self.narrowed: dict[str, torch.dtype] = {}  # parameters whose gradient came through a narrower dtype
        self._optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._kept: dict[int, tuple[object, dict[str, Tensor], set[int], list[int]]] = {}  # by optimizer
        self._kinds = UpdateKinds(core)
        self._updates = Updates(core)
        self._read_early: set[int] = set()
        self.start_step()
        self._learn()

    def start_step(self) -> None:
        """Nothing of the new step has been read."""
        self._entered: set[int] = set()
        self._brought_up: set[int] = set()  # parameters of optimizers that have entered, which may be gone by the end
        self._graded: set[int] = set()
        self._left: set[int] = set()
        self._read_early.clear()
        self._updates.forget()
        self.backwards = 0
        self.nonfinite: dict[torch.device, Tensor] = {}

    def owns(self, optimizer: Any) -> bool:
        """Whether the optimizer has parameters of the model."""
        params = list(parameters_of(optimizer))
        self._meet(params)  # `fully_shard` puts others in the place of those that were there
        names = self._names  # another thread may replace them
        return any(id(p) in self._members and id(p) in names and names[id(p)][0]() is p for p in params)

    def takes_over(self, optimizer: Any) -> bool:
        """Whether it has parameters of an optimizer that is read, or that are new in the model."""
        return not self.ids_of(optimizer).isdisjoint(self._owned | self._late)

    def adopt(self, optimizer: Any) -> None:
        """Reads this optimizer's parameters from now on."""
        self._optimizers.add(optimizer)

    @property
    def optimizers(self) -> list[Any]:
        """The optimizers that are alive."""
        return list(self._optimizers)

    @contained
    def enter(self, optimizer: Any) -> None:
        """The optimizer is about to step."""
        key = id(optimizer)
        if self._read_early:
            self._drop_early()
        if key not in self._entered:
            self._entered.add(key)
            self._forget_if_other(optimizer)
            params, ids = self._known(optimizer)
            self._owned |= ids
            self._brought_up |= ids
            if self.core.due.weights:
                self._read_weights(params)
            if self.core.due.updates:
                self._updates.keep(params)
        if self.backwards and key not in self._graded:
            self.read_gradients(optimizer)

    @contained
    def leave(self, optimizer: Any, *, stepped: bool = True) -> None:
        """The optimizer has stepped, or a scaler has kept it from stepping."""
        key = id(optimizer)
        if key not in self._graded:
            self.read_gradients(optimizer)
        if key in self._left:
            return
        self._left.add(key)
        params, _ = self._known(optimizer)
        if stepped and self.core.due.updates:
            self._updates.read(params)
        if self.core.due.optimizer:
            self._read_state(optimizer, params)

    @contained
    def read_gradients(self, optimizer: Any) -> None:
        """Reads the gradients that an optimizer is given, and those that no optimizer has."""
        self._graded.add(id(optimizer))
        params, _ = self._known(optimizer)
        masters = {id(weight): master for master, weight in masters_of(optimizer)}
        # A fused optimizer is given scaled gradients, and the scale; Plimsoll's scalers unscale first, and mark it.
        scale = getattr(optimizer, "grad_scale", None)
        scaled = isinstance(scale, Tensor) and not getattr(scale, "plimsoll_unscaled", False)
        self._read_gradients_of(params, scaled=scaled, masters=masters)

    # -- without an optimizer ------------------------------------------------------------------------------------------

    @contained
    def read_early(self) -> None:
        """Reads weights and gradients when a backward has ended: where no optimizer steps, nothing else says when."""
        self._drop_early()
        core, params = self.core, self._all()
        if core.due.weights:
            self._read_weights(params)
        if core.due.updates:
            self._updates.keep(params)
        self._read_gradients_of(params, scaled=False)
        self._brought_up |= {id(p) for p in params.values()}
        self._read_early = core.series_in(BEFORE_UPDATE_OF_PARAMETERS)

    def _drop_early(self) -> None:
        """Forgets what was read early: there is another backward of the same step, or an optimizer after all."""
        if self._read_early and self.core.sample is not None:
            self.core.sample.drop_series(self._read_early)
        self._read_early = set()
        self._brought_up.clear()
        self.nonfinite.clear()

    @contained
    def leave_early(self) -> None:
        """The weights were changed by the script itself."""
        if self.core.due.updates:
            self._updates.read(self._all())

    @contained
    def finish_step(self) -> None:
        """Reads what no optimizer's step has brought up: frozen weights, gradients that nothing consumes."""
        due = self.core.due
        if not (due.weights or due.gradients):
            return
        everything = self._all()
        rest = {name: p for name, p in everything.items() if id(p) not in self._brought_up}
        if due.weights and rest:
            self._read_weights(rest)
        orphans = {name: p for name, p in rest.items() if id(p) not in self._owned}
        if orphans:
            self._read_gradients_of(orphans, scaled=False)

    def count_nonfinite(self) -> Tensor | None:
        """Return the number of non-finite gradient values of the step, as a tensor; None without a count."""
        counts = list(self.nonfinite.values()) if "nonfinite" in self.core.settings.recorder else []
        if len(counts) <= 1:
            return counts[0] if counts else None
        return torch.stack([count.to(counts[0].device, non_blocking=True) for count in counts]).sum()

    # -- reading -------------------------------------------------------------------------------------------------------

    def _read_weights(self, params: Mapping[str, Tensor]) -> None:
        self._measure("weights", params)

    def _read_gradients_of(
        self, params: Mapping[str, Tensor], *, scaled: bool, masters: Mapping[int, Tensor] | None = None
    ) -> None:
        found = {name: _gradient(p, (masters or {}).get(id(p))) for name, p in params.items()}
        grads = {name: g for name, g in found.items() if g is not None}
        measured: list[str] = []
        if self.core.due.gradients:
            dense = {name: g for name, g in grads.items() if not g.is_sparse}
            measured = self._measure("gradients", dense, scaled=scaled)
            for name, g in grads.items():
                if g.is_sparse:
                    self._measure_sparse(name, g, scaled)
            if self.core.shadow is not None:
                self.core.shadow.compare_gradients(grads, self.narrowed)
        if "nonfinite" in self.core.settings.recorder:
            for name in measured if self.core.ranks.counts_plain else ():  # whose rows tell it
                del grads[name]
            self._count(grads.values())

    def _measure(self, collection: str, named: Mapping[str, Tensor], *, scaled: bool = False) -> list[str]:
        """Measures what can be read, and returns its names."""
        core = self.core
        narrowed = self.narrowed if collection == "gradients" else {}
        ready: dict[torch.device, tuple[list[Tensor], list[int]]] = {}  # tensors, and the series they are of
        names: list[str] = []
        for name, x in named.items():
            if not x.is_floating_point():
                continue
            plain = core.readable(x, collection, name)
            if plain is not None:
                names.append(name)
                tensors, series = ready.get(plain.device) or ready.setdefault(plain.device, ([], []))
                tensors.append(plain.detach() if plain.requires_grad else plain)
                series.append(core.series_of(collection, name, x, narrowed.get(name)))
        if not names or not core.has_room(len(names)):
            return []
        counts = collection == "gradients" and core.ranks.counts_plain
        for device, (tensors, series) in ready.items():
            block = core.settings.block_of(collection)
            bins = block if collection == "weights" else 0
            self._launch(device, tensors, series, scaled=scaled, counts=counts, block=block, bins=bins)
        return names

    def _launch(
        self,
        device: torch.device,
        tensors: list[Tensor],
        series: list[int],
        *,
        scaled: bool,
        counts: bool,
        block: int,
        bins: int,
    ) -> None:
        sample = self.core.sample
        assert sample is not None
        rows = sample.rows(device)
        for first, number, bank, span in rows.spans(len(tensors)):
            part = slice(first, first + len(span))
            kernels.measure_each(tensors[part], bank, span, block=block)
            if counts:
                nonfinite = bank[span.start : span.stop, row_layout.NANS : row_layout.NEG_INFS + 1]
                self._nonfinite_on(device).add_(nonfinite.sum())
            last = torch.stack([in_last_bin(x, bins) for x in tensors[part]]) if bins else None
            rows.enter_all(number, series[part], scaled=scaled, last_bins=last)

    def _measure_sparse(self, name: str, g: Tensor, scaled: bool) -> None:
        """Counts what is stored, and as zeros what is not; blocks where the last axis is a dense one."""
        values = g.coalesce().values()
        core = self.core
        if not core.has_room():
            return
        rows, row = core.measure(values.detach())
        missing, here = g.numel() - values.numel(), rows.row(row)
        here[[row_layout.COUNT, row_layout.ZEROS]] += missing
        if core.settings.block and g.dense_dim():
            length = max(g.shape[-1], 1)
            here[[row_layout.BLOCKS, row_layout.ZERO_BLOCKS]] += missing // length * -(-length // core.settings.block)
        elif core.settings.block:
            here[row_layout.NARROW :] = 0  # its neighbours along the last axis are not next to it in memory
        rows.enter(row, core.series_of("gradients", name, values), scaled=scaled)

    def _read_state(self, optimizer: Any, params: Mapping[str, Tensor]) -> None:
        found: dict[str, Tensor] = {}
        names = {id(p): name for name, p in params.items()}
        names |= {id(m): names[id(p)] for m, p in masters_of(optimizer) if id(p) in names}
        for key, state in optimizer.state.items():
            name = names.get(id(key)) if isinstance(key, Tensor) else str(key)
            if name is not None and (isinstance(key, Tensor) or self._selection.takes(ROOT)):
                for path, x in _state_tensors(state):
                    found[f"{name}:{path}" if path else name] = x
        self._measure("optimizer", found)

    def _count(self, grads: Iterable[Tensor]) -> None:
        for device, tensors in _listed(grads, self.core).items():
            kernels.count_nonfinite_into(tensors, self._nonfinite_on(device), 0)

    def _nonfinite_on(self, device: torch.device) -> Tensor:
        if device not in self.nonfinite:
            self.nonfinite[device] = torch.zeros(1, dtype=torch.int64, device=device)
        return self.nonfinite[device]

    # -- names ---------------------------------------------------------------------------------------------------------

    def members(self) -> list[tuple[int, Tensor]]:
        """The model's parameters by identity, those that are not selected too."""
        found = [(key, self._names[key][0]()) for key in self._members]
        if any(p is None for _, p in found):
            self._learn()
            found = [(key, self._names[key][0]()) for key in self._members]
        return [(key, p) for key, p in found if p is not None]

    def reach(self, roots: list[Tensor]) -> Literal["ours", "both", "others", "unknown"]:
        """Whose parameters a backward from these tensors reaches; unknown where none is seen.

        FSDP's graphs have other tensors in the parameters' place, and re-entrant checkpoints hide theirs.
        """
        reached = {key for key, leaf in leaves_of(roots).items() if isinstance(leaf, nn.Parameter)}
        ours = reached & {key for key, _ in self.members()}
        if not reached or self.are_sharded():
            return "unknown"
        return ("ours" if ours == reached else "both") if ours else "others"

    def are_sharded(self) -> bool:
        """Whether FSDP holds the parameters, or they are parts of distributed ones."""
        if self.core.ranks.world == 1:
            return False
        model = self.core.model()
        return hasattr(model, "_fsdp_wrapped_module") or any(hasattr(p, "placements") for _, p in self.members())

    def ids_of(self, optimizer: Any) -> set[int]:
        """The identities of the parameters that an optimizer steps."""
        return {id(p) for p in parameters_of(optimizer)}

    def label_of(self, ids: set[int]) -> str:
        """The module that has just these parameters of the model, or the few that have; empty if there is none."""
        model = self.core.model()
        named = [(clean(raw), id(p) in ids) for raw, p in model.named_parameters()] if model is not None else []
        paths = [name.split(".") for name, has in named if has]
        levels = itertools.takewhile(lambda level: len(set(level)) == 1, zip(*paths, strict=False))
        shared = [level[0] for level in levels]
        shared = shared[: len(paths[0]) - 1] if paths else []  # the last part is the parameter's own
        for depth in range(1, len(shared) + 1):
            module = ".".join(shared[:depth])
            if all(has for name, has in named if name.startswith(f"{module}.")):
                return module
        tops = list(dict.fromkeys(path[0] for path in paths))
        return ".".join(shared) or ("+".join(tops) if len(tops) <= _FEW else "")

    def _learn(self) -> None:
        """Finds the model's parameters by identity; again when some turn up that are not known."""
        model = self.core.model()
        named = [(clean(raw), p) for raw, p in model.named_parameters()] if model is not None else []
        takes = self._selection.takes
        # Put in place whole: another thread's optimizer may be asked for at this moment.
        self._names = {id(p): (weakref.ref(p), name if takes(name) else None) for name, p in named}
        self._members = {id(p) for _, p in named}  # the model's parameters, selected or not
        self._kept.clear()

    def meet_model(self) -> None:
        """The model has other parameters than it had."""
        before = self._members
        self._learn()
        self._late |= self._members - before

    def _name(self, p: Tensor) -> str | None:
        known = self._names.get(id(p))
        if known is None or known[0]() is not p:
            return None
        return known[1]

    def _known(self, optimizer: Any) -> tuple[dict[str, Tensor], set[int]]:
        """The optimizer's parameters that are read here, by name, and their identities; found once and kept."""
        groups = [group["params"] for group in optimizer.param_groups]
        ends = [(len(group), id(group[0]), id(group[-1])) for group in groups if group]
        state = (ends, self.core.ranks.wrapper, self.core.ranks.data_parallel, kind_of(optimizer))
        kept = self._kept.get(id(optimizer))
        if kept is None or kept[0] != state:
            named = self._named(parameters_of(optimizer))
            kept = (state, named, {id(p) for p in named.values()}, [id(p) for group in groups for p in group])
            self._kept[id(optimizer)] = kept
            self._kinds.record(optimizer, named)
        return kept[1], kept[2]

    def _forget_if_other(self, optimizer: Any) -> None:
        """Once a step, for parameters in the middle of a group that are others now."""
        kept = self._kept.get(id(optimizer))
        if kept is not None and kept[3] != [id(p) for group in optimizer.param_groups for p in group["params"]]:
            del self._kept[id(optimizer)]

    def _named(self, params: Iterable[Tensor]) -> dict[str, Tensor]:
        params = list(params)
        self._meet(params)
        named = ((self._name(p), p) for p in params if self.core.ranks.counts(p))
        return {name: p for name, p in named if name is not None}

    def _meet(self, params: list[Tensor]) -> None:
        """Learns the names anew if there is a parameter among these that is not known."""
        if all(id(p) in self._names and self._names[id(p)][0]() is p for p in params):
            return
        strangers = {id(p) for p in params} - self._names.keys()
        self._learn()
        for p in params:
            if id(p) in strangers and id(p) not in self._names:
                self._names[id(p)] = (weakref.ref(p), None)  # another model's: not asked about again

    def _all(self) -> dict[str, Tensor]:
        found = [(name, ref()) for ref, name in self._names.values()]
        counts = self.core.ranks.counts
        return {name: p for name, p in found if name is not None and p is not None and counts(p)}


def parameters_of(optimizer: Any) -> Iterator[Tensor]:
    """The model's parameters that the optimizer steps, itself or through masters."""
    weights: dict[int, Tensor] = {id(master): weight for master, weight in masters_of(optimizer)}
    for group in optimizer.param_groups:
        params: list[Tensor] = group["params"]
        yield from (weights.get(id(p), p) for p in params)


def masters_of(optimizer: Any) -> list[tuple[Tensor, Tensor]]:
    """The FP32 masters that an optimizer steps, each with the model's weight; whoever put them there tells it.

    The attribute is a function without arguments, so that an optimizer's copies and pickles have none of it.
    """
    told: Any = getattr(optimizer, "plimsoll_masters", None)
    return [] if told is None else list(told())


def innermost(optimizer: Any) -> Any:
    """The optimizer that steps in the end, inside those that wrap it."""
    while isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    return optimizer


def _gradient(p: Tensor, master: Tensor | None) -> Tensor | None:
    """Return the gradient that the optimizer reads: that of the master, if it has one."""
    given = None if master is None else master.grad
    return p.grad if given is None else given


def _listed(grads: Iterable[Tensor], core: WatchSession) -> dict[torch.device, list[Tensor]]:
    found: dict[torch.device, list[Tensor]] = {}
    for g in grads:
        if not core.ranks.counts_plain and not hasattr(g, "placements"):
            continue
        if type(g) is Tensor and g.layout == torch.strided:
            plain = g
        else:
            plain = core.readable(g.coalesce().values() if g.is_sparse else g, "gradients")
        if plain is not None:
            found.setdefault(plain.device, []).append(plain)
    return found


def _state_tensors(state: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(state, Tensor):
        yield path, state
    elif isinstance(state, Mapping):
        for key, value in cast("Mapping[Any, Any]", state).items():
            if isinstance(value, Tensor):  # what nearly all are, without another generator
                yield (f"{path}.{key}" if path else str(key)), value
            else:
                yield from _state_tensors(value, f"{path}.{key}" if path else str(key))
    elif isinstance(state, (list, tuple)):
        for index, value in enumerate(cast("list[Any]", state)):
            yield from _state_tensors(value, f"{path}.{index}" if path else str(index))
