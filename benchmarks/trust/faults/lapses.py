"""Lapses of every day in loops, losses, data and formats, by an author who had not read the rules.

With `sound` they are left out.
"""

from collections.abc import Iterable

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from benchmarks.trust.faults.oversights import SIDE, either
from benchmarks.trust.registry import fault
from benchmarks.trust.toys import batches, clusters, counting, mlp, surface, token_loss
from benchmarks.trust.training import Training

NAN = r"\bnan\b|non-?finite|\binf(inite|inity|inities)?\b"


@fault(
    "decay-added-to-scaled-gradients",
    named=r"weight decay|\bdecay|regulari[sz]|penalt|unscal|overfit|(weights?|parameters?|norms?)\b[^>]*\bgr[eo]w",
    misleading=f"{SIDE}|learning rate|swallow|rounding|in no optimizer",
    precision="fp16",
)
def hardly_decayed(run: Training, *, sound: bool = False) -> None:
    """A decay by hand is added to gradients that still have the loss scale, and divided by it: nothing is decayed."""
    model, (x, y) = mlp(16, 64, 64, 10), clusters(spread=1.5, count=2048)
    batch = batches(x[:256], y[:256])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = run.scaler(optimizer)
    run.watch(model, optimizer)
    for step in range(400):
        rows, classes = batch(step)
        with run.forward():
            loss = F.cross_entropy(model(rows).float(), classes)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if sound:
            scaler.unscale_(optimizer)
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p.grad.add_(p, alpha=0.02)
        scaler.step(optimizer)
        scaler.update()
        run.losses.append(float(loss.detach()))
        if step % 20 == 19:
            with torch.no_grad():
                run.measures.append(float(F.cross_entropy(model(x[256:]), y[256:])))


class Compensated(torch.optim.Optimizer):
    """Gradient descent of BF16 weights that keeps what rounding took from an update, for the next one."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float, *, returned: bool) -> None:
        super().__init__(params, {"lr": lr})
        self.returned = returned

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        """One update."""
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state.update(lost=torch.zeros_like(p))
                wanted = state["lost"].float() - group["lr"] * p.grad.float()
                before = p.float()
                p.copy_(before + wanted)
                done = p.float() - before
                state["lost"].copy_(wanted - done if self.returned else done - wanted)


@fault(
    "compensation-of-the-wrong-sign",
    named=r"compensat|kahan|(updates?|steps?)\b[^>]*(swallow|lost|smaller than|rounded away|below)"
    r"|(swallow|lost|rounded away)[^>]*\bupdates?",
    misleading=f"{SIDE}|lower the (learning )?rate|in no optimizer",
)
def taken_twice(run: Training, *, sound: bool = False) -> None:
    """What rounding to BF16 takes from an update is taken off the next one, not added: small updates are lost."""
    model, (x, y) = mlp(16, 64, 64, 10).bfloat16(), clusters(spread=1.0, count=512)
    x = x.bfloat16()

    def loss(step: int) -> Tensor:
        return F.cross_entropy(model(x).float(), y)

    run.train(model, Compensated(model.parameters(), 2e-2, returned=sound), loss, 500)


class AffineCodes(torch.optim.Optimizer):
    """Adam whose first moments are kept as one of 256 values from the lowest to the highest of a tensor."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float, *, zero: bool) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8})
        self.zero = zero

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
                mean = state["exp_avg"].lerp_(p.grad, 1 - first)
                square = state["exp_avg_sq"].mul_(second).addcmul_(p.grad, p.grad, value=1 - second)
                lowest = mean.amin().clamp(max=0)
                code = ((mean.amax().clamp(min=0) - lowest) / 255).clamp(min=1e-30)
                if self.zero:
                    lowest = (lowest / code).round() * code
                mean.copy_(((mean - lowest) / code).round() * code + lowest)
                root = (square / (1 - second ** state["step"])).sqrt() + group["eps"]
                p.sub_(group["lr"] / (1 - first ** state["step"]) * mean / root)


