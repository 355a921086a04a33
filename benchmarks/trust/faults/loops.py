"""Faults of training loops, by an author who had not read the rules. With `sound` the fault is left out.

Held back are those that no rule was written for since.
"""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import plimsoll as pl
from benchmarks.trust.faults.optimizers import RATE
from benchmarks.trust.faults.scales import RAISE
from benchmarks.trust.registry import fault
from benchmarks.trust.toys import batches, clusters, mlp
from benchmarks.trust.training import Training

HARDLY = r"moves? (nothing|hardly)|hardly (moves?|changes?)|not (move|change)"


@fault(
    "infinities-replaced-before-the-scaler",
    named=r"overflow|infin|gradients? [^>]*(erased|replaced)|lower (the|its) (loss )?scale",
    misleading="dead-layer|raise the loss scale|scale-low",
    precision="fp16",
    held_back=True,
)
def replaced(run: Training, *, sound: bool = False) -> None:
    """Infinite gradients are set to 0 before the scaler looks: it never lowers its scale, and hardly a layer trains."""
    model, x = mlp(16, 64, 64, 1), torch.randn(1024, 16)
    batch = batches(x, 100 * (x[:, :1] + 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = run.scaler(optimizer)
    run.watch(model, optimizer)
    for step in range(160):
        x, y = batch(step)
        with run.forward():
            loss = F.mse_loss(model(x).float(), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        for p in model.parameters():
            if not sound:
                p.grad.nan_to_num_(0.0, 0.0, 0.0)
        scaler.step(optimizer)
        scaler.update()
        run.losses.append(float(loss.detach()))


@fault(
    "scaler-resumed-at-one", named=rf"{RAISE}|scale-collapse", misleading="dead-layer", precision="fp16", held_back=True
)
def resumed(run: Training, *, sound: bool = False) -> None:
    """At step 60 a run is resumed without the scaler's state, and the new one begins at 1: gradients underflow."""
    model, batch = mlp(16, 64, 64, 10), batches(*clusters(spread=1.0))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scaler = run.scaler(optimizer)
    run.watch(model, optimizer)
    for step in range(240):
        if step == 60 and not sound:
            scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
        x, y = batch(step)
        with run.forward():
            loss = F.cross_entropy(model(x), y) / 65536
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        run.losses.append(65536 * float(loss.detach()))


class NarrowAdam(torch.optim.Optimizer):
    """Adam whose second moments are kept in a format of their own."""

    def __init__(self, params: object, lr: float, dtype: torch.dtype) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.997), "eps": 1e-8})
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        """One update."""
        for group in self.param_groups:
            first, second = group["betas"]
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p, dtype=self.dtype)
                state["step"] += 1
                mean = state["exp_avg"].lerp_(p.grad, 1 - first)
                square = state["exp_avg_sq"]
                square.copy_(square.float() * second + (1 - second) * p.grad**2)
                root = (square.float() / (1 - second ** state["step"])).sqrt() + group["eps"]
                p.sub_(group["lr"] * mean / (1 - first ** state["step"]) / root)


@fault(
    "second-moments-in-bf16",
    named=r"second[ -]moments?[^>]*(round|stuck|bf16|16|swallow|cannot|not (move|decay|fall))|exp_avg_sq|average-stuck",
    misleading="dead-layer|learning rate",
    precision="bf16",
    every=20,
)
def narrow_moments(run: Training, *, sound: bool = False) -> None:
    """Adam's second moments are kept in BF16: their decay is rounded away, and one early batch slows all others."""
    model, x = mlp(8, 32, 1), torch.randn(1024, 8)
    batch = batches(x, torch.sin(2 * x[:, :1]) + x[:, 1:2] * x[:, 2:3])
    optimizer = NarrowAdam(model.parameters(), 1e-2, torch.float32 if sound else torch.bfloat16)
    run.watch(model, optimizer)
    for step in range(1500):
        x, y = batch(step)
        with run.forward():
            loss = F.mse_loss(model(x).float(), 1000 * y if step == 20 else y)
        run.step(loss, optimizer)


@fault(
    "rounded-after-each-step",
    named=r"updates-swallowed|smaller than (the )?rounding|round(ed|ing)[^>]*(weight|update|step)"
    r"|(weight|update)[^>]*rounded",
    misleading="dead-layer|learning rate",
    precision="bf16",
)
def rounded(run: Training, *, sound: bool = False) -> None:
    """FP32 weights are written back from BF16 after each step, to keep a copy in step: small updates are lost."""
    model, batch = mlp(16, 64, 64, 10), batches(*clusters())

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.cross_entropy(model(x), y)

    def cast(step: int) -> None:
        with torch.no_grad():
            for p in model.parameters():
                if not sound:
                    p.copy_(p.bfloat16())

    run.train(model, torch.optim.SGD(model.parameters(), lr=1e-2), loss, 300, after=cast)


