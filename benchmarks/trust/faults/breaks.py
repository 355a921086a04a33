"""NaN and Inf: operations that make them, and the places where they begin between two samples."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from benchmarks.trust.registry import fault
from benchmarks.trust.toys import Transformer, batches, clusters, counting, mlp, token_loss
from benchmarks.trust.training import Training

SIDE = "dead-layer|scale-low|updates-swallowed"


def begins(place: str) -> str:
    """A pattern of findings that say that NaN or Inf began at a place, by evidence or in words."""
    return rf"nonfinite.*(first\w*=|(first|began|begins|broke) (first )?(in|at|is|was) (the )?)[^,).;]*{place}"


class Part(nn.Module):
    """A layer whose output goes through an operation from a step on."""

    def __init__(self, at: int, operation: object) -> None:
        super().__init__()
        self.linear, self.at, self.operation, self.step = nn.Linear(64, 64), at, operation, 0

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        self.step += 1
        h = self.linear(x)
        return self.operation(h) if self.step > self.at else h  # type: ignore[operator]


class WithPart(nn.Module):
    """A classifier with such a layer, called `part`, in its middle."""

    def __init__(self, at: int, operation: object) -> None:
        super().__init__()
        self.first, self.part, self.last = nn.Linear(16, 64), Part(at, operation), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return self.last(torch.relu(self.part(torch.relu(self.first(x)))))


def _broken(run: Training, at: int, operation: object, steps: int = 140) -> None:
    model, batch = WithPart(at, operation), batches(*clusters())

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.cross_entropy(model(x), y)

    run.train(model, torch.optim.SGD(model.parameters(), lr=0.05), loss, steps)


_PART = begins(r"\bpart\b")


@fault("log-of-zero", named=_PART, misleading=SIDE)
def log_of_zero(run: Training) -> None:
    """From step 60 on, a sampled one, a layer takes the logarithm of values that a ReLU made zero."""
    _broken(run, 60, lambda h: -torch.log(torch.relu(h)))


@fault("square-root-at-zero", named=begins(r"(part|first)"), misleading=SIDE, held_back=True)
def root_at_zero(run: Training) -> None:
    """A norm of a row that is all zero: its gradient divides by zero, the forward is sound."""

    def norm(h: Tensor) -> Tensor:
        h = h * (torch.arange(len(h))[:, None] > 0)
        return h / (1 + (h * h).sum(dim=-1, keepdim=True).sqrt())

    _broken(run, 60, norm)


@fault("division-by-zero", named=_PART, misleading=SIDE)
def division(run: Training) -> None:
    """Values are divided by a spread that is zero once every fourth row is constant."""

    def divide(h: Tensor) -> Tensor:
        h = torch.where((torch.arange(len(h)) % 4 == 0)[:, None], torch.ones_like(h), h)
        return (h - h.mean(dim=-1, keepdim=True)) / h.std(dim=-1, keepdim=True)

    _broken(run, 60, divide)


@fault("exponential-overflows", named=_PART, misleading=SIDE, held_back=True)
def exponential(run: Training) -> None:
    """The exponential of values times a hundred: Inf, then NaN."""
    _broken(run, 60, lambda h: torch.exp(h * 200) / torch.exp(h * 200).sum(dim=-1, keepdim=True))


@fault("softmax-of-masked-row", named=_PART, misleading=SIDE)
def masked_row(run: Training) -> None:
    """A row of which everything is masked goes through a softmax."""

    def mask(h: Tensor) -> Tensor:
        return h.masked_fill((torch.arange(len(h)) == 3)[:, None], -torch.inf).softmax(-1)

    _broken(run, 60, mask)


# NaN that begins between two samples: at step 63 of a run that is sampled every ten steps.


@fault("between-samples-in-a-layer", named=_PART, misleading=SIDE)
def between_layer(run: Training) -> None:
    """The output of a layer in the middle."""
    _broken(run, 63, lambda h: h / (h - h))


@fault(
    "between-samples-in-a-gradient",
    named=begins(r"gradients? [^,]*(part|first)"),
    misleading=SIDE,
    held_back=True,
)
def between_gradient(run: Training) -> None:
    """The gradient only: the forward is sound."""

    def twist(h: Tensor) -> Tensor:
        h.register_hook(lambda g: g / (g - g))
        return h

    _broken(run, 63, twist)


def _in_transformer(run: Training, spoil: object) -> None:
    model = Transformer()
    batch = batches(*counting(), size=16)

    def after(step: int) -> None:
        if step == 63:
            spoil(model)  # type: ignore[operator]

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.train(model, optimizer, lambda step: token_loss(model, *batch(step)), 120, after=after)


@fault("between-samples-in-attention", named=begins(r"blocks\.1\.attention"), misleading=SIDE)
def between_attention(run: Training) -> None:
    """The attention of the second block, whose queries and keys overflow FP32."""

    def spoil(model: Transformer) -> None:
        model.blocks[1].attention.qkv.weight.data[:64] *= 1e25

    _in_transformer(run, spoil)


@fault("between-samples-in-the-embedding", named=begins(r"positions"), misleading=SIDE, held_back=True)
def between_embedding(run: Training) -> None:
    """One row of the table of positions."""

    def spoil(model: Transformer) -> None:
        model.positions.weight.data[5] = float("nan")

    _in_transformer(run, spoil)


@fault("between-samples-in-the-head", named=begins(r"head"), misleading=SIDE)
def between_head(run: Training) -> None:
    """One weight of the last layer becomes infinite."""

    def spoil(model: Transformer) -> None:
        model.head.weight.data[3, 3] = float("inf")

    _in_transformer(run, spoil)


@fault("between-samples-in-a-norm", named=begins(r"blocks\.0\.norm2"), misleading=SIDE)
def between_norm(run: Training) -> None:
    """A norm's weight."""

    def spoil(model: Transformer) -> None:
        model.blocks[0].norm2.weight.data[0] = float("nan")

    _in_transformer(run, spoil)


@fault("between-samples-in-the-loss", named=begins(r"\bloss\b"), misleading=SIDE, held_back=True)
def between_loss(run: Training) -> None:
    """The loss itself: the logarithm of a probability that is exactly zero, outside of the model."""
    model, batch = mlp(16, 64, 10), batches(*clusters())

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        chance = model(x).softmax(-1)[torch.arange(len(x)), y]
        return -torch.log(chance * (torch.arange(len(x)) > 0) if step == 63 else chance).mean()

    run.train(model, torch.optim.SGD(model.parameters(), lr=0.05), loss, 120)


@fault("between-samples-in-the-update", named=begins(r"(update|optimizer|weight)s? [^,]*\b2\b"), misleading=SIDE)
def between_update(run: Training) -> None:
    """The update: the state of an optimizer that was loaded holds an Inf."""
    model, batch = mlp(16, 64, 10), batches(*clusters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.cross_entropy(model(x), y)

    def spoil(step: int) -> None:
        if step == 63:
            optimizer.state[model[2].weight]["momentum_buffer"][0, 0] = float("inf")

    run.train(model, optimizer, loss, 120, after=spoil)


@fault(
    "between-samples-in-running-statistics",
    named=begins(r"\b1\b"),
    misleading=SIDE,
    held_back=True,
)
def between_buffer(run: Training) -> None:
    """The running mean of a batch norm that is in evaluation mode."""
    model = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))
    model[1].eval()
    batch = batches(*clusters())

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.cross_entropy(model(x), y)

    def spoil(step: int) -> None:
        if step == 63:
            model[1].running_mean[7] = float("nan")

    run.train(model, torch.optim.SGD(model.parameters(), lr=0.05), loss, 120, after=spoil)
