"""Watch a training script without changing a line of it: ``plimsoll run SCRIPT ARGS``.

The script below does not import Plimsoll. `plimsoll run` finds its model and its optimizer at the first training step,
and records both. The script's arguments, output and exit status stay as they are.
"""

import subprocess
import sys
from pathlib import Path

from plimsoll.runs import Run

SCRIPT = """
import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int)
args = parser.parse_args()

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.Sigmoid(), nn.Linear(256, 256), nn.Sigmoid(), nn.Linear(256, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(args.steps):
    x, y = torch.randn(32, 64), torch.randint(10, (32,))
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(f"done after {args.steps} steps, loss {loss:.3f}")
"""

Path("train.py").write_text(SCRIPT)
command = ["plimsoll", "run", "--every", "10", "--output", "runs/first", "train.py", "--steps", "41"]
print("$", *command)
ended = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, check=True)
print(ended.stdout + ended.stderr)

run = Run("runs/first")
steps, losses = run.scalars("loss")
print(f"{len(steps)} losses, and the numbers of {sum(map(len, run.tensors.values()))} tensors at steps {run.steps}")
print(f"\n{'activation gradient':<22}{'typical':>10}{'lost in fp16':>15}")
for name in run.tensors["activation_gradients"]:
    spectrum = run.spectrum("activation_gradients", name, run.steps[-1])
    print(f"{name:<22}{spectrum.absmean:>10.1e}{spectrum.fit('fp16').lost.estimate:>15.2%}")

plain = subprocess.run([sys.executable, "train.py", "--steps", "41"], capture_output=True, text=True, check=True)
assert ended.stdout == plain.stdout, "the script trains as it does alone"
assert "watching Sequential (85,002 parameters, AdamW), every 10 steps, into runs/first" in ended.stderr
assert run.steps == [0, 10, 20, 30, 40]
assert len(losses) == 41
