"""Experiment `unit-sweep` (U6): small models with and without unit scaling.

Every design (sequence layer, norm, residual scheme, optimizer, depth: `grid`) is trained at several learning
rates in five ways: FP32 and FP16 with nothing, FP16 with a static loss scale of 2,048, and unit-scaled in both. Each
way is compared with FP32, each at its best learning rate. By default a fixed part of the grid is trained; `full` trains
all of it, larger and for longer. Either goes on where it was ended: results stand in the folder's ``sweep.jsonl``.

What FP16 needs to fail is stated in `training`. Four trainings of one design are repeated with a watch, to see what
becomes of their gradients.
"""

import io
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.table import Table

from plimsoll.diagnosis import View, diagnose
from plimsoll.report.drawing.plotly_parts import BLUE, GREEN, GREY, ORANGE, RED, Trace, build_figure
from plimsoll.runs import Run
from plimsoll.version import __version__
from plimsoll_lab.bench import Bench
from plimsoll_lab.experiments.unit_sweep.grid import (
    FP16,
    FP32,
    LEDGER,
    STATIC,
    UNIT_FP16,
    UNIT_FP32,
    WAYS,
    Configuration,
    Design,
    Ledger,
    Way,
    default_grid,
    reference,
    results,
    whole_grid,
)
from plimsoll_lab.experiments.unit_sweep.training import TRAINED, Setup, rate_of, setup_for, to_task, train
from plimsoll_lab.result import Claim, Measured, Training, claims as claims_of
from plimsoll_lab.running.workers import carry_out, one_thread, workers_for
from plimsoll_lab.source_text import SYMBOLS, standard_library
from plimsoll_lab.statistics import Ratio, columns, lost, ratio
from plimsoll_lab.study import Experiment

Found = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A design in two ways: bits per character of each."""

    design: Design
    bits: float
    against: float

    @property
    def ratio(self) -> float:
        """Below 1 the first is better."""
        return self.bits / self.against


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Held-out bits per character by design, way and learning rate's place.

    Inf is for no number. `chance`: the bits of a text whose characters are drawn by their frequency alone.
    """

    bits: Mapping[tuple[Design, Way], Mapping[int, float]]
    chance: float

    def best(self, design: Design, way: Way) -> float:
        """The fewest bits of all learning rates."""
        return min(self.bits[design, way].values())

    def best_rate(self, design: Design, way: Way) -> int:
        """Return the place of the learning rate with fewest bits, the lowest if equal."""
        row = self.bits[design, way]
        return min(row, key=lambda place: (row[place], place))

    def pairs(self, way: Way, against: Way) -> tuple[Pair, ...]:
        """Return each design in a way, and in another in FP32, at their best rates."""
        return tuple(
            Pair(design=design, bits=self._counted(self.best(design, way)), against=self.best(other, against))
            for design, other in self._both(way, against)
        )

    def pairs_at_same(self, way: Way, against: Way) -> tuple[Pair, ...]:
        """Return the same pairs, both at the best learning rate of the other way."""
        return tuple(
            Pair(
                design=design, bits=self._counted(self.bits[design, way][self.best_rate(design, against)]),
                against=self.best(design, against),
            )
            for design, other in self._both(way, against)
            if other == design
        )  # fmt: skip

    def learned(self, design: Design, way: Way) -> bool:
        """Return True if its best beats the loss that needs no context."""
        return self.best(design, way) < self.chance

    def _counted(self, bits: float) -> float:
        return min(bits, self.chance)

    def _both(self, way: Way, against: Way) -> list[tuple[Design, Design]]:
        """Return designs trained in one way, with counterparts that learned in another."""
        scaled = way.scaling == "unit" and against.scaling != "unit"
        both = [(design, reference(design) if scaled else design) for design, other in self.bits if other == way]
        return [pair for pair in both if (pair[1], against) in self.bits and self.learned(pair[1], against)]


