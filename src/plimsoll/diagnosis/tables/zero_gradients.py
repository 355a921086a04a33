"""Tensors that are zero throughout, what came before, and where gradients stop or are set to zero."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from plimsoll.diagnosis.tables.cells import Cells
from plimsoll.diagnosis.view import View
from plimsoll.formats import FP16

_GROWTH = 4.0  # between two samples: what makes a layer die at a step is far more than a training's usual growth


@dataclass(frozen=True, slots=True)
class Growth:
    """A parameter that became many times as large between two samples, by its root mean square."""

    name: str
    after_step: int
    step: int
    size_before: float
    size: float

    @property
    def times(self) -> float:
        """How many times as large it became."""
        return self.size / self.size_before


def erased_samples(view: View) -> NDArray[np.bool_]:
    """Return the samples with zero gradients of parameters, but not of activations."""
    gradients, passed = view.cells("gradients"), view.cells("activation_gradients")
    if gradients is None or passed is None:
        return np.zeros(0 if gradients is None else len(gradients.steps), dtype=bool)
    counts = np.nansum(gradients.total(gradients.nonzero), axis=0) + np.nansum(gradients.nonfinite, axis=0)
    erased = (counts == 0) & gradients.recorded.all(axis=0) & ~view.solved(gradients.steps)
    _, mine, theirs = np.intersect1d(gradients.steps, passed.steps, return_indices=True)
    # Only outputs of modules that own a parameter count: a saturated sigmoid gets a gradient, and passes on none. For a
    # bias it is the sum of its output's. Underflow is excluded: sums of normal numbers are none.
    owners = {_owner(view, name) for name in gradients.names}
    owners -= _fed_zeros(view, gradients) | held_at_zero(view)[1]
    own = np.array([":output" in name and name.rpartition(":")[0] in owners for name in passed.names])
    largest = np.nan_to_num(passed.highest(passed.columns["absmax"]))[own].max(axis=0, initial=0.0)
    alive = np.zeros(len(gradients.steps), dtype=bool)
    alive[mine] = largest[theirs] >= FP16.smallest_normal
    return erased & alive


def _fed_zeros(view: View, gradients: Cells) -> set[str]:
    """Return the modules without a trained bias that have got only zeros as input.

    The gradient of a weight is the product of the output's gradient and the input: theirs are zero.
    """
    idle = always_zero(view.cells("activations"))
    biased = {name.removesuffix(".bias") for name in gradients.names if name.endswith(".bias")}
    return {name.removesuffix(":input") for name in idle if name.endswith(":input")} - biased


def held_at_zero(view: View) -> tuple[set[str], set[str]]:
    """Return parameters that begin at zero and get no gradient, and the modules that have no other ones with gradients.

    A product of two such parameters, or layers, has a gradient of zero for both, whatever comes to its output.
    """
    still = always_zero(view.cells("weights")) & always_zero(gradients := view.cells("gradients"))
    names = () if gradients is None else gradients.names
    others = {_owner(view, name) for name in names if name not in still}
    return still, {_owner(view, name) for name in still} - others


def _owner(view: View, name: str) -> str:
    """Return the module that a parameter is in."""
    return name.rpartition(".")[0] or str(view.run.manifest.get("root", ""))


def always_zero(cells: Cells | None) -> set[str]:
    """Return the names of a collection whose values were zero at all samples."""
    if cells is None:
        return set()
    counts = np.nansum(cells.total(cells.nonzero), axis=1) + np.nansum(cells.nonfinite, axis=1)
    silent = (counts == 0) & (np.count_nonzero(cells.recorded, axis=1) > 0)
    return {cells.names[layer] for layer in np.flatnonzero(silent).tolist()}


# What begins at zero, or near it, grows many times at each of its first samples, and is no cause of anything.
def grown_before(view: View, since: int) -> Growth | None:
    """Return the parameter that grew most up to a step from the sample before it; None if none grew suddenly."""
    cells = view.cells("weights")
    place = np.searchsorted(cells.steps, since) if cells is not None else 0
    if cells is None or not 0 < place < len(cells.steps) or cells.steps[place] != since:
        return None
    earlier, before, now = (cells.rms[:, at] for at in (max(place - 2, 0), place - 1, place))
    with np.errstate(all="ignore"):
        times = np.where((before > 0) & (before < _GROWTH * earlier), now / before, np.nan)
    if np.isnan(times).all() or np.nanmax(times) < _GROWTH:
        return None
    most = int(np.nanargmax(times))
    return Growth(cells.names[most], int(cells.steps[place - 1]), since, float(before[most]), float(now[most]))


def without_rows(view: View, since: int, samples: int) -> set[str]:
    """Return the modules that are called with no values at all, at the first samples from a step on."""
    cells = view.cells("activations")
    if cells is None:
        return set()
    counts = cells.total_of("count")[:, cells.steps >= since][:, :samples]  # judged once, for good
    return {cells.names[place].rpartition(":")[0] for place in np.flatnonzero((counts == 0).all(axis=1)).tolist()}


# A module may return a constant with its result: a mask, the position bias of an attention that has none, the log
# determinant of a permutation. No gradient comes back to it, be the result trained or the model's input.
def is_constant_aside(view: View, outputs: Cells, span: tuple[int, int, int]) -> bool:
    """Return True if an output stands still since its first sample, gets no gradient, and another of its module lives.

    Args:
        view: The run.
        outputs: The activations.
        span: The output's place in the names, and the first and last place of the steps at which it stands still.
    """
    layer, first, last = span
    name = outputs.names[layer]
    module, aside, _ = name.partition(":output.")
    if not aside or outputs.recorded[layer, :first].any():
        return False
    passed = view.cells("activation_gradients")
    if passed is not None and name in passed.names:
        steps = (passed.steps >= outputs.steps[first]) & (passed.steps <= outputs.steps[last])
        if passed.recorded[passed.names.index(name), steps].any():
            return False
    others = set(outputs.names) - always_zero(outputs) - {name}
    return any(other.startswith(module + aside) for other in others)


# Only clear products count, as of the format's normal numbers: sums of others may underflow.
def lost_after_backward(view: View, modules: set[str], since: int, samples: int) -> set[str]:
    """Return those of some modules whose output gradients are not zero, at the first samples from a step on.

    Their parameters' gradients are: so these became zero between the backward and the step.
    """
    passed, inputs = view.cells("activation_gradients"), view.cells("activations")
    if passed is None or inputs is None:
        return set()
    steps, mine, theirs = np.intersect1d(passed.steps, inputs.steps, return_indices=True)
    span = np.flatnonzero(steps >= since)[:samples]  # judged once, for good
    if len(span) < samples:
        return set()
    modules = modules - held_at_zero(view)[1]
    entries = {name: place for place, name in enumerate(inputs.names)}
    largest = passed.highest(passed.columns["absmax"])
    result = set[str]()
    for place, name in enumerate(passed.names):
        module, _, kind = name.rpartition(":")
        if module not in modules or kind != "output":
            continue
        size = largest[place, mine[span]]
        if (entry := entries.get(f"{module}:input")) is not None:  # a table of an embedding has none
            size = size * inputs.true_absmax[entry, theirs[span]]
        if (size >= FP16.smallest_normal).all():
            result.add(module)
    return result


def where_gradients_stop(view: View, since: int, samples: int) -> str | None:
    """Return the module that gradients come to and do not leave, at the first samples from a step on.

    The model's output, if the loss gives it no gradient. None if neither is so.
    """
    cells = view.cells("activation_gradients")
    if cells is None:
        return None
    span = np.flatnonzero(cells.steps >= since)[:samples]  # judged once, for good
    counts = cells.total(cells.nonzero)[:, span] + cells.nonfinite[:, span]
    if not counts.shape[1] or np.isnan(counts).all():
        return None
    comes, leaves = set[str](), set[str]()  # modules, by gradients of their outputs and of their inputs
    known = set[str]()
    for name, count in zip(cells.names, counts, strict=True):
        module, _, kind = name.rpartition(":")
        if kind.startswith("output") and bool((count > 0).all()):
            comes.add(module)
        if kind.startswith("input"):
            known.add(module)
            if bool((np.nan_to_num(count) > 0).any()):
                leaves.add(module)
    order = {name.rpartition(":")[0]: place for place, name in reversed(list(enumerate(cells.names)))}
    stopped = sorted((known & comes) - leaves, key=order.__getitem__)  # those next to the loss first
    inner = [name for name in stopped if not any(other.startswith(f"{name}.") for other in stopped)]
    if inner:
        return inner[0]
    root = f"{view.run.manifest.get('root')}:output"
    return root if root in cells.names and not (counts[cells.names.index(root)] > 0).any() else None
