"""Writes docs/benchmarks.md from the newest result of each benchmark.

    python benchmarks/render.py             writes the page
    python benchmarks/render.py --check     exits with 1 if the page is not what would be written

Nothing is measured here and no number is written by hand: a benchmark that has no result file for a device is "not
measured yet".
"""

import argparse
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from _goals import NUMBERS_TO_REACH, OWN, Goal
from _harness import RESULTS, _shown

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
NOT_MEASURED = "not measured yet"
DEVICES = ("cpu", "cuda")
# Each result file's stem, the script that writes it, and what is not in the file itself.
BENCHMARKS: Mapping[str, tuple[str, str]] = {
    "watch": ("watch.py", "Watching a training, beside other watchers"),
    "measure": ("measure.py", "Measuring tensors"),
    "cast": ("cast.py", "Casts, beside other libraries"),
    "unscale": ("unscale.py", "Unscaling gradients"),
    "scalers": ("scalers.py", "Loss scalers on recorded gradients, beside other scalers"),
    "masters": ("masters.py", "16-bit weights and their masters"),
    "fp8": ("fp8.py", "FP8 linear layers"),
    "unit": ("unit.py", "Unit scaling: its cost"),
    "unit-transfer": ("unit.py", "Unit scaling: learning rates over width"),
    "emulate": ("emulate.py", "Emulation"),
    "run-log": ("run_log.py", "Writing and reading a run"),
    "scale": ("scale.py", "Large runs, and larger ones"),
    "diagnose": ("diagnose.py", "Diagnosing a run"),
    "parity": ("parity.py", "How often the parity verdict errs"),
    "plan": ("plan.py", "Predicted loss of plans"),
    "microscope": ("microscope.py", "Errors: shadow steps and the microscope"),
    "locate": ("locate.py", "Locating a fault"),
    "figures": ("figures.py", "Figures"),
    "report": ("report.py", "The report"),
    "serve": ("serve.py", "The live page"),
    "page": ("page.py", "The live page in a browser"),
    "command-line": ("command_line.py", "The command line"),
}
_NAME = re.compile(r"(\d{4}-\d\d-\d\d)-(.+)-(cpu|cuda)\.json")
_INTRODUCTION = """# Benchmarks

*Written by `benchmarks/render.py` from the newest result of each benchmark in `benchmarks/results/`. `make bench` runs
them all and writes this page again.*

Every contender of a table ran in one process and in turns, and a ratio is the median of the rounds' own ratios, so
that a slow spell of the machine falls on all alike. *Spread* is half the distance between the quartiles, as a part of
the median. Ratios carry over to other machines better than times do. What has no result file is *not measured yet*:
nothing here is estimated, but where a table says that it is calculated. Where several rows answer a goal, the worst of
them is shown.
"""


def newest(folder: Path = RESULTS) -> dict[tuple[str, str], Mapping[str, Any]]:
    """The newest result by stem and device."""
    found: dict[tuple[str, str], Mapping[str, Any]] = {}
    for path in sorted(folder.glob("*.json")):  # names begin with the date
        name = _NAME.fullmatch(path.name)
        if name is not None:
            found[name[2], name[3]] = json.loads(path.read_text(encoding="utf-8"))
    return found


def page(results: Mapping[tuple[str, str], Mapping[str, Any]]) -> str:
    """The whole page."""
    lines = [_INTRODUCTION, "## Numbers to reach", ""]
    lines += [*_goals(NUMBERS_TO_REACH, results), "", "## Goals of single benchmarks", "", *_goals(OWN, results), ""]
    lines += [*_limits([*NUMBERS_TO_REACH, *OWN], results)]
    for stem, (script, title) in BENCHMARKS.items():
        lines += [f"## {title}", "", f"`python benchmarks/{script}`", ""]
        for device in DEVICES if has_device(script) else DEVICES[:1]:
            lines += _benchmark(results.get((stem, device)), device)
    return "\n".join(lines).rstrip() + "\n"


def _goals(goals: Iterable[Goal], results: Mapping[tuple[str, str], Mapping[str, Any]]) -> list[str]:
    rows = [
        [
            goal.what,
            f"{goal.bound} {goal.value:,g}{goal.unit}",
            *(_state(goal, d, results) for d in DEVICES),
            goal.elsewhere,
        ]
        for goal in goals
    ]
    return _table(["what", "goal", "CPU", "GPU", "elsewhere, when the goal was set"], rows)


def _state(goal: Goal, device: str, results: Mapping[tuple[str, str], Mapping[str, Any]]) -> str:
    if device not in goal.devices:
        return "no goal"
    content = results.get((goal.stem, device))
    value = None if content is None else goal.worst(content)
    if value is None:
        return NOT_MEASURED
    return f"{value:.4g}{goal.unit}: **{'met' if goal.is_met(value) else 'missed'}**"


def _limits(goals: Iterable[Goal], results: Mapping[tuple[str, str], Mapping[str, Any]]) -> list[str]:
    """What limits the goals that are missed."""
    missed = [goal for goal in goals if any("missed" in _state(goal, device, results) for device in DEVICES)]
    return ["## What limits the goals that are missed", ""] * bool(missed) + [
        line for goal in missed for line in (f"- **{goal.what}**: {goal.limit}", "")
    ]


def has_device(script: str) -> bool:
    """Whether a benchmark can run on a GPU."""
    return "--device" in (Path(__file__).parent / script).read_text(encoding="utf-8")


def _benchmark(content: Mapping[str, Any] | None, device: str) -> list[str]:
    if content is None:
        return [f"{'GPU' if device == 'cuda' else 'CPU'}: {NOT_MEASURED}.", ""]
    machine = dict(content["machine"])
    hardware = [machine.pop(key) for key in ("device", "processor", "system") if key in machine]
    date = machine.pop("date")
    versions = ", ".join(f"{name} {version}" for name, version in machine.items())
    lines = [f"{date}, {', '.join(hardware)}; {versions}.", ""]
    for table in content["tables"]:
        cells = [[_shown(row[column]) for column in table["columns"]] for row in table["rows"]]
        lines += [f"### {table['title']}", "", table["note"], "", *_table(table["columns"], cells), ""]
    return lines


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [columns, ["---"] * len(columns), *rows]
    return [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines]


def main() -> None:
    """Writes the page, or checks it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    text = page(newest())
    if parser.parse_args().check:
        sys.exit(0 if PAGE.exists() and PAGE.read_text(encoding="utf-8") == text else 1)
    PAGE.write_text(text, encoding="utf-8")
    print(f"Written: docs/{PAGE.name}")


if __name__ == "__main__":
    main()
