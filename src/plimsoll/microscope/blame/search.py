"""Search for what contributes most, within a budget of passes."""

import math
import statistics
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from plimsoll import checks
from plimsoll.errors import ArgumentError, StateError
from plimsoll.kernels.dtypes import FORMATS
from plimsoll.microscope.blame.local_errors import Gradients, LocalErrors, Player, Reference, summed, units
from plimsoll.microscope.blame.recording import CallRecord, Recorder, called_modules, named
from plimsoll.microscope.blame.result import Blame, BlameRow, Direction, without_model
from plimsoll.microscope.draws import Draws, Perturbation, untouched
from plimsoll.spectrum.error_sums import BiasAndNoise
from plimsoll.text import percent
from plimsoll.watch.names import ROOT
from plimsoll.watch.session import watches_muted
from plimsoll.watch.shadow.comparisons import compared
from plimsoll.watch.shadow.replay import RandomState, buffers_of, eagerly, in_reference
from plimsoll.watch.thread_casts import active_casts

# -- one step taken apart: whole error, local errors, and their contributions ------------------------------------------

PASSES = 4.0  # of one step: a forward to see what is called, the step, its units again, and the reference
ARITHMETIC = ""  # of a module: what is left of its errors without those of its casts


class Step:
    """A closure's step, and its reference."""

    def __init__(
        self, root: nn.Module, closure: Callable[[], Any], wide: torch.dtype, split: Collection[str] = ()
    ) -> None:
        """`split`: modules whose casts are judged one by one."""
        self._root, self._split = root, set(split)
        names, devices = named(root, ROOT), {p.device for p in root.parameters()}
        random, buffers = RandomState(devices), buffers_of(root)
        self._player = Player(names, wide)
        with untouched(root), eagerly():
            called = called_modules(names, closure)
            random.restore()
            recorder = Recorder(names, called, devices, self._make_parts if self._split else None)
            for p in root.parameters():
                p.grad = None
            recorder.record(closure).backward()
            real = {id(p): p.grad.detach().to_dense() for p in root.parameters() if p.grad is not None}
        self.calls = recorder.calls
        with untouched(root), in_reference(devices, None, wide):
            self.errors = units(self.calls, self._errors_of)
        self.by_cast: dict[str, dict[str, list[LocalErrors]]] = {}
        for call in self.calls:
            self._split_errors(call)
        with untouched(root), eagerly():
            self.reference = Reference(root, names, closure, wide, random, buffers)
        exact = self.reference.gradients
        self.total: Gradients = {
            key: _finite(g.to(exact[key].dtype) - exact[key]) for key, g in real.items() if key in exact
        }
        self.nonfinite = {key for key, g in real.items() if key in exact and not g.isfinite().all()}

    def contribution(self, errors: list[LocalErrors], direction: str) -> Gradients:
        """Return what local errors make of the gradients, in one direction."""
        with untouched(self._root), eagerly():
            if direction == "forward":
                return self.reference.with_values(errors)
            return self.reference.with_gradients(errors)

    def casts_of(self, module: str) -> dict[str, str]:
        """Return the casts of a module, each with its format."""
        return {cast: fmt for call in self.calls if call.key[0] == module for cast, fmt in sorted(call.acted)}

    def arithmetic(self, module: str) -> str:
        """Return a name for a module's operations, by the 16-bit dtypes of their results."""
        dtypes = {
            FORMATS[y.dtype].name
            for call in self.calls
            if call.key[0] == module
            for y in (*call.outputs, *(x for child in call.children for x in child.inputs))
            if isinstance(y, Tensor) and y.dtype in FORMATS and y.dtype.itemsize < 4
        }
        return f"{'/'.join(sorted(dtypes))} arithmetic" if dtypes else "operations"

    def _errors_of(self, record: CallRecord) -> LocalErrors:
        return self._player.errors(record, self._player.again(record))

    def _make_parts(self, record: CallRecord) -> None:
        """Compute a call again without its casts, and with each cast alone."""
        if record.key[0] not in self._split or not record.acted:
            return
        before = active_casts.kept, active_casts.acted
        # A checkpoint around the call is not to keep what this saves.
        with torch.autograd.graph.saved_tensors_hooks(_same, _same):
            try:
                active_casts.acted = None
                for cast in (ARITHMETIC, *sorted({cast for cast, _ in record.acted})):
                    active_casts.kept = frozenset((cast,))
                    record.parts[cast] = self._player.again(record, wide=False)
            finally:
                active_casts.kept, active_casts.acted = before
                if record.after is not None:
                    record.after.restore()

    def _split_errors(self, record: CallRecord) -> None:
        """Tell the errors of a call's casts apart, from the parts that were computed."""
        if not record.parts:
            return
        name, none = record.key[0], record.parts.pop(ARITHMETIC)
        rest = self.errors.get(name, [LocalErrors()] * (record.key[1] + 1))[record.key[1]]
        listed = self.by_cast.setdefault(name, {})
        for label, part in record.parts.items():
            own = self._player.between(part, none)
            rest = rest.without(own)
            listed.setdefault(label, []).append(own)
        listed.setdefault(ARITHMETIC, []).append(rest)
        record.parts = {}


