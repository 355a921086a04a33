"""Mishaps that public threads report, by an author who had not read the rules. With `sound` they are left out."""

import copy
from collections.abc import Iterable
from contextlib import nullcontext

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from benchmarks.trust.faults.oversights import FEW, SIDE, either
from benchmarks.trust.registry import fault
from benchmarks.trust.toys import Block, batches, clusters, counting, mlp, pictures, surface, token_loss
from benchmarks.trust.training import Training

NAN = r"\bnan\b|non-?finite|\binf(inite|inity|inities)?\b"


@fault(
    "autocast-around-the-whole-loop",
    named=r"\bcached?\b|stale|autocast[^>]*(once|loop|each|every)|\b(old|first|initial|earlier) weights"
    r"|(forward|outputs?|loss)[^>]*(not|never)[^>]*(follow|see|use|respond|react)|(updates?|steps?) [^>]*no effect"
    r"|(weights?|parameters?) [^>]*(move|change|learn)[^>]*(loss|outputs?)[^>]*(not|same|constant|flat)",
    misleading=f"{SIDE}|learning rate|swallow|rounding|in no optimizer",
    precision="bf16",
    held_back=True,
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


class Deep(nn.Module):
    """Twelve equal layers with shortcuts, the first six of which begin as next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(16, 32), nn.Linear(32, 10)
        self.layers = nn.ModuleList([nn.Linear(32, 32) for _ in range(12)])

    def forward(self, x: Tensor) -> Tensor:
        """Scores."""
        h = self.stem(x)
        for place, layer in enumerate(self.layers):
            h = h + layer(h.tanh()) * (0.01 if place < 6 else 1.0)
        return self.head(h)


@fault(
    "states-loaded-in-another-order",
    named=r"\b(states?|moments?)\b[^>]*(wrong|other|mismatch|\bfit|belong|stale|swap|order|jump|chang)"
    r"|(resum|(re)?load)[^.>]*(state|optimizer|moments?)"
    r"|updates? [^>]*(jump|at once|grew|leap|(far|much|times) (too )?(as |larger?|more|its))",
    misleading=f"{SIDE}|swallow|rounding|in no optimizer",
    held_back=True,
)
def other_order(run: Training, *, sound: bool = False) -> None:
    """New code lists the layers from last to first, and a checkpoint goes by place: Adam gets other layers' states."""
    model, batch = Deep(), batches(*clusters(spread=1.0))
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    names = [name for name, _ in model.named_parameters()]

    def resume(step: int) -> None:
        if step == 149:
            saved = copy.deepcopy(optimizer.state_dict())
            layers = [i for i, name in enumerate(names) if name.startswith("layers.")]
            moved = sorted(layers, key=lambda i: -int(names[i].split(".")[1]))
            if not sound:
                saved["state"] = {
                    **saved["state"],
                    **{i: saved["state"][j] for i, j in zip(layers, moved, strict=True)},
                }
            optimizer.load_state_dict(saved)

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.cross_entropy(model(x), y)

    run.train(model, optimizer, loss, 180, after=resume)


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


@fault(
    "batch-norm-over-two-rows",
    named=f"{either('norm[0-9]?', f'{FEW}|two rows|statistics|saturat')}|batch(es)? (size|of)|micro-?batch|small batch",
    misleading=f"{SIDE}|learning rate",
    held_back=True,
)
def two_rows(run: Training, *, sound: bool = False) -> None:
    """A batch is split into sixteen of two rows: a batch norm over two makes of every value 1 or -1."""
    model = nn.Sequential()
    for i in range(2):
        model.add_module(f"linear{i}", nn.Linear((8, 64)[i], 64))
        model.add_module(f"norm{i}", nn.BatchNorm1d(64))
        model.add_module(f"act{i}", nn.Tanh())
    model.add_module("head", nn.Linear(64, 1))
    batch = batches(*surface(), size=32 if sound else 2)

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.mse_loss(model(x), y)

    run.train(model, torch.optim.Adam(model.parameters(), lr=5e-3), loss, 150, accumulate=1 if sound else 16)


@fault(
    "average-leaves-the-statistics-out",
    named=r"running (mean|variance|statistic)|running_|statistics|buffers?\b"
    f"|{either('teacher', 'statistics|normalis|buffer')}",
    misleading=f"{SIDE}|learning rate|swallow|in no optimizer",
    held_back=True,
)
def unaveraged(run: Training, *, sound: bool = False) -> None:
    """A teacher averages the student's weights, not its buffers: its batch norms keep the mean 0 and the variance 1."""
    student = nn.Sequential(nn.BatchNorm1d(16), nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))
    teacher = copy.deepcopy(student).requires_grad_(False).eval()
    model = nn.ModuleDict({"student": student, "teacher": teacher})
    x, y = clusters(spread=1.0)
    batch = batches(8 * x + 30, y)
    optimizer = torch.optim.Adam(student.parameters(), lr=5e-3)
    run.watch(model, optimizer)
    for step in range(250):
        x, y = batch(step)
        scores = student(x)
        agreed = F.mse_loss(scores.softmax(dim=1), teacher(x).softmax(dim=1))
        loss = F.cross_entropy(scores, y)
        run.step(loss + 20 * agreed, optimizer, log=False)
        run.losses.append(float(loss.detach()))
        with torch.no_grad():
            for mean, p in zip(teacher.parameters(), student.parameters(), strict=True):
                mean.lerp_(p, 0.05)
            if sound:
                for mean, b in zip(teacher.buffers(), student.buffers(), strict=True):
                    mean.copy_(b)


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
    held_back=True,
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
    "targets-broadcast-over-the-batch",
    named=r"broadcast|\bshapes?\b|(outputs?|predictions?|head|rows?)\b[^>]*(constant|collapse|vary|varies|depend"
    rf"|the same|\bmean\b|{FEW})",
    misleading=f"{SIDE}|learning rate",
    held_back=True,
)
def every_pair(run: Training, *, sound: bool = False) -> None:
    """Targets of shape 32 are taken from outputs of shape 32 x 1: each output is drawn to all targets, their mean."""
    model = nn.Sequential()
    model.add_module("net", mlp(8, 64, 64, act=nn.Tanh))
    model.add_module("head", nn.Linear(64, 1))
    batch = batches(*surface())

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return (model(x) - (y if sound else y.squeeze(1))).square().mean()

    run.train(model, torch.optim.Adam(model.parameters(), lr=5e-3), loss, 250)