@fault(
    "codes-without-a-zero",
    named=r"8[- ]bit|int8|quanti[sz]|\bcodes\b|first[ -]moments?|exp_avg\b|zero[- ]?point"
    r"|(no|zero|without|vanishing) gradients?\b[^>]*(mov|chang|update|updating|grow|drift)"
    r"|(mov|chang|update|updating|grow|drift)[^>]*(no|zero|without) gradients?",
    misleading=f"{SIDE}|swallow|second[ -]moment|learning rate|in no optimizer",
)
def no_zero(run: Training, *, sound: bool = False) -> None:
    """No 8-bit code of Adam's first moments is 0: rows without a gradient move, divided by epsilon, until they come."""
    model = nn.Sequential(nn.Embedding(64, 16), nn.Flatten(), mlp(32, 64, 64))
    (x, y), (others, later) = counting(length=2), counting(64, length=2)
    few, many = batches(x, y[:, 1]), batches(others, later[:, 1])

    def loss(step: int) -> Tensor:
        x, y = few(step) if step < 120 else many(step)
        return F.cross_entropy(model(x), y)

    run.train(model, AffineCodes(model.parameters(), 3e-3, zero=sound), loss, 260)


class LinearAttention(nn.Module):
    """Attention by ReLU in FP16, which adds up keys times values, or takes their mean, before the queries read them."""

    def __init__(self, *, mean: bool) -> None:
        super().__init__()
        self.mean = mean
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        q, k, v = self.qkv(x).half().chunk(3, dim=-1)
        q, k = q.relu(), k.relu()
        if self.mean:
            k = k / x.shape[1]
        read = q @ (k.transpose(1, 2) @ v)
        return self.out((read / (q @ k.sum(dim=1)[:, :, None] + 1e-6)).to(x.dtype))


@fault(
    "sums-of-linear-attention-in-fp16",
    named=rf"{either('attention[01]?', f'{NAN}|overflow|range|exceed|large')}|65,?504"
    r"|(sums?|activations?|forward)\b[^>]*overflow|overflow[^>]*(sums?|activations?|forward)",
    misleading=f"{SIDE}|learning rate|swallow|in no optimizer",
    precision="fp16",
)
def long_sums(run: Training, *, sound: bool = False) -> None:
    """Keys times values are summed over 256 places in FP16, then read by queries: once they grow, Inf over Inf."""
    model = nn.Sequential()
    model.add_module("stem", nn.Linear(8, 32))
    model.add_module("attention0", LinearAttention(mean=sound))
    model.add_module("rest", mlp(32, 64, 1))
    x = torch.randn(256, 256, 8)
    y = x[..., :1].square().mean(dim=1) + x[..., 1:2].amax(dim=1)
    batch = batches(5 * x, y, size=8)

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.mse_loss(model(x).float().mean(dim=1), y)

    run.train(model, torch.optim.Adam(model.parameters(), lr=3e-3), loss, 200)


class Kept(nn.Linear):
    """A linear layer that multiplies by an E4M3 copy of its weights, which `refresh` makes."""

    copied: Tensor

    def __init__(self, into: int, out: int) -> None:
        super().__init__(into, out)
        self.register_buffer("copied", torch.zeros(out, into))
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Round the weights, by a scale from their largest."""
        scale = 448 / self.weight.abs().amax()
        self.copied.copy_((self.weight * scale).to(torch.float8_e4m3fn).float() / scale)

    def forward(self, x: Tensor) -> Tensor:
        """The layer's outputs; gradients pass to the weights."""
        return F.linear(x, self.weight + (self.copied - self.weight).detach(), self.bias)


@fault(
    "fp8-weights-refreshed-once-an-epoch",
    named=r"stale|\bcached?\b|refresh|\b(old|earlier|previous|outdated) (weights|copy|copies|values)"
    r"|\bcopied\b|copy of|(loss|outputs?|buffers?)\b[^>]*(every \d+ steps|period|at once|in leaps|sawtooth)",
    misleading=f"{SIDE}|swallow|rounding|in no optimizer|learning rate",
    held_back=True,
)
def old_copies(run: Training, *, sound: bool = False) -> None:
    """E4M3 copies of weights are made once in 32 batches, not after each step: updates repeat what they did already."""
    layers = [Kept(16, 64), Kept(64, 64), Kept(64, 10)]
    model = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])
    batch = batches(*clusters(spread=1.0))

    def refresh(step: int) -> None:
        if sound or step % 32 == 31:
            for layer in layers:
                layer.refresh()

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.cross_entropy(model(x), y)

    run.train(model, torch.optim.Adam(model.parameters(), lr=3e-3), loss, 320, after=refresh)


