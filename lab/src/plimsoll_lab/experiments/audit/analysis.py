"""What the audits and the run of experiment `audit` show: numbers, claims and sentences."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from plimsoll.runs import Run
from plimsoll.spectrum import Spectrum
from plimsoll.text import percent
from plimsoll.unit import Audit, Reading
from plimsoll_lab.claim import Claim, claims as claims_of, of_rows

_NEAR, _FAR = 2.0, 4.0  # binades from unit scale
_COST = 0.0025  # published as 0.2 %, and so at most half a tenth of a per cent above it
_TAIL = 10  # losses that one is the mean of
# FP8 as it trains: E4M3 for what goes forward, E5M2 for gradients.
_FORMAT_OF = {"activations": "e4m3", "activation_gradients": "e5m2"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Audits:
    """The model as torch drew it, converted, and converted and trained."""

    before: Audit
    after: Audit
    trained: Audit


def numbers(audits: Audits, run: Run) -> dict[str, float]:
    """By name: how far scales lie from 1, what formats lose, and the loss."""
    found: dict[str, float] = {}
    for when, audit in (("before", audits.before), ("after", audits.after), ("trained", audits.trained)):
        forward, backward = audit.total("forward"), audit.total("backward")
        found |= {
            f"farthest_{when}": max(r.distance for r in audit.worst),
            f"within_{when}": _share(audit, _NEAR, within=True),
            f"gradients_far_{when}": _share(audit, _FAR, within=False, backward=True),
            f"forward_e4m3_lost_{when}": forward.fit("e4m3").lost.estimate,
            f"backward_e5m2_lost_{when}": backward.fit("e5m2").lost.estimate,
            f"backward_fp16_lost_{when}": backward.fit("fp16").lost.estimate,
        }
    loss = run.scalars("loss")[1]
    found |= _over_the_run(run)
    found |= {"loss_begin": float(loss[0]), "loss_end": float(np.mean(loss[-_TAIL:]))}
    found["lost_after"] = found["backward_e5m2_lost_trained"]
    return found


def _share(audit: Audit, binades: float, *, within: bool, backward: bool = False) -> float:
    chosen = audit.readings("backward" if backward else None)
    readings = [r for r in chosen if r.spoiled or not math.isnan(r.scale)]  # what holds no number lies nowhere near
    near = sum(r.distance <= binades for r in readings) / len(readings)
    return near if within else 1.0 - near


def _over_the_run(run: Run) -> dict[str, float]:
    """Of all steps that were recorded, the largest share that FP8 cuts off in one tensor, and loses in all of them."""
    cut, totals = 0.0, dict[tuple[int, str], Spectrum]()
    for collection, fmt in _FORMAT_OF.items():
        for step, _, _, spectrum in run.spectra(collection):
            cut = max(cut, spectrum.fit(fmt).overflow.estimate)
            totals[step, fmt] = totals.get((step, fmt), Spectrum.empty()) + spectrum
    lost = max(total.fit(fmt).lost.estimate for (_, fmt), total in totals.items())
    return {"cut_off_in_training": cut, "lost_in_training": lost}


def claims(found: Mapping[str, float]) -> tuple[Claim, ...]:
    """What the experiment says, with its numbers."""
    return (
        *of_rows(_of_the_beginning(found), "U1", "U2"),
        *of_rows(_of_drift(found), "U5"),
        *of_rows(_of_training(found), "U1"),
        *of_rows(_of_cost(found), "U5"),
    )


def _of_the_beginning(found: Mapping[str, float]) -> tuple[Claim, ...]:
    """Before the conversion, and after it."""
    return claims_of(
        """
        before-far | found.gradients_far_before | at least 0.9 of operations
            | before: gradients lie more than 4 binades from unit scale
        before-lost | found.backward_e5m2_lost_before | at least 0.3 of values
            | before: E5M2 without a scale loses much of the gradients
        after-near | found.within_after | at least 0.98 of operations, forward and backward
            | after: values and gradients of the operations lie within 2 binades of unit scale
        after-farthest | found.farthest_after | at most 3.5 binades | after: none lies far from it
        after-e4m3 | found.forward_e4m3_lost_after | at most 0.005 of values lost
            | after: E4M3 without a scale holds the values
        after-e5m2 | found.backward_e5m2_lost_after | at most 0.005 of values lost
            | after: E5M2 without a scale holds the gradients
        after-fp16 | found.backward_fp16_lost_after | at most 0.001 of values lost
            | after: FP16 without a scale holds the gradients
        """,
        found=found,
    )


def _of_drift(found: Mapping[str, float]) -> tuple[Claim, ...]:
    """In training."""
    return claims_of(
        """
        drift-cuts-nothing | found.cut_off_in_training | at most 0.001 of values, in the worst tensor
            | in training: no tensor drifts above what FP8 holds
        drift-loses-little | found.lost_in_training | at most 0.02 of values, at the worst step
            | in training: scales do not drift below what FP8 holds
        """,
        found=found,
    )


def _of_training(found: Mapping[str, float]) -> tuple[Claim, ...]:
    """Without a loss scale."""
    return claims_of(
        """
        trains | found.loss_end / found.loss_begin | at most 0.75 of the first loss
            | it trains, without a loss scale
        """,
        found=found,
    )


def _of_cost(found: Mapping[str, float]) -> tuple[Claim, ...]:
    """Of the factors."""
    return claims_of(
        f"""
        costs-little | found.operations_added | at most {_COST} of the step's operations
            | at BERT-large's sizes few operations are added (published: 0.2 %)
        """,
        found=found,
    )


def said(audits: Audits, figure: str) -> tuple[str, ...]:
    """Sentences about what was found."""
    before, after = audits.before, audits.after
    lost = [audit.total("backward").fit("e5m2").lost.estimate for audit in (before, after)]
    scales = (
        f"Before the conversion {len(before.beyond(_FAR))} of {sum(1 for _ in before.readings())} values and gradients "
        f"lie more than {_FAR:.0f} binades from unit scale, after it {len(after.beyond(_FAR))}. E5M2 without a scale "
        f"loses {percent(lost[0], 1)} of the gradients' values before, {percent(lost[1], 2)} after."
    )
    worst = (
        f"The worst before: {_worst(before.worst[0])}; after: {_worst(after.worst[0])}; trained: "
        f"{_worst(audits.trained.worst[0])}. Every operation: {figure}."
    )
    return scales, worst


def _worst(reading: Reading) -> str:
    return f"{reading.row.name} {reading.direction} 2^{reading.scale:.1f}"
