"""One training of an adapter, a branch beside a network that is done, by Adam at one precision, watched into a run.

For the first steps the branch's output is multiplied by zero, and then by a factor that doubles every few steps until
it is 1, as where layers are added to a network that works already. So the branch's weights have gradients of exactly
zero for a spell, and afterwards small ones that grow; nothing else is done to them. The inputs differ in size, as
columns of a table do that nobody has normalised: this is what Adam's rate for each weight is for.

Nothing here judges: what became of a training is read from its run (`analysis`).
"""

import contextlib
import math
from collections.abc import Generator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from plimsoll.errors import ArgumentError
from plimsoll.precision import guard_adam, prepare
from plimsoll.watch import watch
from plimsoll_lab.experiment import Progress

BRANCH = "first.weight"  # of the branch, whose moments and rates are looked at
FEWEST_STEPS = 160
_DOUBLINGS = 16  # of the factor, from 2^-16 to 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The sizes: the branch is closed for `spell` steps, and then opens over `opening` of them."""

    steps: int = 220
    spell: int = 40
    opening: int = 80
    inputs: int = 16
    width: int = 32
    batch: int = 64
    learning_rate: float = 3e-3
    every: int = 10

    @property
    def opened(self) -> int:
        """The first step at which the branch is open; until then all steps are recorded."""
        return self.spell + self.opening

    def factor(self, step: int) -> float:
        """What the branch's output is multiplied by."""
        if step < self.spell:
            return 0.0
        return 2.0 ** min(0.0, _DOUBLINGS * ((step - self.spell) / self.opening - 1))

    def to_dict(self) -> dict[str, object]:
        """As plain numbers."""
        return asdict(self)


