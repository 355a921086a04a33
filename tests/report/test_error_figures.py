"""The figures of errors: bias and noise by depth, of a run and of a report, and bars of blame."""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("plotly", reason="figures need the extra report: pip install 'plotly>=6.0'")

import plimsoll as pl
from plimsoll import report
from plimsoll.diagnosis import View
from plimsoll.microscope import Blame, BlameRow
from plimsoll.report.page.answers import offered
from plimsoll.spectrum import Interval
from tests.support.browser import needs_browser
from tests.support.report.report_file import ReportFile
from tests.support.report.served import at, drawn as drawn_on_page, expect, served, wait_for_title

SHADOWS = 6


def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Products with operands rounded toward zero, which is a bias."""
    with pl.emulate(forward="e4m3", backward="e5m2", rounding="toward_zero", scale={"gradients": 2.0**10}):
        return model(x).square().mean()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A watched training with shadow steps, and the microscope's report of the same model."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    place = tmp_path_factory.mktemp("errors") / "run"
    with pl.watch(model, optimizer, run=place, every=1, shadow_every=1, quiet=True):
        for _ in range(SHADOWS):
            optimizer.zero_grad()
            step(model, torch.randn(32, 16)).backward()
            optimizer.step()
    closures = [lambda x=x: step(model, x) for x in torch.randn(4, 32, 16)]
    return SimpleNamespace(run=place, report=pl.microscope(model, closures, draws=4))


def drawn(figure: Any) -> Mapping[str, Any]:
    return {trace.name: trace for trace in figure.data}


def test_of_a_run_bias_and_noise_make_up_the_error(made: Any) -> None:
    figure = report.layer_errors(made.run)
    noise, bias = drawn(figure)["noise"], drawn(figure)["bias, with its interval"]
    assert list(noise.y) == list(figure.layout.meta["rows"])
    assert noise.y[0].startswith("0.") and noise.y[-1].startswith("4.")
    run = pl.Run(made.run)
    for name, n, b in zip(noise.y, noise.x, bias.x, strict=True):
        whole = np.sqrt(np.mean(np.square(run.series("gradients", name, "relative_error")[1])))
        assert np.hypot(n, b) == pytest.approx(whole, rel=1e-4)
    along = run.series("gradients", "0.weight", "along_reference")[1]
    place = list(noise.y).index("0.weight")
    assert np.mean(along) < -0.03  # the planted bias, which is what is drawn
    assert bias.x[place] == pytest.approx(abs(np.mean(along)), rel=0.1)
    assert figure.layout.title.subtitle.text.startswith(f"{SHADOWS} shadow steps")
    assert len(figure.layout.shapes) == 1 and figure.layout.shapes[0].x0 == pytest.approx(3**-0.5)


def test_of_a_report_the_rows_are_drawn(made: Any) -> None:
    for collection in ("gradients", "activations", "activation_gradients"):
        figure = report.layer_errors(made.report, collection)
        noise, bias = drawn(figure)["noise"], drawn(figure)["bias, with its interval"]
        assert len(noise.y) > 3
        for i, name in enumerate(noise.y):
            row = made.report.row(name, collection)
            assert noise.x[i] == pytest.approx(max(row.noise, 1e-9), rel=1e-5)
            assert bias.x[i] == pytest.approx(max(row.bias.estimate, 1e-9), rel=1e-5)
            assert bias.x[i] + bias.error_x.array[i] == pytest.approx(row.bias.high, rel=1e-4, abs=1e-8)
        assert noise.y[0].startswith("0") and noise.y[-1].startswith("4")  # from the first layer to the last
        assert bool(figure.layout.shapes) == (collection != "activations")


def test_each_tensor_is_drawn_once(made: Any) -> None:
    """The output of a layer is the input of the next."""
    names = drawn(report.layer_errors(made.run, "activations"))["noise"].y
    assert "0:output" in names and "1:input" not in names


def test_the_page_offers_what_shadow_steps_recorded(made: Any, tmp_path: Path) -> None:
    view = View(pl.Run(made.run))
    ours = [each for each in offered(view) if each["figure"] == "layer_errors"]
    assert {each["arguments"]["collection"] for each in ours} == {"gradients", "activations", "activation_gradients"}
    assert next(each["figure"] for each in offered(view) if each["section"] == "layers") == "heatmap"  # shown at first
    pictures = ReportFile(report.html(made.run, tmp_path / "report.html")).answers["run"]["pictures"]
    assert [each for each in pictures if each["figure"] == "layer_errors"] == ours


@needs_browser
def test_the_live_page_draws_them(made: Any, page: Any) -> None:
    pytest.importorskip("fastapi", reason="the live page needs the extra serve: pip install '.[serve]'")
    with served(made.run.parent) as site:
        for collection, titled in (("gradients", "parameter gradients"), ("activations", "activations")):
            at(page, site, f"#/run/run?layers=layer_errors:{collection}")
            figure = drawn_on_page(page, ".layers-figure")
            wait_for_title(figure, f"Bias and noise of {titled}")
            expect(figure.locator(".about")).to_contain_text(f"{SHADOWS} shadow steps \N{MIDDLE DOT} ")
            points = "node => node.querySelector('.plot')._fullData.map(trace => [trace.name, [...trace.y]])"
            shown = report.layer_errors(made.run, collection).data
            assert figure.evaluate(points) == [[trace.name, list(trace.y)] for trace in shown]


def test_what_is_missing_is_said(made: Any, tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pl.watch(model, optimizer, run=tmp_path / "plain", every=1, quiet=True):
        model(torch.randn(4, 4)).sum().backward()
        optimizer.step()
    figure = report.layer_errors(tmp_path / "plain")
    assert figure.layout.meta["empty"] and "shadow_every" in figure.layout.annotations[0].text
    assert not [each for each in offered(View(pl.Run(tmp_path / "plain"))) if each["figure"] == "layer_errors"]
    with pytest.raises(pl.NotRecordedError, match="expected a collection of the report; got 'weights'"):
        report.layer_errors(made.report, "weights")
    with pytest.raises(pl.NotRecordedError):
        report.layer_errors(made.run, "nothing")


def blame(*rows: BlameRow) -> Blame:
    return Blame(rows=rows, of="gradients", relative_error=0.1, passes=9.0)


def row(share: float, bias: float | None = None, noise: float | None = None, module: str = "a") -> BlameRow:
    interval = None if bias is None else Interval(low=bias, high=bias, estimate=bias)
    return BlameRow(
        module=module, cast="e5m2 of gradients", direction="backward", share=share, bias=interval, noise=noise
    )


def test_bars_are_shares_split_by_squares() -> None:
    found = blame(row(0.75, 0.3, 0.4), row(0.25, module="b"), row(-0.05, module="<b>c</b>"))
    figure = report.blame_bars(found)
    bars = drawn(figure)
    assert list(bars["noise"].x) == pytest.approx([0.75 * 0.64, 0, 0])
    assert list(bars["bias"].x) == pytest.approx([0.75 * 0.36, 0, 0])
    assert list(bars["not split"].x) == pytest.approx([0, 0.25, -0.05])
    assert figure.layout.yaxis.autorange == "reversed" and bars["noise"].y[0] == "a<br>e5m2 of gradients, backward"
    assert "<b>" not in bars["noise"].y[2]


def test_many_bars_share_the_last() -> None:
    found = blame(*(row(1 / 30, 0.0, 1.0, module=f"m{i}") for i in range(30)))
    bars = drawn(report.blame_bars(found))
    assert list(bars) == ["noise"] and len(bars["noise"].y) == 21
    assert bars["noise"].y[-1] == "10 smaller ones" and sum(bars["noise"].x) == pytest.approx(1)


def test_blame_of_nothing_and_of_something_else(made: Any) -> None:
    assert report.blame_bars(blame()).layout.meta["empty"]
    with pytest.raises(pl.ArgumentError, match=r"expected the result of ErrorReport.blame; got ErrorReport"):
        report.blame_bars(made.report)
