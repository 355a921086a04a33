"""Traps of low precision that public threads and trackers report, by an author who had not read the rules.

With `sound` they are left out. Behind each fault: what was measured with it and without it.
"""

import abc
import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import plimsoll as pl
from benchmarks.trust.faults.oversights import FEW, either
from benchmarks.trust.registry import fault
from benchmarks.trust.toys import batches, clusters, mlp, surface
from benchmarks.trust.training import Training

SIDE = r"dead-layer|\brelus?\b|in no optimizer"
FLUSHED = (
    r"(?<!no )underflow|flush|too small for|subnormal|\bround(s|ed|ing)?\b|\bcodes\b"
    r"|\b(becomes?|became|to|as) (exactly )?zeros?\b"
)
LARGE_UPDATES = (
    r"updates?\b[^>]*(large|jump|grow|times (as|the)|explo)|(large|huge) (relative )?updates?"
    r"|(weights?|parameters?)\b[^>]*(thrown|jump)"
)
NO_GRADIENT = (
    r"\b(no|without( a| any)?|never (get|gets|got)) gradients?|gradients? (is|are|was|were) (never|none|missing)"
    r"|\bgraph\b|detach|cache|stale|no_grad"
)


class Step(torch.optim.Optimizer, abc.ABC):
    """An optimizer that keeps a dictionary for each parameter; `move` of a subclass steps one of them."""

    def __init__(self, parameters: Iterable[Tensor], lr: float, **more: Any) -> None:
        super().__init__(parameters, {"lr": lr, **more})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Step every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["step"] = state.get("step", 0) + 1
                    self.move(parameter, parameter.grad.float(), state, group)

    @abc.abstractmethod
    def move(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Step one parameter."""


def adam(gradient: Tensor, state: dict[str, Any], lr: float) -> Tensor:
    """An update of Adam, in FP32; the moments are kept in the state."""
    if "exp_avg" not in state:
        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(gradient), torch.zeros_like(gradient)
    mean, square, step = state["exp_avg"], state["exp_avg_sq"], state["step"]
    mean.lerp_(gradient, 0.1)
    square.lerp_(gradient.square(), 0.001)
    return -lr * mean / (1 - 0.9**step) / ((square / (1 - 0.999**step)).sqrt() + 1e-8)


class Fused(torch.autograd.Function):
    """A cross entropy over scores whose gradient is made in the forward, divided by the tokens of all ranks."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, y: Tensor, tokens: int, dtype: torch.dtype) -> Tensor:
        """The sum of the rows' losses, divided by the number of tokens."""
        logarithms = scores.float().log_softmax(dim=1)
        slope = logarithms.exp()
        slope[torch.arange(len(y)), y] -= 1.0
        ctx.save_for_backward((slope / tokens).to(dtype))
        return -logarithms[torch.arange(len(y)), y].sum() / tokens

    @staticmethod
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        """The kept gradient times the scale."""
        (slope,) = ctx.saved_tensors
        return slope.float() * above, None, None, None


@fault(
    "gradient-made-in-the-forward-in-fp16",
    named=either(r"gradients?|grad|slopes?|backward", FLUSHED),
    misleading=f"{SIDE}|swallow",
    precision="fp16",
)
def fused(run: Training, *, sound: bool = False) -> None:
    """A fused cross entropy makes its gradient in the forward in FP16, before any loss scale: most of it is zero."""
    # Divergence from the true shares at the end: 2.7, without the fault 0.021.
    shares = torch.arange(1, 257).float().reciprocal()
    shares = torch.stack([shares[torch.randperm(256)] for _ in range(8)])
    shares, contexts = shares / shares.sum(dim=1, keepdim=True), torch.randn(8, 16)
    model, ranks = mlp(16, 64, 256), 2048
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, eps=1e-15)

    def loss(step: int) -> Tensor:
        which = torch.randint(8, (512,))
        scores = model(contexts[which]).float()
        with torch.no_grad():  # how far the scores are from the shares
            run.measures.append(float(F.kl_div(scores.log_softmax(dim=1), shares[which], reduction="batchmean")))
        y, kept = torch.multinomial(shares[which], 1).squeeze(1), torch.float32 if sound else torch.float16
        return ranks * Fused.apply(scores, y, ranks * 512, kept)  # the ranks' gradients are averaged

    run.train(model, optimizer, loss, 300)


