"""What `watch.py` compares: a model in training, and the watchers that are attached to it, ours and others.

Each is attached as its manual says. Where a library needs a call from the training loop (wandb's `log`, msprobe's
`start` and `stop`), the call is part of the step. What they write goes to a temporary folder; nothing goes over a
network.
"""

import contextlib
import functools
import itertools
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (its usual name)
from torch.optim import Optimizer

BARE = "bare"
FLOOR = "one aminmax of each tensor"
KERNEL = "our kernel on each tensor, no watch"
LOADED = "bare, our libraries loaded"
EVERYTHING = "ours: everything, every step"
EVERY_10 = "ours: everything, every 10 steps"
IDLE = "ours: attached, not due"
_ALL_BUT_UPDATES = ("weights", "gradients", "activations", "activation_gradients", "optimizer")
NEVER = 10**9  # an interval, in steps, that no run reaches
_BATCHES = 64
_MOST_STEPS = 100_000
Measure = Callable[[Tensor], object]


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Attached:
    """What a contender wants of the loop: calls in each step, and off the clock."""

    before: Callable[[], object] = _nothing  # in each step
    after: Callable[[], object] = _nothing  # in each step
    drain: Callable[[], object] = _nothing  # off the clock: waits until what runs in the background is done
    close: Callable[[], object] = _nothing
    held_bytes: Callable[[], int] = lambda: 0  # memory that it says itself it holds
    recorded: Callable[[], int | None] = lambda: None  # how many tensors it has recorded, after a drain


Attach = Callable[[nn.Module, Optimizer], Attached]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A row of the table."""

    attach: Attach
    goal: float | None = None  # of the ratio to the bare step
    floor_goal: float | None = None  # of the extra time, to that of the floor
    alone: bool = False  # changes torch for the whole process: measured beside a bare twin of its own, elsewhere
    slow: bool = False  # in fewer rounds


# -- what is trained ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A decoder-only transformer, and its batches."""

    layers: int = 6
    width: int = 256
    heads: int = 4
    vocabulary: int = 1024
    sequence: int = 64
    batch: int = 4