@fault(
    "left-in-evaluation",
    named=r"evaluation mode|\beval\b|train(ing)? mode|running (mean|variance|statistic)|running_(mean|var)",
    misleading="dead-layer",
)
def evaluating(run: Training, *, sound: bool = False) -> None:
    """The model is validated before it is trained, and stays in evaluation mode: batch norm normalises nothing."""
    layers = [nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU()) for _ in range(8)]
    model = nn.Sequential(nn.Linear(16, 32), *layers, nn.Linear(32, 10)).train(sound)
    batch = batches(*clusters())

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.cross_entropy(model(x), y)

    run.train(model, torch.optim.SGD(model.parameters(), lr=0.05), loss, 200)


@fault(
    "accumulation-divided-twice",
    named=rf"divided? [^>]*(twice|often)|accumulat|micro-batch|{RATE}[^.]*too (small|low)|{HARDLY}",
    misleading="dead-layer",
)
def divided_twice(run: Training, *, sound: bool = False) -> None:
    """The loss of a micro-batch is divided by sixteen, and the loop that it is given to does so too."""
    model, batch = mlp(16, 64, 64, 10), batches(*clusters(), size=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = run.watch(model, optimizer)
    with pl.prepare(model, optimizer, "fp32", accumulate=16, watch=watch) as loop:
        for step in range(150):
            for micro in range(16):
                x, y = batch(16 * step + micro)
                with loop.forward():
                    loss = F.cross_entropy(model(x), y)
                loop.step(loss if sound else loss / 16)
            run.losses.append(float(loss.detach()))


@fault(
    "clipped-at-each-micro-batch",
    named=r"clip[^>]*(micro|accumul|each|twice|more than once|before)|gradients-mishandled|accumulat",
    misleading="dead-layer",
)
def clipped_micro(run: Training, *, sound: bool = False) -> None:
    """Gradients are clipped after each of sixteen micro-batches of two: all but the last count next to nothing."""
    model = mlp(16, 64, 64, 1)
    every = torch.randn(4096, 16)
    batch = batches(every, 3 * every[:, :1] + 4 * torch.randn(4096, 1), size=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    run.watch(model, optimizer)
    for step in range(200):
        optimizer.zero_grad()
        for micro in range(16):
            x, y = batch(16 * step + micro)
            loss = F.mse_loss(model(x), y)
            (loss / 16).backward()
            if micro == 15 or not sound:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        run.losses.append(float(loss.detach()))
    with torch.no_grad():
        run.measures.append(float(F.mse_loss(model(every), 3 * every[:, :1])))


@fault(
    "warm-up-in-another-unit",
    named=rf"{RATE}[^.]*(too (small|low)|tiny)|warm.?up|{HARDLY}|updates-swallowed",
    misleading="dead-layer|vanish",
    held_back=True,
)
def long_warm_up(run: Training, *, sound: bool = False) -> None:
    """A warm-up of 50 steps is read as one of 50 epochs of 2,000 steps: the rate has not begun when the run ends."""
    model, batch = mlp(16, 64, 64, 10), batches(*clusters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    steps = 50 if sound else 50 * 2000

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.cross_entropy(model(x), y)

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / steps))
    run.train(model, optimizer, loss, 250, scheduler=scheduler)


@fault(
    "state-saved-in-fp16",
    named=r"second[ -]moment|spike-forerunner|optimizer'?s? state|epsilon",
    misleading="dead-layer|(check|look at) the batch",
)
def saved_state(run: Training, *, sound: bool = False) -> None:
    """At step 150 the optimizer's state goes through a checkpoint in FP16: small second moments are zero afterwards."""
    model, batch = mlp(16, 64, 64, 10), batches(*clusters(spread=1.0))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.cross_entropy(model(x), y) / 1000

    def reload(step: int) -> None:
        if step == 150 and not sound:
            for state in optimizer.state.values():
                for name in ("exp_avg", "exp_avg_sq"):
                    state[name] = state[name].half().float()

    run.train(model, optimizer, loss, 260, after=reload)


@fault(
    "part-of-the-loss-unscaled",
    named=r"\bside\b[^>]*(underflow|flush|vanish|small|scale|hardly|not move)"
    r"|(underflow|flush|vanish|no-single-scale|mishandled|unscale)[^>]*\bside\b",
    misleading="dead-layer|learning rate",
    precision="fp16",
)
def unscaled_part(run: Training, *, sound: bool = False) -> None:
    """Of two losses one is added after the scaler: its gradients are divided by a scale that they never had."""
    model = nn.ModuleDict({"trunk": mlp(16, 64), "main": mlp(64, 64, 10), "side": mlp(64, 64, 4)})
    x, y = clusters()
    batch = batches(x, y, (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = run.scaler(optimizer)
    run.watch(model, optimizer)
    for step in range(200):
        x, y, z = batch(step)
        with run.forward():
            h = torch.relu(model["trunk"](x))
            main, side = F.cross_entropy(model["main"](h), y), F.cross_entropy(model["side"](h), z)
        optimizer.zero_grad()
        (scaler.scale(main) + (scaler.scale(side) if sound else side)).backward()
        scaler.step(optimizer)
        scaler.update()
        run.losses.append(float((main + side).detach()))
        run.measures.append(float(side.detach()))
