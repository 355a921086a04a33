"""Locating changes nothing: neither what the closure computes, nor what is there afterwards."""

import copy
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import plimsoll as pl
from plimsoll.diagnosis import locate
from plimsoll.diagnosis.locating import locate_fault
from plimsoll.errors import ArgumentError
from plimsoll.runs import Run
from plimsoll.scaling import DynamicScaler, SpectralScaler
from tests.support.cases import each


class Net(nn.Module):
    """A bit of everything: dropout, running statistics, a counter of calls."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5)
        self.attend = nn.TransformerEncoderLayer(16, 2, 16, batch_first=True)
        self.head = nn.Linear(16, 3)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = self.drop(self.norm(self.conv(x)).relu())
        return self.head(self.attend(y.flatten(2)))


def setup() -> tuple[Net, torch.optim.Optimizer, Tensor]:
    torch.manual_seed(3)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.randn(4, 2, 6, 6)
    for _ in range(2):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return model, optimizer, x


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """All state, copied."""
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    state = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "gradients": gradients})
    generators = {"torch": torch.get_rng_state(), "numpy": np.random.get_state()[1], "python": random.getstate()}  # noqa: NPY002
    return {**state, **generators, "calls": model.calls}


def assert_same(a: Any, b: Any) -> None:
    """Bit for bit."""
    if isinstance(a, Tensor):
        assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))
        assert a.dtype == b.dtype
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for left, right in zip(a, b, strict=True):
            assert_same(left, right)
    elif isinstance(a, np.ndarray):
        assert (a == b).all()
    else:
        assert a == b


def steps(model: Net, optimizer: torch.optim.Optimizer, x: Tensor, losses: list[Tensor]) -> Callable[[], Tensor]:
    def closure() -> Tensor:
        optimizer.zero_grad()
        random.random()
        np.random.rand()  # noqa: NPY002
        loss = model(x).square().mean()
        losses.append(loss.detach().clone())
        loss.backward()
        losses.extend(p.grad.clone() for p in model.parameters())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        return loss

    return closure


def test_a_step_that_was_located_leaves_all_as_it_was():
    model, optimizer, x = setup()
    before = everything(model, optimizer)
    identities = [id(p.grad) for p in model.parameters()]
    assert locate(steps(model, optimizer, x, []), model=model) is None
    assert_same(everything(model, optimizer), before)
    assert [id(p.grad) for p in model.parameters()] == identities


def test_all_is_put_back_after_a_fault_and_after_an_error():
    model, optimizer, x = setup()
    before = everything(model, optimizer)
    step = steps(model, optimizer, x, [])

    def spoiled() -> Tensor:
        return (step() / 0).exp()

    assert locate(spoiled, model=model) is not None
    assert_same(everything(model, optimizer), before)

    def fails() -> Tensor:
        step()
        raise LookupError("no such batch")

    with pytest.raises(LookupError, match="no such batch"):
        locate(fails, model=model)
    assert_same(everything(model, optimizer), before)


def test_all_is_put_back_if_the_description_of_a_fault_fails(monkeypatch: pytest.MonkeyPatch):
    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError

    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.weight.detach().clone()

    def step() -> None:
        (model(torch.ones(1, 2)).sum() * math.inf).backward()
        optimizer.step()

    monkeypatch.setattr(locate_fault, "describe_fault", broken)
    with pytest.raises(ZeroDivisionError):
        locate(step, model=model)
    assert torch.equal(model.weight, before) and model.weight.grad is None


def test_what_is_computed_is_the_plain_step_to_the_bit():
    model, optimizer, x = setup()
    inside: list[Tensor] = []
    plain: list[Tensor] = []
    locate(steps(model, optimizer, x, inside), model=model)
    steps(model, optimizer, x, plain)()
    assert len(inside) == len(plain) > 10
    assert_same(inside, plain)


def test_without_restoring_the_step_stands():
    located, optimizer, x = setup()
    locate(steps(located, optimizer, x, []), model=located, restore=False)
    plain, other, x = setup()
    steps(plain, other, x, [])()
    assert_same(located.state_dict(), plain.state_dict())


def test_contents_are_put_back_without_a_model_too():
    model, optimizer, x = setup()
    before = copy.deepcopy(model.state_dict())
    random_before = torch.get_rng_state()
    total = torch.zeros(1)

    def closure() -> Tensor:
        loss = steps(model, optimizer, x, [])()
        total.add_(loss.detach())
        return loss

    locate(closure)
    assert_same(model.state_dict(), before)
    assert_same(torch.get_rng_state(), random_before)
    assert total.item() == 0


def test_moments_that_a_first_step_makes_are_gone_again():
    model = nn.Linear(3, 3)
    optimizer = torch.optim.Adam(model.parameters())

    def closure() -> None:
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()

    locate(closure, model=model)
    assert not optimizer.state
    assert model.weight.grad is None


@each("kind", [torch.amp.GradScaler, DynamicScaler, SpectralScaler])
def test_scalers_are_put_back(kind: Any):
    torch.manual_seed(0)
    model, scaler = nn.Linear(4, 4), kind("cpu", init_scale=2.0**20)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.full((2, 4), 1.0)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(x).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    step()
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(scaler.state_dict())
    fault = locate(step, model=model)
    assert fault is not None
    assert (fault.phase, fault.scale) == ("backward", state["scale"])
    assert_same(scaler.state_dict(), state)
    assert_same(model.state_dict(), weights)
    step()  # and it goes on from there
    assert scaler.get_scale() < state["scale"]


def test_a_watch_records_nothing_of_it(tmp_path: Path):
    def trained(folder: Path, *, located: bool) -> list[Any]:
        torch.manual_seed(0)
        model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)), torch.randn(8, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step() -> None:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

        with pl.watch(model, optimizer, run=folder, every=1):
            for index in range(4):
                if located and index != 1:
                    assert locate(step, model=model) is None
                step()
        run = Run(folder)
        return [(s, c, n, spectrum.to_dict()) for s, c, n, spectrum in run.spectra()] + [
            list(map(list, run.scalars("loss")))
        ]

    assert trained(tmp_path / "a", located=True) == trained(tmp_path / "b", located=False)


def test_a_compiled_model_runs_eagerly():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    compiled = torch.compile(model, backend="eager")
    x = torch.ones(2, 4)
    compiled(x)
    fault = locate(lambda: (compiled(x * 1e30) * 1e30).exp().sum(), model=compiled)
    assert fault is not None
    assert fault.operation in {"aten.mul", "aten.exp"}
    with torch.no_grad():
        model[1].bias.fill_(float("nan"))
    fault = locate(lambda: compiled(x).sum(), model=compiled)
    assert fault is not None
    assert (fault.module, fault.phase) == ("1", "before")
    assert fault.sentence.startswith("1.bias held 2 NaN before any operation")


@each(
    ("arguments", "message"),
    [
        ({"closure": 3}, r"locate: expected a closure that runs forward; got int\. Write"),
        ({"model": "net"}, r"locate: expected model to be a torch\.nn\.Module; got str\. Leave it out"),
        ({"flush_share": 1}, r"expected flush_share to be None or a fraction from 0 to below 1; got flush_share=1\."),
        ({"flush_share": float("nan")}, r"expected flush_share to be None or a fraction .* got flush_share=nan"),
        ({"flush_share": True}, r"expected flush_share .* got flush_share=True"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str):
    with pytest.raises(ArgumentError, match=message):
        locate(**{"closure": lambda: torch.zeros(1), **arguments})


def test_it_is_not_called_inside_of_itself_or_of_emulation():
    with pytest.raises(ArgumentError, match="got one inside a backward or another TorchDispatchMode"):
        locate(lambda: locate(lambda: torch.zeros(1)))
    with pl.emulate("fp16"), pytest.raises(ArgumentError, match=r"expected `with plimsoll.emulate\(...\)` inside the"):
        locate(lambda: torch.zeros(1))
    with pytest.raises(ArgumentError, match="emulate: expected operations to be 'matmul' or names inside a Torch"):
        locate(lambda: pl.emulate(forward="e4m3", operations="all").__enter__())


def stepped(optimizer: type[torch.optim.Optimizer], name: str, value: Any, **more: Any) -> Any:
    """The fault of a step whose second parameter group has such a setting, and the model after it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    groups = [{"params": list(model[i].parameters())} for i in (0, 2)]
    made: Any = optimizer(groups, **{"lr": 1e-2, **more})  # pyright: ignore[reportCallIssue]
    made.param_groups[1][name] = value
    x = torch.randn(8, 4)

    def step() -> Tensor:
        made.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        made.step()
        return loss

    fault = locate(step, model=model)
    assert all(bool(p.isfinite().all()) for p in model.parameters())  # put back
    return fault


