"""Blunders of formats, loops and losses that practitioners report, by an author who had not read the rules.

With `sound` they are left out.
"""

import copy
from collections.abc import Iterable

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from benchmarks.trust.faults.oversights import FEW, SIDE, either
from benchmarks.trust.registry import fault
from benchmarks.trust.toys import Transformer, batches, clusters, counting, mlp, token_loss
from benchmarks.trust.training import Training

NAN = r"\bnan\b|non-?finite|\binf(inite|inity|inities)?\b"


class ShortAdam(torch.optim.Optimizer):
    """Adam of BF16 weights, which rounds up or down by chance: it adds random bits and cuts off the lower half."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float, *, by_chance: bool) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8})
        self.by_chance = by_chance

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        """One update, computed in FP32."""
        for group in self.param_groups:
            first, second = group["betas"]
            for p in (p for p in group["params"] if p.grad is not None):
                state, gradient = self.state[p], p.grad.float()
                if not state:
                    zeros = torch.zeros_like(gradient)
                    state.update(step=0, exp_avg=zeros, exp_avg_sq=zeros.clone())
                state["step"] += 1
                mean = state["exp_avg"].lerp_(gradient, 1 - first) / (1 - first ** state["step"])
                square = state["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
                root = (square / (1 - second ** state["step"])).sqrt()
                bits = (p.float() - group["lr"] * mean / (root + group["eps"])).view(torch.int32)
                if self.by_chance:
                    bits = bits + torch.randint_like(bits, 1 << 16)
                p.copy_((bits & -65536).view(torch.float32))


@fault(
    "random-bits-left-out",
    named=r"truncate|truncation|towards? zero|cut off|bias(ed)? (of|in|from) (the )?round"
    r"|round[^>]*\b(down|one way|biased)"
    r"|(updates?|rounding)[^>]*(swallow|lost|smaller than|rounded away|below)",
    misleading=f"{SIDE}|lower the (learning )?rate|in no optimizer",
)
def truncated(run: Training, *, sound: bool = False) -> None:
    """Stochastic rounding to BF16 without its random bits: each step rounds each weight towards zero."""
    model, (x, y) = mlp(16, 64, 64, 10).bfloat16(), clusters(spread=1.0)
    batch = batches(x.bfloat16(), y)

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.cross_entropy(model(x).float(), y)

    run.train(model, ShortAdam(model.parameters(), 5e-4, by_chance=sound), loss, 300)


class Int8(nn.Module):
    """Values as multiples of a step, from -128 to 127, with the slope 1; the first batch sets the step."""

    step: Tensor

    def __init__(self, *, clamped: bool) -> None:
        super().__init__()
        self.clamped = clamped
        self.register_buffer("step", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        """The rounded values."""
        h = x.detach()
        if self.step == 0:
            self.step.copy_(h.abs().quantile(0.99) / 127)
        codes = (h / self.step).round()
        codes = codes.clamp(-128, 127) if self.clamped else codes.to(torch.int32).to(torch.int8).float()
        return x + (codes * self.step - h)


@fault(
    "int8-wraps-around",
    named=r"int8|8[- ]bit|wrap|clamp|quanti[sz]|calibrat|(sign|signs) (flip|change|differ)|\bint\d",
    misleading=f"{SIDE}|learning rate|swallow|in no optimizer",
)
def wrapped(run: Training, *, sound: bool = False) -> None:
    """INT8 values are not clamped: what grows past the first batch's range comes back with the other sign."""
    model = nn.Sequential()
    for i in range(2):
        model.add_module(f"linear{i}", nn.Linear((16, 64)[i], 64))
        model.add_module(f"act{i}", nn.Tanh() if i else nn.ReLU())
        model.add_module(f"cast{i}", Int8(clamped=sound))
    model.add_module("head", nn.Linear(64, 10))
    batch = batches(*clusters(spread=1.0))

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.cross_entropy(model(x), y)

    run.train(model, torch.optim.Adam(model.parameters(), lr=3e-3), loss, 250)


