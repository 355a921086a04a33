"""Oversights of formats, loops and losses, by an author who had not read the rules. With `sound` they are left out."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from benchmarks.trust.registry import fault
from benchmarks.trust.toys import batches, clusters, counting, mlp, surface
from benchmarks.trust.training import Training

SIDE = "dead-layer|ReLU|raise the loss scale|scale-low"
FEW = (
    r"round|codes|distinct|digits|spacing|identical"
    r"|(one|same|equal|constant) (value|number)|(is|are|stays?) (constant|(exactly |all )?(1|one)\b)"
)


def either(place: str, what: str) -> str:
    """A pattern of findings that say something of a place, in either order."""
    return rf"\b({place})\b[^>]*({what})|({what})[^>]*\b({place})\b"


class Noising(nn.Module):
    """How much of a point is left after each step of noise: the product of the shares that each step leaves."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("left", (1 - torch.linspace(1e-4, 1.6e-3, 3000, dtype=dtype)).cumprod(0))

    def forward(self, t: Tensor) -> Tensor:
        """The share of each row."""
        return self.left[t, None].float()


class Denoiser(nn.Module):
    """Points and noise in, the noise that is predicted out."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.noising, self.net = Noising(dtype), mlp(9, 96, 96, 8, act=nn.SiLU)

    def forward(self, x: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """The prediction."""
        left = self.noising(t)
        return self.net(torch.cat([left.sqrt() * x + (1 - left).sqrt() * noise, t[:, None] / 3000], dim=1))


@fault(
    "noise-schedule-in-bf16",
    named=either("noising|noise", FEW),
    misleading=f"{SIDE}|learning rate",
    precision="bf16",
    held_back=True,
)
def noiseless(run: Training, *, sound: bool = False) -> None:
    """A diffusion's schedule is computed in BF16: all shares 1 - 0.001 are 1 there, so no noise is ever added."""
    model, batch = Denoiser(torch.float32 if sound else torch.bfloat16), batches(clusters(8, 4, 0.1)[0], size=64)

    def loss(step: int) -> Tensor:
        (x,) = batch(step)
        noise, t = torch.randn_like(x), torch.randint(3000, (len(x),))
        return F.mse_loss(model(x, noise, t).float(), noise)

    run.train(model, torch.optim.Adam(model.parameters(), lr=3e-3), loss, 300)


class Clock(nn.Module):
    """Where a time in seconds lies in its minute and its day."""

    def __init__(self, origin: int) -> None:
        super().__init__()
        self.origin = origin

    def forward(self, seconds: Tensor) -> Tensor:
        """Four numbers a row."""
        turns = (seconds - self.origin).float()[:, None] / torch.tensor([60.0, 86400.0])
        return torch.cat([(2 * torch.pi * turns).sin(), (2 * torch.pi * turns).cos()], dim=1)


@fault(
    "timestamps-in-fp32",
    named=either("clock|inputs?|seconds|timestamps?", FEW),
    misleading=f"{SIDE}|learning rate",
)
def timestamps(run: Training, *, sound: bool = False) -> None:
    """Seconds since 1970 are made FP32 numbers, which lie 128 apart there: the place in the minute is lost."""
    begin = 1_700_000_000
    model = nn.Sequential()
    model.add_module("clock", Clock(begin if sound else 0))
    model.add_module("net", mlp(4, 64, 64, 1))

    def loss(step: int) -> Tensor:
        seconds = torch.randint(86400, (32,))
        y = (2 * torch.pi * (seconds[:, None] % 60) / 60 + 1).sin()
        return F.mse_loss(model(begin + seconds), y)

    run.train(model, torch.optim.Adam(model.parameters(), lr=3e-3), loss, 250)


