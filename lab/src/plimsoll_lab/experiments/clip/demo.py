"""Experiment `demo` (T3, T4): ten hard batches in FP16 and BF16, and remedies.

Four trainings from the same weights on the same batches. In the hard batches an eighth of the pictures is black, as
where a shard fails to decode. The gradient of a black patch is divided by 1e-8 (`model`): far beyond FP16 at any
usual scale, and nothing to BF16.

What this needs is stated, not hidden. A stock scaler leaves 2^6 after ten halvings of 2^16. FP16 flushes what is below
2^-25, so true gradients below 2^-31 are zero from then on. A large CLIP has such gradients for its width, its depth and
its batch; a small one has them since its loss is the share of a batch of 32,768, and its activations are large.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from plimsoll.diagnosis import Finding, View, diagnose
from plimsoll.report.verdicts.run_summary import LOSS_STEPS
from plimsoll.report.verdicts.verdict_sentence import leading_first, verdict
from plimsoll.runs import Run
from plimsoll.text import percent
from plimsoll_lab.bench import Bench
from plimsoll_lab.experiments.clip.training import DEMO_KINDS, Kind, Setup, setup_for, train_all
from plimsoll_lab.result import Claim, Measured, Training, claims as claims_of
from plimsoll_lab.running.workers import workers_for
from plimsoll_lab.statistics import columns, lost_at, mean, median, share_lost
from plimsoll_lab.study import Experiment, settings_of

Series = tuple[NDArray[np.int64], NDArray[np.float64]]

TAIL = LOSS_STEPS  # that a loss is the median of, as in a run's summary
LOST = 0.05  # T6: above 5 % is not sound
_OF_UNDERFLOW = ("scale-collapse", "scale-low", "underflow-high", "underflow-rising", "no-single-scale")


def judged(kind: Kind, setup: Setup, run: Run) -> Training:
    """The training's numbers, findings, and what became of it in a few words."""
    view = View(run)
    findings = leading_first(diagnose(view), view.last_step)
    numbers = measured(view, setup, findings)
    outcome, good = _outcome(numbers)
    steps, loss = view.scalar("loss")
    start = setup.hard_at // 2
    later = steps >= start
    return Training(
        name=kind.name, title=kind.title, run=run.path, numbers=numbers, outcome=outcome, good=good,
        series=columns(steps[later], loss[later], median), series_of=f"loss since step {start}", findings=findings,
        verdict=verdict(view, findings),
    )  # fmt: skip