NAN, INF = float("nan"), float("inf")
SETTINGS: list[tuple[type[torch.optim.Optimizer], str, Any, str]] = [
    (torch.optim.SGD, "lr", NAN, "the learning rate (lr) of SGD's parameter group 1 is NaN"),
    (torch.optim.SGD, "lr", INF, "the learning rate (lr) of SGD's parameter group 1 is Inf"),
    (torch.optim.AdamW, "lr", NAN, "the learning rate (lr) of AdamW's parameter group 1 is NaN"),
    (torch.optim.Adam, "lr", torch.tensor(NAN), "the learning rate (lr) of Adam's parameter group 1 is NaN"),
    (torch.optim.SGD, "weight_decay", NAN, "the weight decay (weight_decay) of SGD's parameter group 1 is NaN"),
    (torch.optim.AdamW, "weight_decay", INF, "the weight decay (weight_decay) of AdamW's parameter group 1 is Inf"),
    (torch.optim.Adam, "betas", (NAN, 0.999), "the betas[0] of Adam's parameter group 1 is NaN"),
    (torch.optim.Adam, "betas", (0.9, NAN), "the betas[1] of Adam's parameter group 1 is NaN"),
    (torch.optim.Adam, "eps", NAN, "the eps of Adam's parameter group 1 is NaN"),
]


