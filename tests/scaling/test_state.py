"""Saving and taking up again: bit for bit with ours, both ways with GradScaler, and nothing lost with what is newer."""

import copy
import functools
import io
import math
import operator
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from plimsoll.errors import StateError
from plimsoll.scaling import DynamicScaler, Hysteresis, LayerScaler, SpectralScaler, StaticScaler
from plimsoll.scaling.state import SCHEMA
from tests.support.cases import each
from tests.support.scaling.steps import mlp, same_tensors, scales, take, weight

SETTINGS: dict[str, Any] = {
    "init_scale": 2.0**10, "growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 50, "min_scale": 2.0**-3,
    "max_scale": 2.0**18, "hysteresis": Hysteresis(overflows=2, kind="windowed"), "regrowth_interval": 3,
}  # fmt: skip
BURST = [False] * 7 + [True] * 5 + [False] * 4


def saved_and_loaded(state: dict[str, Any]) -> dict[str, Any]:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def by_state(source: DynamicScaler, lazy: bool) -> DynamicScaler:
    target = DynamicScaler("cpu")
    if lazy:
        target.scale(torch.ones(1))
    target.load_state_dict(saved_and_loaded(source.state_dict()))
    return target


WAYS = {
    "a state, before the first step": lambda s: by_state(s, False),
    "a state, after the first step": lambda s: by_state(s, True),
    "a pickle": lambda s: pickle.loads(pickle.dumps(s)),
    "a deep copy": copy.deepcopy,
}


@each("way", WAYS)
@each("cut", [0, 1, 8, 10, 12, 14, 16])
def test_a_scaler_goes_on_from_any_moment_as_if_nothing_had_been(cut: int, way: str) -> None:
    rest = [False] * 9 + [True] + [False] * 60 + [True] * 2 + [False] * 60
    scaler = DynamicScaler("cpu", **SETTINGS)
    scales(scaler, BURST[:cut])
    restored = WAYS[way](scaler)
    assert restored.state_dict() == scaler.state_dict()
    assert scales(restored, BURST[cut:] + rest) == scales(scaler, BURST[cut:] + rest)
    assert restored.state_dict() == scaler.state_dict()


def test_training_resumed_in_the_middle_of_a_burst_is_training_not_interrupted() -> None:
    def loop(model: nn.Module, optimizer: Any, scaler: Any, steps: range) -> None:
        for step in steps:
            torch.manual_seed(step)
            factor = 1e30 if 5 <= step < 12 else 1.0
            optimizer.zero_grad()
            loss = (model(torch.randn(4, 8)) * factor).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    def fresh() -> tuple[nn.Module, Any, Any]:
        torch.manual_seed(0)
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        return model, optimizer, DynamicScaler("cpu", 2.0**12, regrowth_interval=2, growth_interval=9)

    whole, first, second = fresh(), fresh(), fresh()
    loop(*whole, range(40))
    loop(*first, range(8))
    for target, source in zip(second, first, strict=True):
        target.load_state_dict(saved_and_loaded(source.state_dict()))
    loop(*second, range(8, 40))
    assert same_tensors(second[0].parameters(), whole[0].parameters())
    assert second[2].state_dict() == whole[2].state_dict() and whole[2].get_scale() < 2.0**14


def test_every_setting_that_is_not_the_default_survives() -> None:
    source = DynamicScaler("cpu", **SETTINGS)
    scales(source, BURST)
    for way in WAYS.values():
        target = way(source)
        assert (target._min_scale, target._max_scale) == (2.0**-3, 2.0**18)
        assert target._hysteresis == SETTINGS["hysteresis"] and target._regrowth_interval == 3
        assert (target.get_growth_factor(), target.get_backoff_factor(), target.get_growth_interval()) == (
            4.0,
            0.25,
            50,
        )


def test_a_gradscalers_state_loads_and_ours_loads_there() -> None:
    stock = torch.amp.GradScaler("cpu", 2.0**9, 4.0, 0.25, 30)
    scales(stock, [False] * 4)
    scaler = DynamicScaler("cpu", regrowth_interval=None, min_scale=2.0**-126)
    scaler.load_state_dict(stock.state_dict())
    trace = [False] * 26 + [True] * 3 + [False] * 31
    assert scales(scaler, trace) == scales(stock, trace)
    back = torch.amp.GradScaler("cpu")
    back.load_state_dict(scaler.state_dict())
    assert back.state_dict() == stock.state_dict()
    assert scales(back, trace) == scales(scaler, trace)


def test_after_a_gradscalers_state_a_scaler_regrows_no_further_than_to_its_scale() -> None:
    scaler = DynamicScaler("cpu", 2.0**16, regrowth_interval=2)
    scales(scaler, [True] * 3)
    scaler.load_state_dict(torch.amp.GradScaler("cpu", 2.0**5).state_dict())
    assert scales(scaler, [False] * 20)[-1] == 2.0**5
    assert scales(scaler, [True] * 3 + [False] * 20)[-1] == 2.0**5


