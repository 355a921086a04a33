"""Mishaps of formats and scales that public threads report, by an author who had not read the rules.

With `sound` they are left out.
"""

from collections.abc import Iterable
from contextlib import nullcontext

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from benchmarks.trust.faults.oversights import FEW, SIDE, either
from benchmarks.trust.registry import fault
from benchmarks.trust.toys import batches, clusters, mlp, surface
from benchmarks.trust.training import Training

NAN = r"\bnan\b|non-?finite|\binf(inite|inity|inities)?\b"


@fault(
    "autocast-around-the-whole-loop",
    named=r"\bcached?\b|stale|autocast[^>]*(once|loop|each|every)|\b(old|first|initial|earlier) weights"
    r"|(forward|outputs?|loss)[^>]*(not|never)[^>]*(follow|see|use|respond|react)|(updates?|steps?) [^>]*no effect"
    r"|(weights?|parameters?) [^>]*(move|change|learn)[^>]*(loss|outputs?)[^>]*(not|same|constant|flat)",
    misleading=f"{SIDE}|learning rate|swallow|rounding|in no optimizer",
    precision="bf16",
)
def entered_once(run: Training, *, sound: bool = False) -> None:
    """Autocast is entered around the whole loop: it keeps its first casts, and no forward sees an updated weight."""
    model, batch = mlp(16, 64, 64, 10), batches(*clusters(spread=1.0))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    run.watch(model, optimizer)
    with nullcontext() if sound else run.forward():
        for step in range(200):
            x, y = batch(step)
            with run.forward():
                loss = F.cross_entropy(model(x).float(), y)
            run.step(loss, optimizer)


class Gumbel(nn.Module):
    """Noise for a choice, from uniform numbers in a format."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        """A number for each of the scores."""
        u = torch.rand(x.shape).clamp(min=1e-6).to(self.dtype)
        return -(-u.log()).log()


class Chooser(nn.Module):
    """Points in, a soft choice among eight codes, and the point that is read from it."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.encoder, self.noise, self.decoder = mlp(8, 64, 8), Gumbel(dtype), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        scores = self.encoder(x)
        return self.decoder((scores + self.noise(scores)).softmax(dim=-1))


@fault(
    "gumbel-noise-in-fp16",
    named=either("noise|gumbel", rf"{NAN}|logarithm"),
    misleading=f"{SIDE}|learning rate",
    precision="fp16",
    held_back=True,
)
def certain_noise(run: Training, *, sound: bool = False) -> None:
    """Uniform numbers are cast to FP16 for Gumbel noise: one in 4,096 becomes 1 there, and its noise is infinite."""
    model = Chooser(torch.float32 if sound else torch.float16)
    batch = batches(clusters(8, 8, 0.2)[0])

    def loss(step: int) -> Tensor:
        (x,) = batch(step)
        return F.mse_loss(model(x).float(), x)

    run.train(model, torch.optim.Adam(model.parameters(), lr=5e-3), loss, 400)


@fault(
    "scale-held-above-a-floor",
    named=r"floor|minimum|steps? [^>]*skipped|skipped[^>]*steps?|lower the (loss )?scale|overflow"
    r"|scale [^>]*too (high|large)|scale [^>]*(never|not|cannot) fall",
    misleading="dead-layer|ReLU|raise the loss scale|scale-low|learning rate|swallow|in no optimizer",
    precision="fp16",
    held_back=True,
)
def floored(run: Training, *, sound: bool = False) -> None:
    """The loss scale is not let below 8,192, to save it from collapsing: gradients overflow at every step, for ever."""
    model, batch = mlp(3, 64, 64, 1, act=nn.Tanh), batches(*surface(3))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    scaler = run.scaler(optimizer)
    run.watch(model, optimizer)
    for step in range(200):
        x, y = batch(step)
        with run.forward():
            loss = F.mse_loss(model(x).float(), 5 * y, reduction="sum")
        run.step(loss, optimizer)
        if not sound and scaler.get_scale() < 8192:
            scaler.update(8192.0)


