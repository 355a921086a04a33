"""Mishaps of loops, losses and data that public threads report, by an author who had not read the rules.

With `sound` they are left out.
"""

import copy

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from benchmarks.trust.faults.oversights import FEW, SIDE, either
from benchmarks.trust.registry import fault
from benchmarks.trust.toys import Block, batches, clusters, counting, mlp, pictures, surface, token_loss
from benchmarks.trust.training import Training


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


@fault(
    "batch-norm-over-two-rows",
    named=f"{either('norm[0-9]?', f'{FEW}|two rows|statistics|saturat')}|batch(es)? (size|of)|micro-?batch|small batch",
    misleading=f"{SIDE}|learning rate",
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


@fault(
    "targets-broadcast-over-the-batch",
    named=r"broadcast|\bshapes?\b|(outputs?|predictions?|head|rows?)\b[^>]*(constant|collapse|vary|varies|depend"
    rf"|the same|\bmean\b|{FEW})",
    misleading=f"{SIDE}|learning rate",
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
    named=r"\b(states?|moments?|optimizer)\b[^>]*(reset|clear|lost|restart|forg[eo]t|empt|re-?creat|begins? again)"
    r"|(reset|clear|restart|re-?creat)[^>]*\b(states?|moments?|optimizer)\b|bias correction"
    r"|updates? [^>]*((same|equal|one|constant) (size|value|magnitude)|(size of|equal to) the (learning )?rate)"
    r"|steps? count",
    misleading=f"{SIDE}|swallow|rounding|in no optimizer|lower the (learning )?rate|rate (is |was )?too high",
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
)
def large_table(run: Training, *, sound: bool = False) -> None:
    """A head is tied to an embedding that begins with the size 1, as torch has it: its first scores are beyond 100."""
    model, batch = Tied(0.02 if sound else 1.0), batches(*counting(64))

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return token_loss(model, x, y)

    run.train(model, torch.optim.Adam(model.parameters(), lr=1e-3), loss, 120)