def _in_int8(values: Tensor, block: int) -> Tensor:
    """Values as multiples of a step, up to 127 of them, one step for each block."""
    blocks = F.pad(values, (0, -len(values) % block)).view(-1, block)
    step = (blocks.abs().amax(dim=1, keepdim=True) / 127).clamp(min=1e-30)
    return (torch.round(blocks / step) * step).flatten()[: len(values)]


class Wide(nn.Module):
    """Words of a text go through a table and a network, and a number is added as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.net = nn.EmbeddingBag(400, 16, mode="mean"), mlp(16, 64, 1)
        self.wide = nn.Linear(1, 1)

    def forward(self, words: Tensor, number: Tensor) -> Tensor:
        """One number a row."""
        return self.net(self.tokens(words)) + self.wide(number)


@fault(
    "bucket-of-gradients-in-int8-with-one-scale",
    named=either(r"gradients?|grad|tokens|table|embedding", rf"{FLUSHED}|quanti|int8|distinct")
    + rf"|tokens[^>]*({NO_GRADIENT})",
    misleading=rf"{SIDE}|loss scale|lower the (learning )?rate",
)
def bucket(run: Training, *, sound: bool = False) -> None:
    """All gradients are sent as INT8 in one bucket with one scale, that of an input of size 30: the others are zero."""
    # Loss at the end: 13, without the fault 1.6.
    words, weights = torch.randint(400, (4096, 30)), torch.randn(400)
    number = 30.0 * torch.randn(4096, 1)
    y = weights[words].sum(dim=1, keepdim=True) + 0.1 * number + torch.randn(4096, 1)
    model = Wide()
    batch = batches(words, number, y, size=64)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    run.watch(model, optimizer)
    for step in range(400):
        rows, numbers, targets = batch(step)
        value = F.mse_loss(model(rows, numbers), targets)
        optimizer.zero_grad()
        value.backward()
        flat = torch.cat([p.grad.flatten() for p in model.parameters()])
        sent = _in_int8(flat, 16 if sound else len(flat))
        for parameter, part in zip(
            model.parameters(), sent.split([p.numel() for p in model.parameters()]), strict=True
        ):
            parameter.grad.copy_(part.view_as(parameter))
        optimizer.step()
        run.losses.append(float(value.detach()))


class OneBitAdam(Step):
    """Adam, until the second moments are frozen; then signs of the momentum are sent, and what they lose is kept."""

    def move(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Step one parameter."""
        lr, frozen = group["lr"], state["step"] > group["freeze_step"]
        if not frozen:
            parameter.add_(adam(gradient, state, lr))
            return
        step = group["freeze_step"]
        mean, square = state["exp_avg"].lerp_(gradient, 0.1), state["exp_avg_sq"] / (1 - 0.999**step)
        sent = mean + state.get("lost", 0.0)
        signs = sent.sign() * sent.abs().mean()
        state["lost"] = sent - signs
        parameter.addcdiv_(signs, square.sqrt() + 1e-8, value=-lr)


@fault(
    "second-moments-frozen-too-early",
    named=rf"second[ -]moments?|exp_avg_sq|froze|freeze|freezing|denominator|{LARGE_UPDATES}",
    misleading=rf"{SIDE}|swallow|loss scale|raise the (learning )?rate",
    held_back=True,
)
def frozen_early(run: Training, *, sound: bool = False) -> None:
    """1-bit Adam freezes its second moments at step 3, while a head of zeros still hides the trunk's gradients."""
    # Loss at the end: NaN, without the fault 0.18.
    model, batch = mlp(16, 64, 64, 10), batches(*clusters(spread=1.0))
    nn.init.zeros_(model[4].weight)
    optimizer = OneBitAdam(model.parameters(), 1e-3, freeze_step=100 if sound else 3)

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.cross_entropy(model(x), y)

    run.train(model, optimizer, loss, 300)


