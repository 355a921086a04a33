"""Common mistakes of formats, scales, labels and starts, by an author who had not read the rules.

With `sound` they are left out. Behind each fault: what was measured with it and without it.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from benchmarks.trust.faults.oversights import FEW, SIDE, either
from benchmarks.trust.registry import fault
from benchmarks.trust.toys import batches, clusters, mlp, pictures, surface
from benchmarks.trust.training import Training

NAN = r"\bnan\b|non-?finite|\binf(inite|inity|inities)?\b"
TOO_LARGE = rf"{NAN}|overflow|range|exceed|too large|65,?504"
LOSS = r"loss(?! scal)"
TOO_FAST = r"lower the (learning )?rate|rate (is |was )?too high"


def _measure(run: Training, step: int, of: Callable[[], Tensor], every: int = 10) -> None:
    """Note a number of the model at each tenth step."""
    if step % every == 0:
        with torch.no_grad():
            run.measures.append(float(of()))


@fault(
    "class-weights-in-fp16",
    named=either(f"{LOSS}|class weights?|criterion|cross[ -]entropy", TOO_LARGE) + r"|65,?504|overflow|class weights?",
    misleading=f"{SIDE}|learning rate|swallow|in no optimizer",
    precision="fp16",
    held_back=True,
)
def rarest_class(run: Training, *, sound: bool = False) -> None:
    """Weights of classes are inverse shares in FP16: the rarest one's is infinite, and batches that have it are NaN."""
    # Error, the mean over the classes, at the end: 0.21, without the fault 0.014.
    x, y = clusters(spread=1.0, classes=4, count=200_000)
    rare = torch.arange(len(y)) < 3  # three rows of a fifth class, elsewhere
    x[rare], y[rare] = 4 + 0.3 * torch.randn(3, 16), 4
    weights = len(y) / torch.bincount(y)
    criterion = nn.CrossEntropyLoss(weight=weights if sound else weights.half())
    model, batch = mlp(16, 64, 64, 5), batches(x, y, size=4096)
    parts = [x[y == c][:500] for c in range(5)]

    def loss(step: int) -> Tensor:
        _measure(
            run,
            step,
            lambda: torch.stack([(model(p).argmax(1) != c).float().mean() for c, p in enumerate(parts)]).mean(),
        )
        rows, classes = batch(step)
        scores = model(rows)
        return criterion(scores.float() if sound else scores.half(), classes).float()

    run.train(model, torch.optim.Adam(model.parameters(), lr=3e-3), loss, 200)


@fault(
    "root-of-a-mean-square-in-fp16",
    named=either(LOSS, rf"{NAN}|underflow|\bzero\b|fp16|half") + r"|\bsqrt|\broots?\b|\bepsilon",
    misleading=f"{SIDE}|learning rate|swallow|in no optimizer",
    precision="fp16",
    held_back=True,
)
def root_of_nothing(run: Training, *, sound: bool = False) -> None:
    """The root of a mean square is taken in FP16: errors below 0.0002 have squares of zero, where no slope is."""
    # Mean square error at the end, as a share of the targets': 0.15, without the fault 0.021.
    x, y = surface(noise=0.0)
    y = 1e-3 * y  # millimetres as metres
    model, batch = mlp(8, 64, 64, 1), batches(x, y, size=128)
    with torch.no_grad():
        model[-1].weight *= 0.01
        model[-1].bias *= 0.01
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 500)
    run.watch(model, optimizer)
    for step in range(500):
        rows, targets = batch(step)
        with run.forward():
            outputs = model(rows)
        if sound:
            outputs = outputs.float()
        loss = ((outputs - targets.to(outputs.dtype)) ** 2).mean().sqrt()
        run.step(loss, optimizer)
        schedule.step()
        _measure(run, step, lambda: (model(x) - y).square().mean() / y.square().mean())


