"""A run in few numbers, `summary`, and in one sentence, the verdict."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Literal, cast

import numpy as np

from plimsoll.diagnosis import SEVERITIES, Finding, FindingContext, Phrase, Rule, Severity, View, diagnose
from plimsoll.diagnosis.estimates.format_losses import Modules
from plimsoll.diagnosis.rules.registry import guarded, rule_of
from plimsoll.diagnosis.tables.cells import Floats
from plimsoll.diagnosis.view import Source, view_of
from plimsoll.results import JsonRecord
from plimsoll.runs import Run
from plimsoll.text import percent

# -- the verdict: a run in one sentence, made from its findings --------------------------------------------------------

# The most severe finding leads. Of several alarms a fatal one leads (NaN weights, a collapsed scale), and of several
# fatal ones the earliest, since it is the cause. The sentence says what happened, since when, what followed and what to
# do, as far as `LONGEST` allows.

State = Literal["healthy", "warning", "alarm", "empty"]
LONGEST = 200  # characters of a verdict, about two lines of a terminal

_BEGINS = {"alarm": "Problem", "warning": "Warning"}
_BEGINS_LIVE = {**_BEGINS, "alarm": "Stop"}  # only a run that still goes on can be stopped


def state_of(view: View, findings: Sequence[Finding]) -> State:
    """Return the severity in one word: "empty" without a record, not "healthy" if records are missing."""
    if view.last_step < 0:
        return "empty"
    severities: set[str] = {finding.severity for finding in findings}
    if view.run.missing:
        severities.add("warning")
    return "alarm" if "alarm" in severities else "warning" if "warning" in severities else "healthy"


def verdict(view: View, findings: Sequence[Finding]) -> str:
    """Return the run in a sentence of at most `LONGEST` characters.

    Equal findings give equal sentences.
    """
    state = state_of(view, findings)
    if state == "empty":
        return "Nothing was recorded."
    if state == "healthy":
        return _healthy(view, findings)
    if not any(finding.severity in ("alarm", "warning") for finding in findings):
        return _fitted("Warning", Phrase(what="records of this run are missing"), "")
    lead = leading(findings, view.last_step)
    begins = _BEGINS_LIVE if _is_live(view) else _BEGINS
    return _fitted(begins[state], phrase_of(lead, view, findings), _consequence(lead, findings, view.last_step))


def phrase_of(finding: Finding, view: View, findings: Sequence[Finding]) -> Phrase:
    """Return a finding as part of a sentence, in the light of all findings of the run."""
    rule, context = rule_of(finding), FindingContext(finding=finding, view=view, findings=findings)
    return guarded(rule, lambda: rule.phrase(context), Rule.phrase(rule, context))


def _is_live(view: View) -> bool:
    return view.until is None and not view.run.closed and view.ending is None


def leading(findings: Sequence[Finding], last_step: int) -> Finding:
    """Return the finding that the verdict is about."""
    severe = [f for f in findings if f.severity == "alarm"] or [f for f in findings if f.severity == "warning"]
    fatal = [f for f in severe if is_fatal(f, last_step)]
    candidates = fatal or [f for f in severe if not rule_of(f).is_secondary] or severe
    return min(candidates, key=lambda finding: finding.since_step)


def leading_first(findings: Sequence[Finding], last_step: int) -> tuple[Finding, ...]:
    """Return the findings in display order: the verdict's, then the others."""
    if all(finding.severity == "info" for finding in findings):
        return tuple(findings)
    lead = leading(findings, last_step)
    return (lead, *(finding for finding in findings if finding is not lead))


def is_fatal(finding: Finding, last_step: int) -> bool:
    """Return whether a training does not recover from a finding by itself."""
    rule = rule_of(finding)
    return finding.severity == "alarm" and guarded(rule, lambda: rule.is_fatal(finding, last_step), False)


def _consequence(lead: Finding, findings: Sequence[Finding], last_step: int) -> str:
    """Return the words of the first alarm that followed the leading one and has any."""
    later = (f for f in findings if f is not lead and f.severity == "alarm" and f.since_step >= lead.since_step)
    words = (guarded(r := rule_of(f), lambda r=r, f=f: r.consequence(f, last_step), "") for f in later)
    return next((text for text in words if text), "")


def _fitted(begins: str, phrase: Phrase, followed: str) -> str:
    """Return as much as fits: what and when always, then remedy, then what followed."""
    head = f"{begins}: {phrase.what}"
    remedy = f"; {phrase.remedy}" if phrase.remedy else ""
    for parts in ((phrase.effect, followed), (followed,), (phrase.effect,), ()):
        middle = "".join(f", {part}" for part in parts if part)
        if len(head + middle + remedy) < LONGEST:
            return f"{head}{middle}{remedy}."
    return f"{head}."


def _healthy(view: View, findings: Sequence[Finding]) -> str:
    noted = [f for f in findings if rule_of(f).is_noted]
    begin = f"Healthy through step {view.last_step:,}"
    if noted:
        return f"{begin}, but note: {phrase_of(noted[0], view, findings).what}."
    return f"{begin}: {_underflow(view)}."


def _underflow(view: View) -> str:
    """Return the share of gradients that underflowed, in the layer that lost most."""
    narrow = view.narrow("gradients")
    if narrow is None:
        return "no findings, but gradients were not recorded"
    modules = Modules.of(narrow.cells)
    lost = np.nansum(modules.total(narrow.lost_of_cell), axis=1)
    would_be = lost + np.nansum(modules.total(narrow.cells.total(narrow.cells.nonzero)), axis=1)
    worst = float(np.max(lost[would_be > 0] / would_be[would_be > 0], initial=0.0))
    if worst == 0:
        return "no parameter gradients lost to underflow"
    return f"at most {percent(worst)} of any layer's parameter gradients lost to underflow"


