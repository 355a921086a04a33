"""What a watch tells of modules that cast: formats and scales, constant and following the data, and what changes."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import plimsoll as pl
from plimsoll.runs import Event, Run, RunWriter
from plimsoll.runs.reading.module_casts import casts_of
from plimsoll.watch import Casting
from tests.support.watch.recording import batches, only_run, train


class Casts(nn.Linear):
    """A linear layer that says that it casts; its scales follow the data if `moving`."""

    def __init__(self, *size: int, scale: float = 0.5, moving: bool = False) -> None:
        super().__init__(*size)
        self.scale, self.moving = scale, moving
        self.seen = torch.ones(())

    def forward(self, x: Tensor) -> Tensor:
        self.seen = 448 / x.detach().abs().max()
        return super().forward(x)

    def casts(self) -> Mapping[str, tuple[str, float | Tensor]]:
        scale = self.seen if self.moving else self.scale
        return {"activations": ("e4m3", scale), "weights": ("e4m3", 1.0), "gradients": ("e5m2", 4.0)}


def model(moving: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Casts(8, 16, moving=moving), nn.ReLU(), Casts(16, 2, scale=0.25))


def watched(net: nn.Module, path: Path, steps: int = 6, **arguments: object) -> Run:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with pl.watch(net, optimizer, run=path, **{"every": 2, **arguments}):
        train(net, optimizer, batches(steps, 4, 8))
    return only_run(path)


def test_constant_scales_are_told_once_with_the_series_that_they_are_of(tmp_path: Path) -> None:
    run = watched(model(), tmp_path / "run")
    assert [event.kind for event in run.events()].count("casts") == 1
    found = {(c.module, c.role): c for c in run.casts()}
    assert set(found) == {(m, r) for m in ("0", "2") for r in ("activations", "weights", "gradients")}
    first = found["0", "activations"]
    assert (first.format, first.collection, first.name, first.constant) == ("e4m3", "activations", "0:input", True)
    assert first.scale_at(np.array([0, 5, 90])).tolist() == [0.5, 0.5, 0.5]
    assert found["2", "activations"].scales.tolist() == [0.25]
    gradients = found["2", "gradients"]
    assert (gradients.format, gradients.collection, gradients.name) == ("e5m2", "activation_gradients", "2:output")
    assert found["0", "weights"].name == "0.weight"
    for cast in found.values():  # each names a series that there is
        assert run.spectrum(cast.collection, cast.name, 4).count > 0
    assert run.manifest["casts"]["0"]["activations"] == {"format": "e4m3", "scale": 0.5, "series": "0:input"}
    assert not [name for name in run.scalar_names if name.startswith("cast:")]
    assert {c.module for c in run.casts("2")} == {"2"} and run.casts("9") == []


def test_scales_that_follow_the_data_are_a_series_of_the_sampled_steps(tmp_path: Path) -> None:
    run = watched(model(moving=True), tmp_path / "run")
    cast = next(c for c in run.casts("0") if c.role == "activations")
    expected = [float(448 / x.abs().max()) for x in batches(6, 4, 8)]
    assert not cast.constant and cast.steps.tolist() == [0, 2, 4]
    assert cast.scales.tolist() == pytest.approx(expected[::2], rel=1e-6)
    assert cast.scale_at(np.array([0, 1, 4])).tolist() == [cast.scales[0], cast.scales[0], cast.scales[2]]
    assert next(c for c in run.casts("0") if c.role == "gradients").constant


def test_a_module_put_in_place_later_is_told_from_then_on(tmp_path: Path) -> None:
    net = model()
    casting, plain = net[0], nn.Linear(8, 16)
    plain.load_state_dict(casting.state_dict())
    net[0] = plain
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with pl.watch(net, optimizer, run=tmp_path / "run", every=1):
        for step, x in enumerate(batches(8, 4, 8)):
            net[0] = casting if 3 <= step < 6 else plain
            train(net, optimizer, [x])
    run = only_run(tmp_path / "run")
    spans = {(c.module, c.role): (c.since_step, c.until_step) for c in run.casts()}
    assert spans["0", "weights"] == (3, 5) and spans["2", "weights"] == (0, None)
    cast = next(c for c in run.casts("0") if c.role == "activations")
    assert np.isfinite(cast.scale_at(np.arange(8))).tolist() == [False] * 3 + [True] * 3 + [False] * 2


def test_what_is_not_watched_is_not_told(tmp_path: Path) -> None:
    run = watched(model(), tmp_path / "run", exclude=["0"])
    assert {c.module for c in run.casts()} == {"2"}


def test_a_weight_of_two_modules_is_found_under_its_first_name(tmp_path: Path) -> None:
    net = nn.Sequential(Casts(8, 8), nn.ReLU(), Casts(8, 8))
    net[2].weight = net[0].weight
    run = watched(net, tmp_path / "run")
    assert {c.name for c in run.casts() if c.role == "weights"} == {"0.weight"}


def test_the_root_may_cast_itself(tmp_path: Path) -> None:
    run = watched(Casts(8, 2), tmp_path / "run")
    assert {c.name for c in run.casts()} == {"model:input", "weight", "model:output"}
    assert run.spectrum("weights", "weight", 0).count == 16


def test_training_is_the_same_to_the_bit(tmp_path: Path) -> None:
    found = []
    for path in (None, tmp_path / "run"):
        net = model(moving=True)
        optimizer = torch.optim.AdamW(net.parameters())
        w = None if path is None else pl.watch(net, optimizer, run=path, every=1)
        losses = train(net, optimizer, batches(8, 4, 8))
        if w is not None:
            w.close()
        found.append((losses, [p.detach().clone() for p in net.parameters()]))
    assert found[0][0] == found[1][0] and all(map(torch.equal, found[0][1], found[1][1]))


def test_a_module_whose_casts_fail_costs_that_record_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    net = model()
    net[2].__class__ = type("Broken", (Casts,), {"casts": lambda _: 1 / 0})
    run = watched(net, tmp_path / "run")
    assert run.casts() == [] and run.steps == [0, 2, 4]
    assert [event.kind for event in run.events()].count("failure") == 1
    assert caplog.text.count("ZeroDivisionError") == 1


def test_a_continued_run_says_when_nothing_casts_any_more(tmp_path: Path) -> None:
    watched(model(), tmp_path / "run")
    plain = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    run = watched(plain, tmp_path / "run", resume=True)
    assert {c.until_step for c in run.casts()} == {5} and run.steps == [0, 2, 4, 6, 8, 10]
    assert watched(plain, tmp_path / "other").casts() == []


def test_ranks_are_told_once_and_events_that_are_none_are_left_out(tmp_path: Path) -> None:
    modules = {"a": {"weights": {"format": "e4m3", "scale": 2.0, "series": "a.weight"}}}
    said = [Event(step=0, kind="casts", message="", details={"modules": modules}, rank=rank) for rank in (1, 2)]
    odd = [Event(step=3, kind="other", message=""), Event(step=0, kind="casts", message="", details={}, rank=5)]
    (found,) = casts_of([*said, *odd], {})
    assert (found.module, found.role, found.until_step) == ("a", "weights", None)
    broken = {"modules": {"a": {"weights": {"format": 3, "series": "x"}}, "b": 7}}
    assert casts_of([Event(step=0, kind="casts", message="", details=broken)], {}) == []
    with RunWriter(tmp_path / "run") as writer:
        writer.write(said[0])
    assert len(Run(tmp_path / "run").casts()) == 1


def test_the_protocol_knows_who_casts() -> None:
    assert isinstance(Casts(2, 2), Casting) and not isinstance(nn.Linear(2, 2), Casting)
