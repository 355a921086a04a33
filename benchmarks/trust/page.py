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

Two fifths of the faults and more than half of the kinds are held back: no rule was changed for what they showed. Eleven
groups are by authors who had not read the rules:

- The newest 20 faults are pitfalls of schedules, data and losses. At first eight were named, two were flagged in other
  words and six were missed. The headlines of four counted as another cause, by an error of their pattern: it took the
  advice to skip such steps with a loss scaler for a word on the loss scale. Rules were since written or mended for four
  of them: these count as seen.
- 12 faults are common mistakes, most of them of low precision. At first six were named, one of these by an
  accident of its words, and six were missed. Of the same trainings without their faults none had a warning. Rules were
  since mended for two of them: these count as seen.
- 16 faults are of every day, as public threads have them. At first nine were named and one was flagged in other words;
  four were missed, and for two the headline named another cause. Of the same trainings without their faults one had an
  alarm, which is mended: a scaler that had to come down from 2^16 to 2^-9. One had a warning that is true: a scaler
  that doubles every ten steps, and loses one step in twenty by that. Rules were since written or mended for seven of
  them: these count as seen.
- 21 faults are lapses and stumbles. At first four were named and three were flagged in other words; twelve were missed,
  and for two the headline named another cause. Of the same trainings without their faults none had a warning. A variant
  of one had an alarm, which is mended: a compensation of BF16 weights whose state has a name that no rule knew. Rules
  were since written or mended for ten of them: these count as seen.
- 12 faults are blunders of formats, loops and losses. At first three were named, eight were missed, and for one the
  headline named another cause. Of the same trainings without their faults one had an alarm, which is mended: BF16
  weights that their optimizer rounds at random. The fault there is to leave the random bits out; updates that are
  lost are part of what follows. It and four more, for which rules were written or mended, count as seen.
- 23 faults are mishaps that public threads report. At first eight were named and one was flagged in other
  words; eleven were missed, and for three the headline named another cause. Of the same trainings without their faults
  none had a warning. Rules were since written or mended for the three that misled and for six others: these count as
  seen.
- 15 faults are oversights of formats, loops and losses. At first none was named: three were flagged in other words,
  nine were missed, and for three the headline named another cause. Of the same trainings without their faults none had
  a warning. Rules were since mended for eight of them: these count as seen.
- 12 faults are slips of loops, formats and defaults. At first one was named and one was flagged in other words; seven
  were missed, and for three the headline named another cause. Rules were since mended for ten: these count as seen.
- 22 faults are of low precision and of training loops, and 6 kinds of sound training come near them. At first four were
  named. Rules were since written or mended for 14 of them, with one kind as what must stay silent: these count as seen.
- 26 kinds are recipes of optimizers and loops, methods and families of models. At first 13 of their 156 runs had a
  warning, none an alarm: a search for the rate, LBFGS after Adam, and one run of a policy with a learned spread. Rules
  were since mended for these three and for what was noted of two others. These and one whose notes were looked at
  count as seen.
- 25 faults and 13 kinds are older. Ten of these faults count as seen.

What counts as naming a fault was written down before it was judged. For two faults it was made stricter afterwards.
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