class FourBits(torch.autograd.Function):
    """Gradients in NVFP4, whose blocks of 16 have a scale in E4M3; the whole tensor has one too, or none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scaled: bool) -> Tensor:
        """The same values."""
        ctx.scaled = scaled
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        """The gradient in NVFP4."""
        whole = above.abs().amax().clamp(min=1e-30) / (6 * 448) if ctx.scaled else 1.0
        blocks = (above / whole).view(-1, 16)
        scale = pl.cast(blocks.abs().amax(dim=1, keepdim=True) / 6, "e4m3")
        codes = torch.where(scale > 0, pl.cast(blocks / scale.clamp(min=1e-9), "e2m1"), 0.0)
        return (codes * scale).view_as(above) * whole, None


class Rounded(nn.Linear):
    """A linear layer that gets its gradient in NVFP4."""

    scaled: bool = False

    def forward(self, x: Tensor) -> Tensor:
        """The layer's outputs."""
        return FourBits.apply(super().forward(x), self.scaled)


@fault(
    "nvfp4-without-the-scale-of-the-tensor",
    named=either(r"gradients?|grad|backward|scales?", FLUSHED) + r"|nvfp4|fp4",
    misleading=rf"{SIDE}|swallow|lower the (learning )?rate",
    held_back=True,
)
def no_tensor_scale(run: Training, *, sound: bool = False) -> None:
    """Gradients are in NVFP4 with scales of blocks only: these are E4M3, which is zero for gradients below 0.006."""
    # Loss at the end: 1.6, without the fault 0.077.
    layers = [Rounded(16, 64), nn.ReLU(), Rounded(64, 64), nn.ReLU(), Rounded(64, 16)]
    for layer in layers[::2]:
        layer.scaled = sound
    model, batch = nn.Sequential(*layers), batches(*clusters(spread=1.0), size=128)

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.cross_entropy(model(x), y)

    run.train(model, torch.optim.Adam(model.parameters(), lr=2e-3), loss, 250)


class Cached(nn.Linear):
    """A linear layer that casts its weights once a step and keeps the cast for further calls in that step."""

    cast: Tensor | None = None
    graph: bool = False

    def forward(self, x: Tensor) -> Tensor:
        """The layer's outputs."""
        if self.cast is None or (self.graph and not self.cast.requires_grad and torch.is_grad_enabled()):
            self.cast = self.weight.bfloat16()
        return F.linear(x.bfloat16(), self.cast, self.bias.bfloat16())


class Guessing(nn.Module):
    """Predicts a clean point from a noisy one and from its first guess of it."""

    def __init__(self) -> None:
        super().__init__()
        self.times, self.norm = nn.Embedding(10, 64), nn.LayerNorm(64)
        self.first, self.second, self.last = Cached(16, 64), Cached(64, 64), Cached(64, 8)

    def forward(self, x: Tensor, guess: Tensor, t: Tensor) -> Tensor:
        """The prediction."""
        h = self.first(torch.cat([x, guess], dim=1)) + self.times(t)
        return self.last(F.silu(self.second(F.silu(self.norm(h.float()))))).float()


@fault(
    "cast-kept-from-a-call-without-a-graph",
    named=NO_GRADIENT,
    misleading=rf"{SIDE}|swallow|loss scale|learning rate",
    precision="bf16",
)
def no_graph(run: Training, *, sound: bool = False) -> None:
    """BF16 casts are kept for a step; a first guess under `no_grad` makes them, and no gradient reaches a weight."""
    # Loss at the end: 0.64, without the fault 0.072.
    model, batch = Guessing(), batches(clusters(8, 6, 0.1)[0], size=64)
    layers = [layer for layer in model.modules() if isinstance(layer, Cached)]
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def loss(step: int) -> Tensor:
        for layer in layers:
            layer.cast, layer.graph = None, sound
        (x,), t = batch(step), torch.randint(10, (64,))
        noisy = x + 0.1 * (1 + t[:, None]) * torch.randn_like(x)
        with torch.no_grad():
            guess = model(noisy, torch.zeros_like(x), t)
        return F.mse_loss(model(noisy, guess, t), x)

    run.train(model, optimizer, loss, 300)


