"""The trainings of the deep encoder, as tasks for workers: each leaves a run, and says what a run cannot hold.

Nothing here judges: `analysis` does, by the runs and by what the tasks have said.
"""

import contextlib
import copy
import warnings
from collections.abc import Generator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from plimsoll.diagnosis import locate
from plimsoll.errors import ArgumentError
from plimsoll.precision import Loop, clamp_residuals, prepare
from plimsoll.watch import watch
from plimsoll_lab.experiments.t5.model import Encoder, batch_of
from plimsoll_lab.running.workers import Task

RESIDUALS = ("layers.*.attention", "layers.*.feed_forward")  # what they return is the residual stream
_INSIDE = tuple(f"{name}.*" for name in RESIDUALS)
FEWEST_STEPS = 40
_AFTER = 20  # steps that a training without clamps goes on for after its first Inf
_HELD_OUT = 10_000_000  # steps that no training reaches


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The sizes. `settling`: so many first steps are recorded, then one in `every`."""

    steps: int = 80
    width: int = 32
    heads: int = 2
    layers: int = 16
    gain: float = 2560.0
    batch: int = 16
    held_out: int = 256
    learning_rate: float = 2e-3
    settling: int = 30
    every: int = 5

    def to_dict(self) -> dict[str, Any]:
        """As plain numbers."""
        return asdict(self)


def setup_for(steps: int | None, *, full: bool) -> Setup:
    """The sizes for that many steps."""
    whole = Setup(steps=1000, width=256, heads=8, layers=24, batch=64, held_out=4096, learning_rate=5e-4)
    whole = whole if full else Setup()
    if steps is None:
        return whole
    if steps < FEWEST_STEPS:
        raise ArgumentError(
            f"lab t5: expected {FEWEST_STEPS} steps or more, in which the residual stream can grow; got {steps}. "
            f"Use {whole.steps}."
        )
    return replace(whole, steps=steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A way to train: at a level, with or without clamps."""

    name: str
    title: str
    precision: str
    clamped: bool = False


KINDS = (
    Kind(name="fp16", title="FP16", precision="fp16-master"),
    Kind(name="fp16-clamped", title="FP16, clamped", precision="fp16-master", clamped=True),
    Kind(name="bf16", title="BF16", precision="bf16-master"),
    Kind(name="fp32", title="FP32", precision="fp32"),
)
_BY_NAME = {kind.name: kind for kind in KINDS}


def task_of(kind: Kind, setup: Setup, run: Path, *, seed: int, device: str) -> Task:
    """A training as JSON-able data."""
    return {"name": kind.name, "setup": setup.to_dict(), "run": str(run), "seed": seed, "device": device}


def trained(task: Task) -> Mapping[str, Any]:
    """Trains what a task says; tells the loss and accuracy on held-out rows, and more of some kinds.

    Without clamps in FP16: `fault`, which operation of which module gave the first Inf. In FP32: what other formats
    make of the same trained weights, forward only.
    """
    kind, setup, device = _BY_NAME[task["name"]], Setup(**task["setup"]), task["device"]
    torch.manual_seed(task["seed"])
    model = Encoder(width=setup.width, heads=setup.heads, layers=setup.layers, gain=setup.gain).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=setup.learning_rate)
    said: dict[str, Any] = {}
    with (
        _clamps(model, on=kind.clamped) as clamped,
        watch(model, optimizer, run=task["run"], every=setup.every, warmup=setup.settling,
              collect=("activations",), include=RESIDUALS, exclude=_INSIDE) as seen,
        prepare(model, optimizer, kind.precision, watch=seen) as loop,
    ):  # fmt: skip
        for step in range(setup.steps):
            if step == said.get("until"):
                break
            loss = _stepped(model, loop, _on(device, batch_of(task["seed"], step, setup.batch)))
            if kind.name == "fp16" and "fault" not in said and not loss.isfinite():
                said["fault"] = _located(model, loop, _on(device, batch_of(task["seed"], step, setup.batch)))
                said["until"] = step + _AFTER
        said |= _scored(model, loop, task, setup)
        said |= clamped()
    if kind.name == "fp32":
        said["forward"] = _forward_only(model, task, setup)
    return said


