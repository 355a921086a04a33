"""Reasons for a module's format, and remarks on a whole plan."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from plimsoll.diagnosis.finding import grouped
from plimsoll.diagnosis.planning.format_choice import Judge, Verdict
from plimsoll.diagnosis.planning.loss_scale import Scales
from plimsoll.diagnosis.planning.modules import Module
from plimsoll.diagnosis.planning.series_windows import Collection
from plimsoll.formats import BF16, Role, get
from plimsoll.text import percent

_NAMED = 3  # groups of modules that never computed
_ENOUGH = 100  # binades: of tensors that were zero throughout
Losses = Mapping[str, tuple[float, float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatChoice:
    """Decision on one module.

    Attributes:
        why_not: Why the target was not possible, if its format is the fallback.
        scales: Its scales, as shifts.
    """

    module: Module
    forward: str
    backward: str
    verdict: Verdict
    why_not: str | None = None
    scales: Mapping[Role, int] = field(default_factory=dict["Role", int])


def note(judge: Judge, choice: FormatChoice, predicted: Losses) -> str:
    """Why the module has its format, and what it loses in it."""
    worst = max(predicted, key=lambda role: predicted[role][2], default=None)
    loses = "loses nothing"
    if worst is not None and predicted[worst][2] > 0:
        loses = f"loses at most {percent(predicted[worst][2])} of its {worst}"
    if choice.why_not is not None:
        return f"{choice.why_not}. {choice.forward.upper()} {loses}" if predicted else choice.why_not
    window = choice.verdict.gradients
    needs = f"; needs a loss scale of 2^{window.low} to 2^{window.high - judge.margin}" if window.bounded else ""
    return f"{loses}{needs}{_left(judge, choice)}"


def _left(judge: Judge, choice: FormatChoice) -> str:
    """Return the headroom for steps between samples, if it is larger than the margin."""
    if not judge.follows:
        return ""
    rooms = [f"{role} 2^{k}" for role, k in choice.verdict.spare.items() if judge.margin < k < _ENOUGH]
    return f"; room above for steps not recorded: {', '.join(rooms)}" if rooms else ""


def remarks(judge: Judge, chosen: Sequence[FormatChoice], scales: Scales | None, idle: Sequence[str]) -> list[str]:
    """Return the plan in one sentence, and remarks on missing data.

    Args:
        judge: The judge of the run.
        chosen: The decisions.
        scales: The loss scale.
        idle: Modules that never computed.
    """
    found = [_summary(judge, chosen)]
    if idle:
        these = "these modules" if len(idle) > 1 else "this module"
        found.append(
            f"Not counted, as {these} computed nothing that was recorded (a copy, such as an EMA, or unused): "
            f"{grouped(idle, _NAMED)}."
        )
    if scales is not None and scales.layers:
        found.append("No single loss scale works for all modules in FP16: each module has its own.")
    for name, collection in judge.collections.items():
        words = name.replace("_", " ")
        if collection is None:
            found.append(f"No {words} were recorded: what depends on them counts as unsafe.")
        else:
            found += _of_collection(words, collection)
    return found


def _summary(judge: Judge, chosen: Sequence[FormatChoice]) -> str:
    pairs: dict[str, int] = {}
    for choice in chosen:
        name = "/".join(dict.fromkeys((choice.forward, choice.backward))).upper()
        pairs[name] = pairs.get(name, 0) + 1
    listed = ", ".join(f"{count} in {name}" for name, count in sorted(pairs.items(), key=lambda pair: -pair[1]))
    return f"{len(chosen)} module{'s' * (len(chosen) > 1)}: {listed}{_cost(judge, chosen)}."


def _cost(judge: Judge, chosen: Sequence[FormatChoice]) -> str:
    values = [judge.values(choice.module) for choice in chosen]
    total = sum(forward + backward for forward, backward in values)
    if not total:
        return ""
    bits = [get(c.forward).bits * f + get(c.backward).bits * b for c, (f, b) in zip(chosen, values, strict=True)]
    if sum(bits) == BF16.bits * total:
        return f"; {BF16.bits} bits a value"
    return f"; {sum(bits) / total:.3g} bits a value on average, against {BF16.bits} in BF16"


def _of_collection(words: str, collection: Collection) -> list[str]:
    found: list[str] = []
    if collection.hidden.any():
        held: list[int] = np.unique(collection.cells.format[collection.hidden > 0]).tolist()
        names = ", ".join(collection.cells.formats[i].upper() for i in held)
        found.append(f"Zeros of {words} recorded in {names} may be values that it lost: they count as lost.")
    steps = collection.nonfinite_steps(collection.cells.names)
    if steps:
        found.append(f"NaN or Inf among {words} at {steps:,} step{'s' * (steps > 1)}: these values are not judged.")
    return found
