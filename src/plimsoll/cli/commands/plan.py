"""``plimsoll plan``: a precision plan from a run, or a plan held against one."""

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from plimsoll.cli.paths import RunPlace, file_here, of_model, only, opened, said, view_at
from plimsoll.cli.terminal import console, say, say_json, say_line
from plimsoll.errors import ArgumentError
from plimsoll.formats import ROLES, Role
from plimsoll.formats.catalogue import TARGETS, WIDE
from plimsoll.text import percent, printable

if TYPE_CHECKING:
    from plimsoll.formats import Plan

_FALLBACKS = tuple(fmt.name for fmt in WIDE)


def plan(
    run: RunPlace,
    target: Annotated[
        str | None,
        typer.Option("--target", help=f"{', '.join(TARGETS)}, or cheapest."),
    ] = None,
    out: Annotated[str | None, typer.Option("--out", "-o", help="Where to write the plan, a TOML file.")] = None,
    check: Annotated[
        str | None, typer.Option("--check", help="Hold this plan against RUN, and make none; exit code 1 if it fails.")
    ] = None,
    tolerance: Annotated[
        float | None, typer.Option("--tolerance", help="The fraction of a tensor's values that may be lost; 0.01.")
    ] = None,
    margin: Annotated[
        int | None,
        typer.Option("--margin", help="How many binades stay free below overflow; 1, more for FP8 of sparse samples."),
    ] = None,
    fallback: Annotated[
        str, typer.Option("--fallback", help=f"Where the target is not safe: {', '.join(_FALLBACKS)}.")
    ] = _FALLBACKS[0],
    one_scale: Annotated[
        bool, typer.Option("--one-scale", help="FP16 with one loss scale; no scales per layer.")
    ] = False,
    include: Annotated[
        list[str] | None,
        typer.Option("--include", help="Plan for modules of this name or glob, whatever they look like."),
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option("--exclude", help="Leave modules of this name or glob as they are.")
    ] = None,
    until: Annotated[int | None, typer.Option("--until", help="Judge by the run as it was at this step.")] = None,
    output: Annotated[
        Literal["text", "json"], typer.Option("--output", help="Text for people, or JSON for other programs.")
    ] = "text",
) -> None:
    """Which module can compute in which format and at which scale, by what a run recorded; or whether a plan holds."""
    if (target is None) == (check is None):
        raise ArgumentError(
            "plan: expected either --target, to make a plan, or --check, to hold one against RUN; got "
            f"{'both' if target else 'neither'}. Write plimsoll plan RUN --target fp8 -o plan.toml."
        )
    written_to = file_here("plan", "--out", out, "plan.toml")
    if check is not None:
        _refuse_beside_check(out, margin, fallback, one_scale, include, exclude)
        _check(check, run, tolerance, until, output)
        return
    from plimsoll.diagnosis import plan as planned
    from plimsoll.formats.plan_file import checked_path

    if written_to is not None:
        checked_path("plan", written_to)  # before the work
    made = [
        (one, planned(
            view_at(one, until), str(target), tolerance=0.01 if tolerance is None else tolerance,
            margin_binades=margin, fallback=fallback, layer_scales=not one_scale, include=include or (),
            exclude=exclude or (),
        ))
        for one in opened(run)
    ]  # fmt: skip
    files = [None if written_to is None else of_model(written_to, one, len(made)) for one, _ in made]
    for (_, each), file in zip(made, files, strict=True):
        if file is not None:
            each.save(file)
    if output == "json":
        data = [{"model": one.model, **each.to_dict()} for one, each in made]
        say_json({"runs": data} if len(made) > 1 else made[0][1].to_dict())
        return
    for place, ((one, each), file) in enumerate(zip(made, files, strict=True)):
        if len(made) > 1:
            console().print(Text(("\n" if place else "") + printable(one.called, lines=False), style="bold"))
        _print(each, console())
        if file is not None:
            say("")
            say_line(f"written to {file}")


def _refuse_beside_check(
    out: object, margin: int | None, fallback: str, one_scale: bool, include: object, exclude: object
) -> None:
    given = {
        "--out": out, "--margin": margin is not None, "--fallback": fallback != _FALLBACKS[0], "--one-scale": one_scale,
        "--include": include, "--exclude": exclude,
    }  # fmt: skip
    strange = [name for name, value in given.items() if value]
    if strange:
        raise ArgumentError(
            f"plan: expected {', '.join(strange)} with --target only; got --check, which makes no plan. Leave it out."
        )