def scores(configurations: Collection[Configuration], found: Found) -> Scores:
    """The results of a sweep, whose ledger has found so much."""
    bits: dict[tuple[Design, Way], dict[int, float]] = {}
    for each in configurations:
        value = found[each.name]["bits"]
        bits.setdefault((each.design, each.way), {})[each.rate] = value if math.isfinite(value) else math.inf
    return Scores(bits=bits, chance=chance())


def mean(pairs: Collection[Pair]) -> Ratio:
    """The mean ratio over designs and its bounds; NaN for no pairs."""
    if not pairs:
        return Ratio(mean=math.nan, low=math.nan, high=math.nan)
    return ratio(np.array([pair.bits for pair in pairs]), np.array([pair.against for pair in pairs]))


def share(pairs: Collection[Pair], *, at_least: float = 0.0, at_most: float = math.inf) -> float:
    """Of the pairs, the part whose ratio lies within; NaN for no pairs."""
    if not pairs:
        return math.nan
    return sum(at_least <= pair.ratio <= at_most for pair in pairs) / len(pairs)


def unlearned(found: Scores) -> tuple[Design, ...]:
    """Return unscaled designs that learned nothing in FP32, and count in no pair."""
    return tuple(design for design, way in found.bits if way == FP32 and not found.learned(design, way))


@cache
def chance() -> float:
    """Return held-out bits per character by the training's frequencies alone."""
    text = standard_library()
    counts = torch.bincount(text.trained.long(), minlength=SYMBOLS).double() + 1.0
    return float(-(counts / counts.sum()).log2()[text.held_out.long()].mean())


if TYPE_CHECKING:
    from plotly.graph_objects import Figure  # pyright: ignore[reportMissingTypeStubs]

_Point = tuple[Design, float, float]  # and its bits in FP32, and in another way
_BEYOND = 0.3  # bits above chance at which the figure ends: a training that diverged says no more there
TITLES = {
    FP32: "FP32",
    FP16: "FP16, no loss scale",
    STATIC: "FP16, loss scale 2,048",
    UNIT_FP32: "unit-scaled FP32",
    UNIT_FP16: "unit-scaled FP16",
}
_MARKS = {
    FP16: (RED, "x"), STATIC: (ORANGE, "diamond-open"), UNIT_FP16: (BLUE, "circle"), UNIT_FP32: (GREEN, "circle-open"),
}  # fmt: skip


def figure(found: Scores) -> "Figure":
    """Draw designs by their bits in FP32 (across) and in another way (up).

    Raises `MissingExtraError` without Plotly.
    """
    drawn = {way: _points(found, way) for way in WAYS if way != FP32}
    edge = found.chance + _BEYOND
    shown = [min(value, edge) for points in drawn.values() for _, x, y in points for value in (x, y)] or [1.0]
    room = 0.03 * (max(shown) - min(shown)) + 0.01
    ends = [min(shown) - room, max(shown) + room]
    line: Trace = {
        "type": "scatter", "mode": "lines", "x": ends, "y": ends, "line": {"color": GREY, "dash": "dot"},
        "hoverinfo": "skip", "showlegend": False,
    }  # fmt: skip
    layout: dict[str, Any] = {
        "xaxis": {"title": {"text": "bits per character, FP32"}, "range": ends},
        "yaxis": {"title": {"text": "bits per character, this way"}, "range": ends},
        "height": 560,
    }
    traces = [line, *(_trace(way, points, edge) for way, points in drawn.items() if points)]
    title = "Small character models in FP32 and FP16"
    return build_figure("lab unit-sweep", title, _subtitle(found, drawn, edge), traces, layout, {"figure": "sweep"})


def _subtitle(found: Scores, drawn: Mapping[Way, Sequence[_Point]], edge: float) -> str:
    said = "each design at its best learning rate; below the line is better than FP32"
    beyond = sum(max(x, y) > edge for points in drawn.values() for _, x, y in points)
    if beyond:
        said += f"; {beyond} on the edge lie beyond what chance gives"
    alone = sum(way != FP32 for _, way in found.bits) - sum(map(len, drawn.values()))
    return said + (f"; {alone} without a pair in FP32 are not drawn" if alone else "")


