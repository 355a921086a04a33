"""One line records a training run; the run then answers what FP16 would have made of it, and when.

The loop stays as it is. Every tenth step is recorded completely, loss and scale at every step.
"""

import tempfile
from pathlib import Path

import torch
from torch import nn

import plimsoll as pl

torch.manual_seed(0)
model = nn.Sequential(*[layer for _ in range(5) for layer in (nn.Linear(64, 64), nn.Tanh())], nn.Linear(64, 8))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
teacher = nn.Linear(64, 8)

folder = Path(tempfile.mkdtemp()) / "run"
w = pl.watch(model, optimizer, run=folder, every=10)  # the line

for _ in range(101):
    x = torch.randn(64, 64)
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), teacher(x).detach())
    loss.backward()
    optimizer.step()

w.close()
run = pl.Run(folder)
print(run)

steps, losses = run.scalars("loss")
print(f"loss {losses[0]:.3g} at step {steps[0]}, {losses[-1]:.3g} at step {steps[-1]}")
assert len(steps) == 101
assert losses[-1] < losses[0]

print("\nSecond moments of Adam that FP16 would turn to zero, by step and layer")
layers = [name for name in run.tensors["optimizer"] if name.endswith("weight:exp_avg_sq")]
print("step " + "".join(f"{name.split('.')[0]:>8}" for name in layers))
for step in list(run.steps)[::2]:
    lost = [run.spectrum("optimizer", name, step).fit("fp16").lost.estimate for name in layers]
    print(f"{step:>4} " + "".join(f"{share:>8.0%}" for share in lost))
last = [run.spectrum("optimizer", name, 100) for name in layers]
assert max(spectrum.fit("fp16").lost.low for spectrum in last) > 0.5
assert max(spectrum.fit("bf16").lost.high for spectrum in last) == 0

steps, ratios = run.series("updates", "10.weight", "ratio")
print(f"\nA step changes the last layer by {ratios[0]:.1%} of its norm at first, {ratios[-1]:.1%} at the end.")
