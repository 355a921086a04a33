"""The figure of an audit: what stands where, what the axis names, what hovering says; and that it shows."""

import json
import math
from pathlib import Path
from typing import Any

import plotly
import pytest
import torch
from torch import Tensor, nn

import plimsoll as pl
from plimsoll import report
from plimsoll.errors import ArgumentError, MissingExtraError
from plimsoll.report.figures.audit import lines_of, middle, ticks_of
from plimsoll.unit import Audit, Reading, Row, audit
from tests.support.browser import address, needs_browser

GENERATOR = torch.Generator().manual_seed(0)
UNIT = torch.randn(32, 32, generator=GENERATOR)


def row(i: int, module: str, *, forward: float = 0.0, backward: float | None = 0.0, operation: str = "linear") -> Row:
    return Row(
        position=i, kind="operation", operation=operation, module=module, shape=(32, 32), dtype="float32",
        source="/home/user/model.py:42", forward=pl.measure(UNIT * 2.0**forward),
        backward=None if backward is None else pl.measure(UNIT * 2.0**backward),
        absence="frozen" if backward is None else None,
    )  # fmt: skip


def many(layers: int, shift: float = 0.0) -> Audit:
    parts = ("norm", "attention.qkv", "attention.out", "up", "down")
    rows = [row(i, f"layers.{i // 5}.{parts[i % 5]}", forward=shift, backward=-shift) for i in range(5 * layers)]
    return Audit(model="Deep", rows=tuple(rows))


def named(figure: Any, name: str, axis: str = "x") -> Any:
    return next(t for t in figure.data if t.name == name and (t.xaxis or "x") == axis)


def test_marks_stand_at_the_standard_deviations_in_program_order() -> None:
    torch.manual_seed(0)
    found = audit(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8)), torch.randn(32, 64))
    figure = found.figure()
    for axis, direction in (("x", "forward"), ("x2", "backward")):
        marks = named(figure, "standard deviation", axis)
        readings = list(found.readings(direction))  # pyright: ignore[reportArgumentType]
        assert list(marks.x) == [r.scale for r in readings] and list(marks.y) == [0, 1, 2]
        spans = named(figure, "5 to 95 % of the values", axis)
        assert [end for end in spans.x if end is not None] == [end for r in readings for end in middle(r)]
    assert list(figure.layout.yaxis.ticktext) == ["0 linear", "1 gelu", "2 linear"]
    assert figure.layout.yaxis.range[0] > figure.layout.yaxis.range[1]  # from above
    assert figure.to_json() == report.audit(found).to_json()


def test_the_middle_is_nine_tenths_of_the_magnitudes() -> None:
    x = torch.rand(100_000, generator=GENERATOR) * 1024
    reading = row(0, "a").reading("forward")
    assert reading is not None
    low, high = middle(Reading(row=reading.row, direction="forward", spectrum=pl.measure(x)))
    wanted = x.quantile(torch.tensor([0.05, 0.95])).log2().tolist()
    assert (low, high) == pytest.approx(wanted, abs=0.15)  # even within a binade is not quite so
    one = Reading(row=reading.row, direction="forward", spectrum=pl.measure(torch.tensor([3.0, 0.0])))
    assert middle(one) == (math.log2(3.0), math.log2(3.0))
    zero = Reading(row=reading.row, direction="forward", spectrum=pl.measure(torch.zeros(3)))
    assert math.isnan(middle(zero)[0])


def test_of_two_audits_the_first_is_hollow() -> None:
    figure = many(2, -4.0).compare(many(2)).figure()
    before, after = named(figure, "before: standard deviation"), named(figure, "after: standard deviation")
    assert before.marker.symbol == "circle-open" and after.marker.symbol == "circle"
    assert max(before.x) < -3.9 < -0.1 < min(after.x)
    assert "before 20 of 20 beyond" in figure.layout.title.subtitle.text
    assert "after 0 of 20 beyond" in figure.layout.title.subtitle.text
    assert all("(before)" in text for text in before.text) and "(after)" in after.text[0]


def test_rows_of_one_audit_alone_stand_between_their_neighbours() -> None:
    a, b, c, d, e = (row(i, name) for i, name in enumerate("abcde"))
    before, after = Audit(model="A", rows=(a, b, c, e)), Audit(model="B", rows=(a, d, c))
    lines = lines_of(before, after)
    assert [line.row.module for line in lines] == ["a", "d", "b", "c", "e"]
    assert [(line.before is None, line.after is None) for line in lines] == [
        (False, False), (True, False), (False, True), (False, False), (False, True),
    ]  # fmt: skip


