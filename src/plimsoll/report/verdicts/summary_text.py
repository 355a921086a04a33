"""What a summary's numbers are called and how they are written: in the report, in Markdown and on the live page."""

import json
import math
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from plimsoll.diagnosis import RULES, Finding, shown
from plimsoll.diagnosis.wording import collection_words, how_many, layer_name, located
from plimsoll.report.verdicts.run_summary import LOSS_STEPS, Summary, jsonable
from plimsoll.runs import Event
from plimsoll.tensor_collections import COLLECTIONS
from plimsoll.text import counted as several, number, percent, power, steps

STATES = {"alarm": "Alarm", "warning": "Warning", "healthy": "Healthy", "empty": "Empty", "info": "Info"}
_SAYS = {rule.id: rule.says for rule in RULES}

# Numbers of the evidence that are shares, and those that are loss scales; the others are as they are.
_SHARES = frozenset({"worst_lost", "lost", "unmoved", "share", "confidence", "zeros", "in_top_binade", "below_epsilon",
                     "saturated", "flushed", "with_fewer_digits"})  # fmt: skip
_SHARES_OF = {"underflow-rising": frozenset({"from", "to", "per_1000_steps"})}
_SCALES = frozenset({"scale", "scale_that_serves"})
_SCALES_OF = {"scale-collapse": frozenset({"from", "to"}), "scale-oscillation": frozenset({"lowest", "highest"})}
_CHANGES = {"scale-collapse": "Loss scale", "underflow-rising": "Underflow rate"}
# Shares that are the worst layer's, with what they are of.
_WORST = {"worst_lost": " lost", "zeros": " zero", "unmoved": " unmoved", "in_top_binade": " in the top binade",
          "below_epsilon": " below epsilon", "times_the_usual_update": " times the usual update"}  # fmt: skip
_ONLY_IF_ANY = frozenset({"never_alive", "steps_with_loss", "steps_with_gradients"})  # counts that 0 adds nothing to
_LABELS = {
    "worst_lost": "Lost at most", "free_binades": "Free below overflow, in powers of two", "scale": "Loss scale",
    "back_at_step": "Back at step", "steps": "Steps with NaN or Inf", "steps_with_loss": "Of these with the loss",
    "steps_with_gradients": "Of these with gradients", "first_seen_in": "First seen in",
    "first_seen_at": "First seen at step", "never_alive": "Never alive", "usual": "Usual loss", "loss": "Loss",
    "level": "Called a spike above", "spikes": "Spikes", "first": "First",
    "needs_scale": "Scale that it needs", "bears_scale": "Scale that it overflows above",
    "missing_binades": "Missing powers of two", "per_1000_steps": "Growth in 1,000 steps",
    "at_step": "At step", "began_at": "Loss at the start", "now": "Median of the last losses",
}  # fmt: skip
_JUDGED_BY = {
    "underflow-high": "Lost", "underflow-rising": "Lost", "scale-low": "Lost", "second-moment-lost": "Lost",
    "updates-swallowed": "Unmoved", "saturated-fp8": "In the top binade", "epsilon-dominates": "Below epsilon",
    "structural-zeros": "Zeros", "no-single-scale": "Scale", "cast-saturates": "Saturated", "cast-flushes": "Lost",
    "codes-unused": "With fewer digits", "unit-drift": "Binade",
    "activation-growth": "Binades grown", "distribution-drift": "Binades", "spike-forerunner": "Times the usual",
}  # fmt: skip
_JUDGED_BY_SHARE = frozenset({"Lost", "Unmoved", "In the top binade", "Below epsilon", "Zeros", "Saturated",
                              "With fewer digits"})  # fmt: skip
_NAMES = frozenset({"first", "smallest_layer", "largest_layer"})  # evidence that is a location
_SPOTS = 60  # layers of a finding that the live page may list
_LONGEST = 300  # characters of a setting or a message


def shown_as(finding: Finding) -> dict[str, object]:
    """A finding in words, for the live page, which has no words of its own for it."""
    return {
        "title": heading(finding),
        "explanation": explanation(finding),
        "when": when(finding),
        "where": where(finding, 1),
        "evidence": [list(pair) for pair in evidence(finding)],
        "spots": [spot_value(finding, spot.value) for spot in finding.spots[:_SPOTS]],
        "names": [named(finding, spot.name) for spot in finding.spots[:_SPOTS]],
    }