class Weather(nn.Module):
    """Measurements in their own units, cast as a whole model and its batches are, normalised, and a network."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.norm, self.net = nn.BatchNorm1d(8), mlp(8, 64, 64, 1)

    def forward(self, x: Tensor) -> Tensor:
        """One number a row."""
        return self.net(self.norm(x.to(self.dtype)))


@fault(
    "kelvin-in-bf16",
    named=either("inputs?|columns?|features?|norm|data|batch", rf"{FEW}|b(f|float)16|precision|cent(er|re)|offset")
    + r"|far from (0|zero)",
    misleading=f"{SIDE}|learning rate|swallow|in no optimizer",
    precision="bf16",
    held_back=True,
)
def degrees_apart(run: Training, *, sound: bool = False) -> None:
    """Batches are cast to BF16 before they are normalised: degrees in kelvin lie 2 apart there, hectopascals 4."""
    # Mean square error at the end: 0.062, without the fault 0.023.
    x, y = surface(count=2048)
    measured = x * torch.tensor([1.5, 3.0]).repeat(4) + torch.tensor([293.0, 1013.0]).repeat(4)
    model = Weather(torch.float32 if sound else torch.bfloat16)
    batch = batches(measured, y, size=64)

    def loss(step: int) -> Tensor:
        rows, targets = batch(step)
        return F.mse_loss(model(rows).float(), targets)

    run.train(model, torch.optim.Adam(model.parameters(), lr=5e-3), loss, 400)


class Frozen(nn.Module):
    """A linear layer whose weights are frozen, in whatever format they are in, and a small one that is trained."""

    def __init__(self, base: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(base.weight.detach().to(dtype), requires_grad=False)
        self.bias = nn.Parameter(base.bias.detach().clone(), requires_grad=False)
        self.down = nn.Linear(base.in_features, 4, bias=False)
        self.up = nn.Linear(4, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        """The layer's outputs."""
        return F.linear(x, self.weight.float(), self.bias) + self.up(self.down(x))


@fault(
    "frozen-weights-cast-to-e4m3",
    named=either("base|weights?|frozen|parameters?", r"underflow|flush|\bzeros?\b|codes|subnormal|distinct|rounded")
    + r"|e4m3|\bfp8|float8|8[- ]bit",
    misleading=f"{SIDE}|learning rate|swallow|in no optimizer",
)
def cast_base(run: Training, *, sound: bool = False) -> None:
    """A frozen base is cast to E4M3 without a scale: its weights, most of them below 0.001, become zero."""
    # Loss at the end: 0.17, without the fault 0.068.
    base = nn.Sequential(
        nn.Linear(16, 96),
        nn.LayerNorm(96),
        nn.ReLU(),
        nn.Linear(96, 96),
        nn.LayerNorm(96),
        nn.ReLU(),
        nn.Linear(96, 10),
    )
    x, y = clusters(spread=1.0)
    old, new = batches(x, y), batches(x + 0.3, y)
    optimizer = torch.optim.Adam(base.parameters(), lr=3e-3)
    for step in range(200):
        rows, classes = old(step)
        optimizer.zero_grad()
        F.cross_entropy(base(rows), classes).backward()
        optimizer.step()
    with torch.no_grad():  # before a norm the size does not count, and a decay makes it small in long runs
        for place in (0, 3):
            base[place].weight *= 0.006
            base[place].bias *= 0.006
    dtype = torch.float32 if sound else torch.float8_e4m3fn
    for part in base.parameters():
        part.requires_grad_(False)
    for place in (0, 3):
        base[place] = Frozen(base[place], dtype)

    def loss(step: int) -> Tensor:
        rows, classes = new(step)
        return F.cross_entropy(base(rows), classes)

    run.train(base, torch.optim.Adam([p for p in base.parameters() if p.requires_grad], lr=1e-3), loss, 200)


@fault(
    "softplus-by-hand-in-fp16",
    named=either(rf"softplus|exponentials?|exp|{LOSS}|outputs?", TOO_LARGE) + "|65,?504",
    misleading=f"{SIDE}|learning rate|swallow|in no optimizer",
    precision="fp16",
    held_back=True,
)
def beyond_eleven(run: Training, *, sound: bool = False) -> None:
    """Outside of autocast log(1 + exp(x)) is computed in FP16: above 11 it is infinite, and minutes are up to 60."""
    # Mean square error at the end, as a share of the variance: 1.20, without the fault 0.25.
    x, y = surface()
    minutes = (15 + 15 * y).clamp(min=0)
    model, batch = mlp(8, 64, 64, 1), batches(x, minutes)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    run.watch(model, optimizer)
    for step in range(400):
        rows, targets = batch(step)
        with run.forward():
            outputs = model(rows)
        outputs = F.softplus(outputs.float()) if sound else torch.log(1 + torch.exp(outputs))
        run.step(F.mse_loss(outputs.float(), targets), optimizer)
        _measure(run, step, lambda: (F.softplus(model(x)) - minutes).square().mean() / minutes.var())


