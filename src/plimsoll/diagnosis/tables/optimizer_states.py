"""States and updates of optimizers as rules read them, and the weight decay that is added to gradients."""

from dataclasses import dataclass
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from plimsoll.diagnosis.tables.cells import Cells, Floats, Ints
from plimsoll.diagnosis.tables.wiring_facts import facts, groups_of, optimizer_settings, with_rate_of_zero
from plimsoll.diagnosis.view import View
from plimsoll.formats import get_element

_HALF = np.log10(2)  # in decades
_ROUNDING = 1e-3  # of a second moment: less may be what rounding leaves
SECOND_MOMENTS = {"exp_avg_sq": "exp_avg", "square_avg": "momentum_buffer", "v": "m"}  # second moment: first moment
_BETA2 = 0.999  # Adam's default
# States that are named as those that hold what a narrow weight cannot, unless the weights show otherwise.
_EXACT = ("master", "master_param", "compensation", "kahan_comp")
_FAR_LESS = 1e-7  # of the square of a gradient; usual betas leave 1e-2 to 1e-4 of it
_SUMS = ("sum", "abssum", "sumsq"), ("abssum", "abssum", "sumsq")  # of weights, and what they are compared with
TOWARD_ZERO = "toward zero"  # an update that the watch has found from changes of the weights
# Updates that lose nothing, or nothing on average; those toward zero have a finding of their own.
_LOSSLESS = ("masters", "stochastic", "kahan", "lossless on average", "lossless over steps", TOWARD_ZERO)
# Weights that the watch has followed went elsewhere than exact updates lead, as if rounded at random, or fall short.
_INEXACT, _BIASED = "inexact", "biased"


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedDecay:
    """Weights whose decay is added to their gradients, at the steps at which both were recorded."""

    optimizer: str
    names: tuple[str, ...]
    decays: Floats  # the decay of each
    steps: Ints  # the steps, ascending
    ratio: Floats  # by weight and step, the size of what is added over that of the gradient; NaN where one is not known
    size: Floats  # by weight and step, the size of the weight over that at the first step


def added_decay(view: View) -> AddedDecay | None:
    """Return the weights of which the first such optimizer adds much decay to the gradients. None without any."""
    weights, gradients = view.cells("weights"), view.cells("gradients")
    events = facts(view, "decay added")
    if weights is None or gradients is None or not events:
        return None
    decays = {
        str(name): float(group.get("decay") or 0.0)
        for group in groups_of(events[0])
        for name in group.get("parameters", ())
    }
    names = tuple(name for name in weights.names if name in decays and name in gradients.names)
    steps, mine, theirs = np.intersect1d(weights.steps, gradients.steps, return_indices=True)
    if not names or not len(steps):
        return None
    decay = np.array([decays[name] for name in names])
    sizes = weights.norm[[weights.names.index(name) for name in names]]
    given = gradients.norm[[gradients.names.index(name) for name in names]]
    with np.errstate(all="ignore"):
        ratio = decay[:, None] * sizes[:, mine] / given[:, theirs]
        size = sizes[:, mine] / sizes[:, :1]
    optimizer = str(events[0].details.get("optimizer", ""))
    return AddedDecay(optimizer=optimizer, names=names, decays=decay, steps=steps, ratio=ratio, size=size)


class PutBack(NamedTuple):
    """All weights are at once what they were at the first sample again."""

    as_at: int  # the first sample's step
    before: int  # the last sample at which they were others
    step: int  # and the first at which they are not
    moved: float  # how far they had moved, by their size

    def has(self, step: int) -> bool:
        """Return True if it may have happened at this step."""
        return self.before < step <= self.step