class Ridge(nn.Module):
    """Answers to queries by a ridge regression on the few rows of an episode."""

    def __init__(self, *, full: bool) -> None:
        super().__init__()
        self.full = full

    def forward(self, rows: Tensor, answers: Tensor, queries: Tensor) -> Tensor:
        """The queries' answers."""
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not self.full):
            rows = rows.float() if self.full else rows
            products, sums = rows.mT @ rows, rows.mT @ answers
        ridge = 0.02 * torch.eye(rows.shape[-1])
        return queries.float() @ torch.linalg.solve(products.float() + ridge, sums.float())


class Episodes(nn.Module):
    """Features of rows, and the ridge regression on them."""

    def __init__(self, *, full: bool) -> None:
        super().__init__()
        self.features, self.ridge = mlp(4, 64, 48, act=nn.Tanh), Ridge(full=full)

    def forward(self, x: Tensor, y: Tensor, queries: Tensor) -> Tensor:
        """The queries' answers."""
        return self.ridge(self.features(x), y, self.features(queries))


@fault(
    "ridge-smaller-than-rounding-in-bf16",
    named=either("ridge|solve|solver|products?|gram", r"round|precision|digits|bf16|singular|condition|cancel|noise")
    + r"|singular|ill-condition|eigenvalue",
    misleading=rf"{SIDE}|swallow|loss scale",
    precision="bf16",
    held_back=True,
)
def ridge(run: Training, *, sound: bool = False) -> None:
    """Autocast rounds the products of a ridge regression to BF16: its ridge of 0.02 is less than the rounding."""
    # Loss at the end: 6.5, without the fault 0.1.
    model = Episodes(full=sound)

    def loss(step: int) -> Tensor:
        x = torch.rand(8, 40, 4) * 4 - 2
        turn, shift = torch.randn(8, 4, 1) / 2, torch.rand(8, 1, 1) * 6
        y = torch.sin(x @ turn + shift)
        return F.mse_loss(model(x[:, :20], y[:, :20], x[:, 20:]), y[:, 20:])

    run.train(model, torch.optim.Adam(model.parameters(), lr=1e-3), loss, 250)


class Decays(nn.Module):
    """How much each place still counts at each later one: exponentials of differences of sums of logarithms."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, logarithms: Tensor) -> Tensor:
        """Rows by places by places."""
        sums = logarithms.float().cumsum(dim=1).to(self.dtype)
        apart = (sums[:, :, None] - sums[:, None]).float()
        return apart.masked_fill(torch.ones(apart.shape[1:]).triu(1).bool(), -math.inf).exp()


class StateSpace(nn.Module):
    """A sum of all earlier values, each decayed by what was read since."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.steps, self.decays = mlp(2, 16, 1, act=nn.Tanh), Decays(dtype)

    def forward(self, x: Tensor) -> Tensor:
        """One number a place."""
        rates = F.softplus(self.steps(x).float()).squeeze(2)
        return ((1 - (-rates).exp())[:, None] * self.decays(-rates) * x[:, None, :, 0]).sum(dim=2)


@fault(
    "differences-of-cumulated-decays-in-bf16",
    named=either("decays|sums?|cumsum|cumulated|differences?", rf"{FEW}|cancel|precision|bf16"),
    misleading=rf"{SIDE}|swallow|loss scale|learning rate",
    precision="bf16",
    held_back=True,
)
def cumulated(run: Training, *, sound: bool = False) -> None:
    """Decays are differences of sums over 192 places, which are kept in BF16: late ones differ by 0, 0.5 or 1."""
    # Loss at the end: 0.0039, without the fault 0.00024.
    model = StateSpace(torch.float32 if sound else torch.bfloat16)

    def loss(step: int) -> Tensor:
        x = torch.randn(8, 192, 2)
        rates, state, wanted = 0.2 + 0.6 * torch.sigmoid(2 * x[..., 1]), torch.zeros(8), []
        for place in range(192):
            share = (-rates[:, place]).exp()
            state = share * state + (1 - share) * x[:, place, 0]
            wanted.append(state)
        return F.mse_loss(model(x)[:, 96:], torch.stack(wanted, dim=1)[:, 96:])

    run.train(model, torch.optim.Adam(model.parameters(), lr=1e-2), loss, 150)


