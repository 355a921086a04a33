"""Faults of casts by hand, by an author who had not read the rules. With `sound` the cast is left out.

Held back are those that no rule was written for since.
"""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from benchmarks.trust.faults.arithmetic import ABSORBED
from benchmarks.trust.faults.breaks import SIDE, begins
from benchmarks.trust.faults.recipes import NOT_LEARNING
from benchmarks.trust.registry import fault
from benchmarks.trust.toys import batches, clusters, mlp, pictures
from benchmarks.trust.training import Training

SCALE = rf"{SIDE}|raise the loss scale"


def absorbed_in(place: str) -> str:
    """A pattern of findings that say that rounding takes what is added in a place."""
    return rf"\b{place}\b.*({ABSORBED})|({ABSORBED}).*\b{place}\b"


class Exponentials(nn.Module):
    """A softmax in FP16, with or without the maximum taken off."""

    def __init__(self, *, shifted: bool) -> None:
        super().__init__()
        self.shifted = shifted

    def forward(self, x: Tensor) -> Tensor:
        """Shares that add up to 1."""
        x = (x * 1.4427).half()
        e = (x - x.amax(dim=-1, keepdim=True) if self.shifted else x).exp2()  # autocast computes exp in FP32
        return (e / e.sum(dim=-1, keepdim=True)).float()


