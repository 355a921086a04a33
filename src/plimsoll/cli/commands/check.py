"""``plimsoll check``: what the rules find in a run, as text or JSON, and an exit code for schedulers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from plimsoll.cli.paths import Opened, opened, refuse_empty, said
from plimsoll.cli.terminal import console, say_json
from plimsoll.errors import ArgumentError
from plimsoll.text import counted, number, printable

if TYPE_CHECKING:
    from plimsoll.diagnosis import Finding, View
    from plimsoll.diagnosis.view import Ending

_COLOURS = {"alarm": "bold red", "warning": "yellow", "info": "dim"}


def check(
    run: Annotated[
        str | None, typer.Argument(metavar="RUN", help="The folder of a run or script, or a URI: s3://bucket/run.")
    ] = None,
    output: Annotated[
        Literal["text", "json"], typer.Option("--format", help="Text for people, or JSON for other programs.")
    ] = "text",
    rules: Annotated[bool, typer.Option("--rules", help="List the rules with their thresholds, and exit.")] = False,
    select: Annotated[
        list[str] | None, typer.Option("--select", help="Only rules whose id matches this glob. May be given often.")
    ] = None,
    changed: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="RULE.THRESHOLD=VALUE", help="Another threshold. May be given several times."),
    ] = None,
    until: Annotated[int | None, typer.Option("--until", help="Judge the run as it was at this step.")] = None,
) -> None:
    """What is wrong in a run, where and since when. Exit code 0: no alarm; 1: an alarm; 2: it cannot be judged."""
    thresholds = dict(_assignment(each) for each in changed or ())
    if rules:
        _print_rules(thresholds, output)
        return
    if run is None:
        raise ArgumentError("check: expected a run's folder; got none. Write plimsoll check RUN, or --rules.")
    judged = [_judged(one, until, select, thresholds) for one in opened(run)]
    if output == "json":
        data = judged[0].to_dict() if len(judged) == 1 else _of_script(run, judged)
        say_json(data)
    else:
        target = console()
        for number_of, each in enumerate(judged):
            if number_of:
                target.print()
            _print(each, target)
    if any(each.alarm for each in judged):
        raise typer.Exit(1)
    if any(each.missing for each in judged):
        raise typer.Exit(2)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Judged:
    """A run and what was found in it."""

    one: Opened
    view: "View"
    found: "Sequence[Finding]"

    @property
    def alarm(self) -> bool:
        return any(finding.severity == "alarm" for finding in self.found)

    @property
    def missing(self) -> dict[int, int]:
        """Ranks whose records end before the last step that was judged, and their last: they may have had an alarm."""
        return {rank: last for rank, last in self.one.run.incomplete.items() if last < self.view.last_step}

    def to_dict(self) -> dict[str, object]:
        from plimsoll.report.verdicts.verdict import state_of, verdict

        state, sentence = state_of(self.view, self.found), verdict(self.view, self.found)
        facts: dict[str, object] = {
            "run": self.one.called,
            "state": state,
            "verdict": sentence,
            "last_step": self.view.last_step,
        }
        facts["incomplete"] = {str(rank): last for rank, last in self.missing.items()}
        return {**facts, "ended": _ended(self.view), "findings": [finding.to_dict() for finding in self.found]}


def _judged(one: Opened, until: int | None, select: list[str] | None, thresholds: dict[str, float]) -> _Judged:
    """Return the run with its findings; raises `RunError` where nothing was recorded that could be judged."""
    from plimsoll.diagnosis import View, diagnose
    from plimsoll.report.verdicts.verdict import leading_first

    view = View(one.run, until)
    found = leading_first(diagnose(view, rules=select, thresholds=thresholds), view.last_step)
    judged = _Judged(one=one, view=view, found=found)
    if not judged.alarm:  # a training that fails before its first step leaves an alarm and no step
        refuse_empty(one, view)
    return judged


def _of_script(place: str, judged: list[_Judged]) -> dict[str, object]:
    """Return the answer for the models of a script: state and verdict of the worst, and each run's."""
    last = max(each.view.last_step for each in judged)
    runs = [{"model": each.one.model, **each.to_dict()} for each in judged]
    worst = min(runs, key=lambda run: ("alarm", "warning", "healthy", "empty").index(str(run["state"])))
    return {"run": said(place), "state": worst["state"], "verdict": worst["verdict"], "last_step": last, "runs": runs}