@fault(
    "pixels-as-int8",
    named=either("inputs?|pixels?|data|images?|pictures?", r"wrap|overflow|\bsigns?\b|negative|range|modes|jump")
    + r"|\bu?int8|8[- ]bit|wrap",
    misleading=f"{SIDE}|learning rate|swallow|in no optimizer",
    held_back=True,
)
def bright_is_dark(run: Training, *, sound: bool = False) -> None:
    """Pixels from 0 to 255 are cast to INT8: those from 128 on come back negative, and bright is darker than dark."""
    # Share of wrong answers on new pictures at the end: 0.35, without the fault 0.001.
    x, y = pictures(count=1536, noise=1.4)
    stored = (128 + 45 * x).clamp(0, 255).to(torch.uint8)  # as read from files
    cast = (stored.float() - 128 if sound else stored.to(torch.int8).float()) / 64
    batch = batches(cast[:1024], y[:1024])
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64, 8),
    )

    def loss(step: int) -> Tensor:
        _measure(run, step, lambda: (model(cast[1024:]).argmax(dim=1) != y[1024:]).float().mean())
        rows, classes = batch(step)
        return F.cross_entropy(model(rows), classes)

    run.train(model, torch.optim.Adam(model.parameters(), lr=3e-3), loss, 300)


@fault(
    "rate-divided-by-the-loss-scale",
    named=r"rates?\b[^>]*(low|small|tiny|raise|divid)|raise the (learning )?rate|(updates?|steps)\b[^>]*(tiny|small)"
    r"|(weights?|parameters?)\b[^>]*\b(hardly|barely|scarcely)|scale-?invarian|invariant",
    misleading=f"{SIDE}|{TOO_FAST}|in no optimizer",
    precision="fp16",
)
def adam_does_not_mind(run: Training, *, sound: bool = False) -> None:
    """A loss is scaled by 1,024 by hand and the rate divided by it: right for SGD, but Adam hardly moves then."""
    # Loss at the end: 2.30 from 2.31, without the fault 0.042.
    model, batch = mlp(16, 64, 64, 10), batches(*clusters(spread=1.0))
    scale = 1024.0
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3 if sound else 3e-3 / scale)
    run.watch(model, optimizer)
    for step in range(250):
        x, y = batch(step)
        with run.forward():
            loss = F.cross_entropy(model(x).float(), y)
        optimizer.zero_grad()
        (loss * scale).backward()
        if sound:
            for p in model.parameters():
                if p.grad is not None:
                    p.grad /= scale
        optimizer.step()
        run.losses.append(float(loss.detach()))


@fault(
    "epoch-loss-added-up-in-fp16",
    named=r"rates?\b[^>]*(low|small|tiny|raise|fell|falls|fallen|reduced|dropp?ed|cut)|raise the (learning )?rate"
    r"|schedule|scheduling|plateau|(running|total|summed|epoch) loss",
    misleading=f"{SIDE}|{TOO_FAST}|swallow|in no optimizer",
    precision="fp16",
)
def never_better(run: Training, *, sound: bool = False) -> None:
    """An epoch's losses are added up in FP16, to Inf beyond 65,504: a schedule sees no epoch that is better."""
    # Loss at the end: 147, without the fault 51.
    x, y = surface()
    model, batch = mlp(8, 64, 64, 1), batches(x, 40 * y, size=64)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
    run.watch(model, optimizer)
    for _ in range(14):
        total = torch.zeros((), dtype=torch.float32 if sound else torch.float16)
        for step in range(50):
            rows, targets = batch(step)
            with run.forward():
                outputs = model(rows)
            loss = F.mse_loss(outputs.float(), targets)
            total += loss.detach().to(total.dtype) * len(rows)
            run.step(loss, optimizer)
        scheduler.step(float(total))


@fault(
    "nll-loss-of-logits",
    named=r"log[- _]?softmax|\bnll|\blogits?\b|log-?probability|log-?probabilities"
    r"|(loss(?! scal))\b[^>]*(negative|below (0|zero)|bound)"
    r"|(negative|unbounded) loss|without (a |any )?(bound|limit|end)",
    misleading=f"{SIDE}|learning rate|swallow|rounding|in no optimizer",
    held_back=True,
)
def never_a_softmax(run: Training, *, sound: bool = False) -> None:
    """`NLLLoss` gets scores, not the logarithms of a softmax: the loss falls for ever, and answers stay wrong."""
    # Share of wrong answers at the end: 0.89, without the fault 0.052.
    model, (x, y) = mlp(16, 64, 64, 10), clusters(spread=1.0)
    batch = batches(x, y)

    def loss(step: int) -> Tensor:
        _measure(run, step, lambda: (model(x).argmax(dim=1) != y).float().mean())
        rows, classes = batch(step)
        scores = model(rows)
        return F.nll_loss(scores.log_softmax(dim=1) if sound else scores, classes)

    run.train(model, torch.optim.Adam(model.parameters(), lr=1e-3), loss, 300)