def run_shown(summary: Summary, found: Sequence[Event]) -> dict[str, object]:
    """A run's facts, events and record in words, for the live page."""
    rows, told = events(found)
    return {
        "facts": list(facts(summary)),
        "events": rows,
        "events_words": told,
        "record": list(record(summary))[:100],
        "settings": settings(summary)[:100],
    }


def heading(finding: Finding) -> str:
    """What a finding is called: its rule's id, on every surface."""
    return finding.rule


def explanation(finding: Finding) -> str:
    """What its rule looks for, as a sentence; nothing for a rule that is not Plimsoll's."""
    says = _SAYS.get(finding.rule, "")
    return f"{sentence_case(says)}." if says else ""


def when(finding: Finding) -> str:
    """Since when, and until when: "steps 301 to 310"."""
    return steps(finding.since_step, finding.until_step)


def where(finding: Finding, most: int = 3) -> str:
    """What of which layers is meant: "parameter gradients of 15 of 35 layers: ..."."""
    if not finding.where:
        return ""
    kind = f"{collection_words(finding.collection)} of " if finding.collection else ""
    return kind + located(finding, most)


def evidence(finding: Finding) -> list[tuple[str, str]]:
    """The numbers behind a finding, named and written in words; numbers that belong together are one."""
    left = dict(finding.evidence)
    told: list[tuple[str, str]] = []
    if "layers" in left and finding.where:
        told.append(("Where", how_many(finding)))
        del left["layers"]
        left.pop("of_layers", None)
    if "from" in left and "to" in left:
        first, last = (_evident(finding.rule, name, left.pop(name)) for name in ("from", "to"))
        binades = left.pop("binades", None)
        fall = f", {number(float(binades))} powers of two" if binades is not None else ""
        told.append((_CHANGES.get(finding.rule, "Changed"), f"from {first} to {last}{fall}"))
    worst = left.pop("worst", None)
    if worst is not None:
        share = next((name for name in _WORST if name in left), None)
        value = f": {_evident(finding.rule, share, left.pop(share))}{_WORST[share]}" if share else ""
        told.append(("Worst", f"{cut(named(finding, str(worst)))}{value}"))
    for name in _NAMES & left.keys():
        left[name] = named(finding, str(left[name]))
    for name, value in left.items():
        if not (value == 0 and name in _ONLY_IF_ANY):
            told.append((_LABELS.get(name, sentence_case(name.replace("_", " "))), _evident(finding.rule, name, value)))
    return told


def named(finding: Finding, name: str) -> str:
    """What a finding's location is called: of parameters' gradients the layer, else the tensor."""
    return layer_name(name) if finding.collection == "gradients" else name


def spot_noun(finding: Finding) -> str:
    """What a finding's locations are."""
    return "layer" if finding.collection == "gradients" else "tensor"


def spot_heading(finding: Finding) -> str:
    """What the number is that a rule judged layers by."""
    return _JUDGED_BY.get(finding.rule, "Value")


def spot_value(finding: Finding, value: float) -> str:
    """The number that a rule judged a layer by; nothing where it has none."""
    if math.isnan(value):
        return ""
    if finding.rule == "no-single-scale":
        return power(2.0**value) if abs(value) < 1000 else ""
    return percent(value) if spot_heading(finding) in _JUDGED_BY_SHARE and 0 <= value <= 1 else number(value)


def _evident(rule: str, name: str, value: float | int | str) -> str:
    if isinstance(value, str):
        return value.upper() if name == "format" else cut(_place(value) if name == "first_seen_in" else value)
    if name in _SHARES or name in _SHARES_OF.get(rule, ()):
        return percent(value) if value >= 0 else "0 %"
    if name in _SCALES or name in _SCALES_OF.get(rule, ()):
        return power(value)
    return number(value)


def _place(text: str) -> str:
    """A place that a rule wrote as a collection and a name."""
    collection, _, name = text.partition(" ")
    return f"{collection_words(collection)} of {name}" if name else text


def counted(summary: Summary) -> str:
    """How many findings of each severity: "2 alarms, 1 warning"."""
    return ", ".join(several(summary.counts[s], s) for s in ("alarm", "warning") if summary.counts[s])