class Variational(nn.Module):
    """An encoder's mean and spread of four hidden numbers, and a decoder of a draw of them."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.mean, self.spread = mlp(16, 64, 64), nn.Linear(64, 4), nn.Linear(64, 4)
        self.decoder = mlp(4, 64, 16)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What is read from a draw, its mean and the logarithm of its variance."""
        h = self.encoder(x).relu()
        mean, spread = self.mean(h), self.spread(h)
        return self.decoder(mean + (spread / 2).exp() * torch.randn_like(mean)), mean, spread


@fault(
    "divergence-summed-reconstruction-averaged",
    named=r"collapse|\bkl\b|divergence term|outweigh|(one|part|term)s? of the loss"
    f"|{either('mean|latent|spread', f'{FEW}|zeros?|vanish|shrink|small|nothing')}"
    f"|{either('decoder|outputs?', f'{FEW}|vary|depend')}",
    misleading=f"{SIDE}|learning rate|swallow",
    held_back=True,
)
def outweighed(run: Training, *, sound: bool = False) -> None:
    """The divergence is a sum over the batch, the reconstruction a mean: the hidden numbers become mere noise."""
    model, batch = Variational(), batches(clusters(spread=0.3)[0])
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    run.watch(model, optimizer)
    for step in range(300):
        (x,) = batch(step)
        again, mean, spread = model(x)
        divergence = (mean.square() + spread.exp() - spread - 1).sum() / 2
        read = F.mse_loss(again, x)
        run.step(read + divergence / (100 * len(x) if sound else 1), optimizer, log=False)
        run.losses.append(float(read.detach()))


