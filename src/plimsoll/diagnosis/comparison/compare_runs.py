"""`diff`: first step and tensor where two runs diverge, and the search behind it."""

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from numbers import Real
from typing import cast

import numpy as np
from numpy.typing import NDArray

from plimsoll import checks
from plimsoll.diagnosis.comparison.divergence import Divergence, Kind, Parting
from plimsoll.diagnosis.comparison.paired_matrices import Pair, few, searching, sentences
from plimsoll.diagnosis.tables.cells import Floats, Ints
from plimsoll.diagnosis.view import View
from plimsoll.errors import ArgumentError
from plimsoll.formats import BlockFormat, get, get_element
from plimsoll.runs import Run
from plimsoll.runs.storage.location import is_one_of_several
from plimsoll.tensor_collections import BACKWARD, FORWARD, IN_STEP_ORDER, OF_MODULES, UPDATE
from plimsoll.text import number, percent, power

# -- the search: bounds of rounding error first, then of chance --------------------------------------------------------

# Two trainings that differ only in rounding drift apart too, slowly at first and then by chance. So a difference counts
# only if it is larger than both of these.
#
# 1. Rounding of equal inputs: three units in the last place of the narrowest format in either run, times the square
#    root of the place in the order of computation. Errors of consecutive operations add up at random.
# 2. Inheritance: `_AMPLIFIED` times the largest explained difference of anything computed before it, at this step or an
#    earlier one, times the number of steps between samples. Weights can move no further apart than their updates.
#
# The order within a step is weights, activations as they were computed, loss, their gradients as they were computed,
# parameter gradients, the scaler's verdict, updates, optimizer state. NaN, infinities, skipped steps, and zeros that
# come from the range of a narrow format always count.
#
# Steps that are skipped in a first search for a loss scale are no divergence, and their backward passes are not
# compared. From the first step that only one run skipped to the last one, only the first forward pass is compared. At
# the next sample one run is some steps behind. Its weights may be as far apart as their updates moved them, and the
# comparison continues from the distance of the forward pass there.

_ROOT = "model"  # what the root module is called where the manifest does not say
_AMPLIFIED = 8.0  # how much further apart than what it was computed from a tensor may be
_FAR = 0.1  # runs that are so far apart, explained or not, are two different trainings
_CHANCE = (
    0.05  # the share of a gradient's values that are noise, from which on its parameter goes where chance takes it
)
_ANYWHERE = 1e300  # how far a weight may have been moved where its updates were not recorded
_UNITS = 3.0  # of rounding, for one operation