def _assignment(text: str) -> tuple[str, float]:
    """``underflow-high.values=0.1`` as a name and a number."""
    name, sign, value = text.partition("=")
    try:
        found = float(value)
    except ValueError:
        found = math.nan
    if not sign or not name or math.isnan(found):
        raise ArgumentError(
            f"check: expected --set RULE.THRESHOLD=VALUE with a number; got {text!r}. "
            "For instance --set underflow-high.values=0.1."
        )
    return name.strip(), found


def _print(judged: _Judged, target: Console) -> None:
    from plimsoll.diagnosis import shown

    found, view = judged.found, judged.view
    ended = "" if (ending := _early_end(view)) is None else f"; {shown(str(ending))}"
    head = f": {_counts(found)}, {_reach(view.last_step)}{ended}"
    target.print(Text.assemble((printable(judged.one.called, lines=False), "bold"), head), soft_wrap=True)
    if view.last_step >= 0:
        from plimsoll.report.verdicts.verdict import verdict

        target.print(Text(verdict(view, found)))
    if judged.missing and not judged.alarm:
        named = ", ".join(f"rank {rank} after step {last:,}" for rank, last in judged.missing.items())
        target.print(Text(f"Not judged whole: the record lacks {named}, which may have had an alarm."))
    for finding in found:
        target.print()
        for line in _lines(finding):
            target.print(line)


def _early_end(view: "View") -> "Ending | None":
    """Return how the run ended early; None if it ended properly or is still running."""
    ending = view.ending
    return None if ending is None or view.last_step > ending.step else ending


def _ended(view: "View") -> dict[str, object] | None:
    ending = _early_end(view)
    return None if ending is None else {"by": ending.how, "step": ending.step, "message": ending.message}


def _counts(found: "Sequence[Finding]") -> str:
    counts = [(sum(f.severity == s for f in found), s) for s in ("alarm", "warning")]
    return ", ".join(counted(n, severity) for n, severity in counts if n) or "healthy"


def _reach(last_step: int) -> str:
    return "nothing recorded" if last_step < 0 else f"up to step {last_step:,}"


def _lines(finding: "Finding") -> list[Text | Padding]:
    from plimsoll.report.verdicts import summary_text

    head = Text.assemble(
        (f"{finding.severity:<8}", _COLOURS[finding.severity]), (summary_text.heading(finding), "bold")
    )
    lines: list[Text | Padding] = [head.append(f"  {summary_text.when(finding)}")]
    if finding.where:
        lines.append(_indented(Text(summary_text.where(finding), style="cyan")))
    lines.append(_indented(Text(finding.meaning)))
    told = ". ".join(f"{label}: {value}" for label, value in summary_text.evidence(finding) if label != "Where")
    if told:
        lines.append(_indented(Text(told, style="dim")))
    lines.append(_indented(Text(f"-> {finding.advice}")))
    return lines


def _indented(text: Text) -> Padding:
    return Padding(text, (0, 0, 0, 8))


def _print_rules(thresholds: dict[str, float], output: str) -> None:
    from plimsoll.diagnosis import with_thresholds
    from plimsoll.diagnosis.rules.registry import known_rules

    rules = with_thresholds(list(known_rules().values()), thresholds)
    if output == "json":
        listed = [
            {
                "rule": rule.id,
                "says": rule.says,
                "thresholds": [{"name": n, "value": v, "source": source} for n, v, source in rule.thresholds],
                "advice": rule.advice,
                "actions": list(rule.actions),
                "figure": rule.figure,
            }
            for rule in rules
        ]
        say_json(listed)
        return
    target = console()
    for rule in rules:
        target.print(Text(rule.id, style="bold"))
        target.print(Padding(Text(rule.says), (0, 0, 0, 2)))
        table = Table(box=box.SIMPLE, show_header=False, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column(no_wrap=True)
        table.add_column(justify="right", no_wrap=True)
        table.add_column(style="dim")
        for name, value, source in rule.thresholds:
            table.add_row(f"{name}", number(value), source)
        target.print(Padding(table, (0, 0, 1, 2)))
