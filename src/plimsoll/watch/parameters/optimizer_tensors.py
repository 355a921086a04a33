"""Weights, gradients, optimizer state and updates, read around optimizers' steps.

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
from plimsoll.watch.parameters.updates import UpdateKinds, Updates, kind_of
from plimsoll.watch.sample import in_last_bin
from plimsoll.watch.session import WatchSession, contained, contained_reader

_FEW = 3  # modules that a name lists
_PROBED_TENSORS, _PROBED_VALUES = 8, 4096  # gradients that every step looks at, and the most values of one
_MARKED = 6  # parameters whose gradients show whether a backward has reached an optimizer's

Marks = dict[int, tuple[int, int] | None]  # of each parameter's gradient: identity and version


class _OptimizerParameters:
    """The parameters that an optimizer steps, found once and kept while they stay."""

    def __init__(self, state: object, named: dict[str, Tensor], everything: list[Tensor]) -> None:
        self.state, self.named = state, named
        self.ids = {id(p) for p in named.values()}  # those that are read here
        self.all_ids = {id(p) for p in everything}
        trained = [p for p in everything if p.requires_grad]
        self.marked = {id(p): weakref.ref(p) for p in trained[:: -(-len(trained) // _MARKED) or 1]}
        self.on_cpu = all(p.device.type == "cpu" for p in everything)
        small = [p for p in named.values() if p.numel() <= _PROBED_VALUES]
        self.probed = small[:: -(-len(small) // _PROBED_TENSORS) or 1]


class Parameters:
    """Reader of the model's parameters and of their optimizers, for one watch."""

    def __init__(self, session: WatchSession, selection: Selection) -> None:
        self.session, self._selection = session, selection
        self._names: dict[int, tuple[weakref.ref[Tensor], str | None]] = {}
        self._owned: set[int] = set()  # parameters that some optimizer has
        self._late: set[int] = set()  # those that the model did not have when the watch began
        self.marks_all = False  # see `gradient_marks`
        self._marked: dict[int, weakref.ref[Tensor]] | None = None
        self.narrowed: dict[str, torch.dtype] = {}  # parameters whose gradient came through a narrower dtype
        self._optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._kept: dict[int, _OptimizerParameters] = {}  # by optimizer
        self._kinds = UpdateKinds(session)
        self._updates = Updates(session, self._kinds)
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
        self.suspect = False  # gradients may not be finite
        self._vouched: set[int] = set()  # optimizers that a scaler lets step on finite gradients only
        self.nonfinite: dict[torch.device, Tensor] = {}

    def owns(self, optimizer: Any) -> bool:
        """Return True if the optimizer has parameters of the model."""
        params = list(parameters_of(optimizer))
        self._learn_names_of(params)  # `fully_shard` puts others in the place of those that were there
        names = self._names  # another thread may replace them
        return any(id(p) in self._members and id(p) in names and names[id(p)][0]() is p for p in params)

    def takes_over(self, optimizer: Any) -> bool:
        """Return True if it has parameters of a read optimizer, or new ones of the model."""
        return not self.ids_of(optimizer).isdisjoint(self._owned | self._late)

    def adopt(self, optimizer: Any) -> None:
        """Reads this optimizer's parameters from now on."""
        self._optimizers.add(optimizer)
        self._marked = None

    @property
    def optimizers(self) -> list[Any]:
        """The optimizers that are alive."""
        return list(self._optimizers)

    @contained_reader("weights", "updates")
    def enter(self, optimizer: Any) -> None:
        """The optimizer is about to step."""
        key = id(optimizer)
        if self._read_early:
            self._drop_early()
        if key not in self._entered:
            self._entered.add(key)
            known = self._known(optimizer)
            self._owned |= known.ids
            self._brought_up |= known.ids
            if self.session.due.weights:
                self._read_weights(known.named)
            if self.session.due.updates:
                self._updates.keep(known.named)
        if self.backwards and key not in self._graded:
            self.read_gradients(optimizer)

    @contained_reader("updates", "optimizer")
    def leave(self, optimizer: Any, *, stepped: bool = True) -> None:
        """The optimizer has stepped, or a scaler has kept it from stepping."""
        key, due = id(optimizer), self.session.due
        if key not in self._graded:
            self.read_gradients(optimizer)
        if key in self._left:
            return
        self._left.add(key)
        if stepped:
            self._kinds.follow(optimizer, self._known(optimizer).named)
            if due.updates:
                self._updates.read(self._known(optimizer).named)
        if due.optimizer:
            self._read_state(optimizer, self._known(optimizer).named)

    @contained_reader("gradients")
    def read_gradients(self, optimizer: Any) -> None:
        """Read the gradients that an optimizer is given."""
        self._graded.add(id(optimizer))
        known = self._known(optimizer)
        masters = {id(weight): master for master, weight in masters_of(optimizer)}
        if not self.session.due.gradients and known.on_cpu and (not self._counts or self._seem_finite(known, masters)):
            return
        # A fused optimizer is given scaled gradients, and the scale; Plimsoll's scalers unscale first, and mark it.
        scale = getattr(optimizer, "grad_scale", None)
        scaled = isinstance(scale, Tensor) and not getattr(scale, "plimsoll_unscaled", False)
        self._read_gradients_of(known.named, scaled=scaled, masters=masters)

    # Steps that are not sampled read no gradients on a CPU, where that would take as long as a hundredth of the step.
    # Their non-finite values are counted if something says that there are some: the loss, a scaler's skip, the norm
    # that clipping takes, or a few small gradients. A NaN that arises in a backward spreads to the gradients of all
    # layers before it. On other devices all are counted at every step, which the training does not wait for.
    def _seem_finite(self, known: _OptimizerParameters, masters: Mapping[int, Tensor]) -> bool:
        """Return True if nothing indicates NaN or Inf in a CPU optimizer's gradients."""
        if self.suspect:
            return False
        grads = [_inner(g) for p in known.probed if (g := _gradient(p, masters.get(id(p)))) is not None]
        plain = [as_real(g) for g in grads if type(g) is Tensor and g.layout is torch.strided]
        return not kernels.count_nonfinite(plain)

    @contained
    def judge(self, optimizer: Any, *, finite: bool) -> None:
        """Note a scaler's verdict on the gradients of an optimizer that steps or skips."""
        if finite:
            self._vouched.add(id(optimizer))
        elif not self.session.due.gradients and not self.nonfinite:  # the few that were looked at were finite
            self.suspect = True
            self.read_gradients(optimizer)

    # -- without an optimizer ------------------------------------------------------------------------------------------

    @contained_reader("weights", "gradients", "updates")
    def read_early(self) -> None:
        """Read weights and gradients as a backward ends, since no optimizer may step."""
        self._drop_early()
        session, params = self.session, self._all()
        if session.due.weights:
            self._read_weights(params)
        if session.due.updates:
            self._updates.keep(params)
        self._read_gradients_of(params, scaled=False)
        self._brought_up |= {id(p) for p in params.values()}
        self._read_early = session.series_in(BEFORE_UPDATE_OF_PARAMETERS)

    def _drop_early(self) -> None:
        """Drop the early reading: another backward or an optimizer has come."""
        if self._read_early and self.session.sample is not None:
            self.session.sample.drop_series(self._read_early)
        self._read_early = set()
        self._brought_up.clear()
        self.nonfinite.clear()

    @contained_reader("updates")
    def leave_early(self) -> None:
        """The weights were changed by the script itself."""
        if self.session.due.updates:
            self._updates.read(self._all())

    @contained_reader("weights", "gradients")
    def finish_step(self) -> None:
        """Read frozen weights, and gradients that no optimizer's step consumed."""
        due = self.session.due
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
        """Return the step's number of non-finite gradient values; None without a count.

        It is a tensor.
        """
        counts = list(self.nonfinite.values()) if self._counts else []
        if not counts and self._counts and self._entered and self._entered <= self._vouched:
            counts = [kernels.new_counts(1)]
        if len(counts) <= 1:
            return counts[0] if counts else None
        # To a GPU if there is one: a copy to the CPU may be read before it has arrived.
        device = next((count.device for count in counts if count.device.type != "cpu"), counts[0].device)
        return torch.stack([count.to(device, non_blocking=True) for count in counts]).sum()

    @property
    def _counts(self) -> bool:
        """True if non-finite gradient values are recorded."""
        return "nonfinite" in self.session.settings.recorder

    # -- reading -------------------------------------------------------------------------------------------------------

    def _read_weights(self, params: Mapping[str, Tensor]) -> None:
        self._measure("weights", params)

    def _read_gradients_of(
        self, params: Mapping[str, Tensor], *, scaled: bool, masters: Mapping[int, Tensor] | None = None
    ) -> None:
        gradients = {name: _gradient(p, (masters or {}).get(id(p))) for name, p in params.items()}
        grads = {name: g for name, g in gradients.items() if g is not None}
        measured: list[str] = []
        if self.session.due.gradients:
            dense = {name: g for name, g in grads.items() if not g.is_sparse}
            measured = self._measure("gradients", dense, scaled=scaled)
            for name, g in grads.items():
                if g.is_sparse:
                    self._measure_sparse(name, g, scaled)
            if self.session.shadow is not None:
                self.session.shadow.compare_gradients(grads, self.narrowed)
        if self._counts:
            for name in measured if self.session.ranks.counts_plain else ():  # whose rows tell it
                del grads[name]
            self._count(grads.values())

    def _measure(self, collection: str, named: Mapping[str, Tensor], *, scaled: bool = False) -> list[str]:
        """Measures what can be read, and returns its names."""
        session = self.session
        names, ready = session.gather(collection, named, self.narrowed if collection == "gradients" else {})
        if not names or not session.has_room(len(names)):
            return []
        counts = collection == "gradients" and session.ranks.counts_plain
        for device, (tensors, series) in ready.items():
            block = session.settings.block_of(collection)
            bins = block if collection == "weights" else 0
            self._launch(device, tensors, series, scaled=scaled, counts=counts, block=block, bins=bins)
        return names

    @torch.no_grad()  # a copy of a tensor with gaps in its memory is no part of the graph
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
        sample = self.session.sample
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
        """Count stored values, the others as zeros; in blocks if the last axis is dense."""
        values = g.coalesce().values()
        session = self.session
        if not session.has_room():
            return
        rows, row = session.measure(values.detach())
        missing, here = g.numel() - values.numel(), rows.row(row)
        here[[row_layout.COUNT, row_layout.ZEROS]] += missing
        if session.settings.block and g.dense_dim():
            length = max(g.shape[-1], 1)
            here[[row_layout.BLOCKS, row_layout.ZERO_BLOCKS]] += (
                missing // length * -(-length // session.settings.block)
            )
        elif session.settings.block:
            here[row_layout.NARROW :] = 0  # its neighbours along the last axis are not next to it in memory
        rows.enter(row, session.series_of("gradients", name, values), scaled=scaled)

    def _read_state(self, optimizer: Any, params: Mapping[str, Tensor]) -> None:
        tensors: dict[str, Tensor] = {}
        names = {id(p): name for name, p in params.items()}
        names |= {id(m): names[id(p)] for m, p in masters_of(optimizer) if id(p) in names}
        for key, state in optimizer.state.items():
            name = names.get(id(key)) if isinstance(key, Tensor) else str(key)
            if name is None or not (isinstance(key, Tensor) or self._selection.takes(ROOT)):
                continue
            for path, x in cast("Mapping[Any, Any]", state).items() if isinstance(state, Mapping) else [("", state)]:
                if isinstance(x, Tensor):  # nearly all are
                    tensors[f"{name}:{path}" if path else name] = x
                else:
                    tensors |= {f"{name}:{inner}" if inner else name: y for inner, y in _state_tensors(x, str(path))}
        self._measure("optimizer", tensors)

    def _count(self, grads: Iterable[Tensor]) -> None:
        for device, tensors in _listed(grads, self.session).items():
            kernels.count_nonfinite_into(tensors, self._nonfinite_on(device), 0)

    def _nonfinite_on(self, device: torch.device) -> Tensor:
        if device not in self.nonfinite:
            self.nonfinite[device] = torch.zeros(1, dtype=torch.int64, device=device)
        return self.nonfinite[device]

    # -- names ---------------------------------------------------------------------------------------------------------

    def members(self) -> list[tuple[int, Tensor]]:
        """The model's parameters by identity, those that are not selected too."""
        live = [(key, ref()) for key, ref in self._members.items()]
        if any(p is None for _, p in live):
            self._learn()
            live = [(key, ref()) for key, ref in self._members.items()]
        return [(key, p) for key, p in live if p is not None]

    def gradient_marks(self) -> Marks:
        """Return the identity and version of parameters' gradients, None without one."""
        # The marks of a few parameters stand for all as long as one optimizer has them and each backward reaches them.
        # All of a transformer's were 0.2 ms a step, most of it cache misses.
        refs = self._marked
        if refs is None or self.marks_all:
            refs = self._marked = self._members if self.marks_all else self._few()
        marks: Marks = {}
        for key, ref in refs.items():
            p = ref()
            if p is not None:
                g = p.grad
                marks[key] = None if g is None else (id(g), _inner(g)._version)  # noqa: SLF001  (public in all but name)
        return marks

    def _few(self) -> "dict[int, weakref.ref[Tensor]]":
        optimizers = list(self._optimizers)
        known = self._kept.get(id(optimizers[0])) if len(optimizers) == 1 else None
        return self._members if known is None or not known.marked.keys() <= self._members.keys() else known.marked

    def reached(self, roots: list[Tensor]) -> set[int]:
        """The model's parameters that a backward from these tensors reaches."""
        return leaves_of(roots).keys() & self._members.keys()

    def reach(self, roots: list[Tensor]) -> Literal["ours", "both", "others", "unknown"]:
        """Return the owner of the parameters that a backward from `roots` reaches.

        "unknown" where no parameter is seen.
        """
        reached = {key for key, leaf in leaves_of(roots).items() if isinstance(leaf, nn.Parameter)}
        ours = reached & {key for key, _ in self.members()}
        # FSDP's graphs have other tensors in the parameters' place, and re-entrant checkpoints hide theirs.
        if not reached or self.are_sharded():
            return "unknown"
        return ("ours" if ours == reached else "both") if ours else "others"

    def are_sharded(self) -> bool:
        """Return True if the parameters are parts of distributed ones."""
        if self.session.ranks.world == 1:
            return False
        return any(hasattr(p, "placements") for _, p in self.members())

    def ids_of(self, optimizer: Any) -> set[int]:
        """The identities of the parameters that an optimizer steps."""
        return self._known(optimizer).all_ids

    def label_of(self, ids: set[int]) -> str:
        """Return the one or few modules with just these parameters; "" if there is none."""
        model = self.session.model()
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
        """Find the model's parameters by identity; again when unknown ones turn up."""
        model = self.session.model()
        named = [(clean(raw), p) for raw, p in model.named_parameters()] if model is not None else []
        takes = self._selection.takes
        # Put in place whole: another thread's optimizer may be asked for at this moment.
        self._names = {id(p): (weakref.ref(p), name if takes(name) else None) for name, p in named}
        # The model's parameters, selected or not.
        self._members: dict[int, weakref.ref[Tensor]] = {id(p): weakref.ref(p) for _, p in named}
        self._kept.clear()
        self._marked = None

    def meet_model(self) -> None:
        """The model has other parameters than it had."""
        before = self._members
        self._learn()
        self._late |= self._members.keys() - before.keys()

    def _name(self, p: Tensor) -> str | None:
        known = self._names.get(id(p))
        if known is None or known[0]() is not p:
            return None
        return known[1]

    def _known(self, optimizer: Any) -> _OptimizerParameters:
        """The optimizer's parameters, with names for those that are read here."""
        groups = [list(map(id, group["params"])) for group in optimizer.param_groups]
        state = (groups, self.session.ranks.wrapper, self.session.ranks.data_parallel, kind_of(optimizer))
        known = self._kept.get(id(optimizer))
        if known is None or known.state != state:
            params = list(parameters_of(optimizer))
            known = self._kept[id(optimizer)] = _OptimizerParameters(state, self._named(params), params)
            self._kinds.record(optimizer, known.named)
            self._marked = None
        return known

    def _named(self, params: Iterable[Tensor]) -> dict[str, Tensor]:
        params = list(params)
        self._learn_names_of(params)
        named = ((self._name(p), p) for p in params if self.session.ranks.counts(p))
        return {name: p for name, p in named if name is not None}

    def _learn_names_of(self, params: list[Tensor]) -> None:
        """Learn the names of all parameters again if one of these is not known."""
        if all(id(p) in self._names and self._names[id(p)][0]() is p for p in params):
            return
        unknown = {id(p) for p in params} - self._names.keys()
        self._learn()
        for p in params:
            if id(p) in unknown and id(p) not in self._names:
                self._names[id(p)] = (weakref.ref(p), None)  # another model's: not asked about again

    def _all(self) -> dict[str, Tensor]:
        named = [(name, ref()) for ref, name in self._names.values()]
        counts = self.session.ranks.counts
        return {name: p for name, p in named if name is not None and p is not None and counts(p)}


