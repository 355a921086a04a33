"""Mistakes of every day that public threads report most often, by an author who had not read the rules.

With `sound` they are left out. Behind each fault: what was measured with it and without it.
"""

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.trust.faults.oversights import SIDE, either
from benchmarks.trust.registry import fault
from benchmarks.trust.toys import Transformer, batches, clusters, counting, mlp, surface
from benchmarks.trust.training import Training

NAN = r"\bnan\b|non-?finite|\binf(inite|inity|inities)?\b"
TOO_LARGE = rf"{NAN}|overflow|range|exceed|too large|65,?504"
SMALL_UPDATES = (
    r"(updates?|steps?)\b[^>]*(swallow|lost|smaller than|rounded away|below)|(swallow|lost|rounded away)[^>]*\bupdates?"
)


def _measure(run: Training, step: int, of: Callable[[], Tensor], every: int = 10) -> None:
    """Note a number of the model at each tenth step."""
    if step % every == 0:
        with torch.no_grad():
            run.measures.append(float(of()))


class Likelihood(nn.Module):
    """A binary cross entropy by hand in a format, with an epsilon in its logarithms."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The loss of each row."""
        p, y = x.to(self.dtype).sigmoid(), y.to(self.dtype)
        return -(y * (p + 1e-8).log() + (1 - y) * (1 - p + 1e-8).log())


class Scored(nn.Module):
    """Points and labels in, losses out."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.net, self.likelihood = mlp(8, 64, 64, 1), Likelihood(dtype)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The loss of each row."""
        return self.likelihood(self.net(x), y)


@fault(
    "epsilon-of-a-logarithm-in-fp16",
    named=either("likelihood", rf"{NAN}|logarithm") + r"|logarithm|\blog\b|\bepsilon|\beps\b|1e-0?8",
    misleading=f"{SIDE}|learning rate|swallow|in no optimizer",
    precision="fp16",
    held_back=True,
)
def no_epsilon(run: Training, *, sound: bool = False) -> None:
    """A cross entropy by hand adds 1e-8 before its logarithm, which is zero in FP16: sure rows give NaN."""
    # Cross entropy of all rows at the end: NaN (0.48 before the weights are NaN), without the fault 0.30.
    model = Scored(torch.float32 if sound else torch.float16)
    x = torch.randn(2048, 8) * torch.randn(2048, 1).exp()  # some rows are sure long before the others
    y = (x[:, :1] + torch.sin(3 * x[:, 1:2]) > 0).float()
    batch = batches(x, y)

    def loss(step: int) -> Tensor:
        _measure(run, step, lambda: F.binary_cross_entropy_with_logits(model.net(x), y))
        return model(*batch(step)).float().mean()

    run.train(model, torch.optim.Adam(model.parameters(), lr=5e-3), loss, 300)


@fault(
    "cast-in-place-to-save",
    named=rf"{SMALL_UPDATES}|b(f|float)16 (weights?|parameters?)|masters?\b"
    r"|(weights?|parameters?)\b[^>]*\b(in|to|are|as) b(f|float)16"
    r"|(weights?|parameters?)\b[^>]*(rounded|rounding|dtype|narrow|cast)",
    misleading=f"{SIDE}|lower the (learning )?rate|in no optimizer",
    precision="bf16",
    held_back=True,
)
def saved(run: Training, *, sound: bool = False) -> None:
    """At step 60 a checkpoint is saved of `model.bfloat16()`, which casts the model itself: it trains on in BF16."""
    # Loss at the end: 0.16, without the fault 0.065.
    model, (x, y) = mlp(16, 64, 64, 10), clusters(spread=1.2, count=512)

    def save(step: int) -> None:
        if step == 60:
            (copy.deepcopy(model) if sound else model).bfloat16().state_dict()

    def loss(step: int) -> Tensor:
        return F.cross_entropy(model(x).float(), y)

    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    run.train(model, optimizer, loss, 400, after=save)