class LinearCodes(torch.optim.Optimizer):
    """Adam whose second moments are kept as one of 256 evenly spaced values, the largest of the tensor the last."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float, *, short: bool) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-5})
        self.short = short

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        """One update."""
        for group in self.param_groups:
            first, second = group["betas"]
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
                state["step"] += 1
                mean = state["exp_avg"].lerp_(p.grad, 1 - first) / (1 - first ** state["step"])
                square = state["exp_avg_sq"].mul_(second).addcmul_(p.grad, p.grad, value=1 - second)
                root = (square / (1 - second ** state["step"])).sqrt()
                if self.short:
                    code = square.amax().clamp(min=1e-30) / 255
                    square.copy_((square / code).round() * code)
                    root = (square / (1 - second ** state["step"])).sqrt()
                p.sub_(group["lr"] * mean / (root + group["eps"]))


@fault(
    "second-moments-in-evenly-spaced-codes",
    named=r"second[ -]moments?|exp_avg_sq|int8|8[- ]bit|quanti[sz]"
    r"|states? [^>]*(zero|round|codes|distinct|flush|under)",
    misleading=f"{SIDE}|learning rate|swallow|first[ -]moment",
)
def linear_codes(run: Training, *, sound: bool = False) -> None:
    """Adam's second moments are kept as 8-bit multiples of a step: small ones become zero, and updates explode."""
    model, batch = mlp(16, 64, 64, 10), batches(*clusters(spread=1.0))

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.cross_entropy(model(x), y)

    run.train(model, LinearCodes(model.parameters(), 1e-3, short=not sound), loss, 200)


def _e4m3(x: Tensor) -> tuple[Tensor, Tensor]:
    """Values multiplied to fill E4M3 and rounded, with the slope of the factor, and the factor."""
    scale = 448 / x.detach().abs().amax().clamp(min=1e-12)
    h = x * scale
    return h + (h.detach().to(torch.float8_e4m3fn).float() - h.detach()), scale


class Fp8Linear(nn.Linear):
    """A linear layer that multiplies in E4M3; both factors, or only the inputs', are taken out of the product."""

    def __init__(self, into: int, out: int, *, both: bool) -> None:
        super().__init__(into, out)
        self.both = both

    def forward(self, x: Tensor) -> Tensor:
        """The layer's outputs."""
        (h, inputs), (weight, weights) = _e4m3(x), _e4m3(self.weight)
        return h @ weight.T / inputs / (weights if self.both else 1.0) + self.bias


@fault(
    "weight-scale-never-undone",
    named=r"(outputs?|activations?|values?|scores|logits|fp8_\d|head)\b[^>]*(huge|too large|times|larger|saturat|beyond"
    r"|exceed|size|grow|great)|saturat|scale [^>]*(undo|undone|inverse|divid|dequant|taken out)",
    misleading=f"{SIDE}|learning rate|swallow",
    held_back=True,
)
def undone(run: Training, *, sound: bool = False) -> None:
    """The product of E4M3 inputs and weights is divided by the inputs' scale only: it is 1,800 times too large."""
    model = nn.Sequential()
    for i in range(2):
        model.add_module(f"fp8_{i}", Fp8Linear((16, 64)[i], 64, both=sound))
        model.add_module(f"act{i}", nn.Tanh())
    model.add_module("head", Fp8Linear(64, 10, both=sound))
    batch = batches(*clusters())

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.cross_entropy(model(x), y)

    run.train(model, torch.optim.Adam(model.parameters(), lr=3e-3), loss, 200)


class Fp8Gradient(torch.autograd.Function):
    """Values as they are; their gradients go through E5M2 with a scale from the largest."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, guarded: bool) -> Tensor:
        """The same values."""
        ctx.guarded = guarded
        return x.clone()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor, None]:
        """The rounded gradient."""
        largest = gradient.abs().amax()
        scale = 57344 / (largest.clamp(min=1e-12) if ctx.guarded else largest)
        return (gradient * scale).to(torch.float8_e5m2).float() / scale, None


class GradientLinear(nn.Linear):
    """A linear layer whose output's gradient is in E5M2."""

    def __init__(self, into: int, out: int, *, guarded: bool) -> None:
        super().__init__(into, out)
        self.guarded = guarded

    def forward(self, x: Tensor) -> Tensor:
        """The layer's outputs."""
        return Fp8Gradient.apply(super().forward(x), self.guarded)


