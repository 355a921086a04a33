"""`Spectrum.plot` and `Run.plot`: the figure of an object, without knowing which one it is."""

from pathlib import Path

import numpy as np
import pytest
import torch

import plimsoll as pl
from plimsoll import report
from plimsoll.errors import ArgumentError, FormatError, NotRecordedError
from tests.support.cases import each
from tests.support.diagnosis.stories import SOUND


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> pl.Run:
    return pl.Run(SOUND.write(tmp_path_factory.mktemp("plots") / "run"))


def bars(figure: object) -> tuple[list[int], list[float], list[int]]:
    (trace,) = (trace for trace in figure.data if trace.type == "bar")
    return list(trace.x), list(trace.y), list(trace.customdata)


def test_a_spectrum_is_a_bar_for_each_power_of_two() -> None:
    x = torch.tensor([0.0, 0.0, 1.0, 1.5, -1.0, 0.25, 2.0**-30, float("nan")])
    figure = pl.measure(x).plot()
    exponents, shares, counts = bars(figure)
    assert exponents == [-30, -2, 0] and counts == [1, 1, 3]
    assert shares == pytest.approx([1 / 8, 1 / 8, 3 / 8])
    assert figure.layout.meta["figure"] == "histogram"
    assert "8 values" in figure.layout.title.subtitle.text and "25 % zero" in figure.layout.title.subtitle.text
    assert "12 % NaN" in figure.layout.title.subtitle.text


def lines(figure: object) -> dict[str, float]:
    """The limits that are drawn: their words, and the power of two at which they lie."""
    shapes = [shape.x0 + 0.5 for shape in figure.layout.shapes]
    return dict(zip([note.text for note in figure.layout.annotations], shapes, strict=True))


def test_the_limits_of_a_format_are_lines_that_move_with_the_shift() -> None:
    spectrum = pl.measure(torch.randn(1000, generator=torch.Generator().manual_seed(0)))
    at = lines(spectrum.plot(["e4m3"]))
    assert at == {"e4m3: overflow above": np.log2(464), "e4m3: fewer digits below": -6, "e4m3: zero below": -10}
    moved = lines(spectrum.plot(["e4m3"], shift=3))
    assert moved == {words: place - 3 for words, place in at.items()}
    assert set(lines(spectrum.plot(["fp16", "e5m2"]))) >= {"fp16: fewer digits below", "e5m2: zero below"}


def test_the_format_that_the_values_passed_through_is_drawn() -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    assert "fp16: fewer digits below" in lines(pl.measure(x).plot())
    assert "fp16: fewer digits below" in lines(pl.measure(x.half()).plot())
    spectrum = pl.measure(x.to(torch.float8_e5m2))
    assert all(words.startswith("e5m2: ") for words in lines(spectrum.plot()))


@each("x", [torch.zeros(5), torch.empty(0), torch.full((3,), float("inf"))])
def test_a_spectrum_without_magnitudes_says_so(x: torch.Tensor) -> None:
    figure = pl.measure(x).plot()
    assert "No finite value but zero among" in figure.to_json()


def test_what_cannot_be_drawn_is_refused() -> None:
    spectrum = pl.measure(torch.ones(3))
    with pytest.raises(ArgumentError, match="histogram: expected a Spectrum; got Tensor"):
        report.histogram(torch.ones(3))
    with pytest.raises(ArgumentError, match="expected shift to be an integer from -2200 to 2200; got shift=1.5"):
        spectrum.plot(shift=1.5)
    with pytest.raises(ArgumentError, match="histogram: expected shift to be an integer from -2200 to 2200"):
        spectrum.plot(shift=10**400)
    with pytest.raises(ArgumentError, match="histogram: expected formats to be a list; got formats='e4m3'"):
        spectrum.plot("e4m3")
    assert spectrum.plot(shift=np.int64(3)) == spectrum.plot(shift=3)
    with pytest.raises(FormatError):
        spectrum.plot(["mxfp4"])


def test_a_run_plots_what_it_is_asked_for(run: pl.Run) -> None:
    name = run.tensors["gradients"][0]
    figures = {
        (): run.plot(),
        ("gradients",): run.plot("gradients"),
        ("weights",): run.plot("weights"),
        ("gradients", name): run.plot("gradients", name),
    }
    assert [figure.layout.meta["figure"] for figure in figures.values()] == [
        "loss_and_scale", "heatmap", "heatmap", "spectrogram",
    ]  # fmt: skip
    assert figures["gradients",].layout.meta["statistic"] == "underflow"
    assert figures["weights",].layout.meta["statistic"] != "underflow"
    assert run.plot("gradients", name, formats=["e4m3"]) == report.spectrogram(run, "gradients", name, formats=["e4m3"])
    assert run.plot("gradients", statistic="norm").layout.meta["statistic"] == "norm"


def test_a_name_that_was_not_recorded_is_refused(run: pl.Run) -> None:
    with pytest.raises(NotRecordedError):
        run.plot("gradients", "nowhere")
    with pytest.raises(
        ArgumentError, match=r"Run.plot: expected a collection of tensors; got 'loss', which is a scalar"
    ):
        run.plot("loss")
    with pytest.raises(ArgumentError, match=r"Run.plot: expected the collection of the tensor; got name='x' alone"):
        run.plot(name="x")


def test_a_report_is_a_call(run: pl.Run, tmp_path: Path) -> None:
    assert pl.report(run, tmp_path / "report.html") == tmp_path / "report.html"
    assert (tmp_path / "report.html").read_text("utf-8").startswith("<!doctype html>")
