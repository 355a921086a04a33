"""Judge recorded runs by the rules as they are now: one verdict a run."""

import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Literal

from benchmarks.trust.contradictions import contradictions
from benchmarks.trust.record import notes_of, place, unsound
from benchmarks.trust.registry import Case, Fault, Kind
from plimsoll.diagnosis import SEVERITIES, Finding, View, diagnose
from plimsoll.report.verdicts.verdict_sentence import leading_first
from plimsoll.runs import Run

Outcome = Literal["named", "flagged", "missed", "misleading"]
OUTCOMES: tuple[Outcome, ...] = ("named", "flagged", "missed", "misleading")


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the rules said of one run.

    `unsound`: why a healthy kind's run is not judged. `worst`: the highest severity found. `outcome`: of faults.
    """

    kind: str
    healthy: bool
    held_back: bool
    precision: str
    seed: int
    unsound: str | None
    worst: str
    lines: tuple[tuple[str, str, str], ...]  # severity, rule, the line
    outcome: Outcome | None
    contradictions: tuple[str, ...]


def line_of(finding: Finding) -> str:
    """A finding in one line with its numbers and advice: what patterns are searched in."""
    numbers = ", ".join(f"{name}={value}" for name, value in finding.evidence.items())
    where = ", ".join(finding.where[:6]) + (f" and {len(finding.where) - 6} more" if len(finding.where) > 6 else "")
    return f"{finding} [{where}] ({numbers}) -> {finding.advice}"


def outcome_of(fault: Fault, findings: Sequence[Finding]) -> Outcome:
    """How a fault was found: the headline decides what misleads, any warning or alarm may name it."""
    said = [f for f in findings if f.severity != "info"]
    if not said:
        return "missed"
    if fault.misleading is not None and fault.misleading.search(line_of(said[0])):
        return "misleading"
    return "named" if any(fault.named.search(line_of(f)) for f in said) else "flagged"


def runs_below(path: Path) -> list[Path]:
    """The folders of one training: its own, or one for each model that it watched."""
    return [path] if (path / "run.json").exists() else sorted(p.parent for p in path.glob("*/run.json"))


def judge(case: Case, path: Path) -> Verdict | None:
    """The verdict of a recorded run; None where it is not recorded."""
    notes = notes_of(path)
    if notes is None:
        return None
    findings: list[Finding] = []
    met: list[str] = []
    folders = runs_below(path)
    for folder in folders:
        view = View(Run(folder))
        found = leading_first(diagnose(view), view.last_step)  # as `plimsoll check` lists them
        met += contradictions(found)
        findings += found
    if len(folders) > 1:
        findings.sort(key=lambda f: (-SEVERITIES.index(f.severity), f.since_step))
    why = None
    if isinstance(case.kind, Kind):
        in_fp32 = notes_of(path.with_name(f"{case.kind.name}-fp32-{case.seed}"))
        why = unsound(case.kind, notes, in_fp32)
    return Verdict(
        kind=case.kind.name,
        healthy=isinstance(case.kind, Kind),
        held_back=case.kind.held_back,
        precision=case.precision,
        seed=case.seed,
        unsound=why,
        worst=findings[0].severity if findings else "",
        lines=tuple((f.severity, f.rule, line_of(f)) for f in findings),
        outcome=outcome_of(case.kind, findings) if isinstance(case.kind, Fault) else None,
        contradictions=tuple(dict.fromkeys(met)),
    )


def judge_all(chosen: Iterable[Case], places: Mapping[str, Path], jobs: int = 1) -> list[Verdict]:
    """The verdicts of all that are recorded, in order."""
    pairs = [(case.kind.name, case.kind.folder, case.precision, case.seed, place(case, **places)) for case in chosen]
    if jobs == 1:
        found = [_judge_named(pair) for pair in pairs]
    else:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
            found = list(pool.map(_judge_named, pairs, chunksize=8))
    return [verdict for verdict in found if verdict is not None]


def _judge_named(pair: tuple[str, str, str, int, Path]) -> Verdict | None:
    """A case by its names: kinds hold patterns and functions, which no process is sent."""
    from benchmarks.trust import faults, healthy, registry  # noqa: F401  (registers them)

    name, folder, precision, seed, path = pair
    kind = registry.KINDS[name] if folder == "healthy" else registry.FAULTS[name]
    return judge(Case(kind=kind, precision=precision, seed=seed), path)
