"""One operation as `locate` sees it: memory it will overwrite, and its results."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from plimsoll.diagnosis.locating.fault import Phase
from plimsoll.diagnosis.locating.tracing.nonfinite_trail import (
    Forward,
    MemoryProvenance,
    Origin,
    What,
    count_nonfinite,
    first_bad,
    first_true,
    operand,
    readable,
    spectrum_of,
)
from plimsoll.spectrum import Spectrum
from plimsoll.tracing.operation_schema import Facts, bound, facts_of
from plimsoll.tracing.tensors import memory_of, tensors_in
from plimsoll.watch.call_site import ForwardIndex, Place, look

# -- its arguments: tensors by name, and the rest ----------------------------------------------------------------------

Named = list[tuple[str, Tensor]]  # tensors by the names that the operation has for them


def copied(x: Tensor) -> Tensor:
    """A copy of a floating tensor; others as they are."""
    return x.detach().clone() if x.is_floating_point() or x.is_complex() else x


def flat(given: Mapping[str, Any]) -> Named:
    """The tensors among arguments; those of lists by their number too."""
    tensors: Named = []
    for name, value in given.items():
        if isinstance(value, Tensor):
            tensors.append((name, value))
        elif isinstance(value, list | tuple):
            listed = cast("Sequence[Any]", value)
            tensors += [(f"{name}[{i}]", x) for i, x in enumerate(listed) if isinstance(x, Tensor)]
    return tensors


def is_odd(value: Any) -> bool:
    """Return True for a number that is not finite."""
    return isinstance(value, float) and not math.isfinite(value)


def scalars(given: Mapping[str, Any]) -> dict[str, float | int | str]:
    """The arguments that are no tensors, as numbers or short text."""
    numbers: dict[str, float | int | str] = {}
    for name, value in given.items():
        if isinstance(value, bool | int | float):
            numbers[name] = value
        elif isinstance(value, str | torch.dtype):
            numbers[name] = str(value).removeprefix("torch.")
        elif isinstance(value, list | tuple) and all(isinstance(v, int | float) for v in cast("Sequence[Any]", value)):
            numbers[name] = str(list(cast("Sequence[Any]", value)))
    return numbers


def values_at(inputs: Iterable[tuple[str, Tensor]], out: Tensor, index: tuple[int, ...]) -> dict[str, float]:
    """The inputs' values that the output's value at the index was made of."""
    values: dict[str, float] = {}
    for name, x in inputs:
        try:
            values[name] = float(x.broadcast_to(out.shape)[index].item())
        except (RuntimeError, TypeError):
            continue
    return values


# -- again in a wider format: its result if its range were enough ------------------------------------------------------

_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.float32: torch.float64}


def wider(dtype: torch.dtype) -> torch.dtype | None:
    """The dtype that an operation is repeated in; None of FP64."""
    return torch.float32 if dtype.is_floating_point and dtype.itemsize == 1 else _WIDER.get(dtype)


def wide_results(facts: Facts, func: Any, given: dict[str, Any], narrow: torch.dtype) -> list[Tensor]:
    """Return the operation's results in their order, in the dtype above `narrow`.

    None where it draws random numbers, or does not run in that dtype. `given` are its arguments as they were before.
    """
    dtype = wider(narrow)
    if dtype is None or facts.random or facts.collective:
        return []
    if facts.cast:
        source = given.get("src", given.get("self"))
        return [source.detach().to(dtype)] if isinstance(source, Tensor) and source.is_floating_point() else []
    wide = {name: _widened(value, dtype) for name, value in given.items()}
    try:
        result = func(**_by_place(func, wide))
    except (RuntimeError, TypeError, NotImplementedError):
        return []
    written = [wide[name] for name in facts.names if name in facts.written and name in wide]
    return unique([*tensors_in(result), *tensors_in(written)])


def unique(tensors: list[Tensor]) -> list[Tensor]:
    """Each once, in their order."""
    return list({id(x): x for x in tensors}.values())


def _by_place(func: Any, wide: dict[str, Any]) -> dict[str, Any]:
    known = {argument.name for argument in func._schema.arguments}  # noqa: SLF001
    return {name: value for name, value in wide.items() if name in known}


def _widened(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to(dtype, copy=True) if value.is_floating_point() else value.detach()
    if isinstance(value, torch.dtype):
        return dtype if value.is_floating_point else value
    if isinstance(value, list | tuple):
        return [_widened(item, dtype) for item in cast("list[Any]", value)]
    return value


# -- the operation -----------------------------------------------------------------------------------------------------

_C = cast("Any", torch)._C  # noqa: SLF001
_BIRTHS: Mapping[str | None, What] = {None: "held", "made": "uninitialised", "empty": "uninitialised"}


class OperationCheck:
    """One operation."""

    def __init__(self, tracer: "OperationTracer", facts: Facts, func: Any, given: dict[str, Any]) -> None:
        self.tracer, self.facts, self.func, self.given = tracer, facts, func, given
        self.trail, self.index = tracer.trail, tracer.operations
        self.backward = _C._current_graph_task_id() != -1  # noqa: SLF001
        self.node: Any = _C._current_autograd_node() if self.backward else None  # noqa: SLF001
        self.grad = torch.is_grad_enabled()
        self.place: Place | None = None
        self.forward: Forward | None = None
        self._actual, self._result = dict(given), cast("Any", None)

    # -- before --------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Note the call site before the operation runs, and keep what it will overwrite."""
        if self.backward:
            self.forward = self.tracer.forwards.of(self.node)
        elif not (self.facts.view or self.facts.collective or self.facts.name.startswith("profiler.")):
            number = _C._autograd._get_sequence_nr() - 1  # noqa: SLF001
            self.place = look()
            self._roots(self.place)
            self.forward = self.tracer.forwards.note(Forward(name=self.facts.name, place=self.place), number)
        if self.facts.collective:  # its schema does not say what it writes
            for x in tensors_in(self._actual):
                self.tracer.about_to_write(x)
            return
        for name in self.facts.names:
            if name in self.facts.written and name in self.given:
                self._keep(name)

    def _keep(self, name: str) -> None:
        value = self.given[name]
        for x in tensors_in(value):
            self.tracer.about_to_write(x)
        if name in self.facts.discarded:
            self.given[name] = None
        elif isinstance(value, Tensor):
            self.given[name] = copied(value)
        elif isinstance(value, list | tuple):
            self.given[name] = [copied(x) for x in cast("Iterable[Tensor]", value)]

    def _roots(self, place: Place) -> None:
        if place.root is not None:
            self.tracer.roots.setdefault(id(place.root), place.root)

    # -- after ---------------------------------------------------------------------------------------------------------

    def end(self, result: Any) -> None:
        """After it has run: looks at what it gave."""
        facts, self._result = self.facts, result
        outputs = self._outputs(result)
        if facts.collective:
            for x in [*(x for _, x in outputs), *tensors_in(self._actual)]:
                self.trail.receive(x)
        self._bear(outputs)
        if facts.base == "lift_fresh":
            self._deliberate_constant(result)
        if facts.view or facts.uninitialised or facts.collective:
            return
        seen = [(name, x, plain) for name, x in outputs if (plain := readable(x)) is not None]
        bad = [(name, x) for name, x, plain in seen if count_nonfinite(plain)]
        if bad:
            self._not_finite(bad)
        for name, x, _ in seen:
            if not any(x is y for _, y in bad) and (name not in facts.written or name in facts.discarded):
                self._finite(x)
        share = self.tracer.flush_share()
        if share is not None:
            self._look_for_flush(share, [(name, x, plain) for name, x, plain in seen])

    def _bear(self, outputs: Named) -> None:
        """Notes memory that is new: not that of views, nor of what is written in place."""
        facts = self.facts
        if facts.view and facts.base != "lift_fresh":
            return
        known = set[int]() if facts.view else {m for _, x in flat(self._actual) for m in memory_of(x)}
        how = "empty" if facts.uninitialised else "made"
        for _, x in outputs:
            if not known.intersection(memory_of(x)):
                self.trail.bear(x, how)

    def _finite(self, x: Tensor) -> None:
        """Mark a new tensor and its memory as finite; a view may be only a part."""
        if not x._is_view():  # noqa: SLF001
            self.trail.clear(x)

    def _outputs(self, result: Any) -> Named:
        """The tensors that it gave or wrote, each once, by their names."""
        outputs: dict[int, tuple[str, Tensor]] = {}
        values: Any = cast("Any", result) if isinstance(result, tuple) else (result,)
        for index, value in enumerate(cast("Sequence[Any]", values)):
            name = self.facts.results[index] if index < len(self.facts.results) else f"result{index}"
            listed = list(tensors_in(value))
            for number, x in enumerate(listed):
                outputs.setdefault(id(x), (name if len(listed) == 1 else f"{name}[{number}]", x))
        return [*outputs.values(), *self._written_besides(outputs)]

    def _written_besides(self, found: Mapping[int, Any]) -> Named:
        return [
            (name if alone else f"{name}[{number}]", x)
            for name in self.facts.names
            if name in self.facts.written
            for listed in [list(tensors_in(self._actual.get(name)))]
            for alone in [len(listed) == 1]
            for number, x in enumerate(listed)
            if id(x) not in found
        ]

    # -- what is not finite --------------------------------------------------------------------------------------------

    def _not_finite(self, bad: Named) -> None:
        inputs = self._inputs()
        spectra = {name: spectrum_of(x) for name, x in inputs}
        dirty = [(name, x) for name, x in inputs if (s := spectra[name]) is not None and s.nonfinite]
        origins: set[Origin] = set()
        for name, x in dirty:
            origins |= self._came_with(name, x, cast("Spectrum", spectra[name]), inputs, spectra)
        if self._is_new(bad, dirty, spectra, origins):
            origin = self._origin(bad, inputs, spectra, fresh=self._fresh(bad, dirty, inputs))
            origin.given = sorted(origins, key=lambda other: other.index)
            self.trail.origins.append(origin)
            origins.add(origin)
            if self.forward is not None and not self.backward and not origin.deliberate:
                self.forward.origin = self.forward.origin or origin
        for name, x in bad:
            fresh = name not in self.facts.written or name in self.facts.discarded
            self.trail.mark(x, origins, fresh=fresh and not x._is_view())  # noqa: SLF001

    def _came_with(
        self, name: str, x: Tensor, s: Spectrum, inputs: Named, spectra: Mapping[str, Spectrum | None]
    ) -> frozenset[Origin]:
        """Return a bad input's origins; an unknown one had its values before."""
        known = self.trail.of(self._real(name, x))
        if known:
            return known
        births = [self.trail.birth(memory) for memory in memory_of(self._real(name, x))]
        how = births[0] if births else None
        own = how is not None or isinstance(self._real(name, x), torch.nn.Parameter)
        if how is None and not own and self.backward and self.trail.collectives:
            how = "collective"  # a copy that a process group has made by itself
        if how == "collective" and self.trail.sent:
            return frozenset(self.trail.sent)
        mask = not own and not s.nans and not s.pos_infs
        origin = self._origin([], inputs, spectra)
        origin.what = "held" if how is None else _BIRTHS.get(how, "received")
        origin.phase = "before" if how is None else origin.phase
        origin.forward = None
        origin.kind, origin.deliberate, origin.worst = ("nan" if s.nans else "inf"), mask, name
        origin.count, origin.total, origin.first_index = s.nonfinite, s.count, first_bad(x)
        origin.value = math.nan if s.nans else math.inf if s.pos_infs else -math.inf
        self.trail.origins.append(origin)
        self.trail.mark(self._real(name, x), [origin], fresh=False)
        return frozenset([origin])

    # An operation is new to blame if its result is not finite and all that it read was; if it works value by value,
    # also for those of its values that were; and if it makes a NaN of Infs that were there on purpose. Everything else
    # inherits.
    def _is_new(self, bad: Named, dirty: Named, spectra: Mapping[str, Spectrum | None], origins: set[Origin]) -> bool:
        """Return True if the operation itself made values that are not finite, and was not given them."""
        if not dirty:
            return True
        if self._has_odd_scalar() or any(origin.deliberate for origin in origins):
            has_nan = any((s := spectra[name]) is not None and s.nans for name, _ in dirty)
            made = any((s := spectrum_of(x)) is not None and s.nans for _, x in bad)
            if made and not has_nan and all(origin.deliberate for origin in origins):
                return True
        return self._fresh(bad, dirty, self._inputs()) is not None

    def _fresh(self, bad: Named, dirty: Named, inputs: Named) -> Tensor | None:
        """Return which of a pointwise operation's bad outputs come of finite values alone."""
        if not self.facts.pointwise or not dirty:
            return None
        for _, x in bad:
            try:
                finite = [torch.isfinite(y).broadcast_to(x.shape) for _, y in inputs if y.is_floating_point()]
                fresh = ~torch.isfinite(x)
                for mask in finite:
                    fresh = fresh & mask
            except (RuntimeError, NotImplementedError):
                continue
            if bool(fresh.any()):
                return fresh
        return None

    def _has_odd_scalar(self) -> bool:
        return any(is_odd(value) for value in self.given.values())

    def _deliberate_constant(self, result: Any) -> None:
        """Note a tensor made of numbers in Python: its non-finite values are deliberate."""
        x = next(tensors_in(result), None)
        plain = None if x is None else readable(x)
        if x is None or plain is None or not count_nonfinite(plain) or self.trail.of(x):
            return
        spectrum = spectrum_of(x)
        origin = self._origin([("result", x)], [], {"result": spectrum})
        origin.deliberate = True
        self.trail.origins.append(origin)
        self.trail.mark(x, [origin], fresh=False)

    # -- flushes -------------------------------------------------------------------------------------------------------

    def _look_for_flush(self, share: float, seen: Sequence[tuple[str, Tensor, Tensor]]) -> None:
        """Note the operation if it made zeros of too large a share of nonzero values."""
        suspects = [(n, x, p) for n, x, p in seen if p.numel() and int((p == 0).sum()) > share * p.numel()]
        if not suspects:
            return
        wide = wide_results(self.facts, self.func, self.given, suspects[0][2].dtype)
        plains = [p for _, _, p in seen]
        for name, x, p in suspects:
            place = next(i for i, y in enumerate(plains) if y is p)
            if place >= len(wide) or wide[place].shape != p.shape:
                continue
            should = (wide[place] != 0) & torch.isfinite(wide[place])
            flushed, total = should & (p == 0), int(should.sum())
            if total and int(flushed.sum()) > share * total:
                self.tracer.flushed = self._flush(name, x, flushed, total, wide[place])
                return

    def _flush(self, name: str, x: Tensor, flushed: Tensor, total: int, wide: Tensor) -> Origin:
        inputs = self._inputs()
        origin = self._origin([(name, x)], inputs, {n: spectrum_of(y) for n, y in inputs}, fresh=flushed)
        origin.kind, origin.count, origin.total, origin.value = "flush", int(flushed.sum()), total, 0.0
        origin.expected = float(wide[origin.first_index].item())
        return origin

    # -- records -------------------------------------------------------------------------------------------------------

    def _real(self, name: str, x: Tensor) -> Tensor:
        """The tensor itself, of a copy that was kept of it."""
        listed = dict(flat(self._actual))
        return listed.get(name, x)

    def _inputs(self) -> Named:
        """The floating tensors that it read, by their names, as they were."""
        return [(name, x) for name, x in flat(self.given) if x.is_floating_point() or x.is_complex()]

    def _origin(
        self,
        bad: Named,
        inputs: Named,
        spectra: Mapping[str, Spectrum | None],
        *,
        fresh: Tensor | None = None,
    ) -> Origin:
        place = self._place()
        others = [(name, x) for name, x in flat(self.given) if not (x.is_floating_point() or x.is_complex())]
        origin = Origin(
            index=self.index, what="made", kind="inf", facts=self.facts, phase=self._phase(place), place=place,
            deliberate=self._has_odd_scalar(), forward=self.forward if self.backward else None,
            node=None if self.node is None else str(self.node.name()),
            inputs=[operand(name, x, spectra.get(name)) for name, x in [*inputs, *others]],
            outputs=[operand(name, x) for name, x in bad],
            memory={name: memory_of(x) for name, x in [*flat(self._actual), *bad]},
            scalars=scalars(self.given), scaling=self.tracer.scaling,
        )  # fmt: skip
        variable = getattr(self.node, "variable", None)
        origin.accumulates = variable if isinstance(variable, Tensor) else None
        if bad:
            self._tell_values(origin, bad, inputs, fresh)
        return origin

    def _tell_values(self, origin: Origin, bad: Named, inputs: Named, fresh: Tensor | None) -> None:
        """The first bad value, and what it came of."""
        name, x = bad[0]
        plain = readable(x)
        assert plain is not None
        spectrum = cast("Spectrum", origin.outputs[0].spectrum)
        if fresh is not None and fresh.shape != plain.shape:  # of complex numbers, which are read as pairs
            fresh = None
        origin.worst, origin.first_index = name, first_bad(plain) if fresh is None else first_true(fresh)
        origin.value = float(plain[origin.first_index].item())
        origin.count = spectrum.nonfinite if fresh is None else int(fresh.sum())
        origin.total = spectrum.count
        origin.kind = "nan" if math.isnan(origin.value) else "inf"
        if self.facts.pointwise:
            origin.at = values_at(inputs, plain, origin.first_index)
        outputs = unique([p for _, y in self._outputs(self._result) if (p := readable(y)) is not None])
        wide = wide_results(self.facts, self.func, self.given, plain.dtype)
        place = next((i for i, y in enumerate(outputs) if y.data_ptr() == plain.data_ptr()), 0)
        if place < len(wide) and wide[place].shape == plain.shape:
            origin.expected = float(wide[place][origin.first_index].item())

    def _place(self) -> Place:
        """Return the call site; in a backward that of its forward, unless the user's own code runs."""
        place = self.place or look(backward=self.backward)
        self._roots(place)
        if self.backward and not place.recomputing and self.forward is not None:
            there = self.forward.place
            if place.file is None:
                place.file, place.line, place.function = there.file, there.line, there.function
            place.module, place.root = there.module, there.root
        if self.backward and place.module is None and self.forward is not None:
            place.module = self.forward.place.module  # the checkpoint's
        return place

    def _phase(self, place: Place) -> Phase:
        if self.backward:
            return "recomputation" if place.recomputing else "backward"
        if place.optimizer and not self.grad:
            return "optimizer"
        after = self.tracer.backwards > 0 and place.module is None
        return "optimizer" if after and not self._differentiated() else "forward"

    def _differentiated(self) -> bool:
        return self.grad and any(x.requires_grad for _, x in flat(self._actual))


