"""Averages of weights that their format keeps from moving, and copies of weights that look like them."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import plimsoll as pl
from plimsoll.diagnosis import Finding, diagnose

Follow = Callable[[nn.Module, nn.Module, int], object]  # what brings a copy up after a step, from the trained model


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))


def in_place(decay: float) -> Follow:
    def follow(slow: nn.Module, fast: nn.Module, _: int) -> None:
        for a, w in zip(slow.state_dict().values(), fast.parameters(), strict=True):
            a.mul_(decay).add_(w.to(a.dtype), alpha=1 - decay)

    return follow


def by_data(slow: nn.Module, fast: nn.Module, _: int) -> None:
    for a, w in zip(slow.parameters(), fast.parameters(), strict=True):
        a.data = a.data * 0.999 + w.data.to(a.dtype) * 0.001


def by_foreach(slow: nn.Module, fast: nn.Module, _: int) -> None:
    torch._foreach_lerp_(list(slow.parameters()), [w.to(torch.bfloat16) for w in fast.parameters()], 0.001)


def from_fp32(decay: float, every: int = 1) -> Follow:
    """The average is kept in FP32, and copied into the 16-bit one."""
    kept: list[Tensor] = []

    def follow(slow: nn.Module, fast: nn.Module, step: int) -> None:
        if not kept:
            kept.extend(w.float().clone() for w in slow.parameters())
        torch._foreach_lerp_(kept, list(fast.parameters()), 1 - decay)
        for a, k in zip(slow.parameters(), kept, strict=True):
            if step % every == 0:
                a.copy_(k)

    return follow


def copied(every: int) -> Follow:
    def follow(slow: nn.Module, fast: nn.Module, step: int) -> None:
        if step % every == 0:
            slow.load_state_dict(fast.state_dict())

    return follow


def rewritten(slow: nn.Module, _: nn.Module, __: int) -> None:
    for a in slow.parameters():
        a.copy_(a.clone())


def stays(*_: object) -> None:
    """The copy is frozen."""


class Flat(nn.Module):
    """A copy whose weights are buffers with names that have no dots."""

    def __init__(self, of: nn.Module) -> None:
        super().__init__()
        for name, w in of.named_parameters():
            self.register_buffer(name.replace(".", ""), w.detach().clone())


def late(begins: int, follow: Follow) -> Follow:
    return lambda slow, fast, step: follow(slow, fast, step) if step >= begins else None


def train(
    path: Path, follow: Follow, dtype: torch.dtype = torch.bfloat16, *, until: int = 10**9, flat: bool = False
) -> list[Finding]:
    """A watched training of one of two copies, whose rate is 0 from step `until` on."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"net": net()})
    model["average"] = (Flat if flat else copy.deepcopy)(model["net"]).to(dtype).requires_grad_(False)
    optimizer = torch.optim.Adam(model["net"].parameters(), lr=1e-3)
    target = torch.randn(8, 4)
    with pl.watch(model, optimizer, run=path, every=100):
        for step in range(300):
            if step == until:
                optimizer.param_groups[0]["lr"] = 0.0
            x = torch.randn(16, 8)
            optimizer.zero_grad()
            nn.functional.mse_loss(model["net"](x), x @ target).backward()
            optimizer.step()
            with torch.no_grad():
                follow(model["average"], model["net"], step)
    return diagnose(path, rules=["average-stuck"])


STUCK: dict[str, tuple[Follow, torch.dtype]] = {
    "in place": (in_place(0.999), torch.bfloat16),
    "slower": (in_place(0.9998), torch.bfloat16),
    "in FP16": (in_place(0.9999), torch.float16),
    "by .data": (by_data, torch.bfloat16),
    "by foreach": (by_foreach, torch.bfloat16),
    "late": (late(60, in_place(0.999)), torch.bfloat16),
}


@pytest.mark.parametrize("name", STUCK)
def test_an_average_that_rounding_keeps_is_named(name: str, tmp_path: Path) -> None:
    follow, dtype = STUCK[name]
    (found,) = train(tmp_path / "run", follow, dtype)
    assert found.severity == "warning" and found.evidence["format"] == pl.formats.get_element(dtype, "test").name
    assert {"average.0.weight", "average.3.weight"} <= set(found.where)
    assert all(name.startswith("average.") for name in found.where)
    assert "FP32" in found.advice


def test_an_average_in_buffers_is_named_by_names_without_dots(tmp_path: Path) -> None:
    (found,) = train(tmp_path / "run", in_place(0.999), flat=True)
    assert {"average.0weight", "average.3weight"} <= set(found.where)


MOVES: dict[str, Follow] = {
    "copied from FP32": from_fp32(0.999),
    "copied from a slow one in FP32": from_fp32(0.9999),
    "copied from FP32 now and then": from_fp32(0.999, every=20),
    "late, from FP32": late(100, from_fp32(0.999)),
    "fast": in_place(0.9),
    "target": copied(50),
    "target of each step": copied(1),
    "frozen": stays,
    "rewritten": rewritten,
    "reset now and then": copied(140),
}


@pytest.mark.parametrize("name", MOVES)
def test_a_copy_that_can_move_or_is_to_stay_is_not(name: str, tmp_path: Path) -> None:
    assert train(tmp_path / "run", MOVES[name]) == []


@pytest.mark.parametrize("follow", [from_fp32(0.99), copied(1)], ids=["copied from FP32", "target"])
def test_a_copy_of_weights_that_have_settled_is_not(follow: Follow, tmp_path: Path) -> None:
    assert train(tmp_path / "run", follow, until=60) == []


@pytest.mark.parametrize("follow", [in_place(0.999), by_data], ids=["in place", "by .data"])
def test_averages_in_fp32_move(follow: Follow, tmp_path: Path) -> None:
    assert train(tmp_path / "run", follow, torch.float32) == []


class Counting(nn.Module):
    """A model with a 16-bit buffer that a forward changes."""

    def __init__(self, dtype: torch.dtype, change: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.net, self.change = nn.Linear(4, 2), change
        self.register_buffer("seen", torch.zeros((), dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        self.change(self.seen)
        return self.net(x)


@pytest.mark.parametrize(
    ("dtype", "change", "steps", "stuck"),
    [
        (torch.bfloat16, lambda seen: seen.add_(1), 300, True),
        (torch.bfloat16, lambda seen: seen.add_(1), 200, False),  # it counts to 256
        (torch.bfloat16, lambda seen: seen.add_(8), 300, True),  # from 2,048 on
        (torch.float16, lambda seen: seen.add_(1), 300, False),  # it counts to 2,048
        (torch.bfloat16, lambda seen: seen.fill_(256), 300, False),  # a constant that is written at each step
        (torch.bfloat16, lambda seen: seen.mul_(0.9).add_(0.1), 300, False),  # an average that has arrived
        (torch.bfloat16, lambda seen: seen.copy_((seen + 1).clamp(max=50)), 300, False),  # a limit
    ],
)
def test_a_counter_in_16_bits_is_named_once_it_has_stopped(
    dtype: torch.dtype, change: Callable[[Tensor], object], steps: int, stuck: bool, tmp_path: Path
) -> None:
    model = Counting(dtype, change)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with pl.watch(model, optimizer, run=tmp_path / "run", every=100):
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
    found = diagnose(tmp_path / "run", rules=["average-stuck"])
    assert [finding.where for finding in found] == ([("seen",)] if stuck else [])