@fault(
    "cleared-between-backward-and-step",
    named=r"zero_grad|clear(s|ed|ing)?\b|set_to_none|gradients?\b[^>]*\b(gone|none|missing|lost|before the step)"
    r"|(no|without|missing) gradients?"
    r"|(weights?|parameters?)\b[^>]*\b(never|not|no longer|do not|stay)\b[^>]*(mov|chang|update|updating|train)"
    r"|(no|none of the) (weights?|parameters?)\b[^>]*(mov|chang|update|updating|train)",
    misleading=f"{SIDE}|learning rate|swallow|rounding|in no optimizer",
    held_back=True,
)
def cleared_too_soon(run: Training, *, sound: bool = False) -> None:
    """Gradients are cleared after the backward instead of before: the step finds none, and nothing ever moves."""
    model, batch = mlp(16, 64, 64, 10), batches(*clusters(spread=1.0))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    run.watch(model, optimizer)
    for step in range(200):
        x, y = batch(step)
        loss = F.cross_entropy(model(x), y)
        if sound:
            optimizer.zero_grad()
        loss.backward()
        if not sound:
            optimizer.zero_grad()
        optimizer.step()
        run.losses.append(float(loss.detach()))


@fault(
    "relu-after-the-last-layer",
    named=either(
        "head|out|outputs?|last|final|predictions?",
        r"ReLU|negative|non-?negative|below (0|zero)|\bdead\b|(are|is|all|exactly|of them) (0|zeros?)\b|zeros\b",
    ),
    misleading="raise the loss scale|scale-low|learning rate|swallow|rounding|in no optimizer",
)
def never_negative(run: Training, *, sound: bool = False) -> None:
    """A regression ends with a ReLU, and half of its targets are negative: it can answer them with zero only."""
    model = nn.Sequential()
    model.add_module("net", mlp(8, 64, 64, act=nn.Tanh))
    model.add_module("head", nn.Linear(64, 1))
    model.add_module("out", nn.Identity() if sound else nn.ReLU())
    batch = batches(*surface())

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.mse_loss(model(x), y)

    run.train(model, torch.optim.Adam(model.parameters(), lr=5e-3), loss, 250)