class Search:
    """The walk over the steps, in the order of computation, until something parts."""

    def __init__(
        self,
        views: tuple[View, View],
        pairs: dict[str, Pair],
        losses: tuple[Ints, Floats, Floats],
        owners: int,
        rounding: float,
        tolerance: float,
    ) -> None:
        self.views, self.pairs, self.losses = views, pairs, losses
        self.rounding, self.tolerance = rounding, tolerance
        self.inherited = 0.0  # the largest explained difference so far
        self.noise = np.zeros(owners)  # how far each parameter or module was apart, by its own size
        self.chance = np.zeros(owners)  # the share of each parameter's gradients that was rounding noise
        # How far each parameter was moved so far; where that is not recorded, it may be anywhere.
        self.moved = np.zeros(owners) if "updates" in pairs else np.full(owners, _ANYWHERE)
        self.update = self.moved.copy()  # and at the last sample
        self.wandering = 0.0  # of this step's weights, those that go where chance takes them: how far they are apart
        self.given = _given(views, pairs["activations"].names) if "activations" in pairs else np.empty(0)
        self.drift: list[tuple[int, float]] = []
        self.until_step: int | None = None
        self.skips = [{e.step for e in view.events if e.kind == "skip"} for view in views]
        self.loss_size = float(np.abs(losses[1][:1]).max(initial=0.0))
        steps = [pair.steps for pair in pairs.values()] + [losses[0]]
        self.steps: list[int] = np.unique(np.concatenate(steps)).tolist()
        first = min(self.steps, default=0)
        self.searches = (searching(views[0], first), searching(views[1], first))
        self.searched = sorted(
            self.searches[0] ^ self.searches[1]
        )  # the steps that the search of one run alone skipped
        self.catching_up = False  # the first sample after them
        self.places = {name: {s: i for i, s in enumerate(p.steps.tolist())} for name, p in pairs.items()}
        self.loss_places = {s: i for i, s in enumerate(losses[0].tolist())}

    def first(self) -> list[Parting]:
        """Return all that diverges at the first step where anything does, in order."""
        sampled = None
        skips = sorted((self.skips[0] ^ self.skips[1]).difference(self.searched))
        behind = bool(self.searched)
        for step in self.steps:
            missed = [s for s in skips if s < step and (not self.drift or s > self.drift[-1][0])]
            if missed:
                return [self._skipped(missed[0])]
            since = max(1, step - sampled) if sampled is not None else 1
            is_sample = any(step in places for places in self.places.values())
            self.catching_up = behind and step > self.searched[-1] and (is_sample or not self.places)
            if behind and step > self.searched[0] and not self.catching_up:
                self._note_updates(step)
                continue
            partings = list(self._at(step, since))
            if partings:
                return partings
            behind = behind and not self.catching_up
            sampled = step if is_sample else sampled
            self.drift.append((step, self.inherited))
            if self.inherited <= _FAR:
                self.until_step = step
        return []

    def _note_updates(self, step: int) -> None:
        """Note how far the step moved each parameter, in the run that took it."""
        at = self.places.get("updates", {}).get(step)
        if at is not None:
            pair = self.pairs["updates"]
            moved = np.nan_to_num(np.fmax(pair.a.rms[:, at], pair.b.rms[:, at]))
            np.maximum.at(self.update, pair.owners, moved)

    def _at(self, step: int, since: int) -> Iterator[Parting]:
        place = 0  # in the order of computation
        if self.catching_up:
            self._note_updates(step)
        for name in FORWARD:
            yield from self._collection(name, step, place, since)
            place += self._length(name)
        yield from self._loss(step, place)
        if any(step in search for search in self.searches):  # its gradients overflowed, as was meant
            self._note_updates(step)
            return
        for name in BACKWARD:
            yield from self._collection(name, step, place, since)
            place += self._length(name) if name != "gradients" else 0
        if (step in self.skips[0]) != (step in self.skips[1]):
            yield self._skipped(step)
        for name in UPDATE:
            yield from self._collection(name, step, place, since)

    def _length(self, name: str) -> int:
        return len(self.pairs[name].names) if name in self.pairs and name != "weights" else 0

    def _collection(self, name: str, step: int, before: int, since: int) -> Iterator[Parting]:
        at = self.places.get(name, {}).get(step)
        if at is None:
            return
        pair = self.pairs[name]
        apart, raw = pair.apart[:, at], pair.raw[:, at]
        explained = np.nan_to_num(apart)
        in_order = name in OF_MODULES
        depth = before + np.arange(len(apart)) * in_order
        if name == "gradients":
            np.maximum.at(self.chance, pair.owners, np.nan_to_num(pair.chance[:, at]))
        by_chance, by_luck = self.chance[pair.owners] > _CHANCE, self._by_luck(pair, at)
        passed_on = np.where(by_chance, 0.0, explained)  # what others inherit
        if name == "weights":
            self.wandering = float(np.where(by_chance & (raw <= by_luck), explained, 0.0).max(initial=0.0))
        upstream = np.concatenate([[0.0], np.maximum.accumulate(passed_on)[:-1]]) * in_order
        behind = np.inf if self.catching_up else 0.0
        inherited = np.maximum(_AMPLIFIED * np.maximum(self.inherited * since, upstream), behind)
        plain = np.maximum(_UNITS * self.rounding * np.sqrt(1.0 + depth) * few(pair.a.count[:, at]), inherited)
        if name == "weights":
            plain = np.minimum(plain, self._reachable(pair, at, since))
        allowed = np.maximum(plain, _AMPLIFIED * self.wandering)
        excused = np.maximum(_AMPLIFIED * self.noise[pair.owners], by_luck)
        if name == "activations":  # what the model is given comes from nothing before it
            plain = allowed = np.where(np.isnan(self.given), allowed, self.given)
            excused = np.where(np.isnan(self.given), excused, 0.0)
        parts = (explained > allowed) & (np.nan_to_num(raw) > excused) & (self.inherited <= _FAR)
        for layer in np.flatnonzero(parts | self._suspect(pair, at)).tolist():
            parting = self._parting(pair, layer, at, float(allowed[layer]), bool(parts[layer]))
            if parting is not None:
                yield parting
        if not self.catching_up or name in FORWARD:
            self.inherited = max(self.inherited, float(passed_on[explained <= plain].max(initial=0.0)))
        np.maximum.at(self.noise, pair.owners, np.nan_to_num(raw))
        if name == "updates":
            self.update[pair.owners] = np.nan_to_num(np.fmax(pair.a.rms[:, at], pair.b.rms[:, at]))
            self.moved[pair.owners] += since * self.update[pair.owners]

    def _reachable(self, pair: Pair, at: int, since: int) -> Floats:
        """Return how far updates can have moved weights apart since the last sample, over their group's size."""
        size = np.fmax(pair.a.rms[:, at], pair.b.rms[:, at])
        with np.errstate(all="ignore"):
            group = np.where(pair.raw[:, at] > 0, size * pair.raw[:, at] / pair.apart[:, at], size)
            before = self.noise[pair.owners] * size
            distances = 2 * (before + 2 * since * self.update[pair.owners]) / group
        return np.where(np.isfinite(distances), distances, np.inf) + _UNITS * self.rounding * few(pair.a.count[:, at])

    def _by_luck(self, pair: Pair, at: int) -> Floats:
        """Return how far noise, and single values that change their sign, may take each layer, over its own size."""
        share = self.chance[pair.owners]
        if pair.collection in UPDATE:
            return 2 * np.maximum(share, 1 / np.maximum(pair.a.count[:, at], 1.0))
        if pair.collection == "weights":  # they go no further than they were moved
            size, moved = np.fmax(pair.a.rms[:, at], pair.b.rms[:, at]), self.moved[pair.owners]
            return np.where(share > 0, 2 * share * moved / np.where(size > 0, size, 1.0), 0.0)
        return 2 * share

    def _suspect(self, pair: Pair, at: int) -> NDArray[np.bool_]:
        """Return the layers whose non-finite values, sizes or zeros may diverge."""
        a, b = pair.a, pair.b
        bad = (a.nonfinite[:, at] > 0) != (b.nonfinite[:, at] > 0)
        zeros = np.abs(a.zeros[:, at] - b.zeros[:, at]) > self.tolerance
        there = ~np.isnan(a.count[:, at]) & ~np.isnan(b.count[:, at])
        return there & (bad | zeros | (a.count[:, at] != b.count[:, at]))

    def _parting(self, pair: Pair, layer: int, at: int, allowed: float, parts: bool) -> Parting | None:
        """Return the most severe divergence of one cell, if there is any."""
        a, b = pair.a, pair.b
        step, name = int(pair.steps[at]), pair.names[layer]

        def made(kind: Kind, of_a: float, of_b: float, distance: float, bound: float, reason: str) -> Parting:
            return Parting(
                kind=kind, step=step, collection=pair.collection, name=name, a=float(of_a), b=float(of_b),
                distance=float(distance), allowed=bound, reason=reason,
            )  # fmt: skip

        bad_a, bad_b = a.nonfinite[layer, at], b.nonfinite[layer, at]
        if (bad_a > 0) != (bad_b > 0):
            which, many = ("B", bad_b) if bad_b > 0 else ("A", bad_a)
            reason = f"{many:,.0f} values are NaN or infinite in {which} only"
            return made("nonfinite", bad_a, bad_b, abs(bad_a - bad_b), 0.0, reason)
        if a.count[layer, at] != b.count[layer, at]:
            of_a, of_b = a.count[layer, at], b.count[layer, at]
            return made("size", of_a, of_b, abs(of_a - of_b), 0.0, f"it has {of_a:,.0f} values in A, {of_b:,.0f} in B")
        zeros_a, zeros_b = a.zeros[layer, at], b.zeros[layer, at]
        if abs(zeros_a - zeros_b) > max(self.tolerance, min(allowed, 1.0)):
            kind, reason = self._why_zero(pair.collection, name, step, zeros_a, zeros_b)
            chance = self.chance[pair.owners[layer]] > _CHANCE
            if kind == "underflow" or (self.inherited <= _FAR and not chance and not self.catching_up):
                return made(kind, zeros_a, zeros_b, abs(zeros_a - zeros_b), self.tolerance, reason)
        if parts:
            of_a, of_b, apart = a.rms[layer, at], b.rms[layer, at], pair.apart[layer, at]
            reason = (
                f"root mean square {number(of_a, 4)} in A, {number(of_b, 4)} in B; {number(apart)} apart, of which "
                f"rounding explains {number(allowed)}{self._other_model(pair.collection, name)}"
            )
            return made("values", of_a, of_b, apart, allowed, reason)
        return None

    # A discriminator's images are a generator's output, and differ by the generator's rounding.
    def _other_model(self, collection: str, name: str) -> str:
        """Return advice for the input of one of a script's models."""
        root = f"{self.views[0].run.manifest.get('root', _ROOT)}:input"
        if collection != "activations" or not name.startswith(root):
            return ""
        if not any(is_one_of_several(view.run.path) for view in self.views):
            return ""
        return "; it is the model's input, which another model of the script may have computed: compare that run first"

    def _why_zero(self, collection: str, name: str, step: int, a: float, b: float) -> tuple[Kind, str]:
        """Return whether a format's range explains the zeros of one run, by the values of the other."""
        more, which, fewer = (1, "B", 0) if b > a else (0, "A", 1)
        shares = f"{percent(max(a, b))} of its values are zero in {which}, {percent(min(a, b))} in {'AB'[fewer]}"
        narrow = self.views[more].narrow(collection)
        assert narrow is not None
        cells = narrow.cells
        layer, at = cells.names.index(name), int(np.searchsorted(cells.steps, step))
        rows = np.flatnonzero((cells.layer == layer) & (cells.at == at))
        fmt, scale = get_element(cells.formats[int(cells.format[rows[0]])], "diff"), float(narrow.held[rows[0]])
        shift = round(np.log2(scale))
        fit = self.views[fewer].run.spectrum(collection, name, step).fit(fmt, shift=shift)
        if fit.lost.high * (1 - min(a, b)) < abs(a - b) / 2:
            return "zeros", shares
        return "underflow", f"{shares}: {fmt.name.upper()} at scale 2^{shift} cannot hold them"

    def _loss(self, step: int, depth: int) -> Iterator[Parting]:
        place = self.loss_places.get(step)
        if place is None:
            return
        a, b = float(self.losses[1][place]), float(self.losses[2][place])
        made = partial(Parting, step=step, collection="loss", name="", a=a, b=b)
        if np.isfinite(a) != np.isfinite(b):
            which, value = ("B", b) if np.isfinite(a) else ("A", a)
            yield made(kind="nonfinite", distance=np.inf, allowed=0.0, reason=f"it is {value} in {which} only")
        if not np.isfinite(a) or not np.isfinite(b):
            return
        apart = 0.0 if a == b else abs(a - b) / max(abs(a), abs(b), _FAR * self.loss_size)
        allowed = max(_UNITS * self.rounding * np.sqrt(1.0 + depth), _AMPLIFIED * self.inherited)
        allowed = np.inf if self.catching_up else allowed
        if apart > allowed and self.inherited <= _FAR:
            reason = (
                f"{number(a, 6)} in A, {number(b, 6)} in B; {number(apart)} apart, of which rounding explains "
                f"{number(float(allowed))}"
            )
            yield made(kind="values", distance=apart, allowed=float(allowed), reason=reason)
        else:
            self.inherited = max(self.inherited, apart)

    def _skipped(self, step: int) -> Parting:
        a, b = (float(step in skips) for skips in self.skips)
        scale = float(self.views[int(b)].scale_at(np.array([step]))[0])
        which = "B" if b else "A"
        return Parting(
            kind="skipped", step=step, collection="steps", name="", a=a, b=b, distance=1.0, allowed=0.0,
            reason=f"{which} skipped the step, its gradients having overflowed at scale {power(scale)}; it is a step "
            "behind",
        )  # fmt: skip


