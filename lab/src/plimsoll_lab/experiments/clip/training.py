"""Trainings of the small CLIP as workers' tasks, and their common progress."""

import contextlib
import tempfile
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from plimsoll.errors import ArgumentError
from plimsoll.precision import Loop, prepare
from plimsoll.scaling import LayerScaler, LossScaler, SpectralScaler
from plimsoll.watch import watch
from plimsoll_lab.bench import Bench, Progress
from plimsoll_lab.experiments.clip.model import Batch, Clip, contrastive_loss, make_batch
from plimsoll_lab.running.workers import Task, carry_out, one_thread
from plimsoll_lab.study import check_steps

Each = Literal["tensor", "element"]

_ROOM = 2.0**11  # of 2^16: what is below it all the time can be carried at twice the scale
_FURTHEST = 24  # binades from the loss scale
_PATIENCE = 10  # steps with room before a scale is doubled


class Scales:
    """Scale of a parameter or of its elements: exponent, and steps with room since."""

    def __init__(self, parameter: Tensor, each: Each) -> None:
        self.each = each
        shape = parameter.shape if each == "element" else torch.Size(())
        self.exponent = torch.zeros(shape, dtype=torch.int8, device=parameter.device)
        self.clean = torch.zeros_like(self.exponent)

    @property
    def nbytes(self) -> int:
        """Bytes of the scales."""
        return self.exponent.nbytes + self.clean.nbytes

    def gradient(self, g: Tensor, x: Tensor) -> Tensor:
        """Return the weight's gradient in FP32 after FP16 at the scale; set the next."""
        held = torch.ldexp(g.float().T @ x.float(), self.exponent).half().float()
        found = torch.ldexp(held, -self.exponent)
        if bool(g.isfinite().all()):  # else it broke further up, and no scale of this one is to blame
            self._follow(held)
        return torch.where(held.isfinite(), found, 0.0) if self.each == "element" and _some(held) else found

    def _follow(self, held: Tensor) -> None:
        size = held.abs() if self.each == "element" else held.abs().amax()
        over, room = ~size.isfinite(), size < _ROOM
        self.clean = torch.where(room, self.clean + 1, 0)
        up = self.clean >= _PATIENCE
        self.clean = self.clean.masked_fill(up, 0)
        self.exponent = (self.exponent + up.to(torch.int8) - over.to(torch.int8)).clamp(-_FURTHEST, _FURTHEST)


