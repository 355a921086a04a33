"""Experiment `levels` (X5, X7): O0 to O3 on a small network with batch norm, and what the loss scale does there.

Every training of a seed begins with the same weights and sees the same pictures. Levels are compared by accuracy on
pictures held out, over several seeds; the loss scales by what FP16 loses of the gradients of activations, and by what
comes of it.

What FP16 needs to lose gradients is stated, not hidden: the training is one device's share of a step over 2,048 of
them, so that the loss is divided by that number (and SGD's learning rate multiplied, which changes nothing in FP32).
With a loss that is not divided this network trains in FP16 at any scale.
"""

import contextlib
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from plimsoll.emulate import OperationLists
from plimsoll.precision import Policy
from plimsoll.text import percent
from plimsoll_lab.bench import Bench
from plimsoll_lab.claim import Claim, claims as claims_of, of_rows
from plimsoll_lab.experiments.levels.analysis import accuracies, behind, judged
from plimsoll_lab.experiments.levels.operations import Dtypes, operations_at, told
from plimsoll_lab.experiments.levels.training import (
    CHANGED,
    KINDS,
    OF_LEVELS,
    SCALES,
    Kind,
    Setup,
    described,
    setup_for,
    to_task,
)
from plimsoll_lab.result import Measured
from plimsoll_lab.running.workers import carry_out, one_thread, workers_for
from plimsoll_lab.statistics import largest
from plimsoll_lab.study import Experiment

_EQUAL = 0.02  # of the pictures held out: two points
_TRAILS = 0.05
_MANY, _FEW = 0.5, 0.05  # of gradients lost
_EQUALS = ("amp-fp16", "amp-bf16", "fp16-master", "bf16-master", "bf16-stochastic", "bf16-kahan")
_TRAINED = "plimsoll_lab.experiments.levels.training:trained"
Accuracies = Mapping[str, Sequence[float]]
Numbers = Mapping[str, Mapping[str, float]]


def measure(bench: Bench) -> Measured:
    """All trainings, and what they show."""
    return measure_with(bench, setup_for(bench.steps, full=bench.full), workers=workers_for(bench.device))


def measure_with(bench: Bench, setup: Setup, workers: int) -> Measured:
    """Likewise, with sizes of one's own."""
    runs = {kind.name: runs_of(kind, bench, setup) for kind in KINDS}
    tasks = [
        to_task(kind, bench.seed + number, run, setup, bench.device, watched=kind.watched and number == 0)
        for kind in KINDS
        for number, run in enumerate(runs[kind.name])
    ]
    with contextlib.nullcontext() if bench.full else one_thread():
        carry_out(_TRAINED, tasks, workers=workers, progress=bench.progress)
    found = {name: accuracies(paths) for name, paths in runs.items()}
    watched = [kind for kind in KINDS if kind.watched]
    trainings = tuple(judged(kind, runs[kind.name][0], found["fp32"][0]) for kind in watched)
    numbers = {training.name: training.numbers for training in trainings}
    ran = {"O1": operations_at("amp-fp16"), "changed": operations_at("amp-fp16", CHANGED)}
    return Measured(trainings=trainings, claims=claims(found, numbers, ran), said=_said(found, numbers, ran))


def runs_of(kind: Kind, bench: Bench, setup: Setup) -> list[Path]:
    """The folder of each training of a kind: the first is `bench.seed`'s, and watched if the kind is."""
    seeds = setup.seeds if kind in OF_LEVELS else 1
    return [bench.runs / (kind.name if number == 0 else f"{kind.name}-seed-{number}") for number in range(seeds)]


def claims(found: Accuracies, numbers: Numbers, ran: Mapping[str, Dtypes]) -> tuple[Claim, ...]:
    """What the experiment says, of accuracies by kind, numbers of the watched trainings, and operations that ran."""
    return (
        *of_rows(_of_levels(found), "X5", "X7"),
        *of_rows(_of_formats(numbers, ran), "X5"),
        *of_rows(_of_scales(numbers), "X7"),
    )


def _of_levels(found: Accuracies) -> tuple[Claim, ...]:
    titles = {kind.name: kind.title for kind in OF_LEVELS}
    return tuple(
        Claim(f"{name}-as-fp32", f"{titles[name]}: as accurate as FP32",
              behind(found[name], found["fp32"]), at_most=_EQUAL, unit="of the pictures behind, at most")
        for name in _EQUALS
    )  # fmt: skip