def _given(views: tuple[View, View], names: Sequence[str]) -> Floats:
    """Return the rounding error allowed for the model's inputs. NaN: computed tensors."""
    if any(is_one_of_several(view.run.path) for view in views):  # another model of the script may have computed them
        return np.full(len(names), np.nan)
    formats = [view.formats("activations") for view in views]
    root = f"{views[0].run.manifest.get('root', _ROOT)}:input"
    bounds = [_UNITS * max(held[name].epsilon / 2 for held in formats) for name in names if name.startswith(root)]
    result = np.full(len(names), np.nan)
    result[[i for i, name in enumerate(names) if name.startswith(root)]] = bounds
    return result


# -- `diff` ------------------------------------------------------------------------------------------------------------


def diff(
    run_a: "Run | View | str | os.PathLike[str]",
    run_b: "Run | View | str | os.PathLike[str]",
    *,
    tolerance: float = 0.05,
    formats: Sequence[object] = (),
    until: int | None = None,
) -> Divergence:
    """Return the first step and tensor where two runs differ by more than rounding.

    For example a run in FP32 and one in FP16, before and after an upgrade, in one process and in many. Steps are
    aligned by number and series by name, so give both runs the same data in the same order.

    Args:
        run_a: The run to go by, or its folder.
        run_b: The run to compare with it.
        tolerance: Share of a tensor's values that may be zero in one run only (T6). Default: 0.05.
        formats: Further formats that were computed in and that no tensor shows: emulated ones, TF32. Default: none.
        until: The last step to compare. Default: all.

    Returns:
        The divergence. Its `first` is None if the runs do not diverge.

    Raises:
        ArgumentError: The runs have no series or no step in common.
        RunError: A folder has no run.
    """
    if not isinstance(tolerance, Real) or not 0 <= tolerance <= 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ArgumentError(f"diff: expected tolerance from 0 to 1; got {tolerance!r}. It is a share of values.")
    views = (_view(run_a, until), _view(run_b, until))
    owners: dict[str, int] = {}
    rounding = _rounding(views, formats)
    all_pairs = (Pair.of(name, views, owners, rounding) for name in (c.name for c in IN_STEP_ORDER))
    pairs = {pair.collection: pair for pair in all_pairs if pair is not None}
    losses = _losses(views)
    if not pairs and not len(losses[0]):
        raise ArgumentError(
            f"diff: expected runs with series and steps in common; got {views[0].run.path} and {views[1].run.path}, "
            "which have none. Watch both with the same collections and the same every=."
        )
    search = Search(views, pairs, losses, len(owners), rounding, tolerance)
    partings = search.first()
    series = sum(len(pair.names) for pair in pairs.values()) + bool(len(losses[0]))
    return Divergence(
        a=str(views[0].run.path),
        b=str(views[1].run.path),
        first=partings[0] if partings else None,
        partings=tuple(partings),
        compared=(len(search.steps), series),
        until_step=search.until_step,
        drift=tuple(search.drift),
        only_a=_only(views[0], views[1]),
        only_b=_only(views[1], views[0]),
        changed=tuple(_changed(views)),
        notes=tuple(sentences(search.searches)),
    )


