"""`summary`: the facts on a run that the report, JSON and the live page share."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import cast

import numpy as np

from plimsoll.diagnosis import SEVERITIES, Finding, Severity, View, diagnose
from plimsoll.diagnosis.finding import plain
from plimsoll.diagnosis.tables.cells import Floats
from plimsoll.report.drawing.plotly_parts import Source, view_of
from plimsoll.report.verdicts.verdict import State, leading_first, state_of, verdict
from plimsoll.runs import Run

LOSS_STEPS = 60  # of the median loss at the end of a run


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
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
    findings: tuple[Finding, ...]
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

    def to_dict(self) -> dict[str, object]:
        """Return the summary as JSON-able data; NaN and infinities are names."""
        return {
            "verdict": self.verdict,
            "state": self.state,
            "counts": dict(self.counts),
            "name": self.name,
            "path": self.path,
            "first_step": self.first_step,
            "last_step": self.last_step,
            "samples": self.samples,
            "tensors": dict(self.tensors),
            "formats": {collection: list(names) for collection, names in self.formats.items()},
            "scalars": list(self.scalars),
            "ranks": self.ranks,
            "world_size": self.world_size,
            "closed": self.closed,
            "created": self.created,
            "seconds": self.seconds,
            "loss": None if self.loss is None else plain(self.loss),
            "median_loss": None if self.median_loss is None else plain(self.median_loss),
            "scale": None if self.scale is None else plain(self.scale),
            "versions": dict(self.versions),
            "settings": jsonable(self.settings),
            "problems": list(self.problems),
            "dropped": dict(self.dropped),
            "findings": [finding.to_dict() for finding in self.findings],
        }


def summary(run: Source, findings: Sequence[Finding] | None = None, *, until: int | None = None) -> Summary:
    """Facts of a run, its folder, or a `View` of it.

    - `findings`: those of `diagnose`, unless others are given, found with other rules or thresholds.
    - `until`: the last step that counts; not with a `View`, which has its own.

    Raises `RunError` for a folder that holds no run.
    """
    view = view_of(run, until, "summary")
    ordered = leading_first(diagnose(view) if findings is None else findings, view.last_step)
    recorded, begun = view.run, started_at(view.run)
    steps = [step for step in recorded.steps if view.until is None or step <= view.until]
    return Summary(
        verdict=verdict(view, ordered),
        state=state_of(view, ordered),
        counts={severity: sum(f.severity == severity for f in ordered) for severity in reversed(SEVERITIES)},
        findings=ordered,
        name=recorded.path.name,
        path=str(recorded.path),
        first_step=first_step(view, steps),
        last_step=view.last_step,
        samples=len(steps),
        tensors={collection: len(names) for collection, names in recorded.tensors.items()},
        formats={collection: formats_of(recorded, collection) for collection in recorded.tensors},
        scalars=tuple(recorded.scalar_names),
        ranks=len(recorded.ranks),
        world_size=recorded.world_size,
        closed=recorded.closed,
        created=begun,
        seconds=seconds_of(recorded, begun),
        loss=_last(view, "loss"),
        median_loss=median_loss(view.scalar("loss")[1]),
        scale=_last(view, "scale"),
        versions={str(k): str(v) for k, v in _mapping(recorded.manifest.get("versions")).items()},
        settings=recorded.settings,
        problems=tuple(recorded.problems),
        dropped=recorded.dropped,
    )


def median_loss(losses: Floats) -> float | None:
    """Return the median of the last 60 losses, NaN as Inf; None without losses."""
    last = losses[-LOSS_STEPS:]
    return float(np.median(np.where(np.isfinite(last), last, np.inf))) if len(last) else None


def jsonable(value: object) -> object:
    """Return a manifest's value, with numbers unknown to JSON replaced by names."""
    if isinstance(value, Mapping):
        return {str(k): jsonable(v) for k, v in _mapping(value).items()}  # pyright: ignore[reportUnknownArgumentType]
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in cast("Sequence[object]", value)]
    return plain(value) if isinstance(value, float) else value


def first_step(view: View, steps: Sequence[int]) -> int:
    """The first step that anything was recorded at; -1 for none."""
    begins = [step for step in view.run.scalar_steps if view.until is None or step <= view.until]
    return min([*begins[:1], *steps[:1]], default=-1)


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
