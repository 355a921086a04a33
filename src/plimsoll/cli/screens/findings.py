"""Findings of runs on stdout: text, a line each, or GitHub workflow annotations."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from plimsoll.cli import messages
from plimsoll.cli.terminal import console
from plimsoll.text import counted, number, one_line, printable

if TYPE_CHECKING:
    from plimsoll.cli.checked_run import CheckedRun
    from plimsoll.diagnosis import Finding, Rule

COLOURS = {"alarm": "bold red", "warning": "yellow", "info": "dim"}
_GITHUB = {"alarm": "error", "warning": "warning", "info": "notice"}


def print_runs(runs: "Sequence[CheckedRun]", form: str) -> None:
    """Print the findings of runs in the form "text", "concise" or "github"."""
    if form != "text":
        for run in runs:
            for line in _concise(run) if form == "concise" else _github(run):
                messages.write_line(line)
        return
    target = console()
    for index, run in enumerate(runs):
        if index:
            target.print()
        _print(run, target)


def print_rules(rules: "Sequence[Rule]") -> None:
    """Print the rules with their thresholds and the sources of these."""
    target = console()
    for rule in rules:
        target.print(Text(rule.id, style="bold"))
        target.print(_indented(Text(rule.says), 2))
        table = Table(box=box.SIMPLE, show_header=False, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column(no_wrap=True)
        table.add_column(justify="right", no_wrap=True)
        table.add_column(style="dim")
        for name, value, source in rule.thresholds:
            table.add_row(f"{name}", number(value), source)
        target.print(_indented(table, 2))
        target.print()
    target.print("T, U or N with a number: published results, listed by plimsoll lab --list.")


def _print(run: "CheckedRun", target: Console) -> None:
    label = (printable(run.opened.label, lines=False), "bold")
    counts, has_steps = _counts(run), run.view.last_step >= 0
    if counts or run.early_end is not None or not has_steps:
        target.print(Text.assemble(label, f": {', '.join(filter(None, (counts, _reach(run))))}"), soft_wrap=True)
        if has_steps:
            target.print(Text(run.verdict))
    else:  # the verdict has all of it
        target.print(Text.assemble(label, f": {run.verdict}"), soft_wrap=True)
    if run.missing and not any(finding.severity == "alarm" for finding in run.findings):
        named = ", ".join(f"rank {rank} after step {last:,}" for rank, last in run.missing.items())
        target.print(Text(f"Not fully judged: the record lacks {named}, which may have had an alarm."))
    for finding in run.findings:
        target.print()
        for line in _lines(finding):
            target.print(line)


def _counts(run: "CheckedRun") -> str:
    counts = [(sum(f.severity == s for f in run.findings), s) for s in ("alarm", "warning")]
    return ", ".join(counted(n, severity) for n, severity in counts if n)


def _reach(run: "CheckedRun") -> str:
    last_step, ending = run.view.last_step, run.early_end
    reach = "nothing recorded" if last_step < 0 else f"through step {last_step:,}"
    return reach if ending is None else f"{reach}; {one_line(str(ending))}"


def _lines(finding: "Finding") -> list[Text | Padding]:
    from plimsoll.report.verdicts import summary_text

    head = Text.assemble((f"{finding.severity:<8}", COLOURS[finding.severity]), (summary_text.heading(finding), "bold"))
    lines: list[Text | Padding] = [head.append(f"  {summary_text.when(finding)}")]
    if finding.where:
        lines.append(_indented(Text(summary_text.where(finding), style="cyan")))
    lines.append(_indented(Text(finding.meaning)))
    evidence = ". ".join(f"{label}: {value}" for label, value in summary_text.evidence(finding) if label != "Where")
    if evidence:
        lines.append(_indented(Text(evidence, style="dim")))
    lines.append(_indented(Text(f"-> {finding.advice}")))
    return lines


def _indented(content: Text | Table, cells: int = 8) -> Padding:
    return Padding(content, (0, 0, 0, cells), expand=False)


def _concise(run: "CheckedRun") -> list[str]:
    """Return one line for each finding, or one for a healthy run."""
    if not run.findings:
        return [f"{run.opened.label}: healthy, {_reach(run)}"]
    return [
        f"{run.opened.label}: {finding.severity}: {finding.rule}: {_place(finding)}: {finding.meaning}"
        for finding in run.findings
    ]


def _github(run: "CheckedRun") -> list[str]:
    """Return workflow commands, GitHub's annotations; a plain line for healthy runs."""
    if not run.findings:
        return _concise(run)
    return [
        f"::{_GITHUB[finding.severity]} title={_property(f'{finding.rule} in {run.opened.label}')}::"
        f"{_escaped(f'{_place(finding)}: {finding.meaning} {finding.advice}')}"
        for finding in run.findings
    ]


def _place(finding: "Finding") -> str:
    from plimsoll.report.verdicts import summary_text

    location = summary_text.where(finding)
    return summary_text.when(finding) + (f", {location}" if location else "")


def _escaped(text: str) -> str:
    """Return text as a workflow command's message; %, CR and LF are syntax there."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    """Return text as a workflow command's property: colons and commas are syntax."""
    return _escaped(text).replace(":", "%3A").replace(",", "%2C")