@each(("optimizer", "name", "value", "says"), SETTINGS)
def test_an_optimizer_with_a_setting_that_is_not_finite_is_named(
    optimizer: type[torch.optim.Optimizer], name: str, value: Any, says: str
) -> None:
    fault = stepped(optimizer, name, value)
    assert fault is not None and fault.sentence == f"{says}; it reached the parameter 2.weight."
    assert (fault.operation, fault.phase) == (f"{optimizer.__name__}.step", "optimizer")
    assert fault.source is not None and fault.source.text == "made.step()"
    assert "made.step()" in str(fault) and fault.to_dict()["reached"] == "the parameter 2.weight"


@each(("name", "value"), [("lr", 0.0), ("max_norm", INF), ("initial_lr", NAN)])
def test_settings_that_harm_no_weight_are_no_fault(name: str, value: float) -> None:
    assert stepped(torch.optim.SGD, name, value) is None


def test_a_step_without_a_backward_before_it_is_the_optimizers() -> None:
    p = nn.Parameter(torch.full((2,), 3e38))
    p.grad = torch.full((2,), -3e38)
    fault = locate(torch.optim.SGD([p], lr=1.0).step)
    assert fault is not None and fault.phase == "optimizer"


def test_a_loss_that_breaks_before_a_bad_rate_is_used_is_named_first() -> None:
    p = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([p], lr=1e-2)
    optimizer.param_groups[0]["lr"] = NAN

    def step() -> None:
        p.sqrt().sum().backward()
        optimizer.step()

    fault = locate(step)
    assert fault is not None and fault.phase == "backward" and "SGD" not in fault.sentence