class Reader(nn.Module):
    """Tokens in, scores of the next ones out; the later places' scores are filled with a number."""

    def __init__(self, fill: float) -> None:
        super().__init__()
        self.fill = fill
        self.tokens, self.positions = nn.Embedding(32, 64), nn.Embedding(16, 64)
        self.qkv, self.softmax, self.out = nn.Linear(64, 192), nn.Softmax(dim=-1), nn.Linear(64, 64)
        self.norm, self.head = nn.LayerNorm(64), mlp(64, 128, 32)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of each place."""
        h = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        q, k, v = self.qkv(h).chunk(3, dim=-1)
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        weights = self.softmax((q @ k.transpose(1, 2) / 8).masked_fill(later, self.fill))
        return self.head(self.norm(h + self.out(weights @ v)))


def _chain(length: int = 8, count: int = 1024) -> tuple[Tensor, Tensor]:
    """Sequences that count on in 7 of 10 places and draw a token in the others, and the same one token later."""
    tokens = torch.randint(32, (count, length + 1))
    counted = torch.rand(count, length) < 0.7
    for i in range(length):
        tokens[:, i + 1] = torch.where(counted[:, i], (tokens[:, i] + 1) % 32, tokens[:, i + 1])
    return tokens[:, :-1], tokens[:, 1:]


@fault(
    "mask-filled-with-almost-zero",
    named=r"\bleak|future|causal|\bmask|masked|(later|next) (places|positions|tokens)"
    r"|loss [^>]*(too (low|good|easy|fast)|perfect|below (chance|the entropy))"
    rf"|{either('softmax|attention', 'uniform|spread|flat|evenly|equal')}",
    misleading=f"{SIDE}|learning rate|swallow|rounding|in no optimizer",
    held_back=True,
)
def peeking(run: Training, *, sound: bool = False) -> None:
    """Scores of later places are filled with 1e-9, not -1e9: the softmax reads them, and no prefix is enough."""
    model, batch = Reader(-1e9 if sound else 1e-9), batches(*_chain())
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        if step % 10 == 0:
            with torch.no_grad():
                alone = torch.stack([model(x[:, :n])[:, -1] for n in range(1, 9)], dim=1)
                run.measures.append(float(F.cross_entropy(alone.flatten(0, 1), y.flatten())))
        return token_loss(model, x, y)

    run.train(model, optimizer, loss, 250)


@fault(
    "sorted-by-class-and-not-shuffled",
    named=r"shuffl|\bsorted\b|(one|same|single) (class|label)|class(es)? (after|by|at a time)|period"
    r"|\bcycl|oscillat|swing|sawtooth|forget|(batch|batches|data)\b[^>]*(differ|order|alike|not (random|mixed))",
    misleading=f"{SIDE}|swallow|rounding|in no optimizer|lower the (learning )?rate|rate (is |was )?too high",
)
def in_order(run: Training, *, sound: bool = False) -> None:
    """Rows are sorted by class and read in that order: each class is learned in turn, and forgotten in the next."""
    model, (x, y) = mlp(16, 64, 64, 10), clusters(spread=1.0)
    order = y.argsort()

    def loss(step: int) -> Tensor:
        if step % 10 == 0:
            with torch.no_grad():
                run.measures.append(float(F.cross_entropy(model(x), y)))
        if step % 32 == 0 and sound:
            order.copy_(torch.randperm(len(y)))
        chosen = order[32 * (step % 32) :][:32]
        return F.cross_entropy(model(x[chosen]), y[chosen])

    run.train(model, torch.optim.Adam(model.parameters(), lr=3e-3), loss, 320)


class Listed(nn.Module):
    """Three hidden layers, in a list of modules or in one of Python's, and a head."""

    def __init__(self, *, registered: bool) -> None:
        super().__init__()
        layers = [nn.Linear(width, 64) for width in (8, 64, 64)]
        self.layers = nn.ModuleList(layers) if registered else layers
        self.head = nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        """One number a row."""
        for layer in self.layers:
            x = layer(x).tanh()
        return self.head(x)


@fault(
    "layers-in-a-plain-list",
    named=r"ModuleList|register|registration|plain list|python list|in no optimizer"
    r"|not (part of|in|among|of) the (model|optimizer)"
    r"|(parameters?|weights?|layers?)\b[^>]*(outside|unknown|not (watched|seen|held|found|known|listed))",
    misleading=f"{SIDE}|learning rate|swallow|rounding",
)
def unregistered(run: Training, *, sound: bool = False) -> None:
    """Layers are kept in a list of Python's: they are no parameters of the model, and stay as they were drawn."""
    model, batch = Listed(registered=sound), batches(*surface(noise=0.05))

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.mse_loss(model(x), y)

    run.train(model, torch.optim.Adam(model.parameters(), lr=3e-3), loss, 300)


@fault(
    "divergence-of-probabilities",
    named=r"\bkl[-_ ]?div|\bKL\b|log[- ]?(prob|softmax)|logarithm|probability|probabilities|softmax|one[- ]hot|saturat"
    r"|loss\b[^>]*(negative|below (0|zero)|falls? below)|without (a )?bound|unbounded",
    misleading=f"{SIDE}|learning rate|swallow|rounding|in no optimizer",
)
def no_logarithm(run: Training, *, sound: bool = False) -> None:
    """`kl_div` gets probabilities, not their logarithms: the likeliest class takes all, the loss is negative."""
    teacher, student = mlp(16, 32, 10).requires_grad_(False), mlp(16, 64, 10)
    batch = batches(2 * torch.randn(1024, 16))

    def loss(step: int) -> Tensor:
        (x,) = batch(step)
        wanted, scores = (4 * teacher(x)).softmax(dim=1), student(x)
        run.measures.append(float(F.kl_div(scores.detach().log_softmax(dim=1), wanted, reduction="batchmean")))
        given = scores.log_softmax(dim=1) if sound else scores.softmax(dim=1)
        return F.kl_div(given, wanted, reduction="batchmean")

    run.train(student, torch.optim.Adam(student.parameters(), lr=3e-3), loss, 300)


