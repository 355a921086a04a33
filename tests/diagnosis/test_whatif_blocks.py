"""What-if for block formats: predictions against real casts, and against `Spectrum.fit`, cell by cell."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import plimsoll as pl
from plimsoll.diagnosis import View, plan, whatif
from plimsoll.errors import NotRecordedError
from plimsoll.formats import get
from plimsoll.runs import Batch, Run, RunWriter
from plimsoll.spectrum import Fit, Interval
from tests.runs.test_blocks import wide_rows
from tests.support.cases import each

FORMATS = ("mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4", "nvfp4", "nvfp4_single")
STEPS = 3
Trained = tuple[Path, dict[tuple[str, str, int], Tensor]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Trained]:
    """A small training by block length, and the very tensors that were recorded of it."""
    return {block: _trained(tmp_path_factory.mktemp("whatif") / "run", block) for block in (16, 32)}


def _trained(path: Path, block: int) -> Trained:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 40), nn.Linear(40, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 50))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    tensors: dict[tuple[str, str, int], Tensor] = {}
    collect = ("weights", "gradients", "activations")
    with pl.watch(model, optimizer, run=path, every=1, collect=collect, block=block):
        for step in range(STEPS):
            x = torch.randint(0, 50, (16, 8))
            tensors |= {("weights", name, step): p.detach().clone() for name, p in model.named_parameters()}
            loss = nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten())
            optimizer.zero_grad()
            loss.backward()
            tensors |= {("gradients", name, step): p.grad.clone() for name, p in model.named_parameters()}
            optimizer.step()
    return path, tensors


def written(path: Path, tensors: list[Tensor], block: int, scales: list[float] | None = None) -> Path:
    """A run of one step, of tensors as they are stored."""
    with RunWriter(path) as writer:
        ids = np.array([writer.series("weights", f"w{i}", format="fp32") for i in range(len(tensors))])
        rows, index = wide_rows(tensors, block), np.arange(len(ids))
        given = None if scales is None else np.array(scales)
        writer.write(Batch(step=0, rows=rows, index=index, series=ids, scales=given, blocks=np.full(len(ids), block)))
    return path


def assert_same(found: Fit, expected: Fit) -> None:
    for name in ("lost", "subnormal", "overflow"):
        a, b = getattr(found, name), getattr(expected, name)
        assert (a.low, a.high, a.estimate) == pytest.approx((b.low, b.high, b.estimate), abs=1e-12), name
    assert found.snr_db == pytest.approx(expected.snr_db, abs=1e-9)


@pytest.mark.parametrize("name", FORMATS)
@each("shift", [0, 5])
def test_real_casts_lie_inside_the_intervals(trained: dict[int, Trained], name: str, shift: int) -> None:
    fmt = get(name)
    path, tensors = trained[fmt.block]
    view, asked = View(Run(path)), 0
    for (collection, layer, step), x in tensors.items():
        scaled = x.double() * 2.0**shift
        nonzero = scaled != 0
        if bool(nonzero.any()):
            held = pl.cast(scaled, fmt)
            lost = int((nonzero & (held == 0)).sum()) / int(nonzero.sum())
            fit = whatif(view, name, shift, collection).at(layer, step).lost
            asked += 1
            assert fit.low - 1e-12 <= lost <= fit.high + 1e-12, (collection, layer, step)
    assert asked > 30


@each("name", FORMATS)
@each("shift", [0, 3, -140, 130])
def test_each_cell_is_what_its_spectrum_says(trained: dict[int, Trained], name: str, shift: int) -> None:
    """Shifts at which the scales of blocks leave their format are among them."""
    path, _ = trained[get(name).block]
    run = Run(path)
    view = View(run)
    for collection in run.tensors:
        answer = whatif(view, name, shift, collection)
        for step, _, layer, spectrum in run.spectra(collection):
            assert_same(answer.at(layer, step), spectrum.fit(name, shift))


def odd_tensors() -> list[Tensor]:
    torch.manual_seed(3)
    spread = torch.randn(8, 70) * torch.exp2(torch.randint(-40, 40, (8, 70)).float())
    poisoned = spread.clone()
    poisoned[0, 0], poisoned[3, 40] = float("nan"), float("inf")
    tiny, huge = torch.randn(4, 64) * 2.0**-140, torch.randn(4, 64) * 2.0**120
    # Blocks of one size each, around where scales of E8M0 end.
    around = torch.randn(28, 64) * torch.exp2(torch.arange(-138.0, -110.0))[:, None]
    ends = torch.ones(18, 64) * torch.exp2(torch.arange(110.0, 128.0))[:, None]
    return [
        spread, poisoned, tiny, huge, around, ends, torch.zeros(4, 64), torch.empty(0),
        torch.full((4, 64), float("nan")), torch.tensor(2.0), torch.randn(4, 64).bfloat16().float(),
        torch.cat([tiny, huge]),
    ]  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("scale", [1.0, 2.0**8, 2.0**-3])
def test_odd_tensors_are_what_their_spectra_say(tmp_path: Path, name: str, scale: float) -> None:
    tensors = odd_tensors()
    run = Run(written(tmp_path / "run", tensors, get(name).block, [scale] * len(tensors)))
    answer = whatif(run, name, 1, "weights")
    assert any(answer.at(layer, 0).overflow.low > 0 for layer in answer.names)
    for _, _, layer, spectrum in run.spectra("weights"):
        found, expected = answer.at(layer, 0), spectrum.fit(name, 1)
        if spectrum.absmin < 2.0**-149 or spectrum.absmax >= 2.0**128:
            # Undoing the scale has put values into an end binade, which only counts them: the run's rows know more.
            assert expected.lost.low <= found.lost.low and found.lost.high <= expected.lost.high
        else:
            assert_same(found, expected)


@pytest.mark.parametrize("name", ["mxfp8_e4m3", "mxfp4", "nvfp4"])
def test_a_scale_that_is_no_power_of_two_widens_the_interval(tmp_path: Path, name: str) -> None:
    torch.manual_seed(4)
    true = [torch.randn(16, 64) * torch.exp2(torch.randint(-12, 1, (16, 64)).float()) for _ in range(4)]
    scales = [3.0, 1.1, 1.9, 768.0]
    stored = [x.double() * scale for x, scale in zip(true, scales, strict=True)]
    answer = whatif(written(tmp_path / "run", stored, get(name).block, scales), name, None, "weights")
    for i, x in enumerate(true):
        lost = (pl.cast(x, name) == 0).double().mean().item()
        fit = answer.at(f"w{i}", 0).lost
        assert fit.low <= lost <= fit.high and abs(fit.estimate - lost) < 0.05


def test_the_whole_answer(trained: dict[int, Trained]) -> None:
    path, _ = trained[32]
    view = View(Run(path))
    good, bad = whatif(view, "mxfp8_e5m2"), whatif(view, "mxfp4")
    assert (good.shift, good.chosen, good.block, good.unrecorded) == (0, True, 32, 0)
    assert good.sentence == "MXFP8_E5M2 works at all steps."
    assert [row.window for row in good.rows] == [(0, 0)] * len(good.rows)
    assert bad.sentence == "MXFP4 may lose 1 % or more of some layer at all steps." and bad.rows[0].window is None
    assert good.overall.fit.lost.high < bad.overall.fit.lost.low
    data = json.loads(json.dumps(bad.to_dict(), allow_nan=False))
    assert data["stretches"] == [{"from_step": 0, "to_step": STEPS - 1, "window": None}]
    assert [column.header for column in bad.table().columns][-1] == "works"
    both = whatif(view, "mxfp8_e4m3", inference=True)
    assert both.collections == ("weights", "activations") and both.block == 32


def test_a_run_without_the_records_says_what_is_missing(trained: dict[int, Trained], tmp_path: Path) -> None:
    sixteen, thirty_two = View(Run(trained[16][0])), View(Run(trained[32][0]))
    message = (
        r"whatif: expected block records of gradients for nvfp4, whose blocks have 16 values; got records of block=32"
    )
    with pytest.raises(NotRecordedError, match=message):
        whatif(thirty_two, "nvfp4")
    with pytest.raises(
        NotRecordedError,
        match=r"for mxfp4, .*got records of block=16\. Watch with block=32 \(plimsoll run --block 32\), or ask",
    ):
        whatif(sixteen, "mxfp4")
    model = nn.Linear(8, 8)
    with pl.watch(model, run=tmp_path / "run", every=1, collect=("weights",)) as w:
        w.step()
    with pytest.raises(NotRecordedError, match="expected block records of weights for mxfp4, .*; got none"):
        whatif(tmp_path / "run", "mxfp4", collection="weights")


def test_steps_without_a_record_are_left_out_and_told(tmp_path: Path) -> None:
    x = torch.randn(4, 64)
    with RunWriter(tmp_path / "run") as writer:
        ids = np.array([writer.series("weights", "w", format="fp32")])
        for step in range(4):
            rows, blocks = wide_rows([x], 32), np.array([32])
            if step < 2:
                rows, blocks = rows[:, :289].copy(), None
            writer.write(Batch(step=step, rows=rows, index=np.arange(1), series=ids, blocks=blocks))
    answer = whatif(tmp_path / "run", "mxfp8_e4m3", collection="weights")
    assert answer.steps.tolist() == [2, 3] and answer.unrecorded == 2
    assert answer.sentence.endswith("Layers without a block record at a step (2 times) are left out.")
    assert whatif(tmp_path / "run", "fp16", collection="weights").steps.tolist() == [0, 1, 2, 3]


def test_zeros_of_a_narrow_run_count_in_the_upper_bound(tmp_path: Path) -> None:
    x = torch.randn(4, 64).half()
    x[0] = 0
    with RunWriter(tmp_path / "run") as writer:
        ids = np.array([writer.series("weights", "w", format="fp16")])
        rows = wide_rows([x], 32)
        writer.write(Batch(step=0, rows=rows, index=np.arange(1), series=ids, blocks=np.array([32])))
    answer = whatif(tmp_path / "run", "mxfp8_e4m3", collection="weights")
    assert answer.censored and answer.overall.fit.lost.high >= 0.25 and answer.stretches[0].window is None
    assert_same(answer.at("w", 0), Run(tmp_path / "run").spectrum("weights", "w", 0).fit("mxfp8_e4m3"))


def test_a_plan_is_made_from_the_records_and_from_a_bound_without(tmp_path: Path) -> None:
    """Blocks of one size each, far apart: blocks lose nothing of them, where the tensor's own range tells nothing."""
    torch.manual_seed(5)
    apart = torch.exp2(torch.arange(16.0) * 2 - 16).repeat_interleave(32)

    def weights(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return (1 + torch.rand(8, 512)) * apart

    for name, block in (("with", 32), ("without", None), ("other", 16)):
        with RunWriter(tmp_path / name) as writer:
            named = {"weights": "a.weight", "activations": "a:input", "activation_gradients": "a:output"}
            ids = [writer.series(collection, each, format="fp32") for collection, each in named.items()]
            ids.append(writer.series("gradients", "a.weight", format="fp32"))
            measured = [weights(i) for i in range(4)]
            rows = wide_rows(measured, block or 32)
            rows = rows if block else rows[:, :289].copy()
            blocks = None if block is None else np.full(4, block)
            writer.write(Batch(step=0, rows=rows, index=np.arange(4), series=np.array(ids), blocks=blocks))
    made = plan(tmp_path / "with", "mxfp4", include=["a"])
    assert made.formats == {"a": "mxfp4"}
    real = (pl.cast(weights(0), "mxfp4") == 0).double().mean().item()
    assert real == 0 and made.predicted["a"]["weights"][2] < 0.01
    for name in ("without", "other"):
        reported = plan(tmp_path / name, "mxfp4", include=["a"])
        assert reported.formats == {"a": "bf16"} and "block records are missing" in reported.notes["a"]


def test_an_interval_of_blocks_is_shown_from_end_to_end_where_it_is_wide() -> None:
    from plimsoll.diagnosis.what_if.result import _range

    assert _range(Interval(low=0.0, high=0.16, estimate=0.028)) == "0 % to 16 %"
    assert _range(Interval(low=0.0275, high=0.0285, estimate=0.028)) == "2.8 %"
    assert _range(Interval(low=0.0, high=0.0, estimate=0.0)) == "0 %"