class Ratio(nn.Module):
    """How much likelier a text is by now than when it was drawn."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("drawn", torch.zeros(64, dtype=dtype))

    def forward(self, now: Tensor) -> Tensor:
        """One number a row."""
        return (now - self.drawn.float()).exp()


class Policy(nn.Module):
    """Scores of 96 tokens for each row, and the ratio of their likelihood to that of the draw."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.net, self.ratio = mlp(8, 64, 96 * 16), Ratio(dtype)

    def scores(self, x: Tensor) -> Tensor:
        """Logarithms of the tokens' shares."""
        return self.net(x).float().view(-1, 96, 16).log_softmax(dim=2)

    def forward(self, x: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The ratio of each row, and the logarithm of each token's share."""
        each = self.scores(x).gather(2, tokens[..., None]).squeeze(2)
        return self.ratio(each.sum(dim=1)), each


@fault(
    "likelihoods-of-the-draw-in-bf16",
    named=either(r"ratio|drawn|likelihoods?|log-?prob\w*", r"round|precision|digits|bf16|codes|distinct|spacing")
    + r"|ratio[^>]*(far from 1|away from 1)",
    misleading=rf"{SIDE}|swallow|loss scale",
    precision="bf16",
)
def drawn(run: Training, *, sound: bool = False) -> None:
    """PPO keeps log-likelihoods of texts, near -260, in BF16, whose numbers lie 2 apart there: all ratios are wrong."""
    # Share of wrong tokens at the end: 0.51, without the fault 0.33.
    model, contexts = Policy(torch.float32 if sound else torch.bfloat16), torch.eye(8)
    wanted = torch.randint(16, (8, 96))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    run.watch(model, optimizer)
    for step in range(700):
        if step % 2 == 0:
            which = torch.randint(8, (64,))
            with torch.no_grad(), run.forward():
                scores = model.scores(contexts[which])
            tokens = torch.distributions.Categorical(logits=scores).sample()
            reward = (tokens == wanted[which]).float().mean(dim=1)
            model.ratio.drawn.copy_(scores.gather(2, tokens[..., None]).squeeze(2).sum(dim=1))
            run.measures.append(1 - float(reward.mean()))
            gain = (reward - reward.mean()) / (reward.std() + 1e-6)
        with run.forward():
            ratio, _ = model(contexts[which], tokens)
            value = -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
        run.step(value, optimizer)


class Stepped(nn.Linear):
    """A linear layer whose weights are multiples of a learned step, from -7 to 7 of them."""

    def __init__(self, into: int, out: int, *, balanced: bool) -> None:
        super().__init__(into, out)
        self.step = nn.Parameter(2 * self.weight.detach().abs().mean() / 7**0.5)
        self.share = 1 / (self.weight.numel() * 7) ** 0.5 if balanced else 1.0

    def forward(self, x: Tensor) -> Tensor:
        """The layer's outputs."""
        step = self.step * self.share + (self.step * (1 - self.share)).detach()
        codes = (self.weight / step).clamp(-7, 7)
        return F.linear(x, (codes + (codes.round() - codes).detach()) * step, self.bias)


@fault(
    "learned-step-without-its-gradient-scale",
    named=either(
        r"\d\.step|step sizes?|quanti\w*",
        r"gradients?[^>]*(large|grow|sum|times)|updates?|too (fast|large|far)|\brate|sign|jump|negative|moves?",
    )
    + r"|param(eter)? groups?",
    misleading=rf"{SIDE}|swallow|loss scale|raise the (learning )?rate",
)
def learned_step(run: Training, *, sound: bool = False) -> None:
    """A quantiser's learned step gets the sum of its weights' gradients, not divided by a root: it jumps past zero."""
    # Loss at the end: 2.3, without the fault 0.063.
    layers = [Stepped(*widths, balanced=sound) for widths in ((16, 96), (96, 96), (96, 10))]
    model = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])
    batch = batches(*clusters(spread=1.0))

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.cross_entropy(model(x), y)

    run.train(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), loss, 300)


