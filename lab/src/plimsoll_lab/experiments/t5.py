"""Experiment `t5` (T9): an encoder whose residual stream passes 65,504, clamped.

It is trained without clamps too. Four trainings from the same weights on the same batches (`model` says what makes the
stream so large): FP16, FP16 with every branch's output clamped to the format's largest value, BF16, and FP32. FP16 here
is that of a model that is 16 bits wide (`fp16-master`): the residual stream itself is. Under autocast it would stay in
FP32.

The FP32 training's weights are then run forward in all four, on the same held-out rows: what clamping does to outputs.
"""

import contextlib
import copy
import math
import warnings
from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from plimsoll.diagnosis import Finding, View, diagnose, locate, whatif
from plimsoll.precision import Loop, clamp_residuals, prepare
from plimsoll.runs import Run
from plimsoll.text import percent
from plimsoll.watch import watch
from plimsoll_lab.bench import Bench
from plimsoll_lab.result import Claim, Measured, Training, claims as claims_of
from plimsoll_lab.running.workers import Task, carry_out, one_thread, workers_for
from plimsoll_lab.statistics import columns
from plimsoll_lab.study import Experiment, check_steps, settings_of

VOCABULARY = 16
LENGTH = 16


class Attention(nn.Module):
    """The attention branch, added to its input."""

    def __init__(self, width: int, heads: int, gain: float) -> None:
        super().__init__()
        self.heads, self.gain = heads, gain
        self.norm = nn.RMSNorm(width, eps=1e-6)
        # T5's: queries begin smaller by the root of a head's width, which the scores are not divided by.
        self.query = _linear(width, width, 1 / math.sqrt(width * (width // heads)))
        self.key, self.value = (_linear(width, width, 1 / math.sqrt(width)) for _ in range(2))
        self.out = _linear(width, width, 1 / math.sqrt(width))

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """Return the same shape (batch, tokens, width); `bias` is (heads, tokens, tokens)."""
        size, length, width = x.shape
        seen = self.norm(x).to(self.query.weight.dtype)
        q, k, v = (
            each(seen).view(size, length, self.heads, -1).transpose(1, 2) for each in (self.query, self.key, self.value)
        )
        shares = functional.softmax(q @ k.transpose(-1, -2) + bias, dim=-1, dtype=torch.float32).to(v.dtype)
        return x + self.gain * self.out((shares @ v).transpose(1, 2).reshape(size, length, width))


class FeedForward(nn.Module):
    """The two-layer branch, added to its input."""

    def __init__(self, width: int, gain: float) -> None:
        super().__init__()
        self.gain = gain
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.wi = _linear(width, 4 * width, 1 / math.sqrt(width))
        self.wo = _linear(4 * width, width, 1 / math.sqrt(4 * width))

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        seen = self.norm(x).to(self.wi.weight.dtype)
        return x + self.gain * self.wo(functional.relu(self.wi(seen)))


class Layer(nn.Module):
    """Attention and feed-forward, each behind a norm and beside a residual."""

    def __init__(self, width: int, heads: int, gain: float) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(width, heads, gain), FeedForward(width, gain)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """The same shape."""
        return self.feed_forward(self.attention(x, bias))


class Encoder(nn.Module):
    """Tokens (batch, tokens) to logits (batch, tokens, vocabulary)."""

    def __init__(self, *, width: int, heads: int, layers: int, gain: float) -> None:
        super().__init__()
        self.gain = gain
        self.embed = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(2 * LENGTH - 1, heads)
        nn.init.normal_(self.positions.weight, std=width**-0.5)
        self.layers = nn.ModuleList([Layer(width, heads, gain) for _ in range(layers)])
        self.norm, self.head = nn.RMSNorm(width, eps=1e-6), _linear(width, VOCABULARY, 1 / math.sqrt(width))

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits, in the dtype of the head's weights."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        bias = self.positions(places[None, :] - places[:, None] + LENGTH - 1).permute(2, 0, 1)
        x = self.gain * self.embed(tokens)
        for layer in self.layers:
            x = layer(x, bias)
        return self.head(self.norm(x).to(self.head.weight.dtype))


def batch_of(seed: int, step: int, size: int) -> tuple[Tensor, Tensor]:
    """Return rows of random tokens, a third of each the same token: the answer."""
    generator = torch.Generator().manual_seed((seed + 1) * 1_000_003 + step)
    tokens = torch.randint(VOCABULARY, (size, LENGTH), generator=generator)
    frequent = torch.randint(VOCABULARY, (size, 1), generator=generator)
    drawn = torch.rand(size, LENGTH, generator=generator) < 1 / 3
    return torch.where(drawn, frequent, tokens), frequent.expand(size, LENGTH)


def _linear(inputs: int, outputs: int, std: float) -> nn.Linear:
    made = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(made.weight, std=std)
    return made


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


def setup_for(steps: int | None, *, full: bool) -> Setup:
    """The sizes for that many steps."""
    whole = Setup(steps=1000, width=256, heads=8, layers=24, batch=64, held_out=4096, learning_rate=5e-4)
    whole = whole if full else Setup()
    if steps is None:
        return whole
    check_steps("t5", steps, FEWEST_STEPS, whole.steps, ", in which the residual stream can grow")
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
    return {"name": kind.name, "setup": asdict(setup), "run": str(run), "seed": seed, "device": device}


def trained(task: Task) -> Mapping[str, Any]:
    """Train as a task says; return held-out loss, accuracy, and some kinds' more.

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
    """Clamp branches' outputs as transformers' T5 does; yield a counter of clamps."""
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


_RULE = "overflow-ahead"
_CONFIRMED = 1  # the rule asks for two samples on end, and the first steps are all recorded


def judged(kind: Kind, setup: Setup, path: Path, said: Mapping[str, Any]) -> Training:
    """The training's numbers, findings, and what became of it in a few words."""
    run = Run(path)
    view = View(run)
    findings = tuple(diagnose(view))
    numbers = measured(run, view, setup, findings) | {
        name: float(value) for name, value in said.items() if not isinstance(value, Mapping)
    }
    good = numbers["overflow_at"] == math.inf
    steps, loss = run.scalars("loss")
    return Training(
        name=kind.name, title=kind.title, run=path, numbers=numbers, findings=findings, good=good,
        outcome="trains" if good else f"Inf since step {numbers['overflow_at']:.0f}", series=columns(steps, loss),
        series_of="loss",
    )  # fmt: skip


def measured(run: Run, view: View, setup: Setup, findings: tuple[Finding, ...]) -> dict[str, float]:
    """Return numbers by name: first broken loss, skips since, findings, sizes."""
    steps, loss = run.scalars("loss")
    broken = steps[~np.isfinite(loss)]
    overflow_at = float(broken[0]) if len(broken) else math.inf
    reported = [finding.since_step for finding in findings if finding.rule == _RULE]
    skips = [event.step for event in view.events if event.kind == "skip" and event.step >= overflow_at]
    return {
        "overflow_at": overflow_at,
        "told_at": float(min(reported) + _CONFIRMED) if reported else math.inf,
        "skipped_since": len(set(skips)) / (int(steps[-1]) + 1 - overflow_at) if len(broken) else 0.0,
        "loss_end": float(loss[-1]),
        "largest_first": _largest(run, setup, 0),
        "largest_end": max(_largest(run, setup, int(step)) for step in run.steps[-3:]),
    }


def layers_of(setup: Setup) -> tuple[str, ...]:
    """Return the outputs of the branches, first to last: the residual stream."""
    return tuple(f"layers.{n}.{branch}:output" for n in range(setup.layers) for branch in ("attention", "feed_forward"))


def overflowing(run: Path, setup: Setup) -> dict[str, int]:
    """Return the places of the residual stream that would overflow FP16, with counts."""
    answer = whatif(run, "fp16", shift=0, collection="activations")
    found: dict[str, int] = {}
    for name in layers_of(setup):
        _, _, over = answer.over_time(name)
        if (over > 0).any():
            found[name] = int((over > 0).sum())
    return found


def _largest(run: Run, setup: Setup, step: int) -> float:
    """Return the residual stream's largest magnitude at a step, or Inf."""
    found = 0.0
    for name in layers_of(setup):
        spectrum = run.spectrum("activations", name, step)
        found = math.inf if spectrum.pos_infs or spectrum.neg_infs else max(found, spectrum.absmax)
    return found


Numbers = Mapping[str, float]
_AGREE = 0.99  # of places: clamping is said to have a negligible effect on results
_LOSS = 1.05  # of the loss


def measure(bench: Bench) -> Measured:
    """The four trainings, the same weights in four formats, and what they show."""
    return measure_with(bench, setup_for(bench.steps, full=bench.full), workers_for(bench.device))


def measure_with(bench: Bench, setup: Setup, workers: int) -> Measured:
    """Do the same with your own sizes and number of workers."""
    tasks = [task_of(kind, setup, bench.runs / kind.name, seed=bench.seed, device=bench.device) for kind in KINDS]
    with one_thread(unless=bench.full):
        said = carry_out("plimsoll_lab.experiments.t5:trained", tasks, workers=workers, progress=bench.progress)
    trainings = tuple(judged(kind, setup, bench.runs / kind.name, s) for kind, s in zip(KINDS, said, strict=True))
    fault, forward = said[0].get("fault", {}), said[-1]["forward"]
    foretold = overflowing(bench.runs / "bf16", setup)
    numbers = [training.numbers for training in trainings]
    return Measured(
        trainings=trainings, claims=claims(setup, numbers, fault, forward, foretold),
        said=_said(setup, numbers, fault, forward, foretold),
    )  # fmt: skip


def claims(
    setup: Setup,
    numbers: Sequence[Numbers],
    fault: Mapping[str, str],
    forward: Mapping[str, Numbers],
    foretold: Mapping[str, int],
) -> tuple[Claim, ...]:
    """Return the experiment's claims.

    They are of the trainings in the order of `KINDS`, and of the same weights run forward.
    """
    fp16, clamped, bf16, fp32 = numbers
    return (
        *_of_overflow(setup, fp16, fault),
        *_of_warnings(fp16, fault, foretold),
        *_of_outputs(forward),
        *_of_training(clamped, bf16, fp32),
    )


def _of_overflow(setup: Setup, fp16: Numbers, fault: Mapping[str, str]) -> tuple[Claim, ...]:
    added = _is_sum(setup, fault)
    depth = (layers_of(setup).index(_place(fault)) + 1) / (2 * setup.layers) if added else 0.0
    return claims_of(
        f"""
        overflows | fp16.overflow_at | at least 1 and at most {setup.steps - 1} steps
            | FP16: in training, not at its beginning, the residual stream comes to Inf
        in-the-sum | in_the_sum | at least 1 operation | locate: the first Inf is the sum of the stream and a branch
        in-deep-layers | depth | at least 0.5 of the depth | locate: in the deeper half of the layers
        stops | fp16.skipped_since | at least 0.5 of the steps | FP16: from then on most steps are skipped
        """,
        depth=depth,
        fp16=fp16,
        in_the_sum=float(added),
    )


def _of_warnings(fp16: Numbers, fault: Mapping[str, str], foretold: Mapping[str, int]) -> tuple[Claim, ...]:
    return claims_of(
        """
        told-before | fp16.overflow_at - fp16.told_at | at least 1 steps before
            | the alarm overflow-ahead is raised before the first Inf
        foretold-by-bf16 | foretold_by_bf16 | at least 1 samples
            | whatif of the BF16 run names the layer that overflows first in FP16
        """,
        fp16=fp16,
        foretold_by_bf16=float(foretold.get(_place(fault), 0)),
    )


def _of_outputs(forward: Mapping[str, Numbers]) -> tuple[Claim, ...]:
    fp32, clamped = forward["fp32"], forward["fp16-clamped"]
    return claims_of(
        f"""
        outputs-lost | 1 - forward.fp16.finite | at least 0.01 of the outputs
            | same weights, FP16 without clamps: outputs are NaN
        clamped-outputs-agree | clamped.agreement | at least {_AGREE} of the places
            | same weights, FP16 with clamps: predictions are FP32's
        clamped-outputs-near | clamped.error | at most 0.05 of their norm
            | same weights, FP16 with clamps: logits are near FP32's
        clamped-accuracy | clamped.accuracy - fp32.accuracy | at least {-0.01} of the places
            | same weights, FP16 with clamps: as accurate as FP32
        """,
        clamped=clamped,
        forward=forward,
        fp32=fp32,
    )


def _of_training(clamped: Numbers, bf16: Numbers, fp32: Numbers) -> tuple[Claim, ...]:
    return claims_of(
        f"""
        clamps-act | clamped.clamped | at least 1e-06 and at most 0.01 of the stream
            | FP16 with clamps: values are clamped in training, and they are few
        clamped-trains | clamped.held_out_loss / fp32.held_out_loss | at most {_LOSS} of FP32's loss
            | trained in FP16 with clamps: held-out loss as in FP32
        bf16-trains | bf16.held_out_loss / fp32.held_out_loss | at most {_LOSS} of FP32's loss
            | trained in BF16, without clamps: likewise
        """,
        bf16=bf16,
        clamped=clamped,
        fp32=fp32,
    )


def _is_sum(setup: Setup, fault: Mapping[str, str]) -> bool:
    """Return True for an addition to the stream: in a branch, and of its shape.

    Scores get a bias added too.
    """
    added = fault.get("operation", "").startswith("aten.add") and fault.get("kind") == "inf"
    whole = fault.get("shape") == f"{setup.batch}x{LENGTH}x{setup.width}"
    return added and whole and _place(fault) in layers_of(setup)


def _place(fault: Mapping[str, str]) -> str:
    """Return the output of the fault's module by its name in a run, or ""."""
    return f"{fault['module']}:output" if fault.get("module") else ""


def _said(
    setup: Setup,
    numbers: Sequence[Numbers],
    fault: Mapping[str, str],
    forward: Mapping[str, Numbers],
    foretold: Mapping[str, int],
) -> tuple[str, ...]:
    fp16, clamped, bf16, fp32 = numbers
    places = layers_of(setup)
    first = next((places.index(name) // 2 + 1 for name in places if name in foretold), 0)
    agree = ", ".join(f"{name} {percent(forward[name]['agreement'], 2)}" for name in ("fp16", "fp16-clamped", "bf16"))
    when = (
        f"overflow-ahead was raised at step {fp16['told_at']:.0f}, the first Inf came at step "
        f"{fp16['overflow_at']:.0f}. By the BF16 run FP16 overflows from layer {first} of {setup.layers} on."
    )
    losses = (
        f"Held-out loss: FP32 {fp32['held_out_loss']:.3f}, BF16 {bf16['held_out_loss']:.3f}, FP16 clamped "
        f"{clamped['held_out_loss']:.3f}; {percent(clamped['clamped'], 3)} of the stream was clamped in training."
    )
    overflow = f"FP16: {fault.get('sentence', 'nothing overflowed.')}"
    return overflow, when, losses, f"Same weights, predictions as FP32's: {agree}."


def _settings(bench: Bench) -> Mapping[str, Any]:
    return settings_of(setup_for(bench.steps, full=bench.full), bench.device)


T5 = Experiment(
    name="t5",
    claim="A deep encoder's residual stream passes 65,504 and turns to Inf in FP16; clamped, it gives what FP32 gives.",
    source="T9",
    settings=_settings,
    measure=measure,
)
