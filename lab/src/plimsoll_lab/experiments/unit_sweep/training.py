"""One training of the sweep: from configuration to bits; a task for workers.

What FP16 needs to fail is stated, not hidden, and is what `lab unit` does: the loss that is computed is a micro-batch's
share of a step over 2^19 characters, as in gradient accumulation. One micro-batch alone is computed, as if all were
alike. The sum of their gradients would be so many times its own: SGD's learning rate is multiplied by the number, and
AdamW, which does not see the factor, has its epsilon divided by it. Unit scaling's loss is not divided.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (as everyone calls it)

from plimsoll import unit
from plimsoll.errors import PlimsollError
from plimsoll.precision import Loop, prepare
from plimsoll.scaling import StaticScaler
from plimsoll.unit import functional as U, optim  # noqa: N812  (as torch's is F)
from plimsoll.watch import watch
from plimsoll_lab.experiments.unit.model import join_heads, split_heads
from plimsoll_lab.experiments.unit_sweep.grid import RATES, Configuration, Design, Norm, Optimizer, Residual, Way
from plimsoll_lab.running.workers import Task
from plimsoll_lab.source_text import SYMBOLS, Batch, held_out_batch, make_batch, standard_library
from plimsoll_lab.study import check_steps

HEADS, KERNEL = 2, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Modules and functions of a model, in torch's way or at unit scale.

    `split` and `join` are the two ends of a residual branch with the share tau of the sum.
    """

    linear: Callable[..., nn.Module]
    readout: Callable[..., nn.Module]
    embedding: Callable[..., nn.Module]
    convolution: Callable[..., nn.Module]
    norm: Callable[..., nn.Module]
    gelu: Callable[[Tensor], Tensor]
    tanh: Callable[[Tensor], Tensor]
    add: Callable[[Tensor, Tensor], Tensor]
    attention: Callable[..., Tensor]
    split: Callable[[Tensor, float], tuple[Tensor, Tensor]]
    join: Callable[[Tensor, Tensor, float], Tensor]
    cross_entropy: Callable[[Tensor, Tensor], Tensor]


def _linear(width: int, outputs: int, *, bias: bool) -> nn.Module:
    return _drawn(nn.Linear(width, outputs, bias=bias), width)


def _convolution(width: int, outputs: int, kernel: int, *, bias: bool) -> nn.Module:
    return _drawn(nn.Conv1d(width, outputs, kernel, bias=bias), width * kernel)


def _drawn(module: nn.Linear | nn.Conv1d, fan_in: int) -> nn.Module:
    nn.init.normal_(module.weight, std=fan_in**-0.5)
    return module


def _twice(x: Tensor, _: float) -> tuple[Tensor, Tensor]:
    """Unscaled, nothing happens at the branch's start, whatever its share."""
    return x, x


def _weighted(branch: Tensor, skip: Tensor, tau: float) -> Tensor:
    return math.sqrt(tau) * branch + math.sqrt(1.0 - tau) * skip


def _unit_sum(x: Tensor, y: Tensor) -> Tensor:
    """Return the sum of a recurrence's two terms, whose gradients have its factor too."""
    return U.add(x, y, constraint="to_output_scale")


def _unit_attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """The output's own factor: a branch must be as loud as its share says."""
    return U.scaled_dot_product_attention(q, k, v, constraint="to_output_scale", **options)


PLAIN = Parts(
    linear=_linear, readout=_linear, embedding=nn.Embedding, convolution=_convolution, norm=nn.LayerNorm, gelu=F.gelu,
    tanh=torch.tanh, add=torch.add, attention=F.scaled_dot_product_attention, split=_twice, join=_weighted,
    cross_entropy=F.cross_entropy,
)  # fmt: skip
UNIT = Parts(
    linear=unit.nn.Linear, readout=unit.nn.LinearReadout, embedding=unit.nn.Embedding, convolution=unit.nn.Conv1d,
    norm=unit.nn.LayerNorm, gelu=U.gelu, tanh=U.tanh, add=_unit_sum, attention=_unit_attention, split=U.residual_split,
    join=U.residual_add, cross_entropy=U.cross_entropy,
)  # fmt: skip