# Sums of weights that were drawn again are others, by as much as they have moved: not those of magnitudes and squares,
# which are nearly the same.
def weights_put_back(view: View, *, moved: float, left: float, samples: float, values: float) -> list[PutBack]:
    """Return when sums of the weights came back to their first values, after they had moved away from these.

    Args:
        view: The run.
        moved: How far they must have moved, as a part of their size.
        left: How much of that way may be left.
        samples: How many there must be before it.
        values: How many values a weight must have. At least two weights must.
    """
    cells = view.cells("weights")
    if cells is None or len(cells.steps) <= samples:
        return []
    several = np.nan_to_num(cells.total_of("count")).min(axis=1) >= values
    if np.count_nonzero(several) < 2:
        return []
    sums, size = (np.stack([cells.total_of(name)[several] for name in names]) for names in _SUMS)
    with np.errstate(all="ignore"):
        away = np.abs(sums - sums[..., :1])
        ways = np.median(np.nan_to_num(away / size[..., :1], posinf=0.0), axis=(0, 1))
        rests = np.median(np.nan_to_num(away[..., 1:] / away[..., :-1], nan=np.inf), axis=1).max(axis=0)
    jumps = 1 + np.flatnonzero((ways[:-1] >= moved) & (rests <= left))
    whole = np.nansum(cells.nonfinite, axis=0) == 0  # sums leave out what is not finite
    jumps = jumps[(jumps >= samples) & whole[jumps] & whole[jumps - 1]]
    first, steps = int(cells.steps[0]), cells.steps.tolist()
    return [PutBack(first, steps[at - 1], steps[at], float(ways[at - 1])) for at in jumps.tolist()]


class Exchanged(NamedTuple):
    """Parameters that have the second moments of others from a step on."""

    step: int
    names: tuple[str, ...]
    others: tuple[str, ...]  # of which they are, of each; () if it is known of all together only


# A step leaves beta2 of each second moment: what falls faster was written over. A state that is cleared or brought
# back falls too, or is what it was before. Only that of another parameter is what this one had, and was never its own.
def exchanged_states(view: View, *, times: float, near: float, parameters: float) -> Exchanged | None:
    """Return where second moments became those of other parameters of as many values, first.

    Args:
        view: The run.
        times: How many times they must have grown at once, beyond their squared gradients.
        near: How many times they may differ from what the other parameter had before.
        parameters: How many must have grown and how many fallen.
    """
    states, gradients = view.cells("optimizer"), view.cells("gradients")
    if states is None or gradients is None:
        return None
    named = [name.removesuffix(":exp_avg_sq") for name in states.names]  # other states match no gradient's name
    rows = [row for row, name in enumerate(named) if name in gradients.names]
    betas = [each.get("betas") for each in optimizer_settings(view)]
    pairs = [cast("list[float]", pair) for pair in betas if isinstance(pair, list)]
    decays = [float(pair[1]) for pair in pairs if len(pair) > 1]
    steps, mine, theirs = np.intersect1d(states.steps, gradients.steps, return_indices=True)
    if len(rows) < 2 * parameters or len(steps) < 2 or not decays or not 0 < min(decays) < 1:
        return None
    names = tuple(named[row] for row in rows)
    sizes = states.total_of("count")[rows][:, mine].max(axis=1)
    with np.errstate(all="ignore"):
        moments = np.log10(states.mean[rows][:, mine])
        squares = 2 * np.log10(gradients.rms[[gradients.names.index(name) for name in names]][:, theirs])
    moments[~np.isfinite(moments)] = squares[~np.isfinite(squares)] = np.nan
    far, close, kept = np.log10(times), np.log10(near), -np.log10(min(decays))
    alike = (sizes[:, None] == sizes[None, :]) & ~np.eye(len(names), dtype=bool)
    first = _exchanged_at_first(names, sizes, steps, moments, squares, far, parameters, min(decays))
    for at in range(1, len(steps) if first is None else 1):
        before, now, left = moments[:, at - 1], moments[:, at], kept * (steps[at] - steps[at - 1])
        with np.errstate(all="ignore"):
            fell = now < before - left - _HALF
            own = np.fmax.reduce(moments[:, :at], axis=1)
            grew = (now > own + far) & (now > squares[:, at] + 1)
            apart = np.where(alike & fell[None, :], np.abs(now[:, None] - before[None, :]), np.inf)
            nearest = np.nanmin(apart, axis=1)
        if min(fell.sum(), grew.sum()) >= parameters and bool((nearest[grew] <= close + left).all()):
            found = np.flatnonzero(grew).tolist()
            others = tuple(names[int(np.nanargmin(apart[place]))] for place in found)
            return Exchanged(int(steps[at]), tuple(names[place] for place in found), others)
    return first


