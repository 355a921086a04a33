"""A run in few numbers: `summary`."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, cast

import numpy as np

from plimsoll.checks import items
from plimsoll.diagnosis import SEVERITIES, Finding, Severity, View, diagnose
from plimsoll.diagnosis.tables.cells import Floats
from plimsoll.diagnosis.view import Source, view_of
from plimsoll.report.verdicts.verdict_sentence import State, leading_first, state_of, verdict
from plimsoll.results import JsonRecord
from plimsoll.runs import Run

LOSS_STEPS = 60  # at the end of a run, whose losses the median is of


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary(JsonRecord):
    """A run in few words and numbers.

    Attributes:
        verdict: The run in one sentence.
        state: The run in one word: "healthy", "warning", "alarm", or "empty" without a record.
        counts: Number of findings of each severity.
        name: Name of the run's folder.
        path: Its path.
        first_step: First step with a record; -1: none.
        last_step: Last step with a record; -1: none.
        samples: Number of steps with spectra.
        tensors: Number of series of each collection.
        formats: Formats of each collection, the most frequent first.
        scalars: Names of the recorded numbers.
        ranks: Number of ranks with a record.
        world_size: Number of ranks of the training.
        closed: True if all writers ended in order.
        created: Start in Unix seconds; None: the manifest does not say.
        seconds: Seconds from the start to the end, or to the last event; None: unknown.
        loss: Last recorded loss; None: none.
        median_loss: Median of the last 60 losses; None: none.
        scale: Last recorded loss scale; None: none.
        versions: Versions of Python and the libraries that wrote the run.
        settings: Settings of the watch.
        problems: What is missing of the record, as sentences.
        dropped: Number of records that were dropped, by reason.
        findings: The finding of the verdict, then the others, the most severe first.
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
    """Return a run in few words and numbers.

    Args:
        run: A run, its folder, or a `View` of it.
        findings: Findings by other rules or thresholds. Default: those of `diagnose`.
        until: Last step that counts; not with a `View`, which has its own.

    Raises:
        RunError: The folder holds no run.
    """
    view = view_of(run, until, "summary")
    given = diagnose(view) if findings is None else items("summary", "findings", findings)
    ordered = leading_first(given, view.last_step)
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
        **_present_numbers(view, begun),
    )


def with_present_numbers(found: Summary, view: View) -> Summary:
    """Return a summary with its verdict and the present numbers of the run."""
    return replace(found, **_present_numbers(view, found.created))


def _present_numbers(view: View, begun: float | None) -> dict[str, Any]:
    recorded = view.run
    steps = [step for step in recorded.steps if view.until is None or step <= view.until]
    scalar_steps = [step for step in recorded.scalar_steps if view.until is None or step <= view.until]
    return {
        "first_step": min([*scalar_steps[:1], *steps[:1]], default=-1),
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
    """Return the median of the last `LOSS_STEPS` losses, NaN as Inf; None without losses."""
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
        return datetime.fromisoformat(value).astimezone(UTC).timestamp() if isinstance(value, str) else None
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