def parameters_of(optimizer: Any) -> Iterator[Tensor]:
    """The model's parameters that the optimizer steps, itself or through masters."""
    weights: dict[int, Tensor] = {id(master): weight for master, weight in masters_of(optimizer)}
    for group in optimizer.param_groups:
        params: list[Tensor] = group["params"]
        yield from (weights.get(id(p), p) for p in params)


def has_gradients(optimizer: Any) -> bool:
    """Return True if a parameter of the optimizer, or a weight of which it has the master, has a gradient."""
    # FP32 masters have theirs inside the step only, or from unscaling on, when the weights have none any more.
    own = (p for group in optimizer.param_groups for p in group["params"])
    return any(p.grad is not None for p in itertools.chain(own, parameters_of(optimizer)))


def has_unscaled(scaler: Any, optimizer: Any) -> bool:
    """Return True if a `GradScaler` has unscaled the optimizer's gradients, and has not stepped it since."""
    states = getattr(scaler, "_per_optimizer_states", None)
    state = cast("dict[int, dict[str, object]]", states).get(id(optimizer)) if isinstance(states, dict) else None
    return state is not None and getattr(state.get("stage"), "name", "") == "UNSCALED"


def masters_of(optimizer: Any) -> list[tuple[Tensor, Tensor]]:
    """Return an optimizer's registered FP32 masters, each with the model's weight."""
    # The attribute is a function without arguments, so that an optimizer's copies and pickles have none of it.
    masters: Any = getattr(optimizer, "plimsoll_masters", None)
    return [] if masters is None else list(masters())