# A training that begins with a state has second moments that fit its gradients, but for a common factor. Some that are
# far too large, and others of as many values far too small, as large as the former should be, are exchanged. What the
# first step has added is known exactly, so what is left of it is what the training began with: of a new state nothing.
def _exchanged_at_first(
    names: tuple[str, ...], sizes: Floats, steps: Ints, moments: Floats, squares: Floats, far: float,
    parameters: float, beta2: float,
) -> Exchanged | None:  # fmt: skip
    """Return the parameters whose second moments fit the gradients of others at the first sample."""
    begun = 1 - (1 - beta2) * 10 ** (squares[:, 0] - moments[:, 0])  # the share that is not of this step
    with np.errstate(all="ignore"):
        before = np.where(begun > _ROUNDING, moments[:, 0] + np.log10(begun), np.nan)
    first, second = before - squares[:, 0], moments[:, 1] - squares[:, 1]
    known, some, found = np.isfinite(first) & np.isfinite(second), int(parameters), list[int]()
    for size in set(sizes[known].tolist()):
        group = np.flatnonzero(known & (sizes == size))
        ordered = np.sort(first[group])
        if len(group) < 2 * some or ordered[-some] - ordered[some - 1] < 2 * far:
            continue
        middle = (ordered[-some] + ordered[some - 1]) / 2
        high, low = group[first[group] > middle + far / 2], group[first[group] < middle - far / 2]
        apart = np.ptp(np.sort(before[group]) - np.sort(squares[group, 0]))
        if apart < far / 2 and second[high].min() - second[low].max() > far:
            found += [*high.tolist(), *low.tolist()]
    return Exchanged(int(steps[0]), tuple(names[place] for place in sorted(found)), ()) if found else None


def recorded_epsilon(view: View) -> float | None:
    """Return the smallest recorded epsilon of the run's optimizers, or None."""
    known = [each.get("eps") for each in optimizer_settings(view)]
    return min((float(each) for each in known if isinstance(each, int | float) and 0 < each < 1e100), default=None)


def spared_updates(view: View, cells: Cells) -> NDArray[np.bool_]:
    """Of each parameter and step, whether a weight that stays where it was is no loss."""
    compensated = _kept_in_state(view)
    spared = np.zeros(cells.shape, dtype=bool)
    for event in sorted((e for e in view.events if e.kind == "update"), key=lambda e: e.step):
        listed = event.details.get("parameters")
        named = set(cast("list[str]", listed)) if isinstance(listed, list) else set[str]()
        way = event.details.get("update")
        if way in (_INEXACT, _BIASED):
            compensated -= named
        if way == _INEXACT:
            continue
        here = np.array([name in named for name in cells.names], dtype=bool)
        spared[np.ix_(here, cells.steps >= event.step)] = way in _LOSSLESS
    for names, first, last in with_rate_of_zero(view):  # nothing was to be added
        here = np.array([name in names for name in cells.names], dtype=bool)
        spared[np.ix_(here, (cells.steps >= first) & (cells.steps <= last))] = True
    return spared | np.array([name in compensated for name in cells.names], dtype=bool)[:, None]


def _kept_in_state(view: View) -> set[str]:
    """The parameters whose optimizer state keeps what their format cuts off."""
    names = view.run.tensors.get("optimizer", ())
    split = (name.rpartition(":") for name in names)
    return {parameter for parameter, _, state in split if state.rpartition(".")[2] in _EXACT}


# A step adds (1 - beta2) times the square of its gradient to a mean of squares. Prodigy's are in units of its estimate
# of the rate, which begins at 1e-6: they say nothing by their size.
def in_other_units(view: View) -> set[str]:
    """Return the parameters whose second moments were once far less than the last gradient alone makes them."""
    gradients, states = view.cells("gradients"), view.cells("optimizer")
    if gradients is None or states is None:
        return set()
    common, mine, theirs = np.intersect1d(gradients.steps, states.steps, return_indices=True)
    made = ~np.isin(common, list(view.skips))  # a step that a scaler skips leaves the moments as they are
    places = {name.rpartition(":")[0]: i for i, name in enumerate(states.names) if name.endswith(":exp_avg_sq")}
    sums, formats = states.total_of("sum"), states.last_formats
    result = set[str]()
    for place, name in enumerate(gradients.names):
        state = places.get(name, -1)
        if state >= 0 and get_element(formats[state], "diagnose").bits >= 32:  # others are rounded, perhaps to zero
            moment, squares = sums[state, theirs], gradients.norm[place, mine] ** 2
            if (made & (moment > 0) & (moment < _FAR_LESS * squares)).any():
                result.add(name)
    return result


