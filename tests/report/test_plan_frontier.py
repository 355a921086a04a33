"""The frontier: the cheapest plans of a run, a plan and measured points on it, and runs that cannot have one."""

from pathlib import Path

import numpy as np
import pytest

from plimsoll import report
from plimsoll.diagnosis import View, plan
from plimsoll.diagnosis.planning.make_plan import frontier
from plimsoll.errors import ArgumentError
from plimsoll.report.figure_declaration import DECLARED
from plimsoll.runs import Run
from tests.support.diagnosis.planned import layers, written

SIZES = {"a": 1e-3, "b": 1e-2, "c": 1e-4, "d": 1e-2}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    steps = [layers(SIZES, step=s) for s in range(4)]
    return written(tmp_path_factory.mktemp("frontier") / "run", steps, losses=[2.0, 1.5, 1.2, 1.0])


def test_the_line_is_the_frontier_and_the_plan_lies_on_it(path: Path) -> None:
    chosen = plan(path, "fp8", budget=0.01)
    figure = report.plan_frontier(path, "fp8", plan=chosen, measured=[(0.75, 0.002), (1.0, 0.0)])
    band, line, marked, measured = (trace for trace in figure.data if trace.name)
    points = frontier(View(Run(path)), "fp8")
    points = points[: sum(p.increase.estimate > 1e-5 for p in points) + 1]
    assert [*line.x] == pytest.approx([100 * p.cost for p in points])
    assert [*line.y] == pytest.approx([max(100 * p.increase.estimate, 1e-3) for p in points])
    assert [*band.y] == pytest.approx([max(100 * p.increase.high, 1e-3) for p in points])
    assert (marked.x[0], marked.y[0]) == pytest.approx((100 * chosen.cost, 100 * chosen.predicted_loss.estimate))
    assert np.interp(marked.x[0], line.x, line.y) >= marked.y[0] * 0.999 or marked.x[0] in [*line.x]
    assert [*measured.x] == [75.0, 100.0] and [*measured.y] == pytest.approx([0.2, 1e-3])
    assert figure.layout.yaxis.type == "log" and figure.layout.xaxis.title.text == "bytes moved, of those in BF16"
    timed = report.plan_frontier(path, "fp8", costs="h100")
    assert timed.layout.xaxis.title.text == "time of the products on h100, of that in BF16"


def test_it_is_offered_where_a_run_has_what_it_needs(path: Path, tmp_path: Path) -> None:
    (case,) = DECLARED["plan_frontier"].cases(View(Run(path)))
    assert DECLARED["plan_frontier"].function(View(Run(path)), **case.arguments).data
    fp16 = written(tmp_path / "fp16", [layers(SIZES)], fmt="fp16", losses=[1.0])
    assert not DECLARED["plan_frontier"].cases(View(Run(fp16)))
    bare = written(tmp_path / "run", [layers(SIZES)])
    assert not DECLARED["plan_frontier"].cases(View(Run(bare)))
    with pytest.raises(
        ArgumentError, match="plan_frontier: expected target to be 'fp16', .* or 'cheapest'; got target='fp9'"
    ):
        report.plan_frontier(path, "fp9")
    empty = report.plan_frontier(bare)
    assert empty.layout.meta["empty"] and "needs the loss" in empty.layout.annotations[0].text