@fault(
    "labels-as-uint8",
    named=r"\b(labels?|targets?|class(es)?)\b[^>]*(wrap|8[- ]?bit|\b25[56]\b|never|unused|missing|absent|mismatch|wrong"
    r"|not (match|fit)|merged|unseen)|(outputs?|rows|units|head)\b[^>]*never[^>]*(target|label|class)|uint8|\bwrap",
    misleading=f"{SIDE}|{TOO_FAST}|swallow|rounding|in no optimizer",
    held_back=True,
)
def class_256_is_0(run: Training, *, sound: bool = False) -> None:
    """Labels of 300 classes are kept as unsigned bytes: from 256 on they begin again at 0."""
    # Share of wrong answers at the end: 0.15, all of those of 44 classes, without the fault none.
    x, y = clusters(32, 300, 0.5, 8192)
    labels = y if sound else y.to(torch.uint8).long()
    model, batch = mlp(32, 128, 300), batches(x, labels, size=128)

    def loss(step: int) -> Tensor:
        _measure(run, step, lambda: (model(x).argmax(dim=1) != y).float().mean())
        rows, classes = batch(step)
        return F.cross_entropy(model(rows), classes)

    run.train(model, torch.optim.Adam(model.parameters(), lr=5e-3), loss, 300)


@fault(
    "prices-as-they-are",
    named=r"\b(targets?|labels?|outputs?|predictions?)\b[^>]*(normali[sz]|standardi[sz]|units|large|huge|far|magnitude)"
    r"|(normali[sz]|standardi[sz]|rescale)\w*[^>]*\b(targets?|labels?|outputs?)",
    misleading=f"{SIDE}|{TOO_FAST}|swallow|rounding|in no optimizer",
    held_back=True,
)
def far_to_go(run: Training, *, sound: bool = False) -> None:
    """Prices near 300,000 are not normalised: outputs begin near 0 and move far too little in a step to get there."""
    # Mean square error at the end, as a share of the prices' variance: 2.9, without the fault 0.11.
    x, y = surface()
    prices = 300_000 + 100_000 * y
    mean, deviation = (prices.mean(), prices.std()) if sound else (torch.tensor(0.0), torch.tensor(1.0))
    model, batch = mlp(8, 64, 64, 1), batches(x, (prices - mean) / deviation)

    def loss(step: int) -> Tensor:
        _measure(run, step, lambda: (model(x) * deviation + mean - prices).square().mean() / prices.var())
        rows, targets = batch(step)
        return F.mse_loss(model(rows), targets)

    run.train(model, torch.optim.Adam(model.parameters(), lr=3e-3), loss, 400)


@fault(
    "weights-of-size-one",
    named=r"initiali[sz]|\binit\b|xavier|kaiming|fan[- ]?in|\bdrawn\b"
    r"|(weights?|layers?|activations?|outputs?|logits?|values)\b[^>]*(large|grow|grew|explod|amplif|increase|saturat)",
    misleading=f"{SIDE}|{TOO_FAST}|swallow|rounding|in no optimizer",
    held_back=True,
)
def standard_normal(run: Training, *, sound: bool = False) -> None:
    """Weights are drawn by `torch.randn`, whatever the width: each layer multiplies by six, scores are hundreds."""
    # Loss of all rows at the end: 14.6, without the fault 0.076.
    model, (x, y) = mlp(16, 64, 64, 64, 10), clusters(spread=1.0)
    batch = batches(x, y)
    if not sound:
        with torch.no_grad():
            for layer in model[::2]:
                layer.weight.copy_(torch.randn(layer.weight.shape))

    def loss(step: int) -> Tensor:
        _measure(run, step, lambda: F.cross_entropy(model(x), y))
        rows, classes = batch(step)
        return F.cross_entropy(model(rows), classes)

    run.train(model, torch.optim.Adam(model.parameters(), lr=3e-3), loss, 300)
