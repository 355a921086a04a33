"""NaN and Inf that begin between samples: the first place is found at the step itself, and training is as without."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

import plimsoll as pl
from plimsoll.diagnosis import Finding, View, diagnose
from plimsoll.report.verdicts import summary_text
from plimsoll.report.verdicts.verdict_sentence import verdict
from plimsoll.watch.hooks.autograd_graph import widens


class Net(nn.Module):
    """Two layers around a norm, whose output may be broken at will."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.second = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)
        self.middle = Middle()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.middle(self.norm(self.first(x)).relu()))


class Middle(nn.Module):
    """A root that NaN comes from if `shift` is low, and then what `change` makes of it."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = 1.0
        self.change: Callable[[Tensor], Tensor] = lambda x: x

    def forward(self, x: Tensor) -> Tensor:
        return self.change((x + self.shift).sqrt())


class Wild(torch.autograd.Function):
    """An identity whose backward gives Inf."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, g: Tensor) -> Tensor:
        return g * math.inf


def weight(model: Net, x: Tensor, y: Tensor, optimizer: torch.optim.Optimizer) -> None:
    model.norm.weight.data[3] = math.nan


def batch(model: Net, x: Tensor, y: Tensor, optimizer: torch.optim.Optimizer) -> None:
    x[2, 1] = math.nan


def values(model: Net, x: Tensor, y: Tensor, optimizer: torch.optim.Optimizer) -> None:
    model.middle.shift = -1e9


def other_graph(model: Net, x: Tensor, y: Tensor, optimizer: torch.optim.Optimizer) -> None:
    model.middle.change = lambda z: (z - 1e9).sqrt()


def targets(model: Net, x: Tensor, y: Tensor, optimizer: torch.optim.Optimizer) -> None:
    y.fill_(-100)


def backward(model: Net, x: Tensor, y: Tensor, optimizer: torch.optim.Optimizer) -> None:
    model.middle.change = Wild.apply