@fault(
    "cosine-past-its-end",
    named=r"rates?\b[^>]*(rises?|rose|again|cycl|return|increase|restart|swing|climb|grows?|back (up|to))"
    r"|schedule|cosine",
    misleading=f"{SIDE}|swallow|rounding",
    held_back=True,
)
def past_its_end(run: Training, *, sound: bool = False) -> None:
    """A cosine is given an epoch's 60 steps as its length: past them the rate rises again, and ends at its peak."""
    model, batch = mlp(16, 64, 64, 10), batches(*clusters(spread=1.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 240 if sound else 60)

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.cross_entropy(model(x), y)

    run.train(model, optimizer, loss, 240, scheduler=scheduler)


@fault(
    "pixels-divided-twice",
    named=r"\b(inputs?|pixels?|images?|pictures?|data|conv0?)\b[^>]*(small|tiny|range|near (0|zero)|normali[sz]|units?"
    r"|scaled?\b|divided|size|hardly|constant)",
    misleading=f"{SIDE}|swallow|in no optimizer",
)
def twice_divided(run: Training, *, sound: bool = False) -> None:
    """Pixels that a loader has made numbers up to 1 are divided by 255 once more: hardly a picture is left."""
    model = nn.Sequential()
    model.add_module("conv0", nn.Conv2d(1, 16, 3, padding=1))
    model.add_module("rest", nn.Sequential(nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU()))
    model.add_module("head", nn.Sequential(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(288, 8)))
    x, y = pictures(noise=0.3)
    x = (x - x.min()) / (x.max() - x.min())
    batch = batches(x if sound else x / 255, y)

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.cross_entropy(model(x), y)

    run.train(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), loss, 200)


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


class Adapter(nn.Module):
    """A frozen linear layer and the product of two small matrices that are trained, which `merge` adds to it."""

    def __init__(self, into: int, out: int) -> None:
        super().__init__()
        self.base = nn.Linear(into, out).requires_grad_(False)
        self.down, self.up = nn.Linear(into, 8, bias=False), nn.Linear(8, out, bias=False)
        nn.init.zeros_(self.up.weight)

    @torch.no_grad()
    def merge(self, sign: int = 1) -> None:
        """Add the product to the frozen layer, or take it off."""
        self.base.weight.add_(sign * self.up.weight @ self.down.weight)

    def forward(self, x: Tensor) -> Tensor:
        """The layer's outputs."""
        return self.base(x) + self.up(self.down(x))


@fault(
    "adapter-merged-and-left",
    named=r"\bmerg|\b(base|frozen)\b[^>]*(chang|mov|jump|drift|update|grow|differ)"
    r"|(weights?|parameters?)[^>]*(frozen|no gradient|outside|without)[^>]*(chang|mov|jump)"
    r"|(weights?|outputs?) [^>]*(jump|leap|at once)",
    misleading=f"{SIDE}|swallow|rounding",
    held_back=True,
)
def merged(run: Training, *, sound: bool = False) -> None:
    """Adapters are merged into the frozen weights to evaluate, and never taken off: from then on they count twice."""
    model = nn.Sequential(Adapter(16, 64), nn.ReLU(), Adapter(64, 64), nn.ReLU(), Adapter(64, 10))
    x, y = clusters(spread=1.0)
    batch = batches(x, y)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=3e-3)

    def evaluate(step: int) -> None:
        if step % 25 == 24:
            for layer in model:
                if isinstance(layer, Adapter):
                    layer.merge()
                    if sound:
                        layer.merge(-1)

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.cross_entropy(model(x), y)

    run.train(model, optimizer, loss, 230, after=evaluate)


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


