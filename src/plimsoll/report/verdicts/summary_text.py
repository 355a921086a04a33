"""Names and formats of a summary's numbers.

The report, Markdown and the live page share them.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import cast

from plimsoll.diagnosis import EvidenceItem, Finding, shown
from plimsoll.diagnosis.finding import collection_words, how_many, layer_name, located
from plimsoll.diagnosis.rules.registry import rule_of
from plimsoll.report.verdicts.run_summary import LOSS_STEPS, Summary
from plimsoll.results import as_data
from plimsoll.runs import Event
from plimsoll.tensor_collections import COLLECTIONS
from plimsoll.text import capital, counted as several, number, percent, power, steps

STATES = {"alarm": "Alarm", "warning": "Warning", "healthy": "Healthy", "empty": "Empty", "info": "Info"}
_SPOTS = 60  # layers of a finding that the live page may list
_MOST_EXPONENT = 1000
_LONGEST = 300  # characters of a setting or a message


def shown_as(finding: Finding) -> dict[str, object]:
    """A finding in words, for the live page, which has no words of its own for it."""
    return {
        "title": heading(finding),
        "explanation": explanation(finding),
        "advice": advice(finding),
        "when": when(finding),
        "where": where(finding, 1),
        "evidence": [list(pair) for pair in evidence(finding)],
        "spots": [spot_value(finding, spot.value) for spot in finding.spots[:_SPOTS]],
        "names": [named(finding, spot.name) for spot in finding.spots[:_SPOTS]],
    }


def run_shown(summary: Summary, found: Sequence[Event]) -> dict[str, object]:
    """A run's facts, events and record in words, for the live page."""
    rows, words = events(found)
    return {
        "facts": list(facts(summary)),
        "events": rows,
        "events_words": words,
        "record": list(record(summary))[:100],
        "settings": settings(summary)[:100],
    }


def heading(finding: Finding) -> str:
    """Return a finding's heading: its rule's id, on every surface."""
    return finding.rule


def explanation(finding: Finding) -> str:
    """Return what its rule looks for, as a sentence. Empty if the rule is not known."""
    says = rule_of(finding).says
    return f"{capital(says)}." if says else ""


def advice(finding: Finding) -> str:
    """Return what to do about a finding. Empty if nothing is to be done."""
    return "" if finding.advice == "Nothing." else finding.advice


def when(finding: Finding) -> str:
    """Since when, and until when: "steps 301 to 310"."""
    return steps(finding.since_step, finding.until_step)


def where(finding: Finding, most: int = 3) -> str:
    """Return a finding's places: "parameter gradients of 15 of 35 layers: ..."."""
    if not finding.where:
        return ""
    kind = f"{collection_words(finding.collection)} of " if finding.collection else ""
    return kind + located(finding, most)


def evidence(finding: Finding) -> list[tuple[str, str]]:
    """Return a finding's evidence as labels and texts, related numbers as one."""
    rule, rest = rule_of(finding), dict(finding.evidence)
    pairs: list[tuple[str, str]] = []
    if "layers" in rest and finding.where:
        pairs.append(("Where", how_many(finding)))
        del rest["layers"]
        rest.pop("of_layers", None)
    if "from" in rest and "to" in rest:
        first, last = (written(finding, rule.item(name), rest.pop(name)) for name in ("from", "to"))
        binades = rest.pop("binades", None)
        fall = f", {number(float(binades))} powers of two" if binades is not None else ""
        pairs.append((rule.item("from").label, f"from {first} to {last}{fall}"))
    worst = rest.pop("worst", None)
    if worst is not None:
        name = next((name for name in rest if rule.item(name).of_worst), None)
        item = EvidenceItem() if name is None else rule.item(name)
        value = "" if name is None else f": {written(finding, item, rest.pop(name))}{item.of_worst}"
        pairs.append(("Worst", f"{cut(named(finding, str(worst)))}{value}"))
    for name, value in rest.items():
        item = rule.item(name)
        if value != 0 or not item.hide_zero:
            pairs.append((item.label or capital(name.replace("_", " ")), written(finding, item, value)))
    return pairs


def named(finding: Finding, name: str) -> str:
    """Return a location's name: the layer for parameter gradients, else the tensor."""
    return layer_name(name) if finding.collection == "gradients" else name


def spot_noun(finding: Finding) -> str:
    """Return what a finding's locations are."""
    return "layer" if finding.collection == "gradients" else "tensor"


def spot_heading(finding: Finding) -> str:
    """Return the heading of the numbers by which a rule judges locations."""
    return rule_of(finding).location_item.label


def spot_value(finding: Finding, value: float) -> str:
    """Return the number by which a rule judged a location. Empty if it has none."""
    if math.isnan(value):
        return ""
    item = rule_of(finding).location_item
    if item.unit == "share" and not 0 <= value <= 1:
        return number(value)
    return written(finding, item, value)


def written(finding: Finding, item: EvidenceItem, value: float | int | str) -> str:
    """Return a value of a finding as its unit says."""
    if isinstance(value, str):
        text = named(finding, value) if item.unit == "location" else _place(value) if item.unit == "place" else value
        return text.upper() if item.unit == "format" else cut(text)
    if item.unit == "share":
        return percent(value) if value >= 0 else "0 %"
    if item.unit == "exponent":
        # Beyond these exponents 2**value is no float.
        return power(2.0**value) if abs(value) < _MOST_EXPONENT else ""
    return power(value) if item.unit == "scale" else number(value)


