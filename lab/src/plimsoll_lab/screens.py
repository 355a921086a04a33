"""Screens of `plimsoll lab`: lists of experiments and rows, progress, and a result."""

import math
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from plimsoll.cli import messages
from plimsoll.cli.terminal import console
from plimsoll.text import number, percent

if TYPE_CHECKING:
    from plimsoll.diagnosis import Finding
    from plimsoll_lab import Claim, Outcome, Result, Standing, Training


# -- lists: experiments with outcomes, and rows with states ------------------------------------------------------------

_COLOURS = {"holds": "green", "tested": "green", "holds in part": "yellow", "not carried out": "dim"}


def list_experiments(folder: Path | None, as_json: bool) -> None:
    """Every experiment, with its claim and how it ended."""
    from plimsoll_lab import EXPERIMENTS

    outcomes = _outcomes(folder)
    if as_json:
        listed = [
            {"name": e.name, "claim": e.claim, "source": e.source, "state": _state(outcomes, e.name)}
            for e in EXPERIMENTS.values()
        ]
        messages.write_json(listed)
        return
    table = _table("experiment", "evidence", "claim", wraps="claim")
    for experiment in EXPERIMENTS.values():
        table.add_row(Text(experiment.name, style="bold"), experiment.source, experiment.claim)
    console().print(table)


def list_rows(folder: Path | None, as_json: bool) -> None:
    """Every row of the evidence base, with what stands for it, and how that ended."""
    from plimsoll_lab import standings

    listed = standings(_outcomes(folder))
    if as_json:
        messages.write_json([standing.to_dict() for standing in listed])
        return
    table = _table("row", "state", "what it says, and what stands for it", wraps="what it says, and what stands for it")
    for standing in listed:
        table.add_row(
            Text(standing.row.id, style="bold"), Text(standing.state, style=_COLOURS[standing.state]), _said(standing)
        )
    console().print(table)
    console().print(Text(_origin(folder, listed), style="dim"), soft_wrap=True)


def _said(standing: "Standing") -> Text:
    """Return the row's sentence, with its experiments, tests and failed claims."""
    lines = [Text(standing.row.says)]
    shown = [f"lab {name}: {_state(standing.outcomes, name)}" for name in standing.experiments]
    if standing.row.tests:
        shown.append("tests: " + ", ".join(standing.row.tests))
    lines += [Text("; ".join(shown), style="dim")] if shown else []
    for outcome in standing.outcomes.values():
        lines += [Text(f"does not hold: {line}", style="yellow") for line in outcome.failed]
        lines += [Text(f"lab {outcome.experiment}: {outcome.error}", style="yellow")] if outcome.error else []
    if standing.unmeasured:
        lines.append(Text(f"not measured yet, for want of a GPU: {standing.unmeasured}", style="dim"))
    return Text("\n").join(lines)


def _origin(folder: Path | None, listed: "list[Standing]") -> str:
    """Return where the outcomes are from, and when they were made."""
    dates = sorted({o.date for standing in listed for o in standing.outcomes.values() if o.date})
    made = f", of {' to '.join(dict.fromkeys((dates[0], dates[-1])))}" if dates else ""
    if folder is not None:
        return f"Outcomes: those in {folder}{made}."
    return f"Outcomes: those that come with Plimsoll{made}. plimsoll lab --all makes your own."


def _outcomes(folder: Path | None) -> "Mapping[str, Outcome]":
    from plimsoll_lab import found_in, recorded

    return recorded() if folder is None else found_in(folder)


def _state(outcomes: "Mapping[str, Outcome]", name: str) -> str:
    return outcomes[name].state if name in outcomes else "not carried out"


def _table(*heads: str, wraps: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0))
    for head in heads:
        table.add_column(head, no_wrap=head != wraps)
    return table


# -- progress, on stderr: bars on a terminal, else plain lines ---------------------------------------------------------

_WIDEST = 22  # cells of a part's title


class Bars:
    """A bar for each part."""

    def __init__(self, progress: Progress) -> None:
        self._progress, self._task = progress, TaskID(0)

    def begin(self, title: str, steps: int) -> None:
        """Adds the part's bar."""
        self._task = self._progress.add_task(f"{title:<{_WIDEST}}", total=steps)

    def advance(self) -> None:
        """Moves it on."""
        self._progress.advance(self._task)


class Lines:
    """A line for each part."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def begin(self, title: str, steps: int) -> None:
        """Says that the part begins."""
        self._console.print(f"{title}: {steps:,} steps", soft_wrap=True)

    def advance(self) -> None:
        """Says nothing."""


@contextmanager
def live_progress() -> Generator[Bars | Lines]:
    """Whom to tell; bars are there until the end of the block."""
    target = console(stderr=True)
    if not target.is_terminal:
        yield Lines(target)
        return
    columns = (
        TextColumn("{task.description}"), BarColumn(bar_width=30),
        TextColumn("{task.completed:>5.0f}/{task.total:.0f}"), TimeElapsedColumn(),
    )  # fmt: skip
    with Progress(*columns, console=target, transient=True) as progress:
        yield Bars(progress)


# -- one result: trainings, findings, claims and places ----------------------------------------------------------------

_BARS, _ASCII_BARS = "▁▂▃▄▅▆▇█", ".:-=+*#%"
_SEVERITIES = {"alarm": "bold red", "warning": "yellow", "info": "dim"}
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

    line = Text.assemble((f"{finding.severity:<6} ", _SEVERITIES[finding.severity]), (f"{finding.rule:<14}", "bold"))
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
