"""FP16 as a GPU computes it, on any CPU: FP32 sums, what FP16 sums lose, gradients that vanish, and FP8 training."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import plimsoll as pl

torch.manual_seed(0)

# 1. Products are added in FP32 and rounded once. An FP16 accumulator stops growing.
x = torch.full((1, 4096), 0.1)
with pl.emulate("fp16"):
    wide = (x @ x.T).item()
with pl.emulate("fp16", accumulate="fp16"):
    narrow = (x @ x.T).item()
print(f"0.1 * 0.1 added 4096 times: {wide} in FP32 sums, {narrow} in FP16 sums")
assert (wide, narrow) == (40.9375, 32.0)


# 2. Without a loss scale, small gradients are zero.
def zero_fraction(scale: float) -> float:
    """How much of a weight's gradient is zero, for a loss of small slope."""
    layer, data = nn.Linear(64, 64), torch.randn(32, 64)
    with pl.emulate("fp16"):
        loss = layer(data).float().tanh().mean() * 2.0**-14
    (loss * scale).backward()
    return (layer.weight.grad == 0).double().mean().item()


print(f"zero gradients: {zero_fraction(1.0):.0%} unscaled, {zero_fraction(2.0**14):.0%} at a scale of 2^14")
assert zero_fraction(1.0) > 0.9
assert zero_fraction(2.0**14) < 0.01


# 3. A small network trained in formats that this machine has no arithmetic for.
def trained(**formats: object) -> float:
    """The last loss of a short training."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 8))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    data, classes = torch.randn(256, 32), torch.randint(8, (256,))
    context = pl.emulate(**formats)

    def closure() -> Tensor:
        optimizer.zero_grad()
        with context:
            loss = F.cross_entropy(model(data), classes)
        loss.backward()
        return loss

    for _ in range(100):
        loss = optimizer.step(closure)
    return loss.item()


print(f"\n{'format':<32}loss after 100 steps")
losses = {}
for name, formats in {
    "fp32": {"precision": "fp32"},
    "bf16": {"precision": "bf16"},
    "bf16, products in e4m3 / e5m2": {"precision": "bf16", "forward": "e4m3", "backward": "e5m2"},
    "mxfp8": {"forward": "mxfp8_e4m3", "backward": "mxfp8_e5m2"},
    "mxfp4": {"forward": "mxfp4", "backward": "mxfp4"},
    "e2m1 with no scales at all": {"forward": "e2m1", "backward": "e2m1"},
}.items():
    losses[name] = trained(**formats)
    print(f"{name:<32}{losses[name]:.3f}")
assert abs(losses["bf16"] - losses["fp32"]) < 0.1
assert abs(losses["mxfp8"] - losses["fp32"]) < 0.1
assert losses["mxfp4"] < losses["e2m1 with no scales at all"]