@fault(
    "masters-older-than-the-checkpoint",
    named=r"master|(resum|(re)?load(ed|ing)\b)[^.]*(weights?|state|optimizer)"
    r"|(weights?|parameters?|updates?)[^>]*(jump|reset|replaced|overwritten|thrown|leap|at once"
    r"|(far|much|times) (too )?(larger?|more))",
    misleading=f"{SIDE}|learning rate|swallow|rounding",
    precision="bf16",
)
def stale_masters(run: Training, *, sound: bool = False) -> None:
    """A BF16 model is resumed, its FP32 masters are those of its start: the next step writes them over the model."""
    model, batch = mlp(16, 64, 64, 10).bfloat16(), batches(*clusters(spread=1.0))
    masters = [nn.Parameter(p.detach().float()) for p in model.parameters()]
    begun = [master.detach().clone() for master in masters]
    optimizer = torch.optim.Adam(masters, lr=4e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.02, 1 - step / 160))
    run.watch(model, optimizer)
    for step in range(240):
        if step == 165:
            for master, old, p in zip(masters, begun, model.parameters(), strict=True):
                master.data.copy_(p.detach() if sound else old)
        x, y = batch(step)
        loss = F.cross_entropy(model(x.bfloat16()).float(), y)
        model.zero_grad()
        loss.backward()
        for p, master in zip(model.parameters(), masters, strict=True):
            master.grad = p.grad.float()
        optimizer.step()
        scheduler.step()
        with torch.no_grad():
            for p, master in zip(model.parameters(), masters, strict=True):
                p.copy_(master)
        run.losses.append(float(loss.detach()))


class ShortGradient(torch.autograd.Function):
    """Values as they are; their gradients go through E5M2, multiplied by a scale or, wrongly, divided by it."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, divided: bool) -> Tensor:
        """The same values."""
        ctx.divided = divided
        return x.clone()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor, None]:
        """The rounded gradient."""
        scale = 57344 / gradient.abs().amax().clamp(min=1e-12)
        if ctx.divided:
            scale = 1 / scale
        return (gradient * scale).to(torch.float8_e5m2).float() / scale, None


class ShortLinear(nn.Linear):
    """A linear layer whose output's gradient is in E5M2."""

    def __init__(self, into: int, out: int, *, divided: bool) -> None:
        super().__init__(into, out)
        self.divided = divided

    def forward(self, x: Tensor) -> Tensor:
        """The layer's outputs."""
        return ShortGradient.apply(super().forward(x), self.divided)


@fault(
    "gradient-scale-upside-down",
    named=r"underflow|flush|\bfp8\b|e5m2|" + either(r"short\d", r"\bzeros?\b|no gradient"),
    misleading=f"{SIDE}|learning rate|in no optimizer",
)
def upside_down(run: Training, *, sound: bool = False) -> None:
    """Gradients are divided by their scale on the way into E5M2 instead of multiplied: all of them become zero."""
    model = nn.Sequential()
    for i, width in enumerate((3, 32, 32)):
        model.add_module(f"short{i}", ShortLinear(width, 32, divided=not sound))
        model.add_module(f"act{i}", nn.Tanh())
    model.add_module("head", nn.Linear(32, 1))
    batch = batches(*surface(3))

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.mse_loss(model(x), y)

    run.train(model, torch.optim.Adam(model.parameters(), lr=5e-3), loss, 300)


@fault(
    "penalty-of-scaled-gradients",
    named=r"penalt|scaled gradients?|gradients? [^.>]*(still|are|were) scaled|depends? on the (loss )?scale",
    misleading=f"{SIDE}|learning rate",
    precision="fp16",
)
def scaled_penalty(run: Training, *, sound: bool = False) -> None:
    """A penalty is of gradients that still have the loss scale: it outweighs the loss until the scale has collapsed."""
    model, batch = mlp(16, 64, 64, 10, act=nn.Tanh), batches(*clusters())
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    scaler = run.scaler(optimizer)
    run.watch(model, optimizer)
    for step in range(200):
        x, y = batch(step)
        x.requires_grad_()
        with run.forward():
            loss = F.cross_entropy(model(x).float(), y)
        (slope,) = torch.autograd.grad(scaler.scale(loss) * len(x), x, create_graph=True)
        if sound:
            slope = slope / scaler.get_scale()
        total = loss + 0.1 * slope.square().sum(dim=1).mean()
        optimizer.zero_grad()
        scaler.scale(total).backward()
        scaler.step(optimizer)
        scaler.update()
        run.losses.append(float(loss.detach()))


