"""Experiment `clip` (T3, T4, T7): a CLIP's end in FP16, and remedies that work.

The four of `demo`, and on the same weights and batches:

- *Of the stock scaler*: a higher initial scale, a shorter growth interval, both. Published as not helping.
- *Of the scales*: the published rule for layers; a scale for each parameter, and for each of its elements.
- *No batch is hard*, for longer: gradients shrink as the model learns, and the stock scale doubles each 2,000 steps.
- *Every batch is hard*: then the gradient that comes back to the patches' embedding spans more than FP16 in every
  step, as T7 says of CLIP. With ten hard batches it does so in these alone, and a higher scale outlasts them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from plimsoll.diagnosis import View, diagnose
from plimsoll.runs import Run
from plimsoll.text import percent
from plimsoll_lab.bench import Bench
from plimsoll_lab.experiments.clip.demo import LOST, TAIL, claims as claims_of_demo, judged, of_parameters, settings
from plimsoll_lab.experiments.clip.training import ALL_KINDS, DEMO_KINDS, Kind, Setup, setup_for, train_all
from plimsoll_lab.result import Claim, Measured, Training, claims as claims_of, of_rows
from plimsoll_lab.running.workers import workers_for
from plimsoll_lab.statistics import columns, lost_at, mean, median, share_lost
from plimsoll_lab.study import Experiment

AT_ONCE = 40  # steps, or half of a training that is shorter than twice that


def judged_never(kind: Kind, setup: Setup, run: Run) -> Training:
    """Judge T3's second half: losses of shrinking gradients, and if the scale follows."""
    view = View(run)
    findings = tuple(diagnose(view))
    steps, lost = lost_at(view)
    (_, loss), (_, scale), (_, norms) = view.scalar("loss"), view.scalar("scale"), view.scalar("grad_norm")
    total = setup.steps_of(kind)
    early = (steps >= setup.warmup) & (steps < total // 6)
    reported = [f.since_step for f in findings if f.rule.startswith("underflow") and f.severity != "info"]
    numbers = {
        "lost_before": mean(lost[early]),
        "lost_after": share_lost(view, total * 3 // 4),
        "loss_end": median(loss[-TAIL:]),
        "scale_before": float(np.log2(scale[0])),
        "scale_end": float(np.log2(scale[-1])),
        "gradient_fell_binades": math.log2(median(norms[setup.warmup : total // 6]) / median(norms[total * 3 // 4 :])),
        "underflow_since": float(min(reported)) if reported else math.nan,
    }
    good = numbers["lost_after"] <= LOST
    return Training(
        name=kind.name, title=kind.title, run=run.path, numbers=numbers, good=good, findings=findings,
        outcome="gradients whole" if good else f"{percent(numbers['lost_after'])} of activation gradient values lost",
        series=columns(np.arange(len(loss)), loss, median), series_of="loss",
    )  # fmt: skip


def judged_always(kind: Kind, _setup: Setup, run: Run) -> Training:
    """T7: what the scale does where every batch overflows at any, and what is lost."""
    view = View(run)
    steps, lost = lost_at(view)
    (_, loss), (scaled_at, scale) = view.scalar("loss"), view.scalar("scale")
    numbers = {
        "lost_after": share_lost(view, view.last_step // 2),
        "lost_end": mean(lost[steps > view.last_step - TAIL]),
        "loss_end": median(loss[-TAIL:]),
    } | of_parameters(view)  # fmt: skip
    if len(scale):
        exponents, soon = np.log2(scale), min(AT_ONCE, view.last_step // 2)
        numbers["scale_before"], numbers["scale_end"] = float(exponents[0]), float(exponents[-1])
        numbers["fell_at_once"] = float(exponents[0] - exponents[scaled_at < soon].min())
        numbers["highest_later"] = float(exponents[scaled_at >= soon].max())
    good = numbers["lost_after"] <= LOST
    return Training(
        name=kind.name, title=kind.title, run=run.path, numbers=numbers, good=good, findings=tuple(diagnose(view)),
        outcome="trains on" if good else "gradients stay zero",
        series=columns(np.arange(len(loss)), loss, median), series_of="loss",
    )  # fmt: skip


_SAMPLES = 8  # that are looked at outside of hard batches, spread over the training


def spans(run: Run, setup: Setup, *, always: bool = False) -> dict[str, float]:
    """Return how many layers span FP16 at hard batches and at others."""
    recorded = _sampled(run)
    hard = [step for step in recorded if always or setup.hard_at <= step < setup.hard_end]
    others = [step for step in recorded if step not in hard]
    at_hard, at_others = _counted(run, hard), _counted(run, others[:: max(len(others) // _SAMPLES, 1)])
    return {
        "spanning_hard": at_hard[0], "spanning_hard_share": at_hard[1], "span_hard_binades": at_hard[2],
        "spanning_others": at_others[0], "span_others_binades": at_others[2],
    }  # fmt: skip


def _sampled(run: Run) -> list[int]:
    name = run.tensors["activation_gradients"][0]
    return [int(step) for step in run.series("activation_gradients", name, "count")[0]]


def _counted(run: Run, steps: Sequence[int]) -> tuple[float, float, float]:
    """Return the most layers that span FP16, the share of samples, the most binades."""
    if not steps:
        return math.nan, math.nan, math.nan
    layers, widest = [0] * len(steps), 0.0
    for number, step in enumerate(steps):
        for _, _, _, held in run.spectra("activation_gradients", steps=slice(step, step + 1)):
            if held.nonzero:
                layers[number] += held.window("fp16") is None
                widest = max(widest, math.log2(held.absmax / held.absmin))
    return float(max(layers)), sum(count > 0 for count in layers) / len(layers), widest


Numbers = Mapping[str, Mapping[str, float]]

_MOST, _NEARLY_NONE, _PARTED = 0.8, 0.05, 1.1


def claims(setup: Setup, numbers: Numbers) -> tuple[Claim, ...]:
    """All of them, from the numbers of each training by its name."""
    return (
        *of_rows(claims_of_demo(setup, *(numbers[kind.name] for kind in DEMO_KINDS)), "T3", "T4"),
        *of_rows((*_of_burst(setup, numbers), *_of_scales(setup, numbers)), "T7"),
        *of_rows(_of_never(numbers["fp16-never-hard"]), "T3"),
        *of_rows((*_of_spans(numbers), *_of_always(numbers)), "T7"),
    )


def _of_burst(setup: Setup, numbers: Numbers) -> tuple[Claim, ...]:
    """Return claims on the stock scaler otherwise set.

    Outside of the ten hard batches no layer spans FP16: 2^24 outlasts them.
    """
    falls = tuple(
        Claim(f"{name}-falls", f"{title}: the scale falls at each hard batch all the same",
              numbers[f"fp16-{name}"]["scale_fell"], at_least=setup.hard_batches, unit="binades")
        for name, title in (
            ("high", "FP16 from 2^24"), ("short", "FP16, doubles every 100 steps"), ("both", "FP16 with both of these"),
        )
    )  # fmt: skip
    return (
        *falls,
        Claim("short-still-lost", "FP16, doubles every 100 steps: too many gradients are lost after them",
              numbers["fp16-short"]["lost_after"], at_least=_NEARLY_NONE, unit="of gradients"),
        Claim("high-outlasts", "FP16 from 2^24: ten halvings are too few to stop it; it ends where BF16 does",
              numbers["fp16-high"]["loss_end"] / numbers["bf16"]["loss_end"], at_most=_PARTED, unit="of BF16's loss"),
    )  # fmt: skip


def _of_scales(setup: Setup, numbers: Numbers) -> tuple[Claim, ...]:
    """Return claims on scales for layers, parameters, elements in hard batches."""
    bf16, zhao = numbers["bf16"], numbers["fp16-zhao"]
    found = claims_of(
        f"""
        zhao-falls | zhao.scale_fell | at least {setup.hard_batches} binades
            | The published rule for layers raises scales only: the loss scale falls all the same
        zhao-not-enough | zhao.lost_after | at least {_NEARLY_NONE} of gradients
            | The published rule for layers: too many gradients are lost after them
        """,
        zhao=zhao,
    )
    for name, title in (("parameter", "A scale per parameter"), ("element", "A scale per element")):
        these = numbers[f"fp16-{name}"]
        found += claims_of(
            f"""
            {name}-no-batch-lost | these.batches_lost | at most 0 batches | {title}: no batch is lost
            {name}-gradients-whole | these.lost_after | at most {_NEARLY_NONE} of gradients
                | {title}: nearly no gradient is lost
            {name}-as-bf16 | these.loss_end / bf16.loss_end | at most {_PARTED} of BF16's loss
                | {title}: it ends where BF16 does
            {name}-one-sits-out | these.sat_out | at least 1 and at most {setup.hard_batches} parameter steps
                | {title}: one parameter sits out, in hard batches only
            """,
            bf16=bf16,
            these=these,
        )
    return tuple(found)


def _of_never(these: Mapping[str, float]) -> tuple[Claim, ...]:
    return claims_of(
        f"""
        never-sound-at-first | these.lost_before | at most {_NEARLY_NONE} of gradients
            | FP16 without hard batches: nearly no gradient is lost at first
        never-often-zero | these.lost_after | at least 0.1 of gradients
            | FP16 without hard batches: later gradients are often zero
        never-scale-stays | these.gradient_fell_binades - (these.scale_end - these.scale_before)
            | at least 1 binades
            | FP16 without hard batches: gradients shrink by more than the scale has grown
        never-told | these.underflow_since | at least 0 the step it began at
            | FP16 without hard batches: a rule tells of the underflow
        """,
        these=these,
    )


def _of_spans(numbers: Numbers) -> tuple[Claim, ...]:
    burst, always = numbers["bf16"], numbers["bf16-always-hard"]
    return claims_of(
        f"""
        hard-spans | burst.spanning_hard | at least 1 layers
            | at hard batches a single layer's gradient spans more than FP16
        others-do-not | burst.spanning_others | at most 0 layers | outside of the ten hard batches none does
        always-spans | always.spanning_hard_share | at least {_MOST} of samples
            | where every batch is hard one does all along, as in the published CLIP
        """,
        always=always,
        burst=burst,
    )


def _of_always(numbers: Numbers) -> tuple[Claim, ...]:
    """Every batch is hard: neither a higher scale nor a shorter interval helps."""
    bf16, both = numbers["bf16-always-hard"], numbers["fp16-both-always-hard"]
    layer, parameter = numbers["fp16-layer-always-hard"], numbers["fp16-parameter-always-hard"]
    return claims_of(
        f"""
        always-falls-at-once | both.scale_before - both.fell_at_once | at most 15 its exponent
            | all batches hard, from 2^24: the scale falls below 2^16 within 40 steps
        always-stays-down | both.highest_later | at most 15 its exponent
            | all batches hard, doubling every 100 steps: it does not come back
        always-gradients-zero | both.lost_after | at least {_MOST} of gradients
            | all batches hard, both of these: most gradients are zero
        always-stalls | both.loss_end / bf16.loss_end | at least {_PARTED} of BF16's loss
            | all batches hard, both of these: training stalls
        always-layer | layer.loss_end / bf16.loss_end | at most {_PARTED} of BF16's loss
            | all batches hard, LayerScaler: it ends where BF16 does
        always-parameter | parameter.loss_end / bf16.loss_end | at most {_PARTED} of BF16's loss
            | all batches hard, a scale per parameter: it ends where BF16 does
        """,
        bf16=bf16,
        both=both,
        layer=layer,
        parameter=parameter,
    )


_SOUND = 0.05  # of gradients lost (T6)
_BURST = {
    "fp16": "the stock scaler", "fp16-high": "2^24 to begin with", "fp16-short": "doubling every 100 steps",
    "fp16-both": "both of these", "fp16-spectral": "SpectralScaler", "fp16-layer": "LayerScaler",
    "fp16-zhao": "the published layer rule", "fp16-parameter": "a scale per parameter",
    "fp16-element": "a scale per element",
}  # fmt: skip
_ALWAYS = {
    "fp16-both-always-hard": "2^24 and doubling every 100 steps", "fp16-layer-always-hard": "LayerScaler",
    "fp16-parameter-always-hard": "a scale per parameter",
}  # fmt: skip


def said(numbers: Numbers) -> tuple[str, ...]:
    """Return the findings in sentences."""
    return (
        _serving("After ten hard batches", _BURST, numbers, "bf16"),
        _serving("Where all batches are hard", _ALWAYS, numbers, "bf16-always-hard"),
        _never(numbers["fp16-never-hard"]),
        _cost(numbers["fp16-parameter"], numbers["fp16-element"]),
    )


def _never(these: Mapping[str, float]) -> str:
    grown = these["scale_end"] - these["scale_before"]
    return (
        f"Without hard batches FP16 with the stock scaler loses {percent(these['lost_before'], 1)} of gradients at "
        "first and "
        f"{percent(these['lost_after'], 0)} in the end: they shrink by {these['gradient_fell_binades']:.1f} binades, "
        "its scale "
        f"grows by {grown:.0f}."
    )


def _cost(parameter: Mapping[str, float], element: Mapping[str, float]) -> str:
    return (
        f"A scale per parameter takes {parameter['scale_bytes']:.0f} bytes, one per element "
        f"{element['scale_bytes']:,.0f}: {element['scale_bytes_per_weight']:.1f} for each weight."
    )


def _serving(where: str, names: Mapping[str, str], numbers: Numbers, bf16: str) -> str:
    """Return which kinds end with whole gradients and within 10 % of BF16.

    They come in the order of their loss, then those that do not.
    """
    ratio = {name: numbers[name]["loss_end"] / numbers[bf16]["loss_end"] for name in names}
    order = sorted(ratio, key=lambda name: ratio[name])
    whole = [name for name in order if ratio[name] <= _PARTED and numbers[name]["lost_end"] <= _SOUND]
    serve = ", ".join(f"{names[name]} ({ratio[name]:.2f} of BF16's loss)" for name in whole)
    rest = ", ".join(
        f"{names[name]} ({ratio[name]:.2f}, {percent(numbers[name]['lost_end'], 0)} of gradients lost)"
        for name in order
        if name not in whole
    )
    return f"{where} this works: {serve or 'nothing but BF16'}." + (f" This does not: {rest}." if rest else "")


_JUDGES = {"burst": judged, "never": judged_never, "always": judged_always}


def measure(bench: Bench) -> Measured:
    """All trainings, and what they show."""
    return measure_with(bench, setup_for(bench.steps, full=bench.full), workers=workers_for(bench.device))


def measure_with(bench: Bench, setup: Setup, workers: int) -> Measured:
    """Do the same with your own sizes."""
    kinds = list(ALL_KINDS.values())
    train_all(kinds, setup, bench, workers)
    trainings = tuple(_judged(kind, setup, bench) for kind in kinds)
    numbers = {training.name: training.numbers for training in trainings}
    return Measured(trainings=trainings, claims=claims(setup, numbers), said=said(numbers))


def _judged(kind: Kind, setup: Setup, bench: Bench) -> Training:
    run = Run(bench.runs / kind.name)
    found = _JUDGES[kind.hard](kind, setup, run)
    if kind.precision != "amp-bf16":
        return found
    return replace(found, numbers={**found.numbers, **spans(run, setup, always=kind.hard == "always")})


CLIP = Experiment(
    name="clip",
    claim="Ten bad batches silently stall a small CLIP in FP16. Where gradients span all of FP16 within a layer, "
    "neither a higher scale nor a shorter interval helps, and a scale for each layer or parameter does.",
    source="T3, T4, T7",
    settings=settings,
    measure=measure,
)
