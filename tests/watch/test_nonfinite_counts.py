"""Counts of non-finite gradients in steps that are not sampled: taken where something speaks for them."""

import math
from pathlib import Path

import torch
from torch import Tensor, nn

import plimsoll as pl
from tests.support.cases import each

BROKEN, STEPS = 3, 5
LARGE, SMALL = "0.weight", "1.bias"  # of more values than a step looks at, and of few


def _train(folder: Path, *, at: str, clip: bool = False, scale: bool = False) -> dict[int, float]:
    """The counts by step of a training with two Inf in the gradient of one parameter at one step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(80, 80), nn.Linear(80, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=scale)
    step = 0

    def spoil(g: Tensor) -> Tensor:
        spoilt = g.clone()
        if step == BROKEN:
            spoilt.view(-1)[:2] = math.inf
        return spoilt

    dict(model.named_parameters())[at].register_hook(spoil)
    with pl.watch(model, optimizer, run=folder, every=1000, scaler=scaler if scale else None):
        for step in range(STEPS):
            optimizer.zero_grad()
            scaler.scale(model(torch.randn(4, 80)).square().mean()).backward()
            if clip:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            if step == BROKEN and not scale:  # the weights would spoil the loss of the next step
                with torch.no_grad():
                    for p in model.parameters():
                        p.nan_to_num_(0.0, 0.0, 0.0)
    steps, counts = pl.Run(folder).scalars("nonfinite")
    return {s: c for s, c in zip(steps.tolist(), counts.tolist(), strict=True) if c}


@each(
    ("case", "named", "found"),
    [
        ("clipped", {"at": LARGE, "clip": True}, {BROKEN: 2.0}),  # the norm says so
        ("skipped", {"at": LARGE, "scale": True}, {BROKEN: 2.0}),  # the scaler skips
        ("small", {"at": SMALL}, {BROKEN: 2.0}),  # it is looked at
        ("unseen", {"at": LARGE}, {}),  # nothing says so, and the weights are mended
    ],
)
def test_what_speaks_for_non_finite_gradients_has_all_counted(
    case: str, named: dict[str, object], found: dict[int, float], tmp_path: Path
) -> None:
    assert _train(tmp_path / case, **named) == found
