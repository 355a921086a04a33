"""The remedy of a run whose loss scale does not fit its gradients: decided here, and said by every surface.

What happened decides, and the first of these that applies:

1. The scale collapsed and the overflow stayed in few layers: a scale for each layer, since all others can keep theirs.
2. The scale collapsed otherwise: a scaler that comes back soon.
3. No single scale serves all layers: a scale for each layer.
4. A higher scale serves all layers: raise it. Else a scale for each layer if each has one that serves, else BF16.

The laboratory's `demo` measures the first: LayerScaler loses no gradient there, SpectralScaler those of 17 steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from plimsoll.diagnosis.estimates.usable_scales import Scales
from plimsoll.diagnosis.finding import Action, Finding
from plimsoll.diagnosis.view import View
from plimsoll.diagnosis.wording import first_of, layer_name
from plimsoll.tensor_collections import BACKWARD, WITH_LOSS_SCALE
from plimsoll.text import power

_OF_SCALE = ("scale-collapse", "no-single-scale", "scale-low", "underflow-high", "underflow-rising")
_FEW = 0.1  # of the tensors that a step's overflow reached: it has spread no further


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """What to do, as the end of a sentence, and why."""

    action: str
    reason: str

    def __str__(self) -> str:
        return f"{self.action[:1].upper()}{self.action[1:]}: {self.reason}."


def scale_remedy(view: View, findings: Sequence[Finding]) -> Remedy | None:
    """Return the remedy of what the findings say of the loss scale; None where they say nothing of it."""
    found = {finding.rule: finding for finding in reversed(findings) if is_of_scale(finding)}
    if not found:
        return None
    if "scale-collapse" in found:
        return _against_collapse(view, found["scale-collapse"])
    if "no-single-scale" in found:
        evidence = found["no-single-scale"].evidence
        needs, bears = (str(evidence[name]).split(" ")[0] for name in ("needs_scale", "bears_scale"))
        return Remedy(
            action="use a LayerScaler or BF16",
            reason=f"no single scale serves, since {layer_name(str(evidence['smallest_layer']))} needs {needs} or more "
            f"and {layer_name(str(evidence['largest_layer']))} overflows above {bears}",
        )
    last = max(finding.until_step for finding in found.values())
    if last < _last_sample(view) and all(finding.severity == "warning" for finding in found.values()):
        return Remedy(action="do nothing now", reason=f"it has been over since step {last:,}")
    return by_scales(Scales.of(view, until=last), found.get("scale-low"))[1]


def is_of_scale(finding: Finding) -> bool:
    """Return whether another loss scale may mend what a finding says."""
    if finding.rule == "underflow-rising":
        return finding.severity == "alarm"  # before that its advice is to look again
    return finding.rule in _OF_SCALE and finding.severity != "info" and finding.collection != "activations"


def with_remedy(view: View, findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings, those of the loss scale with the run's one remedy as their advice."""
    remedy = scale_remedy(view, findings)
    if remedy is None:
        return list(findings)
    return [replace(f, advice=str(remedy)) if is_of_scale(f) else f for f in findings]


def _last_sample(view: View) -> int:
    sampled = [view.cells(name) for name in WITH_LOSS_SCALE]
    return max((int(cells.steps[-1]) for cells in sampled if cells is not None), default=-1)


def _against_collapse(view: View, collapse: Finding) -> Remedy:
    few = _overflowed_in(view, collapse)
    if few:
        return Remedy(
            action="use a LayerScaler or BF16",
            reason=f"only {first_of([layer_name(name) for name in few], 1)} overflowed, and all others keep their "
            "scales",
        )
    return Remedy(
        action="use a SpectralScaler or BF16",
        reason="it raises the scale again within few steps, and a closure given to step() repeats the skipped batches",
    )


def _overflowed_in(view: View, collapse: Finding) -> list[str]:
    """The layers whose gradients overflowed when the scale fell, if a sample saw it and they are few."""
    names: list[str] = []
    tensors = 0
    for collection in BACKWARD:
        cells = view.cells(collection)
        if cells is None:
            continue
        # The step before the first lower scale is the one that overflowed.
        there = (cells.steps >= collapse.since_step - 1) & (cells.steps <= collapse.until_step)
        bad = cells.total_of("nans") + cells.total_of("pos_infs") + cells.total_of("neg_infs")
        reached = np.flatnonzero((np.nan_to_num(bad[:, there]) > 0).any(axis=1)).tolist()
        names += [cells.names[i] for i in reached]
        tensors += len(cells.names)
    return names if 0 < len(names) <= max(_FEW * tensors, 1.0) else []


def by_scales(scales: Scales | None, low: Finding | None = None) -> tuple[str, Remedy, tuple[Action, ...]]:
    """Return what the scales that serve allow, in few words, as a remedy, and as a guard's actions.

    Args:
        scales: Those of the run so far; None where gradients were not recorded.
        low: The finding `scale-low`, whose numbers give the reason.
    """
    if scales is not None and scales.one_serves:
        was = "" if low is None else f"{power(float(low.evidence['scale']))} is too low, and "
        between = scales.shown.replace(" to ", " and ")
        remedy = Remedy(action=f"raise the loss scale to between {between}", reason=f"{was}that serves all layers")
        return "raise the scale", remedy, ("raise_scale",)
    if scales is not None and scales.each_serves:
        remedy = Remedy(
            action="use a LayerScaler or BF16", reason="no single scale serves all layers, but one for each layer does"
        )
        return "scale per layer", remedy, ("layer_scale", "to_bf16")
    if low is not None:
        remedy = Remedy(action="raise the loss scale, or use a SpectralScaler", reason="the top of the format is empty")
        return "raise the scale", remedy, ("raise_scale",)
    return "change to BF16", Remedy(action="use BF16", reason="no scale serves even single layers"), ("to_bf16",)