@fault(
    "frozen-norms-keep-counting",
    named=r"running[ _](mean|var|statistic)|statistics|\bbuffers?\b|batch[- ]?norm|eval(uation)? mode|\.eval\("
    r"|(frozen|freeze|freezing)[^>]*(mov|chang|follow|still|drift)",
    misleading=f"{SIDE}|learning rate|swallow|rounding|in no optimizer|unfreez",
)
def still_counting(run: Training, *, sound: bool = False) -> None:
    """A frozen trunk stays in training mode: its batch norms follow the new data, and the old head is lost."""
    trunk = nn.Sequential()
    for i in range(2):
        trunk.add_module(f"linear{i}", nn.Linear((16, 64)[i], 64))
        trunk.add_module(f"norm{i}", nn.BatchNorm1d(64))
        trunk.add_module(f"act{i}", nn.ReLU())
    heads = nn.ModuleDict({"old": nn.Linear(64, 10), "new": nn.Linear(64, 10)})
    model = nn.ModuleDict({"trunk": trunk, "heads": heads})
    (x, y), (others, classes) = clusters(spread=1.0), clusters(spread=1.0)
    old, new = batches(x, y), batches(3 * others + 4, classes)
    optimizer = torch.optim.Adam([*trunk.parameters(), *heads["old"].parameters()], lr=3e-3)
    for step in range(150):
        x, y = old(step)
        optimizer.zero_grad()
        F.cross_entropy(heads["old"](trunk(x)), y).backward()
        optimizer.step()
    trunk.requires_grad_(False)
    heads["old"].requires_grad_(False)
    if sound:
        trunk.eval()
    optimizer = torch.optim.Adam(heads["new"].parameters(), lr=3e-3)
    run.watch(model, optimizer)
    for step in range(250):
        x, y = new(step)
        loss = F.cross_entropy(heads["new"](trunk(x)), y)
        run.step(loss, optimizer)
        if step % 10 == 9:
            mode = trunk.training
            trunk.eval()
            with torch.no_grad():
                x, y = old(step)
                run.measures.append(float(F.cross_entropy(heads["old"](trunk(x)), y)))
            trunk.train(mode)


class InFourBits(torch.autograd.Function):
    """Values as they are; their gradients in E2M1 with a scale from the largest, to nearest or by chance."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, chance: bool) -> Tensor:
        """The same values."""
        ctx.chance = chance
        return x.clone()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor, None]:
        """The rounded gradient."""
        scale = 6 / gradient.abs().amax().clamp(min=1e-30)
        size = (gradient * scale).abs()
        step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))  # between neighbours of E2M1
        draw = torch.rand_like(size) if ctx.chance else 0.5
        return ((size / step + draw).floor() * step).copysign(gradient) / scale, None


class FourBitLinear(nn.Linear):
    """A linear layer whose output's gradient is in E2M1."""

    def __init__(self, into: int, out: int, *, chance: bool) -> None:
        super().__init__(into, out)
        self.chance = chance

    def forward(self, x: Tensor) -> Tensor:
        """The layer's outputs."""
        return InFourBits.apply(super().forward(x), self.chance)