@fault(
    "two-scalers-for-one-trunk",
    named=r"(two|both|several|different|another|other|wrong) (loss )?(scalers?|scales)\b"
    r"|scalers? [^>]*(differ|disagree)|unscaled? [^.>]*(wrong|twice|another|other|too (often|much))"
    r"|256 times (too )?(small|less)",
    misleading=f"{SIDE}|learning rate|swallow",
    precision="fp16",
)
def two_scalers(run: Training, *, sound: bool = False) -> None:
    """Two losses of a trunk are scaled by a scaler each, one unscales it: one loss counts 256 times too little."""
    model = nn.ModuleDict({"trunk": mlp(16, 32, 32), "decoder": mlp(32, 16), "head": mlp(32, 10)})
    trunk = torch.optim.SGD([*model["trunk"].parameters(), *model["decoder"].parameters()], lr=0.02, momentum=0.9)
    head = torch.optim.SGD(model["head"].parameters(), lr=0.02, momentum=0.9)
    scaler = run.scaler(trunk)
    other = scaler if sound else run.scaler(head, init_scale=256.0)
    run.watch(model, [trunk, head])
    batch = batches(*clusters(spread=1.0))
    for step in range(300):
        x, y = batch(step)
        with run.forward():
            h = model["trunk"](x).tanh()
            again = 0.1 * F.mse_loss(model["decoder"](h).float(), x)
            loss = F.cross_entropy(model["head"](h).float(), y)
        trunk.zero_grad()
        head.zero_grad()
        scaler.scale(again).backward(retain_graph=True)
        other.scale(loss).backward()
        scaler.step(trunk)
        other.step(head)
        scaler.update()
        if not sound:
            other.update()
        run.losses.append(float(loss.detach()))


class Fading(nn.Module):
    """How much each of four heads keeps of what it met some places before."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("factor", (1 - 2.0 ** -torch.arange(9.5, 13.5)).to(dtype))

    def forward(self, lag: Tensor) -> Tensor:
        """A number for each lag and head."""
        return self.factor.float() ** lag[:, None]


class Retention(nn.Module):
    """A sequence in, for each of four heads its decaying sum, and one number from these."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.fading, self.net = Fading(dtype), mlp(4, 64, 1, act=nn.Tanh)

    def forward(self, x: Tensor) -> Tensor:
        """One number a row."""
        return self.net(x @ self.fading(torch.arange(x.shape[1]).flip(0)) / x.shape[1] ** 0.5)


@fault(
    "decays-near-one-in-bf16",
    named=either("fading|decays", FEW),
    misleading=f"{SIDE}|learning rate|weight decay",
    precision="bf16",
    held_back=True,
)
def never_forgets(run: Training, *, sound: bool = False) -> None:
    """Decays of 0.999 and more of a retention are kept in BF16, where they are 1: no head ever forgets."""
    model = Retention(torch.float32 if sound else torch.bfloat16)
    recent = torch.exp(-torch.arange(4096.0).flip(0)[:, None] / 1024) / 1024**0.5

    def loss(step: int) -> Tensor:
        x = torch.randn(32, 4096)
        return F.mse_loss(model(x).float(), x @ recent)

    run.train(model, torch.optim.Adam(model.parameters(), lr=5e-3), loss, 200)


class Likelihood(nn.Module):
    """The logarithm of a sequence's probability: of a product, or as a sum of logarithms."""

    def __init__(self, *, logarithms: bool) -> None:
        super().__init__()
        self.logarithms = logarithms

    def forward(self, logits: Tensor, y: Tensor) -> Tensor:
        """One number a row."""
        if self.logarithms:
            return logits.log_softmax(-1).gather(-1, y[..., None]).squeeze(-1).sum(dim=1)
        return (logits.softmax(-1).gather(-1, y[..., None]).squeeze(-1).prod(dim=1) + 1e-30).log()


class Scored(nn.Module):
    """A language model and the likelihood of what it is given."""

    def __init__(self, *, logarithms: bool) -> None:
        super().__init__()
        self.tokens, self.net = nn.Embedding(32, 32), mlp(32, 64, 32)
        self.likelihood = Likelihood(logarithms=logarithms)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """One number a row."""
        return self.likelihood(self.net(self.tokens(x)), y)


@fault(
    "likelihood-as-a-product",
    named=rf"underflow|{either('likelihood', 'zeros?|flush|subnormal|smallest|constant|same value|distinct')}",
    misleading=f"{SIDE}|learning rate|in no optimizer",
)
def product(run: Training, *, sound: bool = False) -> None:
    """The probabilities of 32 tokens are multiplied before the logarithm: the product is zero in FP32."""
    model, batch = Scored(logarithms=sound), batches(*counting(length=32))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    run.train(model, optimizer, lambda step: -model(*batch(step)).mean() / 32, 250)


