"""One training of the small CLIP, in one precision with one scaler, watched into a run folder.

Nothing here judges: what became of a training is read from its run (`analysis`).
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plimsoll.errors import ArgumentError
from plimsoll.precision import Loop, prepare
from plimsoll.scaling import LayerScaler
from plimsoll.watch import watch
from plimsoll_lab.experiments.clip.data import Batch, make_batch
from plimsoll_lab.experiments.clip.model import Clip, contrastive_loss
from plimsoll_lab.experiments.clip.per_parameter_scaler import ParameterScaler
from plimsoll_lab.experiments.clip.variants import Kind

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
        """How long a training of that kind is."""
        return round(self.steps * kind.share)

    def black_at(self, kind: Kind, step: int) -> int:
        """How many pictures of that step's batch are black."""
        hard = kind.hard == "always" or (kind.hard == "burst" and self.hard_at <= step < self.hard_end)
        return self.black if hard else 0

    def to_dict(self) -> dict[str, Any]:
        """As plain numbers."""
        return asdict(self)


def setup_for(steps: int | None, *, full: bool) -> Setup:
    """The sizes for that many steps: hard batches come at step 300, or earlier in a training that is too short."""
    whole = Setup(steps=1500, batch=64, black=8, width=128, layers=4, heads=8) if full else Setup()
    if steps is None:
        return whole
    if steps < FEWEST_STEPS:
        raise ArgumentError(
            f"lab clip: expected {FEWEST_STEPS} steps or more, so that there is a time before the hard batches and one "
            f"after; got {steps}. Use 450."
        )
    return replace(whole, steps=steps, hard_at=min(whole.hard_at, steps * 2 // 3 // 10 * 10))


def train(kind: Kind, setup: Setup, run: Path, *, seed: int, device: str, told: Callable[[], object]) -> None:
    """Trains from the same weights and batches as every other kind of that seed, and leaves the run.

    `told` is called after each step.
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
            told()
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


def described(setup: Setup, device: str) -> Mapping[str, object]:
    """What a result says of how it was made."""
    return {**setup.to_dict(), "device": device, "fp16": "emulated" if device == "cpu" else "the device's own"}
