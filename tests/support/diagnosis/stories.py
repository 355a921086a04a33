"""Runs as they would have been recorded, made from a few numbers: layers whose gradients, activations, weights and
optimizer state are random values of a given size at each step, held in a given format at a given loss scale.

A story tells one fault by changing one of these; `SOUND` is what is changed.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
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
_UNMEASURED = ("true activations", "weight norms")

Size = Callable[[str, int], float]  # of a layer at a step
Make = Callable[[Tensor, str, int], Tensor]


def constant(value: float) -> Size:
    return lambda layer, step: value


def unchanged(x: Tensor, layer: str, step: int) -> Tensor:
    return x


@functools.lru_cache(maxsize=200)
def _drawn(step: int, scores: bool) -> tuple[Tensor, list[Tensor]]:
    """Normal values, a layer a row, and how far each layer's scores lie below the largest: the same in all stories."""
    random, drawn, below = torch.Generator().manual_seed(step), [], []
    for _ in LAYERS:
        drawn.append(torch.randn(3, VALUES, generator=random))
        if scores:
            below.append(torch.rand(16, generator=random))
    return torch.stack(drawn, 1), below


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
    change_gradient: Make = unchanged
    activation_std: Size = lambda layer, step: 1.0
    activation_fmt: str = "fp16"
    change_activation: Make = unchanged
    input_size: float | None = None  # of what comes into the model
    weight_std: Size = lambda layer, step: 2.0**-5
    weight_fmt: str = "fp32"
    change_weight: Make = unchanged
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
        """Writes the numbers of one step."""
        measured, tops = self._values(step, scale)
        tensors, scales, extras = [], [], []
        for place in range(len(LAYERS)):
            beside = self._beside(measured, place, step)
            for name, rows in measured.items():
                if name not in _UNMEASURED:
                    tensors.append(rows[place])
                    scales.append(scale if name == "activation_gradients" else 1.0)
                    extras.append(beside.get(name, {}))
                if name == "activations" and tops:
                    tensors.append(tops[place])
                    scales.append(1.0)
                    extras.append({})
        if self.input_size is not None:
            tensors.append(torch.linspace(-self.input_size, self.input_size, VALUES))
            scales.append(1.0)
            extras.append({})
        moving = {role: scale(step) for role, (_, scale) in self.casts.items() if callable(scale)}
        if moving:
            values = {scalar_of(layer, role): scale for layer in LAYERS for role, scale in moving.items()}
            writer.write(Scalars(step=step, values=values))
        bank = new_bank(len(tensors))
        measure_into(tensors, bank, list(range(len(tensors))), accumulate=False)
        columns = {name: np.full(len(tensors), np.nan) for name in EXTRAS}
        for place, numbers in enumerate(extras):
            for name, value in numbers.items():
                columns[name][place] = value
        ids = np.array([writer.series(collection, name, format=fmt) for collection, name, fmt in self._series()])
        index, rows = np.arange(len(tensors)), bank.numpy()
        writer.write(Batch(step=step, rows=rows, index=index, series=ids, scales=np.array(scales), extras=columns))

    def _values(self, step: int, scale: float) -> tuple[dict[str, Tensor], list[Tensor]]:
        """The values of all layers, a layer a row, in the order of `_series`; and the scores of each."""
        normal, below = _drawn(step, self.score is not None)
        tops = (
            [
                held_in(torch.full((16,), self.score(layer, step)) - away, self.activation_fmt)
                for layer, away in zip(LAYERS, below, strict=True)
            ]
            if self.score
            else []
        )

        def of_size(x: Tensor, size: Size) -> Tensor:
            return x * torch.tensor([[size(layer, step)] for layer in LAYERS])

        def changed(change: Make, x: Tensor) -> Tensor:
            if change is unchanged:
                return x
            return torch.stack([change(row, layer, step) for row, layer in zip(x, LAYERS, strict=True)])

        gradient = changed(self.change_gradient, of_size(normal[0], self.gradient_std))
        held = held_in(gradient * scale, self.gradient_fmt)
        x = changed(self.change_activation, of_size(normal[1], self.activation_std))
        weight = changed(self.change_weight, of_size(normal[2], self.weight_std))
        norms = torch.stack([torch.linalg.vector_norm(row) for row in weight])
        measured = {
            "gradients": held / scale,
            "activation_gradients": held,
            "activations": held_in(x, self.activation_fmt),
            "weights": held_in(weight, self.weight_fmt),
            "updates": of_size(normal[0] * norms[:, None], self.update_ratio) / VALUES**0.5,
            "exp_avg": held_in(gradient, self.moment_fmt),
            "exp_avg_sq": held_in(gradient**2, self.moment_fmt),
            "true activations": x,
            "weight norms": norms,
        }
        return measured, tops

    def _beside(self, measured: Mapping[str, Tensor], place: int, step: int) -> dict[str, dict[str, float]]:
        """The numbers beside those of a layer's tensors, by the name of the tensor."""
        layer, norm = LAYERS[place], float(measured["weight norms"][place])
        beside: dict[str, dict[str, float]] = {
            "updates": {"pushed": VALUES, "unmoved": VALUES * self.unmoved(layer, step), "weight_norm": norm}
        }
        if self.last_bin:
            beside["weights"] = {"last_bin": VALUES * self.last_bin(layer, step)}
        if self.error:
            bias, noise = self.error(layer, step)
            beside["gradients"] = errors(measured["gradients"][place], bias, noise)
            beside["activation_gradients"] = errors(measured["activation_gradients"][place], bias, noise)
            beside["activations"] = errors(measured["true activations"][place], bias / 8, noise / 8)
        return beside

    def _series(self) -> Iterator[tuple[str, str, str]]:
        """Collection, name and format of each tensor of a sample, in the order of the samples."""
        for layer in LAYERS:
            yield "gradients", f"{layer}.weight", self.gradient_fmt
            yield "activation_gradients", f"{layer}:output", self.gradient_fmt
            yield "activations", f"{layer}:output", self.activation_fmt
            if self.score:
                yield "activations", f"{layer}:scores", self.activation_fmt
            yield "weights", f"{layer}.weight", self.weight_fmt
            yield "updates", f"{layer}.weight", self.weight_fmt
            yield "optimizer", f"{layer}.weight:exp_avg", self.moment_fmt
            yield "optimizer", f"{layer}.weight:exp_avg_sq", self.moment_fmt
        if self.input_size is not None:
            yield "activations", "model:input", "fp32"


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


def make_story(**changes: object) -> Story:
    return replace(SOUND, **changes)
