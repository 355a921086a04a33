"""Pitfalls of modules, loops and data that public threads ask about, by an author who had not read the rules.

With `sound` they are left out. Behind each fault: what was measured with it and without it.
"""

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from benchmarks.trust.faults.oversights import SIDE, either
from benchmarks.trust.registry import fault
from benchmarks.trust.toys import Block, Transformer, batches, clusters, mlp, surface, token_loss
from benchmarks.trust.training import Training

NAN = r"\bnan\b|non-?finite|\binf(inite|inity|inities)?\b"
TOO_FAST = r"lower the (learning )?rate|rate (is |was )?too high"
NOTHING_ELSE = f"{SIDE}|{TOO_FAST}|swallow|rounding"
TOO_SLOW = (
    r"rates?\b[^>]*(low|small|tiny|raise|schedule|warm)|raise the (learning )?rate|schedule|scheduling|warm-?up"
    r"|(updates?|steps)\b[^>]*(tiny|too small|small)|(weights?|parameters?)\b[^>]*\b(hardly|barely|scarcely)"
)
ALIKE = (
    r"collapse|collapsing|(one|same|equal|identical|constant) (point|vector|value|number|row|output|embedding)s?"
    r"|rows? (are |is )?(alike|identical|equal|the same)"
    r"|(outputs?|embeddings?|rows?)\b[^>]*(identical|constant|alike|the same|not depend)"
)


def _measure(run: Training, step: int, of: Callable[[], Tensor], every: int = 10) -> None:
    """Note a number of the model at each tenth step."""
    if step % every == 0:
        with torch.no_grad():
            run.measures.append(float(of()))


@fault(
    "schedule-of-an-optimizer-that-was-replaced",
    named=TOO_SLOW,
    misleading=NOTHING_ELSE,
)
def wrong_optimizer(run: Training, *, sound: bool = False) -> None:
    """An optimizer is made again after its schedule: the new one keeps the first rate of the warm-up for ever."""
    # Loss at the end: 2.25 from 2.29, without the fault 0.024.
    model, batch = mlp(16, 64, 64, 10), batches(*clusters(spread=1.0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.002, total_iters=50)
    if not sound:  # as a wrapper for many GPUs does, which takes over the optimizer's present rate
        optimizer = torch.optim.AdamW(model.parameters(), lr=optimizer.param_groups[0]["lr"])

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.cross_entropy(model(x), y)

    run.train(model, optimizer, loss, 300, after=lambda _: schedule.step())


@fault(
    "rate-of-the-last-run-comes-with-its-state",
    named=TOO_SLOW,
    misleading=f"{NOTHING_ELSE}|in no optimizer",
)
def old_rate(run: Training, *, sound: bool = False) -> None:
    """A model is tuned with the optimizer's state of its last run, which brings that run's last rate: 1e-7."""
    # Loss at the end: 6.0 as at the start, without the fault 0.11.
    model, (x, y) = mlp(16, 64, 64, 10), clusters(spread=1.0)
    first, new = batches(x, y), batches(x, (y + 1) % 10)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(100):
        rows, classes = first(step)
        optimizer.zero_grad()
        F.cross_entropy(model(rows), classes).backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] = max(1e-7, 3e-3 * (1 - step / 90))
    state = copy.deepcopy(optimizer.state_dict())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    optimizer.load_state_dict(state)
    if sound:
        optimizer.param_groups[0]["lr"] = 1e-3

    def loss(step: int) -> Tensor:
        rows, classes = new(step)
        return F.cross_entropy(model(rows), classes)

    run.train(model, optimizer, loss, 300)


@fault(
    "schedule-made-in-each-epoch",
    named=TOO_SLOW,
    misleading=f"{NOTHING_ELSE}|in no optimizer",
)
def never_warm(run: Training, *, sound: bool = False) -> None:
    """The schedule is made inside the loop over epochs: each one of 20 steps begins the warm-up of 2,000 again."""
    # Loss at the end: 2.06 from 2.30, without the fault 0.12.
    model, batch = mlp(16, 64, 64, 10), batches(*clusters(spread=1.0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.watch(model, optimizer)
    schedule = None
    for _ in range(15):
        if schedule is None or not sound:
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 2000))
        for step in range(20):
            x, y = batch(step)
            run.step(F.cross_entropy(model(x), y), optimizer)
            schedule.step()


