"""Faults of arithmetic in narrow formats, all held back: their author had not read the rules."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import plimsoll as pl
from benchmarks.trust.registry import fault
from benchmarks.trust.toys import Transformer, batches, clusters, counting, mlp
from benchmarks.trust.training import Training

TOO_LARGE = r"nonfinite|overflow|infin|\binf\b|65,?504"
TERM = r"\b(position|sum|addition|term|residual|stream)s?\b"
ABSORBED = r"rounding|rounded|swallow|lost in|absorb|few|codes|distinct"


@fault(
    "unscaled-within-accumulation",
    named=r"unscale|still scaled|(scaled|scale) .*accumulat|accumulat.*scale|different scales|mix(es|ed)? .*scale",
    misleading="dead-layer|raise the loss scale|scale-low",
    precision="fp16",
)
def unscaled_within(run: Training) -> None:
    """Gradients are unscaled after the first of four micro-batches, to log them: three more are added still scaled."""
    model, batch = mlp(16, 64, 64, 10), batches(*clusters(), size=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = run.scaler(optimizer, init_scale=1024.0)
    run.watch(model, optimizer)
    for step in range(160):
        optimizer.zero_grad()
        for micro in range(4):
            x, y = batch(4 * step + micro)
            with run.forward():
                loss = F.cross_entropy(model(x), y) / 4
            scaler.scale(loss).backward()
            if micro == 0:
                scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        run.losses.append(4 * float(loss.detach()))


@fault(
    "unscaled-twice",
    named=r"twice|(update|step|gradient|movement)s? [^.]*(too small|tiny|much smaller|far below|hardly)"
    r"|updates-swallowed|smaller than (the )?rounding|moves? (nothing|hardly)|unscale",
    misleading="dead-layer",
    precision="fp16",
)
def unscaled_twice(run: Training) -> None:
    """Gradients are divided by the scale by hand, and once more by the scaler: updates are 65,536 times too small."""
    model, batch = mlp(16, 64, 64, 10), batches(*clusters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = run.scaler(optimizer)
    run.watch(model, optimizer)
    for step in range(200):
        x, y = batch(step)
        with run.forward():
            loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        for p in model.parameters():
            p.grad.div_(scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()
        run.losses.append(float(loss.detach()))


@fault(
    "log-of-a-half-softmax",
    named=r"underflow|flush|(nonfinite|infin).*\b(loss|log|softmax|probability|probabilities)\b",
    misleading="dead-layer|raise the loss scale|scale-low",
    precision="fp16",
    held_back=True,
)
def half_softmax(run: Training) -> None:
    """The logarithm of a softmax in FP16: once the network is sure, wrong classes have the probability 0."""
    model = nn.Sequential(mlp(16, 64, 64, 10), nn.Softmax(dim=-1))
    x, y = clusters()
    y = torch.where(torch.rand(len(y)) < 0.02, (y + 1) % 10, y)
    batch = batches(2 * x, y)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    run.watch(model, optimizer)
    for step in range(250):
        x, y = batch(step)
        with run.forward():
            chance = model(x).half()
        run.step(F.nll_loss(chance.log().float(), y), optimizer)


class HalfNorm(nn.Module):
    """Division by the root of the mean square, which is computed in FP16."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        h = x.half()
        return (h * (h * h).mean(dim=-1, keepdim=True).add(1e-5).rsqrt()).float() * self.weight


@fault(
    "mean-square-overflows-in-a-norm",
    named=rf"({TOO_LARGE}|dead-layer|zero|vanish).*\bnorm\b|\bnorm\b.*({TOO_LARGE}|dead-layer|zero|vanish)",
    misleading="raise the loss scale|scale-low",
    precision="fp16",
    held_back=True,
)
def half_norm(run: Training) -> None:
    """A norm by hand squares values of size 400 in FP16: the mean is infinite, and the norm's output is zero."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.last = nn.Linear(16, 64), HalfNorm(64), mlp(64, 64, 10)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.norm(self.first(x)))

    model = Model()
    x, y = clusters()
    batch = batches(700 * x, y)

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.cross_entropy(model(x).float(), y)

    run.train(model, torch.optim.AdamW(model.parameters(), lr=2e-3), loss, 160)


@fault(
    "fp8-scale-held-by-an-outlier",
    named=r"underflow|flush|saturat|history|stale|outlier|(scale|range).*(too (large|coarse|high|low)|fit)",
    misleading="dead-layer|loss scale",
    held_back=True,
)
def held_by_outlier(run: Training) -> None:
    """FP8 scales from the largest value of 1,024 steps: one outlier at step 60 leaves all later values at few codes."""
    model = pl.fp8.convert(mlp(16, 64, 64, 10), scaling="tensor", history=1024)
    batch = batches(*clusters())

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        if step == 60:
            x = x.clone()
            x[0, 0] = 1e6
        return F.cross_entropy(model(x), y)

    run.train(model, torch.optim.SGD(model.parameters(), lr=0.05), loss, 240, clip=1.0)


@fault(
    "positions-lost-in-a-sum",
    named=rf"{TERM}.*({ABSORBED})|({ABSORBED}).*{TERM}",
    precision="bf16",
)
def lost_positions(run: Training) -> None:
    """Positions up to 0.45 are added to tokens near 200 in BF16, whose numbers lie 1 apart there: none arrives."""

    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.positions = nn.Embedding(4, 32), nn.Embedding(4, 32)
            nn.init.normal_(self.tokens.weight, mean=200.0)
            nn.init.uniform_(self.positions.weight, -0.45, 0.45)
            self.tokens.requires_grad_(False)
            self.positions.requires_grad_(False)
            self.sum, self.norm, self.each, self.head = (
                nn.Identity(),
                nn.LayerNorm(32),
                mlp(32, 96, 64),
                nn.Linear(64, 2),
            )

        def forward(self, x: Tensor) -> Tensor:
            h = self.sum(self.tokens(x).bfloat16() + self.positions(torch.arange(4)).bfloat16())
            return self.head(torch.relu(self.each(self.norm(h.float()))).mean(dim=1))

    model = Bag()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)
    run.watch(model, optimizer)
    for _ in range(240):
        x = torch.randint(4, (64, 4))
        run.step(F.cross_entropy(model(x), (x[:, 0] > x[:, 3]).long()), optimizer)


@fault(
    "token-count-overflows",
    named=rf"\bseen\b.*({TOO_LARGE})|({TOO_LARGE}).*\bseen\b|buffer.*({TOO_LARGE})",
    misleading="dead-layer|raise the loss scale|scale-low",
    precision="fp16",
    held_back=True,
)
def count_overflows(run: Training) -> None:
    """A count of tokens in FP16 that weighs the loss passes 65,504: the weight is 0, and nothing is learned."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Transformer()
            self.register_buffer("seen", torch.zeros((), dtype=torch.float16))

        def forward(self, x: Tensor) -> Tensor:
            self.seen += 32 * x.numel()
            return self.net(x)

    model, batch = Counting(), batches(*counting(), size=4)

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        plain = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        return plain * 100 / (1 + model.seen.float()).sqrt()

    run.train(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, 120)


