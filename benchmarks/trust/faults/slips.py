"""Slips that people make often, by an author who had not read the rules. With `sound` the fault is left out."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from benchmarks.trust.faults.recipes import NOT_LEARNING
from benchmarks.trust.registry import fault
from benchmarks.trust.toys import batches, clusters, mlp, surface
from benchmarks.trust.training import Training

NO_GRADIENT = (
    r"gradients? (is|are|was|were|stays?) (exactly |always |all )*zero|\b(zero|no) gradients?|without (a )?gradient"
)


def _rounds(place: str) -> str:
    """A pattern of findings that say that rounding leaves few values in a place."""
    few = "round|codes|distinct|digits|spacing"
    return rf"\b({place})\b[^>]*({few})|({few})[^>]*\b({place})\b"


@fault(
    "masters-never-copied-back",
    named=r"master|copied? back|(weights?|parameters?)[^>]* (never|not) (change|move|get)|in no optimizer",
    misleading="dead-layer|learning rate|raise the loss scale|swallow|rounding",
    precision="bf16",
    held_back=True,
)
def uncopied(run: Training, *, sound: bool = False) -> None:
    """FP32 masters of a BF16 model are updated and never copied back: the model stays as it was."""
    model, batch = mlp(16, 64, 64, 10).bfloat16(), batches(*clusters())
    masters = [nn.Parameter(p.detach().float()) for p in model.parameters()]
    optimizer = torch.optim.Adam(masters, lr=2e-3)
    run.watch(model, optimizer)
    for step in range(200):
        x, y = batch(step)
        loss = F.cross_entropy(model(x.bfloat16()).float(), y)
        model.zero_grad()
        loss.backward()
        for p, master in zip(model.parameters(), masters, strict=True):
            master.grad = p.grad.float()
        optimizer.step()
        with torch.no_grad():
            for p, master in zip(model.parameters(), masters, strict=True):
                if sound:
                    p.copy_(master)
        run.losses.append(float(loss.detach()))


@fault(
    "gradients-in-fp16-after-unscaling",
    named=r"underflow|flush|unscale|gradients-mishandled|gradients? [^>]*(zero|erased|lost|rounded)",
    misleading="dead-layer|raise the loss scale|scale-low|learning rate",
    precision="fp16",
)
def unscaled_first(run: Training, *, sound: bool = False) -> None:
    """Gradients are sent in FP16 after they are unscaled instead of before: the small ones become zero."""
    model, batch = mlp(16, 64, 64, 10), batches(*clusters(spread=1.0))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, eps=1e-15)
    scaler = run.scaler(optimizer)
    run.watch(model, optimizer)

    def send() -> None:
        for p in model.parameters():
            p.grad.copy_(p.grad.half())

    for step in range(200):
        x, y = batch(step)
        with run.forward():
            loss = F.cross_entropy(model(x).float(), y) * 1e-6
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if sound:
            send()
        scaler.unscale_(optimizer)
        if not sound:
            send()
        scaler.step(optimizer)
        scaler.update()
        run.losses.append(1e6 * float(loss.detach()))


class Calibrated(nn.Module):
    """E4M3 with a scale from the largest value: of the first batch, or of each."""

    def __init__(self, *, once: bool) -> None:
        super().__init__()
        self.once, self.scale = once, 0.0

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        if not (self.once and self.scale):
            self.scale = 448 / float(x.detach().abs().max())
        h = (x * self.scale).clamp(-448, 448)
        # The rounding has the slope 1: a cast's own backward would round the gradients to E4M3, too.
        return (h + (h.detach().to(torch.float8_e4m3fn).float() - h.detach())) / self.scale


@fault(
    "fp8-scale-of-a-quiet-batch",
    named=r"saturat|\b448\b|clamp|cut (off|at)|largest code|beyond (the|its) (format's )?range"
    r"|scale [^>]*(stale|too (high|large)|first batch)",
    misleading=f"dead-layer|vanish|learning rate|raise the loss scale|{NOT_LEARNING}",
)
def quiet(run: Training, *, sound: bool = False) -> None:
    """FP8 scales are taken from the first batch, which is nearly silent: E4M3 cuts all later values at its largest."""
    model = nn.Sequential(Calibrated(once=not sound), nn.Linear(8, 64), nn.Tanh())
    model.extend([Calibrated(once=not sound), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)])
    batch = batches(*surface())

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.mse_loss(model(x * (0.01 if step == 0 else 1.0)), y)

    run.train(model, torch.optim.Adam(model.parameters(), lr=5e-3), loss, 300)


class Int8(nn.Module):
    """Whole numbers from -127 to 127 times a scale: one of all channels, or one each. Gradients pass as they are."""

    def __init__(self, *, each: bool) -> None:
        super().__init__()
        self.each = each

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        largest = x.detach().abs().amax(dim=0 if self.each else None)
        step = largest / 127
        return x + ((x / step).round() * step - x).detach()


@fault(
    "int8-with-one-scale-for-all-channels",
    named=r"outl(ier|ying)|(one|single|few) (channel|feature|column|value)s?[^>]*(large|dominat)"
    r"|\bcast\b[^>]*(zeros?\b|flush|codes|distinct|round)|(\bzeros?\b|flush|codes|distinct|round)[^>]*\bcast\b",
    misleading=f"dead-layer|learning rate|raise the loss scale|{NOT_LEARNING}",
)
def one_scale(run: Training, *, sound: bool = False) -> None:
    """Inputs are rounded to INT8 by one scale for all channels, one of which is large: all others become zero."""
    model = nn.Sequential()
    model.add_module("cast", Int8(each=sound))
    model.add_module("norm", nn.BatchNorm1d(9))
    model.add_module("net", mlp(9, 64, 64, 1))
    x, y = surface()
    batch = batches(torch.cat([x, 500 * torch.randn(len(x), 1)], dim=1), y)

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.mse_loss(model(x), y)

    run.train(model, torch.optim.Adam(model.parameters(), lr=3e-3), loss, 300)


@fault(
    "targets-far-from-zero-in-bf16",
    named=_rounds("head|outputs?|predictions?|loss"),
    misleading=f"dead-layer|learning rate|{NOT_LEARNING}",
    precision="bf16",
)
def far_targets(run: Training, *, sound: bool = False) -> None:
    """Targets near 1,000 are not centred: the last layer's BF16 numbers lie 4 apart there, more than is to learn."""
    model = nn.Sequential()
    model.add_module("net", mlp(8, 64, 64, act=nn.Tanh))
    model.add_module("head", nn.Linear(64, 1))
    mean = 0.0 if sound else 1000.0
    nn.init.constant_(model.head.bias, mean)
    x, y = surface()
    batch = batches(x, y + mean)

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.mse_loss(model(x).float(), y)

    run.train(model, torch.optim.Adam(model.parameters(), lr=5e-3), loss, 300)