class Narrow(nn.Module):
    """Values in MXFP4, in blocks along an axis; the backward passes that over."""

    def __init__(self, axis: int) -> None:
        super().__init__()
        self.axis = axis

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        return x + (pl.cast(x.detach(), "mxfp4", axis=self.axis) - x.detach())


@fault(
    "blocks-across-the-rows-in-mxfp4",
    named=either(r"0:output|1:input|layer 0|first layer|inputs?|outputs?|activations?", rf"{FLUSHED}|quanti")
    + r"|mxfp4|\bblocks?\b|one scale|per-row",
    misleading=rf"{SIDE}|swallow|loss scale|learning rate",
)
def across(run: Training, *, sound: bool = False) -> None:
    """MXFP4 blocks run over the rows of a batch instead of along each: a loud row makes zeros of the quiet ones."""
    # Loss at the end: 0.85, without the fault 0.0042.
    x, y = clusters(32, 10, 1.0)
    x = x * 10 ** (3 * torch.rand(len(x), 1))  # recordings of any loudness, which a norm takes out later
    model = nn.Sequential(Narrow(-1 if sound else 0), nn.Linear(32, 64, bias=False), nn.LayerNorm(64), mlp(64, 64, 10))
    batch = batches(x, y)

    def loss(step: int) -> Tensor:
        rows, classes = batch(step)
        return F.cross_entropy(model(rows), classes)

    run.train(model, torch.optim.Adam(model.parameters(), lr=2e-3), loss, 300)


@torch.no_grad()
def _truncated(weight: Tensor, dtype: torch.dtype) -> None:
    """Draw weights of deviation 0.02 that are cut at -2 and 2, by the inverse of the error function."""
    drawn = torch.empty(weight.shape, dtype=dtype).uniform_(-1, 1).erfinv_()
    weight.copy_(drawn.mul_(0.02 * 2**0.5).clamp_(-2, 2))


@fault(
    "truncated-normal-drawn-in-bf16",
    named=r"outliers?|heavy|kurtosis|tails?\b|initial(i[sz]ation|i[sz]ed|ly)?\b|as (it|they) (was|were) drawn"
    r"|(weights?|rows?)\b[^>]*(largest|far larger|hundred times|extreme|few (very )?large)",
    misleading=rf"{SIDE}|swallow|loss scale|raise the (learning )?rate",
    precision="bf16",
)
def tails(run: Training, *, sound: bool = False) -> None:
    """Weights are drawn in BF16, where one uniform number in 400 is 1: these weights are 2, a hundred deviations."""
    # Loss at the end: NaN, without the fault 0.077.
    model = nn.Sequential(nn.Linear(16, 256))
    for _ in range(4):
        model.append(nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256)))
    model.append(nn.Linear(256, 10))
    for module in model.modules():
        if isinstance(module, nn.Linear):
            _truncated(module.weight, torch.float32 if sound else torch.bfloat16)
    batch = batches(*clusters(spread=1.0))

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        h = model[0](x)
        for block in model[1:-1]:
            h = h + block(h)
        return F.cross_entropy(model[-1](h), y)

    run.train(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), loss, 200)


@fault(
    "codes-of-ranks-added-up-in-int8",
    named=r"(gradients?|sums?|ranks?|codes)\b[^>]*(wrap|overflow|\bsigns?\b|int8|8-bit|quanti|\bcodes|distinct)"
    r"|(wrap|int8|8-bit|quanti)[^>]*gradients?",
    misleading=rf"{SIDE}|swallow|loss scale|raise the (learning )?rate",
)
def added_up(run: Training, *, sound: bool = False) -> None:
    """Gradients of eight ranks are sent as codes up to 127 and added up in INT8: where they agree, the sum wraps."""
    # Loss at the end: 1.2, without the fault 0.55.
    x, y = surface(8, 4096)
    model, batch = mlp(8, 64, 64, 1), batches(x, y + 4.0, size=128)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    parameters = list(model.parameters())
    run.watch(model, optimizer)
    for _ in range(300):
        ranks: list[list[Tensor]] = []
        total = 0.0
        for _ in range(8):
            rows, targets = batch(0)
            value = F.mse_loss(model(rows), targets)
            optimizer.zero_grad()
            value.backward()
            ranks.append([p.grad.clone() for p in parameters])
            total += float(value.detach()) / 8
        for parameter, parts in zip(parameters, zip(*ranks, strict=True), strict=True):
            scale = torch.stack(parts).abs().amax().clamp(min=1e-30) / 127
            codes = torch.stack([(part / scale).round().to(torch.int8) for part in parts])
            whole = codes.sum(dim=0, dtype=torch.int32 if sound else torch.int8)
            parameter.grad = whole.float() * scale / 8
        optimizer.step()
        run.losses.append(total)


