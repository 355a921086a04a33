"""Each level keeps what it says in the dtype that it says, and trains; the catalogue, its aliases and refusals."""

import copy
import re
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

import plimsoll as pl
from plimsoll.precision import LEVELS, levels_table, prepare
from plimsoll.scaling import StaticScaler
from tests.support.cases import each
from tests.support.precision.training import CAST, HERE, SCALED, adamw, batches, loss_of, net, run

HALF, BF, FULL = torch.float16, torch.bfloat16, torch.float32
WEIGHTS = {"fp16-master": HALF, "fp16-pure": HALF, "bf16-master": BF, "bf16-stochastic": BF, "bf16-kahan": BF}
STATE = {"fp16-pure": HALF}
INSIDE = {"amp-fp16": HALF, "amp-bf16": BF, "fp8-tensor": BF} | WEIGHTS


@each("name", HERE)
def test_everything_is_in_the_dtype_that_the_level_says(name: str) -> None:
    model = net()
    seen: dict[str, torch.dtype] = {}
    optimizer = adamw(model, name)
    loop = prepare(model, optimizer, name)
    for key in ("embed", "norm", "batch_norm", "hidden"):
        getattr(model, key).register_forward_hook(lambda m, a, y, key=key: seen.__setitem__(key, y.dtype))
    for x, y in batches(3):  # the first may overflow
        with loop.forward():
            out = model(x)
            loss = nn.functional.mse_loss(out.float(), y)
        loop.step(loss)
    weights = WEIGHTS.get(name, FULL)
    norms = HALF if name == "fp16-pure" else FULL
    assert {model.embed.weight.dtype, model.head.bias.dtype, model.shift.dtype} == {weights}
    assert {model.norm.weight.dtype, model.batch_norm.bias.dtype, model.batch_norm.running_var.dtype} == {norms}
    assert seen["embed"] == seen["hidden"] == INSIDE.get(name, FULL)
    assert out.dtype == (INSIDE[name] if name.startswith(("amp", "fp8")) else FULL)
    assert loss.dtype == FULL
    state = {v.dtype for s in optimizer.state.values() for k, v in s.items() if k != "step"}
    assert state == {STATE.get(name, FULL)}
    assert (loop.scaler is not None) == (name in SCALED)
    assert loop.formats["embed"] == {HALF: "fp16", BF: "bf16", FULL: "fp32"}[weights]
    loop.close()
    assert {p.dtype for p in model.parameters()} == {FULL} and {b.dtype for b in model.buffers()} == {FULL, torch.int64}


@each("name", HERE)
def test_it_trains(name: str) -> None:
    model = net()
    loop = prepare(model, adamw(model, name), name)
    losses = run(loop, batches(40))
    assert sum(losses[-5:]) < 0.35 * sum(losses[:5])
    assert all(p.isfinite().all() for p in model.parameters())
    loop.close()