def table(found: Scores) -> str:
    """Return a line for each design: its bits in every way, at the best rate there."""
    whole = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for head in ("sequence", "norm", "residual", "optimizer", "depth"):
        whole.add_column(head, no_wrap=True)
    for way in WAYS:
        whole.add_column(TITLES[way], justify="right")
    for design in dict.fromkeys(design for design, _ in found.bits):
        cells = (_cell(found, design, way) for way in WAYS)
        whole.add_row(
            design.sequence, design.norm, design.residual, design.optimizer, str(design.depth), *cells
        )  # fmt: skip
    text = io.StringIO()
    Console(file=text, width=120).print(whole)
    return text.getvalue()


def _cell(found: Scores, design: Design, way: Way) -> str:
    return f"{found.best(design, way):.3f}" if (design, way) in found.bits else ""


def _points(found: Scores, way: Way) -> list[_Point]:
    """Return designs with bits in FP32 and in this way, beside unscaled counterparts."""
    both = [
        (design, reference(design) if way.scaling == "unit" else design) for design, each in found.bits if each == way
    ]
    return [
        (design, found.best(other, FP32), found.best(design, way))
        for design, other in both
        if (other, FP32) in found.bits
    ]


def _trace(way: Way, points: Sequence[_Point], edge: float) -> Trace:
    colour, symbol = _MARKS[way]
    return {
        "type": "scatter", "mode": "markers", "name": TITLES[way], "x": [min(x, edge) for _, x, _ in points],
        "y": [min(y, edge) for _, _, y in points], "cliponaxis": False,
        "text": [f"{design}<br>FP32 {x:.3f}, here {y:.3f}" for design, x, y in points],
        "marker": {"color": colour, "symbol": symbol, "size": 9}, "hovertemplate": "%{text}<extra></extra>",
    }  # fmt: skip


TRAILS = 1.05  # of FP32's bits: from here on a training has not come to what it should
_WITHIN = 1.01
_MOST = 0.9  # of the designs: the source says "in almost all cases"
_SOUND = 0.01  # of gradients lost
Numbers = Mapping[Way, Mapping[str, float]]


def claims(found: Scores, numbers: Numbers) -> tuple[Claim, ...]:
    """Return the experiment's claims; `numbers`: of the watched trainings.

    Bounds on a mean are those it keeps with 95 %.
    """
    return (*_of_fp16(found, numbers), *_of_remedies(found, numbers), *_of_quality(found))


def _of_fp16(found: Scores, numbers: Numbers) -> tuple[Claim, ...]:
    pairs = found.pairs(FP16, FP32)
    return claims_of(
        f"""
        fp16-fails | fp16_fails | at least {TRAILS} of FP32's bits, in the mean
            | FP16 with no loss scale, each at its best learning rate: fails, or trails FP32
        fp16-fails-widely | fp16_fails_widely | at least {_MOST} of the designs
            | FP16 with no loss scale: so it does in most designs
        fp16-underflow | fp16_underflow | at least 0.5 of gradients
            | FP16 with no loss scale: most gradients of activations are zero
        fp16-told | fp16_told | at least 1 alarms | FP16 with no loss scale: an alarm reports the underflow
        """,
        fp16_fails=mean(pairs).low,
        fp16_fails_widely=share(pairs, at_least=TRAILS),
        fp16_underflow=numbers[FP16]["lost_after"],
        fp16_told=numbers[FP16]["underflow_alarms"],
    )