def test_a_scale_that_gradscaler_let_fall_to_zero_is_taken_to_the_floor_and_said() -> None:
    stock = torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD([weight()], lr=0.0)
    assert scales(stock, [True] * 200, optimizer)[-1] == 0.0
    scaler = DynamicScaler("cpu")
    with pytest.warns(
        UserWarning, match="a scale of 0 is outside of 6.10352e-05 to 3.40282e\\+38; it is now 6.10352e-05"
    ):
        scaler.load_state_dict(stock.state_dict())
    assert scaler.get_scale() == 2.0**-14
    broken = {**stock.state_dict(), "scale": float("nan")}
    with pytest.warns(UserWarning, match="a scale of nan is outside"):
        scaler.load_state_dict(broken)
    assert scaler.get_scale() == 2.0**-14


def test_a_newer_schema_is_refused_and_nothing_is_lost() -> None:
    scaler = DynamicScaler("cpu", **SETTINGS)
    scales(scaler, BURST)
    before = scaler.state_dict()
    newer = copy.deepcopy(DynamicScaler("cpu", 8.0).state_dict())
    newer["plimsoll"] |= {"schema": SCHEMA + 1, "version": "9.1.0", "momentum": 0.5}
    kept = copy.deepcopy(newer)
    with pytest.raises(
        StateError, match="of schema 1 or older; got schema 2, written by plimsoll 9.1.0. Nothing was cha"
    ):
        scaler.load_state_dict(newer)
    assert scaler.state_dict() == before and newer == kept


def test_states_that_are_none() -> None:
    scaler = DynamicScaler("cpu")
    before = scaler.state_dict()
    with pytest.raises(RuntimeError, match="got an empty one, possibly because it was saved from a disabled scaler"):
        scaler.load_state_dict({})
    with pytest.raises(StateError, match=r"got \['scale'\], without \['growth_factor', 'backoff_factor', 'growth_inte"):
        scaler.load_state_dict({"scale": 2.0})
    with pytest.raises(StateError, match="expected numbers in a scaler's state; got .*'growth_interval': 'ten'"):
        scaler.load_state_dict({**before, "growth_interval": "ten"})
    for wrong in ("state.pt", [before]):
        with pytest.raises(StateError, match=f"expected the result of state_dict.*; got {type(wrong).__name__}"):
            scaler.load_state_dict(wrong)  # type: ignore[arg-type]
    assert scaler.state_dict() == before


def test_a_state_of_another_kind_gives_what_all_have_and_says_so() -> None:
    dynamic, static = DynamicScaler("cpu", **SETTINGS), StaticScaler(64.0, device="cpu")
    scales(dynamic, BURST)
    with pytest.warns(UserWarning, match="load_state_dict of StaticScaler: a DynamicScaler wrote the state"):
        static.load_state_dict(dynamic.state_dict())
    assert scales(static, [True, False]) == [dynamic.get_scale()] * 2
    target = DynamicScaler("cpu", hysteresis=2)
    with pytest.warns(UserWarning, match="load_state_dict of DynamicScaler: a StaticScaler wrote the state"):
        target.load_state_dict(StaticScaler(32.0, device="cpu").state_dict())
    assert target.get_scale() == 32.0 and target._hysteresis == Hysteresis(overflows=2)
    foreign = dynamic.state_dict()
    foreign["plimsoll"]["kind"] = "OtherScaler"  # whose entries may have our names and mean something else
    with pytest.warns(
        UserWarning, match="an? OtherScaler wrote the state; only the common part of all scalers is loaded"
    ):
        target.load_state_dict(foreign)
    assert target.get_scale() == dynamic.get_scale() and target._hysteresis == Hysteresis(overflows=2)


@each("kind", [DynamicScaler, SpectralScaler])
def test_a_static_scalers_state_freezes_no_other_scaler(kind: Any) -> None:
    scaler = kind("cpu")
    with pytest.warns(UserWarning, match="a StaticScaler wrote the state"):
        scaler.load_state_dict(StaticScaler(1024.0, device="cpu").state_dict())
    assert scaler.scale_bounds == kind("cpu").scale_bounds
    found = scales(scaler, [True, True])
    assert found[0] == 1024.0 / 2 and found[1] < found[0]


def test_a_static_scaler_takes_the_scale_of_gradscaler(recwarn: pytest.WarningsRecorder) -> None:
    static = StaticScaler(64.0, device="cpu")
    static.load_state_dict(torch.amp.GradScaler("cpu", init_scale=2.0**16).state_dict())
    assert scales(static, [False, True]) == [2.0**16] * 2 and not recwarn.list


def test_a_static_scalers_state_makes_gradscaler_static() -> None:
    stock = torch.amp.GradScaler("cpu")
    static = StaticScaler(64.0, device="cpu")
    stock.load_state_dict(static.state_dict())
    assert scales(stock, [False, True, False]) == [64.0] * 3
    again = StaticScaler(2.0, device="cpu")
    again.load_state_dict(static.state_dict())
    assert scales(again, [False, True]) == [64.0] * 2