@fault(
    "fp8-scale-of-a-gradient-of-zeros",
    named=f"{either('gradients?|backward', NAN)}|divi[^>]*zero|e5m2|fp8",
    misleading=f"{SIDE}|learning rate|in no optimizer",
    held_back=True,
)
def no_largest(run: Training, *, sound: bool = False) -> None:
    """A hinge loss has a batch that is all right: its gradients are zero, their FP8 scale infinite, the product NaN."""
    model = nn.Sequential()
    for i in range(2):
        model.add_module(f"linear{i}", GradientLinear((16, 64)[i], 64, guarded=sound))
        model.add_module(f"act{i}", nn.ReLU())
    model.add_module("head", GradientLinear(64, 10, guarded=sound))
    batch = batches(*clusters(spread=0.5))

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.multi_margin_loss(model(x), y)

    run.train(model, torch.optim.Adam(model.parameters(), lr=1e-3), loss, 200)


class Distance(nn.Module):
    """Squared distances to 64 centres: of differences, or from lengths and products as `cdist` takes them."""

    def __init__(self, centres: Tensor, *, products: bool) -> None:
        super().__init__()
        self.products = products
        self.register_buffer("centres", centres)

    def forward(self, x: Tensor) -> Tensor:
        """A number for each centre."""
        if not self.products:
            return (x[:, None] - self.centres).square().sum(dim=-1)
        lengths = x.square().sum(dim=1, keepdim=True) + self.centres.square().sum(dim=1)
        return lengths - 2 * x @ self.centres.T


class Kernels(nn.Module):
    """A sum of bells around centres."""

    def __init__(self, centres: Tensor, *, products: bool) -> None:
        super().__init__()
        self.distance, self.head = Distance(centres, products=products), nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        """One number a row."""
        return self.head((-self.distance(x) / 4).exp().clamp(max=1.0))


@fault(
    "distances-from-products-in-bf16",
    named=f"cancel|{either('distances?', f'{FEW}|negative|zeros?|precision')}",
    misleading=f"{SIDE}|learning rate",
    precision="bf16",
)
def far_from_zero(run: Training, *, sound: bool = False) -> None:
    """Distances are lengths minus products, which autocast rounds to BF16: they lie 8 apart, the distances below 8."""
    x, y = surface(3)
    x = x + 20
    model, batch = Kernels(x[:64].clone(), products=not sound), batches(x, y)

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.mse_loss(model(x).float(), y)

    run.train(model, torch.optim.Adam(model.parameters(), lr=6e-2), loss, 300)


@fault(
    "nan-loss-shown-as-zero",
    named=f"{either('gradients?|backward|loss', NAN)}|mean (of|over) nothing|hid(es?|den)|nan_to_num",
    misleading=f"{SIDE}|learning rate|in no optimizer",
    held_back=True,
)
def shown_as_zero(run: Training, *, sound: bool = False) -> None:
    """A batch has no labelled row, and its loss of NaN is replaced by 0: its gradients are NaN, then all weights."""
    model, (x, y) = mlp(16, 64, 64, 10), clusters()
    batch = batches(x, y, torch.rand(len(x)) < 0.1)

    def loss(step: int) -> Tensor:
        x, y, labelled = batch(step)
        each = F.cross_entropy(model(x), y, reduction="none") * labelled
        total = each.sum() / (labelled.sum().clamp(min=1) if sound else labelled.sum())
        return total.nan_to_num()

    run.train(model, torch.optim.Adam(model.parameters(), lr=3e-3), loss, 200)