def _of_remedies(found: Scores, numbers: Numbers) -> tuple[Claim, ...]:
    """At the learning rate that is best in FP32: nothing but the precision is changed."""
    static, unit = found.pairs_at_same(STATIC, FP32), found.pairs_at_same(UNIT_FP16, UNIT_FP32)
    return claims_of(
        f"""
        static-repairs | static_repairs | at most {_WITHIN} of FP32's bits, in the mean
            | FP16 with a loss scale of 2,048: as FP32, at the same learning rate
        static-repairs-widely | static_repairs_widely | at least {_MOST} of the designs
            | FP16 with a loss scale of 2,048: so it is in most designs
        unit-repairs | unit_repairs | at most {_WITHIN} of its bits, in the mean
            | unit-scaled FP16: as unit-scaled FP32, at the same learning rate
        unit-repairs-widely | unit_repairs_widely | at least {_MOST} of the designs
            | unit-scaled FP16: so it is in most designs
        unit-nothing-lost | unit_nothing_lost | at most {_SOUND} of gradients
            | unit-scaled FP16: nearly no gradient is lost
        """,
        static_repairs=mean(static).high,
        static_repairs_widely=share(static, at_most=_WITHIN),
        unit_repairs=mean(unit).high,
        unit_repairs_widely=share(unit, at_most=_WITHIN),
        unit_nothing_lost=numbers[UNIT_FP16]["lost_after"],
    )


def _of_quality(found: Scores) -> tuple[Claim, ...]:
    """Unit-scaled against unscaled, each at its best learning rate."""
    pairs = found.pairs(UNIT_FP32, FP32)
    return claims_of(
        f"""
        unit-as-good | unit_as_good | at most {_WITHIN} of FP32's bits, in the mean
            | unit-scaled FP32: as good as FP32, or better, each at its best learning rate
        unit-as-good-widely | unit_as_good_widely | at least {_MOST} of the designs
            | unit-scaled FP32: so it is in most designs
        unit-fp16-as-good | unit_fp16_as_good | at most {_WITHIN} of FP32's bits, in the mean
            | unit-scaled FP16: as good as plain FP32, or better
        """,
        unit_as_good=mean(pairs).high,
        unit_as_good_widely=share(pairs, at_most=_WITHIN),
        unit_fp16_as_good=mean(found.pairs(UNIT_FP16, FP32)).high,
    )


FIGURE, TABLE = "report-sweep.html", "sweep.txt"
WATCHED = (FP16, STATIC, UNIT_FP16, FP32)
_DESIGN = Design(sequence="attention", norm="pre", residual="running-mean", optimizer="adamw", depth=2)


def measure(bench: Bench) -> Measured:
    """All trainings that the folder has no result of yet, and what all of them show."""
    return measure_with(bench, setup_for(bench.steps, full=bench.full), grid_for(bench.full))


def measure_with(bench: Bench, setup: Setup, grid: Sequence[Configuration]) -> Measured:
    """Likewise, with sizes and a grid of the caller."""
    with one_thread(unless=bench.full):
        found = scores(grid, swept(bench, setup, grid))
        trainings = tuple(_watched(bench, setup, grid, found))
    numbers = {way: training.numbers for way, training in zip(WATCHED, trainings, strict=True)}
    _leave(bench.runs.parent, found)
    return Measured(trainings=trainings, claims=claims(found, numbers), said=_said(found, len(grid)))


def grid_for(full: bool) -> tuple[Configuration, ...]:
    """The whole grid, or the fixed part of it that a default run trains."""
    return whole_grid() if full else default_grid()


def swept(bench: Bench, setup: Setup, grid: Sequence[Configuration]) -> Mapping[str, Mapping[str, float]]:
    """Return each configuration's result: the ledger's, and newly trained ones."""
    names = {configuration.name for configuration in grid}
    with Ledger(ledger_of(bench), identity(bench, setup), names) as ledger:
        left = [configuration for configuration in grid if configuration.name not in ledger.found]
        carry_out(
            TRAINED, [to_task(each, setup, seed=bench.seed, device=bench.device) for each in left],
            workers=workers_for(bench.device), progress=bench.progress,
            done=lambda number, answer: ledger.add(left[number].name, answer),
        )  # fmt: skip
        return ledger.found


def ledger_of(bench: Bench) -> Path:
    """Return the results' file, beside the runs' folder, to outlast new beginnings."""
    return bench.runs.parent / LEDGER