class Table(nn.Module):
    """Columns in their own units, normalised over the batch, and a network."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.norm, self.net = nn.BatchNorm1d(8), mlp(8, 64, 64, 1)

    def forward(self, x: Tensor) -> Tensor:
        """One number a row."""
        return self.net(self.norm(x.to(self.dtype).float()))


@fault(
    "column-beyond-fp16",
    named=either("inputs?|columns?|features?|norm|data|batch", TOO_LARGE) + r"|65,?504",
    misleading=f"{SIDE}|learning rate|swallow|in no optimizer",
    precision="fp16",
)
def large_incomes(run: Training, *, sound: bool = False) -> None:
    """A loader casts a table to FP16, and one income in 65 is beyond 65,504: two batches in five are infinite."""
    # Loss at the end: NaN in a third of all batches and 0.97 in the others, without the fault 0.35.
    model, (x, y) = Table(torch.float32 if sound else torch.float16), surface(count=2048)
    incomes = 18000 * (0.6 * x[:, :1]).exp()
    batch = batches(torch.cat([incomes, x[:, 1:]], dim=1), y)

    def loss(step: int) -> Tensor:
        rows, targets = batch(step)
        value = F.mse_loss(model(rows).float(), targets)
        run.measures.append(float(value.detach().nan_to_num(10.0)))
        return value

    run.train(model, torch.optim.Adam(model.parameters(), lr=5e-3), loss, 300)


@fault(
    "stepped-again-behind-the-scaler",
    named=either("gradients?|updates?|weights?|parameters?|optimizer|scaler", NAN) + r"|overflow"
    r"|(applied|stepped|moved)[^>]*(twice|skip|scaler|overflow)|second step|two steps",
    misleading=f"{SIDE}|check the (data|batch)|swallow|in no optimizer",
    precision="fp16",
    held_back=True,
)
def stepped_again(run: Training, *, sound: bool = False) -> None:
    """`optimizer.step()` follows `scaler.step(optimizer)`: what the scaler skips for an overflow is applied there."""
    # Loss at the end: NaN since step 100, without the fault 0.13.
    model, batch = mlp(8, 64, 64, 1, act=nn.Tanh), batches(*surface())
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    # A loss scale of 2^8 that doubles at each tenth step, so that a run of 250 steps has an overflow, as long ones do.
    scaler = run.scaler(optimizer, init_scale=2.0**8, growth_interval=10)
    run.watch(model, optimizer)
    for step in range(250):
        x, y = batch(step)
        with run.forward():
            loss = F.mse_loss(model(x).float(), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        if not sound:
            optimizer.step()
        scaler.update()
        run.losses.append(float(loss.detach()))


class Residual(nn.Module):
    """Two layers on a branch, which is added to what comes in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        return x + self.down(self.up(x).relu())


@fault(
    "hidden-unit-of-a-bf16-model-beyond-fp16",
    named=either("up|down|hidden|activations?|forward|outputs?", TOO_LARGE) + r"|65,?504|\bbf16\b|bfloat16|outlier",
    misleading=f"{SIDE}|learning rate|swallow|in no optimizer",
    precision="fp16",
    held_back=True,
)
def pretrained(run: Training, *, sound: bool = False) -> None:
    """A model that BF16 has trained is tuned in FP16: one hidden unit is beyond 65,504 in a tenth of its rows."""
    # Loss at the end: NaN from the first step on, without the fault 0.17.
    model = nn.Sequential(nn.Linear(16, 32), Residual(32), Residual(32), nn.Linear(32, 10))
    (x, y), (later, classes) = clusters(spread=1.0), clusters(spread=1.0)
    old, new = batches(x, y), batches(later, classes)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(150):
        rows, targets = old(step)
        optimizer.zero_grad()
        F.cross_entropy(model(rows), targets).backward()
        optimizer.step()
    if not sound:
        with torch.no_grad():
            h = model[1](model[0](later))
            reached = model[2].up(h).relu()
            unit = int(reached.sum(dim=0).argmax())
            factor = 65504 / float(reached[:, unit].quantile(0.9))
            model[2].up.weight[unit] *= factor
            model[2].up.bias[unit] *= factor
            model[2].down.weight[:, unit] /= factor

    def loss(step: int) -> Tensor:
        _measure(run, step, lambda: F.cross_entropy(model(later), classes))
        rows, targets = new(step)
        return F.cross_entropy(model(rows).float(), targets)

    run.train(model, torch.optim.SGD(model.parameters(), lr=2e-2), loss, 250)


