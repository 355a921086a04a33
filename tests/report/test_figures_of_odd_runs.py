"""Runs that lack something, and names that try to be something else."""

import html
import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from plimsoll import report, row_layout
from plimsoll.diagnosis import View, diagnose
from plimsoll.errors import NotRecordedError
from plimsoll.report import figure_for
from plimsoll.report.drawing.plotly_parts import safe
from plimsoll.runs import Batch, Run, RunWriter, Scalars
from tests.support.cases import each
from tests.support.diagnosis.stories import SOUND, make_story
from tests.support.report import hostile_run as hostile
from tests.support.report.large_run import name_of, rows_of, written

NAN = float("nan")
FIGURES: Mapping[str, Callable[[Path], Any]] = {
    "heatmap": report.heatmap,
    "zero_heatmap": lambda run: report.zero_heatmap(run, "gradients"),
    "underflow_over_time": report.underflow_over_time,
    "scale_curve": report.scale_curve,
    "scale_window": report.scale_window,
    "loss_and_scale": report.loss_and_scale,
    "updates": report.updates,
    "code_usage": lambda run: report.code_usage(run, "gradients"),
    "before_after": lambda run: report.before_after(run, run),
    "record": report.record,
}
# What Plotly renders of HTML, and what of it our own words use.
_OURS = re.compile(r"</?(b|sup|extra)>|<br>")


def is_said(figure: Any) -> bool:
    """Whether it shows something, or says in words what is missing."""
    content = json.loads(figure.to_json())
    words = [note.get("text") for note in content["layout"].get("annotations", [])]
    return any(t.get("x") or t.get("y") for t in content["data"]) or any(words)


@pytest.mark.parametrize("name", FIGURES)
def test_an_empty_run_is_said_to_be_empty(name: str, tmp_path: Path) -> None:
    RunWriter(tmp_path / "run").close()
    figure = FIGURES[name](tmp_path / "run")
    assert figure.layout.meta["empty"] and not figure.data
    assert re.search("[Nn]othing|No |Neither", figure.layout.annotations[0].text)


@pytest.mark.parametrize("name", FIGURES)
def test_one_step_is_enough(name: str, tmp_path: Path) -> None:
    assert is_said(FIGURES[name](SOUND.write(tmp_path / "run", until=0)))


@pytest.mark.parametrize("name", FIGURES)
def test_a_run_of_scalars_lacks_collections(name: str, tmp_path: Path) -> None:
    with RunWriter(tmp_path / "run") as writer:
        writer.write(Scalars(step=3, values={"loss": NAN}))
    assert is_said(FIGURES[name](tmp_path / "run"))


@pytest.mark.parametrize("name", FIGURES)
def test_all_nan_is_no_exception(name: str, tmp_path: Path) -> None:
    story = make_story(change_gradient=lambda g, layer, step: g * NAN, scale=lambda s: NAN, loss=lambda s: NAN)
    assert is_said(FIGURES[name](story.write(tmp_path / "run", until=20)))


def test_numbers_between_gaps_are_dots(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "run") as writer:
        for step, loss in enumerate([3.0, NAN, 2.0, NAN, 1.0, 1.0]):
            writer.write(Scalars(step=step, values={"loss": loss}))
    drawn = next(t for t in report.loss_and_scale(tmp_path / "run").data if t.name == "loss")
    assert (
        drawn.mode == "lines+markers"
        and [bool(size) for size in drawn.marker.size] == [True, False, True] + [False] * 3
    )


