"""Optimizers written by hand and loops with more than one part, by an author who had not read the rules."""

import copy
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from benchmarks.trust.registry import healthy
from benchmarks.trust.toys import Transformer, batches, clusters, counting, mlp, pictures, surface, token_loss
from benchmarks.trust.training import Training


@healthy("sharpness-aware", held_back=True)
def sharpness_aware(run: Training) -> None:
    """Two backward passes a step, the second at weights moved a little uphill; SGD by Nesterov."""
    model = mlp(16, 64, 64, 10)
    batch = batches(*clusters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    scaler = run.scaler(optimizer)
    run.watch(model, optimizer)
    for step in range(200):
        x, y = batch(step)
        optimizer.zero_grad()
        with run.forward():
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        with torch.no_grad():
            size = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
            # The scale cancels. Where a gradient overflowed, the second pass does too and the scaler skips the step.
            moves = [p.grad * (0.05 / (size + 1e-12)) if size.isfinite() else 0.0 for p in model.parameters()]
            for p, move in zip(model.parameters(), moves, strict=True):
                p.add_(move)
        optimizer.zero_grad()
        with run.forward():
            uphill = F.cross_entropy(model(x), y)
        scaler.scale(uphill).backward()
        with torch.no_grad():
            for p, move in zip(model.parameters(), moves, strict=True):
                p.sub_(move)
        scaler.step(optimizer)
        scaler.update()
        run.losses.append(float(loss.detach()))


class Adafactor(torch.optim.Optimizer):
    """Second moments of matrices as a row and a column; steps relative to the size of the weights."""

    def __init__(self, parameters: Iterable[Tensor], lr: float = 1e-2) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One step; no first moment is kept."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state["step"] = count = state.get("step", 0) + 1
                keep, square = 1 - count**-0.8, p.grad**2 + 1e-30
                if p.dim() == 2:
                    for name, dim in (("row", 1), ("column", 0)):
                        mean = square.mean(dim=dim)
                        state[name] = keep * state.get(name, torch.zeros_like(mean)) + (1 - keep) * mean
                    row, column = state["row"], state["column"]
                    second = (row / row.mean())[:, None] * column
                else:
                    state["square"] = second = keep * state.get("square", torch.zeros_like(p)) + (1 - keep) * square
                update = p.grad * second.rsqrt()
                update /= max(1.0, float(update.square().mean().sqrt()))
                size = max(1e-3, float(p.square().mean().sqrt()))
                p.sub_(min(group["lr"], count**-0.5) * size * update)


@healthy("factored-second-moments", held_back=True)
def adafactor(run: Training) -> None:
    """A language model by Adafactor, with rates relative to the weights."""
    model, batch = Transformer(), batches(*counting(), size=16)

    def loss(step: int) -> Tensor:
        return token_loss(model, *batch(step))

    run.train(model, Adafactor(model.parameters(), lr=3e-2), loss, 220)


class Muon(torch.optim.Optimizer):
    """Momentum of matrices, made orthogonal by five steps of Newton and Schulz."""

    def __init__(self, parameters: Iterable[Tensor], lr: float = 0.02, momentum: float = 0.95) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One step of every matrix."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                kept = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                kept.lerp_(p.grad, 1 - group["momentum"])
                x = p.grad.lerp(kept, group["momentum"]).bfloat16()
                tall = x.shape[0] > x.shape[1]
                x = x.T if tall else x
                x = x / (x.norm() + 1e-7)
                for _ in range(5):
                    gram = x @ x.T
                    x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
                x = x.T if tall else x
                p.sub_(group["lr"] * max(1.0, p.shape[0] / p.shape[1]) ** 0.5 * x.float())


@healthy("orthogonal-momentum", held_back=True)
def muon(run: Training) -> None:
    """A language model whose hidden matrices are trained by Muon and the rest by AdamW."""
    model, batch = Transformer(), batches(*counting(), size=16)
    hidden = [p for name, p in model.named_parameters() if p.dim() == 2 and name.startswith("blocks")]
    chosen = {id(p) for p in hidden}
    one = Muon(hidden, lr=0.01)
    other = torch.optim.AdamW([p for p in model.parameters() if id(p) not in chosen], lr=3e-3)
    scaler = run.scaler(one)
    run.watch(model, [one, other])
    for step in range(200):
        one.zero_grad()
        other.zero_grad()
        with run.forward():
            loss = token_loss(model, *batch(step))
        scaler.scale(loss).backward()
        scaler.step(one)
        scaler.step(other)
        scaler.update()
        run.losses.append(float(loss.detach()))


class ByteAdam(torch.optim.Optimizer):
    """Adam whose moments are stored in bytes, with a scale for each 64 values."""

    def __init__(self, parameters: Iterable[Tensor], lr: float = 1e-3) -> None:
        super().__init__(parameters, {"lr": lr})

    @staticmethod
    def _pack(x: Tensor, root: float) -> tuple[Tensor, Tensor]:
        blocks = F.pad(x.flatten(), (0, -x.numel() % 64)).view(-1, 64)
        size = blocks.abs().amax(dim=1, keepdim=True).clamp(min=1e-20)
        share = (blocks / size).abs() ** (1 / root) * 127
        return (share.ceil() * blocks.sign()).to(torch.int8), size

    @staticmethod
    def _unpack(packed: Tensor, size: Tensor, root: float, like: Tensor) -> Tensor:
        values = (packed.float().abs() / 127) ** root * packed.sign() * size
        return values.flatten()[: like.numel()].view_as(like)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One step; the moments are unpacked for it."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state["step"] = count = state.get("step", 0) + 1
                first, second = torch.zeros_like(p), torch.zeros_like(p)
                if count > 1:
                    first = self._unpack(state["exp_avg"], state["size"], 3, p)
                    second = self._unpack(state["exp_avg_sq"], state["size_sq"], 4, p)
                first, second = 0.9 * first + 0.1 * p.grad, 0.99 * second + 0.01 * p.grad**2
                state["exp_avg"], state["size"] = self._pack(first, 3)
                state["exp_avg_sq"], state["size_sq"] = self._pack(second, 4)
                first, second = first / (1 - 0.9**count), second / (1 - 0.99**count)
                p.sub_(group["lr"] * first / (second.sqrt() + 1e-8))


@healthy("eight-bit-states", held_back=True)
def eight_bit(run: Training) -> None:
    """Classification by an Adam that keeps its moments in bytes."""
    model, batch = mlp(16, 64, 64, 10, act=nn.GELU), batches(*clusters())

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.cross_entropy(model(x), y)

    run.train(model, ByteAdam(model.parameters(), lr=2e-3), loss, 200)


@healthy("master-copies", held_back=True)
def master_copies(run: Training) -> None:
    """The weights are of the low precision itself; the optimizer moves copies in FP32 and writes them back."""
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[run.precision]
    model, batch = mlp(16, 64, 64, 10), batches(*clusters())
    masters = [p.detach().clone().requires_grad_() for p in model.parameters()]
    model.to(dtype)
    optimizer = torch.optim.AdamW(masters, lr=2e-3)
    scaler = run.scaler(optimizer, init_scale=2.0**12)
    run.watch(model, optimizer)
    for step in range(220):
        x, y = batch(step)
        loss = F.cross_entropy(model(x.to(dtype)).float(), y)
        model.zero_grad()
        scaler.scale(loss).backward()
        for p, master in zip(model.parameters(), masters, strict=True):
            master.grad = p.grad.float()
        scaler.step(optimizer)
        scaler.update()
        with torch.no_grad():
            for p, master in zip(model.parameters(), masters, strict=True):
                p.copy_(master)
        run.losses.append(float(loss.detach()))


@healthy("micro-batches-of-unlike-sizes", held_back=True)
def unlike_micro_batches(run: Training) -> None:
    """Three to six micro-batches a step, of 1 to 9 sequences; the sum over tokens is divided by the step's tokens."""
    model, batch = Transformer(depth=1), counting()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scaler = run.scaler(optimizer)
    run.watch(model, optimizer)
    for _ in range(160):
        sizes = torch.randint(1, 10, (int(torch.randint(3, 7, ())),)).tolist()
        optimizer.zero_grad()
        total = 0.0
        for size in sizes:
            rows = torch.randint(512, (size,))
            x, y = batch[0][rows], batch[1][rows]
            with run.forward():
                summed = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum")
                loss = summed / (sum(sizes) * x.shape[1])
            scaler.scale(loss).backward()
            total += float(loss.detach())
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        run.losses.append(total)


def _steps(
    run: Training,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Callable[[int], tuple[Tensor, ...]],
    n: int,
) -> None:
    """So many steps of classification by hand."""
    for step in range(n):
        x, y = batch(step)
        with run.forward():
            loss = F.cross_entropy(model(x), y)
        run.step(loss, optimizer)


@healthy("rate-finder")
def rate_finder(run: Training) -> None:
    """Rates are tried from 1e-4 up until the loss has grown fourfold; then the weights are put back and trained."""
    model, batch = mlp(16, 64, 64, 10), batches(*clusters())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    run.watch(model, optimizer)
    best, smooth, at = math.inf, 0.0, 1e-4
    for step in range(100):
        rate = 1e-4 * 1e5 ** (step / 99)
        optimizer.param_groups[0]["lr"] = rate
        _steps(run, model, optimizer, batch, 1)
        smooth = 0.9 * smooth + 0.1 * run.losses[-1]
        value = smooth / (1 - 0.9 ** (step + 1))
        if not value < 4 * best:
            break
        if value < best:
            best, at = value, rate
    model.load_state_dict(kept[0])
    optimizer.load_state_dict(kept[1])
    optimizer.param_groups[0]["lr"] = min(0.1, at / 10)
    _steps(run, model, optimizer, batch, 250)


@healthy("resumed-with-larger-batches", held_back=True)
def resumed(run: Training) -> None:
    """A checkpoint is loaded by a second script, which goes on with batches four times as large and twice the rate."""
    data = clusters()
    saved: dict[str, Any] = {}
    for part, size, rate in (("first", 16, 2e-3), ("second", 64, 4e-3)):
        model = mlp(16, 64, 64, 10)
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
        if saved:
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            optimizer.param_groups[0]["lr"] = rate
        run.watch(model, optimizer, part)
        _steps(run, model, optimizer, batches(*data, size=size), 130)
        saved = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})