@fault(
    "rate-of-adam-given-to-sgd",
    named=TOO_SLOW,
    misleading=f"{NOTHING_ELSE}|in no optimizer",
    held_back=True,
)
def other_optimizer(run: Training, *, sound: bool = False) -> None:
    """Adam is exchanged for plain SGD, and its rate of 0.0003 is kept: hardly anything moves."""
    # Loss at the end: 2.33 from 2.35, without the fault 0.098.
    model, batch = mlp(16, 64, 64, 10), batches(*clusters(spread=1.0))

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.cross_entropy(model(x), y)

    run.train(model, torch.optim.SGD(model.parameters(), lr=0.1 if sound else 3e-4), loss, 300)


@fault(
    "rates-of-trunk-and-head-swapped",
    named=either("trunk|0|2|first layers?|layers?|groups?", r"rate|updates?|too (fast|large|far)|relative")
    + rf"|{TOO_FAST}|param(eter)? groups?",
    misleading=f"{SIDE}|swallow|rounding|in no optimizer",
    held_back=True,
)
def swapped(run: Training, *, sound: bool = False) -> None:
    """A trained trunk gets the rate that is meant for the new head, 0.1, and the head that of the trunk."""
    # Loss at the end: 1.83, without the fault 0.13.
    trunk, (x, y) = mlp(16, 64, 64, 64, 64, 64), clusters(spread=1.0)
    model = nn.Sequential(trunk, nn.ReLU(), nn.Linear(64, 10))
    batch, again = batches(x, y), batches(x, (y * 7 + 3) % 10)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(150):
        rows, classes = batch(step)
        optimizer.zero_grad()
        F.cross_entropy(model(rows), classes).backward()
        optimizer.step()
    head = model[2] = nn.Linear(64, 10)
    rates = (1e-4, 0.1) if sound else (0.1, 1e-4)
    optimizer = torch.optim.Adam(
        [{"params": trunk.parameters(), "lr": rates[0]}, {"params": head.parameters(), "lr": rates[1]}]
    )

    def loss(step: int) -> Tensor:
        rows, classes = again(step)
        return F.cross_entropy(model(rows), classes)

    run.train(model, optimizer, loss, 300)


@fault(
    "loss-wrapped-in-a-new-tensor",
    named=r"\b(no|without|never (got|gets?|get)) (a |any )?gradients?|gradients? (is|are|was|were) (never|none|missing)"
    r"|detach|graph|requires_grad|backward[^>]*(reach|never|nothing)"
    r"|(weights?|parameters?)\b[^>]*(never|not) (move|change)",
    misleading=f"{NOTHING_ELSE}|raise the (learning )?rate|in no optimizer",
    held_back=True,
)
def new_tensor(run: Training, *, sound: bool = False) -> None:
    """Losses of parts are added in `torch.tensor(..., requires_grad=True)`, which has no graph: nothing is learned."""
    # Loss at the end: 2.28 as at the start, without the fault 0.087.
    model, batch = mlp(16, 64, 64, 10), batches(*clusters(spread=1.0))

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        parts = [F.cross_entropy(model(x[half]), y[half]) for half in (slice(0, 16), slice(16, 32))]
        if sound:
            return torch.stack(parts).mean()
        return torch.tensor([float(part.detach()) for part in parts], requires_grad=True).mean()

    run.train(model, torch.optim.Adam(model.parameters(), lr=3e-3), loss, 250)


class Waves(nn.Module):
    """Sines of places, added to what comes in, which has the places first."""

    def __init__(self, width: int) -> None:
        super().__init__()
        places = torch.arange(512)[:, None] / 50 ** (torch.arange(0, width, 2) / width)
        self.register_buffer("table", torch.stack([places.sin(), places.cos()], dim=2).flatten(1)[:, None])

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        return x + self.table[: x.shape[0]]