def _check(plan_file: str, run: str, tolerance: float | None, until: int | None, output: str) -> None:
    from plimsoll.diagnosis import check_plan
    from plimsoll.formats import Plan
    from plimsoll.runs.storage.location import is_elsewhere

    path = Path(plan_file)
    if is_elsewhere(plan_file):
        raise ArgumentError(
            f"plan: expected --check to name a file of this machine; got the URI {said(plan_file)}. Copy it here first."
        )
    if not path.is_file():
        raise ArgumentError(f"plan: expected a plan file; got {str(path)!r}, which is not there. Write one with -o.")
    found = check_plan(Plan.load(path), view_at(only(run, "plan --check"), until), tolerance=tolerance)
    if output == "json":
        say_json(found.to_dict())
    else:
        target = console()
        target.print(Text(found.sentence, style="bold green" if found.ok else "bold red"))
        target.print()
        target.print(found.table(width=min(target.width, 100)))
    if not found.ok:
        raise typer.Exit(1)


def _print(plan: "Plan", target: Console) -> None:
    summary, *rest = plan.remarks
    target.print(Text(summary, style="bold"))
    for remark in rest:
        target.print(Padding(Text(remark), (0, 0, 0, 2)))
    if plan.scale is not None:
        target.print(Text(f"The loss scale begins at 2^{_exponent(plan.scale)}."))
    target.print()
    groups = _groups(plan)
    target.print(_table(plan, groups, min(target.width, 100)))
    _print_reasons(plan, target)


def _groups(plan: "Plan") -> dict[tuple[str, str], list[str]]:
    """Return the modules by their formats, in the plan's order."""
    found: dict[tuple[str, str], list[str]] = {}
    for name in plan.formats:
        said = plan.module(name)
        if said is not None:
            found.setdefault((said.forward, said.backward), []).append(name)
    return found


def _table(plan: "Plan", groups: dict[tuple[str, str], list[str]], width: int) -> Table:
    from plimsoll.diagnosis import grouped

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, width=width)
    table.add_column("modules", ratio=1, overflow="fold")
    table.add_column("", justify="right")
    table.add_column("format", no_wrap=True)
    for role in ROLES:
        table.add_column(role, justify="right", no_wrap=True)
    for formats, names in groups.items():
        cells = [_of_role(plan, names, role) for role in ROLES]
        told, kinds = grouped(names).replace(", ", ",\n"), "\n".join(dict.fromkeys(formats))
        table.add_row(told, str(len(names)), kinds, *cells, end_section=True)
    table.caption = "lost: the largest share of a module's values that may be, over all steps; zeros in doubt count"
    table.caption_justify = "left"
    return table


def _of_role(plan: "Plan", names: list[str], role: Role) -> str:
    """At which scales the values are cast, and the largest fraction that is lost."""
    losses = [plan.predicted[name][role][2] for name in names if role in plan.predicted.get(name, {})]
    scales = [plan.scales[name][role] for name in names if role in plan.scales.get(name, {})]
    lost = f"{percent(max(losses))} lost" if losses else "unknown"
    return f"at {_range(scales)}\n{lost}" if scales else lost


def _print_reasons(plan: "Plan", target: Console) -> None:
    """Why modules are not in the target's formats; reasons that differ in numbers only are told once."""
    from plimsoll.diagnosis import grouped, shown

    why: dict[str, list[str]] = {}
    for name, fmt in plan.formats.items():
        if fmt in _FALLBACKS and fmt != plan.target and name in plan.notes:
            why.setdefault(re.sub(r"[\d.,]+", "#", plan.notes[name]), []).append(name)
    for names in sorted(why.values(), key=len, reverse=True):
        told = Text.assemble((grouped(names), "cyan"), f" in {plan.formats[names[0]]}:")
        target.print()
        target.print(told)
        several = len({plan.notes[name] for name in names}) > 1
        example = f" (so in {shown(names[0])})" if several else ""
        target.print(Padding(Text(f"{plan.notes[names[0]]}{example}"), (0, 0, 0, 2)))


def _range(scales: list[float]) -> str:
    """Powers of two from the least to the largest."""
    if not scales:
        return ""
    low, high = _exponent(min(scales)), _exponent(max(scales))
    return f"2^{low}" if low == high else f"2^{low}..2^{high}"


def _exponent(scale: float) -> int:
    return math.frexp(scale)[1] - 1
