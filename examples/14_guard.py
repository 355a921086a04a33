"""A run that fails, repaired while it trains: the guard raises the scale, and restores a checkpoint after a NaN.

The same training three times: alone, with a guard that only reports its actions, and with one that takes them.
"""

import math
import tempfile
import warnings
from pathlib import Path

import torch
from torch import nn

import plimsoll as pl
from plimsoll.diagnosis import Guard

warnings.simplefilter("ignore")  # a guard also warns of each act; here its acts are printed
STEPS, BROKEN = 90, 50


def train(folder: Path, *, guarded: bool, dry_run: bool = True) -> tuple[list[float], tuple]:
    """Trains at a scale that is far too low; at one step a bit flips in a weight."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, eps=1e-12)
    scaler = pl.scaling.DynamicScaler("cpu", init_scale=1.0)
    losses = []
    with pl.watch(model, optimizer, run=folder, every=4) as watch:
        guard = Guard(watch, ["raise_scale", "rollback"], scaler=scaler, dry_run=dry_run, every=10**6)
        for step in range(STEPS):
            x = torch.randn(64, 16, generator=torch.Generator().manual_seed(step))
            with pl.emulate("fp16"):
                loss = (model(x).float() - x[:, :4]).square().mean()
            optimizer.zero_grad()
            scaler.scale(loss * 1e-6).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
            if step == BROKEN:
                with torch.no_grad():
                    model[0].weight[0, 0] = math.nan
            elif step % 20 == 0:
                guard.checkpoint()
            if guarded and step % 15 == 14:
                guard.look()  # by itself it looks in the background; here at known steps
    return losses, guard.acts


with tempfile.TemporaryDirectory() as name:
    alone, _ = train(Path(name) / "alone", guarded=False)
    dry, said = train(Path(name) / "dry", guarded=True)
    repaired, done = train(Path(name) / "guarded", guarded=True, dry_run=False)

print("A dry guard says:")
for act in said:
    print(f"  after step {act.step}: {act}")
print("A guard that may act:")
for act in done:
    print(f"  after step {act.step}: {act}")
print(f"\n{'loss at step':<14}{BROKEN - 1:>8}{STEPS - 1:>8}")
for name, losses in (("alone", alone), ("dry", dry), ("guarded", repaired)):
    print(f"{name:<14}{losses[BROKEN - 1]:>8.3f}{losses[-1]:>8.3f}")

assert str(dry) == str(alone)  # it has changed nothing
assert [act.action for act in done] == ["raise_scale", "rollback"]
assert math.isnan(alone[-1])
assert repaired[-1] < repaired[BROKEN - 1] < 0.8 * alone[BROKEN - 1]