class ShortAdam(torch.optim.Optimizer):
    """Adam whose first moments are kept in a format of their own, without a scale."""

    def __init__(self, params: Iterator[nn.Parameter], lr: float, dtype: torch.dtype) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8})
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        """One update."""
        for group in self.param_groups:
            first, second = group["betas"]
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    state["exp_avg"] = torch.zeros_like(p, dtype=self.dtype)
                    state["exp_avg_sq"] = torch.zeros_like(p)
                state["step"] += 1
                state["exp_avg"].copy_(first * state["exp_avg"].float() + (1 - first) * p.grad)
                square = state["exp_avg_sq"].mul_(second).addcmul_(p.grad, p.grad, value=1 - second)
                mean = state["exp_avg"].float() / (1 - first ** state["step"])
                p.sub_(group["lr"] * mean / ((square / (1 - second ** state["step"])).sqrt() + group["eps"]))


@fault(
    "first-moments-in-e4m3",
    named=r"first[ -]moments?|exp_avg\b|e4m3",
    misleading="dead-layer|learning rate|updates-swallowed|second[ -]moment",
)
def short_moments(run: Training, *, sound: bool = False) -> None:
    """Adam's first moments are kept in E4M3 without a scale: below 2^-10 they are zero, and hardly a weight moves."""
    model, batch = mlp(16, 64, 64, 10), batches(*clusters(spread=1.0))
    optimizer = ShortAdam(model.parameters(), 2e-3, torch.float32 if sound else torch.float8_e4m3fn)

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.cross_entropy(model(x), y) / 10

    run.train(model, optimizer, loss, 200)


class Rounded(nn.Linear):
    """A linear layer that computes with INT8 weights; `straight` passes gradients through the rounding."""

    def __init__(self, into: int, out: int, *, straight: bool) -> None:
        super().__init__(into, out)
        self.straight = straight

    def forward(self, x: Tensor) -> Tensor:
        """The layer's outputs."""
        step = self.weight.detach().abs().max() / 127
        weight = (self.weight / step).round() * step
        return F.linear(x, self.weight + (weight - self.weight).detach() if self.straight else weight, self.bias)


@fault(
    "rounding-has-no-slope",
    named=rf"quanti[sz]|straight|\bround\b|{NO_GRADIENT}",
    misleading="ReLU|raise the loss scale|scale-low|learning rate",
    precision="bf16",
)
def no_slope(run: Training, *, sound: bool = False) -> None:
    """Weights are rounded to INT8 in the forward, and `round` has the slope 0: only the biases learn."""
    model = nn.Sequential(Rounded(16, 64, straight=sound), nn.ReLU(), Rounded(64, 64, straight=sound), nn.ReLU())
    model.append(Rounded(64, 10, straight=sound))
    batch = batches(*clusters())

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.cross_entropy(model(x).float(), y)

    run.train(model, torch.optim.Adam(model.parameters(), lr=3e-3), loss, 200)


