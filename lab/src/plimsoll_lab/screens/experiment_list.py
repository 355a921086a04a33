"""The lists of `plimsoll lab`: experiments with outcomes, and rows with states."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table
from rich.text import Text

from plimsoll.cli import messages
from plimsoll.cli.terminal import console

if TYPE_CHECKING:
    from plimsoll_lab import Outcome, Standing

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