class Attention(nn.Module):
    """Attention to what was before."""

    def __init__(self, parts: Parts, width: int) -> None:
        super().__init__()
        self.parts = parts
        self.qkv, self.out = parts.linear(width, 3 * width, bias=False), parts.linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape, (pieces, length, width)."""
        q, k, v = split_heads(self.qkv(x), HEADS)
        return self.out(join_heads(self.parts.attention(q, k, v, is_causal=True)))


class Convolution(nn.Module):
    """A convolution over a place and the three before it."""

    def __init__(self, parts: Parts, width: int) -> None:
        super().__init__()
        self.parts = parts
        self.kernel = parts.convolution(width, width, KERNEL, bias=False)
        self.out = parts.linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape, (pieces, length, width)."""
        before = F.pad(x.transpose(1, 2), (KERNEL - 1, 0))
        return self.out(self.parts.gelu(self.kernel(before)).transpose(1, 2))


class Recurrent(nn.Module):
    """Elman's recurrence: the state is tanh of the input plus the state's product."""

    def __init__(self, parts: Parts, width: int) -> None:
        super().__init__()
        self.parts = parts
        self.enter, self.again, self.out = (parts.linear(width, width, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """The same shape, (pieces, length, width)."""
        first, *rest = self.enter(x).unbind(1)
        states = [self.parts.tanh(first)]
        for entered in rest:
            states.append(self.parts.tanh(self.parts.add(entered, self.again(states[-1]))))
        return self.out(torch.stack(states, dim=1))


class Network(nn.Module):
    """Two layers at every place, with a GELU between."""

    def __init__(self, parts: Parts, width: int) -> None:
        super().__init__()
        self.parts = parts
        self.up, self.down = parts.linear(width, 4 * width, bias=False), parts.linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        return self.down(self.parts.gelu(self.up(x)))


class Branch(nn.Module):
    """A branch with norm and residual; `number`: its place in the model, from 1."""

    def __init__(self, parts: Parts, design: Design, inner: nn.Module, width: int, number: int) -> None:
        super().__init__()
        self.parts, self.inner = parts, inner
        self.before = parts.norm(width, elementwise_affine=False) if design.norm == "pre" else nn.Identity()
        self.after = parts.norm(width, elementwise_affine=False) if design.norm == "post" else nn.Identity()
        self.residual: Residual = design.residual
        self.tau = 1.0 / (number + 1) if design.residual == "running-mean" else 0.5

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        if self.residual == "none":
            return self.after(self.inner(self.before(x)))
        if self.residual == "sum":
            return self.after(x + self.inner(self.before(x)))
        start, skip = self.parts.split(x, self.tau)
        return self.after(self.parts.join(self.inner(self.before(start)), skip, self.tau))


_SEQUENCES: dict[str, Callable[[Parts, int], nn.Module]] = {
    "attention": Attention, "convolution": Convolution, "recurrent": Recurrent,
}  # fmt: skip


class Characters(nn.Module):
    """The model of a design, of the parts that are given."""

    def __init__(self, design: Design, parts: Parts, *, width: int, length: int) -> None:
        super().__init__()
        self.parts = parts
        self.characters, self.places = parts.embedding(SYMBOLS, width), parts.embedding(length, width)
        kinds = (_SEQUENCES[design.sequence], Network)
        self.branches = nn.Sequential(
            *[
                Branch(parts, design, kind(parts, width), width, 2 * layer + place)
                for layer in range(design.depth)
                for place, kind in enumerate(kinds, start=1)
            ]
        )
        self.norm = parts.norm(width, elementwise_affine=False) if design.norm == "pre" else nn.Identity()
        self.readout = parts.readout(width, SYMBOLS, bias=False)

    def forward(self, characters: Tensor) -> Tensor:
        """Return the scores (pieces, length, symbols) after each of (pieces, length)."""
        places = torch.arange(characters.shape[1], device=characters.device)
        x = self.parts.add(self.characters(characters), self.places(places))
        return self.readout(self.norm(self.branches(x)))

    def loss(self, scores: Tensor, targets: Tensor) -> Tensor:
        """The mean over all characters, in nats."""
        return self.parts.cross_entropy(scores.flatten(0, 1), targets.flatten())


def groups(model: Characters, twin: Characters, batch: Batch, rate: float) -> list[dict[str, Any]]:
    """Return a group for each parameter, with its rate; `twin` gets the weights.

    It is an unscaled model of the design.
    """
    forward = dict(forward_factors(model))
    twin.load_state_dict({name: forward[name] * weight.detach() for name, weight in model.named_parameters()})
    here, there = gradients(model, batch), gradients(twin, batch)
    return [
        {"params": [parameter], "lr": rate * there[name] / here[name] / forward[name]}
        for name, parameter in model.named_parameters()
    ]


def gradients(model: Characters, batch: Batch) -> dict[str, float]:
    """Return each parameter gradient's root mean square at a batch; keeps none."""
    named = dict(model.named_parameters())
    found = torch.autograd.grad(model.loss(model(batch.inputs), batch.targets), list(named.values()))
    return {name: gradient.square().mean().sqrt().item() for name, gradient in zip(named, found, strict=True)}


@torch.no_grad()
def forward_factors(model: nn.Module) -> Iterator[tuple[str, float]]:
    """Yield weights' names, and the module's output over torch's of that weight."""
    named = cast("Iterator[tuple[str, nn.Module]]", model.named_modules())
    for name, module in named:
        if isinstance(module, nn.Linear | nn.Conv1d | nn.Embedding):
            x = _example(module)
            yield f"{name}.weight", _norm(module(x)) / _norm(_as_torch(module, x))


def _norm(x: Tensor) -> float:
    return math.sqrt(x.square().sum().item())


def _as_torch(module: nn.Linear | nn.Conv1d | nn.Embedding, x: Tensor) -> Tensor:
    if isinstance(module, nn.Embedding):
        return nn.Embedding.forward(module, x)
    return nn.Linear.forward(module, x) if isinstance(module, nn.Linear) else nn.Conv1d.forward(module, x)


def _example(module: nn.Linear | nn.Conv1d | nn.Embedding) -> Tensor:
    """Any input; of no other random numbers than these."""
    generator = torch.Generator().manual_seed(0)
    device = module.weight.device
    if isinstance(module, nn.Embedding):
        return torch.arange(min(module.num_embeddings, SYMBOLS), device=device)
    if isinstance(module, nn.Conv1d):
        return torch.randn(2, module.in_channels, 2 * module.kernel_size[0], generator=generator).to(device)
    return torch.randn(4, module.in_features, generator=generator).to(device)


FEWEST_STEPS = 20
LOSS_SCALE = 2048.0
TRAINED = f"{__name__}:trained"
_BETAS, _EPSILON, _MOMENTUM = (0.9, 0.95), 1e-8, 0.9
_LOWEST = 0.02  # of the learning rate, at the end
_PROBED = 64  # pieces of the batch that gradients are compared at
_STEP = 2.0  # between neighbours in a row of learning rates
# The middle of each row, by norm; tried by hand on designs of two layers with seed 0. A unit-scaled weight begins at 1
# and torch's far below: one number means different steps. (With SGD it nearly does not, see `sgd`.)
_MIDDLE: Mapping[tuple[bool, Optimizer], Mapping[Norm, float]] = {
    (False, "adamw"): {"pre": 0.025, "post": 0.0125, "no": 0.025},
    (False, "sgd"): {"pre": 0.25, "post": 0.25, "no": 0.125},
    (True, "adamw"): {"pre": 1.0, "post": 0.25, "no": 0.5},
    (True, "sgd"): {"pre": 0.5, "post": 0.5, "no": 0.25},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The sizes of the sweep.

    - `pieces`, `length`: of a micro-batch; `accumulate`: how many of them a step would have.
    - `held_out`: how many pieces are held out. `every`: how often a watched training is recorded.
    """

    steps: int = 100
    warmup: int = 10
    pieces: int = 16
    length: int = 16
    accumulate: int = 2048
    width: int = 32
    held_out: int = 128
    every: int = 10


def setup_for(steps: int | None, *, full: bool) -> Setup:
    """Return sizes for so many steps, of micro-batches of 2^19 characters together."""
    whole = Setup()
    if full:
        whole = replace(whole, steps=1000, warmup=100, pieces=16, length=64, accumulate=512, width=128, held_out=256)
    if steps is None:
        return whole
    check_steps("unit-sweep", steps, FEWEST_STEPS, whole.steps, ", so that there is something to learn")
    return replace(whole, steps=steps, warmup=min(whole.warmup, steps // 10))


def rate_of(configuration: Configuration) -> float:
    """Return the learning rate: a factor of two a place, 2 for the middle one."""
    design, unit = configuration.design, configuration.way.scaling == "unit"
    return _MIDDLE[unit, design.optimizer][design.norm] * _STEP ** (configuration.rate - RATES // 2)


def train(
    configuration: Configuration, setup: Setup, *, seed: int, device: str, run: Path | None = None
) -> dict[str, float]:
    """Train from the weights and batches of that seed, watched if there is a run.

    Gives bits per character of held-out text, of the last tenth of the training, and of its first step.
    """
    torch.manual_seed(seed)
    unit = configuration.way.scaling == "unit"
    model = Characters(configuration.design, UNIT if unit else PLAIN, width=setup.width, length=setup.length).to(device)
    optimizer = make_optimizer(model, configuration, setup, seed)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _part_of_rate(step, setup))
    scaler = StaticScaler(LOSS_SCALE if configuration.way.scaling == "static" else 1.0, device=device)
    level = "fp32" if configuration.way.precision == "fp32" else "amp-fp16"
    record = None if run is None else watch(model, optimizer, run=run, every=setup.every, shadow_every=None)
    losses: list[Tensor] = []
    with (
        contextlib.nullcontext() if record is None else record,
        prepare(model, optimizer, level, scaler=scaler, schedulers=[schedule], watch=record) as loop,
    ):
        for step in range(setup.steps):
            batch = make_batch(standard_library(), seed, step, pieces=setup.pieces, length=setup.length)
            with loop.forward():
                loss = _loss(model, batch, device)
            losses.append(loss.detach() / math.log(2.0))
            if record is not None:
                record.log(train_bits=losses[-1])
            loop.step(loss if unit else loss / setup.accumulate)
        bits = _held_out(loop, model, setup, device)
        if record is not None:
            record.log(bits=bits)
    trained = torch.stack(losses)
    tail = trained[-max(setup.steps // 10, 1) :].mean()
    return {"bits": bits.item(), "train_bits": tail.item(), "first_bits": trained[0].item()}


def make_optimizer(
    model: Characters, configuration: Configuration, setup: Setup, seed: int = 0
) -> torch.optim.Optimizer:
    """Return the optimizer; unscaled gradients are over the number of micro-batches."""
    rate, unit = rate_of(configuration), configuration.way.scaling == "unit"
    if configuration.design.optimizer == "sgd":
        if unit:
            return torch.optim.SGD(_groups(model, configuration.design, setup, seed, rate), lr=rate, momentum=_MOMENTUM)
        return torch.optim.SGD(model.parameters(), lr=rate * setup.accumulate, momentum=_MOMENTUM)
    if unit:
        return optim.AdamW(model, lr=rate, betas=_BETAS, eps=_EPSILON, weight_decay=0.0)
    return torch.optim.AdamW(
        model.parameters(), lr=rate, betas=_BETAS, eps=_EPSILON / setup.accumulate, weight_decay=0.0
    )


def _groups(model: Characters, design: Design, setup: Setup, seed: int, rate: float) -> list[dict[str, Any]]:
    """See `sgd`; the batch is none that is trained on first."""
    device = model.readout.weight.device
    assert isinstance(device, torch.device)
    twin = Characters(design, PLAIN, width=setup.width, length=setup.length).to(device)
    drawn = make_batch(standard_library(), seed, setup.steps, pieces=_PROBED, length=setup.length)
    return groups(model, twin, Batch(inputs=drawn.inputs.to(device), targets=drawn.targets.to(device)), rate)


def to_task(configuration: Configuration, setup: Setup, *, seed: int, device: str) -> Task:
    """A training as JSON-able data."""
    return {
        "name": configuration.name,
        "configuration": configuration.to_dict(),
        "setup": asdict(setup),
        "seed": seed,
        "device": device,
        "text_sha256": standard_library().sha256,
    }


def trained(task: Task) -> dict[str, float]:
    """Train as a task says; raise `PlimsollError` where the text is another."""
    here = standard_library().sha256
    if here != task["text_sha256"]:
        raise PlimsollError(
            "lab unit-sweep: expected Python's standard library to be the same text on every machine of the sweep; got "
            f"{here[:12]} here and {task['text_sha256'][:12]} where it began. Install the same Python everywhere."
        )
    fields = dict(task["configuration"])
    rate = fields.pop("rate")
    way = Way(precision=fields.pop("precision"), scaling=fields.pop("scaling"))
    configuration = Configuration(design=Design(**fields), way=way, rate=rate)
    return train(configuration, Setup(**task["setup"]), seed=task["seed"], device=task["device"])


def _loss(model: Characters, batch: Batch, device: str) -> Tensor:
    return model.loss(model(batch.inputs.to(device)), batch.targets.to(device))


def _held_out(loop: Loop, model: Characters, setup: Setup, device: str) -> Tensor:
    """Return held-out bits per character, in the arithmetic of the training."""
    batch = held_out_batch(standard_library(), pieces=setup.held_out, length=setup.length)
    with loop.evaluate():
        return _loss(model, batch, device) / math.log(2.0)


def _part_of_rate(step: int, setup: Setup) -> float:
    """Up from nothing, then down in a line."""
    rest = (setup.steps - step) / (setup.steps - setup.warmup)
    return min((step + 1) / max(setup.warmup, 1), max(rest, _LOWEST))