def test_at_fp32_it_is_the_plain_loop_bit_for_bit() -> None:
    model, data = net(0.1), batches(5)
    twin = copy.deepcopy(model)
    loop, optimizer = prepare(model, adamw(model), "fp32"), adamw(twin)
    torch.manual_seed(3)
    found = run(loop, data)
    torch.manual_seed(3)
    expected = []
    for batch in data:
        optimizer.zero_grad()
        loss = loss_of(twin, batch)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    assert found == expected
    assert all(a.equal(b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


@pytest.mark.parametrize("name", ["fp16-master", "bf16-master"])
def test_masters_begin_as_the_weights_were_and_close_gives_them_back(name: str) -> None:
    model = net()
    before = [p.detach().clone() for p in model.parameters()]
    loop = prepare(model, adamw(model), name)
    assert any(not p.float().equal(b) for p, b in zip(model.parameters(), before, strict=True))  # rounded
    loop.close()
    assert all(p.equal(b) for p, b in zip(model.parameters(), before, strict=True))


@each("name", CAST)
def test_closing_leaves_no_hook_and_an_optimizer_that_goes_on(name: str) -> None:
    model = net()
    shift, optimizer = model.shift.clone(), adamw(model, name)
    loop = prepare(model, optimizer, name)
    run(loop, batches(3))
    kept = [loop.optimizer.master_of(model.head.weight)] if name.endswith("master") else []
    loop.close()
    loop.close()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert model.shift.equal(shift)  # a constant has its FP32 bits again
    assert all(model.head.weight.equal(master) for master in kept)
    assert {v.dtype for s in optimizer.state.values() for v in s.values()} == {FULL}
    assert {id(p) for g in optimizer.param_groups for p in g["params"]} == {id(p) for p in model.parameters()}
    loss_of(model, batches(1)[0]).backward()
    optimizer.step()
    prepare(model, optimizer, "fp32").close()


@each("name", ["fp16-master", "bf16-master", "bf16-kahan"])
def test_small_updates_are_not_swallowed(name: str) -> None:
    model = nn.Linear(4, 1, bias=False)
    nn.init.ones_(model.weight)
    loop = prepare(model, torch.optim.SGD(model.parameters(), lr=2.0**-14), name)
    for _ in range(64):
        with loop.forward():
            loss = -model(torch.ones(1, 4)).sum()
        loop.step(loss)
    loop.close()
    assert model.weight.sub(1 + 64 * 2.0**-14).abs().max() < 2e-4


def test_pure_fp16_swallows_them() -> None:
    model = nn.Linear(4, 1, bias=False)
    nn.init.ones_(model.weight)
    loop = prepare(model, torch.optim.SGD(model.parameters(), lr=2.0**-14), "fp16-pure")
    for _ in range(64):
        with loop.forward():
            loss = -model(torch.ones(1, 4)).sum()
        loop.step(loss)
    assert model.weight.eq(1).all()


@each(("alias", "name"), [("O0", "fp32"), ("o1", "amp-fp16"), ("O2", "fp16-master"), ("O3", "fp16-pure")])
def test_apex_names_are_aliases(alias: str, name: str) -> None:
    model = net()
    loop = prepare(model, adamw(model, name), alias)
    assert loop.precision == name


@each(
    ("name", "message"),
    [
        ("fp16", "which can mean several. Choose one of amp-fp16, fp16-master, fp16-pure."),
        ("BF16", "Choose one of amp-bf16, bf16-master, bf16-stochastic, bf16-kahan."),
        ("FP8", "which can mean several. Choose one of fp8-unit, fp8-tensor."),
        ("fp16-mastre", "Did you mean fp16-master"),
        ("zzz", "Levels: fp32, tf32, amp-fp16"),
        ("fp8-unit", "expected a unit-scaled model at fp8-unit; got a Net whose linear layers (embed, hidden, head)"),
        ("missing.toml", "expected a plan file; got 'missing.toml', which does not exist"),
        (16, "expected a level, a plan file or a schedule of (step, precision); got precision=16"),
    ],
)
def test_a_precision_that_is_none_is_refused(name: Any, message: str) -> None:
    model = net()
    with pytest.raises(pl.ArgumentError, match=re.escape(message)):
        prepare(model, adamw(model), name)
    assert {p.dtype for p in model.parameters()} == {FULL}


def test_the_table_shows_every_level() -> None:
    console = Console(width=200, record=True, file=None, quiet=False)
    with console.capture() as captured:
        console.print(levels_table())
    lines = captured.get().splitlines()
    for name, level in LEVELS.items():
        line = next(line for line in lines if name in line)
        assert level.weights in line and level.update in line and ("fp8, bf16" in line) == (level.fp8 is not None)


def test_an_epsilon_that_fp16_cannot_hold_is_refused_where_state_is_fp16() -> None:
    model = net()
    with pytest.raises(pl.ArgumentError, match="got eps=1e-08, which is 0 in FP16. Use eps=1e-4"):
        prepare(model, torch.optim.Adam(model.parameters()), "fp16-pure")
    prepare(model, torch.optim.Adam(model.parameters()), "fp16-master")


def test_weights_beyond_fp16_are_refused_before_anything_changes() -> None:
    model = net()
    with torch.no_grad():
        model.hidden.weight[0, 0] = 1e5
    optimizer = adamw(model)
    with pytest.raises(
        pl.UnsupportedTensorError, match=r"float16 can hold; got hidden.weight with \|weight\| up to 1e"
    ):
        prepare(model, optimizer, "fp16-master")
    assert {p.dtype for p in model.parameters()} == {FULL} and not model._forward_pre_hooks
    prepare(model, optimizer, "bf16-master")


@each(("given", "name"), [(HALF, "bf16-master"), (BF, "amp-bf16"), (HALF, "fp32"), (torch.float64, "fp16-master")])
def test_weights_in_another_dtype_are_refused(given: torch.dtype, name: str) -> None:
    model = net().to(given)
    with pytest.raises(pl.UnsupportedTensorError, match="expected parameters in float32.*got embed.weight in"):
        prepare(model, adamw(model), name)


def test_weights_that_are_narrow_already_are_taken() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 1)).bfloat16()
    loop = prepare(model, adamw(model), "bf16-master")
    losses = run(loop, batches(40))
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])