def test_the_outcome_survives_a_pickle() -> None:
    scaler = DynamicScaler("cpu")
    take(scaler, torch.optim.SGD([weight()], lr=0.0), overflows=True)
    assert pickle.loads(pickle.dumps(scaler)).outcome == scaler.outcome


def test_a_scaler_is_pickled_between_iterations_only_and_without_a_process_group() -> None:
    scaler, parameter = DynamicScaler("cpu"), weight()
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    scaler.scale(parameter.sum()).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(StateError, match="pickle: expected a scaler between two iterations; got one in the middle"):
        pickle.dumps(scaler)
    scaler.step(optimizer)
    scaler.update()
    assert pickle.loads(pickle.dumps(scaler)).get_scale() == 2.0**16
    with pytest.raises(StateError, match="without process group; got a DynamicScaler with one"):
        pickle.dumps(DynamicScaler("cpu", process_group=object()))
    disabled = pickle.loads(pickle.dumps(DynamicScaler("cpu", enabled=False)))
    assert not disabled.is_enabled() and disabled.get_scale() == 1.0


@each("kind", [DynamicScaler, SpectralScaler])
@each("scaled_before", [False, True])
@each(
    ("broken", "healed"),
    [
        (0.0, 2.0**-10),
        (-1.0, 2.0**-10),
        (math.nan, 2.0**-10),
        (-math.inf, 2.0**-10),
        (math.inf, 2.0**20),
        (2.0**60, 2.0**20),
    ],
)
def test_a_broken_scale_is_healed_with_a_warning(
    kind: type[DynamicScaler | SpectralScaler], scaled_before: bool, broken: float, healed: float
) -> None:
    scaler = kind("cpu", 2.0**8, min_scale=2.0**-10, max_scale=2.0**20)
    if scaled_before:
        scaler.scale(torch.ones(1))  # which makes the scale's tensor
    state = {**torch.amp.GradScaler("cpu").state_dict(), "scale": broken}
    with pytest.warns(UserWarning, match=re.escape(f"a scale of {broken:g} is outside of ")):
        scaler.load_state_dict(state)
    assert scaler.get_scale() == healed
    assert scaler.scale(torch.ones(1)).item() == healed


def _edited(state: dict[str, Any], entry: str, value: object) -> dict[str, Any]:
    edited = copy.deepcopy(state)
    *path, last = entry.split(".")
    place = functools.reduce(operator.getitem, path, edited)
    if value is MISSING:
        del place[last]
    else:
        place[last] = value
    return edited


MISSING = object()
SCALERS: dict[str, Callable[[], Any]] = {
    "dynamic": lambda: DynamicScaler("cpu"),
    "spectral": lambda: SpectralScaler("cpu"),
    "layer": lambda: LayerScaler(nn.Linear(4, 4), device="cpu"),
}


@each(
    ("kind", "entry", "value"),
    [
        *(("dynamic", "growth_factor", value) for value in (-1.0, 0.0, math.nan, math.inf, 10**400, torch.ones(2))),
        *(("dynamic", "backoff_factor", value) for value in (-1.0, 0.0, math.nan, 2.0)),
        *(("dynamic", "growth_interval", value) for value in (-1, 0, math.inf)),
        *(("dynamic", "_growth_tracker", value) for value in (-1, 2**31)),
        *(("dynamic", "plimsoll.min_scale", value) for value in (-1.0, math.nan, 1e300, "2", None, [1])),
        *(("dynamic", "plimsoll.max_scale", value) for value in (-1.0, math.inf, 2.0**-20, "x")),
        *(("dynamic", "plimsoll.regrowth_interval", value) for value in (-1, "x", 2.5, MISSING)),
        *(("dynamic", "plimsoll.hysteresis", value) for value in (None, {"overflows": 0}, {"kinds": 1}, MISSING)),
        *(("dynamic", "plimsoll.memory", value) for value in (1.0, [0.0, 1.0], [0.0, "x", 0.0], [0.0, math.nan, 0.0])),
        *(("dynamic", "plimsoll", value) for value in (None, [1], "x")),
        ("spectral", "plimsoll.format", "fp61"), ("spectral", "plimsoll.margin", math.nan),
        ("spectral", "plimsoll.inspect_every", 0), ("spectral", "plimsoll.memory", {}),
        ("spectral", "plimsoll.looks.steps", MISSING), ("layer", "plimsoll.layers", 3),
        ("layer", "plimsoll.layers.exponents", MISSING), ("layer", "plimsoll.layers.tops.model", ["x"]),
        ("layer", "plimsoll.layers.steps", "x"),
    ],
)  # fmt: skip
def test_a_state_that_was_edited_by_hand_is_refused_whole(kind: str, entry: str, value: object) -> None:
    scaler, other = SCALERS[kind](), SCALERS[kind]()
    scaler.scale(torch.ones(()))
    other._init_scale, other._init_growth_tracker = 8.0, 3
    before = scaler.state_dict()
    with pytest.raises(StateError, match="load_state_dict: expected .*; got "):
        scaler.load_state_dict(_edited(other.state_dict(), entry, value))
    assert scaler.state_dict() == before