def _stepped(model: nn.Module, loop: Loop, batch: tuple[Tensor, Tensor]) -> Tensor:
    with loop.forward():
        loss = _loss(model(batch[0]), batch[1])
    loop.step(loss)
    return loss.detach()


def _loss(logits: Tensor, wanted: Tensor) -> Tensor:
    return functional.cross_entropy(logits.float().flatten(0, 1), wanted.reshape(-1))


def _on(device: str, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return batch[0].to(device), batch[1].to(device)


@contextlib.contextmanager
def _clamps(model: nn.Module, *, on: bool) -> Generator[Any]:
    """Clamps what every branch returns, as transformers' T5 does; yields what tells how many values were clamped."""
    if not on:
        yield dict
        return
    with warnings.catch_warnings():
        # That it clamps is what is looked for here; it is counted.
        warnings.filterwarnings("ignore", message="clamp_residuals")
        clamp = clamp_residuals(model, RESIDUALS, "fp16", first=True)
        try:
            yield lambda: _share(clamp.counts())
        finally:
            clamp.remove()


def _share(counts: Mapping[str, Any]) -> dict[str, float]:
    values, clamped = (sum(getattr(each, name) for each in counts.values()) for name in ("values", "clamped"))
    return {"clamped": clamped / max(values, 1), "clamped_layers": float(sum(c.clamped > 0 for c in counts.values()))}


def _located(model: nn.Module, loop: Loop, batch: tuple[Tensor, Tensor]) -> Mapping[str, str]:
    """The operation that gave the first Inf of that batch, and its module."""

    def forward() -> Tensor:
        with loop.forward():
            return _loss(model(batch[0]), batch[1])

    fault = locate(forward, model=model)
    if fault is None:
        return {}
    shape = "x".join(map(str, fault.outputs[0].shape)) if fault.outputs else ""
    return {
        "operation": fault.operation, "module": fault.module or "", "kind": fault.kind, "sentence": fault.sentence,
        "shape": shape,
    }  # fmt: skip


def _scored(model: nn.Module, loop: Loop, task: Task, setup: Setup) -> dict[str, float]:
    """The loss on held-out rows, and the part of places that are said rightly."""
    tokens, wanted = _on(task["device"], batch_of(task["seed"], _HELD_OUT, setup.held_out))
    model.eval()
    with torch.no_grad(), loop.forward():
        logits = model(tokens)
    model.train()
    right = (logits.argmax(-1) == wanted).float().mean()
    return {"held_out_loss": float(_loss(logits, wanted)), "accuracy": float(right)}


def _forward_only(trained_model: nn.Module, task: Task, setup: Setup) -> Mapping[str, Mapping[str, float]]:
    """The held-out logits of the same weights in other formats, against FP32's."""
    tokens, wanted = _on(task["device"], batch_of(task["seed"], _HELD_OUT, setup.held_out))
    logits = {kind.name: _logits(copy.deepcopy(trained_model), kind, tokens) for kind in KINDS}
    exact = logits["fp32"]
    return {
        name: {
            "error": float((found - exact).square().sum().sqrt() / exact.square().sum().sqrt()),
            "agreement": float((found.argmax(-1) == exact.argmax(-1)).double().mean()),
            "finite": float(found.isfinite().double().mean()),
            "accuracy": float((found.argmax(-1) == wanted).double().mean()),
        }
        for name, found in logits.items()
    }


def _logits(model: nn.Module, kind: Kind, tokens: Tensor) -> Tensor:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with (
        _clamps(model, on=kind.clamped),
        prepare(model.eval(), optimizer, kind.precision) as loop,
        torch.no_grad(),
        loop.forward(),
    ):
        return model(tokens).double()