class OperationTracer(TorchDispatchMode):
    """Sees the operations inside its context."""

    def __init__(self, flush_share: float | None, about_to_write: Callable[[Tensor], None] | None) -> None:
        super().__init__()
        self.trail = MemoryProvenance()
        self.flushed: Origin | None = None
        self.operations = 0
        self.backwards = 0
        self.scaling = False  # a scaler multiplies the loss
        self.roots: dict[int, Any] = {}
        self._flush_share, self._about_to_write = flush_share, about_to_write
        self.forwards: ForwardIndex[Forward] = ForwardIndex()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        facts = facts_of(func)
        arguments = bound(facts, args, kwargs)
        self.operations += 1
        call = OperationCheck(self, facts, func, arguments)
        with _C.DisableTorchFunction(), torch.no_grad():
            call.begin()
        result = func(*args, **kwargs)
        with _C.DisableTorchFunction(), torch.no_grad():
            call.end(result)
        return result

    def about_to_write(self, x: Tensor) -> None:
        """Keep memory that was there before the closure, as an operation changes it."""
        for memory in memory_of(x):
            if self.trail.birth(memory) is None:
                self.trail.written.setdefault(memory, x)
                if self._about_to_write is not None:
                    self._about_to_write(x)

    def flush_share(self) -> float | None:
        """Return the share that makes a flush a fault; None once found, or if not asked."""
        return self._flush_share if self.flushed is None else None
