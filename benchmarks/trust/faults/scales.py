"""Faults of loss scales: none, too high, too low, applied or removed at the wrong place."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import plimsoll as pl
from benchmarks.trust.registry import fault
from benchmarks.trust.toys import batches, clusters, mlp
from benchmarks.trust.training import Training

UNSCALED = r"unscale|still scaled|while (they are )?scaled|gradients? (are|were|is)? ?(clipped|scaled)"
RAISE = r"scale-low|underflow|raise the loss scale"
LOWER = r"lower (the|its) (loss )?scale|scale.*too high|too high a scale"


def _model() -> tuple[nn.Module, object]:
    return mlp(16, 64, 64, 10), batches(*clusters())


@fault("clipped-while-scaled", named=rf"clip.*(scaled|unscale)|{UNSCALED}", misleading="dead-layer", precision="fp16")
def clipped_scaled(run: Training) -> None:
    """Gradients are clipped to 1 before they are unscaled: they are clipped to 1 over the scale."""
    model, batch = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = run.scaler(optimizer, init_scale=4096.0)
    run.watch(model, optimizer)
    for step in range(200):
        x, y = batch(step)
        with run.forward():
            loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        run.losses.append(float(loss.detach()))


@fault(
    "never-unscaled",
    named=rf"never unscaled|not unscaled|{UNSCALED}",
    misleading="dead-layer",
    precision="fp16",
    held_back=True,
)
def never_unscaled(run: Training) -> None:
    """The loss is scaled, and `optimizer.step()` is called as if it were not: updates a thousand times too large."""
    model, batch = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = run.scaler(optimizer, init_scale=1024.0)
    run.watch(model, optimizer)
    for step in range(150):
        x, y = batch(step)
        with run.forward():
            loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        optimizer.step()
        run.losses.append(float(loss.detach()))


@fault("scale-too-high", named=LOWER, misleading=r"raise the loss scale|scale-low|dead-layer", precision="fp16")
def too_high(run: Training) -> None:
    """A static scale of 2^24: every step overflows and is skipped."""
    model, batch = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scaler = pl.scaling.StaticScaler(2.0**24, device="cpu")
    run.watch(model, optimizer)
    for step in range(150):
        x, y = batch(step)
        with run.forward():
            loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        run.losses.append(float(loss.detach()))


@fault("scale-too-low", named=RAISE, misleading="dead-layer", precision="fp16", held_back=True)
def too_low(run: Training) -> None:
    """A static scale of 2^-12: most gradients are zero in FP16."""
    model, batch = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scaler = pl.scaling.StaticScaler(2.0**-12, device="cpu")
    run.watch(model, optimizer)
    for step in range(150):
        x, y = batch(step)
        with run.forward():
            loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        run.losses.append(float(loss.detach()))


@fault("no-scaler", named=RAISE, misleading="dead-layer", precision="fp16", tested=True)
def no_scaler(run: Training) -> None:
    """FP16 without a scaler, and a loss that is a mean over many: gradients underflow."""
    model, batch = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    run.watch(model, optimizer)
    for step in range(150):
        x, y = batch(step)
        with run.forward():
            loss = F.cross_entropy(model(x), y) / 4096
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.losses.append(float(loss.detach()))


@fault("scale-collapses", named=r"scale-collapse", misleading="dead-layer", precision="fp16")
def collapse(run: Training) -> None:
    """Twelve hard batches in a row halve the scale twelve times; it does not come back."""
    model, batch = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    scaler = run.scaler(optimizer, init_scale=256.0)
    run.watch(model, optimizer)
    for step in range(200):
        x, y = batch(step)
        with run.forward():
            loss = F.cross_entropy(model(x), y) * (1e6 if 120 <= step < 132 else 1)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        run.losses.append(float(loss.detach()))


@fault("scale-oscillates", named=r"scale-oscillation", precision="fp16", held_back=True)
def oscillation(run: Training) -> None:
    """A scaler that doubles every three steps: every fourth step overflows and is lost."""
    model, batch = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scaler = run.scaler(optimizer, growth_interval=3)
    run.watch(model, optimizer)
    for step in range(250):
        x, y = batch(step)
        with run.forward():
            loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        run.losses.append(float(loss.detach()))


@fault("no-single-scale", named=r"no-single-scale|LayerScaler", precision="fp16")
def no_single_scale(run: Training) -> None:
    """Two branches whose gradients lie 2^44 apart: no loss scale fits both."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.large, self.small = mlp(16, 64, 10), mlp(16, 64, 10)

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([self.large(x).float() * 2.0**12, self.small(x).float() * 2.0**-32])

    model, batch = Branches(), batches(*clusters())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)

    def loss(step: int) -> Tensor:
        x, _ = batch(step)
        large, small = model(x).chunk(2)
        return large.abs().mean() / 64 + small.mean()

    run.train(model, optimizer, loss, 200)


@fault(
    "skipped-for-nan",
    named=r"nonfinite.*(data|input|batch|nan)|input",
    misleading=r"^\w+: (scale-low|underflow)|raise the loss scale",
    precision="fp16",
)
def skipped_for_nan(run: Training) -> None:
    """From step 61 on every batch holds a NaN: each step is skipped, and the scale falls to nothing."""
    model, batch = _model()

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        if step > 60:
            x = x.clone()
            x[0, 0] = float("nan")
        return F.cross_entropy(model(x), y)

    run.train(model, torch.optim.AdamW(model.parameters(), lr=2e-3), loss, 200)