def test_the_limits_of_formats_are_drawn() -> None:
    figure = many(1).figure()
    ends = {round(shape.x0, 3) for shape in figure.layout.shapes if shape.type == "line" and shape.xref == "x"}
    assert {0, -25, round(math.log2(65520), 3), -10, round(math.log2(464), 3)} <= ends
    backward = {round(shape.x0, 3) for shape in figure.layout.shapes if shape.type == "line" and shape.xref == "x2"}
    assert {0, -25, -17, round(math.log2(61440), 3)} <= backward
    bars = [(s.x0, s.x1) for s in figure.layout.shapes if s.type == "rect" and s.xref == "x"]
    assert bars[0] == (-25, -14) and bars[2] == (-10, -6) and bars[4] == (-17, -14)
    words = [note.text for note in figure.layout.annotations]
    assert words.count("FP16") == words.count("E4M3") == words.count("E5M2") == 2


def test_what_has_no_scale_stands_at_the_edges() -> None:
    class Bad(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                shift = self.inner(x)
            return self.inner(x).log() * 0.0 + shift

    torch.manual_seed(0)
    found = audit(Bad(), torch.randn(8, 8))
    figure = found.figure()
    spoiled = named(figure, "NaN or Inf")
    assert "model log" in spoiled.text[0] and "NaN" in spoiled.text[0] and min(spoiled.x) > 16
    assert "no gradient: computed under no_grad" in named(figure, "no gradient", "x2").text[0]
    legend = [t.name for t in figure.data if t.showlegend is not False]
    assert len(legend) == len(set(legend)) and "NaN or Inf" in legend
    json.loads(figure.to_json())


def test_many_operations_are_named_by_groups_and_the_worst_by_name() -> None:
    base = many(40)
    rows = list(base.rows)
    rows[77] = row(77, "layers.15.attention.out", forward=-9.0)
    figure = Audit(model="Deep", rows=tuple(rows)).figure()
    ticks = figure.layout.yaxis
    assert list(ticks.ticktext) == ["layers"]
    assert any("layers.15.attention.out" in note.text for note in figure.layout.annotations)
    assert 1000 < figure.layout.height < 2200
    thirty = many(30).figure().layout.yaxis
    assert list(thirty.ticktext) == [f"layers.{i}" for i in range(30)] and list(thirty.tickvals)[:2] == [2.0, 7.0]


def test_groups_have_their_common_path() -> None:
    rows = [row(i, f"encoder.layers.{i // 4}.part{i % 4}") for i in range(80)]
    ticks = ticks_of(rows)
    assert ticks.texts == [f"encoder.layers.{i}" for i in range(20)] and ticks.borders == list(range(4, 80, 4))
    assert not ticks_of(rows[:60]).grouped


def test_hovering_tells_what_formats_lose() -> None:
    figure = Audit(model="One", rows=(row(0, "a<b>", forward=-12.0, backward=None),)).figure()
    text = named(figure, "standard deviation").text[0]
    assert "<b>a&lt;b&gt; linear</b>" in text and "model.py:42" in text and "/home/user" not in text
    assert "fp16 holds all" in text and "lost" in text and "2<sup>\N{MINUS SIGN}12" in text
    assert "nothing here is trained" in named(figure, "no gradient", "x2").text[0]


def test_an_audit_without_operations_says_so() -> None:
    figure = Audit(model="Empty", rows=()).figure()
    assert figure.layout.annotations[0].text == "The model ran no operation on numbers."


def test_what_is_no_audit_is_refused_and_plotly_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ArgumentError, match="audit figure: expected before to be an Audit; got int. Call plimsoll.unit"
    ):
        report.audit(3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ArgumentError, match="audit figure: expected after to be an Audit; got str"):
        report.audit(many(1), "x")  # pyright: ignore[reportArgumentType]
    monkeypatch.setitem(__import__("sys").modules, "plotly.graph_objects", None)
    with pytest.raises(MissingExtraError, match="audit figure: expected the package plotly; got none. Install it"):
        many(1).figure()


@needs_browser
@pytest.mark.parametrize(("theme", "layers"), [("light", 1), ("dark", 40)])
def test_it_shows_in_a_browser(theme: str, layers: int, page: Any, tmp_path: Path) -> None:
    figure = report.themed(many(layers, -4.0).compare(many(layers)).figure(), theme)  # pyright: ignore[reportArgumentType]
    path = tmp_path / "figure.html"
    figure.write_html(path, include_plotlyjs=False)
    text = path.read_text("utf-8").replace("</head>", f"<script>{plotly.offline.get_plotlyjs()}</script></head>", 1)
    path.write_text(text)
    page.goto(address(path))
    assert page.locator(".scatterlayer .trace").count() >= 8
    assert page.locator(".shapelayer path").count() > 10
    assert page.get_by_text("Forward: values").count() == 1