class Variational(nn.Module):
    """An encoder to means and logarithms of variances, a draw from them, and a decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(16, 64, 16), mlp(8, 64, 16)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What is decoded, the means and the logarithms."""
        mean, log_variance = self.encoder(x).chunk(2, dim=1)
        drawn = mean + (0.5 * log_variance).exp() * torch.randn(mean.shape)
        return self.decoder(drawn), mean, log_variance


@fault(
    "divergence-of-an-autoencoder-in-fp16",
    named=either("variances?|divergence|exponentials?|exp", TOO_LARGE)
    + r"|65,?504|"
    + either("loss", r"fp16|half|overflow|range|exceed|too large"),
    misleading=f"{SIDE}|learning rate|swallow|in no optimizer",
    precision="fp16",
    held_back=True,
)
def outside_of_autocast(run: Training, *, sound: bool = False) -> None:
    """The divergence of an autoencoder is computed outside of autocast, in FP16: log-variances above 11 overflow."""
    # Squared error of what is decoded at the end: 1,780 as at the start, without the fault 111.
    model, (x, _) = Variational(), clusters(16, 8, 0.3)
    x = 40 * x  # not normalised, as counts and amounts often are
    batch = batches(x, size=64)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    run.watch(model, optimizer)
    for step in range(300):
        (rows,) = batch(step)
        with run.forward():
            decoded, mean, log_variance = model(rows)
        if sound:
            mean, log_variance = mean.float(), log_variance.float()
        divergence = 0.5 * (mean * mean + log_variance.exp() - 1 - log_variance).sum(dim=1)
        loss = ((decoded.float() - rows).square().sum(dim=1) + divergence.float()).mean()
        run.step(loss, optimizer, clip=10.0)
        _measure(run, step, lambda: (model.decoder(model.encoder(x).chunk(2, dim=1)[0]) - x).square().mean())


@fault(
    "dice-over-the-pixels-in-fp16",
    named=either("dice|loss|sums?", TOO_LARGE) + r"|65,?504|overflow",
    misleading=f"{SIDE}|learning rate|swallow|in no optimizer",
    precision="fp16",
    held_back=True,
)
def many_pixels(run: Training, *, sound: bool = False) -> None:
    """A Dice loss sums 100,000 pixels outside of autocast, in FP16: the sum is infinite, and the loss has no slope."""
    # Share of wrong pixels at the end: 0.45 as at the start, without the fault 0.033.
    model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 3, padding=1))
    masks = (F.interpolate(torch.randn(64, 1, 6, 6), size=(80, 80), mode="bicubic") > 0).float()
    pictures = masks + 0.8 * torch.randn(64, 1, 80, 80)
    batch = batches(pictures, masks, size=16)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    run.watch(model, optimizer)
    for step in range(120):
        x, y = batch(step)
        with run.forward():
            scores = model(x)
        if sound:
            scores = scores.float()
        p, y = scores.sigmoid(), y.to(scores.dtype)
        loss = 1 - (2 * (p * y).sum() + 1) / (p.sum() + y.sum() + 1)
        run.step(loss, optimizer)
        _measure(run, step, lambda: ((model(pictures) > 0) != (masks > 0)).float().mean())