def identity(bench: Bench, setup: Setup) -> Mapping[str, object]:
    """Return the settings that all results of one ledger share.

    Results of another are not comparable, and are refused.
    """
    return {
        **asdict(setup),
        "seed": bench.seed,
        "device": bench.device,
        "text_sha256": standard_library().sha256,
        "plimsoll": __version__,
        "torch": torch.__version__,
    }


def _watched(bench: Bench, setup: Setup, grid: Sequence[Configuration], found: Scores) -> Iterator[Training]:
    """Yield one design's trainings again, at FP32's best rate, with all spectra."""
    bench.progress.begin("watched trainings", len(WATCHED))
    design = watched_design(grid)
    for way in WATCHED:
        other = UNIT_FP32 if way.scaling == "unit" else FP32
        configuration = Configuration(design=design, way=way, rate=found.best_rate(design, other))
        run = bench.runs / str(way)
        train(configuration, setup, seed=bench.seed, device=bench.device, run=run)
        yield _judged(configuration, run, found)
        bench.progress.advance()


def watched_design(grid: Sequence[Configuration]) -> Design:
    """Return the design to watch: a transformer, else the grid's first in all ways."""
    ways: dict[Design, set[Way]] = {}
    for each in grid:
        ways.setdefault(each.design, set()).add(each.way)
    whole = [design for design, there in ways.items() if there == set(WAYS)]
    return _DESIGN if _DESIGN in whole else whole[0]


def _judged(configuration: Configuration, folder: Path, found: Scores) -> Training:
    run = Run(folder)
    findings = tuple(diagnose(run))
    alarms = [finding for finding in findings if finding.severity == "alarm"]
    bits = float(run.scalars("bits")[1][-1])
    ratio = bits / found.best(configuration.design, FP32)
    numbers = {"loss_end": bits, "of_fp32": ratio, "rate": rate_of(configuration)}
    numbers["swept_bits"] = found.bits[configuration.design, configuration.way][configuration.rate]
    numbers["underflow_alarms"] = float(sum(finding.rule.startswith("underflow") for finding in alarms))
    numbers |= lost(View(run))
    steps, loss = run.scalars("train_bits")
    return Training(
        name=folder.name, title=TITLES[configuration.way], run=folder, numbers=numbers, findings=findings,
        outcome="trains" if ratio < TRAILS else "fails", good=ratio < TRAILS, series=columns(steps, loss),
        series_of="loss",
    )  # fmt: skip


def _leave(folder: Path, found: Scores) -> None:
    """The figure and the table, beside the report."""
    figure(found).write_html(folder / FIGURE)
    (folder / TABLE).write_text(table(found), "utf-8")


def _said(found: Scores, count: int) -> tuple[str, ...]:
    ways = (FP16, STATIC, UNIT_FP32, UNIT_FP16)
    ratios = ", ".join(f"{TITLES[way]} {mean(found.pairs(way, FP32)).mean:.3f}" for way in ways)
    designs = {design for design, _ in found.bits}
    none = unlearned(found)
    blind = f" {len(none)} of them learn nothing even in FP32 and are not counted." if none else ""
    return (
        f"{count:,} configurations of {len(designs)} designs.{blind}",
        f"Bits per character at the best learning rate, of plain FP32's, in the mean over designs: {ratios}.",
        f"The figure is {FIGURE}, the table {TABLE}, every result a line of {LEDGER}.",
    )


def _settings(bench: Bench) -> Mapping[str, object]:
    """Return the settings; refuse a folder of another setup before any change."""
    setup, grid = setup_for(bench.steps, full=bench.full), grid_for(bench.full)
    setting = identity(bench, setup)
    results(ledger_of(bench), setting, {configuration.name for configuration in grid})
    fp16 = "emulated" if bench.device == "cpu" else "the device's own"
    return {**setting, "fp16": fp16, "configurations": len(grid)}


UNIT_SWEEP = Experiment(
    name="unit-sweep",
    claim="Many designs of small character models fail in FP16; a loss scale of 2,048 or unit scaling repairs them.",
    source="U6",
    settings=_settings,
    measure=measure,
)
