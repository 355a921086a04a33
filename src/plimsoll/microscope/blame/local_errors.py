"""Local errors: each unit again, from its values and gradients, and what becomes of them."""

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from plimsoll.errors import StateError
from plimsoll.microscope.blame.recording import (
    Around,
    Call,
    CallRecord,
    Key,
    calls_so_far,
    in_backward,
    intercepted,
    is_float,
)
from plimsoll.watch.shadow.replay import RandomState, as_wide, borrowed, in_reference, leaf, widened

Side = Literal["input", "output"]
Point = tuple[Key, Side, int]  # a call, its arguments or its result, and the place among their leaves


@dataclass(slots=True)
class LocalErrors:
    """Errors that arise in one unit."""

    # Errors of what it gives out: its result, and the arguments of the calls within it.
    values: dict[Point, Tensor] = field(default_factory=dict[Point, Tensor])
    # Errors of the gradients that it hands on: of its arguments, and of the results of those calls.
    gradients: dict[Point, Tensor] = field(default_factory=dict[Point, Tensor])
    # Errors of its parameters' gradients, by the parameter's identity.
    parameters: dict[int, Tensor] = field(default_factory=dict[int, Tensor])

    @property
    def is_none(self) -> bool:
        """True if nothing differs."""
        return not any(bool(e.any()) for e in (*self.forward, *self.backward))

    @property
    def forward(self) -> list[Tensor]:
        """Errors of values."""
        return list(self.values.values())

    @property
    def backward(self) -> list[Tensor]:
        """Errors of gradients."""
        return [*self.gradients.values(), *self.parameters.values()]

    def without(self, other: "LocalErrors") -> "LocalErrors":
        """Return these errors less others of the same unit."""
        return LocalErrors(
            values=_less(self.values, other.values),
            gradients=_less(self.gradients, other.gradients),
            parameters=_less(self.parameters, other.parameters),
        )


@dataclass(slots=True, eq=False)
class Unit:
    """A unit that was computed again: its values, and its backward's leaves."""

    record: CallRecord
    values: dict[Point, Tensor]
    leaves: dict[Point, Tensor]
    parameters: dict[tuple[int, str], Tensor]
    again: AbstractContextManager[None]  # in which a checkpoint may call again what is called within the unit
    _found: tuple[dict[Point, Tensor], dict[int, Tensor]] | None = None

    def gradients(self) -> tuple[dict[Point, Tensor], dict[int, Tensor]]:
        """Return the gradients of the leaves, and those of parameters."""
        if self._found is None:  # the graph is free afterwards
            self._found = self._backward()
        return self._found

    def _backward(self) -> tuple[dict[Point, Tensor], dict[int, Tensor]]:
        came = _gradients_that_came(self.record)
        ends = {point: y for point, y in self.values.items() if point in came and y.requires_grad}
        targets: dict[Any, Tensor] = {**self.leaves, **self.parameters}
        wanted = {key: x for key, x in targets.items() if x.requires_grad}
        if not ends or not wanted:
            return {}, {}
        with self.again:
            pairs = _sent_back(ends.values(), [came[point] for point in ends], wanted)
        of_parameters = [{id(p): pairs[key]} for key, (p, _) in self.record.parameters.items() if key in pairs]
        return {point: pairs[point] for point in self.leaves if point in pairs}, summed(of_parameters)


def _passed(leaves: Sequence[Any]) -> list[Any]:
    """Return the leaves as values that may be changed in place, as modules do with what they are given."""
    return [x.clone() if is_float(x) and x.requires_grad else x for x in leaves]