def facts(summary: Summary) -> Iterator[tuple[str, str]]:
    """The few facts that stand under a verdict."""
    if summary.last_step >= 0:
        yield "Steps", f"{summary.first_step:,} to {summary.last_step:,}"
    yield "Tensors", f"{sum(summary.tensors.values()):,}"
    if summary.samples:
        yield "Samples", f"{summary.samples:,}"
    if summary.world_size > 1 or summary.ranks != 1:
        yield "Ranks", f"{summary.ranks} of {summary.world_size}"
    for collection in (c.name for c in COLLECTIONS if c.format_in_summary):
        if summary.formats.get(collection):
            yield (
                f"{sentence_case(collection_words(collection))} in",
                ", ".join(f.upper() for f in summary.formats[collection][:3]),
            )
    yield from _at_the_end(summary)
    if summary.created is not None:
        yield "Started", moment(summary.created)
    if summary.seconds is not None and summary.seconds >= 1:
        yield "Duration", duration(summary.seconds)
    yield "Record", "closed" if summary.closed else "not closed: it goes on, or was killed"
    if "torch" in summary.versions:
        yield "torch", cut(summary.versions["torch"])


def _at_the_end(summary: Summary) -> Iterator[tuple[str, str]]:
    if summary.scale is not None:
        yield f"Loss scale at step {summary.last_step:,}", power(summary.scale)
    if summary.loss is not None:
        yield f"Loss at step {summary.last_step:,}", number(summary.loss)
    if summary.median_loss is not None:
        yield f"Median loss of the last {LOSS_STEPS} steps", number(summary.median_loss)


def record(summary: Summary) -> Iterator[tuple[str, str]]:
    """What was recorded, and by what."""
    for collection, series in summary.tensors.items():
        formats = ", ".join(f.upper() for f in summary.formats.get(collection, ()))
        yield (
            sentence_case(cut(collection_words(collection))),
            f"{series:,} series{f' in {formats}' if formats else ''}",
        )
    if summary.scalars:
        yield "Scalars", cut(", ".join(shown(name) for name in summary.scalars))
    for package, version in summary.versions.items():
        yield cut(package), cut(version)
    for reason, lost in summary.dropped.items():
        yield f"Dropped: {cut(reason)}", f"{lost:,} records"


def settings(summary: Summary) -> list[tuple[str, str]]:
    """The writer's settings, each as one line."""
    written = ((cut(str(name)), jsonable(value)) for name, value in summary.settings.items())
    return [(name, cut(v if isinstance(v, str) else json.dumps(v, ensure_ascii=False))) for name, v in written]


def events(found: Sequence[Event], most: int = 200) -> tuple[list[tuple[str, str, str, str, str]], str]:
    """Step, kind, message, details and time of events, the latest first, and what is said where some are left out."""
    kept = list(found) if len(found) <= most else [*found[: most // 2], *found[-most // 2 :]]
    told = "" if len(found) <= most else f"The first and the last {most // 2} of {len(found):,} events."
    return [_event(event) for event in reversed(kept)], told


def _event(event: Event) -> tuple[str, str, str, str, str]:
    details = ", ".join(f"{name}: {_detail(name, value)}" for name, value in event.details.items() if _says(value))
    return f"{event.step:,}", cut(event.kind, 40), cut(event.message), cut(details), moment(event.time)


def _says(value: object) -> bool:
    return value is not None and value not in ([], {})


def _detail(name: str, value: object) -> str:
    if isinstance(value, str | bool) or not isinstance(value, int | float):
        return value if isinstance(value, str) else json.dumps(jsonable(value), ensure_ascii=False)
    return power(value) if name == "scale" else number(value)


def duration(seconds: float) -> str:
    """A length of time in its two largest units.

    >>> [duration(s) for s in (5, 61, 3600, 100000)]
    ['5 s', '1 min 1 s', '1 h', '1 d 3 h']
    """
    left, told = int(seconds), list[str]()
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        number, left = divmod(left, size)
        if number:
            told.append(f"{number} {unit}")
    return " ".join(told[:2]) or "0 s"


def moment(unix_seconds: float) -> str:
    """A time as date and time of day, in UTC: a file does not know where it is read."""
    try:
        return f"{datetime.fromtimestamp(unix_seconds, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (ValueError, OverflowError, OSError):
        return "unknown"


def sentence_case(text: str) -> str:
    """The text with a capital first letter."""
    return text[:1].upper() + text[1:]


def cut(text: str, most: int = _LONGEST) -> str:
    """Text as a line can show it: printable, and not endless."""
    clean = printable(text[: 2 * most])
    return clean if len(clean) <= most and len(text) <= 2 * most else f"{clean[:most]}..."


def printable(text: str) -> str:
    """Text with a question mark for each character that cannot be shown."""
    return "".join(c if c.isprintable() else "?" for c in text)