def measured(view: View, setup: Setup, findings: Sequence[Finding]) -> dict[str, float]:
    """Return numbers by name: losses, scale, lost gradients, first finding."""
    repeated = int(np.nansum(view.scalar("retries")[1]))
    end = setup.hard_end + repeated  # a repetition is a step of the run
    steps, loss = view.scalar("loss")
    before = median(loss[(steps < setup.hard_at) & (steps >= setup.hard_at - TAIL)])
    lost_steps, lost = lost_at(view)
    found: dict[str, float] = {
        "loss_before": before,
        "loss_end": median(loss[-TAIL:]),
        "lost_before": mean(lost[(lost_steps > min(setup.warmup, setup.hard_at // 2)) & (lost_steps < setup.hard_at)]),
        "lost_after": share_lost(view, end),
        "lost_end": mean(lost[lost_steps > view.last_step - TAIL]),
        "lost_for_steps": _time_lost(lost_steps, lost, end),
        "skipped": float(sum(event.kind == "skip" for event in view.events)),
        "repeated": float(repeated),
    }
    found["batches_lost"] = found["skipped"] - found["repeated"]
    found |= of_parameters(view)
    found["progress"] = 1.0 - found["loss_end"] / before
    found |= _scale(view, setup, end) | _gradient(view, setup, end)
    found["alarms"] = float(sum(finding.severity == "alarm" for finding in findings))
    found["underflow_findings"] = float(
        sum(finding.rule in _OF_UNDERFLOW and finding.severity != "info" for finding in findings)
    )
    for rule in ("scale-collapse", "underflow-high"):
        since = [f.since_step for f in findings if f.rule == rule and f.severity == "alarm"]
        found[f"{rule}_since"] = float(min(since)) if since else math.nan
    return found


def of_parameters(view: View) -> dict[str, float]:
    """Return how often a parameter sat out, and the scales' bytes, of such a scaler."""
    (_, sat_out), (_, taken) = view.scalar("sat_out"), view.scalar("scale_bytes")
    if not len(sat_out):
        return {}
    cells = view.cells("gradients")
    weights = 0 if cells is None else int(cells.column("count")[cells.at == 0].sum())
    return {
        "sat_out": float(sat_out[-1]),
        "scale_bytes": float(taken[-1]),
        "scale_bytes_per_weight": float(taken[-1]) / max(weights, 1),
    }


def _time_lost(steps: NDArray[np.int64], lost: NDArray[np.float64], end: int) -> float:
    """Return the steps after the hard batches until gradients were sound; Inf: never."""
    bad = np.flatnonzero((steps >= end) & (lost > LOST))
    if not len(bad):
        return 0.0
    return math.inf if bad[-1] == len(steps) - 1 else float(steps[bad[-1]] - end + 1)


def _scale(view: View, setup: Setup, end: int) -> dict[str, float]:
    """Return the loss scale's exponents before, lowest since, and last; none in BF16."""
    steps, scale = view.scalar("scale")
    if not len(scale):
        return {}
    exponents = np.log2(scale)
    begin = float(exponents[steps < setup.hard_at][-1])
    since = exponents[steps >= setup.hard_at]
    back = steps[(steps >= end) & (exponents >= begin - 1.0)]
    return {
        "scale_before": begin,
        "scale_lowest": float(since.min()),
        "scale_fell": float(since[0] - since.min()),  # from the first hard batch's: it may have grown just before
        "scale_end": float(exponents[-1]),
        "scale_back_after": float(back[0] - end) if len(back) else math.inf,
    }


def _gradient(view: View, setup: Setup, end: int) -> dict[str, float]:
    """Return the gradient's largest norm in the hard batches, and its broken steps.

    The norm is a multiple of the usual one.
    """
    steps, norms = view.scalar("grad_norm")
    hard = norms[(steps >= setup.hard_at) & (steps < end)]
    usual = median(norms[(steps < setup.hard_at) & (steps >= setup.hard_at - TAIL)])
    finite = hard[np.isfinite(hard)]
    return {
        "gradient_rise": float(finite.max() / usual) if len(finite) else math.nan,
        "nonfinite_steps": float(np.sum(~np.isfinite(hard))),
    }


def _outcome(numbers: Mapping[str, float]) -> tuple[str, bool]:
    lost_for = numbers["lost_for_steps"]
    if lost_for == math.inf:
        return "gradients stay zero", False
    if not numbers["progress"] > 0:
        return "does not come back", False
    return (f"back in {lost_for:.0f} steps" if lost_for else "trains on"), True


Numbers = Mapping[str, float]


def measure(bench: Bench) -> Measured:
    """The four trainings, and what they show."""
    return measure_with(bench, setup_for(bench.steps, full=bench.full), workers=workers_for(bench.device))


def measure_with(bench: Bench, setup: Setup, workers: int) -> Measured:
    """Do the same with your own sizes."""
    train_all(DEMO_KINDS, setup, bench, workers)
    trainings = [judged(kind, setup, Run(bench.runs / kind.name)) for kind in DEMO_KINDS]
    numbers = [training.numbers for training in trainings]
    return Measured(
        trainings=tuple(trainings), claims=claims(setup, *numbers), said=said(*trainings), legend=legend(setup)
    )  # fmt: skip


def claims(setup: Setup, fp16: Numbers, bf16: Numbers, spectral: Numbers, layer: Numbers) -> tuple[Claim, ...]:
    """Return the experiment's claims, with the numbers of the four trainings."""
    return (*_of_fp16(setup, fp16, bf16), *_of_bf16(bf16), *_of_remedies(fp16, bf16, spectral, layer))


def _of_fp16(setup: Setup, fp16: Numbers, bf16: Numbers) -> tuple[Claim, ...]:
    return claims_of(
        f"""
        fp16-nan | fp16.nonfinite_steps | at least {setup.hard_batches} and at most {setup.hard_batches} steps
            | FP16: the gradients of every hard batch are not finite
        fp16-scale-falls | fp16.scale_before - fp16.scale_end | at least {setup.hard_batches} binades
            | FP16: the stock scaler halves its scale at each of them
        fp16-sound-before | fp16.lost_before | at most 0.05 of gradients | FP16: nearly no gradient was lost before
        fp16-gradients-zero | fp16.lost_after | at least 0.8 of gradients
            | FP16: most gradients are zero from then on
        fp16-stalls | fp16.loss_end / bf16.loss_end | at least 1.1 of BF16's loss
            | FP16: training stalls; its loss ends above that of BF16
        collapse-found | collapse_found | at least 0 and at most 20 steps after them
            | the alarm scale-collapse begins at the hard batches
        underflow-found | underflow_found | at least 0 and at most 50 steps after them
            | the alarm underflow-high follows
        """,
        bf16=bf16,
        fp16=fp16,
        collapse_found=fp16["scale-collapse_since"] - setup.hard_at,
        underflow_found=fp16["underflow-high_since"] - setup.hard_at,
    )


def _of_bf16(bf16: Numbers) -> tuple[Claim, ...]:
    return claims_of(
        """
        bf16-gradient-rises | bf16.gradient_rise | at least 1.2 times the usual norm
            | BF16, same batches: the gradient rises
        bf16-goes-on | bf16.progress | at least 0.05 of the loss before | BF16: then training goes on
        bf16-nothing-found | bf16.underflow_findings | at most 0 findings
            | BF16: no rule tells of underflow or of the scale
        """,
        bf16=bf16,
    )


def _of_remedies(fp16: Numbers, bf16: Numbers, spectral: Numbers, layer: Numbers) -> tuple[Claim, ...]:
    return claims_of(
        """
        spectral-no-batch-lost | spectral.batches_lost | at most 0 batches | SpectralScaler: no batch is lost
        spectral-recovers | spectral.scale_back_after | at most 80 steps | SpectralScaler: the scale is back soon
        spectral-goes-on | spectral.loss_end / fp16.loss_end | at most 0.92 of stock FP16's loss
            | SpectralScaler: training goes on
        layer-no-batch-lost | layer.batches_lost | at most 0 batches | LayerScaler: no batch is lost
        layer-scale-stays | layer.scale_before - layer.scale_lowest | at most 0 binades
            | LayerScaler: one layer's scale falls, the loss scale stays
        layer-gradients-whole | layer.lost_after | at most 0.05 of gradients
            | LayerScaler: nearly no gradient is lost
        layer-as-bf16 | layer.loss_end / bf16.loss_end | at most 1.1 of BF16's loss
            | LayerScaler: it ends where BF16 does
        layer-no-alarm | layer.alarms | at most 0 alarms | LayerScaler: nothing severe is found
        """,
        bf16=bf16,
        fp16=fp16,
        layer=layer,
        spectral=spectral,
    )


def legend(setup: Setup) -> str:
    """Return the legend of the table's columns."""
    return (
        f"lost: of the activation gradient values that FP16 held, at steps after the {setup.hard_batches} hard batches "
        f"(from {setup.hard_end}, repetitions apart). loss: the median of the last {TAIL} steps."
    )


def said(fp16: Training, bf16: Training, spectral: Training, layer: Training) -> tuple[str, ...]:
    """Return the findings, and the advice that the measurement gives."""
    works, wholly = spectral.good, layer.good and layer.numbers["lost_for_steps"] == 0
    found = (
        f"In FP16 the scale falls from 2^{fp16.numbers['scale_before']:.0f} to 2^{fp16.numbers['scale_end']:.0f}, and "
        f"{percent(fp16.numbers['lost_after'])} of the activation gradient values underflow from then on. No error, no "
        "NaN in a weight."
    )
    advice = {
        (True, True): "LayerScaler is best here: one layer's scale falls, all others keep theirs. SpectralScaler "
        f"recovers too, after {spectral.numbers['lost_for_steps']:.0f} steps of lost gradients. Or train in BF16.",
        (True, False): "SpectralScaler gets FP16 out; LayerScaler did not here. Or train in BF16.",
        (False, True): "LayerScaler keeps FP16 going; SpectralScaler did not here. Or train in BF16.",
        (False, False): "Neither scaler kept FP16 going here: train in BF16.",
    }[works, wholly]
    return (found, advice) if bf16.good else (found,)


def settings(bench: Bench) -> Mapping[str, object]:
    """Return the settings and the device of the demonstration."""
    return settings_of(setup_for(bench.steps, full=bench.full), bench.device)


DEMO = Experiment(
    name="demo",
    claim=(
        "Ten bad batches silently stall a small CLIP in FP16. In BF16, or with Plimsoll's scalers, it keeps learning."
    ),
    source="T3, T4",
    settings=settings,
    measure=measure,
)