def squares_over_moments(gradients: Cells, optimizer: Cells) -> tuple[Ints, Ints, Floats]:
    """Return gradients' squares over Adam's second moments, corrected for their start: layers, steps, values.

    Layers are those with such moments, as places; steps are those of both, as places of the gradients'.
    """
    place = {name: i for i, name in enumerate(optimizer.names)}
    moments = np.array([place.get(f"{name}:exp_avg_sq", -1) for name in gradients.names], dtype=np.int64)
    layers = np.flatnonzero(moments >= 0)
    common, mine, theirs = np.intersect1d(gradients.steps, optimizer.steps, return_indices=True)
    memory = 1 - _BETA2 ** (common + 1)  # with a smaller one this errs on the quiet side
    sums = optimizer.total_of("sum")[moments[layers]][:, theirs] / memory
    with np.errstate(all="ignore"):
        return layers, mine, np.where(sums > 0, gradients.norm[layers][:, mine] ** 2 / sums, np.nan)


def lost_second_moments(cells: Cells) -> Floats:
    """Share of second moments that are zero though the first are not. NaN in all other cells."""
    zeros, count = cells.total_of("zeros"), cells.total_of("count")
    result = np.full(cells.shape, np.nan)
    for first, second in _pairs(cells):
        with np.errstate(all="ignore"):
            lost = np.maximum(zeros[second] - zeros[first], 0) / (count[second] - zeros[first])
        result[second] = np.where(count[second] > zeros[first], lost, 0.0)
    return np.where(cells.finite > 0, result, np.nan)


def lost_first_moments(cells: Cells) -> Floats:
    """Share of 8-bit first moments that are zero though the second are not. NaN in all other cells."""
    zeros, count = cells.total_of("zeros"), cells.total_of("count")
    is_narrow = cells.total(cells.by_format(lambda fmt: fmt.bits <= 8).astype(np.int64)) > 0
    result = np.full(cells.shape, np.nan)
    for first, second in _pairs(cells):
        with np.errstate(all="ignore"):
            lost = (zeros[first] - zeros[second]) / (count[first] - zeros[second])
        result[first] = np.where(is_narrow[first], lost, np.nan)
    return result


def _pairs(cells: Cells) -> list[tuple[int, int]]:
    """Return the places of the first and the second moments of each parameter that has both."""
    place = {name: i for i, name in enumerate(cells.names)}
    split = [(name.rpartition(":"), i) for name, i in place.items()]
    firsts = [(place.get(f"{parameter}:{SECOND_MOMENTS.get(state, '')}"), i) for (parameter, _, state), i in split]
    return [(first, second) for first, second in firsts if first is not None]


# After the first step both moments are zero where the gradient is: one of the two that is not has been rounded.
def without_a_zero(view: View, cells: Cells) -> dict[str, tuple[str, float]]:
    """Return second moments with zeros at the first step, the first moments that have none, and the share."""
    gradients = view.cells("gradients")
    if gradients is None or cells.steps[0] != 0 or gradients.steps[0] != 0:
        return {}
    zeros, count = cells.total_of("zeros")[:, 0], cells.total_of("count")[:, 0]
    zero_gradients = dict(zip(gradients.names, gradients.total_of("zeros")[:, 0].tolist(), strict=True))
    found: dict[str, tuple[str, float]] = {}
    for second, name in enumerate(cells.names):
        parameter, _, state = name.rpartition(":")
        first = f"{parameter}:{SECOND_MOMENTS.get(state, '')}"
        if first in cells.names and parameter in zero_gradients:
            none, known = zeros[cells.names.index(first)] == 0, 0 < zero_gradients[parameter] == zeros[second]
            if none and known and zeros[second] < count[second]:
                found[name] = first, float(zeros[second] / count[second])
    return found
