"""`check_plan`: a plan held against a run, another than it was made of."""

import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from plimsoll import exports
from plimsoll.diagnosis.finding import shown
from plimsoll.diagnosis.planning.format_choice import Judge
from plimsoll.diagnosis.planning.make_plan import check_tolerance
from plimsoll.diagnosis.planning.modules import Module, modules_of
from plimsoll.diagnosis.view import View, view_of
from plimsoll.errors import ArgumentError
from plimsoll.formats import FP32, ROLES, BlockFormat, Format, ModulePlan, Plan, Role, get
from plimsoll.results import JsonRecord, NotebookRepr, as_data
from plimsoll.runs import Run
from plimsoll.spectrum import Interval
from plimsoll.text import percent, power

if TYPE_CHECKING:
    from rich.table import Table

_USUAL_SCALE = 2.0**16  # what a loss scaler begins with if a plan has nothing to say
_TOLERANCE = 0.01


@exports.exported_by("plimsoll.diagnosis")
@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRow(JsonRecord, NotebookRepr):
    """One role of a module, in the plan's format at the plan's scale.

    Attributes:
        role: "weights", "activations" or "gradients".
        scale: The factor of the values before they are cast.
        predicted: The share that is lost by the plan. None: unknown.
        found: The share that is lost in this run. None: unknown.
        overflow: The share that overflows in it. None: unknown.
        ok: Whether, at every step, nothing overflows and less than the tolerance is lost for certain.
        why: Why it is not.
    """

    module: str
    role: str
    format: str
    scale: float
    predicted: Interval | None
    found: Interval | None
    overflow: Interval | None
    ok: bool
    why: str | None = None

    def __str__(self) -> str:
        """Return one line: the module, the role, the format, and whether it works."""
        verdict = "ok" if self.ok else self.why
        return f"{shown(self.module)}, {self.role} in {self.format} at scale {power(self.scale)}: {verdict}"


@exports.exported_by("plimsoll.diagnosis")
@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCheck(NotebookRepr):
    """A plan checked against a run.

    Attributes:
        rows: The rows, those that fail first.
        unknown: Names of the plan that the run does not have.
    """

    path: str
    target: str
    rows: tuple[PlanRow, ...]
    unknown: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """True if the plan holds."""
        return not self.unknown and all(row.ok for row in self.rows)

    @property
    def sentence(self) -> str:
        """The result in one sentence."""
        modules = dict.fromkeys(row.module for row in self.rows)
        failing = dict.fromkeys(row.module for row in self.rows if not row.ok)
        missing = f"the run has no {', '.join(shown(name) for name in self.unknown[:3])}"
        more = f" and {len(self.unknown) - 3} more of its modules" if len(self.unknown) > 3 else ""
        if not failing:
            holds = f"The plan holds: {len(modules)} module{'s' * (len(modules) != 1)}, none out of range."
            return holds if not self.unknown else f"The plan is not of this model: {missing}{more}."
        first = next(row for row in self.rows if not row.ok)
        sentence = f"The plan fails in {len(failing)} of {len(modules)} modules: {shown(first.module)}, {first.why}."
        return sentence if not self.unknown else f"{sentence} And {missing}{more}."

    def __str__(self) -> str:
        """Return the sentence."""
        return self.sentence

    def to_dict(self) -> dict[str, object]:
        """Return all of it as JSON-able data."""
        return {
            "run": self.path,
            "target": self.target,
            "ok": self.ok,
            "sentence": self.sentence,
            "unknown": list(self.unknown),
            "rows": as_data(self.rows),
        }

    def table(self, most: int = 20, width: int | None = None) -> "Table":
        """Return a table for the terminal, the failing rows first.

        Args:
            most: Largest number of rows. Default: 20.
            width: Width in columns. Default: that of the content.
        """
        from rich import box
        from rich.table import Table

        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, width=width)
        table.add_column("module", overflow="ellipsis", no_wrap=True, ratio=1)
        for head in ("what", "format"):
            table.add_column(head, no_wrap=True)
        for head in ("scale", "predicted", "found", ""):
            table.add_column(head, justify="right", no_wrap=True)
        for row in self.rows[:most]:
            table.add_row(
                shown(row.module), row.role, row.format, f"2^{math.frexp(row.scale)[1] - 1}", _at_most(row.predicted),
                _at_most(row.found), _verdict(row), style=None if row.ok else "red",
            )  # fmt: skip
        if len(self.rows) > most:
            table.caption = f"and {len(self.rows) - most} rows more"
            table.caption_justify = "left"
        return table


