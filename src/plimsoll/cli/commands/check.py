"""``plimsoll check``: rules' findings in runs, and an exit code for CI."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from plimsoll.cli import messages
from plimsoll.cli.checked_run import CheckedRun, judge
from plimsoll.cli.options import Json, Quiet, RunArguments, Until, form_of, rule_names
from plimsoll.cli.paths import expand, label_of, later_training, open_runs
from plimsoll.errors import ArgumentError, PlimsollError

if TYPE_CHECKING:
    from plimsoll.diagnosis import Rule

_STATES = ("alarm", "warning", "empty", "healthy")  # the worst first
_FAILING = {"alarm": {"alarm"}, "warning": {"alarm", "warning"}, "never": set[str]()}


def check(
    runs: RunArguments = None,
    as_json: Json = False,
    output_format: Annotated[
        Literal["text", "concise", "github", "json"] | None,
        typer.Option(
            "--output-format",
            metavar="FORM",
            help="text (default); concise: one line a finding; github: annotations of a workflow; json.",
        ),
    ] = None,
    fail_on: Annotated[
        Literal["warning", "alarm", "never"],
        typer.Option(
            "--fail-on",
            metavar="SEVERITY",
            help="Exit with 1 for a finding at least this severe: warning, alarm; never: in no case.",
        ),
    ] = "alarm",
    select: Annotated[
        list[str] | None,
        typer.Option("--select", metavar="GLOB", autocompletion=rule_names, help="Apply only rules whose id matches."),
    ] = None,
    changed: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="RULE.THRESHOLD=VALUE", help="Change a threshold: underflow-high.values=0.1."),
    ] = None,
    until: Until = None,
    rules: Annotated[bool, typer.Option("--rules", help="List the rules with their thresholds, and exit.")] = False,
    _quiet: Quiet = False,
) -> None:
    """Report problems of runs: where, since when, and the fix.

    Exit code 1: a finding as severe as --fail-on. 2: a run cannot be judged, or records are missing. Else 0.
    """
    form = form_of("check", as_json, output_format, "text")
    thresholds = dict(_assignment(text) for text in changed or ())
    if rules:
        _check_alone(runs, select, until, form)
        _print_rules(thresholds, form)
        return
    if not runs:
        raise ArgumentError("check: expected a run's folder; got none. Write plimsoll check RUN, or --rules.")
    if select:
        from plimsoll.diagnosis.run_rules import rules_named

        rules_named(select, "--select to match the id of a rule")  # once, before the runs are read
    paths = expand(runs)
    several = len(runs) > 1 or paths != runs  # a glob is, however many folders it matches
    checked, unjudged = _checked(paths, several, until, select, thresholds)
    if form == "json":
        messages.write_json(_as_data(None if several else paths[0], checked, unjudged))
    else:
        from plimsoll.cli.screens import findings

        findings.print_runs(checked, form)
    if len(paths) == 1 and (later := later_training(paths[0], [run.opened.run for run in checked])) is not None:
        messages.note(f"a later training is in {later}: plimsoll check {later}")
    if unjudged:  # an alarm in another run does not hide that
        raise typer.Exit(2)
    if any(finding.severity in _FAILING[fail_on] for run in checked for finding in run.findings):
        raise typer.Exit(1)
    if any(run.missing for run in checked):
        raise typer.Exit(2)


def _check_alone(runs: object, select: object, until: int | None, form: str) -> None:
    """Check that nothing is given with `--rules` that has no effect there."""
    if form not in ("text", "json"):
        raise ArgumentError(f"check: expected --rules as text or json; got --output-format {form}. Leave it out.")
    given = [name for name, value in (("RUN", runs), ("--select", select), ("--until", until is not None)) if value]
    if given:
        raise ArgumentError(
            f"check: expected --rules without {given[0]}, since it lists all rules and judges no run; got both. To "
            "judge by some rules write --select RULE."
        )


def _checked(
    paths: Sequence[str], several: bool, until: int | None, select: list[str] | None, thresholds: dict[str, float]
) -> tuple[list[CheckedRun], dict[str, str]]:
    """Return the runs that can be judged, and of several paths the errors of the others, which are reported."""
    checked: list[CheckedRun] = []
    unjudged: dict[str, str] = {}
    for path in paths:
        try:
            checked += [judge(opened, until, select, thresholds) for opened in open_runs(path, "check")]
        except PlimsollError as error:
            if not several:
                raise
            unjudged[label_of(path)] = messages.failure(error)
    return checked, unjudged


def _as_data(path: str | None, checked: Sequence[CheckedRun], unjudged: Mapping[str, str]) -> dict[str, object]:
    """Return the answer for the path of a run, or for several runs with the worst one's verdict.

    `path` is None where several paths, or a glob, were given. `unjudged` has the errors of runs that were not checked.
    """
    if path is not None and len(checked) == 1:
        return checked[0].to_dict()
    data = [{"model": run.opened.model, **run.to_dict()} for run in checked]
    data += [_unjudged_as_data(label, message) for label, message in unjudged.items()]
    worst = min(data, key=lambda run: _STATES.index(str(run["state"])))
    last_step = max((run.view.last_step for run in checked), default=-1)
    first = {} if path is None else {"run": label_of(path)}
    return {**first, "state": worst["state"], "verdict": worst["verdict"], "last_step": last_step, "runs": data}


def _unjudged_as_data(label: str, message: str) -> dict[str, object]:
    """Return the entry of a run that cannot be judged, with the fields of one that can."""
    return {
        "model": "",
        "run": label,
        "state": "empty",
        "verdict": message,
        "error": message,
        "last_step": -1,
        "incomplete": {},
        "ended": None,
        "findings": [],
    }


def _assignment(text: str) -> tuple[str, float]:
    """Return ``underflow-high.values=0.1`` as a name and a number."""
    name, sign, value = text.partition("=")
    name = name.strip()
    try:
        threshold = float(value)
    except ValueError:
        threshold = math.nan
    if not sign or not name or math.isnan(threshold):
        raise ArgumentError(
            f"check: expected --set RULE.THRESHOLD=VALUE with a number; got {text!r}. "
            "For instance --set underflow-high.values=0.1."
        )
    return name, threshold


def _print_rules(thresholds: dict[str, float], form: str) -> None:
    from plimsoll.diagnosis import with_thresholds
    from plimsoll.diagnosis.rules.registry import known_rules

    rules = with_thresholds(list(known_rules().values()), thresholds)
    if form == "json":
        messages.write_json([_rule_as_data(rule) for rule in rules])
        return
    from plimsoll.cli.screens import findings

    findings.print_rules(rules)


def _rule_as_data(rule: "Rule") -> dict[str, object]:
    return {
        "rule": rule.id,
        "says": rule.says,
        "thresholds": [{"name": n, "value": v, "source": source} for n, v, source in rule.thresholds],
        "advice": rule.advice,
        "actions": list(rule.actions),
        "figure": rule.figure,
    }
