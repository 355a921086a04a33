"""``plimsoll plan``: a precision plan from a run, or a check of one against it."""

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from plimsoll.cli import messages
from plimsoll.cli.options import Json, PlanFile, Quiet, RunArgument, Until
from plimsoll.cli.paths import by_model, file_for_model, label_of, local_file, open_runs, open_single, view_of
from plimsoll.cli.terminal import console, table_width
from plimsoll.errors import ArgumentError
from plimsoll.formats import ROLES, Role
from plimsoll.formats.catalogue import TARGETS, WIDE
from plimsoll.formats.cost_table import TABLES
from plimsoll.text import percent, printable

if TYPE_CHECKING:
    from plimsoll.formats import Plan

_FALLBACKS = tuple(fmt.name for fmt in WIDE)
_COSTS = tuple(TABLES)
_TOLERANCE = 0.01


def plan(
    run: RunArgument,
    target: Annotated[
        str | None,
        typer.Option(
            "--target",
            metavar="FORMAT",
            autocompletion=lambda: [*TARGETS, "cheapest"],
            help=f"{', '.join(TARGETS)}, or cheapest.",
        ),
    ] = None,
    output: PlanFile = None,
    check: Annotated[
        str | None,
        typer.Option(
            "--check", metavar="FILE", help="Check this plan against RUN, and make none. Exit code 1: it fails."
        ),
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option(
            "--budget",
            metavar="SHARE",
            help="Largest predicted increase of the loss, as a share of it: 0.01 is 1 %. Default: not limited.",
        ),
    ] = None,
    costs: Annotated[
        str,
        typer.Option(
            "--costs", metavar="NAME|FILE", help=f"Costs of formats: {', '.join(_COSTS)}, or a TOML file with rates."
        ),
    ] = _COSTS[0],
    tolerance: Annotated[
        float | None,
        typer.Option(
            "--tolerance", metavar="SHARE", help=f"Share of a tensor's values that may be lost. Default: {_TOLERANCE}."
        ),
    ] = None,
    margin_binades: Annotated[
        int | None,
        typer.Option(
            "--margin",
            metavar="BINADES",
            help="Headroom below overflow, in powers of two. Default: 1, larger for sparsely sampled FP8.",
        ),
    ] = None,
    fallback: Annotated[
        str,
        typer.Option(
            "--fallback", metavar="FORMAT", help=f"Format where the target is not safe: {', '.join(_FALLBACKS)}."
        ),
    ] = _FALLBACKS[0],
    one_scale: Annotated[
        bool, typer.Option("--one-scale", help="FP16 with one loss scale and no scales per layer.")
    ] = False,
    include: Annotated[
        list[str] | None,
        typer.Option(
            "--include", metavar="GLOB", help=("Also plan modules matching this glob that are left out by default.")
        ),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option("--exclude", metavar="GLOB", help=("Leave modules matching this glob as they are.")),
    ] = None,
    until: Until = None,
    as_json: Json = False,
    _quiet: Quiet = False,
) -> None:
    """Choose a format and scale for each module.

    The choice comes from the values that a run recorded, with the reasons. With --check, a plan that was made before
    is checked against the run.
    """
    if (target is None) == (check is None):
        raise ArgumentError(
            "plan: expected either --target, to make a plan, or --check, to check one against RUN; got "
            f"{'both' if target else 'neither'}. Write plimsoll plan RUN --target fp8 -o plan.toml."
        )
    file = local_file("plan", "--output", output, "plan.toml")
    if check is not None:
        _refuse_with_check(output, budget, costs, margin_binades, fallback, one_scale, include, exclude)
        _check(check, run, tolerance, until, as_json)
        return
    from plimsoll.diagnosis import plan as plan_of
    from plimsoll.formats.plan_file import checked_path

    if file is not None:
        checked_path("plan", file)  # before the work
    plans = [
        (opened, plan_of(
            view_of(opened, until), str(target), budget=budget, costs=costs,
            tolerance=_TOLERANCE if tolerance is None else tolerance,
            margin_binades=margin_binades, fallback=fallback, layer_scales=not one_scale, include=include or (),
            exclude=exclude or (),
        ))
        for opened in open_runs(run)
    ]  # fmt: skip
    files = [None if file is None else file_for_model(file, opened, len(plans)) for opened, _ in plans]
    for (_, made), path in zip(plans, files, strict=True):
        if path is not None:
            made.save(path)
    if as_json:
        messages.write_json(by_model([(opened, made.to_dict()) for opened, made in plans]))
        return
    for index, ((opened, made), path) in enumerate(zip(plans, files, strict=True)):
        if len(plans) > 1:
            console().print(Text(("\n" if index else "") + printable(opened.label, lines=False), style="bold"))
        _print(made, console())
        if path is not None:
            messages.write("")
            messages.write_line(f"written to {path}")