@fault(
    "frozen-weights-keep-moving",
    named=r"frozen|freeze|freezing|weight decay|momentum|set_to_none"
    r"|(zero|no|without|vanished) gradients?\b[^>]*(mov|chang|update|updating|shr[iu]nk|decay)"
    r"|(mov|chang|update|updating|shr[iu]nk|decay)[^>]*(zero|no|without|vanished) gradients?\b",
    misleading=f"{SIDE}|learning rate|swallow|rounding|in no optimizer",
)
def still_moving(run: Training, *, sound: bool = False) -> None:
    """A trunk is frozen at step 60, and its gradients are zeroed, not dropped: AdamW's decay shrinks it still."""
    model = nn.Sequential()
    model.add_module("trunk", mlp(16, 64, 64))
    model.add_module("head", nn.Sequential(nn.ReLU(), nn.Linear(64, 10)))
    batch = batches(*clusters(spread=1.0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=2.0)
    run.watch(model, optimizer)
    for step in range(360):
        if step == 60:
            model[0].requires_grad_(False)
        x, y = batch(step)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad(set_to_none=sound)
        loss.backward()
        optimizer.step()
        run.losses.append(float(loss.detach()))


@fault(
    "state-cleared-in-each-epoch",
    named=r"\b(states?|moments?|optimizer)\b[^>]*(reset|clear|lost|anew|restart|forg[eo]t|empt|re-?creat|begins? again)"
    r"|(reset|clear|restart|re-?creat)[^>]*\b(states?|moments?|optimizer)\b|bias correction"
    r"|updates? [^>]*((same|equal|one|constant) (size|value|magnitude)|(size of|equal to) the (learning )?rate)"
    r"|steps? count",
    misleading=f"{SIDE}|swallow|rounding|in no optimizer|lower the (learning )?rate|rate (is |was )?too high",
    held_back=True,
)
def cleared(run: Training, *, sound: bool = False) -> None:
    """Each epoch, of four batches, clears Adam's state: its updates are as large as at the start, however small."""
    model, batch = mlp(8, 64, 64, 1, act=nn.Tanh), batches(*surface(noise=0.02))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)

    def begin(step: int) -> None:
        if step % 4 == 3 and not sound:
            optimizer.state.clear()

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.mse_loss(model(x), y)

    run.train(model, optimizer, loss, 300, after=begin)


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


class Experts(nn.Module):
    """A linear layer for each of eight experts, one of which a router chooses for a row."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 8)
        self.experts = nn.ModuleList([nn.Linear(8, 4) for _ in range(8)])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The outputs, the router's probabilities, and how much of the batch each expert has."""
        p = self.router(x).softmax(dim=1)
        gate, chosen = p.max(dim=1)
        shares = F.one_hot(chosen, 8).float().mean(dim=0)
        out = x.new_zeros(len(x), 4)
        for i in chosen.unique().tolist():
            out[chosen == i] = gate[chosen == i, None] * self.experts[i](x[chosen == i])
        return out, p, shares


@fault(
    "balance-of-counts-without-a-slope",
    named=rf"{either(r'experts?|router', 'never|unused|idle|no gradient|zero|not called|collapse|saturat|constant')}"
    r"|balanc|load",
    misleading="ReLU|raise the loss scale|scale-low|learning rate|swallow|in no optimizer",
    held_back=True,
)
def unbalanced(run: Training, *, sound: bool = False) -> None:
    """A loss that is to spread rows over experts is of counts, which have no slope: few experts get all of them."""
    model, (x, y) = Experts(), clusters(8, 8, 0.3)
    maps = torch.randn(8, 8, 4)
    batch = batches(x + 4, torch.einsum("bi,bio->bo", x, maps[y]) / 2, size=64)

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        out, p, shares = model(x)
        balance = 8 * (shares * (p.mean(dim=0) if sound else shares)).sum()
        return F.mse_loss(out, y) + balance

    run.train(model, torch.optim.Adam(model.parameters(), lr=1e-2), loss, 400)


class Tied(nn.Module):
    """Tokens in, scores of the next one out, both from one table."""

    def __init__(self, size: float) -> None:
        super().__init__()
        self.tokens, self.block = nn.Embedding(64, 128), Block(128, causal=True)
        self.norm, self.head = nn.LayerNorm(128), nn.Linear(128, 64, bias=False)
        self.positions = nn.Parameter(0.02 * torch.randn(16, 128))
        nn.init.normal_(self.tokens.weight, std=size)
        self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        """Scores of each place."""
        return self.head(self.norm(self.block(self.tokens(x) + self.positions)))


@fault(
    "tied-table-of-size-one",
    named=rf"{either('logits?|head|scores?|table|tokens|embeddings?', r'(too|very|so) (large|big)|saturat|initial')}"
    r"|initiali[sz]|loss [^>]*(starts?|begins?|first|initial)[^>]*(above|high|large|chance)|tied|shared",
    misleading=f"{SIDE}|learning rate|swallow|rounding|in no optimizer",
    held_back=True,
)
def large_table(run: Training, *, sound: bool = False) -> None:
    """A head is tied to an embedding that begins with the size 1, as torch has it: its first scores are beyond 100."""
    model, batch = Tied(0.02 if sound else 1.0), batches(*counting(64))

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return token_loss(model, x, y)

    run.train(model, torch.optim.Adam(model.parameters(), lr=1e-3), loss, 120)