def check_plan(
    plan: Plan,
    run: "Run | View | str | os.PathLike[str]",
    *,
    tolerance: float | None = None,
    until: int | None = None,
) -> PlanCheck:
    """Check whether a plan works for another run, at every step.

    Modules that a glob of the plan matches are judged if they multiply matrices, named ones in any case. A loss scale
    moves in training. FP16 gradients are judged at the one that the plan starts with.

    Args:
        plan: The plan.
        run: The run, its folder, or a view of it.
        tolerance: Share of a tensor's values that may be lost. Default: the plan's, else 0.01.
        until: The last step to use. Default: all.

    Returns:
        The result, with a row for each module and role.
    """
    if not isinstance(plan, Plan):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ArgumentError(f"check_plan: expected a Plan; got {type(plan).__name__}. Write Plan.load(path).")
    allowed = next(value for value in (tolerance, plan.tolerance, _TOLERANCE) if value is not None)
    check_tolerance("check_plan", allowed)
    view = view_of(run, until, "check_plan")
    judge = Judge(view, tolerance=float(allowed), margin=0)
    modules = [module for module in modules_of(view, plan.formats) if plan.module(module.name) is not None]
    rows = [row for module in modules for row in _rows(judge, plan, module)]
    rules = {plan.rule_for(module.name) for module in modules}
    return PlanCheck(
        path=str(view.run.path),
        target=plan.target,
        rows=tuple(
            sorted(
                rows, key=lambda row: (row.ok, row.found is not None, -row.found.high if row.found is not None else 0)
            )
        ),
        unknown=tuple(name for name in plan.formats if name not in rules),
    )


def _rows(judge: Judge, plan: Plan, module: Module) -> list[PlanRow]:
    said, predicted = plan.module(module.name), plan.predicted.get(plan.rule_for(module.name) or "", {})
    assert said is not None  # the caller has asked
    return [_row(judge, plan, module, said, role, predicted.get(role)) for role in ROLES]


def _row(
    judge: Judge, plan: Plan, module: Module, said: ModulePlan, role: Role, loss: tuple[float, float, float] | None
) -> PlanRow:
    fmt = get(said.backward if role == "gradients" else said.forward)
    scale = _scale(plan, said, role, fmt)
    shift = math.frexp(scale)[1] - 1
    formats = (said.forward, said.backward)
    bad = judge.loss_counts(module, role, formats, shift)
    why = judge.why_not_at(module, role, formats, shift)
    return PlanRow(
        module=module.name,
        role=role,
        format=fmt.name,
        scale=scale,
        predicted=None if loss is None else Interval(low=loss[0], estimate=loss[1], high=loss[2]),
        found=None if bad is None else bad.fraction,
        overflow=None if bad is None else bad.overflows,
        ok=why is None,
        why=why,
    )


def _scale(plan: Plan, said: ModulePlan, role: Role, fmt: Format | BlockFormat) -> float:
    """Return the values' factor: their own scale, or the loss scale for gradients."""
    own = said.scales.get(role)
    if own is not None:
        return own
    narrow = isinstance(fmt, Format) and fmt.exponent_bits < FP32.exponent_bits
    return (plan.scale or _USUAL_SCALE) if role == "gradients" and narrow else 1.0


def _verdict(row: PlanRow) -> str:
    if row.ok:
        return "ok"
    return "overflows" if row.overflow is not None and row.overflow.high > 0 else "fails"


def _at_most(interval: Interval | None) -> str:
    return "unknown" if interval is None else percent(interval.high)
