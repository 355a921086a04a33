"""Experiment `unit-factors` (U2): the ideal factor of every operation, by formula and by measurement.

Measured are torch's own operations, on normal inputs and gradients: the factor is one over the scale that comes out.
The bound is Student's, of the standard error over independent runs, which one of a million sound rows exceeds; to it
comes the share that a formula is known to leave out (borders; that an attention's key depends on its weight).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from scipy import stats  # pyright: ignore[reportMissingTypeStubs]
from torch import Tensor

from plimsoll.errors import ArgumentError
from plimsoll.unit.factors.measured import Scale, measure_scales
from plimsoll_lab.bench import Bench
from plimsoll_lab.claim import Claim
from plimsoll_lab.experiments.unit_factors.cases import Case, Direction, cases
from plimsoll_lab.result import Measured
from plimsoll_lab.statistics import largest
from plimsoll_lab.study import Experiment

RUNS, FULL_RUNS = 96, 960
_DOUBT = 1e-6  # how often a sound row exceeds its bound
_WIDEST = 0.1  # a bound above this would show nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One factor: what the formula gives, what was measured, and how far the two may be apart, as a share."""

    case: Case
    direction: Direction
    measured: float
    bound: float

    @property
    def off(self) -> float:
        """How far they are apart, as a share of the formula's."""
        return abs(self.measured / self.direction.factor - 1)

    @property
    def of_bound(self) -> float:
        """That, in units of the bound."""
        return self.off / self.bound

    def __str__(self) -> str:
        d, holds = self.direction, "" if self.of_bound <= 1 else "  NOT WITHIN"
        where = f"{self.case.operation:<14}{self.case.shape:<15}{d.name:<7}"
        return f"{where}{d.formula:<21}{_four(d.factor):>7}{_four(self.measured):>8} {self.bound:6.2%}{holds}"


def _four(value: float) -> str:
    """Four digits, zeros at the end too."""
    return f"{value:#.4g}"


# In the columns of `Row`'s text: 79 signs, so that no terminal wraps them.
HEAD = f"{'operation':<14}{'shape':<15}{'of':<7}{'formula':<21}{'gives':>7}{'is':>8} {'within':>6}"


def measure(bench: Bench) -> Measured:
    """The table, and whether each operation's formulas hold."""
    chosen, runs = cases(), _runs(bench)
    bench.progress.begin("operations", len(chosen))
    rows: list[Row] = []
    for case in chosen:
        rows += measured_rows(case, runs, bench.seed, bench.device)
        bench.progress.advance()
    return Measured(trainings=(), claims=claims(rows), said=(HEAD, *(str(row) for row in rows)))


def measured_rows(case: Case, runs: int, seed: int, device: str = "cpu") -> list[Row]:
    """One operation measured."""

    def drawn(shape: Sequence[int]) -> Tensor:
        return torch.randn(*shape, device=device)

    found = measure_scales(case.function, case.shapes, runs=runs, seed=seed, inputs=drawn)
    student = float(stats.t.ppf(1 - _DOUBT / 2, runs - 1))  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
    pairs = zip(case.directions, (found.output, *found.inputs), strict=True)
    return [_row(case, direction, scale, student) for direction, scale in pairs if direction is not None]


def _row(case: Case, direction: Direction, scale: Scale, student: float) -> Row:
    bound = student * scale.error / scale.value + direction.left_out + 1e-6  # float32's rounding
    return Row(case=case, direction=direction, measured=scale.factor, bound=bound)


def claims(rows: list[Row]) -> tuple[Claim, ...]:
    """One of each operation, and that the bounds are narrow enough to say so."""
    operations = dict.fromkeys(row.case.operation for row in rows)
    return (
        *(
            Claim(f"factors-{name.replace('_', '-')}", f"{name}: every factor by formula is the one measured",
                  largest(row.of_bound for row in rows if row.case.operation == name),
                  at_most=1.0, unit="of the bound")
            for name in operations
        ),
        Claim("bounds-narrow", "every bound is narrow enough for a wrong formula to exceed it",
              largest(row.bound for row in rows), at_most=_WIDEST, unit="of the factor"),
    )  # fmt: skip


def _runs(bench: Bench) -> int:
    return bench.steps or (FULL_RUNS if bench.full else RUNS)


def _settings(bench: Bench) -> Mapping[str, object]:
    runs = _runs(bench)
    if runs < 8:
        raise ArgumentError(
            f"unit-factors: expected 8 runs or more, for a standard error; got steps={runs}. Leave it out."
        )
    return {"runs": runs, "device": bench.device, "doubt": _DOUBT, "operations": len(cases())}


UNIT_FACTORS = Experiment(
    name="unit-factors",
    claim="Every operation's ideal factor, forward and backward, by formula is the one that measurement gives.",
    source="U2",
    settings=_settings,
    measure=measure,
)