def innermost(optimizer: Any) -> Any:
    """The optimizer that steps in the end, inside those that wrap it."""
    while isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    return optimizer


def _gradient(p: Tensor, master: Tensor | None) -> Tensor | None:
    """Return the gradient that the optimizer reads: that of the master, if it has one."""
    own = None if master is None else master.grad
    return p.grad if own is None else own


def _listed(grads: Iterable[Tensor], session: WatchSession) -> dict[torch.device, list[Tensor]]:
    by_device: dict[torch.device, list[Tensor]] = {}
    for g in grads:
        if not session.ranks.counts_plain and not hasattr(g, "placements"):
            continue
        if type(g) is Tensor and g.layout == torch.strided:
            plain = as_real(g)
        else:
            plain = session.readable(g.coalesce().values() if g.is_sparse else g, "gradients")
        if plain is not None:
            by_device.setdefault(plain.device, []).append(plain)
    return by_device


def _state_tensors(state: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(state, Tensor):
        yield path, state
    elif isinstance(state, Mapping):
        for key, value in cast("Mapping[Any, Any]", state).items():
            yield from _state_tensors(value, f"{path}.{key}" if path else str(key))
    elif isinstance(state, (list, tuple)):
        for index, value in enumerate(cast("list[Any]", state)):
            yield from _state_tensors(value, f"{path}.{index}" if path else str(index))


def as_real(g: Tensor) -> Tensor:
    """Return the real and imaginary parts of a complex tensor: NaN and Inf in either count."""
    return torch.view_as_real(g.detach().resolve_conj()) if g.is_complex() else g


def _inner(g: Any) -> Any:
    """Return the tensor whose version shows a change: FSDP2 adds inside a DTensor."""
    return g._local_tensor if type(g) is not Tensor and hasattr(g, "placements") else g  # noqa: SLF001