def _same(x: Tensor) -> Tensor:
    return x


def _finite(e: Tensor) -> Tensor:
    return torch.where(e.isfinite(), e, 0.0)


# -- search ------------------------------------------------------------------------------------------------------------

_BACKWARD = 0.5  # of a pass: what a backward from inside the reference costs at most
_ENOUGH = 0.02  # share of a module below which its casts are not split
_MOST_SPLIT, _MOST_JUDGED = 8, 6  # modules whose casts are judged one by one; contributions whose bias is
_DRAWS = 4  # steps that separate bias from noise
_NOTHING = 1e-4  # of the typical size of a gradient's values: what is zero but for the reference's rounding
_DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")
_FAR = 0.25  # distance of the shares' sum from 1 that is remarked

Closure = Callable[[], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A contribution: modules, a cast of theirs (None: all), and a direction."""

    modules: tuple[str, ...]
    cast: str | None
    direction: Direction

    def errors(self, step: Step) -> list[LocalErrors]:
        if self.cast is None:
            return [e for name in self.modules for e in step.errors.get(name, ())]
        return [e for name in self.modules for e in step.by_cast.get(name, {}).get(self.cast, ())]


class Blamer:
    """The function behind `ErrorReport.blame`."""

    def __init__(
        self, root: "weakref.ref[nn.Module]", closures: Sequence[Closure], wide: torch.dtype, size: float
    ) -> None:
        """`size`: change of weights where closures repeat (see `Perturbation`)."""
        self._root, self._closures, self._wide, self._size = root, closures, wide, size

    def __call__(self, *, budget: int = 200, of: str = "gradients") -> Blame:
        """Return the contributions."""
        root = self._root()
        if root is None:
            without_model()
        checks.integer("blame", "budget", budget, low=8, remedy="A module needs two passes, and the step four.")
        with watches_muted():
            return _Search(root, self._closures, self._wide, float(budget), of, self._size).blame()


class _Search:
    def __init__(
        self, root: nn.Module, closures: Sequence[Closure], wide: torch.dtype, budget: float, of: str, size: float
    ) -> None:
        self._root, self._closures, self._wide, self._budget, self._size = root, closures, wide, budget, size
        self._of, self._wanted = of, _wanted(root, of)
        self._spent = 0.0
        self._remarks: list[str] = []
        self._whole_groups: list[str] = []  # that the budget did not allow to take apart
        self._step = self._made(0)
        self._scale = self._scales(self._step)
        self._whole = self._dot(self._step.total, self._step.total)

    def blame(self) -> Blame:
        """Return the contributions, as many as the budget allows."""
        gradients = self._step.reference.gradients
        nonfinite = self._step.nonfinite & self._wanted
        exact = all(bool(g.isfinite().all()) for key, g in gradients.items() if key in self._wanted)
        if not exact or (nonfinite and not self._whole > 0):
            raise StateError(
                "blame: expected gradients of finite values; got NaN or infinite ones. Find their origin with "
                "plimsoll.locate."
            )
        if nonfinite:
            named = self._named(nonfinite)
            self._remarks.append(f"Left out, since the step makes them NaN or infinite: gradient values of {named}.")
        rows: list[tuple[_Part, BlameRow]] = []
        if self._whole > 0:
            rows = self._modules()
            rows = self._casts(rows)
            rows = self._biases(rows)
            rows.sort(key=lambda found: -abs(found[1].share))
            if self._whole_groups:
                named = ", ".join(sorted(self._whole_groups))
                self._remarks.append(f"The budget did not allow to tell apart the modules of {named}.")
            apart = sum(row.share for _, row in rows) - 1
            if abs(apart) > _FAR:
                self._remarks.append(
                    f"The shares add up to {percent(1 + apart)}: errors are so large that they change each other, or "
                    "arise where no module is called."
                )
        count = max(len(self._scale), 1)
        return Blame(
            rows=tuple(row for _, row in rows),
            of=self._of,
            relative_error=math.sqrt(max(self._whole, 0.0) / count),
            passes=self._spent,
            remarks=tuple(self._remarks),
        )

    # -- modules

    def _modules(self) -> list[tuple[_Part, BlameRow]]:
        names = list(self._step.errors)
        if len(names) * (1 + _BACKWARD) <= self._left(0.6):
            return [found for name in names for found in self._by_direction(name)]
        return self._groups(names)

    def _by_direction(self, name: str, cast_name: str | None = None) -> list[tuple[_Part, BlameRow]]:
        """The contributions of one module, or of one cast of it."""
        found: list[tuple[_Part, BlameRow]] = []
        for direction in _DIRECTIONS:
            part = _Part(modules=(name,), cast=cast_name, direction=direction)
            arisen = [e.forward if direction == "forward" else e.backward for e in part.errors(self._step)]
            if any(bool(e.any()) for listed in arisen for e in listed):
                found.append((part, self._row(part, self._share(part))))
        return found

    def _groups(self, names: Sequence[str]) -> list[tuple[_Part, BlameRow]]:
        """Return groups' contributions, the largest split as far as the budget allows."""
        open_groups: list[tuple[float, str, list[str]]] = [(1.0, "", list(names))]
        done: list[tuple[_Part, BlameRow]] = []
        while open_groups:
            open_groups.sort(key=lambda group: abs(group[0]))
            share, prefix, members = open_groups.pop()
            whole = _Part(modules=tuple(members), cast=None, direction="both")
            row = self._row(whole, share)
            if len(members) == 1:
                enough = self._left(0.8) >= 1 + _BACKWARD
                done += self._by_direction(members[0]) if enough else [(whole, row)]
                continue
            children = _children(prefix, members)
            if self._left(0.8) < (1 + _BACKWARD) * len(children):
                done.append((whole, replace(row, module=f"{prefix}.*") if prefix else row))
                self._whole_groups.append(prefix or "the model")
                continue
            for name, inside in children.items():
                part = _Part(modules=tuple(inside), cast=None, direction="both")
                open_groups.append((self._share(part), name, inside))
        return done

    # -- casts

    def _casts(self, rows: list[tuple[_Part, BlameRow]]) -> list[tuple[_Part, BlameRow]]:
        """The rows with those of modules that cast taken apart by cast."""
        shares: dict[str, float] = {}
        for part, row in rows:
            if len(part.modules) == 1 and self._step.casts_of(part.modules[0]):
                shares[part.modules[0]] = shares.get(part.modules[0], 0.0) + abs(row.share)
        by_share = sorted(shares, key=lambda name: -shares[name])
        chosen = [name for name in by_share if shares[name] >= _ENOUGH][:_MOST_SPLIT]
        costs = {name: (len(self._step.casts_of(name)) + 1) * (1 + _BACKWARD) for name in chosen}
        while chosen and PASSES + sum(costs[name] for name in chosen) > self._left(1.0):
            chosen.pop()
        if not chosen:
            return rows
        self._step = self._made(0, chosen)
        kept = [(part, row) for part, row in rows if part.modules[0] not in chosen or len(part.modules) > 1]
        for name in chosen:
            for cast_name in self._step.by_cast.get(name, {}):
                found = self._by_direction(name, cast_name)
                kept += [(part, row) for part, row in found if cast_name != ARITHMETIC or abs(row.share) > 1e-3]
        return kept

    # -- bias

    def _biases(self, rows: list[tuple[_Part, BlameRow]]) -> list[tuple[_Part, BlameRow]]:
        """The rows with the bias and noise of the largest."""
        order = sorted(range(len(rows)), key=lambda place: -abs(rows[place][1].share))
        split = sorted({part.modules[0] for part, _ in rows if part.cast is not None})

        def cost(count: int) -> float:
            return _DRAWS * (PASSES + sum(self._price(rows[place][0]) for place in order[:count]))

        count = min(_MOST_JUDGED, len(order))
        while count and cost(count) > self._left(1.0):
            count -= 1
        if not count:
            if rows:
                self._remarks.append("The budget did not allow to tell bias from noise.")
            return rows
        chosen = [rows[place][0] for place in order[:count]]
        errors = self._drawn(chosen, split)
        result = list(rows)
        for place, found in zip(order[:count], errors, strict=True):
            part, row = rows[place]
            result[place] = part, replace(row, bias=found.bias, noise=found.noise)
        return result

    def _drawn(self, parts: Sequence[_Part], split: Sequence[str]) -> list[BiasAndNoise]:
        draws = Draws()
        repeats = len(self._closures) < _DRAWS
        perturbation = Perturbation(self._root, self._size) if repeats else None
        try:
            for number in range(_DRAWS):
                if perturbation is not None and number >= len(self._closures):
                    perturbation.draw()
                step = self._made(number % len(self._closures), split)
                draws.begin()
                for place, part in enumerate(parts):
                    self._take(draws, step, f"{place}", self._contribution(step, part))
        finally:
            if perturbation is not None:
                perturbation.undo()
        found = draws.results()
        return [found["blame", f"{place}"][1] for place in range(len(parts))]

    def _take(self, draws: Draws, step: Step, name: str, found: Gradients) -> None:
        """Give a contribution to the draws, by parameter, over its gradient's norm."""
        scales = self._scales(step)
        exact = {key: g.double() for key, g in step.reference.gradients.items()}
        changed = {key: exact[key] + found[key] if key in found else exact[key] for key in scales}
        reference, values = (
            torch.cat([held[key].flatten() * scale**0.5 for key, scale in scales.items()]) for held in (exact, changed)
        )
        draws.take("blame", [name], values, reference, compared(values, reference))

    # -- what all have in common

    def _made(self, closure: int, split: Sequence[str] = ()) -> Step:
        self._spent += PASSES
        return Step(self._root, self._closures[closure], self._wide, split)

    def _left(self, share: float) -> float:
        """Passes that are left of a share of the budget."""
        return share * self._budget - self._spent

    def _price(self, part: _Part) -> float:
        return {"forward": 1.0, "backward": _BACKWARD, "both": 1 + _BACKWARD}[part.direction]

    def _contribution(self, step: Step, part: _Part) -> Gradients:
        self._spent += self._price(part)
        directions = _DIRECTIONS if part.direction == "both" else (part.direction,)
        return summed(step.contribution(part.errors(step), direction) for direction in directions)

    def _share(self, part: _Part) -> float:
        return self._dot(self._contribution(self._step, part), self._step.total) / self._whole

    def _dot(self, one: Gradients, other: Gradients) -> float:
        """The inner product, each parameter's relative to its gradient's squared norm."""
        parts = [
            s * float((one[key].double() * other[key].double()).sum())
            for key, s in self._scale.items()
            if key in one and key in other
        ]
        return math.fsum(parts) if all(map(math.isfinite, parts)) else math.nan

    def _scales(self, step: Step) -> dict[int, float]:
        """Return inverse squared norms of gradients above the reference's rounding.

        The gradient of a bias before a batch norm, and of the keys' bias in attention, is zero.
        """
        gradients = {key: g for key, g in step.reference.gradients.items() if key in step.total}
        squares = {key: float(g.double().square().sum()) for key, g in gradients.items()}
        sizes = {
            key: square / max(gradients[key].numel(), 1) for key, square in squares.items() if 0 < square < math.inf
        }
        least = _NOTHING**2 * statistics.median(sizes.values()) if sizes else 0.0
        left_out = [key for key, size in sizes.items() if size < least and key in self._wanted]
        if left_out and step is self._step:
            named = self._named(left_out)
            self._remarks.append(f"Left out, since their gradients are zero but for rounding: {named}.")
        return {key: 1 / squares[key] for key, size in sizes.items() if size >= least and key in self._wanted}

    def _named(self, parameters: Collection[int]) -> str:
        return ", ".join(name for name, p in self._root.named_parameters() if id(p) in parameters)

    def _row(self, part: _Part, share: float) -> BlameRow:
        return BlameRow(
            module=part.modules[0] if len(part.modules) == 1 else "*",
            cast=self._words(part),
            direction=part.direction,
            share=share,
        )

    def _words(self, part: _Part) -> str:
        if len(part.modules) != 1:
            return "casts and operations"
        (name,) = part.modules
        casts = self._step.casts_of(name)
        if part.cast:
            of = "accumulator" if part.cast == "sums" else f"of {part.cast}"
            return f"{casts.get(part.cast, '')} {of}".strip()
        if part.cast is None and casts:
            return f"casts to {'/'.join(sorted(set(casts.values())))}"
        return self._step.arithmetic(name)


def _children(prefix: str, members: Iterable[str]) -> dict[str, list[str]]:
    """Return the members by the next part of their names."""
    found: dict[str, list[str]] = {}
    for name in members:
        if name == prefix:
            found.setdefault(name, []).append(name)
            continue
        rest = name.removeprefix(f"{prefix}.") if prefix else name
        head = rest.partition(".")[0]
        key = f"{prefix}.{head}" if prefix else head
        found.setdefault(key, []).append(name)
    if len(found) == 1:
        (key,) = found
        return _children(key, members)
    return found


def _wanted(root: nn.Module, of: object) -> set[int]:
    named = cast("list[tuple[str, Tensor]]", list(root.named_parameters()))
    if of == "gradients":
        return {id(p) for _, p in named}
    found = {id(p) for name, p in named if name == of}
    if not found:
        some = ", ".join(name for name, _ in named[:5])
        raise ArgumentError(
            f'blame: expected of to be "gradients" or the name of a parameter; got of={of!r}. There are {some}.'
        )
    return found