class ParameterScaler(LossScaler):
    """Loss scaler that gives each linear layer's weight gradient its own scale.

    It may be one for each element. For models whose linear layers have no biases; other parameters' gradients are FP32
    in mixed precision, and stay at the loss scale. `close` takes its hooks off the model.
    """

    def __init__(
        self, model: nn.Module, device: str = "cpu", *, each: Each = "tensor", init_scale: float = 2.0**16
    ) -> None:
        if each not in ("tensor", "element"):
            raise ArgumentError(f"ParameterScaler: expected each to be 'tensor' or 'element'; got {each!r}.")
        super().__init__(device, init_scale, max_scale=init_scale)
        self.sat_out = 0
        self._clean = 0
        self._mode = _OwnProducts(each)
        self._handles = [
            model.register_forward_pre_hook(self._enter),
            model.register_forward_hook(self._leave, always_call=True),
        ]

    @property
    def scales(self) -> list["Scales"]:
        """Of each weight that a linear layer has used so far."""
        return [scales for _, scales in self._mode.known.values()]

    @property
    def state_bytes(self) -> int:
        """Bytes of all scales, and of the state that they follow."""
        return sum(scales.nbytes for scales in self.scales)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscale as every scaler, without parameters of non-finite gradients."""
        held = [p for group in optimizer.param_groups for p in cast("Sequence[Tensor]", group["params"])]
        held = [p for p in held if p.grad is not None]
        broken = [p for p in held if p.grad is not None and not bool(p.grad.isfinite().all())]
        if len(broken) < len(held):
            for parameter in broken:
                parameter.grad = None
            self.sat_out += len(broken)
        super().unscale_(optimizer)

    def close(self) -> None:
        """The model is as it was."""
        while self._handles:
            self._handles.pop().remove()

    def _enter(self, *_: object) -> None:
        self._mode.__enter__()

    def _leave(self, *_: object) -> None:
        self._mode.__exit__(None, None, None)

    def _next_scale(self, found_inf: Tensor) -> float:
        if bool(found_inf.item()):
            self._clean = 0
            return self.get_scale() * self.get_backoff_factor()
        self._clean += 1
        return self.get_scale() * (self.get_growth_factor() if self._clean % _PATIENCE == 0 else 1.0)


class _OwnProducts(TorchFunctionMode):
    """Mode in which linear layers without bias use own scales for weights' gradients."""

    def __init__(self, each: Each) -> None:
        super().__init__()
        self._each: Each = each
        self.known: dict[int, tuple[Tensor, Scales]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.linear and not kwargs and torch.is_grad_enabled():
            x, weight, *biases = args
            if isinstance(weight, nn.Parameter) and all(bias is None for bias in biases):
                return cast("Any", _Linear).apply(x, weight, self._scales_of(weight))
        return func(*args, **(kwargs or {}))

    def _scales_of(self, weight: Tensor) -> Scales:
        if id(weight) not in self.known:
            self.known[id(weight)] = weight, Scales(weight, self._each)
        return self.known[id(weight)][1]


class _Linear(torch.autograd.Function):
    """Product x W^T, with W's gradient at a scale of its own in FP16."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scales: Scales) -> Tensor:
        y = functional.linear(x, weight)
        ctx.save_for_backward(x.to(y.dtype), weight.to(y.dtype))
        ctx.scales, ctx.wide = scales, (x.dtype, weight.dtype)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        flat, inputs = g.flatten(0, -2), x.flatten(0, -2)
        own = g.dtype is torch.float16
        grad_w = ctx.scales.gradient(flat, inputs) if own else flat.T @ inputs
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = (flat.float() @ weight.float()).to(g.dtype).view(x.shape).to(ctx.wide[0])
        return grad_x, grad_w.to(ctx.wide[1]), None


def _some(values: Tensor) -> bool:
    return bool(values.isfinite().any())


Hard = Literal["burst", "never", "always"]
Scaler = Callable[[nn.Module, str], Any]

HIGH = 2.0**24  # the initial scale of the published recipes for dynamic scaling (X4)
SHORT = 100  # steps, a twentieth of the stock growth interval
LONGER = 4  # times as many steps where no batch is hard


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A way to train.

    - `name`: of its run folder. `scaler`: makes one for a model on a device, if there is one. `repeats`: a batch that
      overflows is repeated at lower scales.
    - `hard`: which batches have black pictures: those of the burst, none, or all. `share`: its steps, as a part of the
      experiment's. `sparse`: how many times as far apart its samples are. `whole`: everything is recorded, and not
      gradients alone.
    """

    name: str
    title: str
    precision: str = "amp-fp16"
    scaler: Scaler | None = None
    repeats: bool = False
    hard: Hard = "burst"
    share: float = 1.0
    sparse: int = 1
    whole: bool = False


def _stock(_: nn.Module, device: str, **arguments: float) -> torch.amp.GradScaler:
    return torch.amp.GradScaler(device, **arguments)  # pyright: ignore[reportArgumentType]


def _layer(model: nn.Module, _: str) -> LayerScaler:
    return LayerScaler(model)


_BOTH = partial(_stock, init_scale=HIGH, growth_interval=SHORT)

FP16 = Kind(name="fp16", title="FP16, stock scaler", scaler=_stock, whole=True)
BF16 = Kind(name="bf16", title="BF16, no scaler", precision="amp-bf16", whole=True)
SPECTRAL = Kind(
    name="fp16-spectral", title="FP16, SpectralScaler", repeats=True, whole=True,
    scaler=lambda _, on: SpectralScaler(on),
)  # fmt: skip
LAYER = Kind(name="fp16-layer", title="FP16, LayerScaler", repeats=True, scaler=_layer, whole=True)
DEMO_KINDS = (FP16, BF16, SPECTRAL, LAYER)

HIGHER = Kind(name="fp16-high", title="FP16, from 2^24", scaler=partial(_stock, init_scale=HIGH))
SHORTER = Kind(name="fp16-short", title="FP16, doubles every 100", scaler=partial(_stock, growth_interval=SHORT))
BOTH = Kind(name="fp16-both", title="FP16, both of these", scaler=_BOTH)
ZHAO = Kind(
    name="fp16-zhao", title="FP16, published layer rule", repeats=True,
    scaler=lambda model, _: LayerScaler(model, rule="zhao"),
)  # fmt: skip
PARAMETER = Kind(name="fp16-parameter", title="FP16, scale per parameter", scaler=ParameterScaler)
ELEMENT = Kind(
    name="fp16-element", title="FP16, scale per element",
    scaler=partial(ParameterScaler, each="element"),
)  # fmt: skip
REMEDIES = (HIGHER, SHORTER, BOTH, ZHAO, PARAMETER, ELEMENT)

NEVER = Kind(
    name="fp16-never-hard", title="FP16, no hard batch", scaler=_stock, hard="never", share=LONGER, sparse=5
)  # fmt: skip
ALWAYS = (
    Kind(name="bf16-always-hard", title="BF16, all batches hard", precision="amp-bf16", hard="always", share=0.5),
    Kind(name="fp16-both-always-hard", title="FP16 2^24 and 100, so", scaler=_BOTH, hard="always", share=0.5),
    Kind(
        name="fp16-layer-always-hard", title="FP16 LayerScaler, so", repeats=True, scaler=_layer, hard="always",
        share=0.5,
    ),
    Kind(
        name="fp16-parameter-always-hard", title="FP16 per parameter, so", scaler=PARAMETER.scaler, hard="always",
        share=0.5,
    ),
)  # fmt: skip

ALL_KINDS: Mapping[str, Kind] = {kind.name: kind for kind in (*DEMO_KINDS, *REMEDIES, NEVER, *ALWAYS)}


FEWEST_STEPS = 100
_GRADIENTS = ("gradients", "activation_gradients")
_ALL = ("weights", *_GRADIENTS, "activations", "optimizer", "updates")
_RETRIES = 24  # halvings, from CLIP's scale to far below what the hard batches need


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The sizes of the experiment.

    The learning rate is the claim's 1e-4, four times as high: by the width alone (64 for 768) it could be twelve times
    as high, but the layers are few. The hard batches are at step 300, ten in a row, an eighth of their pictures black.
    """

    steps: int = 450
    hard_at: int = 300
    hard_batches: int = 10
    black: int = 4
    batch: int = 32
    width: int = 64
    layers: int = 2
    heads: int = 4
    gain: float = 2.0**11
    learning_rate: float = 4e-4
    warmup: int = 50
    every: int = 10

    @property
    def hard_end(self) -> int:
        """The first step after the hard batches."""
        return self.hard_at + self.hard_batches

    def steps_of(self, kind: Kind) -> int:
        """Return the number of steps of a training of that kind."""
        return round(self.steps * kind.share)

    def black_at(self, kind: Kind, step: int) -> int:
        """Return the number of black pictures in that step's batch."""
        hard = kind.hard == "always" or (kind.hard == "burst" and self.hard_at <= step < self.hard_end)
        return self.black if hard else 0


def setup_for(steps: int | None, *, full: bool) -> Setup:
    """Return sizes for so many steps: hard batches at step 300, or earlier if short."""
    whole = Setup(steps=1500, batch=64, black=8, width=128, layers=4, heads=8) if full else Setup()
    if steps is None:
        return whole
    check_steps("clip", steps, FEWEST_STEPS, 450, ", so that there is a time before the hard batches and one after")
    return replace(whole, steps=steps, hard_at=min(whole.hard_at, steps * 2 // 3 // 10 * 10))


def train(kind: Kind, setup: Setup, run: Path, *, seed: int, device: str, on_step: Callable[[], object]) -> None:
    """Train from the weights and batches of the seed, and leave the run.

    `on_step` is called after each step.
    """
    torch.manual_seed(seed)
    model = Clip(width=setup.width, layers=setup.layers, heads=setup.heads, gain=setup.gain).to(device)
    # CLIP's own betas, and the epsilon of its ResNets: that of its ViTs, 1e-6, lies above most gradients here (T8).
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=setup.learning_rate, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.1
    )
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / setup.warmup))
    scaler = None if kind.scaler is None else kind.scaler(model, device)
    every = setup.every * kind.sparse
    # A shadow step tells values that FP16 has lost from true zeros; BF16, with FP32's range, has none to tell.
    shadow_every = every if kind.precision == "amp-fp16" else None
    with (
        watch(
            model, optimizer, run=run, every=every, shadow_every=shadow_every, scaler=scaler,
            collect=_ALL if kind.whole else _GRADIENTS,
        ) as seen,
        prepare(
            model, optimizer, kind.precision, scaler=scaler, schedulers=[warmup], clip_norm=float("inf"),
            max_retries=_RETRIES if kind.repeats else 0, watch=seen,
        ) as loop,
    ):  # fmt: skip
        for step in range(setup.steps_of(kind)):
            black = setup.black_at(kind, step)
            _step(loop, _loss_of(model, make_batch(seed, step, setup.batch, black=black), device), kind)
            if isinstance(scaler, ParameterScaler):
                seen.log(sat_out=scaler.sat_out, scale_bytes=scaler.state_bytes)
            on_step()
    if isinstance(scaler, LayerScaler | ParameterScaler):
        scaler.close()