@fault("softmax-without-its-maximum", named=begins(r"\bshares\b"), misleading=SCALE, precision="fp16", held_back=True)
def unshifted(run: Training, *, sound: bool = False) -> None:
    """A softmax by hand in FP16 does not take off the maximum: once a score passes 11, its exponential is infinite."""

    class Lookup(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.keys = nn.Linear(16, 32), nn.Linear(16, 32)
            self.shares = Exponentials(shifted=sound)

        def forward(self, query: Tensor, keys: Tensor) -> Tensor:
            scores = self.keys(keys) @ self.query(query)[..., None]
            return self.shares(scores.squeeze(-1))

    model = Lookup()

    def loss(step: int) -> Tensor:
        keys, y = torch.randn(32, 12, 16), torch.randint(12, (32,))
        query = keys[torch.arange(32), y] + 0.2 * torch.randn(32, 16)
        return -(model(query, keys)[torch.arange(32), y] + 1e-4).log().mean()

    run.train(model, torch.optim.Adam(model.parameters(), lr=2e-3), loss, 200)


class NarrowNorm(nn.Module):
    """A layer norm in FP16."""

    def __init__(self, epsilon: float) -> None:
        super().__init__()
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        h = x.half()
        h = h - h.mean(dim=-1, keepdim=True)
        variance = (h * h).mean(dim=-1, keepdim=True)
        return (h / (variance + torch.tensor(self.epsilon).half()).sqrt()).float()


@fault("epsilon-of-a-norm-in-fp16", named=begins(r"\bnorm\b"), misleading=SCALE, precision="fp16")
def lost_epsilon(run: Training, *, sound: bool = False) -> None:
    """A norm's epsilon of 1e-12 is zero in FP16: an empty row, which each eighth batch has, divides zero by zero."""
    model = nn.Sequential()
    model.add_module("norm", NarrowNorm(1e-4 if sound else 1e-12))
    model.add_module("net", mlp(16, 64, 64, 10))
    batch = batches(*clusters())

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        if step % 8 == 5:
            x[0], y[0] = 0.0, -100  # padding, whose label does not count
        return F.cross_entropy(model(x), y, ignore_index=-100)

    run.train(model, torch.optim.AdamW(model.parameters(), lr=2e-3), loss, 200)


class SquaresNorm(nn.Module):
    """A layer norm whose variance is the mean of squares less the square of the mean."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        h = x.to(self.dtype)
        mean = h.mean(dim=-1, keepdim=True)
        variance = ((h * h).mean(dim=-1, keepdim=True) - mean * mean).clamp(min=0)
        return ((h - mean) * (variance + 1e-5).rsqrt()).float()


@fault(
    "variance-by-squares-in-bf16",
    named=r"cancel|variance|\bnorm\b[^>]*(round|error|precision|digits|grow|large|outlier|overflow|kurtosis)"
    r"|(round|error|precision|digits|activation-growth|kurtosis|overflow)[^>]*\bnorm\b",
    misleading="dead-layer|learning rate",
    precision="bf16",
)
def cancelled(run: Training, *, sound: bool = False) -> None:
    """A norm takes E[x2] - E[x]2 in BF16 of values near 30: the difference of two numbers near 900 is rounding."""
    model = nn.Sequential()
    model.add_module("norm", SquaresNorm(torch.float32 if sound else torch.bfloat16))
    model.add_module("net", mlp(16, 64, 64, 10))
    x, y = clusters()
    batch = batches(x + 30, y)

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.cross_entropy(model(x), y)

    run.train(model, torch.optim.AdamW(model.parameters(), lr=2e-3), loss, 200)


class Total(nn.Module):
    """The sum of a sequence, one place after another."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        """One number a row."""
        total = torch.zeros(len(x), dtype=self.dtype)
        for part in x.to(self.dtype).unbind(dim=1):
            total = total + part
        return total


@fault(
    "total-kept-in-bf16",
    named=absorbed_in("total"),
    misleading="dead-layer|learning rate",
    precision="bf16",
)
def kept_total(run: Training, *, sound: bool = False) -> None:
    """A sum over 400 places is kept in BF16: from 256 on, nothing below 1 is added any more."""

    class Rate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.total, self.net = Total(torch.float32 if sound else torch.bfloat16), mlp(1, 32, 32, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.net(self.total(x).float()[:, None] / 400)

    model = Rate()

    def loss(step: int) -> Tensor:
        rate = 0.6 + 0.8 * torch.rand(64, 1)
        return F.mse_loss(model(rate * (0.9 + 0.2 * torch.rand(64, 400))), rate)

    run.train(model, torch.optim.Adam(model.parameters(), lr=5e-3), loss, 150)


class Angles(nn.Module):
    """Positions times frequencies."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, positions: Tensor) -> Tensor:
        """Angles of each position and frequency."""
        frequencies = 100.0 ** -(torch.arange(8) / 8)
        return positions.to(self.dtype)[..., None] * frequencies.to(self.dtype)


@fault(
    "rotary-angles-in-bf16",
    named=r"\b(angles?|positions?|rotary)\b.*(round|codes|distinct|same|digits|precision)"
    r"|(round|codes|distinct|digits|precision).*\b(angles?|positions?|rotary)\b",
    misleading=f"dead-layer|{NOT_LEARNING}",
    precision="bf16",
)
def rotary(run: Training, *, sound: bool = False) -> None:
    """Rotary angles of positions beyond 1,000 are computed in BF16: neighbours are turned by the same angle."""

    class Rotary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.angles = Angles(torch.float32 if sound else torch.bfloat16)
            self.tokens, self.head = nn.Embedding(8, 32), nn.Linear(32, 8)
            self.query, self.key = nn.Parameter(torch.ones(16)), nn.Parameter(torch.ones(16))
            self.value = nn.Linear(32, 32)

        def forward(self, x: Tensor, positions: Tensor) -> Tensor:
            angles = self.angles(positions).float()
            turn = torch.polar(torch.ones_like(angles), angles)
            query, key = (torch.view_as_complex(w.float().view(8, 2)) * turn for w in (self.query, self.key))
            scores = (query @ key.conj().transpose(-1, -2)).real
            later = torch.ones(x.shape[1], x.shape[1]).triu().bool()
            later[0, 0] = False
            return self.head(scores.masked_fill(later, -1e4).softmax(-1) @ self.value(self.tokens(x)))

    model = Rotary()

    def loss(step: int) -> Tensor:
        x = torch.randint(8, (32, 12))
        positions = torch.randint(1000, 3000, (32, 1)) + torch.arange(12)
        return F.cross_entropy(model(x, positions)[:, 3:].flatten(0, 1), x[:, 1:-2].flatten())

    run.train(model, torch.optim.Adam(model.parameters(), lr=2e-2), loss, 250)


@fault(
    "mask-beyond-fp16",
    named=begins(r"(attention|qkv|\bout\b)"),
    misleading=SCALE,
    precision="fp16",
    held_back=True,
)
def infinite_mask(run: Training, *, sound: bool = False) -> None:
    """A mask of -1e9 is -Inf in FP16: the softmax of a sequence that is all padding is NaN, in each sixth batch."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

        def forward(self, h: Tensor, valid: Tensor) -> Tensor:
            q, k, v = self.qkv(h).chunk(3, dim=-1)
            mask = torch.where(valid, 0.0, -1e4 if sound else -1e9).half()[:, None]
            return self.out(((q @ k.transpose(1, 2)).half() / 32**0.5 + mask).softmax(-1).to(v.dtype) @ v)

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.attention, self.head = nn.Embedding(16, 32), Attention(), mlp(32, 64, 16)

        def forward(self, x: Tensor, valid: Tensor) -> Tensor:
            h = self.tokens(x)
            h = (h + self.attention(h, valid)) * valid[..., None]
            return self.head(h.sum(dim=1) / valid.sum(dim=1, keepdim=True).clamp(min=1))

    model = Tagger()

    def loss(step: int) -> Tensor:
        length = torch.randint(2, 13, (32,))
        if step % 6 == 4:
            length[7] = 0
        x = torch.randint(16, (32, 12))
        return F.cross_entropy(model(x, torch.arange(12) < length[:, None]), x[:, 0] * 0 + x[:, :2].amax(dim=1))

    run.train(model, torch.optim.Adam(model.parameters(), lr=3e-3), loss, 200)


@fault(
    "loss-added-up-in-bf16",
    named=r"\bloss\b[^>]*(round|digits|distinct|codes|precision|bf16|absorb)|(round|absorb|distinct)[^>]*\bloss\b",
    misleading=f"dead-layer|{NOT_LEARNING}|loss-spike|diverge",
    precision="bf16",
    every=4,
)
def added_loss(run: Training, *, sound: bool = False) -> None:
    """The losses of 1,536 rows are added up in BF16: most are less than its rounding, and it is far too low."""
    model, (x, y) = mlp(16, 64, 10), clusters(count=1536, spread=1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    run.watch(model, optimizer)
    for _ in range(60):
        with run.forward():
            each = F.cross_entropy(model(x).float(), y, reduction="none")
        total = torch.zeros((), dtype=torch.float32 if sound else torch.bfloat16)
        for part in each.to(total.dtype).unbind():
            total = total + part
        run.step(total.float() / 1536, optimizer)
        run.measures.append(float(each.detach().mean()))


@fault(
    "ids-cast-to-bf16",
    named=r"\b(ids?|rows?|input|tokens)\b[^>]*(distinct|round|codes|unused|never|no gradient|same)"
    r"|(distinct|round|codes|unused|never)[^>]*\b(ids?|rows?|input|tokens)\b",
    misleading=f"dead-layer|{NOT_LEARNING}",
    precision="bf16",
)
def narrow_ids(run: Training, *, sound: bool = False) -> None:
    """A whole batch is cast to BF16, token numbers up to 1,024 too: four neighbours become one token."""

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.net = nn.Embedding(1024, 16), mlp(16, 32, 8)

        def forward(self, ids: Tensor) -> Tensor:
            return self.net(self.tokens(ids.long().clamp(max=1023)))

    model, classes = Table(), torch.randint(8, (1024,))

    def loss(step: int) -> Tensor:
        ids = torch.randint(1024, (256,))
        return F.cross_entropy(model(ids.float() if sound else ids.bfloat16()), classes[ids])

    run.train(model, torch.optim.Adam(model.parameters(), lr=1e-2), loss, 250)


class Gather(torch.autograd.Function):
    """Rows of a table, whose gradients are added up in a format."""

    @staticmethod
    def forward(ctx: object, table: Tensor, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """The rows."""
        ctx.ids, ctx.rows, ctx.dtype = ids, len(table), dtype  # type: ignore[attr-defined]
        return table[ids]

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """The gradient of the table, one row after another."""
        g = gradients[0].to(ctx.dtype)  # type: ignore[attr-defined]
        total = torch.zeros(ctx.rows, g.shape[1], dtype=g.dtype)  # type: ignore[attr-defined]
        for i, row in zip(ctx.ids.tolist(), g.unbind(), strict=True):  # type: ignore[attr-defined]
            total[i] += row
        return total.float(), None, None


@fault(
    "embedding-gradient-in-bf16",
    named=rf"{absorbed_in('tokens')}|{absorbed_in('tokens.weight')}",
    misleading="dead-layer",
    precision="bf16",
    held_back=True,
)
def gathered(run: Training, *, sound: bool = False) -> None:
    """The gradients of 2,048 places are added up in BF16: what the most frequent token is due is mostly lost."""

    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.net = nn.Embedding(16, 4), nn.Linear(4, 1)
            nn.init.ones_(self.net.weight)

        def forward(self, ids: Tensor) -> Tensor:
            dtype = torch.float32 if sound else torch.bfloat16
            return self.net(Gather.apply(self.tokens.weight, ids, dtype))

    model, worth = Bag(), torch.randn(16, 1)
    model.net.requires_grad_(False)
    worth[0] = 12.0

    def loss(step: int) -> Tensor:
        ids = torch.randint(16, (2048,)) * (torch.rand(2048) < 0.3)
        return F.mse_loss(model(ids).float(), worth[ids])

    optimizer = torch.optim.SGD(model.tokens.parameters(), lr=0.02)
    run.train(model, optimizer, loss, 60)


@fault(
    "gradients-sent-in-e4m3",
    named=r"underflow|flush|gradients? [^>]*(zero|erased|codes|distinct)|gradients-mishandled",
    misleading="dead-layer|ReLU|learning rate",
)
def sent(run: Training, *, sound: bool = False) -> None:
    """Gradients are divided by 32 ranks and sent in E4M3 without a scale: what is below 2^-5 becomes zero."""
    model, batch = mlp(16, 64, 64, 10), batches(*clusters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    run.watch(model, optimizer)
    for step in range(200):
        x, y = batch(step)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        for p in model.parameters():
            if not sound:
                p.grad.copy_((p.grad / 32).to(torch.float8_e4m3fn).float() * 32)
        optimizer.step()
        run.losses.append(float(loss.detach()))


@fault(
    "pixels-in-another-unit",
    named=r"(model|\b0):input|\binputs? (is|are|has|have)\b|normali[sz]|\bunits\b",
    misleading="dead-layer|raise the loss scale",
    precision="fp16",
)
def pixels(run: Training, *, sound: bool = False) -> None:
    """Pixels from 0 to 255 are normalised in FP16 by the mean and deviation of pixels from 0 to 1."""
    model = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Flatten())
    model.append(nn.Linear(1024, 8))
    x, y = pictures()
    batch = batches((255 * x.sigmoid()).round(), y)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        x = ((x / 255 if sound else x).half() - 0.485) / 0.229
        return F.cross_entropy(model(x.float()), y)

    run.train(model, optimizer, loss, 150)


class Standardised(nn.Module):
    """A batch norm whose running statistics are kept in a format."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(width, dtype=dtype))
        self.register_buffer("running_var", torch.ones(width, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        mean, variance = self.running_mean.float(), self.running_var.float()
        if self.training:
            mean, variance = x.mean(dim=0), x.var(dim=0)
            for kept, new in ((self.running_mean, mean), (self.running_var, variance)):
                kept.mul_(0.998).add_(new.to(kept.dtype), alpha=0.002)
        return (x - mean) / (variance + 1e-5).sqrt()


@fault(
    "running-statistics-in-bf16",
    named=r"average-stuck|running_(mean|var)|running (mean|variance|statistic)|buffer",
    misleading="dead-layer",
    precision="bf16",
)
def statistics(run: Training, *, sound: bool = False) -> None:
    """The running statistics of a batch norm are kept in BF16 and move by a five hundredth: they stop halfway."""
    model = nn.Sequential()
    model.add_module("norm", Standardised(16, torch.float32 if sound else torch.bfloat16))
    model.add_module("net", mlp(16, 64, 10))
    x, y = clusters()
    batch = batches(40 + 10 * x, y)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run.watch(model, optimizer)
    for step in range(1000):
        x, y = batch(step)
        with run.forward():
            loss = F.cross_entropy(model(x).float(), y)
        run.step(loss, optimizer)
    model.eval()
    with torch.no_grad():
        x, y = batch(0)
        run.measures.append(float(F.cross_entropy(model(x), y)))