def _of_formats(numbers: Numbers, ran: Mapping[str, Dtypes]) -> tuple[Claim, ...]:
    first, second, changed = numbers["amp-fp16"], numbers["fp16-master"], numbers["changed-lists"]
    return claims_of(
        f"""
        o1-by-the-lists | o1_by_the_lists | at most 0 operations in another
            | O1: every operation runs in the dtype that its list says
        o1-convolutions | o1_convolutions | at least 3 layers
            | O1: the outputs of all convolutions are recorded in FP16, weights in FP32
        o2-norms | o2_norms | at least 0 and at most 0 of its 6 parameters otherwise | O2: batch norm stays in FP32
        o2-weights | o2_weights | at least 0 and at most 0 of 5 otherwise | O2: all other weights are in FP16
        lists-changed | lists_changed | at least 3 layers
            | lists changed by the user: convolutions are recorded in FP32
        lists-obeyed | lists_obeyed | at most 0 operations in another
            | lists changed by the user: every operation runs in the dtype that they say
        lists-train | changed.behind_fp32 | at most {_TRAILS} of the pictures behind FP32
            | lists changed by the user: it trains
        """,
        changed=changed,
        o1_by_the_lists=astray(ran["O1"], Policy().operations),
        o1_convolutions=min(first.get("convolutions_fp16", 0.0), first.get("weights_fp32", 0.0)),
        o2_norms=second.get("norms_fp32", 0.0) - 6,
        o2_weights=5 - second.get("weights_fp16", 0.0),
        lists_changed=changed.get("convolutions_fp32", 0.0),
        lists_obeyed=astray(ran["changed"], CHANGED.operations),
    )


def _of_scales(numbers: Numbers) -> tuple[Claim, ...]:
    dynamic = numbers["amp-fp16"]
    by_scale = [numbers[kind.name]["lost_after"] for kind in SCALES]
    last = SCALES[-1].name
    return claims_of(
        f"""
        no-scale-loses | by_scale[0] | at least {_MANY} of gradients
            | no loss scale: FP16 loses most gradients of activations
        no-scale-trails | dynamic.accuracy - numbers['scale-1'].accuracy | at least {_TRAILS} of the pictures
            | no loss scale: the same training falls behind the dynamic scale's
        each-scale-saves | each_scale_saves | at most 0 of gradients more than the scale below, at most
            | each higher scale, from none to 2^15, loses fewer
        high-scale-saves | high_scale_saves | at most {_FEW} of gradients | a scale of 2^15 loses few
        dynamic-saves | dynamic.lost_after | at most {_FEW} of gradients
            | the dynamic scale finds its place: it loses few
        static-as-dynamic | static_as_dynamic | at most {_TRAILS} of the pictures behind it
            | a scale of 2^15 serves as well as the dynamic one
        """,
        by_scale=by_scale,
        dynamic=dynamic,
        numbers=numbers,
        each_scale_saves=largest(after - before for before, after in itertools.pairwise(by_scale)),
        high_scale_saves=by_scale[-1],
        static_as_dynamic=dynamic["accuracy"] - numbers[last]["accuracy"],
    )


# What an operation that reaches a kernel is called on the lists, where a composite one is listed.
_LISTED = {
    "addmm": "linear", "_log_softmax": "log_softmax", "nll_loss_forward": "nll_loss", "convolution": "conv2d",
}  # fmt: skip


def astray(ran: Dtypes, lists: OperationLists, low: torch.dtype = torch.float16) -> float:
    """How many operations ran in another dtype than their list's; one that is on none may run in any."""
    expected = {"low": frozenset({low}), "high": frozenset({torch.float32})}
    places = {name: lists.of(_LISTED.get(name, name)) for name in ran}
    return float(sum(place in expected and ran[name] != expected[place] for name, place in places.items()))


def _said(found: Accuracies, numbers: Numbers, ran: Mapping[str, Dtypes]) -> tuple[str, ...]:
    means = {name: sum(values) / len(values) for name, values in found.items()}
    levels = ", ".join(f"{name} {percent(means[name], 1)}" for name in (kind.name for kind in OF_LEVELS))
    pure = behind(found["fp16-pure"], found["fp32"])
    o3 = (
        f"O3 (fp16-pure) is behind FP32 by {percent(means['fp32'] - means['fp16-pure'], 1)} of the pictures in the "
        "mean, and "
        f"by {percent(pure, 1)} at most (95 %)."
    )
    scales = "; ".join(
        f"{kind.title.removeprefix('O1, ')}: {percent(numbers[kind.name]['lost_after'], 1)} lost, "
        f"{percent(numbers[kind.name]['accuracy'], 1)} right"
        for kind in SCALES
    )
    dynamic = numbers["amp-fp16"]
    scales = (
        f"Of the same training's gradients of activations, and pictures, {scales}; dynamic: "
        f"{percent(dynamic['lost_after'], 1)} lost, {percent(dynamic['accuracy'], 1)} right."
    )
    return (
        f"Of the pictures held out are classified right: {levels}.",
        o3,
        scales,
        f"At O1 there ran in {told(ran['O1'])}.",
        f"With conv2d and relu moved to the list high there ran in {told(ran['changed'])}.",
    )


def _settings(bench: Bench) -> Mapping[str, object]:
    return described(setup_for(bench.steps, full=bench.full), bench.device)


LEVELS = Experiment(
    name="levels",
    claim="O1 and O2 are as accurate as FP32 on a network with batch norm, if the loss is scaled; lists are a user's.",
    source="X5, X7",
    settings=_settings,
    measure=measure,
)