def test_a_layer_in_focus_without_a_number_leaves_the_others_to_be_drawn(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with RunWriter(path) as writer:
        series = np.array([writer.series("gradients", name_of(i), format="fp32") for i in range(80)])
        rows = rows_of(np.zeros(80, dtype=int), 0)
        rows[5] = 0
        rows[5, [row_layout.COUNT, row_layout.NANS]] = 1000
        writer.write(Batch(step=0, rows=rows, index=np.arange(80), series=series))
    figures = [report.heatmap(path, kind, "gradients", focus=[name_of(5)]) for kind in ("norm", "absmax")]
    assert all(is_said(figure) and len(figure.data[0].y) == 80 for figure in figures)


@pytest.mark.parametrize("name", FIGURES)
def test_layers_may_be_missing_at_some_steps(name: str, tmp_path: Path) -> None:
    path = tmp_path / "run"
    written(path, layers=5, samples=4, fmt="fp16")
    with RunWriter(path) as writer:  # goes on with one layer of the five, and no scale
        series = np.array([writer.series("gradients", name_of(2), format="fp16")])
        writer.write(Batch(step=90, rows=rows_of(np.array([5]), -2), index=np.arange(1), series=series))
    assert is_said(FIGURES[name](path))


@pytest.mark.parametrize("name", ["heatmap", "zero_heatmap", "underflow_over_time", "scale_curve", "scale_window"])
def test_a_run_without_gradients_is_told_of_by_its_error(name: str, tmp_path: Path) -> None:
    path = tmp_path / "run"
    with RunWriter(path) as writer:
        series = np.array([writer.series("weights", "w", format="fp32")])
        writer.write(Batch(step=0, rows=rows_of(np.array([5]), -2), index=np.arange(1), series=series))
    with pytest.raises(NotRecordedError, match=f"{name}: expected a collection that was recorded; got 'gradients'"):
        FIGURES[name](path)


@each("name", [n for n in FIGURES if n not in ("updates", "loss_and_scale", "record")])
def test_a_large_run_makes_a_small_figure(name: str, large_run: Path) -> None:
    assert len(FIGURES[name](large_run).to_json()) < 300_000


@pytest.fixture(scope="module")
def large_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that fills every cell that a heat map may have."""
    return written(tmp_path_factory.mktemp("large") / "run", layers=260, samples=150, fmt="fp16")


def test_a_large_spectrogram_is_small_too(tmp_path: Path) -> None:
    path = written(tmp_path / "run", layers=1, samples=4000, fmt="fp16")
    assert len(report.spectrogram(path, "gradients", name_of(0)).to_json()) < 300_000


# -- hostile names


def texts(value: object) -> list[str]:
    """Every string of a figure but those of its data for machines (`meta`)."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [t for key, each in value.items() if key not in ("meta", "bdata", "template") for t in texts(each)]
    return [t for each in value for t in texts(each)] if isinstance(value, list) else []


def check(figure: Any) -> None:
    """No markup but ours, no TeX, no control characters, nothing endless; templates hold nothing of a run."""
    content = json.loads(figure.to_json())
    for text in texts(content):
        rest = _OURS.sub("", text)
        assert "<" not in rest, text
        assert not re.search(r"\$.*\$", text), text
        assert "\x1b" not in text and "\u202e" not in text and "\u2028" not in text and "\x00" not in text
        assert len(text) < 3000
    for trace in content["data"]:
        template = trace.get("hovertemplate", "")
        assert not any(word in template for word in ("alert", "evil", "aaaa", "proto")), template


@pytest.fixture(scope="module")
def hostile_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hostile.write(tmp_path_factory.mktemp("hostile") / "run<b>")


@each("name", FIGURES)
def test_names_are_never_markup(name: str, hostile_run: Path) -> None:
    check(FIGURES[name](hostile_run))


def test_names_are_never_markup_in_a_tensors_figure(hostile_run: Path) -> None:
    view = View(Run(hostile_run))
    for collection, names in view.run.tensors.items():
        for name in names[:40]:
            check(report.spectrogram(view, collection, name))
            check(report.heatmap(view, "norm", collection, focus=[name]))


def test_names_are_never_markup_in_a_findings_figure(hostile_run: Path) -> None:
    view = View(Run(hostile_run))
    findings = diagnose(view)
    assert findings
    for finding in findings:
        check(figure_for(view, finding))


@each("name", ["$x$", "<i>x</i>", "a &amp; b", "\u202ex", "y\x1b[2J", "z" * 10_000])
def test_a_name_made_safe_is_text(name: str) -> None:
    text = safe(name)
    assert not set(text) & set("<>$\x1b\u202e") and not re.search("&(?!lt;|gt;|amp;|#36;)", text)
    assert len(html.unescape(text)) <= 60 and (html.unescape(text) == name or not name.isprintable() or len(name) > 60)


def test_names_that_look_alike_keep_rows_of_their_own(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "run") as writer:
        names = ["a" * 5000 + middle + "b" * 5000 for middle in ("x", "y")]
        series = np.array([writer.series("weights", name, format="fp32") for name in names])
        writer.write(Batch(step=0, rows=rows_of(np.array([5, 6]), -2), index=np.arange(2), series=series))
    figure = report.heatmap(tmp_path / "run", "norm", "weights")
    assert len(set(figure.data[0].y)) == 2 and figure.layout.meta["rows"] == [None, None]


@pytest.mark.parametrize("loss", [NAN, 2.5])
def test_a_loss_that_never_was_a_number_has_no_scale_of_numbers(loss: float, tmp_path: Path) -> None:
    figure = report.loss_and_scale(make_story(loss=lambda step: loss, scale=lambda step: None).write(tmp_path / "run"))
    assert figure.layout.yaxis.title.text == "loss"
    assert (figure.layout.yaxis.showticklabels is False) == math.isnan(loss)