class Length(nn.Module):
    """The length of each row, from squares in a format."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        """One number a row."""
        h = x.to(self.dtype)
        return (h * h).sum(dim=-1, keepdim=True).sqrt().float()


class Unit(nn.Module):
    """Rows divided by their lengths."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.length = Length(dtype)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        return x / (self.length(x) + 1e-5)


@fault(
    "squares-underflow-in-a-length",
    named=r"\blength\b[^>]*(\bzeros?\b|flush|underflow)|(\bzeros?\b|flush|underflow)[^>]*\blength\b",
    misleading="dead-layer|scale-low|raise the loss scale|learning rate",
    precision="fp16",
)
def no_length(run: Training, *, sound: bool = False) -> None:
    """Inputs of size 1e-4 are squared in FP16 for their length: it is zero, and they are divided by the epsilon."""
    model = nn.Sequential()
    model.add_module("unit", Unit(torch.float32 if sound else torch.float16))
    model.add_module("net", mlp(16, 64, 64, 10))
    x, y = clusters()
    batch = batches(5e-5 * x, y)

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.cross_entropy(model(x).float(), y)

    run.train(model, torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9), loss, 200)


@fault(
    "one-batch-for-ever",
    named=r"same (batch|inputs?|data)|identical (batch|input)"
    r"|(batch|input)(es|s)? [^>]*(identical|never change|constant|repeat|(does|do) not change)",
    misleading="dead-layer|learning rate|diverge",
    held_back=True,
)
def one_batch(run: Training, *, sound: bool = False) -> None:
    """A loader is started again at each step, so each step has the same batch: it is learned by heart, and no more."""
    model, (x, y) = mlp(16, 64, 64, 10), clusters(spread=1.0)
    batch = batches(x, y)
    first = batch(0)

    def loss(step: int) -> Tensor:
        x, y = batch(step) if sound else first
        return F.cross_entropy(model(x), y)

    run.train(model, torch.optim.Adam(model.parameters(), lr=3e-3), loss, 200)
    with torch.no_grad():
        run.measures.append(float(F.cross_entropy(model(x), y)))


@fault(
    "dropout-by-the-share-kept",
    named=r"drop-?out|9\d(\.\d+)? ?%[^>]*\bzeros?\b|\bzeros?\b[^>]*9\d(\.\d+)? ?%",
    misleading="dead-layer|ReLU|learning rate|raise the loss scale",
)
def dropped(run: Training, *, sound: bool = False) -> None:
    """Dropout is given the share to keep, 0.95, as the share to drop: of twenty values nineteen are zero."""
    drop = 0.05 if sound else 0.95
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(drop), nn.Linear(64, 64), nn.ReLU())
    model.extend([nn.Dropout(drop), nn.Linear(64, 10)])
    batch = batches(*clusters())

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.cross_entropy(model(x), y)

    run.train(model, torch.optim.Adam(model.parameters(), lr=3e-3), loss, 250)


class Adapted(nn.Module):
    """A frozen linear layer and the product of two small matrices that are trained."""

    def __init__(self, into: int, out: int, *, drawn: bool) -> None:
        super().__init__()
        self.base = nn.Linear(into, out).requires_grad_(False)
        self.down, self.up = nn.Linear(into, 8, bias=False), nn.Linear(8, out, bias=False)
        nn.init.zeros_(self.up.weight)
        if not drawn:
            nn.init.zeros_(self.down.weight)

    def forward(self, x: Tensor) -> Tensor:
        """The layer's outputs."""
        return self.base(x) + self.up(self.down(x))


@fault(
    "both-factors-begin-at-zero",
    named=rf"both (factors|matrices|weights)|(weights?|parameters?|values) (are|is|stay|begin) (at |all |exactly )*zero"
    rf"|{NO_GRADIENT}",
    misleading="gradients-mishandled|ReLU|learning rate|raise the loss scale|rounding|swallow",
    precision="bf16",
)
def both_zero(run: Training, *, sound: bool = False) -> None:
    """Both matrices of an adapter begin at zero instead of one: neither ever gets a gradient."""
    model = nn.Sequential(Adapted(16, 64, drawn=sound), nn.ReLU(), Adapted(64, 64, drawn=sound), nn.ReLU())
    model.append(Adapted(64, 10, drawn=sound))
    batch = batches(*clusters())

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.cross_entropy(model(x).float(), y)

    run.train(model, torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2), loss, 200)


@fault(
    "betas-swapped",
    named=r"\bbetas?\d?\b|momentum",
    misleading="dead-layer|updates-swallowed",
)
def swapped(run: Training, *, sound: bool = False) -> None:
    """Adam's two betas are swapped: it follows the gradients of a thousand steps and measures their size over ten."""
    model, batch = mlp(16, 64, 64, 10), batches(*clusters(spread=1.0))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, betas=(0.9, 0.999) if sound else (0.999, 0.9))

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.cross_entropy(model(x), y)

    run.train(model, optimizer, loss, 250)