@fault(
    "sigmoid-is-one-in-bf16",
    named=either("probability|sigmoid", rf"{FEW}|saturat|exactly 1"),
    misleading=f"{SIDE}|learning rate",
    precision="bf16",
)
def certain(run: Training, *, sound: bool = False) -> None:
    """The last bias begins at a prior of 0.999, and the sigmoid in BF16 makes it 1, which has no gradient."""
    model = nn.Sequential()
    model.add_module("net", mlp(16, 64, 64, 1))
    nn.init.constant_(model.net[-1].bias, 6.9)
    if not sound:
        model.add_module("probability", nn.Sigmoid())
    x, y = clusters(classes=6)
    batch = batches(x, (y > 0).float()[:, None])

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        h = model(x).float()
        if sound:
            return F.binary_cross_entropy_with_logits(h, y)
        with torch.autocast("cpu", enabled=False):
            return F.binary_cross_entropy(h, y)

    run.train(model, torch.optim.Adam(model.parameters(), lr=1e-3), loss, 200)


@fault(
    "stop-gradient-forgotten",
    named=r"collapse|collapsing"
    r"|(outputs?|rows?|values?|vectors?|embeddings?)[^>]*(constant|identical|equal|the same|distinct)"
    r"|(effective|stable|low|full) rank|(do|does) not (vary|depend)|(same|one) (output|direction)",
    misleading=f"{SIDE}|learning rate|scale-collapse",
)
def collapsed(run: Training, *, sound: bool = False) -> None:
    """Two views are pulled together, and neither is detached: all rows become one vector, and the loss is perfect."""
    encoder = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 16))
    predictor = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16))
    model = nn.ModuleDict({"encoder": encoder, "predictor": predictor})
    x, _ = clusters(spread=0.3)
    batch = batches(x, size=64)

    def loss(step: int) -> Tensor:
        (x,) = batch(step)
        one, other = (encoder(x + 0.3 * torch.randn_like(x)) for _ in range(2))
        total = torch.zeros(())
        for a, b in ((one, other), (other, one)):
            total = total + (1 - F.cosine_similarity(predictor(a), b.detach() if sound else b)).mean() / 2
        return total

    run.train(model, torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9), loss, 300)
    with torch.no_grad():
        z = F.normalize(encoder.eval()(x), dim=1)
    run.measures.append(float(z.std(dim=0).norm()))


class Reader(nn.Module):
    """A sequence is read by one query, which attends to what the mask lets it see."""

    def __init__(self, *, shows: bool) -> None:
        super().__init__()
        self.shows = shows
        self.tokens, self.query = nn.Embedding(17, 32, padding_idx=0), nn.Parameter(torch.randn(1, 32))
        self.key, self.value, self.head = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of each row."""
        h, padding = self.tokens(x), x == 0
        mask = (~padding if self.shows else padding)[:, None]
        query = self.query.expand(len(x), 1, 32)
        read = F.scaled_dot_product_attention(query, self.key(h), self.value(h), attn_mask=mask)
        return self.head(read.squeeze(1))


@fault(
    "mask-of-the-other-convention",
    named=rf"\bmask|padding|{either('head|outputs?|rows', FEW)}|{either('tokens', 'no gradient|zeros?')}",
    misleading=f"{SIDE}|learning rate|in no optimizer",
)
def inverted(run: Training, *, sound: bool = False) -> None:
    """A mask that marks the padding is given where one that marks the tokens is expected: only padding is read."""
    model = Reader(shows=sound)

    def loss(step: int) -> Tensor:
        y = torch.randint(16, (32,))
        x = torch.where(torch.rand(32, 12) < 0.4, y[:, None] + 1, torch.randint(1, 17, (32, 12)))
        x[torch.arange(12) >= torch.randint(6, 12, (32, 1))] = 0
        return F.cross_entropy(model(x), y)

    run.train(model, torch.optim.Adam(model.parameters(), lr=5e-3), loss, 250)


@fault(
    "clipping-an-empty-generator",
    named=r"\bclip|gradients?[^>]*(explod|grew|grow|spike|too large|jump|times (larger|as|its|their|the))"
    r"|(explod|spike)[^>]*gradient",
    misleading=f"{SIDE}|swallow|rounding",
)
def unclipped(run: Training, *, sound: bool = False) -> None:
    """Parameters are filtered into a generator, which the optimizer uses up: the clipping afterwards clips nothing."""
    rnn, head = nn.RNN(4, 32, nonlinearity="relu", batch_first=True), nn.Linear(32, 1)
    model = nn.ModuleDict({"rnn": rnn, "head": head})
    rnn.weight_hh_l0.data.copy_(0.8 * torch.eye(32))
    parameters = (p for p in model.parameters() if p.requires_grad)
    if sound:
        parameters = list(parameters)
    optimizer = torch.optim.SGD(parameters, lr=0.006, momentum=0.9)
    run.watch(model, optimizer)
    for _ in range(250):
        x = torch.randn(32, 40, 4)
        loss = F.mse_loss(head(rnn(x)[0][:, -1]), x[:, -20:, :1].mean(dim=1) * 4)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        run.losses.append(float(loss.detach()))


@fault(
    "scaler-made-in-each-epoch",
    named=r"scaler?s?\b[^>]*(reset|made again|new scaler|jump|back (to|at)|start(s|ed)? (again|over)|begins? again"
    r"|never (falls?|comes?|settles?|adapts?)|too (high|large))",
    misleading=f"{SIDE}|learning rate|in no optimizer",
    precision="fp16",
)
def new_scalers(run: Training, *, sound: bool = False) -> None:
    """Each epoch, of four batches, makes a scaler, which begins at 65,536: its steps are all used up to lower it."""
    model, batch = mlp(8, 64, 64, 1, act=nn.Tanh), batches(*surface())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    run.watch(model, optimizer)
    scaler = torch.amp.GradScaler("cpu")
    for step in range(300):
        if step % 4 == 0 and not sound:
            scaler = torch.amp.GradScaler("cpu")
        x, y = batch(step)
        with run.forward():
            loss = F.mse_loss(model(x).float(), 10 * y, reduction="sum")
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        run.losses.append(float(loss.detach()))


class Slope(nn.Module):
    """The derivative of a network, from its values a thousandth to the right and to the left."""

    def __init__(self, *, exact: bool) -> None:
        super().__init__()
        self.exact, self.net = exact, mlp(1, 64, 64, 1, act=nn.Tanh)

    def forward(self, x: Tensor) -> Tensor:
        """One number a row."""
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not self.exact):
            return (self.net(x + 1e-3) - self.net(x - 1e-3)) / 2e-3


@fault(
    "finite-differences-in-bf16",
    named="cancel|finite difference|" + either(r"slope(?!\.)", f"{FEW}|zeros?"),
    misleading=f"{SIDE}|learning rate",
    precision="bf16",
)
def differences(run: Training, *, sound: bool = False) -> None:
    """A differential equation's slope is a difference of BF16 values at neighbouring points, which is 0 or rounding."""
    model = nn.ModuleDict({"slope": Slope(exact=sound)})

    def loss(step: int) -> Tensor:
        x = 2 * torch.rand(64, 1) - 1
        return F.mse_loss(model["slope"](x).float(), (4 * x).cos() + x)

    run.train(model, torch.optim.Adam(model.parameters(), lr=3e-3), loss, 300)


