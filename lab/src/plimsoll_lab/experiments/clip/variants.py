"""The ways in which the small CLIP is trained: each a precision, a scaler, and how often batches are hard."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from plimsoll.scaling import LayerScaler, SpectralScaler
from plimsoll_lab.experiments.clip.per_parameter_scaler import ParameterScaler

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