def state(model: Net, x: Tensor, y: Tensor, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state[model.second.weight]["exp_avg"][0, 0] = math.inf


def train(
    path: Path, breaks: Callable[..., None] | None, *, steps: int = 30, at: int = 13, watched: bool = True
) -> tuple[list[Finding], list[float]]:
    """A training that breaks at an unsampled step; what the rule says, and the losses."""
    model, losses = Net(), list[float]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    watch = pl.watch(model, optimizer, run=path, every=10) if watched else None
    for step in range(steps):
        x = torch.randn(16, 8)
        y = x[:, :4].argmax(dim=1)
        if step == at and breaks is not None:
            breaks(model, x, y, optimizer)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if watch is None:
        return [], losses
    watch.close()
    return diagnose(path, rules=["nonfinite"]), losses


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_logits_that_overflow_are_found_behind_the_cast_of_the_loss(dtype: torch.dtype, tmp_path: Path) -> None:
    """The graph keeps no value of them: only what `log_softmax` has made of them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with pl.watch(model, optimizer, run=tmp_path / "run", every=10):
        for step in range(15):
            if step == 13:
                model[2].weight.data.mul_(1e5)  # at most 35,355: below FP16's largest value
            logits = model(torch.randn(16, 8).half())
            loss = nn.functional.cross_entropy(logits.to(dtype), torch.zeros(16, dtype=torch.long))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    (found,) = diagnose(tmp_path / "run", rules=["nonfinite"])
    assert (found.evidence["first_seen_in"], found.evidence["first_seen_at"]) == ("activations 2:output", 13)
    assert "loss function" not in found.advice
    assert "activations of layer 2 contained NaN or Inf at step 13" in verdict(View(pl.Run(tmp_path / "run")), [found])


def test_of_a_broken_batch_the_verdict_names_the_data_and_no_operation(tmp_path: Path) -> None:
    found, _ = train(tmp_path / "run", batch)
    assert verdict(View(pl.Run(tmp_path / "run")), found) == (
        "Problem: the batch of step 13 contained NaN or Inf already (model:input); check the data of that step, and "
        "restore the last checkpoint before it."
    )


def test_a_cast_to_fewer_values_may_overflow_itself() -> None:
    x = torch.ones(2, requires_grad=True)
    half = x.half()
    assert not widens(half.grad_fn) and widens(half.float().grad_fn)
    assert not widens(half.bfloat16().grad_fn) and widens(half.double().grad_fn)


@pytest.mark.parametrize(
    ("breaks", "place", "at", "broke_first"),
    [
        (weight, "weights norm.weight", 13, "loss"),
        (batch, "input model:input", 13, "loss"),
        (values, "activations middle:output", 13, "loss"),
        (other_graph, "activations second:input", 13, "loss"),
        (targets, "the loss, of outputs that were finite", 13, None),
        (backward, "gradients norm.weight", 13, "gradients"),
        (state, "weights second.weight", 14, "loss"),
    ],
)
def test_the_place_is_found_between_samples(
    breaks: Callable[..., None], place: str, at: int, broke_first: str | None, tmp_path: Path
) -> None:
    (found,), losses = train(tmp_path / "run", breaks)
    assert found.severity == "alarm"
    assert (found.evidence["first_seen_in"], found.evidence["first_seen_at"]) == (place, at)
    assert found.evidence.get("broke_first") == broke_first
    shown = dict(summary_text.evidence(found))["First seen in"]
    assert shown == place if place.startswith("the loss") else shown.endswith(f" of {place.partition(' ')[2]}")
    assert "place" not in found.evidence and "recorder=" not in found.advice
    assert [repr(x) for x in losses] == [repr(x) for x in train(tmp_path / "bare", breaks, watched=False)[1]]


def test_a_sound_training_is_silent_and_nothing_is_kept_alive(tmp_path: Path) -> None:
    assert train(tmp_path / "run", None)[0] == []
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pl.watch(model, optimizer, run=tmp_path / "other", every=10) as watch:
        for _ in range(3):
            model(torch.randn(4, 8)).sum().backward()
            optimizer.step()
        origin = watch._steps.origin
        assert origin is not None and origin._held == [] and [ref() for _, ref in origin._inputs] == [None]


def test_where_the_place_is_not_known_the_finding_says_how_to_get_it(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with pl.watch(model, optimizer, run=tmp_path / "run", every=10, collect=["weights"]) as watch:
        watch._session.due.traced = False  # as for a model on a device
        for step in range(30):
            x = torch.randn(16, 8) * (math.nan if step == 13 else 1.0)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    (found,) = diagnose(tmp_path / "run", rules=["nonfinite"])
    assert found.evidence["place"] == "not recorded: it began between samples"
    assert 'recorder=("loss", "scale", "nonfinite", "weights", "activations")' in found.advice


class Functional(nn.Module):
    """Operations outside of modules, in a checkpoint if asked for, and one module that is frozen."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.frozen, self.first, self.last = (nn.Linear(8, 8) for _ in range(3))
        self.frozen.requires_grad_(False)
        self.checkpointed, self.power, self.shift = checkpointed, nn.Softplus(), 1.0

    def inner(self, x: Tensor) -> Tensor:
        return self.power(self.first(x)) + (x.square() + self.shift).log()

    def forward(self, x: Tensor) -> Tensor:
        x = self.frozen(x)
        x = (
            torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)
            if self.checkpointed
            else self.inner(x)
        )
        return self.last(torch.tanh(x))


class Graph(nn.Module):
    """A layer, and a product or quotient of what it puts out with numbers that need no gradient."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.way, self.degrees = nn.Linear(8, 8), way, torch.ones(4)

    def forward(self, x: Tensor) -> Tensor:
        h, weights = self.inner(x), self.degrees.pow(-0.5)
        edges = weights[:, None] * torch.ones(4, 4) * weights * (self.degrees > 0)
        if self.way == "matrices":
            return edges @ h
        if self.way == "batches":
            return edges.expand(2, 4, 4) @ h.expand(2, 4, 8)
        if self.way == "the other way round":
            return h.T @ edges
        return h * edges[:, :1] if self.way == "numbers" else h / edges[:, 2:3]


@pytest.mark.parametrize("way", ["matrices", "batches", "the other way round", "numbers", "quotients"])
@pytest.mark.parametrize("every", [1000, 4])
def test_a_broken_number_that_needs_no_gradient_is_not_of_the_layer_before(
    way: str, every: int, tmp_path: Path
) -> None:  # fmt: skip
    model = nn.ModuleDict({"graph": Graph(way), "last": nn.Identity()})
    model.forward = lambda x: model["last"](model["graph"](x))  # type: ignore[method-assign]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with pl.watch(model, optimizer, run=tmp_path / "run", every=every):
        for step in range(6):
            model["graph"].degrees[2] = 0.0 if step == 3 else 1.0  # type: ignore[index]
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().sum().backward()
            optimizer.step()
    first = next(event for event in pl.Run(tmp_path / "run").events() if event.kind == "origin")
    assert (first.step, first.details["where"]) == (3, "activations")
    assert first.details["names"] == ["graph:output"]


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("every", [1000, 4])
def test_what_breaks_outside_of_modules_is_first_seen_in_the_next(
    checkpointed: bool, every: int, tmp_path: Path
) -> None:
    model = Functional(checkpointed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with pl.watch(model, optimizer, run=tmp_path / "run", every=every):
        for step in range(6):
            model.shift = -10.0 if step == 3 else 1.0
            optimizer.zero_grad()
            model(torch.randn(4, 8)).sum().backward()
            optimizer.step()
    events = [event for event in pl.Run(tmp_path / "run").events() if event.kind == "origin"]
    assert (events[0].step, events[0].details["where"], events[0].details["names"]) == (
        3,
        "activations",
        ["last:input"],
    )


class Scaled(nn.Linear):
    """A layer that multiplies what it puts out by a number."""

    factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.factor


class BetweenModules(nn.Module):
    """Two layers with a logarithm between."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = Scaled(8, 8), nn.Linear(8, 1)
        self.shift = 9.0

    def forward(self, x: Tensor) -> Tensor:
        return self.last((self.first(x).sigmoid() + self.shift).log() + 1)


