"""Screen of one experiment's result: trainings, findings, claims and places."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from plimsoll.text import number, percent

if TYPE_CHECKING:
    from plimsoll.diagnosis import Finding
    from plimsoll_lab import Claim, Result, Training

_BARS, _ASCII_BARS = "▁▂▃▄▅▆▇█", ".:-=+*#%"
_COLOURS = {"alarm": "bold red", "warning": "yellow", "info": "dim"}
_MOST_FINDINGS = 3


def show(result: "Result", target: Console) -> None:
    """Show one screen: trainings, the first's findings, claims, and places."""
    target.print()
    if result.measured.trainings:
        target.print(_trainings(result.measured.trainings, target))
    if result.measured.legend:
        target.print(Text(result.measured.legend, style="dim"))
    for training in result.measured.trainings[:1]:
        for line in _found(training):
            target.print(line, no_wrap=True, overflow="ellipsis")
        for line in _of_run(training):
            target.print(line)
    target.print()
    for sentence in result.measured.said:
        target.print(Text(sentence))
    target.print(_verdict(result.measured.claims))
    for path in list(result.reports.values())[:1]:
        target.print(Text.assemble(("report  ", "dim"), str(path)), soft_wrap=True)
    reports = f"{len(result.reports) - 1} more reports, " if result.reports else ""
    rest = f"{result.folder}: {reports}runs/, result.json"
    target.print(Text(rest, style="dim"), soft_wrap=True)


def _trainings(trainings: "Sequence[Training]", target: Console) -> Table:
    from plimsoll.diagnosis import shown

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    drawn = next((training.series_of for training in trainings if training.series_of), "")
    for head in ("training", drawn, "lost", "loss", ""):
        table.add_column(Text(shown(head)), no_wrap=True, justify="right" if head in ("lost", "loss") else "left")
    known = [value for training in trainings for value in training.series if 0 < value < math.inf]
    low, high = (min(known), max(known)) if known else (1.0, 1.0)
    bars = _ASCII_BARS if target.options.ascii_only else _BARS
    for training in trainings:
        lost, loss = training.numbers.get("lost_after", math.nan), training.numbers.get("loss_end", math.nan)
        colour = "green" if training.good else "bold red"
        table.add_row(
            Text(shown(training.title)), Text(_spark(training.series, low, high, bars), style=colour),
            "" if math.isnan(lost) else f"{percent(lost)}", "" if math.isnan(loss) else number(loss),
            Text(shown(training.outcome), style=colour),
        )  # fmt: skip
    return table


def _spark(values: Sequence[float], low: float, high: float, bars: str) -> str:
    """Return a sign for each value, by its logarithm in the range; Inf is highest."""
    span = math.log(high / low) or 1.0
    return "".join(
        " " if not value > 0 else bars[min(int(math.log(min(value, high) / low) / span * len(bars)), len(bars) - 1)]
        for value in values
    )


def _found(training: "Training") -> list[Text]:
    from plimsoll.diagnosis import shown

    findings = [f for f in training.findings if f.severity == "alarm"][:_MOST_FINDINGS]
    if not findings:
        return []
    head = Text(f"Plimsoll found in {shown(training.title)}:", style="bold")
    return [Text(""), head, *(_finding(finding) for finding in findings)]


def _of_run(training: "Training") -> list[Text]:
    return [Text(training.verdict, style="bold")] if training.verdict else []


def _finding(finding: "Finding") -> Text:
    from plimsoll.report.verdicts import summary_text

    line = Text.assemble((f"{finding.severity:<6} ", _COLOURS[finding.severity]), (f"{finding.rule:<14}", "bold"))
    line.append(f" {summary_text.when(finding)}")
    if finding.where:
        line.append(f", {summary_text.where(finding, 1)}", style="cyan")
    return line


def _verdict(claims: "Sequence[Claim]") -> Text:
    failed = [claim for claim in claims if not claim.holds]
    if not failed:
        return Text(f"All {len(claims)} claims hold.", style="bold green")
    lines = [Text(f"{len(failed)} of {len(claims)} claims do not hold:", style="bold red")]
    lines += [Text(f"  {claim}") for claim in failed]
    return Text("\n").join(lines)