CPU = Shape()
TINY = Shape(layers=2, width=32, heads=2, vocabulary=64, sequence=8, batch=1)
GPT_124M = Shape(layers=12, width=768, heads=12, vocabulary=50304, sequence=1024, batch=16)


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv, self.out = nn.Linear(shape.width, 3 * shape.width), nn.Linear(shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        """What each position takes from those before it."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and an MLP, each beside the residual stream."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.norm1, self.attention, self.norm2 = nn.LayerNorm(width), Attention(shape), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """The stream with both added."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """Pre-norm, GELU, learned positions; the head has the embedding's weights in the large one, as GPT-2 has."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Parameter(0.02 * torch.randn(shape.sequence, shape.width))
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        if shape == GPT_124M:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits of the token after each."""
        x = self.tokens(tokens) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Twin:
    """A model in training, with one contender attached. All twins of a shape do the same."""

    def __init__(self, attach: Attach, shape: Shape, device: str = "cpu", *, eager: bool = False) -> None:
        torch.manual_seed(0)
        self.model = model = Transformer(shape).to(device)
        on_gpu = device == "cuda"
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=on_gpu)
        generator = torch.Generator().manual_seed(1)
        size = (_BATCHES, shape.batch, shape.sequence + 1)
        self._batches = torch.randint(shape.vocabulary, size, generator=generator).to(device)
        self.losses = torch.zeros(_MOST_STEPS, device=device)  # written without waiting for the device
        self.steps = 0
        self.attached = attach(model, self.optimizer)
        self._forward: Callable[[Tensor], Tensor] = torch.compile(model) if on_gpu and not eager else model
        self._cast = functools.partial(torch.autocast, device, torch.bfloat16, enabled=on_gpu)

    def step(self) -> None:
        """One training step, with what the contender wants of the loop."""
        self.attached.before()
        batch = self._batches[self.steps % _BATCHES]
        self.optimizer.zero_grad()
        with self._cast():
            logits = self._forward(batch[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        self.losses[self.steps % _MOST_STEPS].copy_(loss.detach())
        self.steps += 1
        self.attached.after()

    def same_losses(self, other: "Twin") -> str:
        """Whether the contender has left the training as it was, to the bit."""
        steps = min(self.steps, other.steps)
        return "identical" if torch.equal(self.losses[:steps], other.losses[:steps]) else "differ"


# -- who watches -------------------------------------------------------------------------------------------------------


def bare(_model: nn.Module, _optimizer: Optimizer) -> Attached:
    """Nothing attached."""
    return Attached()


def by_plimsoll(model: nn.Module, optimizer: Optimizer, **settings: object) -> Attached:
    """A watch into a temporary folder."""
    import plimsoll

    folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    watch = plimsoll.watch(model, optimizer, run=Path(folder.name) / "run", **settings)

    def close() -> None:
        watch.close()
        folder.cleanup()

    def recorded() -> int:
        return sum(map(len, plimsoll.Run(watch.path).tensors.values()))

    return Attached(drain=watch.flush, close=close, held_bytes=lambda: watch.recorder_bytes, recorded=recorded)


def loaded(_model: nn.Module, _optimizer: Optimizer) -> Attached:
    """Nothing attached, but imported and used once: what Numba and pyarrow take of a process, whatever is watched."""
    import pyarrow.parquet  # noqa: F401

    import plimsoll.watch

    plimsoll.measure(torch.ones(1))
    return Attached()


def contenders(device: str) -> dict[str, Contender]:
    """Ours with their goals, then the peers."""
    ours = functools.partial(functools.partial, by_plimsoll)
    if device == "cuda":
        return {
            EVERYTHING: Contender(attach=ours(every=1), goal=1.10),
            EVERY_10: Contender(attach=ours(every=10), goal=1.01),
        }
    return {
        EVERYTHING: Contender(attach=ours(every=1), floor_goal=1.0),
        "ours: all but updates, every step": Contender(attach=ours(every=1, collect=_ALL_BUT_UPDATES)),
        "ours: weights, gradients, every step": Contender(
            attach=ours(every=1, collect=("weights", "gradients")), goal=1.05
        ),
        IDLE: Contender(attach=ours(every=NEVER), goal=1.005),
        f"{IDLE}, no recorder": Contender(attach=ours(every=NEVER, recorder=()), goal=1.005),
        **peers(),
    }


def peers() -> dict[str, Contender]:
    """Every other watcher, at each step and, where it has such a mode, attached but not due."""
    by_ops = functools.partial(by_torch_operations, measure=_same_content, inputs=True, updates=True)
    found = {
        "naive statistics, every step": Contender(attach=by_torch_operations),
        "naive statistics, not due": Contender(attach=functools.partial(by_torch_operations, due=False)),
        "same content by torch operations": Contender(attach=by_ops, slow=True),
        "HF DebugUnderflowOverflow": Contender(attach=by_transformers),
    }
    for log in ("all", "gradients"):
        for every, mode in ((1, "every step"), (NEVER, "not due")):
            attach = functools.partial(by_wandb, log=log, every=every)
            found[f"wandb {log}, {mode}"] = Contender(attach=attach, slow=every == 1)
    for name, attach in (("TrainerMon", by_msprobe_monitor), ("PrecisionDebugger", by_msprobe_debugger)):
        found[f"msprobe {name}, every step"] = Contender(attach=attach, alone=True, slow=True)
        found[f"msprobe {name}, not due"] = Contender(attach=functools.partial(attach, due=False), alone=True)
    found["smdebug"] = Contender(attach=by_smdebug, alone=True)
    return found


# -- torch alone ------------------------------------------------------------------------------------------------------


def _six_numbers(x: Tensor) -> object:
    """What one writes first."""
    absolute = x.abs()
    return [figure.item() for figure in (x.norm(), x.min(), x.max(), absolute.mean(), x.mean(), x.std())]


def floor() -> Contender:
    """The least that a statistic of every value takes: `torch.aminmax` of all tensors that `watch` records.

    Weights, gradients, optimizer state, what modules are given and return, and the gradients of that, each tensor once.
    Not the weights' changes, which no tensor of the training holds.
    """
    return Contender(attach=functools.partial(by_torch_operations, measure=torch.aminmax, inputs=True))


def kernel() -> Contender:
    """What counting alone costs: our kernel on the floor's tensors, by the floor's hooks.

    Between the floor and this lies the kernel, between this and "all but updates" the watch's own Python.
    """
    from plimsoll.kernels import measure_one, new_bank

    rows = 1024
    bank, row = new_bank(rows), itertools.cycle(range(rows))
    measure: Measure = lambda x: measure_one(x, bank, next(row))  # noqa: E731
    return Contender(attach=functools.partial(by_torch_operations, measure=measure, inputs=True))


def _same_content(x: Tensor) -> object:
    """All that a spectrum holds."""
    from measure import statistics_by_torch

    return statistics_by_torch(x)


def by_torch_operations(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    measure: Measure = _six_numbers,
    inputs: bool = False,
    updates: bool = False,
    due: bool = True,
) -> Attached:
    """Hooks that take numbers of weights, gradients, optimizer state, module outputs and their gradients.

    `inputs` and `updates` are the rest of what `watch` records: the modules' inputs (each tensor once), the weights'
    changes.
    """
    _Hooks(model, optimizer, measure=measure, inputs=inputs, updates=updates, due=due)
    return Attached()


class _Hooks:
    """Kept alive by the model and the optimizer, that call its methods."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, *, measure: Measure, inputs: bool, updates: bool, due: bool
    ) -> None:
        self._model, self._measure, self._inputs, self._updates, self._due = model, measure, inputs, updates, due
        self._names = {p: name for name, p in model.named_parameters()}
        self._seen: dict[int, Tensor] = {}
        self._old: dict[str, Tensor] = {}
        self.found: dict[str, object] = {}
        for name, module in model.named_modules():
            module.register_forward_hook(functools.partial(self._after_forward, name=name))
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)

    @torch.no_grad()
    def _take(self, name: str, x: Tensor | None) -> None:
        if x is not None and x.numel() > 1 and x.is_floating_point():
            self.found[name] = self._measure(x.detach())

    def _see(self, name: str, x: object) -> None:
        if not isinstance(x, Tensor) or not x.is_floating_point() or self._seen.get(id(x)) is x:
            return
        self._seen[id(x)] = x
        self._take(f"activations {name}", x)
        if x.requires_grad:
            x.register_hook(lambda g: self._take(f"activation_gradients {name}", g))

    def _after_forward(self, _module: nn.Module, args: tuple[object, ...], output: object, *, name: str) -> None:
        if self._due:
            for index, x in enumerate(args if self._inputs else ()):
                self._see(f"{name}:input.{index}", x)
            self._see(f"{name}:output", output)

    def _before_step(self, *_: object) -> None:
        if self._due:
            self._seen.clear()
            for p, name in self._names.items():
                self._take(f"weights {name}", p)
                self._take(f"gradients {name}", p.grad)
                if self._updates:
                    self._old[name] = p.detach().clone()

    def _after_step(self, optimizer: Optimizer, *_: object) -> None:
        if self._due:
            for p, state in optimizer.state.items():
                for key, x in state.items():
                    self._take(f"optimizer {self._names[p]}:{key}", x)
            for p, name in self._names.items() if self._updates else ():
                self._take(f"updates {name}", p.detach() - self._old[name])


