"""Values that a training keeps with too few digits, modules in the wrong mode, and sound trainings that look alike."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import plimsoll as pl
from plimsoll.diagnosis import Finding, diagnose
from tests.support.cases import each

RULES = ["kept-narrow", "evaluation-mode", "gradients-mishandled", "average-stuck", "cast-flushes", "dead-layer"]


def net(*layers: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), *(layers or (nn.ReLU(),)), nn.Linear(32, 4))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-3)


def plain(model: nn.Module, step: int) -> Tensor:
    x = torch.randn(16, 8)
    return F.cross_entropy(model(x), x[:, :4].argmax(dim=1))


def nothing(*_: Any) -> None:
    """Around a step."""


def train(
    path: Path,
    model: nn.Module | None = None,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    *,
    loss: Callable[[nn.Module, int], Tensor] = plain,
    before: Callable[[nn.Module, torch.optim.Optimizer, int], object] = nothing,
    after: Callable[[nn.Module, torch.optim.Optimizer, int], object] = nothing,
    steps: int = 14,
    accumulate: int = 1,
) -> list[Finding]:
    """A watched training, and what the rules say of it."""
    model = net() if model is None else model
    made = optimizer(model)
    with pl.watch(model, made, run=path, every=50):
        for step in range(steps):
            made.zero_grad()
            for _ in range(accumulate):
                loss(model, step).backward()
            before(model, made, step)
            made.step()
            after(model, made, step)
    return diagnose(path, rules=RULES)


def said(path: Path, **arguments: Any) -> list[tuple[str, str]]:
    """Rule and cause of each warning or alarm."""
    found = [f for f in train(path, **arguments) if f.severity != "info"]
    return [(f.rule, str(f.evidence.get("cause", ""))) for f in found]


def each_parameter(change: Callable[[Tensor], Tensor]) -> Callable[..., None]:
    @torch.no_grad()
    def run(model: nn.Module, *_: Any) -> None:
        for p in model.parameters():
            p.copy_(change(p))

    return run


def each_gradient(change: Callable[[Tensor], Tensor]) -> Callable[..., None]:
    def run(model: nn.Module, *_: Any) -> None:
        for p in model.parameters():
            assert p.grad is not None
            p.grad.copy_(change(p.grad))

    return run


def in_e4m3(g: Tensor, scale: float = 1.0) -> Tensor:
    return (g * scale).to(torch.float8_e4m3fn).float() / scale


def at_random(p: Tensor) -> Tensor:
    """Rounded to BF16 up or down, in proportion to how near these are."""
    noise = torch.randint(1 << 16, p.shape, dtype=torch.int32)
    return ((p.view(torch.int32) + noise) & -(1 << 16)).view(torch.float32)


def reloaded_in(dtype: torch.dtype) -> Callable[..., None]:
    """The state of Adam goes through a format after the sixth step."""

    def reload(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        for state in optimizer.state.values() if step == 6 else ():
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = state[name].to(dtype).float()

    return reload


class NarrowAdam(torch.optim.Optimizer):
    """Second moments alone, in a dtype of their own; `change` rounds what is kept."""

    def __init__(self, model: nn.Module, dtype: torch.dtype, decay: float, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__(model.parameters(), {"lr": 1e-3, "betas": (0.0, decay)})
        self.dtype, self.change = dtype, change

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                square = self.state[p].setdefault("exp_avg_sq", torch.zeros_like(p, dtype=self.dtype))
                new = square.float() * group["betas"][1] + (1 - group["betas"][1]) * p.grad**2
                square.copy_(self.change(new))
                p.sub_(group["lr"] * p.grad / (square.float().sqrt() + 1e-8))


def narrow(dtype: torch.dtype, decay: float, change: Callable[[Tensor], Tensor] = lambda x: x) -> Callable[..., Any]:
    return lambda model: NarrowAdam(model, dtype, decay, change)


class Table(nn.Module):
    """An embedding whose ids go through a dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.tokens, self.head, self.dtype = nn.Embedding(1025, 8), nn.Linear(8, 4), dtype

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.tokens(ids.to(self.dtype).long()))


def of_ids(model: nn.Module, step: int) -> Tensor:
    ids = torch.randint(1024, (256,))
    return F.cross_entropy(model(ids), ids % 4)


def one_by_one(dtype: torch.dtype, rows: int) -> Callable[[nn.Module, int], Tensor]:
    def loss(model: nn.Module, step: int) -> Tensor:
        x = torch.randn(rows, 8)
        total = torch.zeros((), dtype=dtype)
        for part in F.cross_entropy(model(x), x[:, :4].argmax(dim=1), reduction="none").to(dtype).unbind():
            total = total + part
        return total.float() / rows

    return loss