def test_a_module_that_is_not_initialised_is_refused() -> None:
    model = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(
        pl.UnsupportedTensorError, match="got 0.weight, which is not initialized yet. Run the model once"
    ):
        prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), "bf16-master")


def test_a_bf16_level_needs_no_scaler_for_gradients_that_fp16_loses() -> None:
    model = nn.Linear(4, 1, bias=False)
    loop = prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), "bf16-master")
    with loop.forward():
        loss = model(torch.ones(1, 4)).sum() * 1e-12
    loop.step(loss)
    before = model.weight.float()
    master = loop.optimizer.master_of(model.weight)
    assert loop.scaler is None and not master.equal(before)


class Subclassed(nn.BatchNorm2d):
    """Another type, whose forward might do more: what goes in is cast to FP32, and what comes out is cast back."""


@each("training", [True, False])
@each("arguments", [{}, {"affine": False}, {"affine": False, "track_running_stats": False}])
@each("name", ["fp16-master", "bf16-master"])
def test_batch_norm_takes_16_bits_beside_fp32_and_gives_what_casts_would(
    name: str, arguments: dict[str, bool], training: bool
) -> None:
    seen: list[list[Tensor]] = []
    for kind in (nn.BatchNorm2d, Subclassed):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 8, 3), kind(8, **arguments), nn.ReLU(), nn.Conv2d(8, 4, 3)).train(training)
        scaler = StaticScaler(8.0, device="cpu") if name in SCALED else None
        loop = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), name, scaler=scaler)
        with loop.forward():
            loss = model(torch.randn(4, 3, 9, 9)).square().mean()
        loop.step(loss)
        seen.append([*(p.detach().clone() for p in model.parameters()), *(b.clone() for b in model.buffers()), loss])
        loop.close()
    assert all(torch.equal(one, other) for one, other in zip(*seen, strict=True))


def test_around_batch_norm_nothing_is_kept_in_fp32() -> None:
    kept: dict[type, int] = {}
    for kind in (nn.BatchNorm2d, Subclassed):  # on "meta", torch computes as a GPU does, without an emulation
        model = nn.Sequential(nn.Conv2d(3, 8, 3), kind(8), nn.ReLU(), nn.Conv2d(8, 4, 3)).to("meta")
        loop = prepare(model, torch.optim.SGD(model.parameters()), "bf16-master")
        sizes: list[int] = []

        def keep(tensor: Tensor, sizes: list[int] = sizes) -> Tensor:
            sizes.append(tensor.numel() if tensor.dtype == FULL else 0)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), loop.forward():
            model(torch.empty(4, 3, 9, 9, device="meta"))
        kept[kind] = sum(sizes)
        loop.close()
    assert kept[Subclassed] - kept[nn.BatchNorm2d] == 4 * 8 * 7 * 7
