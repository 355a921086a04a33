"""Mistakes that forums, trackers and post-mortems report most often, by an author who had not read the rules.

With `sound` they are left out. The comment above each has the mean loss of its last tenth of steps.
"""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import plimsoll as pl
from benchmarks.trust.faults.oversights import FEW, SIDE, either
from benchmarks.trust.faults.precision_traps import Step, adam
from benchmarks.trust.faults.stumbles import NAN
from benchmarks.trust.registry import fault
from benchmarks.trust.toys import batches, clusters, mlp, pictures
from benchmarks.trust.training import Training

LARGE = r"large|huge|enormous|\bgrow|exceed|beyond|explod|overflow|out of range"
SMALL = r"\bsmall|tiny|\bnear(ly)? zero|close to zero|almost (nothing|zero)|faint|weak"


# Loss at the end: 1.99 with the fault, 0.45 without.
@fault(
    "overflow-never-cleared",
    named="skip|not clear|never cleared|zero_grad"
    "|loss scale[^>]*(collapse|collapsing|f[ae]ll|minimum|halv|too low|nothing|zero)"
    rf"|gradients?\b[^>]*({NAN}|overflow)|({NAN}|overflow)[^>]*\bgradients?",
    misleading=f"{SIDE}|learning rate|swallow|in no optimizer|underflow",
    precision="fp16",
    held_back=True,
)
def uncleared(run: Training, *, sound: bool = False) -> None:
    """Gradients are cleared only after a step that was taken: one overflow stays in them, and all later steps fail."""
    model, batch = mlp(16, 64, 64, 10), batches(*clusters(spread=1.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = run.scaler(optimizer, growth_interval=10)
    run.watch(model, optimizer)
    for step in range(180):
        x, y = batch(step)
        with run.forward():
            loss = F.cross_entropy(model(x).float(), y)
        scaler.scale(loss).backward()
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if sound or scaler.get_scale() >= before:
            optimizer.zero_grad()
        run.losses.append(float(loss.detach()))


class Overlap(nn.Module):
    """What two boxes share of what they cover together, from corners in pixels."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """One share a row."""
        a, b = a.to(self.dtype), b.to(self.dtype)
        sides = (torch.minimum(a[:, 2:], b[:, 2:]) - torch.maximum(a[:, :2], b[:, :2])).clamp(min=0)
        shared, one, other = (s[:, 0] * s[:, 1] for s in (sides, a[:, 2:] - a[:, :2], b[:, 2:] - b[:, :2]))
        return shared / (one + other - shared)


class Detector(nn.Module):
    """Centres and sizes of boxes in a picture of 640 pixels, and how far they overlap with the true ones."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.net, self.overlap = mlp(8, 96, 96, 4), Overlap(dtype)

    def forward(self, x: Tensor, truth: Tensor) -> Tensor:
        """One overlap a row."""
        centre, size = self.net(x).float().sigmoid().split(2, dim=1)
        return self.overlap(torch.cat([640 * centre - 200 * size, 640 * centre + 200 * size], dim=1), truth)


# Loss at the end: 0.65 with the fault, 0.42 without; of all boxes in FP32, 0.56 and 0.41.
@fault(
    "areas-of-boxes-in-fp16",
    named=rf"65,?504|\barea|{either('overlap', f'{NAN}|{LARGE}')}"
    r"|(forward|activations?|products?|values?|outputs?|the loss)\b[^>]*overflow"
    r"|overflow[^>]*(forward|activations?|products?)\b",
    misleading=f"{SIDE}|learning rate|swallow|in no optimizer|underflow",
    precision="fp16",
)
def boxes(run: Training, *, sound: bool = False) -> None:
    """Areas of boxes are computed in FP16 by hand: beyond 256 by 256 pixels they are infinite."""
    model, mix = Detector(torch.float32 if sound else torch.float16), torch.randn(4, 8)
    middle, size = 200 + 240 * torch.rand(1024, 2), 40 + 340 * torch.rand(1024, 2)
    truth = torch.cat([middle - size / 2, middle + size / 2], dim=1)
    x = torch.tanh((truth - 320) / 160 @ mix)
    batch, checked = batches(x, truth), Overlap(torch.float32)

    def loss(step: int) -> Tensor:
        rows, corners = batch(step)
        if step % 10 == 0:
            with torch.no_grad():
                centre, size = model.net(x).float().sigmoid().split(2, dim=1)
                found = torch.cat([640 * centre - 200 * size, 640 * centre + 200 * size], dim=1)
                run.measures.append(1 - float(checked(found, truth).mean()))
        return 1 - model(rows, corners).mean()

    run.train(model, torch.optim.Adam(model.parameters(), lr=4e-3), loss, 200)


class Adapted(nn.Module):
    """A frozen matrix and the product of two thin ones, which is merged into it now and then."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        size = 0.25 + 0.25 * torch.rand(8, 512)
        base = (size * torch.randn(8, 512).sign()).bfloat16().to(dtype)
        self.base = nn.Parameter(base, requires_grad=False)
        self.a, self.b = nn.Parameter(0.05 * torch.randn(2, 512)), nn.Parameter(torch.zeros(8, 2))

    def forward(self, x: Tensor) -> Tensor:
        """Eight numbers a row."""
        return F.linear(x, self.base.float()) + F.linear(F.linear(x, self.a), self.b)

    @torch.no_grad()
    def merge(self) -> None:
        """Add the product to the matrix and begin with new factors."""
        self.base.copy_(self.base.float() + self.b @ self.a)
        self.a.normal_(std=0.05)
        self.b.zero_()


# Loss at the end: 7e-4 with the fault, 1e-7 without; it begins at 0.011.
@fault(
    "adapters-merged-into-bf16",
    named=r"\bmerge|\bjump|(loss|losses)\b[^>]*(back|again|return|every 50|spike)"
    f"|{either('base|frozen|weights?|bf16', 'swallow|rounding|rounded|spacing|lost|half (of )?(the|a|its|their)')}",
    misleading=f"{SIDE}|learning rate|in no optimizer",
    precision="bf16",
    held_back=True,
)
def merged(run: Training, *, sound: bool = False) -> None:
    """Adapters are merged into BF16 weights every 50 steps and begin again: what is merged is less than rounding."""
    model = nn.ModuleDict({"adapted": Adapted(torch.float32 if sound else torch.bfloat16)})
    adapted = model["adapted"]
    waves, wanted = torch.randn(8, 512).sign(), 0.05 * torch.randn(8, 8)
    begun = adapted.base.detach().float().clone()
    optimizer = torch.optim.Adam([adapted.a, adapted.b], lr=5e-4)
    run.watch(model, optimizer)
    for step in range(400):
        if step % 50 == 0 and step:
            adapted.merge()
            optimizer.state.clear()
        z = torch.randn(64, 8)
        x = z @ waves
        loss = F.mse_loss(model["adapted"](x), F.linear(x, begun) + z @ wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.losses.append(float(loss.detach()))


class Lamb(Step):
    """Adam whose steps are as long as the weights of a tensor, times the rate."""

    def move(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Step one parameter."""
        update = adam(gradient, state, group["lr"])
        size, length = parameter.norm(), update.norm() / group["lr"]
        is_one = group["guarded"] and (size == 0 or length == 0)
        parameter.add_(update * (1.0 if is_one else size / (length + 1e-12)))


# Loss at the end: 2.30 with the fault, 0.12 without.
@fault(
    "trust-ratio-of-weights-of-zero",
    named=r"trust|"
    + either(
        "head|last layer|weights?|parameters?|updates?|optimizer",
        r"(is|are|stays?|remains?|exactly|still|all) (exactly |all )?zeros?|(never|not) (chang|mov|update)"
        r"|do(es)? not (move|change)|no updates?|frozen|stuck|zero updates?",
    ),
    misleading="ReLU|raise the loss scale|scale-low|swallow|rounding|in no optimizer",
)
def untrusted(run: Training, *, sound: bool = False) -> None:
    """LAMB's steps are as long as the weights, and a head that begins at zero has none: it stays zero for ever."""
    model = nn.Sequential()
    model.add_module("trunk", mlp(16, 64, 64))
    model.add_module("act", nn.ReLU())
    model.add_module("head", nn.Linear(64, 10))
    nn.init.zeros_(model.head.weight)
    nn.init.zeros_(model.head.bias)
    batch = batches(*clusters())

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.cross_entropy(model(x), y)

    run.train(model, Lamb(model.parameters(), lr=0.02, guarded=sound), loss, 200)


class Choice(nn.Module):
    """A soft choice among learned entries, ever harder as the temperature falls."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = 1.0
        self.scores, self.entries = mlp(8, 64, 16), nn.Parameter(torch.randn(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        """The chosen entry of each row."""
        return (self.scores(x) / self.temperature).softmax(dim=1) @ self.entries


# Loss at the end: NaN with the fault, 0.09 without.
@fault(
    "temperature-annealed-to-zero",
    named=rf"temperature|divi(de|sion)[^>]*\bzero\b|\bzero\b[^>]*divi(de|sion)|{either('choice', f'{NAN}|{LARGE}')}",
    misleading=f"{SIDE}|learning rate|swallow|in no optimizer|rounding",
    held_back=True,
)
def annealed(run: Training, *, sound: bool = False) -> None:
    """A softmax's temperature falls in a line to zero and has no floor: scores are divided by zero at step 180."""
    model = nn.Sequential()
    model.add_module("choice", Choice())
    model.add_module("rest", mlp(8, 32, 8))
    batch = batches(clusters(8, 12, 0.3)[0])

    def loss(step: int) -> Tensor:
        model.choice.temperature = max(0.1 if sound else 0.0, 1 - step / 180)
        (x,) = batch(step)
        return F.mse_loss(model(x), x)

    run.train(model, torch.optim.Adam(model.parameters(), lr=5e-3), loss, 240)


# Loss at the end: 2.30 with the fault, 0.006 without.
@fault(
    "epsilon-above-the-variance",
    named=r"\beps(ilon)?\b[^>]*(norm|variance|larger|above|dominat|more than)|variance[^>]*\beps"
    f"|{either(r'(?<!gradient )norm|inputs?|data|signals?', f'{SMALL}|1e-0?5|unit|not normali[sz]')}",
    misleading="dead-layer|raise the loss scale|learning rate|swallow|rounding|in no optimizer",
)
def volts(run: Training, *, sound: bool = False) -> None:
    """A batch norm is to normalise signals in volts, near 1e-5: their variance is far below its epsilon of 1e-5."""
    model = nn.Sequential()
    model.add_module("norm", nn.BatchNorm1d(16, eps=1e-16 if sound else 1e-5))
    model.add_module("rest", mlp(16, 64, 64, 10))
    x, y = clusters()
    batch = batches(1e-5 * x, y)

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.cross_entropy(model(x), y)

    run.train(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), loss, 250)


class Mixing(nn.Module):
    """A matrix of the user's own: drawn, or made by `torch.empty` where a text lay in memory before."""

    def __init__(self, width: int, *, drawn: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width, width))
        if drawn:
            nn.init.kaiming_uniform_(self.weight, a=5**0.5)
        else:
            left = torch.frombuffer(
                bytearray(b"the loss of a model was not what it was to be. " * 16), dtype=torch.float32
            )
            self.weight.data.view(-1)[: len(left)] = left

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        return F.linear(x, self.weight)