def clipped_at_once(largest: float, *, elsewhere: bool = False) -> Callable[[nn.Module, int], Tensor]:
    """A micro-batch whose gradients are added to those of the ones before it, which are clipped first."""

    def loss(model: nn.Module, step: int) -> Tensor:
        nn.utils.clip_grad_norm_(model.parameters(), largest)
        for p in model.parameters() if elsewhere else ():  # their sum is kept elsewhere, and they begin at zero
            if p.grad is not None:
                p.grad.zero_()
        return plain(model, step)

    return loss


def left(step: int) -> Callable[..., None]:
    """An evaluation after a step, and no training mode after it."""
    return lambda model, optimizer, now: model.eval() if now == step else None


def frozen() -> nn.Module:
    """A model whose batch norm has seen data and is in evaluation mode."""
    model = net(nn.BatchNorm1d(32), nn.ReLU())
    with torch.no_grad():
        model(torch.randn(64, 8) + 1)
    model[1].eval()
    return model


class Statistics(nn.Module):
    """A running mean in a dtype."""

    def __init__(self, dtype: torch.dtype, momentum: float) -> None:
        super().__init__()
        self.net, self.momentum = net(), momentum
        self.register_buffer("running_mean", torch.zeros(8, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        mean = (x.detach() + 40).mean(dim=0).to(self.running_mean.dtype)
        self.running_mean.mul_(1 - self.momentum).add_(mean, alpha=self.momentum)
        return self.net(x)


class Experts(nn.Module):
    """Two experts, of which only the first gets rows if one is `idle`; what would change that is kept in a dtype."""

    def __init__(self, dtype: torch.dtype, change: Callable[[Tensor], object], *, idle: bool = True) -> None:
        super().__init__()
        self.router, self.experts, self.change = net(), nn.ModuleList([nn.Linear(8, 4), nn.Linear(8, 4)]), change
        self.idle = idle
        self.register_buffer("balance", torch.ones(2, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        self.change(self.balance)
        chosen = torch.arange(len(x)) % (1 if self.idle else 2)
        answers = [self.experts[place](x[chosen == place]) for place in (0, 1)]
        return self.router(x) + torch.cat(answers)


def moved(by: float) -> Callable[[Tensor], object]:
    return lambda balance: balance.add_(torch.tensor([-by, by], dtype=balance.dtype))


def scaled(
    change: Callable[[Tensor, Tensor, float], object], *, late: bool = False, scale: float = 2.0**16
) -> dict[str, Callable[..., Any]]:
    """A scaled loss, and what a script does to each parameter and its gradient before they are unscaled, or after."""
    scaler, first = torch.amp.GradScaler("cpu", init_scale=scale), dict[int, Tensor]()

    @torch.no_grad()
    def before(model: nn.Module, optimizer: torch.optim.Optimizer, _: int) -> None:
        if late:
            scaler.unscale_(optimizer)
        for p in model.parameters():
            change(p, first.setdefault(id(p), p.detach().clone()), scaler.get_scale())
        if not late:
            scaler.unscale_(optimizer)

    return {"loss": lambda m, s: scaler.scale(plain(m, s)), "before": before, "after": lambda *_: scaler.update()}


def decayed(p: Tensor, _: Tensor, __: float) -> None:
    assert p.grad is not None
    p.grad.add_(p, alpha=0.02)


class Products(torch.optim.SGD):
    """Gradient descent that keeps sums of products of each gradient with itself; from the third step on if `late`."""

    late = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state["step"] = state.get("step", 0) + 1
            if p.dim() == 2:
                left = p.grad @ p.grad.T if not self.late or state["step"] > 2 else torch.zeros(len(p), len(p))
                state["left"] = state.get("left", 0.0) + left.float()
        super().step()


class Late(Products):
    late = True


def inside(
    dtype: torch.dtype, optimizer: Callable[..., torch.optim.Optimizer] = Products, size: float = 1e-5
) -> dict[str, Callable[..., Any]]:
    """Steps inside of an autocast."""
    open_ones: list[Any] = []

    def enter(*_: Any) -> None:
        open_ones.append(torch.autocast("cpu", dtype=dtype))
        open_ones[-1].__enter__()

    return {
        "optimizer": lambda model: optimizer(model.parameters(), lr=1e-3), "loss": lambda m, s: size * plain(m, s),
        "before": enter, "after": lambda *_: open_ones.pop().__exit__(None, None, None),
    }  # fmt: skip


class Fused(torch.autograd.Function):
    """A sum of squares of the scores over the number of tokens; its gradient is kept in a dtype, times a factor."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, dtype: torch.dtype, factor: float, tokens: float) -> Tensor:
        ctx.factor = factor
        ctx.save_for_backward((2 * scores / tokens * factor).to(dtype))
        return scores.square().sum() / tokens

    @staticmethod
    def backward(ctx: Any, above: Tensor) -> Any:  # type: ignore[override]
        return ctx.saved_tensors[0].float() / ctx.factor * above, None, None, None


def fused(
    dtype: torch.dtype, factor: float = 1.0, tokens: float = 2.0**24, change: Callable[[Tensor], Tensor] = lambda x: x
) -> Callable[[nn.Module, int], Tensor]:
    return lambda model, _: 2.0**24 * Fused.apply(change(model(torch.randn(16, 8))), dtype, factor, tokens)


def padded(x: Tensor) -> Tensor:
    return x * (torch.arange(len(x)) < 4)[:, None]


NARROW = ("kept-narrow",)
OF_GRADIENTS = ("cast-flushes", "a gradient made in the forward")
IDLE = ("dead-layer", "no rows")
OF_BALANCE = ("average-stuck", "a buffer that balances experts")
WRONG: dict[str, tuple[dict[str, Any], tuple[str, str]]] = {
    "weights rounded": ({"after": each_parameter(lambda p: p.bfloat16().float())},
                        (*NARROW, "weights rounded after each step")),
    "gradients in E4M3": ({"before": each_gradient(in_e4m3)}, (*NARROW, "gradients rounded before the step")),
    "moments rounded": ({"optimizer": narrow(torch.bfloat16, 0.999)}, (*NARROW, "second moments kept in 16 bits")),
    "moments reloaded": ({"optimizer": adam, "after": reloaded_in(torch.float16), "loss": lambda m, s: plain(m, s) / 8},
                         (*NARROW, "second moments sent through FP16")),
    "ids rounded": ({"model": Table(torch.bfloat16), "loss": of_ids}, (*NARROW, "indices rounded")),
    "losses added up": ({"loss": one_by_one(torch.bfloat16, 300), "steps": 3}, (*NARROW, "loss added up one by one")),
    "divided twice": ({"loss": lambda m, s: plain(m, s) / 4 * 0.25, "accumulate": 4},
                      ("gradients-mishandled", "divided by the number of micro-batches twice")),
    "clipped at each micro-batch": ({"loss": clipped_at_once(0.01), "accumulate": 4},
                                    ("gradients-mishandled", "clipped before all micro-batches are added up")),
    "never in training mode": ({"model": net(nn.BatchNorm1d(32), nn.ReLU()).eval()}, ("evaluation-mode", "")),
    "left in evaluation": ({"model": net(nn.Dropout(0.1)), "after": left(3), "steps": 20}, ("evaluation-mode", "")),
    "statistics stuck": ({"model": Statistics(torch.bfloat16, 0.002), "steps": 1030}, ("average-stuck", "")),
    "balance stuck": ({"model": Experts(torch.bfloat16, moved(0.001)), "steps": 260}, OF_BALANCE),
    "decay of scaled gradients": (
        scaled(decayed), ("gradients-mishandled", "given weight decay while they carry the loss scale"),
    ),
    "products inside of autocast": (
        inside(torch.float16), (*NARROW, "products of gradients taken inside of autocast"),
    ),
    "a gradient made in FP16": ({"loss": fused(torch.float16)}, OF_GRADIENTS),
}  # fmt: skip
RIGHT: dict[str, dict[str, Any]] = {
    "plain": {},
    "weights rounded once": {"model": net().bfloat16().float()},
    "weights rounded at random": {"after": each_parameter(at_random)},
    "weights clamped": {"after": each_parameter(lambda p: p.clamp(-0.1, 0.1))},
    "weights on a grid of their own": {"after": each_parameter(lambda p: (p * 50).round() / 50)},
    "gradients in E4M3 at a scale": {"before": each_gradient(lambda g: in_e4m3(g, 2.0**10))},
    "gradients of which few are left": {"before": each_gradient(lambda g: g * (g.abs() >= g.abs().median()))},
    "moments rounded at random": {"optimizer": narrow(torch.bfloat16, 0.999, at_random)},
    "moments that fall fast": {"optimizer": narrow(torch.bfloat16, 0.95)},
    "moments in FP32": {"optimizer": narrow(torch.float32, 0.999)},
    "moments reloaded in BF16": {
        "optimizer": adam, "after": reloaded_in(torch.bfloat16), "loss": lambda m, s: plain(m, s) / 8,
    },
    "moments reloaded": {"optimizer": adam, "after": lambda m, o, s: o.load_state_dict(copy.deepcopy(o.state_dict()))},
    "ids": {"model": Table(torch.int64), "loss": of_ids},
    "losses added up in FP32": {"loss": one_by_one(torch.float32, 300), "steps": 3},
    "a few losses added up": {"loss": one_by_one(torch.bfloat16, 100), "steps": 3},
    "divided once": {"loss": lambda m, s: plain(m, s) / 4, "accumulate": 4},
    "a mean, divided": {"loss": lambda m, s: (plain(m, s) + plain(m, s)) / 2 / 2, "accumulate": 2},
    "divided twice by what is no number of batches": {"loss": lambda m, s: plain(m, s) / 8 / 8, "accumulate": 4},
    "clipped once": {
        "before": lambda m, o, s: nn.utils.clip_grad_norm_(m.parameters(), 0.01), "accumulate": 4,
    },
    "norms taken of each micro-batch": {"loss": clipped_at_once(1e9), "accumulate": 4},
    "each micro-batch clipped by itself": {"loss": clipped_at_once(0.01, elsewhere=True), "accumulate": 4},
    "norms that are frozen": {"model": frozen()},
    "a whole model that is frozen": {"model": frozen().eval()},
    "evaluated in between": {
        "model": net(nn.Dropout(0.1)), "after": lambda m, o, s: m.train(s % 4 != 3), "steps": 20,
    },
    "quick statistics": {"model": Statistics(torch.bfloat16, 0.1), "steps": 1030},
    "statistics in FP32": {"model": Statistics(torch.float32, 0.002), "steps": 1030},
    "a balance that nothing writes": {"model": Experts(torch.bfloat16, nothing), "steps": 260, "known": IDLE},
    "a count with zeros": {
        "model": Experts(torch.bfloat16, lambda count: count.copy_(torch.tensor([16.0, 0.0]))), "steps": 260,
        "known": IDLE,
    },
    "a balance in FP32": {"model": Experts(torch.float32, moved(0.001)), "steps": 260, "known": IDLE},
    "a balance in BF16 that moves": {"model": Experts(torch.bfloat16, moved(0.02)), "steps": 260, "known": IDLE},
    "a mask of experts": {
        "model": Experts(torch.bfloat16, lambda mask: mask.fill_(1.0), idle=False), "steps": 260,
    },
    "decay of unscaled gradients": scaled(decayed, late=True),
    "decay times the scale": scaled(lambda p, _, scale: p.grad.add_(p, alpha=1e-4 * scale)),
    "decay at a scale of 1": scaled(decayed, scale=1.0),
    "pulled to the first weights": scaled(lambda p, first, _: p.grad.add_(p - first, alpha=0.02)),
    "clipped while scaled": scaled(lambda p, _, __: p.grad.mul_(0.5)),
    "products outside of autocast": {"optimizer": lambda m: Products(m.parameters(), lr=1e-3)},
    "products inside of BF16": inside(torch.bfloat16),
    "products inside of FP16 that fit": inside(torch.float16, size=1.0),
    "products that begin late": inside(torch.float16, Late, size=1.0),
    "SGD inside of autocast": inside(torch.float16, torch.optim.SGD),
    "a gradient made in FP32": {"loss": fused(torch.float32)},
    "a gradient made in FP16 at a scale": {"loss": fused(torch.float16, factor=2.0**16)},
    "a gradient made in FP16 that fits": {"loss": fused(torch.float16, tokens=16.0)},
    "a gradient made in FP16, with padding": {"loss": fused(torch.float16, tokens=2.0**17, change=padded)},
}  # fmt: skip


@each("name", WRONG)
def test_a_wrong_training_is_named(name: str, tmp_path: Path) -> None:
    arguments, wanted = WRONG[name]
    assert said(tmp_path / name, **arguments) == [wanted]


@each("name", RIGHT)
def test_a_right_training_is_silent(name: str, tmp_path: Path) -> None:
    known = [rule] if (rule := RIGHT[name].pop("known", None)) else []  # what another part of the model has
    assert said(tmp_path / name, **RIGHT[name]) == known


def scaled_in_part(path: Path, part: bool, scale: float = 1024.0) -> list[Finding]:
    """Two losses, of which the second is scaled too, or not."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"trunk": nn.Linear(8, 16), "main": nn.Linear(16, 4), "side": nn.Linear(16, 4)})
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=scale)
    with pl.watch(model, optimizer, run=path, every=2):
        for _ in range(6):
            x = torch.randn(16, 8)
            h, y = model["trunk"](x).relu(), x[:, :4].argmax(dim=1)
            main, side = F.cross_entropy(model["main"](h), y), F.cross_entropy(model["side"](h), y)
            optimizer.zero_grad()
            (scaler.scale(main) + (side if part else scaler.scale(side))).backward()
            scaler.step(optimizer)
            scaler.update()
    return [f for f in diagnose(path, rules=["gradients-mishandled"]) if f.severity != "info"]


def test_a_term_of_the_loss_without_its_scale_is_named(tmp_path: Path) -> None:
    (alarm,) = scaled_in_part(tmp_path / "run", part=True)
    assert alarm.severity == "alarm" and "side.weight" in alarm.meaning and "main.weight" not in alarm.meaning
    assert scaled_in_part(tmp_path / "both", part=False) == []
    assert scaled_in_part(tmp_path / "one", part=True, scale=1.0) == []