def _view(run: "Run | View | str | os.PathLike[str]", until: int | None) -> View:
    if isinstance(run, View):
        return run if until is None else View(run.run, until)
    return View(run if isinstance(run, Run) else Run(run), until)


def _losses(views: tuple[View, View]) -> tuple[Ints, Floats, Floats]:
    """Return the steps at which both runs have a loss, and both losses."""
    (steps_a, a), (steps_b, b) = (view.scalar("loss") for view in views)
    steps, at_a, at_b = np.intersect1d(steps_a, steps_b, return_indices=True)
    return steps, a[at_a], b[at_b]


def _rounding(views: tuple[View, View], named: Sequence[object]) -> float:
    """Half a unit in the last place of the narrowest format in either run, or named."""
    formats = [get(fmt) for fmt in checks.items("diff", "formats", named, remedy="Write formats=['tf32'].")]
    elements = [fmt.element if isinstance(fmt, BlockFormat) else fmt for fmt in formats]
    for view in views:
        for collection in view.run.tensors:
            cells = view.cells(collection)
            elements += [] if cells is None else [get_element(name, "diff") for name in cells.formats]
    return max((fmt.epsilon / 2 for fmt in elements), default=2.0**-24)


def _only(view: View, other: View) -> tuple[str, ...]:
    theirs = {(c, n) for c, names in other.run.tensors.items() for n in names}
    return tuple(f"{c} {n}" for c, names in view.run.tensors.items() for n in names if (c, n) not in theirs)


def _changed(views: tuple[View, View]) -> Iterator[tuple[str, str, str]]:
    """Yield the settings and versions in which the runs differ, nested ones with dots."""
    for title in ("versions", "settings"):
        a, b = (
            dict(_flat(cast("Mapping[str, object]", view.run.manifest.get(title) or {}), f"{title}.")) for view in views
        )
        for name in sorted({*a, *b}):
            if a.get(name) != b.get(name):
                yield name, _setting(a.get(name)), _setting(b.get(name))


def _flat(settings: Mapping[str, object], prefix: str) -> Iterator[tuple[str, object]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(cast("Mapping[str, object]", value), f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _setting(value: object) -> str:
    return "none" if value is None else str(value)