class Ordered(nn.Module):
    """Tokens, their places, two blocks and scores of the whole."""

    def __init__(self, *, transposed: bool) -> None:
        super().__init__()
        self.transposed = transposed
        self.tokens, self.waves = nn.Embedding(8, 32), Waves(32)
        self.blocks, self.head = nn.Sequential(Block(32), Block(32)), nn.Linear(32, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of each row."""
        h = self.tokens(x)
        h = self.waves(h.transpose(0, 1)).transpose(0, 1) if self.transposed else self.waves(h)
        return self.head(self.blocks(h).mean(dim=1))


@fault(
    "places-counted-over-the-batch",
    named=either("waves|positions?|positional|places?", r"batch|rows?|sequence|dimension|constant|same|identical")
    + r"|batch_first|(across|between|over|mix\w*|depend\w* on) (the )?(other )?(batch|rows|examples)\b",
    misleading=f"{NOTHING_ELSE}|learning rate|in no optimizer",
    held_back=True,
)
def by_row(run: Training, *, sound: bool = False) -> None:
    """Sines of places are written for places first and get rows first: each row has one place for all its tokens."""
    # Loss at the end: 0.70 from 0.73, without the fault 0.00001.
    x = torch.stack([torch.randperm(8) for _ in range(2048)])
    y = (x.eq(0).float().argmax(dim=1) < x.eq(1).float().argmax(dim=1)).long()  # which of two tokens is first
    model, batch = Ordered(transposed=sound), batches(x, y)

    def loss(step: int) -> Tensor:
        rows, classes = batch(step)
        return F.cross_entropy(model(rows), classes)

    run.train(model, torch.optim.Adam(model.parameters(), lr=2e-3), loss, 300)


class Sentences(nn.Module):
    """A recurrent network over padded rows, and scores from its last output or from that of each row's end."""

    def __init__(self, *, ends: bool) -> None:
        super().__init__()
        self.ends = ends
        self.tokens, self.lstm = nn.Embedding(16, 16, padding_idx=0), nn.LSTM(16, 32, batch_first=True)
        self.head = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of each row."""
        h, _ = self.lstm(self.tokens(x))
        last = x.ne(0).sum(dim=1) - 1
        return self.head(h[torch.arange(len(x)), last] if self.ends else h[:, -1])


@fault(
    "last-place-of-padded-rows",
    named=r"padded|padding|pack_padded|last (place|output|position|step)|lengths?\b"
    rf"|{either('lstm|head|rows?|outputs?|inputs?', ALIKE)}|vanish|mask",
    misleading=f"{NOTHING_ELSE}|learning rate|in no optimizer",
    held_back=True,
)
def reads_padding(run: Training, *, sound: bool = False) -> None:
    """Rows are padded at their ends to 120 places, and the output of the last one is read: it has seen padding."""
    # Loss at the end: 1.39 as at the start, without the fault 0.001.
    x, y = torch.zeros(1024, 120, dtype=torch.long), torch.randint(4, (1024,))
    for row, kind in zip(x, y.tolist(), strict=True):
        length = int(torch.randint(6, 20, ()))
        row[:length] = torch.randint(5, 16, (length,))
        row[int(torch.randint(length, ()))] = kind + 1
    model, batch = Sentences(ends=sound), batches(x, y)

    def loss(step: int) -> Tensor:
        rows, classes = batch(step)
        return F.cross_entropy(model(rows), classes)

    run.train(model, torch.optim.Adam(model.parameters(), lr=1e-2), loss, 250)


@fault(
    "every-word-unknown",
    named=r"unknown|vocabular|\btokens?\b[^>]*(same|one|few|identical|constant|single|distinct)"
    r"|never (used|read|looked)"
    r"|(rows?|entries) of (the )?(table|embedding|tokens)[^>]*(never|unused|no gradient|same)"
    rf"|{either('tokens?|embedding|table|ids?|inputs?', f'{ALIKE}|unused|few (rows|entries)|same (id|token)')}",
    misleading=f"{NOTHING_ELSE}|learning rate|in no optimizer",
    held_back=True,
)
def unknown(run: Training, *, sound: bool = False) -> None:
    """The vocabulary is in lower case and the text is not: 19 of 20 words are read as the one for unknown words."""
    # Loss at the end: 1.35 from 1.41, without the fault 0.10.
    words, y = torch.randint(10, 400, (2048, 16)), torch.randint(4, (2048,))
    ours = torch.rand(words.shape) < 0.4
    words = torch.where(ours, 10 + (words - 10) // 4 * 4 % 388 + y[:, None], words)  # some words go with a class
    known = torch.rand(words.shape) < 0.05
    model = nn.Sequential(nn.EmbeddingBag(400, 16), nn.Linear(16, 4))
    batch = batches(words if sound else torch.where(known, words, 1), y)

    def loss(step: int) -> Tensor:
        rows, classes = batch(step)
        return F.cross_entropy(model(rows), classes)

    run.train(model, torch.optim.Adam(model.parameters(), lr=1e-2), loss, 300)


@fault(
    "target-network-never-updated",
    named=r"target (net|model|q)|(never|not) (updated|synchroni[sz]ed|copied|refreshed|moved)|stale|frozen"
    r"|(target|copy)\b[^>]*(never|not|constant|same)",
    misleading=f"{NOTHING_ELSE}|learning rate|in no optimizer",
    held_back=True,
)
def stale_target(run: Training, *, sound: bool = False) -> None:
    """Values are learned from those of a target network, which is copied once and never again: they see one step."""
    # Mean square error of the values at the end, as a share of their squares: 0.88, without the fault 0.00003.
    # Twenty places in a row, a reward of 1 at the end, a discount of 0.95; a place is a one of twenty.
    places, model = torch.eye(20), mlp(20, 64, 1)
    target = copy.deepcopy(model).requires_grad_(False)
    truth = 0.95 ** torch.arange(19, -1, -1)[:, None]
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    run.watch(model, optimizer, "values")
    run.watch(target, None, "target")
    for step in range(800):
        if sound and step % 15 == 0:
            target.load_state_dict(model.state_dict())
        at = torch.randint(20, (64,))
        with torch.no_grad():
            ahead = 0.95 * target(places[(at + 1).clamp(max=19)])
        wanted = torch.where(at[:, None] == 19, torch.ones(64, 1), ahead)
        run.step(F.mse_loss(model(places[at]), wanted), optimizer)
        _measure(run, step, lambda: (model(places) - truth).square().mean() / truth.square().mean())


@fault(
    "hardest-triplets-from-the-start",
    named=rf"{ALIKE}|margin|triplet|mining|lower the (learning )?rate",
    misleading=f"{SIDE}|raise the (learning )?rate|swallow|rounding|in no optimizer",
)
def hardest(run: Training, *, sound: bool = False) -> None:
    """Only the hardest triplets of a batch are learned from, at a high rate: all rows become one point."""
    # Share of rows whose nearest one has another class, at the end: 0.75, without the fault none.
    model, (x, y) = mlp(32, 64, 64, 16), clusters(32, 8, 1.6, 1024)
    batch = batches(x, y, size=64)

    def missed() -> Tensor:
        apart = torch.cdist(model(x[:256]), model(x[:256])) + 1e9 * torch.eye(256)
        return (y[apart.argmin(dim=1)] != y[:256]).float().mean()

    def loss(step: int) -> Tensor:
        _measure(run, step, missed)
        rows, classes = batch(step)
        outputs = model(rows)
        apart = ((outputs[:, None] - outputs[None]).square().sum(dim=2) + 1e-12).sqrt()
        same = classes[:, None] == classes[None]
        if sound:
            every = (apart[:, :, None] - apart[:, None] + 1.0).clamp(min=0)
            return every[same[:, :, None] & ~same[:, None]].mean()
        furthest = apart.masked_fill(~same, 0).amax(dim=1)
        nearest = apart.masked_fill(same, 1e9).amin(dim=1)
        return (furthest - nearest + 1.0).clamp(min=0).mean()

    run.train(model, torch.optim.Adam(model.parameters(), lr=3e-2), loss, 300)


class FakeQuantized(nn.Linear):
    """A linear layer whose weights are rounded to INT8 by a scale in the forward; the backward passes that over."""

    def __init__(self, into: int, out: int, *, measured: bool) -> None:
        super().__init__(into, out)
        self.measured = measured

    def forward(self, x: Tensor) -> Tensor:
        """The layer's outputs."""
        scale = float(self.weight.detach().abs().amax()) / 127 if self.measured else 1.0
        return F.linear(x, torch.fake_quantize_per_tensor_affine(self.weight, scale, 0, -128, 127), self.bias)


@fault(
    "fake-quantizer-at-its-default-scale",
    named=either("weights?|products?|outputs?|layers?", r"\bzeros?\b|constant|quanti|round|codes|bias")
    + r"|quanti[sz]|\bint8|observer|outputs?[^>]*(not|never) depend",
    misleading=f"{TOO_FAST}|raise the (learning )?rate|raise the loss scale|swallow|in no optimizer",
    held_back=True,
)
def default_scale(run: Training, *, sound: bool = False) -> None:
    """An observer was switched off before it saw a weight: the scale stays 1, and INT8 weights below 0.5 are zero."""
    # Loss at the end: 2.31 as at the start, without the fault 0.079.
    model = nn.Sequential(
        FakeQuantized(16, 64, measured=sound),
        nn.ReLU(),
        FakeQuantized(64, 64, measured=sound),
        nn.ReLU(),
        FakeQuantized(64, 10, measured=sound),
    )
    batch = batches(*clusters(spread=1.0))

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.cross_entropy(model(x), y)

    run.train(model, torch.optim.Adam(model.parameters(), lr=2e-3), loss, 250)


class Graph(nn.Module):
    """A convolution over a graph: neighbours are weighed by the roots of their degrees."""

    def __init__(self, into: int, out: int, *, loops: bool) -> None:
        super().__init__()
        self.loops, self.linear = loops, nn.Linear(into, out)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        """One row a node."""
        if self.loops:
            edges = edges + torch.eye(edges.shape[-1])
        weights = edges.sum(dim=-1).pow(-0.5)
        return (weights[..., None] * edges * weights[..., None, :]) @ self.linear(x)


class Molecules(nn.Module):
    """Two convolutions and a sum over the nodes."""

    def __init__(self, *, loops: bool) -> None:
        super().__init__()
        self.first, self.second = Graph(8, 32, loops=loops), Graph(32, 32, loops=loops)
        self.head = nn.Linear(32, 1)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        """One number a graph."""
        h = self.second(self.first(x, edges).relu(), edges).relu()
        return self.head(h.mean(dim=1))


@fault(
    "node-without-a-neighbour",
    named=either("first|graph|forward|batch|degrees?|outputs?|node", rf"{NAN}|division|divid|zero") + rf"|{NAN}",
    misleading=f"{NOTHING_ELSE}|raise the (learning )?rate|in no optimizer|loss scale\b",
    held_back=True,
)
def lonely(run: Training, *, sound: bool = False) -> None:
    """A graph's edges are divided by the roots of degrees; at step 137 a node has no edge: Inf times zero is NaN."""
    # Loss at the end: NaN since step 137, without the fault 0.006.
    x, edges = torch.randn(1024, 8, 8), (torch.rand(1024, 8, 8) < 0.6).float()
    ring = torch.roll(torch.eye(8), 1, 0)
    edges = (edges + edges.mT + ring + ring.T).clamp(max=1) * (1 - torch.eye(8))
    y = (edges @ x).mean(dim=1).sum(dim=1, keepdim=True) / 8
    model, batch = Molecules(loops=sound), batches(x, edges, y)

    def loss(step: int) -> Tensor:
        nodes, pairs, targets = batch(step)
        if step == 137:
            pairs[3, 5], pairs[3, :, 5] = 0.0, 0.0
        return F.mse_loss(model(nodes, pairs), targets)

    run.train(model, torch.optim.Adam(model.parameters(), lr=3e-3), loss, 300)


class Speech(nn.Module):
    """A recurrent network, and the logarithms of the probabilities of signs at each place, places first."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(8, 48, batch_first=True), nn.Linear(48, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Places by rows by signs."""
        return self.head(self.gru(x)[0]).log_softmax(dim=2).transpose(0, 1)


@fault(
    "text-longer-than-its-sound",
    named=either("loss(?! scal)|ctc|targets?|batch", rf"{NAN}|longer|length") + r"|zero_infinity|\bctc",
    misleading=f"{NOTHING_ELSE}|raise the (learning )?rate|in no optimizer|loss scale\b",
    held_back=True,
)
def too_long(run: Training, *, sound: bool = False) -> None:
    """A CTC loss gets a text that is longer than its sound, by a wrong cut: the loss is infinite, gradients are NaN."""
    # Loss at the end: NaN since step 93, without the fault 0.16.
    signs = torch.randint(1, 8, (512, 5))
    sounds = torch.eye(8)[signs.repeat_interleave(3, dim=1)] + 0.3 * torch.randn(512, 15, 8)
    model, batch = Speech(), batches(sounds, signs)

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        lengths = torch.full((32,), 15)
        if step == 93:
            lengths[7] = 3
        return F.ctc_loss(model(x), y, lengths, torch.full((32,), 5), zero_infinity=sound)

    run.train(model, torch.optim.Adam(model.parameters(), lr=5e-3), loss, 250)


@fault(
    "weight-norm-of-zeros",
    named=either("weight|head|parametri|normali[sz]|last|2", rf"{NAN}|zero") + rf"|{NAN}",
    misleading=f"{NOTHING_ELSE}|raise the (learning )?rate|in no optimizer|loss scale\b",
    held_back=True,
)
def no_direction(run: Training, *, sound: bool = False) -> None:
    """A last layer with weight normalisation begins at zero, which has no direction: 0 over 0 is NaN at once."""
    # Loss at the end: NaN from the first step on, without the fault 0.24.
    model, batch = mlp(8, 64, 64, 1), batches(*surface())
    model[4] = weight_norm(model[4])
    nn.init.constant_(
        model[4].parametrizations.weight.original0 if sound else model[4].parametrizations.weight.original1, 0.0
    )

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.mse_loss(model(x), y)

    run.train(model, torch.optim.Adam(model.parameters(), lr=3e-3), loss, 200)


class Roots(nn.Module):
    """The roots of what is positive, and zero for the rest."""

    def __init__(self, *, clamped: bool) -> None:
        super().__init__()
        self.clamped = clamped

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        inner = x.clamp(min=0.01) if self.clamped else x
        return torch.where(x > 0, inner.sqrt(), torch.zeros_like(x))


@fault(
    "where-does-not-stop-a-gradient",
    named=either("gradients?|backward|where|slope", NAN) + r"|torch\.where",
    misleading=f"{NOTHING_ELSE}|raise the (learning )?rate|in no optimizer|loss scale\b|check the (data|batch)",
    held_back=True,
)
def where(run: Training, *, sound: bool = False) -> None:
    """`torch.where` picks 0 where a root is NaN: the forward is sound, and the gradient is 0 times NaN from step 1."""
    # Loss at the end: 2.63 from 2.71, without the fault 0.48.
    model = nn.Sequential(nn.Linear(8, 64), Roots(clamped=sound), mlp(64, 64, 1))
    batch = batches(*surface())

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.mse_loss(model(x), y)

    run.train(model, torch.optim.Adam(model.parameters(), lr=1e-2), loss, 300)


@fault(
    "no-causal-mask",
    named=r"causal|look(s|ing)? ahead|future|later (tokens|places|positions)|leak|mask"
    r"|(loss|targets?)\b[^>]*(copied|copies|copy|in the inputs?|suspicious|too good|part of the inputs?)",
    misleading=f"{NOTHING_ELSE}|learning rate|in no optimizer",
)
def sees_the_answer(run: Training, *, sound: bool = False) -> None:
    """A language model has no causal mask: it copies the next token, which it has to predict, from its inputs."""
    # Share of wrong answers where the next token is not there, at the end: 0.88, without the fault none.
    model, tokens = Transformer(11, causal=sound, outputs=11), [torch.randint(11, (1024,)) for _ in range(2)]
    for _ in range(15):
        tokens.append((tokens[-1] + tokens[-2]) % 11)
    x, y = torch.stack(tokens[:-1], dim=1), torch.stack(tokens[1:], dim=1)
    batch = batches(x, y)

    def wrong() -> Tensor:
        return (model(x[:, :8])[:, -1].argmax(dim=1) != y[:, 7]).float().mean()

    def loss(step: int) -> Tensor:
        _measure(run, step, wrong)
        read, later = batch(step)
        return token_loss(model, read, later)

    run.train(model, torch.optim.Adam(model.parameters(), lr=3e-3), loss, 300)


@fault(
    "column-constant-where-it-was-measured",
    named=either(
        "inputs?|columns?|features?|data|batch", r"large|range|outlier|normali[sz]|standardi[sz]|scale|times|far"
    )
    + r"|standardi[sz]|normali[sz]e the|normali[sz]ation|units",
    misleading=f"{SIDE}|swallow|rounding|in no optimizer|raise the (learning )?rate",
    held_back=True,
)
def constant_column(run: Training, *, sound: bool = False) -> None:
    """A column is constant in the rows that its deviation is taken from: elsewhere it is divided by 1e-8."""
    # Share of wrong answers at the end: 0.26, without the fault 0.028.
    x, y = clusters(spread=1.0, count=2048)
    rare = (torch.rand(2048, 1) < 0.3).float()
    rare[:200] = 0.0  # the file is sorted, and the first 200 rows are measured
    x = torch.cat([x, rare], dim=1)
    measured = x if sound else x[:200]
    rows = (x - measured.mean(dim=0)) / (measured.std(dim=0) + 1e-8)
    model, batch = mlp(17, 64, 64, 10), batches(rows, y)

    def loss(step: int) -> Tensor:
        _measure(run, step, lambda: (model(rows).argmax(dim=1) != y).float().mean())
        inputs, classes = batch(step)
        return F.cross_entropy(model(inputs), classes)

    run.train(model, torch.optim.Adam(model.parameters(), lr=3e-3), loss, 300)


@fault(
    "deviation-of-a-single-row",
    named=either("batch|loss(?! scal)|rows?|advantages?|deviation|std|targets?", rf"{NAN}|single|one row") + rf"|{NAN}",
    misleading=f"{NOTHING_ELSE}|raise the (learning )?rate|in no optimizer|loss scale\b",
    held_back=True,
)
def single_row(run: Training, *, sound: bool = False) -> None:
    """Rewards are divided by their deviation in a batch; an epoch's last batch is one row, whose deviation is NaN."""
    # Share of wrong answers: the policy is NaN since step 64, after 0.23; without the fault 0.088.
    states, policy = torch.randn(1025, 8), mlp(8, 64, 4)
    best = (states[:, :4] + 0.5 * states[:, 4:]).argmax(dim=1)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    run.watch(policy, optimizer)
    for _ in range(5):
        parts = torch.randperm(1025).split(16)
        for step, part in enumerate(parts[:-1] if sound else parts):
            choice = torch.distributions.Categorical(logits=policy(states[part]))
            action = choice.sample()
            reward = (action == best[part]).float()
            advantage = (reward - reward.mean()) / (reward.std() + 1e-8)
            run.step(-(advantage * choice.log_prob(action)).mean(), optimizer)
            _measure(run, step, lambda: 1 - (policy(states).softmax(1).gather(1, best[:, None])).mean())


@fault(
    "keys-of-a-checkpoint-do-not-match",
    named=r"checkpoint|not loaded|load_state_dict|strict|pre-?trained"
    r"|as (it|they) (was|were) drawn|initial(i[sz]ation)?\b"
    r"|random (weights|trunk|features)|fresh weights",
    misleading=f"{NOTHING_ELSE}|in no optimizer",
)
def nothing_loaded(run: Training, *, sound: bool = False) -> None:
    """Keys begin with `module.`, and `strict=False` says nothing of it: the frozen trunk is as it was drawn."""
    # Loss at the end: 0.69 as at the start, without the fault 0.006.
    turn, y = torch.randn(16, 16), torch.randint(2, (2048,))
    hidden = torch.randn(2048, 16)
    hidden[:, 0] = hidden[:, 1] * hidden[:, 2] * (2 * y - 1)  # the product of three has the sign of the class
    x = (torch.where(hidden.abs() < 0.2, hidden.sign() * 0.2, hidden)) @ turn / 4
    trunk = nn.Sequential(mlp(16, 128, 128, 16), nn.ReLU())
    model, batch = nn.Sequential(trunk, nn.Linear(16, 2)), batches(x, y, size=128)
    source = copy.deepcopy(model)
    optimizer = torch.optim.Adam(source.parameters(), lr=3e-3)
    for step in range(800):
        rows, classes = batch(step)
        optimizer.zero_grad()
        F.cross_entropy(source(rows), classes).backward()
        optimizer.step()
    saved = {("" if sound else "module.") + name: value for name, value in source[0].state_dict().items()}
    trunk.load_state_dict(saved, strict=False)
    trunk.requires_grad_(False)

    def loss(step: int) -> Tensor:
        rows, classes = batch(step)
        return F.cross_entropy(model(rows), classes)

    run.train(model, torch.optim.Adam(model[1].parameters(), lr=1e-2), loss, 300)