# -- libraries ---------------------------------------------------------------------------------------------------------


def by_transformers(model: nn.Module, _optimizer: Optimizer) -> Attached:
    """The detector of infinities: least and largest absolute value of weights, inputs and outputs, each forward."""
    from transformers.debug_utils import DebugUnderflowOverflow

    with _quiet():
        DebugUnderflowOverflow(model)
    return Attached()


def by_wandb(model: nn.Module, _optimizer: Optimizer, *, log: str, every: int) -> Attached:
    """Histograms, into one offline run that all wandb rows share (its hooks know one run only)."""
    run = _wandb_run()
    run.watch(model, log=log, log_freq=every)
    # Its service is another process and does not say when it is done.
    return Attached(after=lambda: run.log({}) if every == 1 else None, drain=lambda: time.sleep(0.2))


@functools.cache
def _wandb_run() -> Any:
    import wandb

    logging.getLogger("wandb").setLevel(logging.ERROR)
    settings = wandb.Settings(silent=True, console="off", x_disable_stats=True, x_disable_meta=True)
    return wandb.init(mode="offline", dir=tempfile.mkdtemp(), project="watch", settings=settings)


def by_msprobe_monitor(model: nn.Module, optimizer: Optimizer, *, due: bool = True) -> Attached:
    """The training monitor, with all that its CSV format has."""
    folder = Path(tempfile.mkdtemp())
    os.environ["MONITOR_OUTPUT_DIR"] = str(folder)
    settings: dict[str, object] = {
        "targets": {},
        "all_xy": True,
        "format": "csv",
        "ops": ["norm", "min", "max", "mean"],
    }
    settings |= {f"{kind}_distribution": True for kind in ("xy", "wg", "mv", "param")}
    settings |= {"start_step": 0 if due else NEVER, "step_interval": 1}
    (folder / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    with _quiet():
        from msprobe.pytorch import TrainerMon

        monitor = TrainerMon(str(folder / "config.json"), params_have_main_grad=False)
        monitor.set_monitor(model, optimizer, grad_acc_steps=1)
    return Attached()


def by_msprobe_debugger(model: nn.Module, _optimizer: Optimizer, *, due: bool = True) -> Attached:
    """The precision debugger: statistics of modules' inputs, outputs, weights and gradients, to JSON."""
    folder = Path(tempfile.mkdtemp())
    step = [] if due else [999_999]  # the largest that it takes
    settings = {"task": "statistics", "dump_path": str(folder), "level": "L0", "rank": [], "step": step}
    settings["statistics"] = {"scope": [], "list": [], "data_mode": ["all"], "summary_mode": "statistics"}
    (folder / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    with _quiet():
        from msprobe.pytorch import PrecisionDebugger

        debugger = PrecisionDebugger(str(folder / "config.json"))

    def before() -> None:
        with _quiet():
            debugger.start(model)

    def after() -> None:
        with _quiet():
            debugger.stop()
            debugger.step()

    return Attached(before=before, after=after)


def by_smdebug(model: nn.Module, _optimizer: Optimizer) -> Attached:
    """SageMaker's debugger: weights and gradients to its own files."""
    try:
        import smdebug.pytorch as smd
    except TypeError as error:
        raise ImportError("its generated code needs protobuf 3.20, and NumPy below 2.3") from error
    saves = smd.SaveConfig(save_interval=1)
    hook = smd.Hook(tempfile.mkdtemp(), include_collections=["weights", "gradients"], save_config=saves)
    hook.register_module(model)
    return Attached()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Sends what a library prints to nowhere."""
    with (
        Path(os.devnull).open("w", encoding="utf-8") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        yield