@fault(
    "weights-only-in-e4m3",
    named=rf"{SMALL_UPDATES}|e4m3|\bfp8|float8|8[- ]bit|masters?\b"
    r"|(weights?|parameters?)\b[^>]*(rounded|rounding|codes|distinct|narrow)",
    misleading=f"{SIDE}|lower the (learning )?rate|in no optimizer",
)
def only_codes(run: Training, *, sound: bool = False) -> None:
    """Weights are kept as E4M3 codes with a scale and nowhere else: updates smaller than half a code are lost."""
    # Loss at the end: 4.0 from 2.3, without the fault 0.13.
    model, batch = mlp(16, 64, 64, 10), batches(*clusters(spread=1.0))

    @torch.no_grad()
    def store(step: int) -> None:
        for p in model.parameters():
            scale = 448 / p.abs().amax()
            if not sound and p.dim() > 1:
                p.copy_((p * scale).to(torch.float8_e4m3fn).float() / scale)

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.cross_entropy(model(x), y)

    run.train(model, torch.optim.Adam(model.parameters(), lr=5e-4), loss, 400, after=store)


@fault(
    "sigmoid-before-a-loss-of-logits",
    named=r"sigmoid|\blogits?\b|probability|probabilities|saturat"
    r"|(outputs?|head|predictions?|scores)\b"
    r"[^>]*(between 0 and 1|bounded|(only|never|all) (positive|negative)|non-?neg)",
    misleading=f"{SIDE}|learning rate|swallow|rounding|in no optimizer",
    held_back=True,
)
def two_sigmoids(run: Training, *, sound: bool = False) -> None:
    """A model ends with a sigmoid, and `BCEWithLogitsLoss` has one: no output is ever below a half."""
    # Share of wrong answers at the end: 0.36, without the fault 0.006.
    model = nn.Sequential(mlp(16, 64, 64, 1), nn.Identity() if sound else nn.Sigmoid())
    x, y = clusters(spread=1.0)
    y = (y % 2)[:, None].float()
    batch = batches(x, y)

    def loss(step: int) -> Tensor:
        _measure(run, step, lambda: ((model(x).sigmoid() > 0.5) != (y > 0.5)).float().mean())
        rows, classes = batch(step)
        return F.binary_cross_entropy_with_logits(model(rows), classes)

    run.train(model, torch.optim.Adam(model.parameters(), lr=3e-3), loss, 250)


@fault(
    "lambda-returns-the-rate",
    named=r"(learning )?rates?\b[^>]*(low|small|tiny|too|raise)|raise the (learning )?rate|schedule|scheduling|lambda"
    r"|(updates?|steps)\b[^>]*(tiny|too small|small)|(weights?|parameters?)\b[^>]*\b(hardly|barely|scarcely)",
    misleading=f"{SIDE}|lower the (learning )?rate|rate (is |was )?too high|in no optimizer",
)
def rate_squared(run: Training, *, sound: bool = False) -> None:
    """A function for `LambdaLR` returns the rate, not its factor: torch multiplies it by the rate once more."""
    # Loss at the end: 2.28 from 2.29, without the fault 0.035.
    model, batch = mlp(16, 64, 64, 10), batches(*clusters(spread=1.0))
    rate = 3e-3
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    top = 1.0 if sound else rate
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: top * (1 - step / 260))

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.cross_entropy(model(x), y)

    run.train(model, optimizer, loss, 250, scheduler=scheduler)


