"""Names of loss scalers, what a scaler declares, and setting its scale from outside."""

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plimsoll as pl
from plimsoll import scaling
from plimsoll.errors import ArgumentError, StateError
from plimsoll.scaling import SCALERS, DynamicScaler, LossScaler, StaticScaler, base
from plimsoll.watch.hooks import torch_hooks
from tests.support.cases import each


@pytest.fixture(autouse=True)
def names() -> Iterator[None]:
    """Remove the names that a test registers."""
    before = dict(base._by_name)
    yield
    base._by_name.clear()
    base._by_name.update(before)


def trained(scaler: Any, model: nn.Module, steps: int = 1) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(2, 4)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    return optimizer


def test_every_exported_scaler_has_a_name() -> None:
    exported = {
        value
        for value in vars(scaling).values()
        if isinstance(value, type) and issubclass(value, LossScaler) and value is not LossScaler
    }
    assert exported == set(SCALERS.values())
    assert sorted(SCALERS) == ["dynamic", "layer", "spectral", "static"]


@each("name", ["dynamic", "layer", "spectral"])
def test_prepare_creates_a_scaler_by_its_name(name: str) -> None:
    model = nn.Linear(4, 1)
    loop = pl.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "amp-fp16", scaler=name)
    with loop.forward():
        loss = model(torch.ones(2, 4)).float().mean() / 64  # FP16 overflows at 2**16, the first scale
    assert loop.step(loss).stepped
    assert type(loop.scaler) is SCALERS[name]
    loop.close()


def test_a_name_that_no_scaler_has() -> None:
    model = nn.Linear(4, 1)
    with pytest.raises(ArgumentError, match=r"^prepare: expected scaler to be .* got scaler='dynamik'. Did you mean"):
        pl.prepare(model, torch.optim.SGD(model.parameters()), scaler="dynamik")


def test_a_static_scaler_needs_its_scale() -> None:
    model = nn.Linear(4, 1)
    with pytest.raises(ArgumentError, match=r"^StaticScaler: expected a scale; .* Give plimsoll.scaling.StaticScaler"):
        pl.prepare(model, torch.optim.SGD(model.parameters()), scaler="static")


def test_repeated_batches_need_a_scaler_that_lowers_its_scale() -> None:
    class Constant(DynamicScaler):
        lowers_scale = False

    model = nn.Linear(4, 1)
    for scaler in (StaticScaler(8.0, device="cpu"), Constant("cpu")):
        with pytest.raises(ArgumentError, match=f"lower its scale; got a {type(scaler).__name__}"):
            pl.prepare(model, torch.optim.SGD(model.parameters()), scaler=scaler, max_retries=1)


def test_a_scaler_of_another_package_is_found_by_its_name() -> None:
    class Halving(LossScaler, name="halving"):
        def _next_scale(self, found_inf: Tensor) -> float:
            return self.get_scale() / 2

    model = nn.Linear(4, 1)
    loop = pl.prepare(model, torch.optim.SGD(model.parameters()), scaler="halving")
    assert type(loop.scaler) is Halving
    loop.close()
    scaler = Halving.for_model(model)
    trained(scaler, model, 3)
    assert scaler.get_scale() == 2.0**13


def test_a_name_belongs_to_one_class() -> None:
    def define() -> type[LossScaler]:
        class Own(DynamicScaler, name="own"): ...

        return Own

    first, second = define(), define()  # as a notebook cell that runs twice
    assert SCALERS["own"] is second is not first
    with pytest.raises(ArgumentError, match="name='own', the name of tests.scaling.test_registry.*Own"):

        class Other(DynamicScaler, name="own"): ...


def test_a_subclass_without_a_name_is_not_registered() -> None:
    class Unnamed(DynamicScaler): ...

    assert Unnamed not in SCALERS.values()


@each("name", ["dynamic", "layer", "spectral"])
def test_a_scale_is_set_between_two_steps(name: str) -> None:
    model = nn.Linear(4, 1)
    scaler = SCALERS[name].for_model(model)
    optimizer = trained(scaler, model)
    scaler.set_scale(128.0)
    assert scaler.get_scale() == 128.0
    scaler.scale(model(torch.ones(2, 4)).sum()).backward()
    scaler.step(optimizer)
    assert scaler.outcome.stepped and scaler.outcome.scale == 128.0


def test_a_watch_does_not_record_that_a_caller_sets_the_scale() -> None:
    class Recorder(torch_hooks.TrainingEvents):
        def __init__(self) -> None:
            self.updates = 0

        def scaler_update_ends(self, scaler: Any) -> None:
            self.updates += 1

    recorder, model, scaler = Recorder(), nn.Linear(4, 1), DynamicScaler("cpu")
    torch_hooks.subscribe(recorder)
    try:
        trained(scaler, model)
        scaler.set_scale(4.0)
    finally:
        torch_hooks.unsubscribe(recorder)
    assert recorder.updates == 1


def test_scales_that_cannot_be_set() -> None:
    scaler = DynamicScaler("cpu", max_scale=2.0**20)
    assert scaler.scale_bounds == (2.0**-14, 2.0**20)
    with pytest.raises(StateError, match="set_scale: expected a scaled loss before it"):
        scaler.set_scale(4.0)
    optimizer = trained(scaler, nn.Linear(4, 1))
    with pytest.raises(ArgumentError, match="set_scale: expected new_scale within the scaler's bounds"):
        scaler.set_scale(2.0**21)
    with pytest.raises(ArgumentError, match="set_scale: expected new_scale from"):
        scaler.set_scale(float("nan"))
    for between in (lambda: scaler.scale(torch.ones(())), lambda: scaler.unscale_(optimizer)):
        between()
        with pytest.raises(StateError, match="set_scale: expected a call between two iterations"):
            scaler.set_scale(4.0)
    scaler.update(8.0)
    scaler.set_scale(4.0)
    assert scaler.get_scale() == 4.0
    off = DynamicScaler("cpu", enabled=False)
    off.set_scale(4.0)
    assert off.get_scale() == 1.0


def test_the_scaler_of_the_contributors_guide_works() -> None:
    page = (Path(__file__).parents[2] / "docs" / "contributing" / "add-a-scaler.md").read_text("utf-8")
    (block,) = re.findall(r"```text\n(.*?)```", page, re.DOTALL)
    exec(textwrap.dedent(block), {"__name__": "guide"})
    model = nn.Linear(4, 1)
    scaler = SCALERS["halving"].for_model(model)
    optimizer = trained(scaler, model)
    assert scaler.get_scale() == 2.0**16
    scaler.scale(model(torch.full((1, 4), torch.inf)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**15 and not scaler.outcome.stepped