class _Play:
    """A unit while computed again: calls within it give what they gave in the step."""

    def __init__(self, record: CallRecord, wide: torch.dtype | None) -> None:
        self.record, self._wide = record, wide
        self.values: dict[Point, Tensor] = {}
        self.leaves: dict[Point, Tensor] = {}
        self._waiting = iter(record.children)
        self._times: Counter[int] = Counter()

    def run(self) -> None:
        """Compute the unit."""
        key = self.record.key
        given = [
            self._leaf(x, (key, "input", i), wants=i in self.record.wants_gradient)
            for i, x in enumerate(self.record.inputs)
        ]
        found, _ = pytree.tree_flatten(self.record.run(_passed(given)))
        self.values |= {(key, "output", i): y for i, y in enumerate(found) if is_float(y)}

    def forward(self, name: str, module: nn.Module, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call within the unit."""
        if module is self.record.module:
            return call(*args, **kwargs)
        child = next(self._waiting, None)
        if child is None or child.module is not module:
            raise StateError(
                f"blame: expected {self.record.key[0]} to call the same modules each time; got {name} the second time. "
                "Its forward depends on rounding: judge it whole by what goes into it."
            )
        given, _ = pytree.tree_flatten((args, kwargs))
        self.values |= {(child.key, "input", i): x for i, x in enumerate(given) if is_float(x)}
        if child.after is not None:
            child.after.restore()
        return self._results(child)

    def backward(self, _: str, module: nn.Module, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call within the unit, which a checkpoint makes again in the backward."""
        children = [child for child in self.record.children if child.module is module]
        if not in_backward() or not children:
            return call(*args, **kwargs)
        self._times[id(module)] += 1
        return self._results(children[min(self._times[id(module)], len(children)) - 1])

    def _results(self, child: CallRecord) -> Any:
        found = [
            self._leaf(x, (child.key, "output", i), wants=i in child.given_gradient)
            for i, x in enumerate(child.outputs)
        ]
        return pytree.tree_unflatten(_passed(found), child.output_spec)

    def _leaf(self, x: Any, point: Point, *, wants: bool) -> Any:
        if not is_float(x) or point in self.leaves:
            return self.leaves.get(point, x)
        held = x.detach().clone() if self._wide is None else widened(x, self._wide)
        if wants:
            self.leaves[point] = held.requires_grad_()
        return held


class Player:
    """Computes units again."""

    def __init__(self, names: Mapping[int, str], wide: torch.dtype) -> None:
        self._names, self._wide = names, wide

    def again(self, record: CallRecord, *, wide: bool = True) -> Unit:
        """Return the unit, computed in the wide dtype, or as the step computes."""
        dtype = self._wide if wide else None
        play = _Play(record, dtype)
        record.before.restore()
        with _lent(record, dtype) as parameters, intercepted(self._names, play.forward), torch.enable_grad():
            play.run()
        return Unit(record, play.values, play.leaves, parameters, intercepted(self._names, play.backward))

    def errors(self, record: CallRecord, unit: Unit) -> LocalErrors:
        """Return the errors of the step's own values and gradients against a unit."""
        gradients, of_parameters = unit.gradients()
        real_parameters = summed({id(p): g} for p, found in record.parameters.values() for g in found)
        return LocalErrors(
            values=_difference(_values_of(record), unit.values),
            gradients=_difference(_gradients_handed_on(record), gradients),
            parameters=_difference(real_parameters, of_parameters),
        )

    def between(self, one: Unit, other: Unit) -> LocalErrors:
        """Return the errors of one unit against another of the same call."""
        (gradients, parameters), (others, of_others) = one.gradients(), other.gradients()
        return LocalErrors(
            values=_difference(one.values, other.values),
            gradients=_difference(gradients, others),
            parameters=_difference(parameters, of_others),
        )


@contextmanager
def _lent(record: CallRecord, wide: torch.dtype | None) -> Generator[dict[tuple[int, str], Tensor]]:
    """Lend leaves and buffers to the unit's own modules; yields the leaves."""
    lent: dict[tuple[int, str], Tensor] = {}
    with ExitStack() as stack:
        if record.module is not None:
            stack.enter_context(borrowed(record.module, {}, [{} for _ in record.module.modules()]))
        for number, owner in enumerate(record.owners):
            parameters, buffers = (cast("dict[str, Any]", vars(owner)[kind]) for kind in ("_parameters", "_buffers"))
            for name in [name for name in parameters if (number, name) in record.parameters]:
                p = record.parameters[number, name][0]
                # As a parameter: emulation rounds what is one as a weight.
                x = p.detach() if wide is None else as_wide(p.detach(), wide)
                parameters[name] = lent[number, name] = nn.Parameter(x, requires_grad=p.requires_grad)
            for name in [name for name in buffers if (number, name) in record.buffers]:
                kept = record.buffers[number, name]
                buffers[name] = kept.clone() if wide is None else widened(kept, wide)
        yield lent


def _values_of(record: CallRecord) -> dict[Point, Tensor]:
    found: dict[Point, Tensor] = {(record.key, "output", i): y for i, y in enumerate(record.outputs) if is_float(y)}
    for child in record.children:
        found |= {(child.key, "input", i): x for i, x in enumerate(child.inputs) if is_float(x)}
    return found


def _gradients_handed_on(record: CallRecord) -> dict[Point, Tensor]:
    found: dict[Point, Tensor] = {(record.key, "input", i): g for i, g in record.input_gradients.items()}
    for child in record.children:
        found |= {(child.key, "output", i): g for i, g in child.output_gradients.items()}
    return found


def _gradients_that_came(record: CallRecord) -> dict[Point, Tensor]:
    found: dict[Point, Tensor] = {(record.key, "output", i): g for i, g in record.output_gradients.items()}
    for child in record.children:
        found |= {(child.key, "input", i): g for i, g in child.input_gradients.items()}
    return found


def _difference(real: Mapping[Any, Tensor], exact: Mapping[Any, Tensor]) -> dict[Any, Tensor]:
    found: dict[Any, Tensor] = {}
    for key, y in real.items():
        x = exact.get(key)
        if x is not None and x.shape == y.shape:
            e = y.detach().to(x.dtype) - x.detach() if x.dtype.itemsize >= y.dtype.itemsize else y.detach() - x.detach()
            found[key] = torch.where(e.isfinite(), e, 0.0)
    return found


def _less(one: Mapping[Any, Tensor], other: Mapping[Any, Tensor]) -> dict[Any, Tensor]:
    return {key: e - other[key] if key in other else e for key, e in one.items()}


def units(calls: Iterable[CallRecord], errors: Callable[[CallRecord], LocalErrors]) -> dict[str, list[LocalErrors]]:
    """Return the local errors of each module's calls, without error-free modules."""
    found: dict[str, list[LocalErrors]] = {}
    for record in calls:
        found.setdefault(record.key[0], []).append(errors(record))
    return {name: listed for name, listed in found.items() if not all(e.is_none for e in listed)}


# -- the reference of a step, with some errors added where they arose --------------------------------------------------

Gradients = dict[int, Tensor]  # by the parameter's identity


class Reference:
    """The reference of one closure, which can be run again and again."""

    def __init__(
        self,
        root: nn.Module,
        names: Mapping[int, str],
        closure: Callable[[], Any],
        wide: torch.dtype,
        random: RandomState,
        buffers: list[dict[str, Tensor]],
    ) -> None:
        self._root, self._names, self._closure, self._wide = root, names, closure, wide
        self._random, self._buffers = random, buffers
        self._devices = {p.device for p in root.parameters()}
        self._leaves = {id(p): leaf(p, wide) for p in root.parameters()}
        self._points: dict[Point, Tensor] = {}
        self.gradients = self._run({}, keep=True)

    def with_values(self, errors: Iterable[LocalErrors]) -> Gradients:
        """Return by how much the gradients change if these errors of values are added."""
        found = self._run(summed(e.values for e in errors), keep=False)
        return {key: g - self.gradients[key] for key, g in found.items() if key in self.gradients}

    def with_gradients(self, errors: list[LocalErrors]) -> Gradients:
        """Return the change of the gradients by these errors, added on the way back."""
        added = summed(e.gradients for e in errors)
        ends = {point: self._points[point] for point in added if point in self._points}
        ends = {point: y for point, y in ends.items() if y.requires_grad}
        found: Gradients = {}
        if ends:
            with self._as_reference(), intercepted(self._names, self._around({}, {})):
                found = self._backward(ends.values(), [added[point] for point in ends], keep=True)
        for key, e in summed(one.parameters for one in errors).items():
            if key in self.gradients:
                found[key] = found[key] + e if key in found else e.to(self._wide)
        return found

    def _run(self, added: Mapping[Point, Tensor], *, keep: bool) -> Gradients:
        points: dict[Point, Tensor] = {}
        after = RandomState(self._devices)
        try:
            with self._as_reference(), intercepted(self._names, self._around(added, points)):
                self._random.restore()
                loss = self._closure()
                if keep:
                    self._points = points
                return self._backward([loss], [torch.ones_like(loss)], keep=keep)
        finally:
            after.restore()

    def _around(self, added: Mapping[Point, Tensor], points: dict[Point, Tensor]) -> Around:
        """Return what adds errors where modules are called, and notes the points."""
        times, again = calls_so_far(), calls_so_far()

        def tap(x: Any, point: Point) -> Any:
            if not is_float(x):
                return x
            x = as_wide(x, self._wide)
            y = x + added[point].to(x.dtype) if point in added else x.view_as(x)
            if not in_backward():
                points[point] = y
            return y

        def around(name: str, module: nn.Module, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            del module
            counts = again if in_backward() else times  # a checkpoint's second forward has the same errors
            key = name, counts[name]
            counts[name] += 1
            leaves, spec = pytree.tree_flatten((args, kwargs))
            args, kwargs = pytree.tree_unflatten([tap(x, (key, "input", i)) for i, x in enumerate(leaves)], spec)
            found, spec = pytree.tree_flatten(call(*args, **kwargs))
            return pytree.tree_unflatten([tap(y, (key, "output", i)) for i, y in enumerate(found)], spec)

        return around

    @contextmanager
    def _as_reference(self) -> Generator[None]:
        with (
            in_reference(self._devices, None, self._wide),
            borrowed(self._root, self._leaves, self._buffers, self._wide),
        ):
            yield

    def _backward(self, ends: Iterable[Tensor], given: Iterable[Tensor], *, keep: bool) -> Gradients:
        wanted = {key: x for key, x in self._leaves.items() if x.requires_grad}
        found = _sent_back(ends, given, wanted, keep=keep)
        return {key: g.detach() for key, g in found.items()}


def _sent_back(
    ends: Iterable[Tensor], given: Iterable[Tensor], wanted: Mapping[Any, Tensor], *, keep: bool = False
) -> dict[Any, Tensor]:
    """Return the gradients of what is wanted, from those that are given to the ends."""
    listed = tuple(ends)
    seeds = tuple(g.to(y.dtype).reshape(y.shape) for g, y in zip(given, listed, strict=True))
    engine = cast("Any", torch.autograd.Variable)._execution_engine  # noqa: SLF001  (see `CapturedCall.send_back`)
    found = engine.run_backward(
        listed, seeds, keep, False, tuple(wanted.values()), allow_unreachable=True, accumulate_grad=False
    )
    return {key: g.to_dense() for key, g in zip(wanted, found, strict=True) if g is not None}


def summed(found: Iterable[Mapping[Any, Tensor]]) -> dict[Any, Tensor]:
    """Return the sums of several sets of tensors, by key."""
    total: dict[Any, Tensor] = {}
    for one in found:
        for key, e in one.items():
            total[key] = total[key] + e if key in total else e
    return total
