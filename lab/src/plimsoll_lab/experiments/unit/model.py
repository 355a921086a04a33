"""The trainings of the character model as tasks for workers."""

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from plimsoll import unit
from plimsoll.emulate import emulate
from plimsoll.precision import Loop, prepare
from plimsoll.scaling import StaticScaler
from plimsoll.unit import functional as U, optim  # noqa: N812  (as torch's is F)
from plimsoll.watch import Watch, watch
from plimsoll_lab.bench import Progress
from plimsoll_lab.running.unwatched_run import Unwatched
from plimsoll_lab.running.workers import Task, carry_out
from plimsoll_lab.source_text import SYMBOLS, Batch, held_out_batch, make_batch, standard_library
from plimsoll_lab.study import check_steps, settings_of


class Block(nn.Module):
    """Attention to what was before, and a network of two layers."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = (nn.LayerNorm(width, elementwise_affine=False) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape, (pieces, length, width)."""
        q, k, v = split_heads(self.qkv(self.norm1(x)), self.heads)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(join_heads(attended))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Plain(nn.Module):
    """Of `torch.nn`, every parameter drawn as torch draws it."""

    def __init__(self, *, width: int, layers: int, heads: int, length: int) -> None:
        super().__init__()
        self.characters, self.places = nn.Embedding(SYMBOLS, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.readout = nn.Linear(width, SYMBOLS, bias=False)

    def forward(self, characters: Tensor) -> Tensor:
        """Return the scores (pieces, length, symbols) after each of (pieces, length)."""
        places = torch.arange(characters.shape[1], device=characters.device)
        x = self.characters(characters) + self.places(places)
        return self.readout(self.norm(self.blocks(x)))

    def loss(self, scores: Tensor, targets: Tensor) -> Tensor:
        """The mean over all characters, in nats."""
        return functional.cross_entropy(scores.flatten(0, 1), targets.flatten())


class UnitBlock(nn.Module):
    """`Block` at unit scale; `taus`: its two branches' shares, set by the stack.

    Attention has one factor, that of its output. The mean of it with those of the gradients would make outputs louder
    than 1, and so the branch's share larger than it says.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.taus = heads, [0.5, 0.5]
        self.norm1, self.norm2 = (unit.nn.LayerNorm(width, elementwise_affine=False) for _ in range(2))
        self.qkv, self.out = unit.nn.Linear(width, 3 * width, bias=False), unit.nn.Linear(width, width, bias=False)
        self.up = unit.nn.Linear(width, 4 * width, bias=False)
        self.down = unit.nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape, (pieces, length, width)."""
        branch, skip = U.residual_split(x, self.taus[0])
        q, k, v = split_heads(self.qkv(self.norm1(branch)), self.heads)
        attended = U.scaled_dot_product_attention(q, k, v, is_causal=True, constraint="to_output_scale")
        x = U.residual_add(self.out(join_heads(attended)), skip, self.taus[0])
        branch, skip = U.residual_split(x, self.taus[1])
        return U.residual_add(self.down(U.gelu(self.up(self.norm2(branch)))), skip, self.taus[1])


class Unit(nn.Module):
    """`Plain` at unit scale: other factors and draws, the same operations."""

    def __init__(self, *, width: int, layers: int, heads: int, length: int) -> None:
        super().__init__()
        self.characters, self.places = unit.nn.Embedding(SYMBOLS, width), unit.nn.Embedding(length, width)
        self.blocks = unit.nn.Stack(*[UnitBlock(width, heads) for _ in range(layers)])
        self.norm = unit.nn.LayerNorm(width, elementwise_affine=False)
        self.readout = unit.nn.LinearReadout(width, SYMBOLS, bias=False)

    def forward(self, characters: Tensor) -> Tensor:
        """Return the scores (pieces, length, symbols) after each of (pieces, length)."""
        places = torch.arange(characters.shape[1], device=characters.device)
        x = U.add(self.characters(characters), self.places(places), constraint=None)
        return self.readout(self.norm(self.blocks(x)))

    def loss(self, scores: Tensor, targets: Tensor) -> Tensor:
        """Return the mean in nats, with its gradient at unit scale for any number."""
        return U.cross_entropy(scores.flatten(0, 1), targets.flatten())


def split_heads(x: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values (pieces, heads, length, head's width)."""
    pieces, length, _ = x.shape
    q, k, v = x.view(pieces, length, 3, heads, -1).permute(2, 0, 3, 1, 4)
    return q, k, v


def join_heads(x: Tensor) -> Tensor:
    """The heads side by side again, (pieces, length, width)."""
    return x.transpose(1, 2).flatten(2)


FEWEST_STEPS = 20
Family = Literal["plain", "unit"]
_BETAS, _EPSILON = (0.9, 0.95), 1e-8
_LOWEST = 0.02  # of the learning rate, at the end


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The sizes of the experiment.

    - `pieces`, `length`: of a micro-batch; `accumulate`: how many of them a step would have. One alone is computed, as
      if all were alike, and its loss is divided by their number, as in gradient accumulation. So a step stands for
      pieces * length * accumulate characters: here 2^19, the half million tokens of GPT-3's smaller models.
    - `plain_rates`, `unit_rates`: the learning rates of either model, ascending; the second is the main one. `seeds`:
      how many trainings there are of each.
    - `every`: how often the watched trainings are recorded. `held_out`: how many pieces are held out.
    """

    steps: int = 300
    warmup: int = 30
    pieces: int = 8
    length: int = 64
    accumulate: int = 1024
    width: int = 64
    layers: int = 2
    heads: int = 4
    plain_rates: tuple[float, ...] = (0.005, 0.01)  # 0.02 is worse: 3.52 bits and not 3.47
    unit_rates: tuple[float, ...] = (0.5, 1.0)
    seeds: int = 3
    every: int = 10
    held_out: int = 256

    def main_rate(self, family: Family) -> float:
        """The learning rate of that model at which all kinds are trained, and watched."""
        rates = self.plain_rates if family == "plain" else self.unit_rates
        return rates[min(1, len(rates) - 1)]

    def rates(self, kind: "Kind") -> tuple[float, ...]:
        """The learning rates of a kind."""
        if not kind.swept:
            return (self.main_rate(kind.family),)
        return self.plain_rates if kind.family == "plain" else self.unit_rates

    def to_dict(self) -> dict[str, object]:
        """As plain data."""
        found: dict[str, object] = asdict(self)
        return found | {"plain_rates": list(self.plain_rates), "unit_rates": list(self.unit_rates)}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> "Setup":
        """Return the setup that `to_dict` gave."""
        given = dict(record)
        given["plain_rates"], given["unit_rates"] = tuple(record["plain_rates"]), tuple(record["unit_rates"])
        return cls(**given)


def setup_for(steps: int | None, *, full: bool) -> Setup:
    """The sizes for that many steps."""
    whole = Setup()
    if full:
        whole = replace(
            whole,
            plain_rates=(0.005, 0.01, 0.02),
            unit_rates=(0.5, 1.0, 2.0),
            steps=1000,
            warmup=100,
            pieces=32,
            length=128,
            accumulate=128,
            width=128,
            layers=4,
            seeds=5,
        )
    if steps is None:
        return whole
    check_steps("unit", steps, FEWEST_STEPS, whole.steps, ", so that there is something to learn")
    return replace(whole, steps=steps, warmup=min(whole.warmup, steps // 10))


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A way to train: modules, level, loss scale, formats of products.

    `swept`: at every learning rate; otherwise at the main one alone.
    """

    name: str
    title: str
    family: Family
    precision: str = "amp-fp16"
    scale: float = 1.0
    forward: str | None = None
    backward: str | None = None
    swept: bool = True


KINDS = (
    Kind(name="fp16", title="FP16, no loss scale", family="plain"),
    Kind(name="fp16-2048", title="FP16, loss scale 2,048", family="plain", scale=2048.0, swept=False),
    Kind(name="fp32", title="FP32", family="plain", precision="fp32"),
    Kind(name="unit-fp32", title="unit-scaled, FP32", family="unit", precision="fp32"),
    Kind(name="unit-fp16", title="unit-scaled, FP16", family="unit", swept=False),
    Kind(name="unit-fp8", title="unit-scaled, FP8 (OCP)", family="unit", forward="e4m3", backward="e5m2", swept=False),
    Kind(
        name="unit-fp8-fnuz", title="unit-scaled, FP8 (FNUZ)", family="unit", forward="e4m3fnuz", backward="e5m2fnuz",
        swept=False,
    ),
    Kind(name="unit-fp8-level", title="unit-scaled, level fp8-unit", family="unit", precision="fp8-unit", swept=False),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One training; `watched`: with all tensors' spectra, not its losses alone."""

    kind: Kind
    rate: float
    seed: int
    run: Path
    watched: bool = False


def train(job: Job, setup: Setup, device: str) -> None:
    """Train from the weights and batches of that seed, and leave the run."""
    torch.manual_seed(job.seed)
    model = make_model(job.kind.family, setup).to(device)
    optimizer = make_optimizer(model, job.rate, setup)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _part_of_rate(step, setup))
    scaler = None if job.kind.precision == "fp8-unit" else StaticScaler(job.kind.scale, device=device)
    level = "fp32" if job.kind.forward else job.kind.precision  # FP8 brings its own arithmetic (`_arithmetic`)
    with (
        _record(job, setup, model, optimizer) as record,
        prepare(
            model, optimizer, level, scaler=scaler, schedulers=[schedule],
            watch=record if isinstance(record, Watch) else None,
        ) as loop,
    ):  # fmt: skip
        for step in range(setup.steps):
            batch = make_batch(standard_library(), job.seed, step, pieces=setup.pieces, length=setup.length)
            with loop.forward(), _arithmetic(job.kind):
                loss = _loss(model, batch, device)
            record.log(train_bits=loss.detach() / math.log(2.0))
            loop.step(loss / setup.accumulate if job.kind.family == "plain" else loss)
        record.log(bits=_held_out(loop, model, job.kind, setup, device))


def make_model(family: Family, setup: Setup) -> Plain | Unit:
    """The model, as it is drawn."""
    made = Plain if family == "plain" else Unit
    return made(width=setup.width, layers=setup.layers, heads=setup.heads, length=setup.length)


def make_optimizer(model: Plain | Unit, rate: float, setup: Setup) -> torch.optim.Optimizer:
    """Return AdamW without decay, with epsilon divided as the gradients are."""
    if isinstance(model, Unit):
        return optim.AdamW(model, lr=rate, betas=_BETAS, eps=_EPSILON, weight_decay=0.0)
    return torch.optim.AdamW(
        model.parameters(), lr=rate, betas=_BETAS, eps=_EPSILON / setup.accumulate, weight_decay=0.0
    )


def _loss(model: Plain | Unit, batch: Batch, device: str) -> Tensor:
    return model.loss(model(batch.inputs.to(device)), batch.targets.to(device))


def _held_out(loop: Loop, model: Plain | Unit, kind: Kind, setup: Setup, device: str) -> Tensor:
    """Return held-out bits per character, in the arithmetic of the training."""
    batch = held_out_batch(standard_library(), pieces=setup.held_out, length=setup.length)
    with loop.evaluate(), _arithmetic(kind):
        return _loss(model, batch, device) / math.log(2.0)


def _arithmetic(kind: Kind) -> "contextlib.AbstractContextManager[object]":
    """Return a context of the forward: FP8 products and FP16 around, or nothing."""
    if kind.forward is None:
        return contextlib.nullcontext()
    return emulate("fp16", forward=kind.forward, backward=kind.backward)


def _part_of_rate(step: int, setup: Setup) -> float:
    """Up from nothing, then down in a line."""
    rest = (setup.steps - step) / (setup.steps - setup.warmup)
    return min((step + 1) / max(setup.warmup, 1), max(rest, _LOWEST))


def _record(job: Job, setup: Setup, model: nn.Module, optimizer: torch.optim.Optimizer) -> Watch | Unwatched:
    if job.watched:
        return watch(model, optimizer, run=job.run, every=setup.every, shadow_every=None)
    return Unwatched(job.run)


def described(setup: Setup, device: str) -> Mapping[str, object]:
    """Return a result's settings."""
    return settings_of(setup, device, fp8="emulated", text_sha256=standard_library().sha256)


_TRAINED = f"{__name__}:trained"
_BY_NAME = {kind.name: kind for kind in KINDS}


def train_all(jobs: Sequence[Job], setup: Setup, device: str, workers: int, progress: Progress) -> None:
    """Trains all of them, so many at a time; what comes of a training is its run."""
    carry_out(_TRAINED, [to_task(job, setup, device) for job in jobs], workers=workers, progress=progress)


def trained(task: Task) -> None:
    """Trains what a task says."""
    train(*from_task(task))


def to_task(job: Job, setup: Setup, device: str) -> Task:
    """A job as JSON-able data."""
    fields = {"kind": job.kind.name, "rate": job.rate, "seed": job.seed, "run": str(job.run), "watched": job.watched}
    return {"name": job.run.name, "job": fields, "setup": setup.to_dict(), "device": device}


def from_task(task: Task) -> tuple[Job, Setup, str]:
    """Return the arguments that `to_task` was given."""
    job = task["job"] | {"kind": _BY_NAME[task["job"]["kind"]], "run": Path(task["job"]["run"])}
    return Job(**job), Setup.from_dict(task["setup"]), task["device"]
