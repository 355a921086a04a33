"""What-if: predictions against real casts of real training tensors, which must lie inside the intervals."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import plimsoll as pl
from plimsoll.diagnosis import Stretch, View, WhatIf, whatif
from plimsoll.diagnosis.estimates.usable_scales import stretches_of
from plimsoll.errors import ArgumentError, FormatError, NotRecordedError, RunError
from plimsoll.formats import get
from plimsoll.report import html
from plimsoll.runs import Run, RunWriter, Scalars
from tests.support.cases import each
from tests.support.diagnosis.stories import LAYERS, constant, make_story, since

STEPS = 3


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[tuple[str, str, int], Tensor]]:
    """A small training, and the very tensors that were recorded of it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 32), nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 50))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    tensors: dict[tuple[str, str, int], Tensor] = {}
    path = tmp_path_factory.mktemp("whatif") / "run"
    with pl.watch(model, optimizer, run=path, every=1, collect=("weights", "gradients", "activations")):
        for step in range(STEPS):
            x = torch.randint(0, 50, (16, 8))
            for name, p in model.named_parameters():
                tensors["weights", name, step] = p.detach().clone()
            loss = nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten())
            optimizer.zero_grad()
            loss.backward()
            for name, p in model.named_parameters():
                tensors["gradients", name, step] = p.grad.clone()
            optimizer.step()
    return path, tensors


@each("name", ["fp16", "bf16", "e4m3", "e5m2", "e2m1"])
@each("shift", [-4, 0, 12])
def test_real_casts_lie_inside_the_intervals(trained: tuple, name: str, shift: int) -> None:
    path, tensors = trained
    fmt, run = get(name), View(Run(path))
    for collection in ("weights", "gradients"):
        answer = whatif(run, name, shift, collection)
        assert not answer.censored
        for (where, layer, step), x in tensors.items():
            if where == collection and bool((x != 0).any()):
                scaled = x.double() * 2.0**shift
                held = pl.cast(scaled, fmt, saturate=fmt.has_inf is False)
                nonzero = scaled[scaled != 0]
                lost = ((scaled != 0) & (held == 0)).sum().item() / len(nonzero)
                over = (nonzero.abs() > fmt.overflow_threshold).sum().item() / len(nonzero)
                small = ((held != 0) & (held.abs() < fmt.smallest_normal)).sum().item() / len(nonzero)
                fit = answer.at(layer, step)
                assert lost in fit.lost and over in fit.overflow and small in fit.subnormal


def test_a_whole_run_lies_inside_its_interval(trained: tuple) -> None:
    path, tensors = trained
    answer = whatif(path, "e4m3", 4)
    every = torch.cat([x.flatten() for (where, *_), x in tensors.items() if where == "gradients"])
    nonzero = every[every != 0].double() * 16
    lost = (pl.cast(nonzero, "e4m3") == 0).double().mean().item()
    assert 0 < lost < 1
    assert lost in answer.overall.fit.lost
    assert abs(lost - answer.overall.fit.lost.estimate) < 0.03


def test_the_best_shift_is_found_and_no_other_loses_less(trained: tuple) -> None:
    path, _ = trained
    view = View(Run(path))
    best = whatif(view, "fp16")
    assert best.chosen and best.overall.fit.overflow.high == 0
    above = whatif(view, "fp16", best.shift + 2)
    assert above.overall.fit.overflow.low > 0
    assert best.overall.fit.lost.estimate <= whatif(view, "fp16", best.shift - 4).overall.fit.lost.estimate
    narrow = whatif(view, "e2m1")  # which no shift fits
    assert narrow.stretches[0].window is None


@each("fmt", ["fp16", "e4m3"])
def test_the_window_of_a_layer_ends_where_one_of_its_tensors_does(trained: tuple, fmt: str) -> None:
    path, _ = trained
    view = View(Run(path))
    windows = {row.name.split(".")[0]: row.window for row in whatif(view, fmt).rows}
    assert set(windows) == {"0", "1", "3", "4"}

    def most(layer: str, part: str, shift: int) -> float:
        rows = whatif(view, fmt, shift).rows
        return max(getattr(row.fit, part).high for row in rows if row.name.split(".")[0] == layer)

    for layer, window in windows.items():
        assert window is not None
        low, high = window
        assert most(layer, "overflow", high) == 0 < most(layer, "overflow", high + 1)
        assert most(layer, "lost", low) < 0.01 <= most(layer, "lost", low - 1)


def test_windows_change_over_time(tmp_path: Path) -> None:
    layer = LAYERS[3]

    def size(name: str, step: int) -> float:
        return 2.0**-36 if name == layer and step >= 100 else 2.0**4 if name == LAYERS[5] else 2.0**-8

    story = make_story(gradient_fmt="fp32", gradient_std=size, scale=lambda step: None)
    answer = whatif(story.write(tmp_path / "run"), "fp16")
    assert [(s.from_step, s.to_step) for s in answer.stretches] == [(0, 95), (100, 195)]
    assert answer.stretches[0].window is not None and answer.stretches[1].window is None
    low, high = answer.stretches[0].window
    assert (
        answer.sentence
        == f"FP16 works without a scale, and with 2^{low} to 2^{high}, until step 95, no scale works afterwards."
    )
    steps, lost, over = answer.over_time(f"{layer}.weight")
    assert lost[steps < 100].max() == 0 and lost[steps >= 100].min() > 0.5 and over.max() == 0