class Stream(nn.Module):
    """A transformer's sum of branches without a norm on its way; what overflows is cut, or branches are smaller."""

    def __init__(self, *, smaller: bool) -> None:
        super().__init__()
        self.size = 64.0 if smaller else 8192.0
        self.stem, self.norm, self.head = nn.Linear(16, 64), nn.LayerNorm(64), nn.Linear(64, 10)
        self.branches = nn.ModuleList([mlp(64, 64, 64) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        """Scores."""
        h = self.size * self.stem(x)
        for branch in self.branches:
            h = (h + 4 * branch(h)).half().float().nan_to_num().clamp(-64504, 64504)
        return self.head(self.norm(h))


@fault(
    "overflows-cut-to-the-largest",
    named=r"saturat|clamp|\bcut\b|overflow|6[45],?504|6\.5+\de\+?0?4|largest (value|number)|beyond [^>]*(range|fp16)"
    r"|\binf(inite|inity|inities)?\b|(too|growing|grow) large",
    misleading=f"{SIDE}|learning rate|swallow",
    precision="fp16",
    held_back=True,
)
def cut(run: Training, *, sound: bool = False) -> None:
    """Sums of branches overflow FP16, and infinities are cut to 64,504 as T5 does: what is cut has no gradient."""
    model, batch = Stream(smaller=sound), batches(*clusters(spread=1.0))

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.cross_entropy(model(x).float(), y)

    run.train(model, torch.optim.Adam(model.parameters(), lr=3e-3), loss, 200)


class Gathered(nn.Module):
    """Weights as they arrive: sent as E4M3 with a scale, read as the other E4M3, which has half the value per code."""

    def __init__(self, *, replaced: bool) -> None:
        super().__init__()
        self.replaced = replaced

    def forward(self, weight: Tensor) -> Tensor:
        """The rounded weights, with the slope 1."""
        w = weight.detach()
        scale = 224 / w.abs().amax()
        codes = (w * scale).to(torch.float8_e4m3fn).view(torch.uint8)
        if self.replaced:
            codes = torch.where(codes == 128, 0, codes)  # minus zero, which the other one has as its NaN
        return weight + (2 * codes.view(torch.float8_e4m3fnuz).float() / scale - w)


class GatheredLinear(nn.Linear):
    """A linear layer whose weights are gathered in E4M3."""

    def __init__(self, into: int, out: int, *, replaced: bool) -> None:
        super().__init__(into, out)
        self.gathered = Gathered(replaced=replaced)

    def forward(self, x: Tensor) -> Tensor:
        """The layer's outputs."""
        return F.linear(x, self.gathered(self.weight), self.bias)


@fault(
    "minus-zero-of-the-other-e4m3",
    named=rf"e4m3|\bfp8|fnuz|(minus|negative) zero|{either('gathered', NAN)}",
    misleading=f"{SIDE}|learning rate|in no optimizer|swallow",
    held_back=True,
)
def other_codes(run: Training, *, sound: bool = False) -> None:
    """E4M3 weights are read on a GPU whose E4M3 has NaN for the code of -0: once one rounds to -0, all is NaN."""
    model = nn.Sequential()
    for i in range(2):
        model.add_module(f"linear{i}", GatheredLinear((16, 96)[i], 96, replaced=sound))
        model.add_module(f"act{i}", nn.ReLU())
    model.add_module("head", GatheredLinear(96, 10, replaced=sound))
    batch = batches(*clusters(spread=1.0))

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.cross_entropy(model(x), y)

    run.train(model, torch.optim.Adam(model.parameters(), lr=3e-3), loss, 200)


class Noneof(nn.Module):
    """The logarithm of the probability that none of some things is there, from their scores."""

    def __init__(self, *, exact: bool) -> None:
        super().__init__()
        self.exact = exact

    def forward(self, scores: Tensor) -> Tensor:
        """One number a row."""
        p = (scores.float() if self.exact else scores).sigmoid()
        return (-p.clamp(max=1 - 1e-6)).log1p().sum(dim=1)


@fault(
    "clamp-below-one-in-bf16",
    named=rf"clamp|log1p|log(arithm)? (of|at) (zero|0)|{either('noneof|gradients?|backward', NAN)}",
    misleading=f"{SIDE}|learning rate|in no optimizer|swallow",
    precision="bf16",
    held_back=True,
)
def no_clamp(run: Training, *, sound: bool = False) -> None:
    """A probability is clamped to 1 - 1e-6, which is 1 in BF16: a sure one has an infinite slope, times 0 a NaN."""
    model = nn.Sequential()
    model.add_module("net", mlp(16, 64, 2))
    model.add_module("noneof", Noneof(exact=sound))
    x, y = clusters(spread=0.5)
    batch = batches(x, y < 5)

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        none = model(x).float()
        return -torch.where(y, (1 - none.exp()).clamp(min=1e-6).log(), none).mean()

    run.train(model, torch.optim.Adam(model.parameters(), lr=1e-2), loss, 250)