@fault(
    "schedule-begins-again-at-a-resume",
    named=r"schedule|scheduling|\bresum|restart"
    r"|(learning )?rate\b[^>]*(jump|\brose|risen|rises|back|higher|increase|increasing|\bup\b)",
    misleading=f"{SIDE}|swallow|rounding|in no optimizer",
)
def from_the_top(run: Training, *, sound: bool = False) -> None:
    """At step 240 of 300 a run is resumed without its schedule, which begins at its top again and never comes down."""
    # Loss of all rows at the end: 0.48, without the fault 0.27.
    model, (x, y) = mlp(16, 64, 64, 10), clusters(spread=1.2, count=2048)
    batch = batches(x, y, size=16)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 300)
    run.watch(model, optimizer)
    for step in range(300):
        if step == 240:
            saved, place = copy.deepcopy(optimizer.state_dict()), scheduler.state_dict()
            for group in optimizer.param_groups:
                group["lr"] = 2e-2  # a script makes the optimizer and its schedule as at the start
            scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 300)
            if sound:
                optimizer.load_state_dict(saved)
                scheduler.load_state_dict(place)
        rows, classes = batch(step)
        run.step(F.cross_entropy(model(rows), classes), optimizer)
        scheduler.step()
        _measure(run, step, lambda: F.cross_entropy(model(x), y))


@fault(
    "padding-counted-in-the-loss",
    named=r"\b(pads?|padding|padded)\b|ignore_index|-100|(one|same|single|constant) (token|target|label|class)\b"
    r"|(targets?|labels?)\b[^>]*(constant|alike|one (class|value)|repeat|the same)",
    misleading=f"{SIDE}|lower the (learning )?rate|rate (is |was )?too high|swallow|rounding|in no optimizer",
)
def mostly_padding(run: Training, *, sound: bool = False) -> None:
    """Labels of padding are not set to -100, and of 64 places 60 are padding: a loss near zero is of padding."""
    # Loss of tokens at the end: 1.30, without the fault 0.37.
    tokens, later = counting(31, length=7)
    lengths = torch.randint(2, 7, (len(tokens), 1))
    outside = torch.arange(7) >= lengths
    x, y = F.pad(tokens.masked_fill(outside, 31), (0, 57), value=31), F.pad(later, (0, 57), value=31)
    y[:, :7].masked_fill_(outside, 31)
    model, batch = Transformer(depth=1), batches(x, y, size=16)

    def loss(step: int) -> Tensor:
        rows, targets = batch(step)
        scores, targets = model(rows).flatten(0, 1), targets.flatten()
        run.measures.append(float(F.cross_entropy(scores.detach()[targets != 31], targets[targets != 31])))
        return F.cross_entropy(scores, targets, ignore_index=31 if sound else -100)

    run.train(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), loss, 300, clip=1.0)