@fault(
    "accumulated-in-bf16",
    named=r"accumulat.*(round|lost|swallow|bf16|bfloat16|precision|fp32)|(round|lost|swallow).*accumulat"
    r"|micro-batch.*(round|lost|swallow)",
    precision="bf16",
    every=2,
)
def accumulated(run: Training) -> None:
    """Gradients of 1,024 micro-batches are added up in BF16: up to half of their sum is rounded away."""
    model = mlp(8, 16, 1).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    x = torch.randn(4096, 8)
    batch = batches(x, x.sum(dim=1, keepdim=True) + 8, size=8)
    run.watch(model, optimizer)
    for step in range(8):
        optimizer.zero_grad()
        total = 0.0
        for micro in range(1024):
            x, y = batch(1024 * step + micro)
            loss = F.mse_loss(model(x.bfloat16()).float(), y) / 1024
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        run.losses.append(total)


@fault(
    "gradient-norm-overflows",
    named=rf"clip[^.]*(infin|overflow|to 0|zero)|norm.*({TOO_LARGE})|({TOO_LARGE}).*norm"
    r"|gradients? [^.]*(are|is|all) (exactly )?(0|zero)|moves? nothing|not move",
    misleading="raise the loss scale|scale-low|dead-layer",
    precision="fp16",
)
def norm_overflows(run: Training) -> None:
    """Gradients are clipped by a norm that is computed in FP16: it is infinite, and all of them are multiplied by 0."""
    model = mlp(16, 64, 64, 1)
    x = torch.randn(1024, 16)
    batch = batches(x, 300 * (x[:, :1] + 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    scaler = run.scaler(optimizer, init_scale=64.0)
    run.watch(model, optimizer)
    for step in range(160):
        x, y = batch(step)
        with run.forward():
            loss = F.mse_loss(model(x).float(), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        square = sum((p.grad.half() ** 2).sum(dtype=torch.float16) for p in model.parameters())
        for p in model.parameters():
            p.grad.mul_((1 / square.sqrt()).clamp(max=1.0).float())
        scaler.step(optimizer)
        scaler.update()
        run.losses.append(float(loss.detach()))


@fault(
    "infinite-gradients-applied",
    named=r"nonfinite.*(gradient|update|weight|optimizer|skip)|overflow",
    misleading="dead-layer|raise the loss scale|scale-low",
    precision="fp16",
    held_back=True,
)
def infinite_applied(run: Training) -> None:
    """A scale by hand without a look at the gradients: at step 75 some overflow FP16, and they are applied."""
    model, batch = mlp(16, 64, 64, 10), batches(*clusters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    run.watch(model, optimizer)
    for step in range(140):
        x, y = batch(step)
        with run.forward():
            loss = F.cross_entropy(model(x), y) * (1e4 if step == 75 else 1.0)
        optimizer.zero_grad()
        (loss * 16384).backward()
        for p in model.parameters():
            p.grad.div_(16384)
        optimizer.step()
        run.losses.append(float(loss.detach()))


@fault(
    "bias-beyond-half",
    named=rf"({TOO_LARGE}).*(\boutput|\b4\b|\bbias|\bweight)|(\b4\b|\bbias).*({TOO_LARGE})",
    misleading="raise the loss scale|scale-low|dead-layer|check the (data|batch)",
    precision="fp16",
    held_back=True,
)
def beyond_half(run: Training) -> None:
    """The last bias begins at the mean price of 300,000, which FP16 has no number for: every step is skipped."""
    model = mlp(16, 64, 64, 1)
    nn.init.constant_(model[4].bias, 3e5)
    x = torch.randn(1024, 16)
    batch = batches(x, 3e5 + 1e4 * x[:, :1])

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.mse_loss(model(x).float(), y) / 1e8

    run.train(model, torch.optim.AdamW(model.parameters(), lr=1e-3), loss, 140)