@fault(
    "fp4-gradients-rounded-to-nearest",
    named=r"stochastic|to nearest|\bfp4|e2m1|4[- ]bit|few (codes|values|distinct)"
    r"|gradients?\b[^>]*(\bzeros?\b|underflow|flush|rounded|\blost\b)"
    r"|(underflow|flush|rounded (to zero|away))[^>]*gradients?",
    misleading=f"{SIDE}|learning rate|swallow|in no optimizer",
)
def to_nearest(run: Training, *, sound: bool = False) -> None:
    """Gradients are rounded to E2M1 to nearest, not by chance: no rare token's score is ever pushed down."""
    model = nn.Sequential(nn.Embedding(64, 64), FourBitLinear(64, 128, chance=sound), nn.ReLU())
    model.add_module("head", FourBitLinear(128, 64, chance=sound))
    x, others = torch.randint(64, (8192,)), torch.randint(64, (8192,))
    y = torch.where(torch.rand(8192) < 0.6, (x + 1) % 64, others)
    batch = batches(x, y, size=128)

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.cross_entropy(model(x), y)

    run.train(model, torch.optim.Adam(model.parameters(), lr=3e-3), loss, 400)


@fault(
    "noise-added-in-place",
    named=r"in[- ]place|augment|distribution"
    r"|\b(data|data ?set|inputs?|rows|features|examples)\b[^>]*"
    r"(gr[eo]w|larger|drift|ris(e|ing)\b|shift|noise|widen|spread)"
    r"|(gr[eo]w|larger|drift|ris(e|ing)\b|widen|spread)[^>]*\b(data|data ?set|inputs?|batches|features|examples)\b",
    misleading=f"{SIDE}|lower the (learning )?rate|rate (is |was )?too high|swallow|rounding|in no optimizer",
    held_back=True,
)
def piled_noise(run: Training, *, sound: bool = False) -> None:
    """Noise is added in place to slices of the data: each epoch it comes on top of the last one's, for good."""
    model, (x, y) = mlp(16, 64, 64, 10), clusters(count=1024)
    rows, classes, others, theirs = x[:512].clone(), y[:512], x[512:].clone(), y[512:]

    def loss(step: int) -> Tensor:
        if step % 10 == 0:
            with torch.no_grad():
                run.measures.append(float(F.cross_entropy(model(others), theirs)))
        part = slice(32 * (step % 16), 32 * (step % 16) + 32)
        seen = rows[part].clone() if sound else rows[part]
        seen += 0.4 * torch.randn_like(seen)
        return F.cross_entropy(model(seen), classes[part])

    run.train(model, torch.optim.Adam(model.parameters(), lr=3e-3), loss, 640)


class Summary(nn.Module):
    """Tokens in, scores of the whole sequence out, which are read from a place before the tokens."""

    def __init__(self, *, rows_first: bool) -> None:
        super().__init__()
        self.first, self.tokens, self.positions = nn.Embedding(1, 32), nn.Embedding(32, 32), nn.Embedding(16, 32)
        self.blocks = nn.Sequential(
            *(nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=rows_first) for _ in range(2))
        )
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of each row."""
        first = self.first(torch.zeros(len(x), 1, dtype=torch.long))
        h = torch.cat([first, self.tokens(x)], dim=1)
        return self.head(self.blocks(h + self.positions(torch.arange(h.shape[1])))[:, 0])


@fault(
    "attention-across-the-batch",
    named=r"batch_first|\b(across|between|over) (the )?(batch|rows|examples)\b|do(es)? not depend"
    r"|\b(rows|examples|outputs)\b[^>]*(alike|identical|the same for)"
    r"|"
    + either(
        "tokens|embedding", r"\b(no|zero|without|never gets?) (a |any )?gradients?|not used|unused|detach|cut off"
    ),
    misleading=r"\bReLU|raise the loss scale|scale-low|learning rate|swallow|rounding|in no optimizer",
    held_back=True,
)
def across_rows(run: Training, *, sound: bool = False) -> None:
    """Encoder layers take the batch for the sequence, as is torch's default: no row's tokens reach its answer."""
    y = torch.randint(10, (2048,))
    x = torch.randint(10, 32, (2048, 9))
    x[torch.arange(2048), torch.randint(9, (2048,))] = y
    model, batch = Summary(rows_first=sound), batches(x, y)

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.cross_entropy(model(x), y)

    run.train(model, torch.optim.Adam(model.parameters(), lr=2e-3), loss, 300)