@pytest.mark.parametrize(("broken", "named"), [("logarithm", "last:input"), ("first", "first:output")])
@pytest.mark.parametrize("at", [0, 3])
def test_an_input_is_named_for_what_is_computed_between_modules(
    broken: str, named: str, at: int, tmp_path: Path
) -> None:
    model = BetweenModules()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with pl.watch(model, optimizer, run=tmp_path / "run", every=10):
        for step in range(4):
            if step == at and broken == "logarithm":
                model.shift = -9.0
            elif step == at:
                model.first.factor = math.nan
            optimizer.zero_grad()
            model(torch.randn(4, 8)).sum().backward()
            optimizer.step()
    origin = next(event for event in pl.Run(tmp_path / "run").events() if event.kind == "origin")
    assert (origin.step, origin.details["where"], origin.details["names"][0]) == (at, "activations", named)
    (found,) = diagnose(tmp_path / "run", rules=["nonfinite"])
    assert found.where == (named,)


def test_modules_have_hooks_in_sampled_steps_only(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inside = [module for module in model.modules() if module is not model]
    hooked: list[int] = []
    with pl.watch(model, optimizer, run=tmp_path / "run", every=3):
        for _ in range(7):
            model(torch.randn(4, 8)).sum().backward()
            hooked.append(sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in inside))
            optimizer.step()
    assert hooked == [8, 0, 0, 8, 0, 0, 8]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    names = pl.Run(tmp_path / "run").tensors["activations"]
    assert {"model:input", "model:output", "middle:input", "middle:output"} <= set(names)


class Normed(nn.Module):
    """A batch norm in FP16 with a mask of infinities beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(8).half(), nn.Linear(8, 4)
        self.register_buffer("mask", torch.full((4, 4), -math.inf).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x.half()).float()) + self.mask.exp().sum()


@pytest.mark.parametrize("size", [1.0, 1000.0])
def test_running_statistics_that_overflow_are_named(size: float, tmp_path: Path) -> None:
    model = Normed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with pl.watch(model, optimizer, run=tmp_path / "run", every=2):
        for _ in range(10):
            optimizer.zero_grad()
            model(torch.randn(32, 8) * size).square().mean().backward()
            optimizer.step()
    found = diagnose(tmp_path / "run", rules=["nonfinite"])
    assert [f.evidence["first_seen_in"] for f in found] == (["buffers norm.running_var"] if size > 1 else [])
    # The record does not say in which format the buffers are: FP32 overflows too, where a training diverges.
    assert all("if they have 16 bits" in f.advice and "In FP32, the values" in f.advice for f in found)


def test_a_norm_with_broken_statistics_is_named_and_not_what_it_is_given(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    norm = model[1].eval()
    assert isinstance(norm, nn.BatchNorm1d) and norm.running_mean is not None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with pl.watch(model, optimizer, run=tmp_path / "run", every=10):
        for step in range(15):
            if step == 13:
                norm.running_mean[3] = math.nan
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().sum().backward()
            optimizer.step()
    (found,) = diagnose(tmp_path / "run", rules=["nonfinite"])
    assert (found.evidence["first_seen_in"], found.evidence["first_seen_at"]) == ("activations 1:output", 13)


def with_input(path: Path, size: float, at: int = 13) -> Finding:
    """The alarm of a training with one input of this size at a step; every tenth is sampled."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with pl.watch(model, optimizer, run=path, every=10, quiet=True):
        for step in range(20):
            x = torch.rand(16, 8)
            if step == at:
                x[3, 5] = size
            loss = (model(x) - x[:, :4]).square().mean()
            if step == at and size < 1e10:
                loss = loss / 0
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    (found,) = (finding for finding in diagnose(path) if finding.rule == "nonfinite")
    return found


