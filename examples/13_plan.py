"""A plan from a run: which layer can compute in which format and at which scale; trained by it, and held to another."""

import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import plimsoll as pl
from plimsoll.diagnosis import check_plan, plan

FOLDER = Path(tempfile.mkdtemp())


class Net(nn.Module):
    """Four layers, the second of whose gradients are 2^-50 times what they would be."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.far, self.up, self.head = (nn.Linear(32, n) for n in (32, 32, 32, 4))

    def forward(self, x: Tensor) -> Tensor:
        """Classes by four of the inputs."""
        h = F.gelu(self.embed(x))
        return self.head(F.gelu(self.up(h + self.far(h) * 2.0**-50)))


def trained(precision: object, run: str | None = None, spread: float = 1.0) -> tuple[float, float]:
    """The mean of the last losses, and how much of the far layer's gradient was zero at the end."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    with pl.prepare(model, optimizer, precision, watch=None if run is None else FOLDER / run) as loop:
        losses, zeros = [], []
        optimizer.register_step_pre_hook(lambda *_: zeros.append((model.far.weight.grad == 0).float().mean().item()))
        for _ in range(80):
            x = torch.randn(64, 32) * spread
            with loop.forward():
                loss = F.cross_entropy(model(x).float(), x[:, :4].argmax(1))
            loop.step(loss)
            losses.append(loss.item())
    return sum(losses[-10:]) / 10, zeros[-1]


# 1. Watched in FP32, planned for FP8 and for FP16.
wide, _ = trained("fp32", "fp32")
eight, half = plan(FOLDER / "fp32", "fp8"), plan(FOLDER / "fp32", "fp16")
eight.save(FOLDER / "fp8.toml")
print((FOLDER / "fp8.toml").read_text())

# 2. FP16 has no one loss scale for all of them: each layer gets its own. FP8 has a scale for each cast anyway.
print("FP16:", *half.remarks)
assert half.scales["far"]["gradients"] / half.scales["head"]["gradients"] > 2.0**30

# 3. Trained by the plans, from the object or from the file.
print(f"\n{'precision':<12}{'loss':>7}   zeros in far's gradient")
for name, precision in {"amp-fp16": "amp-fp16", "plan fp16": half, "plan fp8": FOLDER / "fp8.toml"}.items():
    loss, zeros = trained(precision)
    print(f"{name:<12}{loss:>7.3f}   {zeros:.0%}")
    assert abs(loss - wide) < 0.05 * wide
    assert (zeros > 0.9) == (name == "amp-fp16")

# 4. Would the plan have served another run, with inputs 64 times as large?
trained("fp32", "other", spread=64.0)
found = check_plan(eight, FOLDER / "other")
print(f"\n{found.sentence}")
assert check_plan(eight, FOLDER / "fp32").ok
assert not found.ok