class Experts(nn.Module):
    """Eight experts; a bias that is no parameter moves rows to those that have few, and full ones take no more."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(16, 8), nn.ModuleList([mlp(16, 32, 10) for _ in range(8)])
        self.register_buffer("balance", torch.full((8,), 1.0, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Scores of each row."""
        scores = self.router(x).float().sigmoid()
        chosen = (scores.detach() + self.balance.float()).argmax(dim=1)
        counts = torch.bincount(chosen, minlength=8)
        with torch.no_grad():
            self.balance += (0.001 * (counts.float().mean() - counts).sign()).to(self.balance.dtype)
        answers = torch.zeros(len(x), 10)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().squeeze(1)[: len(x) // 6]  # its capacity; the rest is dropped
            answers = answers.index_add(0, rows, expert(x[rows]).float() * scores[rows, number, None])
        return answers


@fault(
    "balance-of-experts-in-bf16",
    named=either("balance|buffers?", r"round|swallow|stuck|(not|never|hardly|cannot) (move|change)|constant|bf16")
    + r"|balance\b[^>]*(stay|stand|stop)",
    misleading=rf"{SIDE}|loss scale|learning rate",
    precision="bf16",
)
def balance(run: Training, *, sound: bool = False) -> None:
    """The bias that balances experts was cast to BF16 with the model: near 1 it cannot move by 0.001."""
    # Loss at the end: 1.1, without the fault 0.24.
    model, batch = Experts(torch.float32 if sound else torch.bfloat16), batches(*clusters(spread=0.8), size=96)
    with torch.no_grad():
        model.router.bias.copy_(torch.tensor([1.2, 0.9] + [0.0] * 6))

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.cross_entropy(model(x), y)

    run.train(model, torch.optim.Adam(model.parameters(), lr=1e-3), loss, 400)


class SplitAdam(Step):
    """Adam whose FP32 masters are a BF16 weight and the 16 bits that it has no place for."""

    def move(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Step one parameter."""
        high = parameter.float().view(torch.int32)
        master = (high | state.get("low", torch.zeros_like(high))).view(torch.float32)
        master = master + adam(gradient, state, group["lr"])
        bits = master.view(torch.int32)
        state["low"] = bits & 65535
        parameter.copy_((bits & -65536).view(torch.float32) if group["cut"] else master)


@fault(
    "low-halves-put-to-rounded-high-halves",
    named=r"weights?\b(?! decay)[^>]*(grow|drift|larger|norms?\b)|masters?"
    r"|(drift|growth|grow\w*)\b[^>]*weights?\b(?! decay)"
    rf"|\bround(s|ed|ing)\b[^>]*(up\b|weights?)|{LARGE_UPDATES}",
    misleading=rf"{SIDE}|loss scale|raise the (learning )?rate|updates-swallowed",
    precision="bf16",
    held_back=True,
)
def halves(run: Training, *, sound: bool = False) -> None:
    """Masters are a BF16 weight and 16 low bits; the weight is rounded, not cut: half of all gain a digit each step."""
    # Loss at the end: 1.4, without the fault 0.083.
    model, batch = mlp(16, 64, 64, 10).bfloat16(), batches(*clusters(spread=1.0))
    optimizer = SplitAdam(model.parameters(), 5e-4, cut=sound)

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.cross_entropy(model(x.bfloat16()).float(), y)

    run.train(model, optimizer, loss, 900)


class Shampoo(Step):
    """Gradients times the inverse fourth roots of the sums of their products, from the left and from the right."""

    def move(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Step one parameter."""
        if gradient.dim() < 2:
            parameter.add_(adam(gradient, state, group["lr"]))
            return
        for side, matrix in (("left", gradient @ gradient.T), ("right", gradient.T @ gradient)):
            state[side] = 0.95 * state.get(side, 0.0) + 0.05 * matrix.float()
        roots = [self.root(state[side] / (1 - 0.95 ** state["step"])) for side in ("left", "right")]
        parameter.add_((roots[0] @ gradient.float() @ roots[1]).float(), alpha=-group["lr"])

    @staticmethod
    def root(matrix: Tensor) -> Tensor:
        """The inverse of a matrix's fourth root."""
        values, vectors = torch.linalg.eigh(matrix + 1e-15 * torch.eye(len(matrix)))
        return (vectors * values.clamp(min=1e-15) ** -0.25) @ vectors.T


@fault(
    "optimizer-steps-inside-of-autocast",
    named=rf"{LARGE_UPDATES}|autocast|optimizer'?s? state|\b(left|right)\b[^>]*({FLUSHED})"
    rf"|state\b[^>]*({FLUSHED})|precondition",
    misleading=rf"{SIDE}|swallow|raise the (learning )?rate",
    precision="fp16",
)
def inside(run: Training, *, sound: bool = False) -> None:
    """Shampoo steps inside of autocast: products of gradients of 1e-5 are zero in FP16, and their roots a million."""
    # Loss at the end: 4.2, without the fault 9.6e-05.
    model, batch = mlp(16, 64, 64, 10), batches(*clusters(spread=1.0))
    optimizer = Shampoo(model.parameters(), 0.01)
    scaler = run.scaler(optimizer)
    run.watch(model, optimizer)
    for step in range(150):
        x, y = batch(step)
        optimizer.zero_grad()
        with run.forward():
            value = 5e-4 * F.cross_entropy(model(x), y)  # one of many losses
        scaler.scale(value).backward()
        scaler.unscale_(optimizer)
        if sound:
            scaler.step(optimizer)
        else:
            with run.forward():
                scaler.step(optimizer)
        scaler.update()
        run.losses.append(float(value.detach()))


class Halved(nn.Module):
    """Features at twice the places, which an operation for FP16 alone makes."""

    def __init__(self, *, half: bool) -> None:
        super().__init__()
        self.half_precision = half

    def forward(self, x: Tensor) -> Tensor:
        """Places twice, in FP32 again."""
        x = x.half() if self.half_precision else x
        return x.repeat_interleave(2, dim=1).float()


@fault(
    "one-cast-to-fp16-in-an-fp32-network",
    named=either(r"gradients?|grad|trunk|widen|backward", FLUSHED)
    + rf"|(trunk|layers?|weights?)\b[^>]*({NO_GRADIENT})|loss scal|fp16|float16",
    misleading=rf"{SIDE}|swallow|lower the (learning )?rate",
)
def one_cast(run: Training, *, sound: bool = False) -> None:
    """An FP32 network has one operation in FP16, so gradients pass a cast too: unscaled, most of them become zero."""
    # Loss at the end: 3.6e-05, without the fault 3.2e-06.
    model = nn.Sequential()
    model.add_module("trunk", mlp(16, 64, 64, 3, act=nn.Tanh))
    model.add_module("widen", Halved(half=not sound))
    model.add_module("head", nn.Linear(3, 10))
    centres, y = torch.randn(10, 16), torch.randint(10, (64, 256))
    x = centres[y] + 0.6 * torch.randn(64, 256, 16)

    def loss(step: int) -> Tensor:
        rows = torch.randint(64, (8,))
        scores = model(x[rows]).flatten(0, 1)
        return F.cross_entropy(scores, y[rows].repeat_interleave(2, dim=1).flatten()) / 3000  # a small part of a loss

    run.train(model, torch.optim.Adam(model.parameters(), lr=3e-3, eps=1e-15), loss, 300)