def test_a_stretch_is_as_long_as_one_shift_serves() -> None:
    low = np.array([2.0, 4.0, np.nan, 9.0, 6.0, 8.0])
    high = np.array([7.0, 9.0, np.nan, 12.0, 5.0, 20.0])
    assert [(s.from_step, s.to_step, s.window) for s in stretches_of(np.arange(6), low, high)] == [
        (0, 2, (4, 7)), (3, 3, (9, 12)), (4, 4, None), (5, 5, (8, 20)),
    ]  # fmt: skip


def test_what_a_narrow_run_lost_counts_in_the_upper_bound(tmp_path: Path) -> None:
    story = make_story(gradient_std=constant(2.0**-33), samples=3)
    answer = whatif(story.write(tmp_path / "run"), "fp16", 10)
    assert answer.censored
    lost = answer.overall.fit.lost
    assert lost.estimate == 0 and lost.high > 0.1
    zeros = r"\(\d+ % of all parameter gradient values at steps 0 to 10 were already zero\)"
    assert re.match(rf"Based on the values that survived the run's own format {zeros}: FP16 ", answer.sentence)


def test_inference_asks_about_weights_and_activations(tmp_path: Path) -> None:
    story = make_story(activation_fmt="bf16", activation_std=since(50, constant(1e6), constant(1.0)))
    answer = whatif(story.write(tmp_path / "run"), "fp16", inference=True)
    assert answer.collections == ("weights", "activations") and answer.shift == 0
    assert answer.rows[0].name.startswith("activations ") and answer.rows[0].fit.overflow.estimate > 0.5
    assert len(answer.names) == 2 * len(LAYERS)
    assert answer.at(f"weights {LAYERS[0]}.weight", 0).overflow.high == 0


def test_the_answer_is_data_and_a_table(trained: tuple) -> None:
    path, _ = trained
    answer = whatif(path, "e5m2", 3)
    data = json.loads(json.dumps(answer.to_dict(), allow_nan=False))
    assert data["shift"] == 3 and len(data["rows"]) == len(answer.rows) and len(data["over_time"]["step"]) == STEPS
    assert answer.table(most=2).row_count == 3
    assert str(answer).startswith(answer.sentence)
    assert Stretch(from_step=0, to_step=1, window=(2, 3)).to_dict() == {"from_step": 0, "to_step": 1, "window": [2, 3]}


def test_what_cannot_be_asked_is_refused(trained: tuple, tmp_path: Path) -> None:
    path, _ = trained
    with pytest.raises(
        NotRecordedError,
        match="whatif: expected block records of gradients for mxfp8_e4m3, whose blocks have 32 values; got none",
    ):
        whatif(path, "mxfp8_e4m3")
    with pytest.raises(FormatError, match="whatif: expected a format for values; got e8m0"):
        whatif(path, "e8m0")
    with pytest.raises(NotRecordedError, match="whatif: expected a collection that the run has; got 'updates'"):
        whatif(path, "fp16", collection="updates")
    with pytest.raises(ArgumentError, match="whatif: expected shift to be an integer"):
        whatif(path, "fp16", 1.5)
    with pytest.raises(ArgumentError, match="whatif: expected no collection with inference=True"):
        whatif(path, "fp16", collection="weights", inference=True)
    with pytest.raises(ArgumentError, match="whatif: expected collection by its name; got None"):
        whatif(path, "fp16", collection=None)  # type: ignore[arg-type]
    assert whatif(path, "fp16", np.int64(2)).shift == 2
    with pytest.raises(RunError, match="Run: expected the folder of a run"):
        whatif(tmp_path / "none", "fp16")
    answer: WhatIf = whatif(path, "fp16")
    with pytest.raises(NotRecordedError, match="WhatIf.at: expected a layer and a step of the table"):
        answer.at("nobody", 0)
    with pytest.raises(NotRecordedError, match="WhatIf.over_time: expected a layer of the table"):
        answer.over_time("nobody")
    with RunWriter(tmp_path / "scalars") as writer:
        writer.write(Scalars(step=0, values={"loss": 1.0}))
    with pytest.raises(NotRecordedError, match="whatif: expected a run with weights or activations"):
        whatif(tmp_path / "scalars", "fp16", inference=True)


@each("name", ["mxfp8_e4m3", "mxfp8_e5m2", "nvfp4"])
def test_block_formats_are_answered_by_a_spectrum_that_has_the_record(trained: tuple, name: str) -> None:
    _, tensors = trained
    fmt = get(name)
    for (where, _, _), x in tensors.items():
        if where == "weights" and x.ndim == 2:
            fit = pl.measure(x, block=fmt.block).fit(name)
            held = pl.cast(x, name)
            lost = ((x != 0) & (held == 0)).sum().item() / int((x != 0).sum())
            assert lost in fit.lost


@pytest.mark.parametrize("fmt", ["fp32", "fp16"])
def test_nan_that_is_left_out_is_said(fmt: str, tmp_path: Path) -> None:
    def broken(g: Tensor, layer: str, step: int) -> Tensor:
        return torch.where(torch.arange(len(g)) < 7, torch.nan, g) if layer == LAYERS[0] and step >= 150 else g

    story = make_story(change_gradient=broken, gradient_fmt=fmt, gradient_std=constant(2.0**-22))
    sound, run = (story.write(tmp_path / name, until=until) for name, until in (("sound", 100), ("broken", 200)))
    answer = whatif(run, "e5m2")
    assert answer.nonfinite == 70 and "eaving out 70 NaN and infinite values: E5M2 " in answer.sentence
    assert answer.censored == (fmt == "fp16") and "eaving out" not in whatif(sound, "e5m2").sentence
    assert "eaving out 70 NaN and infinite values." in html(run, tmp_path / "run.html").read_text("utf-8")