@healthy("evaluations-between-steps", held_back=True, learns=0.7)
def evaluations(run: Training) -> None:
    """Every 25 steps a loop of evaluation that sets the rate; an average of the weights is made and evaluated too."""
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(32, 8),
    )  # fmt: skip
    x, y = pictures(count=768)
    batch = batches(x[:512], y[:512])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1)
    average = torch.optim.swa_utils.AveragedModel(model)
    run.watch(model, optimizer)
    for step in range(225):
        _steps(run, model, optimizer, lambda _, step=step: batch(step), 1)
        if step >= 100:
            average.update_parameters(model)
        if step % 25 == 24:
            model.eval()
            with torch.inference_mode(), run.forward():
                plateau.step(
                    sum(float(F.cross_entropy(model(x[a : a + 64]), y[a : a + 64])) for a in range(512, 768, 64))
                )
            model.train()
    torch.optim.swa_utils.update_bn([x[a : a + 64] for a in range(0, 512, 64)], average)


@healthy("meta-learning", held_back=True, learns=0.7)
def meta_learning(run: Training) -> None:
    """Sines of any phase are learned in two inner steps; the outer gradient passes through these."""
    model = mlp(1, 40, 40, 1, act=nn.Tanh)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    run.watch(model, optimizer)
    names = [name for name, _ in model.named_parameters()]
    for _ in range(150):
        total = torch.zeros(())
        for _ in range(4):
            height, phase = 0.5 + 1.5 * torch.rand(()), 3.14 * torch.rand(())
            x = 6 * torch.rand(2, 16, 1) - 3
            y = height * torch.sin(x + phase)
            weights = dict(zip(names, model.parameters(), strict=True))
            with run.forward():
                for _ in range(2):
                    inner = F.mse_loss(torch.func.functional_call(model, weights, (x[0],)), y[0])
                    found = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
                    weights = {n: w - 0.05 * g for (n, w), g in zip(weights.items(), found, strict=True)}
                total = total + F.mse_loss(torch.func.functional_call(model, weights, (x[1],)), y[1]) / 4
        run.step(total, optimizer, clip=5.0)


@healthy("full-batches-by-lbfgs", learns=0.2)
def lbfgs(run: Training) -> None:
    """Adam finds the valley, then LBFGS with a line search runs down it on one batch; FP32 in that second part."""
    model, (x, y) = mlp(8, 32, 1, act=nn.Tanh), surface(count=256, noise=0.0)
    adam = torch.optim.Adam(model.parameters(), lr=5e-3)
    newton = torch.optim.LBFGS(model.parameters(), max_iter=4, line_search_fn="strong_wolfe")
    run.watch(model, [adam, newton])
    for _ in range(100):
        with run.forward():
            loss = F.mse_loss(model(x), y)
        run.step(loss, adam)

    def closure() -> Tensor:
        newton.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    for _ in range(60):
        run.losses.append(float(newton.step(closure).detach()))