# -- the summary -------------------------------------------------------------------------------------------------------

LOSS_STEPS = 60  # of the median loss at the end of a run


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary(JsonRecord):
    """A run in few words and numbers.

    - `verdict`: one sentence; `state`: it in one word; `counts`: how many findings of each severity; `findings`:
      first the one that the verdict is about, then the most severe.
    - `name`, `path`: of the run's folder. `first_step` and `last_step` that anything was recorded at (-1: none);
      `samples`: at how many steps spectra were.
    - `tensors`: how many series, by collection; `formats`: those they were held in, by collection; `scalars`.
    - `ranks` of `world_size`; `closed`: the writers ended in order; `created`, in Unix seconds, and `seconds` from then
      to the end, both None where the manifest does not say.
    - `loss` and `scale`: the last ones recorded, None for none; `median_loss`: of the last 60 steps.
    - `versions` and `settings` of the writer; `problems` and `dropped`: what of the record is missing.
    """

    verdict: str
    state: State
    counts: Mapping[Severity, int]
    name: str
    path: str
    first_step: int
    last_step: int
    samples: int
    tensors: Mapping[str, int]
    formats: Mapping[str, tuple[str, ...]]
    scalars: tuple[str, ...]
    ranks: int
    world_size: int
    closed: bool
    created: float | None
    seconds: float | None
    loss: float | None
    median_loss: float | None
    scale: float | None
    versions: Mapping[str, str]
    settings: Mapping[str, object]
    problems: tuple[str, ...]
    dropped: Mapping[str, int]
    findings: tuple[Finding, ...]


def summary(run: Source, findings: Sequence[Finding] | None = None, *, until: int | None = None) -> Summary:
    """Facts of a run, its folder, or a `View` of it.

    - `findings`: those of `diagnose`, unless others are given, found with other rules or thresholds.
    - `until`: the last step that counts; not with a `View`, which has its own.

    Raises `RunError` for a folder that holds no run.
    """
    view = view_of(run, until, "summary")
    ordered = leading_first(diagnose(view) if findings is None else findings, view.last_step)
    recorded, begun = view.run, started_at(view.run)
    return Summary(
        verdict=verdict(view, ordered),
        state=state_of(view, ordered),
        counts={severity: sum(f.severity == severity for f in ordered) for severity in reversed(SEVERITIES)},
        findings=ordered,
        name=recorded.path.name,
        path=str(recorded.path),
        formats={collection: formats_of(recorded, collection) for collection in recorded.tensors},
        world_size=recorded.world_size,
        created=begun,
        versions={str(k): str(v) for k, v in _mapping(recorded.manifest.get("versions")).items()},
        settings=recorded.settings,
        **_facts_of_now(view, begun),
    )


def renewed(found: Summary, view: View) -> Summary:
    """Return a summary with the facts of now, where its verdict is a few steps old."""
    return replace(found, **_facts_of_now(view, found.created))


def _facts_of_now(view: View, begun: float | None) -> dict[str, Any]:
    recorded = view.run
    steps = [step for step in recorded.steps if view.until is None or step <= view.until]
    begins = [step for step in recorded.scalar_steps if view.until is None or step <= view.until]
    return {
        "first_step": min([*begins[:1], *steps[:1]], default=-1),
        "last_step": view.last_step,
        "samples": len(steps),
        "tensors": {collection: len(names) for collection, names in recorded.tensors.items()},
        "scalars": tuple(recorded.scalar_names),
        "ranks": len(recorded.ranks),
        "closed": recorded.closed,
        "seconds": seconds_of(recorded, begun),
        "loss": _last(view, "loss"),
        "median_loss": _median_loss(view.scalar("loss")[1]),
        "scale": _last(view, "scale"),
        "problems": tuple(recorded.problems),
        "dropped": recorded.dropped,
    }


def _median_loss(losses: Floats) -> float | None:
    """Return the median of the last 60 losses, NaN as Inf; None without losses."""
    last = losses[-LOSS_STEPS:]
    return float(np.median(np.where(np.isfinite(last), last, np.inf))) if len(last) else None


def started_at(run: Run) -> float | None:
    """Return the recording's start in Unix seconds; None if the manifest lacks it."""
    return unix_seconds(run.manifest.get("created"))


def formats_of(run: Run, collection: str) -> tuple[str, ...]:
    """Return a collection's formats by the manifest, the most frequent first."""
    series = _mapping(_mapping(run.manifest.get("tensors")).get(collection))
    formats = [str(_mapping(entry).get("format", "")) for entry in series.values()]
    return tuple(sorted({f for f in formats if f}, key=lambda f: (-formats.count(f), f)))


def _last(view: View, name: str) -> float | None:
    values = view.scalar(name)[1]
    return float(values[-1]) if len(values) else None


def unix_seconds(value: object) -> float | None:
    """Return a manifest's time in Unix seconds. None: it is no time."""
    try:
        return datetime.fromisoformat(value).timestamp() if isinstance(value, str) else None
    except (ValueError, OverflowError, OSError):
        return None


def seconds_of(run: Run, begun: float | None) -> float | None:
    """Return the seconds from the start to the end, or last event; None if unknown."""
    if begun is None:
        return None
    ended = unix_seconds(run.manifest.get("closed"))
    if ended is None:
        ended = max((event.time for event in run.events()), default=math.nan)
    return ended - begun if ended >= begun else None


def _mapping(value: object) -> Mapping[object, object]:
    return cast("Mapping[object, object]", value) if isinstance(value, Mapping) else {}