def test_an_input_far_above_the_others_is_named(tmp_path: Path) -> None:
    found = with_input(tmp_path / "outlier", 1e30)
    assert found.evidence["largest_input"] == pytest.approx(1e30) and float(found.evidence["usual_input"]) <= 1
    assert "an input of 1.00e30" in found.advice and "loss function" not in found.advice
    view = View(pl.Run(tmp_path / "outlier"))
    assert "an input of 1.00e30 (at samples before 1 at most) brought NaN or Inf at step 13" in verdict(
        view, diagnose(view)
    )
    assert float(with_input(tmp_path / "at a sample", 1e30, at=10).evidence["usual_input"]) <= 1
    other = with_input(tmp_path / "another cause", 30.0)
    assert "largest_input" not in other.evidence and "loss function" in other.advice


# -- what a loss is given


class Saving(torch.autograd.Function):
    """A squared error that keeps what it was given, or only the difference."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, y: Tensor, both: bool) -> Tensor:
        ctx.both = both
        ctx.save_for_backward(*((out, y) if both else (out - y,)))
        return (out - y).square().mean()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        kept = ctx.saved_tensors
        return 2 * (kept[0] - kept[1] if ctx.both else kept[0]) * gradients[0], None, None


F = nn.functional
GIVEN: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "mse": (F.mse_loss, "the targets of the loss"),
    "huber": (F.huber_loss, "the targets of the loss"),
    "smooth l1": (F.smooth_l1_loss, "the targets of the loss"),
    "logits": (F.binary_cross_entropy_with_logits, "the targets of the loss"),
    "positives": (
        lambda out, y: F.binary_cross_entropy_with_logits(out, torch.ones(16, 4), pos_weight=y[3]),
        "the weights of the loss",
    ),
    "classes": (lambda out, y: F.cross_entropy(out, torch.arange(16) % 4, weight=y[3]), "the weights of the loss"),
    "weighted": (lambda out, y: (out.square() * y).mean(), "the constants of the loss"),
    "divided": (lambda out, y: (out.square() / y).mean(), "the constants of the loss"),
    "divergence": (lambda out, y: F.kl_div(out.log_softmax(1), y, reduction="batchmean"), "the constants of the loss"),
    "soft": (F.cross_entropy, "the constants of the loss"),
    "cosine": (lambda out, y: F.cosine_embedding_loss(out, y, torch.ones(16)), "the constants of the loss"),
    "by hand": (lambda out, y: (out - y).square().mean(), "the constants of the loss"),
    "absolute": (F.l1_loss, "the constants of the loss"),
    "triplet": (lambda out, y: F.triplet_margin_loss(out, y, y + 1), "the loss, of outputs that were finite"),
    "filled": (
        lambda out, y: out.masked_fill(out > 9, float(y.sum())).masked_fill(y.isnan(), math.nan).square().mean(),
        "the loss, of outputs that were finite",
    ),
    "chosen": (lambda out, y: torch.where(y.isnan(), y, out).square().mean(), "the loss, of outputs that were finite"),
    "function": (lambda out, y: Saving.apply(out, y, True), "the loss, of outputs that were finite"),
    "function that keeps a difference": (
        lambda out, y: Saving.apply(out, y, False), "the loss, of outputs that were finite",
    ),
}  # fmt: skip


def with_targets(path: Path, loss: Callable[[Tensor, Tensor], Tensor], every: int, bad: float = math.nan) -> Finding:
    """The alarm of a training with one bad target at step 13."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with pl.watch(model, optimizer, run=path, every=every, quiet=True):
        for step in range(16):
            x = torch.randn(16, 8)
            y = x[:, :4].softmax(dim=1)
            if step == 13:
                y[3, 1] = bad
            out = model(x)
            assert step > 13 or bool(out.isfinite().all())
            optimizer.zero_grad()
            loss(out, y).backward()
            optimizer.step()
    (found,) = diagnose(path, rules=["nonfinite"])
    return found


@pytest.mark.parametrize("name", GIVEN)
def test_what_a_loss_is_given_is_no_fault_of_the_last_layer(name: str, tmp_path: Path) -> None:
    loss, place = GIVEN[name]
    for every in (10, 1):
        found = with_targets(tmp_path / f"run-{every}", loss, every)
        assert found.evidence["first_seen_at"] == 13 and not found.where
        assert str(found.evidence["first_seen_in"]).startswith(place)


