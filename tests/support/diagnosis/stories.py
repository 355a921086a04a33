"""Runs as they would have been recorded, made from a few numbers: layers whose gradients, activations, weights and
optimizer state are random values of a given size at each step, held in a given format at a given loss scale.

A story tells one fault by changing one of these; `SOUND` is what is changed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from plimsoll.kernels import measure_into, new_bank
from plimsoll.runs import Batch, Event, RunWriter, Scalars
from plimsoll.runs.reading.module_casts import scalar_of
from plimsoll.runs.records import EXTRAS

LAYERS = tuple(f"blocks.{i}.{part}" for i in range(6) for part in ("attn", "mlp"))
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn}
VALUES = 512  # of each tensor

Size = Callable[[str, int], float]  # of a layer at a step
Make = Callable[[Tensor, str, int], Tensor]


def constant(value: float) -> Size:
    return lambda layer, step: value


def of_layer(name: str, special: Size, others: Size) -> Size:
    return lambda layer, step: special(layer, step) if layer == name else others(layer, step)


def since(step: int, later: Size, before: Size) -> Size:
    return lambda layer, now: later(layer, now) if now >= step else before(layer, now)


@dataclass(frozen=True, kw_only=True)
class Story:
    """`*_std`: sizes of true values; `*_fmt`: the format that held them; `change_*`: what is done to them at last.

    `casts`: by role, the format that every layer casts to, and at which scale; a function of the step for a scale that
    follows the data.
    """

    samples: int = 40
    every: int = 5
    scale: Callable[[int], float | None] = lambda step: 1024.0
    loss: Callable[[int], float] = lambda step: 2.0 + 2.0 / (1 + step / 20) + 0.02 * float(np.sin(7.3 * step))
    skipped: Callable[[int], float] = lambda step: 0.0
    skips_recorded: bool = True  # an event for each of them, as a watched scaler's have
    gradient_std: Size = lambda layer, step: 2.0**-8
    gradient_fmt: str = "fp16"
    change_gradient: Make = lambda g, layer, step: g
    activation_std: Size = lambda layer, step: 1.0
    activation_fmt: str = "fp16"
    change_activation: Make = lambda x, layer, step: x
    weight_std: Size = lambda layer, step: 2.0**-5
    weight_fmt: str = "fp32"
    change_weight: Make = lambda x, layer, step: x
    moment_fmt: str = "fp32"
    unmoved: Size = lambda layer, step: 0.01
    update_ratio: Size = lambda layer, step: 2.0**-10
    error: Callable[[str, int], tuple[float, float]] | None = None  # of gradients and activations: bias and noise
    last_bin: Size | None = None
    score: Size | None = None
    decisions: Callable[[int], Mapping[str, float]] = lambda step: {}
    casts: Mapping[str, tuple[str, float | Callable[[int], float]]] = field(default_factory=dict)
    events: tuple[Event, ...] = ()
    losses: Mapping[int, Callable[[int], float]] = field(default_factory=dict)  # of further ranks

    def write(self, path: Path, until: int | None = None) -> Path:
        """The run, up to and with step `until`; each step's numbers are its own, however long the run."""
        for rank, loss in self.losses.items():
            with RunWriter(path, rank=rank, world_size=1 + len(self.losses), flush_seconds=600) as writer:
                writer.write_manifest(ranks={"data_parallel": 1 + len(self.losses), "data_index": rank})
                for step in range(self.samples * self.every if until is None else until + 1):
                    writer.write(Scalars(step=step, values={"loss": loss(step)}))
        with RunWriter(path, world_size=1 + len(self.losses), flush_seconds=600) as writer:
            if self.losses:
                writer.write_manifest(ranks={"data_parallel": 1 + len(self.losses), "data_index": 0})
            for event in (*self.events, *self._skips()):
                if until is None or event.step <= until:
                    writer.write(event)
            for step in range(self.samples * self.every):
                if until is not None and step > until:
                    break
                scalars = {"loss": self.loss(step), "nonfinite": self.skipped(step)}
                scalars |= self.decisions(step) if step % self.every == 0 else {}
                scale = self.scale(step)
                writer.write(Scalars(step=step, values=scalars | ({} if scale is None else {"scale": scale})))
                if step == 0 and self.casts:
                    modules = {layer: self._told(layer) for layer in LAYERS}
                    writer.write(Event(step=0, kind="casts", message="", details={"modules": modules}))
                if step % self.every == 0:
                    self._sample(writer, step, scale or 1.0)
        return path

    def _skips(self) -> list[Event]:
        steps = range(self.samples * self.every) if self.skips_recorded else ()
        return [Event(step=step, kind="skip", message="the step was skipped") for step in steps if self.skipped(step)]

    def _told(self, layer: str) -> dict[str, dict[str, object]]:
        series = {"weights": f"{layer}.weight", "activations": f"{layer}:output", "gradients": f"{layer}:output"}
        return {
            role: {"format": fmt, "scale": None if callable(scale) else scale, "series": series[role]}
            for role, (fmt, scale) in self.casts.items()
        }

    def _sample(self, writer: RunWriter, step: int, scale: float) -> None:
        random = torch.Generator().manual_seed(step)
        series, tensors, scales, extras = [], [], [], []

        def add(collection: str, name: str, fmt: str, x: Tensor, scale: float = 1.0, **beside: float) -> None:
            series.append(writer.series(collection, name, format=fmt))
            tensors.append(x)
            scales.append(scale)
            extras.append(beside)

        for layer in LAYERS:
            normal = torch.randn(3, VALUES, generator=random)
            gradient = self.change_gradient(normal[0] * self.gradient_std(layer, step), layer, step)
            held = held_in(gradient * scale, self.gradient_fmt)
            bias, noise = self.error(layer, step) if self.error else (0.0, 0.0)
            wrong = errors(held / scale, bias, noise) if self.error else {}
            add("gradients", f"{layer}.weight", self.gradient_fmt, held / scale, **wrong)
            wrong = errors(held, bias, noise) if self.error else {}
            add("activation_gradients", f"{layer}:output", self.gradient_fmt, held, scale, **wrong)
            x = self.change_activation(normal[1] * self.activation_std(layer, step), layer, step)
            wrong = errors(x, bias / 8, noise / 8) if self.error else {}
            add("activations", f"{layer}:output", self.activation_fmt, held_in(x, self.activation_fmt), **wrong)
            if self.score:
                top = torch.full((16,), self.score(layer, step)) - torch.rand(16, generator=random)
                add("activations", f"{layer}:scores", self.activation_fmt, held_in(top, self.activation_fmt))
            weight = self.change_weight(normal[2] * self.weight_std(layer, step), layer, step)
            full = {"last_bin": VALUES * self.last_bin(layer, step)} if self.last_bin else {}
            add("weights", f"{layer}.weight", self.weight_fmt, held_in(weight, self.weight_fmt), **full)
            norm = float(weight.norm())
            update = normal[0] * norm * self.update_ratio(layer, step) / VALUES**0.5
            moved = {"pushed": VALUES, "unmoved": VALUES * self.unmoved(layer, step), "weight_norm": norm}
            add("updates", f"{layer}.weight", self.weight_fmt, update, **moved)
            add("optimizer", f"{layer}.weight:exp_avg", self.moment_fmt, held_in(gradient, self.moment_fmt))
            add("optimizer", f"{layer}.weight:exp_avg_sq", self.moment_fmt, held_in(gradient**2, self.moment_fmt))
        moving = {role: scale(step) for role, (_, scale) in self.casts.items() if callable(scale)}
        if moving:
            values = {scalar_of(layer, role): scale for layer in LAYERS for role, scale in moving.items()}
            writer.write(Scalars(step=step, values=values))
        bank = new_bank(len(tensors))
        measure_into(tensors, bank, list(range(len(tensors))), accumulate=False)
        columns = {n: np.array([e.get(n, np.nan) for e in extras]) for n in EXTRAS}
        index = np.arange(len(tensors))
        rows, ids = bank.numpy()[: len(tensors)], np.array(series)
        writer.write(Batch(step=step, rows=rows, index=index, series=ids, scales=np.array(scales), extras=columns))


def errors(x: Tensor, bias: float, noise: float) -> dict[str, float]:
    """Sums of errors against a shadow step: a share of the values, and noise of a size relative to theirs."""
    y = x.double()
    e = (
        bias * y
        + noise * torch.randn(len(y), generator=torch.Generator().manual_seed(1)).double() * y.square().mean().sqrt()
    )
    return {
        "compared": len(y), "error": float(e.sum()), "errorsq": float(e.square().sum()), "reference": float(y.sum()),
        "referencesq": float(y.square().sum()), "error_reference": float((e * y).sum()),
        "largest_error": float(e.abs().max()), "made_nonfinite": 0.0, "reference_nonfinite": 0.0,
    }  # fmt: skip


def held_in(x: Tensor, fmt: str) -> Tensor:
    """The values as the format holds them; 8-bit ones saturate."""
    if fmt == "e4m3":
        return x.clamp(-448, 448).to(DTYPES[fmt]).float()
    return x.to(DTYPES[fmt]).float()


SOUND = Story()


def told(**changes: object) -> Story:
    return replace(SOUND, **changes)