def _place(text: str) -> str:
    """Return a location that a rule wrote as a collection and a name."""
    collection, _, name = text.partition(" ")
    # A place outside of all tensors is words already: "the loss, ...".
    return f"{collection_words(collection)} of {name}" if name and collection != "the" else text


def counted(summary: Summary) -> str:
    """Return the number of findings by severity: "2 alarms, 1 warning"."""
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
                f"{capital(collection_words(collection))} in",
                ", ".join(f.upper() for f in summary.formats[collection][:3]),
            )
    yield from _at_the_end(summary)
    if summary.created is not None:
        yield "Started", moment(summary.created)
    if summary.seconds is not None and summary.seconds >= 1:
        yield "Duration", duration(summary.seconds)
    yield "Record", "closed" if summary.closed else "not closed: still running, or killed"
    if "torch" in summary.versions:
        yield "torch", cut(summary.versions["torch"])


def _at_the_end(summary: Summary) -> Iterator[tuple[str, str]]:
    if summary.scale is not None:
        yield f"Loss scale at step {summary.last_step:,}", power(summary.scale)
    if summary.loss is not None:
        yield f"Loss at step {summary.last_step:,}", number(summary.loss)
    if summary.median_loss is not None:
        # NaN counts as Inf in the median: an Inf says that half of the losses or more are one of them.
        median = number(summary.median_loss) if math.isfinite(summary.median_loss) else "NaN or Inf"
        yield f"Median loss of the last {LOSS_STEPS} steps", median


def record(summary: Summary) -> Iterator[tuple[str, str]]:
    """Yield what was recorded, and by what."""
    for collection, series in summary.tensors.items():
        formats = ", ".join(f.upper() for f in summary.formats.get(collection, ()))
        yield (
            capital(cut(collection_words(collection))),
            f"{series:,} series{f' in {formats}' if formats else ''}",
        )
    if summary.scalars:
        yield "Scalars", cut(", ".join(shown(name) for name in summary.scalars))
    for package, version in summary.versions.items():
        yield cut(package), cut(version)
    for reason, lost in summary.dropped.items():
        yield f"Dropped: {cut(reason)}", f"{lost:,} records"


def settings(summary: Summary) -> list[tuple[str, str]]:
    """Return the writer's settings, each as one line."""
    return [(cut(str(name)), cut(_setting(as_data(value)))) for name, value in summary.settings.items()]


def _setting(value: object) -> str:
    """Return a setting as people write it: no braces, and a word for nothing."""
    if value is None or value in ([], {}):
        return "none"
    if isinstance(value, Mapping):
        entries = cast("Mapping[str, object]", value).items()
        return ", ".join(f"{name}: {_setting(entry)}" for name, entry in entries)
    if isinstance(value, list):
        return ", ".join(_setting(entry) for entry in cast("list[object]", value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return number(value) if isinstance(value, int | float) else str(value)


def events(found: Sequence[Event], most: int = 200) -> tuple[list[tuple[str, str, str, str, str]], str]:
    """Return events in text, the latest first, and words on those left out.

    Texts are step, kind, message, details and time.
    """
    some = list(found) if len(found) <= most else [*found[: most // 2], *found[-most // 2 :]]
    words = "" if len(found) <= most else f"The first and the last {most // 2} of {len(found):,} events."
    return [_event(event) for event in reversed(some)], words


def _event(event: Event) -> tuple[str, str, str, str, str]:
    details = ", ".join(f"{name}: {_detail(name, value)}" for name, value in event.details.items() if _says(value))
    return f"{event.step:,}", cut(event.kind, 40), cut(event.message), cut(details), moment(event.time)


def _says(value: object) -> bool:
    return value is not None and value not in ([], {})


def _detail(name: str, value: object) -> str:
    if isinstance(value, str | bool) or not isinstance(value, int | float):
        return value if isinstance(value, str) else json.dumps(as_data(value), ensure_ascii=False)
    return power(value) if name == "scale" else number(value)


def duration(seconds: float) -> str:
    """A length of time in its two largest units.

    >>> [duration(s) for s in (5, 61, 3600, 100000)]
    ['5 s', '1 min 1 s', '1 h', '1 d 3 h']
    """
    left, parts = int(seconds), list[str]()
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        number, left = divmod(left, size)
        if number:
            parts.append(f"{number} {unit}")
    return " ".join(parts[:2]) or "0 s"


def moment(unix_seconds: float) -> str:
    """A time as date and time of day, in UTC: a file does not know where it is read."""
    try:
        return f"{datetime.fromtimestamp(unix_seconds, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (ValueError, OverflowError, OSError):
        return "unknown"


def cut(text: str, most: int = _LONGEST) -> str:
    """Text as a line can show it: printable, and not endless."""
    clean = printable(text[: 2 * most])
    return clean if len(clean) <= most and len(text) <= 2 * most else f"{clean[:most]}..."


def printable(text: str) -> str:
    """Text with a question mark for each character that cannot be shown."""
    return "".join(c if c.isprintable() else "?" for c in text)