def test_an_infinite_target_is_named_in_the_verdict(tmp_path: Path) -> None:
    found = with_targets(tmp_path / "run", F.mse_loss, 10, math.inf)
    assert "Look at the data, and at what computes the targets of the loss" in found.advice
    assert verdict(View(pl.Run(tmp_path / "run")), [found]) == (
        "Problem: the targets of the loss contained NaN or Inf at step 13; check the data of that step, and restore "
        "the last checkpoint before it."
    )


def test_a_constant_that_does_no_harm_is_not_named(tmp_path: Path) -> None:
    """A bound of Inf comes before the logarithm that gives NaN."""
    top = torch.full((4,), math.inf)

    def loss(out: Tensor, y: Tensor) -> Tensor:
        bounded = torch.minimum(out, top).square()
        return (bounded + (0 if y.isfinite().all() else -1e9)).log().square().mean()

    found = with_targets(tmp_path / "run", loss, 10)
    assert "constant" not in str(found.evidence["first_seen_in"]) and not found.where


def test_an_output_that_is_finite_is_looked_at_without_its_graph(tmp_path: Path) -> None:
    model = Net()
    with pl.watch(model, run=tmp_path / "run", every=10) as watch:
        origin = watch._steps.origin
        assert origin is not None
        model(torch.randn(4, 8))
        (kept,) = origin._outputs
        assert kept.x.grad_fn is None and not kept.x.requires_grad
        model(torch.randn(4, 8)).sum().backward()
        assert origin._outputs == []


@pytest.mark.parametrize("at", [10, 13])
def test_the_step_is_right_where_the_root_is_not_called(at: int, tmp_path: Path) -> None:
    """No hook has seen the forward begin."""
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with pl.watch(model, optimizer, run=tmp_path / "run", every=10, quiet=True):
        for step in range(16):
            x = torch.randn(16, 8)
            optimizer.zero_grad()
            F.mse_loss(model[2](model[1](model[0](x))), x[:, :4] * (math.nan if step == at else 1.0)).backward()
            optimizer.step()
    (found,) = diagnose(tmp_path / "run", rules=["nonfinite"])
    assert (found.since_step, found.evidence["first_seen_at"]) == (at, at)
    assert found.evidence["first_seen_in"] == "the targets of the loss"


# -- compiled models


class Unit(nn.Module):
    """Rows of length 1; 0 / 0 where all is 0."""

    def forward(self, x: Tensor) -> Tensor:
        return x / x.norm(dim=-1, keepdim=True)


@pytest.mark.parametrize("at", [10, 13])
@pytest.mark.parametrize(
    ("breaks", "seen_in"),
    [
        ("zero", "the compiled code (layers 0 to 2)"),
        ("batch", "input model:input"),
        ("target", "the targets of the loss"),
        ("buffer", "buffers 3.mask"),
    ],
)
def test_of_a_compiled_model_the_step_is_right_and_no_layer_is_guessed(
    breaks: str, seen_in: str, at: int, tmp_path: Path
) -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16, bias=False), Unit(), nn.Linear(16, 4), Masked())
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with pl.watch(model, optimizer, run=tmp_path / "run", every=10, quiet=True):
        for step in range(16):
            x = torch.randn(16, 8)
            y = torch.randn(16, 4)
            if step == at:
                {"zero": x, "batch": x, "target": y, "buffer": model[3].mask[None]}[breaks][0] = (
                    0.0 if breaks == "zero" else math.nan
                )
            optimizer.zero_grad()
            F.mse_loss(compiled(x), y).backward()
            optimizer.step()
    (found,) = diagnose(tmp_path / "run", rules=["nonfinite"])
    first = next(event for event in pl.Run(tmp_path / "run").events() if event.kind == "origin")
    assert (first.step, found.evidence["first_seen_at"], found.since_step) == (at, at, at)
    if at == 10 and breaks == "zero":  # of a sampled step the record knows the layer
        seen_in = "activations 1:output"
    assert found.evidence["first_seen_in"] == seen_in
    shown = dict(summary_text.evidence(found))["First seen in"]
    assert shown == (seen_in if seen_in.startswith("the ") else seen_in.replace(" ", " of ", 1))
    if seen_in.startswith("the compiled"):
        assert not found.where and "runs compiled models eagerly" in found.advice
        assert f"NaN or Inf began in {seen_in} at step 13" in verdict(View(pl.Run(tmp_path / "run")), [found])


class Masked(nn.Module):
    """A product with a buffer."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.mask