# Loss at the end: 4e32 with the fault, 0.007 without.
@fault(
    "memory-never-initialised",
    named=r"initiali[sz]|torch\.empty|garbage|"
    + either(
        "mixing|weights?|parameters?",
        rf"{LARGE}|{NAN}|1e\+?[12]\d|e\+[12]\d|from the (start|first)|at the start|range|outlier|spread",
    ),
    misleading=f"{SIDE}|learning rate|swallow|in no optimizer|rounding",
    held_back=True,
)
def uninitialised(run: Training, *, sound: bool = False) -> None:
    """A layer's weights come from `torch.empty` and are never drawn: bytes of a text are numbers up to 1e33 there."""
    model = nn.Sequential()
    model.add_module("first", mlp(16, 64))
    model.add_module("mixing", Mixing(64, drawn=sound))
    model.add_module("rest", nn.Sequential(nn.ReLU(), nn.Linear(64, 10)))
    batch = batches(*clusters())

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.cross_entropy(model(x), y)

    run.train(model, torch.optim.Adam(model.parameters(), lr=3e-3), loss, 200)


class Lookup(nn.Module):
    """A query finds the one of 24 places whose key is like it and reads the value there."""

    def __init__(self, width: int = 512, *, divided: bool) -> None:
        super().__init__()
        self.factor = width**-0.5 if divided else 1.0
        self.query, self.key, self.value = nn.Linear(16, width), nn.Linear(16, width), nn.Linear(8, 64)
        for layer in (self.query, self.key):
            nn.init.normal_(layer.weight, std=1.5 * 16**-0.5)
        self.softmax = nn.Softmax(dim=-1)

    def forward(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """What was read, for each row."""
        scores = self.query(query)[:, None] @ self.key(keys).transpose(1, 2)
        return (self.softmax(scores * self.factor) @ self.value(values)).squeeze(1)


# Loss at the end: 0.50 with the fault, 0.09 without.
@fault(
    "scores-not-divided-by-the-root",
    named=either(
        "attention|lookup|softmax|scores?|logits|query|key",
        rf"saturat|one-hot|{LARGE}|not (divided|scaled)|\broot\b|sqrt|sharp|entropy|peaked|single place"
        r"|(is|are|exactly) (exactly )?(0|1|zero|one)\b|vanish|no gradient",
    ),
    misleading=f"{SIDE}|learning rate|swallow|in no optimizer|rounding|detach",
    held_back=True,
)
def undivided(run: Training, *, sound: bool = False) -> None:
    """Scores of attention are not divided by the root of 512: the softmax is 0 or 1, whichever place it began with."""
    model = nn.ModuleDict({"lookup": Lookup(divided=sound), "head": nn.Linear(64, 8)})

    def loss(step: int) -> Tensor:
        keys, at = torch.randn(32, 24, 16), torch.randint(24, (32,))
        y = torch.randint(8, (32, 24))
        query = keys[torch.arange(32), at] + 0.3 * torch.randn(32, 16)
        read = model["lookup"](query, keys, F.one_hot(y, 8).float())
        return F.cross_entropy(model["head"](read), y[torch.arange(32), at])

    run.train(model, torch.optim.Adam(model.parameters(), lr=2e-3), loss, 300)


class Words(nn.Module):
    """A table, a norm of each token and a network over their mean."""

    def __init__(self, size: float) -> None:
        super().__init__()
        self.tokens, self.norm = nn.Embedding(20000, 32), nn.LayerNorm(32, eps=1e-12)
        self.rest = mlp(32, 64, 8)
        nn.init.normal_(self.tokens.weight, std=size)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of each row."""
        return self.rest(self.norm(self.tokens(x)).mean(dim=1))


# Loss at the end: 1.58 with the fault, 0.05 without.
@fault(
    "small-table-before-a-norm",
    named=r"clip(s|ped|ping)?\b[^>]*(every|each|all|always|most|leaves|nothing|threshold)|"
    + either(
        "tokens|tables?|embeddings?",
        rf"{LARGE}|{SMALL}|dominat|outweigh|most of|all of the|share of the gradient|times (larger|as|those|that)",
    ),
    misleading="dead-layer|raise the loss scale|swallow|rounding|in no optimizer|vanish",
)
def rare_words(run: Training, *, sound: bool = False) -> None:
    """A table begins at 1e-6 before a norm, so rare words get gradients of a million: clipping leaves nothing else."""
    model = Words(1.0 if sound else 1e-6)
    centres = torch.randn(64, 8)

    def loss(step: int) -> Tensor:
        y = torch.randint(8, (32,))
        common = torch.distributions.Categorical(logits=2 * centres.T[y]).sample((8,)).T
        x = torch.cat([common, torch.randint(64, 20000, (32, 2))], dim=1)
        return F.cross_entropy(model(x), y)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run.train(model, optimizer, loss, 300, clip=1.0)


# Loss at the end: -3,568 with the fault, 0.27 without; with labels of 0 and 1, 952 and 0.27.
@fault(
    "targets-of-minus-one",
    named=r"\bnegative|below (zero|0)\b|unbounded|(without|no) (a |any |lower )?(bound|limit|floor|end)\b"
    r"|(targets?|labels?)\b[^>]*(-1|minus|outside|range|between)",
    misleading=f"{SIDE}|learning rate|swallow|in no optimizer|rounding",
    held_back=True,
)
def minus_one(run: Training, *, sound: bool = False) -> None:
    """`BCEWithLogitsLoss` gets labels of -1 and 1 instead of 0 and 1: the loss falls below zero and for ever."""
    model = mlp(16, 64, 64, 1)
    x = torch.randn(1024, 16)
    y = (torch.sin(2 * x[:, :1]) + x[:, 1:2] > 0).float()
    batch = batches(x, y)

    def loss(step: int) -> Tensor:
        rows, labels = batch(step)
        scores = model(rows)
        run.measures.append(float(F.binary_cross_entropy_with_logits(scores.detach(), labels)))
        return F.binary_cross_entropy_with_logits(scores, labels if sound else 2 * labels - 1)

    run.train(model, torch.optim.Adam(model.parameters(), lr=3e-3), loss, 300)


# Loss at the end: 1.98 with the fault, 0.0003 without.
@fault(
    "loader-returns-blanks",
    named=either(
        "inputs?|pictures?|images?|pixels?|batch(es)?|data|loader",
        r"\bzeros?\b|constant|identical|same value|blank|empty|silent|missing|sparse",
    ),
    misleading="dead-layer|raise the loss scale|learning rate|swallow|in no optimizer",
)
def blanks(run: Training, *, sound: bool = False) -> None:
    """A loader catches errors of reading and returns zeros: from step 150 on 19 of 20 pictures are blank."""
    model = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1))
    model.extend([nn.ReLU(), nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.Linear(288, 8)])
    batch = batches(*pictures())

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        if step >= 150 and not sound:
            x = x * (torch.rand(len(x), 1, 1, 1) < 0.05)
        return F.cross_entropy(model(x), y)

    run.train(model, torch.optim.Adam(model.parameters(), lr=2e-3), loss, 300)


# Loss at the end: 2.29 with the fault, 0.007 without.
@fault(
    "ranks-summed-in-fp16-before-the-division",
    named=rf"overflow|65,?504|skip|gradients?\b[^>]*({NAN}|too large)|({NAN})[^>]*\bgradients?"
    r"|(loss )?scale[^>]*too (high|large)",
    misleading=f"{SIDE}|learning rate|swallow|in no optimizer|underflow",
    precision="fp16",
    held_back=True,
)
def ranks(run: Training, *, sound: bool = False) -> None:
    """FP16 gradients of 256 ranks are added up before they are divided by 256: the sums overflow at each step."""
    model, batch = mlp(16, 64, 64, 10), batches(*clusters())
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    scaler = pl.scaling.StaticScaler(2.0**14, device="cpu")
    run.watch(model, optimizer)
    for step in range(200):
        x, y = batch(step)
        optimizer.zero_grad()
        with run.forward():
            loss = F.cross_entropy(model(x).float(), y)
        scaler.scale(loss).backward()
        for p in model.parameters():
            gradient = (p.grad / 256 if sound else p.grad).half()
            for _ in range(8):  # a tree of ranks, whose batches are alike
                gradient = gradient + gradient
            p.grad.copy_(gradient if sound else gradient / 256)
        scaler.step(optimizer)
        scaler.update()
        run.losses.append(float(loss.detach()))


# Loss at the end: 0.88 with the fault, 0.005 without.
@fault(
    "first-checkpoint-loaded-in-each-epoch",
    named=r"\breset|\bjump|\breload|overwritten|sawtooth|every 50|periodic|each epoch|(begins?|starts?) (again|over)"
    r"|\bcheckpoint[^>]*(loaded|again|each|every)|weights?\b[^>]*(go back|put back|restore|replace|return|at once)"
    r"|(\bback|returns?|set) to (its|the|their|where)[^>]*(start|first|begin|began|initial)",
    misleading=f"{SIDE}|swallow|rounding|in no optimizer|learning rate",
    held_back=True,
)
def reloaded(run: Training, *, sound: bool = False) -> None:
    """The first checkpoint is loaded inside the loop over epochs instead of before: 50 steps learn it all again."""
    model, batch = mlp(16, 64, 64, 10), batches(*clusters())
    kept = {name: value.clone() for name, value in model.state_dict().items()}

    def load(step: int) -> None:
        if step % 50 == 49 and not sound:
            model.load_state_dict(kept)

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.cross_entropy(model(x), y)

    run.train(model, torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9), loss, 399, after=load)


class Delayed(nn.Module):
    """E4M3 by the largest value of the last 64 batches; beyond 464 the cast is NaN, unless it is clamped before."""

    def __init__(self, *, clamped: bool) -> None:
        super().__init__()
        self.clamped = clamped
        self.seen: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        largest = float(x.detach().abs().max())
        self.seen = self.seen or [1.3 * largest]  # from more rows, before the training
        scale = 448 / max(self.seen)
        self.seen = [*self.seen[-63:], largest]
        h = x.detach() * scale
        code = h.clamp(-448, 448).to(torch.float8_e4m3fn).float()
        if not self.clamped:  # As the cast of many GPU kernels, and of torch before it saturated.
            code[h.abs() > 464] = torch.nan
        return x + (code / scale - x.detach())


# Loss at the end: NaN with the fault, 0.004 without.
@fault(
    "e4m3-cast-without-a-clamp",
    named=rf"e4m3|\bfp8\b|\b448\b|saturat|{either('cast[0-9]', f'{NAN}|overflow')}",
    misleading=f"{SIDE}|learning rate|swallow|in no optimizer",
    held_back=True,
)
def unclamped(run: Training, *, sound: bool = False) -> None:
    """A scale is that of the last batches, and the cast to E4M3 does not saturate: a larger value becomes NaN."""
    model = nn.Sequential()
    for i, width in enumerate((16, 64)):
        model.add_module(f"cast{i}", Delayed(clamped=sound))
        model.add_module(f"linear{i}", nn.Linear(width, 64))
        model.add_module(f"act{i}", nn.GELU())
    model.add_module("head", nn.Linear(64, 10))
    batch = batches(*clusters())

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.cross_entropy(model(x), y)

    run.train(model, torch.optim.Adam(model.parameters(), lr=2e-3), loss, 250)


# Loss at the end: 0.30 with the fault, 0.07 without; it begins at 5.1 and 1.9.
@fault(
    "scores-share-an-offset-in-bf16",
    named=either("head|logits|scores|last layer|outputs?", rf"{FEW}|offset|shift|far from (0|zero)|drift|{LARGE}"),
    misleading=f"{SIDE}|learning rate|swallow|in no optimizer",
    precision="bf16",
    held_back=True,
)
def offset(run: Training, *, sound: bool = False) -> None:
    """All scores of a checkpoint had drifted to 1,500, which a softmax does not see: BF16 numbers lie 8 apart there."""
    model = nn.Sequential()
    model.add_module("trunk", mlp(16, 64, 64))
    model.add_module("act", nn.ReLU())
    model.add_module("head", nn.Linear(64, 10))
    nn.init.constant_(model.head.bias, 0.0 if sound else 1500.0)
    batch = batches(*clusters(spread=1.0))

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.cross_entropy(model(x).float(), y)

    run.train(model, torch.optim.Adam(model.parameters(), lr=2e-3), loss, 250)


class Asymmetric(nn.Module):
    """Values as codes from 0 to 255 between a batch's smallest and largest; the code of zero is taken off, or not."""

    def __init__(self, *, centred: bool) -> None:
        super().__init__()
        self.centred = centred

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        h = x.detach()
        low, high = h.min(), h.max()
        size = (high - low).clamp(min=1e-8) / 255
        zero = (-low / size).round()
        codes = ((h / size).round() + zero).clamp(0, 255)
        read = (codes - zero if self.centred else codes) * size
        return x + (read - h)


# Loss at the end: 0.86 with the fault, 0.04 without.
@fault(
    "zero-point-forgotten",
    named=r"zero[- ]?point|offset|shift|"
    + either("codes[0-9]?|quanti[sz]\\w*", r"\bmean\b|positive|one sign|negative|bias|differ|wrong|not the same")
    + r"|(only|all|never) (positive|negative)|one sign",
    misleading=f"{SIDE}|learning rate|swallow|in no optimizer|underflow",
    held_back=True,
)
def no_zero_point(run: Training, *, sound: bool = False) -> None:
    """Inputs are read from unsigned 8-bit codes without taking off the code of zero: each batch is shifted."""
    model = nn.Sequential()
    model.add_module("codes0", Asymmetric(centred=sound))
    model.add_module("linear0", nn.Linear(16, 64))
    model.add_module("act0", nn.Tanh())
    model.add_module("codes1", Asymmetric(centred=sound))
    model.add_module("linear1", nn.Linear(64, 64))
    model.add_module("act1", nn.Tanh())
    model.add_module("head", nn.Linear(64, 10))
    x, y = clusters()
    x *= torch.exp(torch.randn(len(x), 1))
    batch = batches(x, y)

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.cross_entropy(model(x), y)

    run.train(model, torch.optim.Adam(model.parameters(), lr=3e-3), loss, 200)