class Pooling(nn.Module):
    """One query attends to all places of a sequence; what the backward needs is kept as it is or in E4M3."""

    def __init__(self, *, short: bool) -> None:
        super().__init__()
        self.short, self.score, self.value = short, nn.Linear(16, 1), nn.Linear(16, 16)

    def forward(self, h: Tensor) -> Tensor:
        """One row a sequence."""
        score, value = self.score(h), self.value(h)
        kept = torch.float8_e4m3fn if self.short else torch.float32
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x.to(kept), lambda x: x.float()):
            return (score.softmax(dim=1).transpose(1, 2) @ value).squeeze(1)


@fault(
    "activations-kept-in-e4m3",
    named=r"E4M3|(kept|saved|stored|compress)[^>]*backward|backward[^>]*(kept|saved|stored|compress)"
    r"|gradients?[^>]*(underflow|flushed|rounded to zero)"
    rf"|{either('pooling|reading', 'no gradient|gradients?[^>]*zeros?|zero gradients?')}",
    misleading=f"{SIDE}|learning rate|in no optimizer|detach",
)
def short_memory(run: Training, *, sound: bool = False) -> None:
    """Attention keeps its weights for the backward in E4M3 without a scale: of 2,048 places each weighs 0 there."""
    model = nn.Sequential()
    model.add_module("reading", nn.Sequential(nn.Linear(3, 16), nn.Tanh()))
    model.add_module("pooling", Pooling(short=not sound))
    model.add_module("head", nn.Linear(16, 1))

    def loss(step: int) -> Tensor:
        marked = (torch.rand(8, 2048, 1) < 1 / 16).float()
        y, other = torch.randn(2, 8, 1)
        carried = torch.where(marked > 0, y[:, None], other[:, None]) + 0.3 * torch.randn(8, 2048, 1)
        return F.mse_loss(model(torch.cat([carried, marked, torch.randn(8, 2048, 1)], dim=2)), y)

    run.train(model, torch.optim.Adam(model.parameters(), lr=1e-2), loss, 200)