def _step(loop: Loop, loss_of: Callable[[], Tensor], kind: Kind) -> None:
    if kind.repeats:
        loop.step(loss_of)
        return
    with loop.forward():
        loss = loss_of()
    loop.step(loss)


def _loss_of(model: Clip, batch: Batch, device: str) -> Callable[[], Tensor]:
    """The batch's loss, as a closure: it may have to run again."""
    pictures, captions = batch.pictures.to(device), batch.captions.to(device)
    return lambda: contrastive_loss(model(pictures, captions))


_TRAINED = f"{__name__}:trained"
_LOOK_SECONDS = 0.3


def train_all(kinds: Sequence[Kind], setup: Setup, bench: Bench, workers: int) -> None:
    """Train all kinds, the longest first, `workers` at a time, into their runs."""
    order = sorted(kinds, key=lambda kind: -setup.steps_of(kind))
    with tempfile.TemporaryDirectory() as ticks, _told(kinds, setup, bench.progress, Path(ticks)):
        tasks = [_task(kind, setup, bench, Path(ticks)) for kind in order]
        with one_thread(unless=bench.full):
            carry_out(_TRAINED, tasks, workers=workers)


def trained(task: Task) -> None:
    """Trains what a task says, and leaves a byte for each step that is done."""
    with Path(task["ticks"]).open("wb", buffering=0) as ticks:
        train(
            ALL_KINDS[task["name"]], Setup(**task["setup"]), Path(task["run"]), seed=task["seed"],
            device=task["device"], on_step=lambda: ticks.write(b"."),
        )  # fmt: skip


def _task(kind: Kind, setup: Setup, bench: Bench, ticks: Path) -> Task:
    return {
        "name": kind.name, "setup": asdict(setup), "run": str(bench.runs / kind.name), "seed": bench.seed,
        "device": bench.device, "ticks": str(ticks / kind.name),
    }  # fmt: skip


@contextlib.contextmanager
def _told(kinds: Sequence[Kind], setup: Setup, progress: Progress, ticks: Path) -> Generator[None]:
    """Tells of the steps of all trainings while they run, wherever they do."""
    progress.begin(f"{len(kinds)} trainings", sum(setup.steps_of(kind) for kind in kinds))
    over, said = threading.Event(), 0

    def look() -> None:
        nonlocal said
        done = sum(file.stat().st_size for file in ticks.iterdir())
        for _ in range(done - said):
            progress.advance()
        said = done

    def follow() -> None:
        while not over.wait(_LOOK_SECONDS):
            look()

    follower = threading.Thread(target=follow, daemon=True)
    follower.start()
    try:
        yield
    finally:
        over.set()
        follower.join()
        look()
