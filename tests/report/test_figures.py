"""What each figure shows, against the numbers that the run was made from."""

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from plimsoll import report
from plimsoll.diagnosis import View, plan
from plimsoll.errors import ArgumentError, FormatError, MissingExtraError, NotRecordedError
from plimsoll.report.drawing.plotly_parts import log_share_ticks, share_ticks
from plimsoll.runs import Event, Run, RunWriter, Scalars
from tests.support.cases import each
from tests.support.diagnosis.faults import A, B, falling, put
from tests.support.diagnosis.stories import LAYERS, SOUND, constant, make_story, of_layer, since
from tests.support.report.large_run import name_of, written

NAN = float("nan")
FIGURES: Mapping[str, Callable[..., Any]] = {
    "spectrogram": lambda run, **more: report.spectrogram(run, "gradients", f"{A}.weight", **more),
    "heatmap": report.heatmap,
    "zero_heatmap": lambda run, **more: report.zero_heatmap(run, "gradients", **more),
    "underflow_over_time": report.underflow_over_time,
    "scale_curve": report.scale_curve,
    "scale_window": report.scale_window,
    "loss_and_scale": report.loss_and_scale,
    "updates": report.updates,
    "code_usage": lambda run, **more: report.code_usage(run, "gradients", **more),
    "before_after": lambda run, **more: report.before_after(run, run, **more),
    "record": report.record,
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return SOUND.write(tmp_path_factory.mktemp("sound") / "run", until=60)


def named(figure: Any, words: str) -> Any:
    """The one trace whose name begins so."""
    return next(t for t in figure.data if t.name and t.name.startswith(words))


def cell(figure: Any, row: str, step: int, which: int = 0) -> float:
    """What hovering says of a cell of a heat map."""
    trace = figure.data[which]
    values = trace.customdata if trace.customdata is not None else trace.z
    return float(np.asarray(values)[list(trace.y).index(row), list(trace.x).index(step)])


# -- all of them


@pytest.fixture(scope="module")
def whole_and_part(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("until")
    story = make_story(gradient_std=of_layer(A, since(100, constant(2.0**-36), constant(2.0**-8)), constant(2.0**-8)))
    return story.write(root / "whole"), story.write(root / "part", until=60)


@each("name", FIGURES)
def test_until_is_a_run_that_has_come_so_far(name: str, whole_and_part: tuple[Path, Path]) -> None:
    whole, part = whole_and_part
    text, wanted = (FIGURES[name](path, **more).to_json() for path, more in ((whole, {"until": 60}), (part, {})))
    if name == "before_after":  # its legend has the run's folder
        text = text.replace("whole", "part")
    if name != "record":  # says how the run was closed, and samples of the whole
        assert text == wanted
    assert text != FIGURES[name](whole).to_json()


@each("name", FIGURES)
def test_a_view_has_an_end_of_its_own(name: str, sound: Path) -> None:
    view = View(Run(sound), 30)
    assert FIGURES[name](view).to_json() == FIGURES[name](sound, until=30).to_json()
    with pytest.raises(ArgumentError, match="expected until=None with a View, which has its own; got 20. Make another"):
        FIGURES[name](view, until=20)


@pytest.mark.parametrize("name", FIGURES)
def test_without_plotly_the_install_line_is_named(name: str, sound: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "plotly.graph_objects", None)
    with pytest.raises(MissingExtraError, match=r"expected the package plotly; got none. Install it: pip install"):
        FIGURES[name](sound)


def axes(figure: Any) -> Iterator[Any]:
    """The axes of steps, layers and numbers."""
    return (axis for key, axis in figure.layout.to_plotly_json().items() if key[1:].startswith("axis"))


@each("name", FIGURES)
def test_axes_write_shares_as_all_other_text_does(name: str, sound: Path) -> None:
    for axis in axes(FIGURES[name](sound)):
        assert "%" not in axis.get("tickformat", "")
        assert all(text.endswith(" %") for text in axis.get("ticktext", ()) if "%" in text)


def test_ticks_of_shares_reach_from_end_to_end(sound: Path) -> None:
    ticks = [axis["ticktext"] for axis in axes(report.updates(sound)) if " %" in str(axis.get("ticktext"))]
    assert ticks == [["0 %", "20 %", "40 %", "60 %", "80 %", "100 %"]]
    assert share_ticks(-0.3, 0.5)["ticktext"] == ["\u221220 %", "0 %", "20 %", "40 %"]
    assert share_ticks(0, 0.0004, 4) == {"tickvals": [0, 1e-4, 2e-4, 3e-4, 4e-4], "ticktext": [
        "0 %", "0.01 %", "0.02 %", "0.03 %", "0.04 %"]}  # fmt: skip
    assert share_ticks(0, NAN) == share_ticks(0, 0) == share_ticks(0, 1)
    assert log_share_ticks(-6.3)["ticktext"] == [
        "0.0001 %", "0.001 %", "0.01 %", "0.1 %", "1 %", "10 %", "100 %"]  # fmt: skip


# -- spectrogram


def test_a_spectrogram_holds_the_share_of_each_binade_and_of_zeros(tmp_path: Path) -> None:
    path = written(tmp_path / "run", layers=3, samples=5)
    figure = report.spectrogram(path, "gradients", name_of(2), formats=[])
    trace = figure.data[0]
    shares = np.asarray(trace.customdata)
    rows = {float(y): i for i, y in enumerate(trace.y)}
    ticks = dict(zip(figure.layout.yaxis.ticktext, figure.layout.yaxis.tickvals, strict=True))
    for sample in range(5):
        assert shares[rows[-float(sample)], sample] == pytest.approx(99.8)  # the binade of 2^-sample
        assert shares[rows[ticks["zero"]], sample] == pytest.approx(0.2, rel=1e-6)
    assert np.nansum(shares, axis=0) == pytest.approx(np.full(5, 100.0), rel=1e-5)


def test_many_steps_are_added_up(tmp_path: Path) -> None:
    path = written(tmp_path / "run", layers=1, samples=1400)
    figure = report.spectrogram(path, "gradients", name_of(0), formats=[])
    shares = np.asarray(figure.data[0].customdata)
    assert shares.shape[1] < 1400 and "samples, added up" in figure.layout.title.subtitle.text
    assert np.nansum(shares, axis=0) == pytest.approx(np.full(shares.shape[1], 100.0), rel=1e-5)


def test_infinities_and_nan_have_rows_of_their_own(tmp_path: Path) -> None:
    path = make_story(change_activation=put(NAN, A, 10)).write(tmp_path / "run", until=20)
    figure = report.spectrogram(path, "activations", f"{A}:output")
    texts = figure.layout.yaxis.ticktext
    assert texts[-1] == "NaN" and "infinite" not in texts
    shares = np.asarray(figure.data[0].customdata)
    assert np.isnan(shares[-1, 0]) and shares[-1, -1] == pytest.approx(100 / 512)


def heights(figure: Any, words: str) -> np.ndarray:
    """The exponents at which a load line stands."""
    return np.asarray(named(figure, words).y, dtype=np.float64) + 0.5


def test_values_are_the_true_ones(tmp_path: Path) -> None:
    path = make_story(gradient_fmt="fp32").write(tmp_path / "run", until=20)
    scaled = report.spectrogram(path, "activation_gradients", f"{A}:output", formats=[])  # recorded times 2^10
    plain = report.spectrogram(path, "gradients", f"{A}.weight", formats=[])
    assert np.array_equal(scaled.data[0].customdata, plain.data[0].customdata, equal_nan=True)
    assert np.array_equal(scaled.data[0].y, plain.data[0].y)


def test_load_lines_stand_at_the_formats_limits(sound: Path) -> None:
    figure = report.spectrogram(sound, "activations", f"{A}:output", formats=["fp16", "e4m3"])
    assert heights(figure, "fp16: overflow") == pytest.approx(np.log2(65520), abs=1e-4)
    assert heights(figure, "fp16: fewer digits") == pytest.approx(-14)
    assert heights(figure, "fp16: zero") == pytest.approx(-25)
    assert heights(figure, "e4m3: overflow") == pytest.approx(np.log2(464), abs=1e-4)
    moved = report.spectrogram(sound, "activations", f"{A}:output", formats=["fp16"], shift=3)
    assert heights(moved, "fp16: fewer digits") == pytest.approx(-17)


@pytest.mark.parametrize("collection", ["gradients", "activation_gradients"])
def test_load_lines_follow_the_recorded_scale(collection: str, tmp_path: Path) -> None:
    path = make_story(scale=falling(100, 10)).write(tmp_path / "run")
    name = f"{A}.weight" if collection == "gradients" else f"{A}:output"
    line = named(report.spectrogram(path, collection, name), "fp16: zero")
    held = dict(zip(np.asarray(line.x).tolist(), np.asarray(line.y) + 0.5, strict=True))
    assert held[0] == pytest.approx(-35) and held[195] == pytest.approx(-25)  # scales of 2^10 and 1
    assert line.line.shape == "hvh"


def test_limits_far_from_the_values_are_told_in_words(sound: Path) -> None:
    figure = report.spectrogram(sound, "activations", f"{A}:output", formats=["bf16"])
    assert not [t for t in figure.data if t.name and t.name.startswith("bf16: overflow")]
    assert "bf16: overflow above 2<sup>128</sup>" in figure.layout.title.subtitle.text


def test_unknown_names_formats_and_shifts_are_refused(sound: Path) -> None:
    with pytest.raises(NotRecordedError, match="spectrogram: expected a name in 'weights' that was recorded; got 'x'"):
        report.spectrogram(sound, "weights", "x")
    with pytest.raises(NotRecordedError, match="spectrogram: expected a collection that was recorded; got 'cats'"):
        report.spectrogram(sound, "cats", "x")
    with pytest.raises(FormatError, match="spectrogram: expected a format for values; got mxfp4. Ask for an element"):
        report.spectrogram(sound, "weights", f"{A}.weight", formats=["mxfp4"])
    with pytest.raises(
        ArgumentError, match="expected shift to be an integer from -2200 to 2200; got shift=1.5. .*None takes"
    ):
        report.spectrogram(sound, "weights", f"{A}.weight", shift=1.5)  # pyright: ignore[reportArgumentType]
    shifted = [report.spectrogram(sound, "weights", f"{A}.weight", shift=shift) for shift in (3, np.int64(3))]
    assert shifted[0] == shifted[1]


@each("mark", [(0.0, "none"), (-1.0, "below"), (NAN, "nan"), (float("inf"), "all"), (1e-16,), 1e-16])
def test_a_mark_that_has_no_place_among_magnitudes_is_refused(mark: Any, sound: Path) -> None:
    with pytest.raises(ArgumentError, match=r"spectrogram: expected mark\[0\] to be a number above 0"):
        report.spectrogram(sound, "weights", f"{A}.weight", mark=mark)


# -- heat maps


def test_a_heat_map_holds_each_layers_number(tmp_path: Path) -> None:
    path = written(tmp_path / "run", layers=4, samples=5)
    zero = report.heatmap(path, "zero")
    assert [cell(zero, name_of(i), 20) for i in range(4)] == pytest.approx([0.0, 0.1, 0.2, 0.3], rel=1e-5)
    norm = report.heatmap(path, "norm")
    assert cell(norm, name_of(0), 30) == pytest.approx(np.log2(2.0**-3 * np.sqrt(1000)), rel=1e-5)
    assert cell(report.heatmap(path, "absmax"), name_of(1), 40) == pytest.approx(-4)
    assert cell(report.heatmap(path, "headroom"), name_of(1), 40) == pytest.approx(132, abs=1e-3)
    std = 2.0**-2 * np.sqrt(0.9 * 0.1)  # of values that are 0 or 2^-2
    assert cell(report.heatmap(written(tmp_path / "b", 101, 3), "std"), name_of(100), 20) == pytest.approx(np.log2(std))
    assert zero.layout.meta["rows"] == [name_of(i) for i in range(4)]


def test_the_steps_of_a_heat_map_end_with_the_run_wherever_its_mark_is(tmp_path: Path) -> None:
    path = written(tmp_path / "run", layers=4, samples=5)
    for figure in (report.heatmap(path, "zero", since_step=0), report.zero_heatmap(path, "gradients", since_step=0)):
        assert figure.layout.annotations[0].text == "since step 0"
        first, second, *_, last = figure.data[0].x
        assert figure.layout.xaxis.range == (first - (second - first) / 2, last + (second - first) / 2)


def test_the_worst_sample_of_a_column_is_the_one_that_counts(tmp_path: Path) -> None:
    story = make_story(samples=450, every=1, gradient_std=lambda name, s: 2.0 ** (-36 if (name, s) == (A, 350) else -8))
    figure = report.heatmap(story.write(tmp_path / "run"))
    trace = figure.data[0]
    row = np.asarray(trace.customdata)[list(trace.y).index(A)]
    assert len(trace.x) <= 400 and "the highest" in figure.layout.title.subtitle.text
    assert row.max() > 90 and np.count_nonzero(row > 50) == 1
    assert abs(int(trace.x[int(row.argmax())]) - 350) <= 2


def test_underflow_of_gradients_is_told_by_module_and_blank_where_nothing_is_left(tmp_path: Path) -> None:
    story = make_story(gradient_std=of_layer(A, constant(2.0**-60), constant(2.0**-8)))
    figure = report.heatmap(story.write(tmp_path / "run", until=20))
    assert list(figure.data[0].y) == list(LAYERS)
    assert np.isnan(cell(figure, A, 10)) and cell(figure, B, 10) == 0


def test_another_statistic_is_refused(sound: Path) -> None:
    with pytest.raises(ArgumentError, match="heatmap: expected a statistic among underflow, .*; got 'sparkle'. Choose"):
        report.heatmap(sound, "sparkle")
    with pytest.raises(ArgumentError, match="heatmap: expected collection='updates' with 'ratio'; got 'weights'. Give"):
        report.heatmap(sound, "ratio", "weights")
    with pytest.raises(NotRecordedError, match="heatmap: expected a collection that was recorded; got 'cats'"):
        report.heatmap(sound, collection="cats")


def test_zeros_are_split_into_those_a_format_made_and_the_others(tmp_path: Path) -> None:
    story = make_story(
        gradient_std=of_layer(A, constant(2.0**-35), constant(2.0**-8)),
        change_gradient=lambda g, name, s: g * (name != B or s < 10),
    )
    figure = report.zero_heatmap(story.write(tmp_path / "run", until=20), "gradients")
    a, b = f"{A}.weight", f"{B}.weight"
    assert cell(figure, a, 20, 1) > 40 and cell(figure, a, 20, 0) < 20
    assert cell(figure, b, 20, 0) == 100 and cell(figure, b, 20, 1) == 0
    assert "estimated" in figure.layout.title.subtitle.text


# -- the scale


def test_the_cost_of_scales_is_that_of_the_whole_population(sound: Path) -> None:
    from plimsoll.diagnosis import whatif

    figure = report.scale_curve(sound, "fp16")
    lost, over = named(figure, "lost"), named(figure, "overflows")
    for shift in (-12, 2, 10, 20):
        fit = whatif(sound, "fp16", shift).overall.fit
        place = list(lost.x).index(shift) if shift in list(lost.x) else None
        if place is not None:
            assert lost.y[place] == pytest.approx(fit.lost.estimate, abs=2e-3)
            assert over.y[place] == pytest.approx(fit.overflow.estimate, abs=2e-3)
    low, high = figure.layout.meta["window"]
    assert whatif(sound, "fp16", high).overall.fit.overflow.high == 0
    assert whatif(sound, "fp16", high + 2).overall.fit.overflow.estimate > 0
    assert whatif(sound, "fp16").overall.window == (low, high)
    assert "used: 2<sup>10</sup>" in figure.layout.title.subtitle.text


def test_values_that_the_runs_own_format_lost_count(tmp_path: Path) -> None:
    path = make_story(scale=lambda s: 1.0, gradient_std=constant(2.0**-25)).write(tmp_path / "run", until=60)
    lost = named(report.scale_curve(path), "lost")
    at = dict(zip(np.asarray(lost.x).tolist(), np.asarray(lost.y).tolist(), strict=True))
    assert at[0] > 0.3 and at[8] < 0.05  # half of such normal values are below 2^-25


def test_the_window_is_that_of_the_layers_and_red_where_none_works(tmp_path: Path) -> None:
    story = make_story(
        gradient_std=of_layer(A, since(100, constant(2.0**-36), constant(2.0**-8)), constant(2.0**3)),
        gradient_fmt="bf16",
    )
    figure = report.scale_window(story.write(tmp_path / "run"), focus=[f"{A}.weight"])
    need, room = named(figure, "a layer loses"), named(figure, "overflow above")
    assert need.y[0] < room.y[0] and need.y[-1] > room.y[-1]
    shades = [shape for shape in figure.layout.shapes if shape.type == "rect"]
    assert len(shades) == 1 and shades[0].x0 == 100
    assert set(np.asarray(named(figure, "scale used").y)) == {10.0}
    assert f"{A} needs" in figure.layout.title.subtitle.text
    lines = re.sub("</?sup>", "", figure.layout.title.subtitle.text).split("<br>")
    assert all(len(line) <= 120 for line in lines)  # of a figure of 900 pixels
    assert np.asarray(named(figure, f"{A} needs").y)[[0, -1]].tolist() == [need.y[0], need.y[-1]]


def test_loss_scale_and_what_happened_stand_on_one_axis(tmp_path: Path) -> None:
    path = make_story(scale=falling(100, 10), skipped=lambda s: float(100 <= s < 110)).write(tmp_path / "run")
    with RunWriter(path) as writer:
        writer.write(Event(step=120, kind="guard", message="raise_scale: to 2^10", details={"dry_run": True}))
    figure = report.loss_and_scale(path)
    assert np.asarray(named(figure, "loss scale").y)[[0, -1]].tolist() == [10.0, 0.0]
    assert list(named(figure, "skipped step").x) == list(range(100, 110))
    lanes = [t for t in figure.data if t.text is not None]
    labels = figure.layout.yaxis3.ticktext
    assert "alarm: scale-collapse" in labels and labels[-1] == "guard: 1 acts"
    assert len({t.y[0] for t in lanes}) == len(lanes) == len(labels)  # none overlaps another
    assert {t.yaxis for t in lanes} == {"y3"} and lanes[-1].x[0] == 120
    assert not [t for t in report.loss_and_scale(path, ()).data if t.text is not None and t.x[0] == 100]


def test_two_runs_stand_beside_each_other(tmp_path: Path, sound: Path) -> None:
    other = make_story(loss=lambda s: 1.0).write(tmp_path / "other", until=60)
    figure = report.loss_and_scale(sound, (), beside=other)
    assert named(figure, "other loss").line.dash == "dash" and set(named(figure, "other loss").y) == {1.0}


def test_many_losses_keep_their_extremes(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "run", flush_seconds=600) as writer:
        for step in range(5000):
            writer.write(Scalars(step=step, values={"loss": 50.0 if step == 3333 else NAN if step == 10 else 2.0}))
    figure = report.loss_and_scale(tmp_path / "run", ())
    line = named(figure, "loss, lowest to highest")
    assert max(line.y) == 50 and len(line.x) <= 1200
    assert list(named(figure, "loss is NaN").x) == [10]
    assert "no loss scale was recorded" in figure.layout.title.subtitle.text


# -- the others


def test_underflow_over_time_tells_the_rules_outlook(tmp_path: Path) -> None:
    story = make_story(gradient_std=lambda name, s: 2.0 ** (-27 - 0.04 * s))
    path = story.write(tmp_path / "run")
    figure = report.underflow_over_time(path)
    assert "outlook: raise the scale" in figure.layout.title.subtitle.text
    everything = np.asarray(named(figure, "of all parameter gradient values").y)
    view = View(Run(path))
    narrow = view.narrow("gradients")
    assert narrow is not None
    nonzero, lost = narrow.cells.total(narrow.cells.nonzero).sum(0), narrow.lost_of_cell.sum(0)
    assert everything == pytest.approx(lost / (lost + nonzero), rel=1e-5)
    assert np.asarray(named(figure, "of layers").y)[[0, -1]].tolist() == [0.0, 1.0]
    assert "outlook: stay" in report.underflow_over_time(SOUND.write(tmp_path / "b")).layout.title.subtitle.text


def test_updates_are_held_against_their_weights(tmp_path: Path) -> None:
    story = make_story(weight_fmt="bf16", unmoved=of_layer(A, constant(0.97), constant(0.1)))
    figure = report.updates(story.write(tmp_path / "run", until=30))
    median = [t for t in figure.data if t.name == "median layer"]
    assert np.asarray(median[0].y) == pytest.approx(-10, abs=0.1)
    worst = [t for t in figure.data if t.name == f"{A}.weight" and t.yaxis == "y2"]
    assert np.asarray(worst[0].y) == pytest.approx(0.97)
    assert "bf16 swallows below 2<sup>\N{MINUS SIGN}9</sup>" in [a.text for a in figure.layout.annotations]


def test_codes_are_counted_by_binade(tmp_path: Path) -> None:
    story = make_story(activation_fmt="e4m3", activation_std=of_layer(B, constant(2000.0), constant(9.0)))
    path = story.write(tmp_path / "run", until=30)
    figure = report.code_usage(path, "activations", f"{B}:output")
    bars = figure.data[0]
    top = dict(zip(bars.x, bars.y, strict=True))[8]
    spectrum = [s for *_, s in Run(path).spectra("activations", f"{B}:output")]
    held, all_of = sum(int(s.binades[149 + 8]) for s in spectrum), sum(s.count for s in spectrum)
    assert top == pytest.approx(held / all_of) and sum(bars.y) == pytest.approx(1.0)
    assert figure.layout.title.text == f"Activations of {B}:output: how they use e4m3"


def test_tensors_that_no_8_bit_format_held_are_scaled_to_fit(sound: Path) -> None:
    figure = report.code_usage(sound, "weights", fmt="e5m2")
    bars = figure.data[0]
    assert "as e5m2 would hold them" in figure.layout.title.subtitle.text
    assert max(bars.x) == 15 and dict(zip(bars.x, bars.y, strict=True))[15] > 0  # none is cut off


def test_before_and_after_are_those_of_each_layer(tmp_path: Path, sound: Path) -> None:
    bad = make_story(gradient_std=of_layer(A, constant(2.0**-34), constant(2.0**-8))).write(tmp_path / "bad", until=60)
    figure = report.before_after(bad, sound)
    before, after = named(figure, "bad"), named(figure, "run")
    assert before.y[0] == A and before.x[0] > 0.2 and after.x[0] == 0
    assert figure.layout.meta["layers"] == len(LAYERS)
    planned = report.before_after(bad, plan(bad, "fp8", include=["blocks.*"]))
    assert named(planned, "as it was").x[0] > 0.2 and named(planned, "as planned (fp8)").x[0] < 0.01
    with pytest.raises(ArgumentError, match="before_after: expected a statistic among underflow; got 'norm'. Choose"):
        report.before_after(bad, plan(bad, "fp8", include=["blocks.*"]), statistic="norm")
    with pytest.raises(ArgumentError, match="expected a collection among weights, .* with a plan; got 'updates'"):
        report.before_after(bad, plan(bad, "fp8", include=["blocks.*"]), "updates")


def test_sizes_before_and_after_are_medians(tmp_path: Path, sound: Path) -> None:
    other = make_story(weight_std=constant(2.0**-3)).write(tmp_path / "other", until=60)
    figure = report.before_after(sound, other, "weights", "rms")
    assert np.asarray(named(figure, "run").x) == pytest.approx(-5, abs=0.2)
    assert np.asarray(named(figure, "other").x) == pytest.approx(-3, abs=0.2)


def test_the_record_tells_gaps_and_losses(tmp_path: Path) -> None:
    path = tmp_path / "run"
    SOUND.write(path, until=60)
    with RunWriter(path) as writer:
        writer.write(Event(step=30, kind="not measured", message="weights w: on no device"))
    (next((path / "spectra").iterdir())).write_bytes(b"torn")
    with pytest.warns(RuntimeWarning, match="damaged"):
        figure = report.record(path)
    assert any("not measured (1)" in text for text in figure.layout.yaxis.ticktext)
    assert any("damaged" in note.text for note in figure.layout.annotations)