def _refuse_with_check(
    output: object,
    budget: float | None,
    costs: str,
    margin_binades: int | None,
    fallback: str,
    one_scale: bool,
    include: object,
    exclude: object,
) -> None:
    options = {
        "--output": output, "--budget": budget is not None, "--costs": costs != _COSTS[0],
        "--margin": margin_binades is not None, "--fallback": fallback != _FALLBACKS[0],
        "--one-scale": one_scale, "--include": include, "--exclude": exclude,
    }  # fmt: skip
    misplaced = [name for name, value in options.items() if value]
    if misplaced:
        raise ArgumentError(
            f"plan: expected {', '.join(misplaced)} with --target only; got --check, which makes no plan. Leave it out."
        )


def _check(plan_file: str, run: str, tolerance: float | None, until: int | None, as_json: bool) -> None:
    from plimsoll.diagnosis import check_plan
    from plimsoll.formats import Plan
    from plimsoll.runs.storage.location import is_elsewhere

    path = Path(plan_file)
    if is_elsewhere(plan_file):
        raise ArgumentError(
            f"plan: expected --check to name a file of this machine; got the URI {label_of(plan_file)}. Copy it here "
            "first."
        )
    if not path.is_file():
        raise ArgumentError(f"plan: expected a plan file; got {str(path)!r}, which is not there. Write one with -o.")
    found = check_plan(Plan.load(path), view_of(open_single(run, "plan --check"), until), tolerance=tolerance)
    if as_json:
        messages.write_json(found.to_dict())
    else:
        target = console()
        target.print(Text(found.sentence, style="bold green" if found.ok else "bold red"))
        target.print()
        target.print(found.table(width=table_width(target)))
    if not found.ok:
        raise typer.Exit(1)


def _print(plan: "Plan", target: Console) -> None:
    summary, *rest = plan.remarks
    target.print(Text(summary, style="bold"))
    for remark in rest:
        target.print(Padding(Text(remark), (0, 0, 0, 2), expand=False))
    if plan.consequence is not None:
        target.print(Text(plan.consequence))
    if plan.scale is not None:
        target.print(Text(f"The loss scale starts at 2^{_exponent(plan.scale)}."))
    target.print()
    groups = _groups(plan)
    target.print(_table(plan, groups, table_width(target)))
    _print_reasons(plan, target)


def _groups(plan: "Plan") -> dict[tuple[str, str], list[str]]:
    """Return the modules by their formats, in the plan's order."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name in plan.formats:
        formats = plan.module(name)
        if formats is not None:
            groups.setdefault((formats.forward, formats.backward), []).append(name)
    return groups


def _table(plan: "Plan", groups: dict[tuple[str, str], list[str]], width: int | None) -> Table:
    from plimsoll.diagnosis import grouped

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, width=width)
    table.add_column("modules", ratio=1, overflow="fold")
    table.add_column("#", justify="right")
    table.add_column("format", no_wrap=True)
    for role in ROLES:
        table.add_column(role, justify="right", no_wrap=True)
    below = ", " if width is None else "\n"  # in a pipe a row is one line
    for formats, names in groups.items():
        cells = [_cell(plan, names, role, below) for role in ROLES]
        modules, kinds = grouped(names).replace(", ", f",{below.lstrip(',')}"), below.join(dict.fromkeys(formats))
        table.add_row(modules, str(len(names)), kinds, *cells, end_section=True)
    table.caption = (
        "lost: the largest share of a module's values that may be lost, over all steps, including zeros that may be "
        "losses"
    )
    table.caption_justify = "left"
    return table


def _cell(plan: "Plan", names: list[str], role: Role, below: str) -> str:
    """Return the scales at which values are cast, and the largest share that is lost."""
    losses = [plan.predicted[name][role][2] for name in names if role in plan.predicted.get(name, {})]
    scales = [plan.scales[name][role] for name in names if role in plan.scales.get(name, {})]
    lost = f"{percent(max(losses))} lost" if losses else "unknown"
    return f"at {_range(scales)}{below}{lost}" if scales else lost


def _print_reasons(plan: "Plan", target: Console) -> None:
    """Print why modules are not in the target's formats, similar reasons as one."""
    from plimsoll.diagnosis import grouped, shown

    reasons: dict[str, list[str]] = {}
    for name, fmt in plan.formats.items():
        if fmt in _FALLBACKS and fmt != plan.target and name in plan.notes:
            reasons.setdefault(re.sub(r"[\d.,]+", "#", plan.notes[name]), []).append(name)
    for names in sorted(reasons.values(), key=len, reverse=True):
        target.print()
        target.print(Text.assemble((grouped(names), "cyan"), f" in {plan.formats[names[0]]}:"))
        several = len({plan.notes[name] for name in names}) > 1
        example = f" (the numbers are those of {shown(names[0])})" if several else ""
        target.print(Padding(Text(f"{plan.notes[names[0]]}{example}"), (0, 0, 0, 2), expand=False))


def _range(scales: list[float]) -> str:
    """Return the powers of two from the least to the largest."""
    if not scales:
        return ""
    low, high = _exponent(min(scales)), _exponent(max(scales))
    return f"2^{low}" if low == high else f"2^{low}..2^{high}"


def _exponent(scale: float) -> int:
    return math.frexp(scale)[1] - 1