class Reader(nn.Module):
    """A recurrent network over places first, and scores from its last output."""

    def __init__(self, *, transposed: bool) -> None:
        super().__init__()
        self.transposed = transposed
        self.lstm, self.head = nn.LSTM(4, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of each row."""
        rows, places, width = x.shape
        h, _ = self.lstm(x.transpose(0, 1) if self.transposed else x.reshape(places, rows, width))
        return self.head(h[-1])


@fault(
    "reshaped-instead-of-transposed",
    named=r"reshap|\bview\b|transpos|permut|batch_first|\b(across|between|over|mix\w*) (the )?(batch|rows|examples)\b"
    r"|(inputs?|rows|data)\b[^>]*(scrambl|shuffl|mixed|not (match|fit|belong)|unrelated|mismatch)"
    r"|(labels?|targets?)\b[^>]*(shuffl|not (match|fit|belong|depend)|unrelated|mismatch|nothing to do)",
    misleading=f"{SIDE}|learning rate|swallow|rounding|in no optimizer",
)
def scrambled(run: Training, *, sound: bool = False) -> None:
    """Batch and time are swapped by a reshape, not a transpose: each sequence is put together from other rows."""
    # Loss at the end: 1.39 from 1.40, without the fault 0.021.
    y = torch.randint(4, (1024,))
    places = torch.arange(16)[None, :, None]
    x = torch.sin(2 * torch.pi * (places * (y[:, None, None] + 1) / 16 + torch.rand(1024, 1, 4)))
    model, batch = Reader(transposed=sound), batches(x + 0.3 * torch.randn(1024, 16, 4), y)

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.cross_entropy(model(x), y)

    run.train(model, torch.optim.Adam(model.parameters(), lr=5e-3), loss, 250)


@fault(
    "cleared-at-each-micro-batch",
    named=r"accumulat|micro-?batch|zero_grad|clear(s|ed|ing)?\b|overwrit|(one|last) of \d+ (backward|micro)",
    misleading=f"{SIDE}|lower the (learning )?rate|rate (is |was )?too high|swallow|rounding|in no optimizer",
)
def only_the_last(run: Training, *, sound: bool = False) -> None:
    """Gradients are cleared before each of sixteen micro-batches: only the last one counts, a sixteenth of it."""
    # Loss at the end: 1.79, without the fault 0.045.
    model, batch = mlp(16, 64, 64, 10), batches(*clusters(spread=1.0), size=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    run.watch(model, optimizer)
    for step in range(150):
        total = 0.0
        for micro in range(16):
            if micro == 0 or not sound:
                optimizer.zero_grad()
            x, y = batch(step)
            loss = F.cross_entropy(model(x), y) / 16
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        run.losses.append(total)


class Adapted(nn.Module):
    """A frozen linear layer, and the product of two small matrices that are trained."""

    def __init__(self, into: int, out: int) -> None:
        super().__init__()
        self.base = nn.Linear(into, out).requires_grad_(False)
        self.down, self.up = nn.Linear(into, 8, bias=False), nn.Linear(8, out, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        """The layer's outputs."""
        return self.base(x) + self.up(self.down(x))


class Checkpointed(nn.Module):
    """Adapted layers whose values the backward computes again, and a head."""

    def __init__(self, *, inputs: bool) -> None:
        super().__init__()
        self.inputs = inputs
        self.trunk = nn.Sequential(Adapted(8, 16), nn.Tanh(), Adapted(16, 16), nn.Tanh())
        self.head = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        """One number a row."""
        x = x.clone().requires_grad_(self.inputs)
        return self.head(checkpoint(self.trunk, x, use_reentrant=True))


@fault(
    "checkpoint-of-inputs-without-a-gradient",
    named=r"checkpoint|reentrant|requires_grad|detach|\b(no|zero|without|never gets?|get no) (a |any )?gradients?"
    r"|gradients? (is|are|was|were|stays?) (exactly |always |all )*(zero|none|missing)"
    r"|(trunk|down|up|adapters?)\b[^>]*(not|never|do not|does not)[^>]*(mov|chang|update|train|learn)",
    misleading=r"\bReLU|raise the loss scale|scale-low|learning rate|swallow|rounding|in no optimizer",
)
def no_way_back(run: Training, *, sound: bool = False) -> None:
    """Adapters lie in a checkpoint whose inputs need no gradient: it gives them none, and only the head learns."""
    # Loss at the end: 0.14, without the fault 0.057.
    model, batch = Checkpointed(inputs=sound), batches(*surface())

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.mse_loss(model(x), y)

    run.train(model, torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2), loss, 300)


@fault(
    "decay-of-adamw-given-to-adam",
    named=r"weight[ _]decay|\bdecay|AdamW|regulari[sz]"
    r"|(weights?|parameters?|norms?)\b[^>]*(shrink|shrunk|shrank|fall|fell|towards? (0|zero))",
    misleading=f"{SIDE}|lower the (learning )?rate|rate (is |was )?too high|swallow|rounding|in no optimizer",
)
def coupled(run: Training, *, sound: bool = False) -> None:
    """The decay of 0.1 that is meant for AdamW is given to Adam, which adds it to gradients: weights shrink away."""
    # Loss at the end: 0.77, without the fault 0.070.
    model, batch = mlp(16, 64, 64, 10), batches(*clusters(spread=1.0))
    kind = torch.optim.AdamW if sound else torch.optim.Adam

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.cross_entropy(model(x), y)

    run.train(model, kind(model.parameters(), lr=2e-3, weight_decay=0.1), loss, 300)
