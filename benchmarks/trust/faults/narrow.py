"""Faults of narrow formats: values that leave their range, or that collapse onto few codes."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import plimsoll as pl
from benchmarks.trust.registry import fault
from benchmarks.trust.toys import Attention, Transformer, batches, clusters, counting, mlp, token_loss
from benchmarks.trust.training import Training

OVERFLOW = r"nonfinite|overflow|infinite|infinities"


@fault(
    "running-variance-overflows",
    named=r"running_var|running variance|buffer",
    misleading="dead-layer",
    precision="fp16",
)
def running_variance(run: Training) -> None:
    """Batch norm kept in FP16: the variance of inputs of size 1,000 is beyond 65,504."""
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))
    model[1].register_buffer("running_var", model[1].running_var.half())
    model[1].register_buffer("running_mean", model[1].running_mean.half())
    x, y = clusters()
    batch = batches(1000 * x, y)
    norm = model[1]

    def normalise(x: Tensor) -> Tensor:
        mean, variance = x.mean(dim=0), x.var(dim=0)
        with torch.no_grad():
            norm.running_mean.lerp_(mean.half(), 0.1)
            norm.running_var.mul_(0.9).add_(variance.half(), alpha=0.1)
        return (x - mean) / (variance + 1e-5).sqrt() * norm.weight + norm.bias

    norm.forward = normalise
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.cross_entropy(model(x).float(), y)

    run.watch(model, optimizer)
    for step in range(200):
        value = loss(step)
        run.step(value, optimizer)


@fault(
    "positions-collapse",
    named=r"(few|distinct|same|collapse|equal).*(codes|values|positions)|(codes|positions).*(collapse|few|same)",
    precision="bf16",
)
def positions(run: Training) -> None:
    """Positions up to 4,096 as BF16 numbers: sixteen neighbours share one value."""

    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.position, self.net = nn.Identity(), mlp(1, 64, 64, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.net(self.position(x.bfloat16()).float() / 4096)

    model = Counted()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def loss(step: int) -> Tensor:
        x = torch.randint(2048, 4096, (64, 1)).float()
        return F.cross_entropy(model(x), (x.squeeze(1) % 2).long())

    run.watch(model, optimizer)
    for step in range(200):
        run.step(loss(step), optimizer)


@fault(
    "e4m3-without-a-scale",
    named=r"cast-flushes|underflow|flush",
    misleading="dead-layer|ReLU",
    precision="fp32",
)
def unscaled_e4m3(run: Training) -> None:
    """Products in E4M3 in both directions without a scale: nearly all gradients become zero."""
    model, batch = mlp(16, 64, 64, 10), batches(*clusters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    run.watch(model, optimizer)
    for step in range(150):
        x, y = batch(step)
        with pl.emulate(forward="e4m3", backward="e4m3", operations="all"):
            loss = F.cross_entropy(model(x), y) / 64
        run.step(loss, optimizer)


@fault(
    "attention-overflows",
    named=rf"(blocks\.1\.attention|qkv).*({OVERFLOW})|({OVERFLOW}).*(blocks\.1\.attention|qkv)",
    misleading="dead-layer|scale-low",
    precision="fp16",
)
def attention(run: Training) -> None:
    """From step 90 on one block's queries and keys are so large that their products exceed 65,504 in FP16."""
    model = Transformer()
    batch = batches(*counting(), size=16)

    class Plain(Attention):
        def forward(self, x: Tensor) -> Tensor:
            b, t, c = x.shape
            q, k, v = (y.view(b, t, 4, c // 4).transpose(1, 2) for y in self.qkv(x).chunk(3, dim=-1))
            mask = torch.ones(t, t).triu(1).bool()
            y = (q @ k.transpose(-1, -2)).masked_fill(mask, -1e4).softmax(-1).to(v.dtype) @ v
            return self.out(y.transpose(1, 2).reshape(b, t, c))

    model.blocks[1].attention = Plain(32, causal=True)

    def grow(step: int) -> None:
        if step == 90:
            model.blocks[1].attention.qkv.weight.data[:64] *= 600

    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    run.train(model, optimizer, lambda step: token_loss(model, *batch(step)), 160, after=grow)


@fault("activations-double", named=OVERFLOW, misleading="dead-layer|scale-low", precision="fp16")
def doubling(run: Training) -> None:
    """Twenty residual sums without a norm, each of which doubles the size: the last ones overflow FP16."""

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(32, 32) for _ in range(20)])
            for layer in self.layers:
                nn.init.eye_(layer.weight)
            self.head = nn.Linear(32, 10)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = x + layer(x)
            return self.head(x)

    model = Deep()
    batch = batches(*clusters(features=32))

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.cross_entropy(model(x), y)

    run.train(model, torch.optim.SGD(model.parameters(), lr=1e-6), loss, 80)


@fault("growing-towards-the-top", named=r"activation-growth|overflow-ahead", precision="bf16", every=5)
def growing(run: Training) -> None:
    """In BF16 one layer's outputs double every twelve steps, past the largest value of FP16."""
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 10))
    batch = batches(*clusters())

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.cross_entropy(model(x), y)

    def grow(step: int) -> None:
        model[2].weight.data *= 2 ** (1 / 12)

    run.train(model, torch.optim.SGD(model.parameters(), lr=1e-2), loss, 220, after=grow)


@fault(
    "step-count-in-bf16",
    named=r"(count|steps?|buffer).*(move|rounding|stays|stuck|stop|swallow)|cannot move",
    precision="bf16",
)
def counter(run: Training) -> None:
    """A count of steps in BF16 that a schedule uses: it stops at 256."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp(16, 64, 10)
            self.register_buffer("seen", torch.zeros((), dtype=torch.bfloat16))

        def forward(self, x: Tensor) -> Tensor:
            self.seen += 1
            return self.net(x)

    model = Counting()
    batch = batches(*clusters())

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.cross_entropy(model(x), y)

    run.train(model, torch.optim.AdamW(model.parameters(), lr=2e-3), loss, 400)


@fault("sum-overflows-fp16", named=OVERFLOW, misleading="dead-layer|scale-low", precision="fp16", held_back=True)
def summed(run: Training) -> None:
    """A loss that is a sum over a batch in FP16: when batches grow at step 80 it exceeds 65,504."""
    model = mlp(8, 64, 64, 1)
    target = torch.randn(8, 1)

    def loss(step: int) -> Tensor:
        x = torch.randn(64 if step < 80 else 2048, 8)
        off = model(x) - (x @ target + 10).half()
        return (off * off).sum(dtype=torch.float16) if step >= 80 else (off.float() ** 2).mean()

    run.train(model, torch.optim.SGD(model.parameters(), lr=1e-4), loss, 140)


@fault("fp8-scale-saturates", named=r"saturat", precision="fp32", every=5)
def saturates(run: Training) -> None:
    """Linear layers in FP8 with constant unit scales, fed with values of size 1,000: E4M3 cuts them at 448."""
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
    converted = pl.fp8.convert(pl.unit.convert(model, torch.randn(32, 64)), scaling="unit")
    optimizer = torch.optim.SGD(converted.parameters(), lr=1e-6)
    run.watch(converted, optimizer)
    target = torch.randn(64, 64)
    for _ in range(60):
        x = torch.randn(32, 64) * 1000
        run.step(F.mse_loss(converted(x), x @ target) * 1e-6, optimizer)
