"""Verdict on a run that has just ended, for the last lines of a training."""

from pathlib import Path

from plimsoll.diagnosis import View, diagnose
from plimsoll.report.verdicts.run_summary import State, leading_first, state_of, verdict
from plimsoll.runs import Run

# Judging takes about 1 s for a run of this size (benchmarks/command_line.py). A larger one keeps nobody waiting.
MOST_BYTES = 64 << 20


def verdict_at_end(folder: Path) -> tuple[State, str] | None:
    """Return state ("empty": no step was written) and verdict of a run; None for several ranks, or `MOST_BYTES`."""
    size_bytes = sum(path.stat().st_size for path in folder.rglob("*.parquet"))
    if size_bytes > MOST_BYTES:
        return None
    run = Run(folder, warn=False)
    view = View(run)
    # A run of several ranks is not judged: the others may still be writing.
    if run.world_size > 1:
        return None
    findings = leading_first(diagnose(view), view.last_step)
    return state_of(view, findings), verdict(view, findings)