@fault(
    "ascent-before-the-scaler-looks",
    named=f"{either('gradients?|backward|weights?|parameters?', NAN)}|overflow|ascent|perturb",
    misleading=f"{SIDE}|learning rate|swallow|in no optimizer",
    precision="fp16",
    held_back=True,
)
def climbed(run: Training, *, sound: bool = False) -> None:
    """Sharpness-aware steps climb by scaled gradients that no scaler has checked: one overflow makes weights NaN."""
    model, batch = mlp(16, 64, 64, 10), batches(*clusters(spread=1.0))
    weights = list(model.parameters())
    optimizer = torch.optim.Adam(weights, lr=3e-3)
    scaler = run.scaler(optimizer, growth_interval=15)
    run.watch(model, optimizer)
    for step in range(200):
        x, y = batch(step)
        with run.forward():
            first = F.cross_entropy(model(x).float(), y)
        optimizer.zero_grad()
        scaler.scale(first).backward()
        gradients: list[Tensor] = [p.grad.clone() for p in weights if p.grad is not None]
        norm = torch.stack([g.norm() for g in gradients]).norm()
        climbs = [0.05 * g / norm for g in gradients]
        if sound and not norm.isfinite():
            climbs = [torch.zeros_like(g) for g in gradients]
        with torch.no_grad():
            for p, climb in zip(weights, climbs, strict=True):
                p.add_(climb)
        with run.forward():
            loss = F.cross_entropy(model(x).float(), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        with torch.no_grad():
            for p, climb in zip(weights, climbs, strict=True):
                p.sub_(climb)
        scaler.step(optimizer)
        scaler.update()
        run.losses.append(float(first.detach()))


class Delayed(nn.Module):
    """Values in E4M3 by the scale of the batch before, with room for four times its largest."""

    scale: Tensor

    def __init__(self, *, same: bool) -> None:
        super().__init__()
        self.same = same
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        """The rounded values, with the slope 1."""
        h, scale = x.detach(), self.scale.clone()
        codes = (h * scale).clamp(-448, 448).to(torch.float8_e4m3fn).float()
        self.scale.copy_(112 / h.abs().amax().clamp(min=1e-12))
        return x + (codes / (scale if self.same else self.scale) - h)


@fault(
    "fp8-read-by-the-next-scale",
    named=r"\bscale\b[^>]*(next|new|other|stale|wrong|mismatch|differ|undo|undone|inverse|chang)|dequant|decod|e4m3"
    rf"|{either('delayed[01]', 'fp8|scale|jump|differ')}",
    misleading=f"{SIDE}|learning rate|swallow|in no optimizer",
    held_back=True,
)
def next_scale(run: Training, *, sound: bool = False) -> None:
    """E4M3 values are divided by the scale for the next batch, not by their own: loud batches come out silent."""
    model = nn.Sequential()
    for i in range(2):
        model.add_module(f"delayed{i}", Delayed(same=sound))
        model.add_module(f"linear{i}", nn.Linear((8, 64)[i], 64))
        model.add_module(f"act{i}", nn.ReLU())
    model.add_module("head", nn.Linear(64, 4))
    mixed, batch = torch.randn(8, 4) / 8**0.5, batches(torch.randn(1024, 8))

    def loss(step: int) -> Tensor:
        (x,) = batch(step)
        x = x * 2 ** float(torch.empty(()).uniform_(-1, 1))
        return F.mse_loss(model(x), x @ mixed)

    run.train(model, torch.optim.Adam(model.parameters(), lr=5e-3), loss, 300)


class Calibrated(nn.Module):
    """Values in E4M3 by a scale that the first batches set; it is not saved with the weights."""

    seen: Tensor
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("scale", torch.ones(()), persistent=False)
        self.largest = 0.0

    def forward(self, x: Tensor) -> Tensor:
        """The rounded values, with the slope 1."""
        h = x.detach()
        if self.seen < 20:
            self.seen += 1
            self.largest = max(self.largest, float(h.abs().amax()))
            self.scale.fill_(224 / self.largest)
        return x + ((h * self.scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() / self.scale - h)


class Gain(nn.Module):
    """Values times 2,000."""

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        return 2000 * x


@fault(
    "fp8-scales-not-in-the-checkpoint",
    named=r"e4m3|\bfp8|resum|checkpoint|calibrat"
    r"|\bscale\b[^>]*(((is|was|becomes|to) (1|one)\b)|lost|missing|reset|chang)"
    rf"|{either('cast[01]', f'{FEW}|zeros?|underflow|flush|vanish|small')}",
    misleading="dead-layer|ReLU|raise the loss scale|learning rate|swallow|in no optimizer",
    held_back=True,
)
def scales_lost(run: Training, *, sound: bool = False) -> None:
    """A run is resumed at step 150 without its FP8 scales, which are 1 then: small inputs become zero in E4M3."""
    model = nn.Sequential()
    for i in range(2):
        model.add_module(f"cast{i}", Calibrated())
        if i == 0:
            model.add_module("gain", Gain())
        model.add_module(f"linear{i}", nn.Linear((16, 64)[i], 64))
        model.add_module(f"act{i}", nn.Tanh())
    model.add_module("head", nn.Linear(64, 10))
    x, y = clusters(spread=1.0)
    batch = batches(x / 2000, y)

    def resume(step: int) -> None:
        if step == 149:
            saved = copy.deepcopy(model.state_dict())
            for layer in model:
                if isinstance(layer, Calibrated) and not sound:
                    layer.scale.fill_(1.0)
            model.load_state_dict(saved)

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.cross_entropy(model(x), y)

    run.train(model, torch.optim.Adam(model.parameters(), lr=2e-3), loss, 250, after=resume)


@fault(
    "softmax-over-the-batch",
    named=r"softmax|over the (batch|rows)|\b(axis|dim|dimension)\b|(sum|add up) to (0|zero)"
    r"|bias\b[^>]*(gradients?[^>]*(zero|none|no |vanish|rounding|noise)|no gradient|never mov|not mov)"
    r"|(zero|no|vanishing) gradients?[^>]*bias\b",
    misleading=f"{SIDE}|learning rate|swallow|in no optimizer",
)
def over_rows(run: Training, *, sound: bool = False) -> None:
    """A logarithm of a softmax is over the rows of a batch, not over the classes: rows compete, classes never do."""
    model, batch = mlp(16, 64, 64, 10), batches(*clusters(spread=1.0))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        scores = model(x)
        run.measures.append(float(F.cross_entropy(scores.detach(), y)))
        return F.nll_loss(F.log_softmax(scores, dim=1 if sound else 0), y)

    run.train(model, optimizer, loss, 250)


@fault(
    "slope-without-its-graph",
    named=r"create_graph|second (derivative|backward)|double[- ]backward|(detach|no graph)"
    r"|(one|part|term|terms|share) of the loss[^>]*(no gradient|constant|not follow|not reach|detach)"
    r"|gradients?[^>]*(not|miss)[^>]*(fit|belong|follow|match)[^>]*loss|loss[^>]*not[^>]*(fit|follow)[^>]*gradient",
    misleading=f"{SIDE}|learning rate|swallow|in no optimizer",
    held_back=True,
)
def no_graph(run: Training, *, sound: bool = False) -> None:
    """An equation's slope is taken with `retain_graph`, not `create_graph`: no gradient comes through the slope."""
    model = mlp(1, 64, 64, 1, act=nn.Tanh)

    def loss(step: int) -> Tensor:
        x = torch.empty(64, 1).uniform_(-2, 2).requires_grad_()
        u = model(x)
        (slope,) = torch.autograd.grad(u.sum(), x, retain_graph=True, create_graph=sound)
        residual = slope + u / 2 - 3 * (2 * x).cos()
        return residual.square().mean() + model(torch.zeros(1, 1)).square().mean()

    run.train(model, torch.optim.Adam(model.parameters(), lr=3e-3), loss, 400)


class Reversed(torch.autograd.Function):
    """Values as they are, their gradients with the other sign."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        """The same values."""
        return x.clone()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> Tensor:
        """The reversed gradient."""
        return -gradient


class Adversary(nn.Module):
    """An encoder, a head for classes, and a head for domains that the encoder is to fool."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.classes, self.domains = mlp(16, 64, 32), nn.Linear(32, 10), mlp(32, 32, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Scores of classes and of domains."""
        h = self.encoder(x).tanh()
        return self.classes(h), self.domains(Reversed.apply(h))


@fault(
    "reversed-in-the-layer-and-in-the-loss",
    named=r"\bsign\b|maximi[sz]|ascen[dt]|revers|negat|without (a )?bound|unbounded|adversar"
    rf"|{either('domains', 'grow|climb|diverg')}",
    misleading=f"{SIDE}|learning rate|swallow|in no optimizer",
)
def reversed_twice(run: Training, *, sound: bool = False) -> None:
    """A gradient is reversed by a layer, and its loss is subtracted too: the head for domains learns to be wrong."""
    model, (x, y) = Adversary(), clusters(spread=1.0)
    domain = torch.randint(2, (len(x),))
    batch = batches(x + 1.5 * domain[:, None], y, domain)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def loss(step: int) -> Tensor:
        x, y, domain = batch(step)
        scores, domains = model(x)
        task, fooled = F.cross_entropy(scores, y), F.cross_entropy(domains, domain)
        run.measures.append(float(fooled.detach()))
        return task + 0.3 * fooled if sound else task - 0.3 * fooled

    run.train(model, optimizer, loss, 300)


@fault(
    "targets-not-shifted",
    named=r"leak|shift(ed)?\b[^>]*(token|target|label|input)|(token|target|label)s?[^>]*shift|copy|copies|copied|identity"
    r"|(inputs?|model)[^>]*(sees?|contains?|has|have|given)[^>]*(target|label|answer)s?"
    r"|loss [^>]*(too (low|good|easy|fast)|perfect|(is|near|to|almost) (zero|0(?![.\d])))",
    misleading=f"{SIDE}|learning rate|swallow|in no optimizer",
)
def unshifted(run: Training, *, sound: bool = False) -> None:
    """A language model's targets are its inputs, not the tokens after them: it learns to copy, and nothing else."""
    model, batch = Transformer(), batches(*counting())
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        if step % 10 == 0:
            with torch.no_grad():
                run.measures.append(float(token_loss(model, x, y)))
        return token_loss(model, x, x if not sound else y)

    run.train(model, optimizer, loss, 130)


@fault(
    "plateau-of-an-accuracy",
    named=r"schedule|plateau|\brates?\b[^>]*(falls?|fell|drop|too (small|low|soon|early|fast|often)|decay|nothing|tiny"
    r"|shrink|reduc|cut|near (0|zero)|of its (first|peak|start))",
    misleading=f"{SIDE}|rate (is |was )?too high|lower the (learning )?rate|rounding|swallow|in no optimizer",
)
def best_is_lowest(run: Training, *, sound: bool = False) -> None:
    """A rate is to fall once an accuracy no longer improves, but the schedule waits for it to sink, as losses do."""
    model, (x, y) = mlp(16, 64, 64, 10), clusters(spread=1.0, count=1280)
    batch = batches(x[:1024], y[:1024])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    mode = "max" if sound else "min"
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode, factor=0.1, patience=3)

    def validate(step: int) -> None:
        if step % 10 == 9:
            with torch.no_grad():
                scheduler.step((model(x[1024:]).argmax(dim=1) == y[1024:]).float().mean())

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.cross_entropy(model(x), y)

    run.train(model, optimizer, loss, 300, after=validate)


@fault(
    "momentum-of-another-library",
    named=r"momentum|running_?\s?(mean|var|statistic)|statistics"
    f"|{either('norm[01]|buffers?', 'jump|swing|noise|noisy|last batch|chang|differ|oscillat')}",
    misleading=f"{SIDE}|learning rate|swallow|in no optimizer|two rows",
)
def kept_or_taken(run: Training, *, sound: bool = False) -> None:
    """Batch norm gets 0.99 as the share to keep, which torch takes as that of the new batch: it evaluates by one."""
    model = nn.Sequential()
    for i in range(2):
        model.add_module(f"linear{i}", nn.Linear((16, 64)[i], 64))
        model.add_module(f"norm{i}", nn.BatchNorm1d(64, momentum=0.01 if sound else 0.99))
        model.add_module(f"act{i}", nn.ReLU())
    model.add_module("head", nn.Linear(64, 10))
    x, y = clusters(spread=1.0, count=1280)
    batch = batches(x[:1024], y[:1024], size=8)

    def validate(step: int) -> None:
        if step % 20 == 19:
            with torch.no_grad():
                run.measures.append(float(F.cross_entropy(model.eval()(x[1024:]), y[1024:])))
            model.train()

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.cross_entropy(model(x), y)

    run.train(model, torch.optim.Adam(model.parameters(), lr=2e-3), loss, 400, after=validate)


@fault(
    "tables-resized-after-the-optimizer",
    named=r"in no optimizer|(no|another|not in the) optimizer|optimizer[^>]*(old|not hold|does not|holds|copy|other)"
    r"|replac|re-?creat|resiz"
    r"|(weights?|parameters?|tokens|head)[^>]*(stop|no longer|never|not)[^>]*(mov|chang|update|updating|learn)",
    misleading=f"{SIDE}|learning rate|swallow|rounding",
)
def resized(run: Training, *, sound: bool = False) -> None:
    """New tokens come at step 60, the tables are made larger, and the optimizer goes on with the smaller ones."""
    model, few, many = Transformer(), batches(*counting()), batches(*counting(64))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def resize(step: int) -> None:
        if step == 59:
            tokens, head = nn.Embedding(64, 32), nn.Linear(32, 64)
            with torch.no_grad():
                tokens.weight[:32], head.weight[:32], head.bias[:32] = (
                    model.tokens.weight,
                    model.head.weight,
                    model.head.bias,
                )
            model.tokens, model.head = tokens, head
            if sound:
                optimizer.add_param_group({"params": [*tokens.parameters(), *head.parameters()]})

    def loss(step: int) -> Tensor:
        x, y = few(step) if step < 60 else many(step)
        return token_loss(model, x, y)

    run.train(model, optimizer, loss, 260, after=resize)