def setup_for(steps: int | None, *, full: bool) -> Setup:
    """The sizes for that many steps."""
    whole = Setup(steps=3000, width=256, batch=256, inputs=64) if full else Setup()
    if steps is None:
        return whole
    if steps < FEWEST_STEPS:
        raise ArgumentError(
            f"lab adam: expected {FEWEST_STEPS} steps or more: the branch is closed for {whole.spell} of them and "
            f"opens over {whole.opening}; got {steps}. Use {whole.steps}."
        )
    return replace(whole, steps=steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A way to train: at a level, with an epsilon, with or without `guard_adam`; `brief`: for half of the spell."""

    name: str
    title: str
    precision: str
    epsilon: float = 1e-8
    guarded: bool = False
    brief: bool = False


KINDS = (
    Kind(name="fp32", title="FP32, epsilon 1e-8", precision="fp32"),
    Kind(name="fp16-1e-8", title="FP16 state, epsilon 1e-8", precision="fp16-pure", brief=True),
    Kind(name="fp16-1e-7", title="FP16 state, epsilon 1e-7", precision="fp16-pure", epsilon=1e-7),
    Kind(name="fp16-1e-4", title="FP16 state, epsilon 1e-4", precision="fp16-pure", epsilon=1e-4),
    Kind(name="fp16-guarded", title="FP16 state, guarded", precision="fp16-pure", epsilon=1e-7, guarded=True),
    Kind(name="fp16-master", title="FP32 state and masters", precision="fp16-master"),
)


class Net(nn.Module):
    """A linear trunk, fitted before and frozen, and a branch of two layers that is added to it times a factor."""

    def __init__(self, trunk: Tensor, width: int) -> None:
        super().__init__()
        self.trunk = nn.Buffer(trunk)
        self.first = nn.Linear(len(trunk), width)
        self.second = nn.Linear(width, 1)
        self.factor = 0.0

    def forward(self, x: Tensor) -> Tensor:
        """The prediction (batch,)."""
        x = x.to(self.first.weight.dtype)
        return x @ self.trunk + self.factor * self.second(functional.relu(self.first(x))).squeeze(-1)


class Data:
    """Batches of inputs and targets: a fixed network of the normalised inputs."""

    def __init__(self, setup: Setup, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._setup, self._seed = setup, seed
        self.sizes = torch.exp2(-torch.linspace(0.0, 6.0, setup.inputs))
        self._in = torch.randn(setup.inputs, setup.width, generator=generator) / math.sqrt(setup.inputs)
        self._out = torch.randn(setup.width, generator=generator) * math.sqrt(2 / setup.width)

    def fit(self) -> Tensor:
        """The linear trunk that fits best."""
        x, y = (torch.cat(each).double() for each in zip(*(self.batch(-n) for n in range(1, 17)), strict=True))
        return cast("Tensor", torch.linalg.lstsq(x, y[:, None]).solution).squeeze(-1).float()

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """The inputs (batch, inputs) and targets (batch,) of a step."""
        generator = torch.Generator().manual_seed((self._seed + 1) * 1_000_003 + step)
        x = torch.randn(self._setup.batch, self._setup.inputs, generator=generator)
        return x * self.sizes, functional.relu(x @ self._in) @ self._out


def train(kind: Kind, setup: Setup, run: Path, *, seed: int, device: str, progress: Progress) -> None:
    """Trains from the same weights and batches as every other kind of that seed, and leaves the run."""
    data = Data(setup, seed)
    torch.manual_seed(seed)
    model = Net(data.fit(), setup.width).to(device)
    # One operation after the other, each rounded: the fused step adds epsilon in FP32, and rounds but once.
    optimizer = torch.optim.Adam(model.parameters(), lr=setup.learning_rate, eps=1e-7, foreach=False, fused=False)
    steps = setup.spell // 2 if kind.brief else setup.steps
    progress.begin(kind.title, steps)
    collect = ("weights", "gradients", "optimizer", "updates")
    with (
        watch(model, optimizer, run=run, every=setup.every, warmup=setup.opened, collect=collect) as seen,
        prepare(model, optimizer, kind.precision, watch=seen) as loop,
        _epsilon(optimizer, kind),
    ):
        for step in range(steps):
            weight = _weight(model).double()
            model.factor = setup.factor(step)
            x, y = (each.to(device) for each in data.batch(step))
            with loop.forward():
                loss = functional.mse_loss(model(x).float(), y)
            seen.log(**_rates(optimizer, model))
            loop.step(loss)
            seen.log(largest_update=float((_weight(model).double() - weight).abs().max()) / setup.learning_rate)
            progress.advance()


@contextlib.contextmanager
def _epsilon(optimizer: torch.optim.Optimizer, kind: Kind) -> Generator[None]:
    """Sets the epsilon only here, since `prepare` refuses one that is zero in FP16; and the guard."""
    for group in optimizer.param_groups:
        group["eps"] = kind.epsilon
    guard = guard_adam(optimizer) if kind.guarded else None
    try:
        yield
    finally:
        if guard is not None:
            guard.remove()


def _weight(model: Net) -> Tensor:
    return model.first.weight.detach()


def _rates(optimizer: torch.optim.Optimizer, model: Net) -> Mapping[str, float]:
    """How far apart Adam's rates for single weights of the branch are, in binades: of the middle nine tenths."""
    state = cast("Mapping[str, Any]", optimizer.state.get(model.first.weight, {}))
    if "exp_avg_sq" not in state:
        return {}
    second, group = cast("Tensor", state["exp_avg_sq"]), optimizer.param_groups[0]
    epsilon = float(torch.tensor(group["eps"], dtype=second.dtype))
    corrected = second.double() / (1 - group["betas"][1] ** float(state["step"]))
    rates = 1 / (corrected[state["exp_avg"] != 0].sqrt() + epsilon)
    if not len(rates) or not rates.isfinite().all() or not rates.all():  # 0: a second moment is Inf
        return {}
    low, high = (float(rates.quantile(share)) for share in (0.05, 0.95))
    return {"rate_spread": math.log2(high / low)}


def described(setup: Setup, device: str) -> Mapping[str, object]:
    """What a result says of how it was made."""
    return {**setup.to_dict(), "device": device, "fp16": "emulated" if device == "cpu" else "the device's own"}
