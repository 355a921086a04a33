"""Does my model fit FP16? A planted overflow is named, and the plan keeps that layer in BF16."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import plimsoll as pl

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 10))
batches = [(torch.randn(64, 32), torch.randint(10, (64,))) for _ in range(4)]


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the loss of one batch."""
    x, y = batch
    return F.cross_entropy(model(x), y)


for fmt in ("fp16", "fp8"):
    found = pl.probe(model, batches, fmt, loss=loss)
    print(found, end="\n\n")
    assert found.fits

with torch.no_grad():
    model[0].weight.mul_(1e6)
found = pl.probe(model, batches, "fp16", loss=loss)
print(found)
assert not found.fits
assert found.plan is not None
assert any(finding.rule == "overflow" and "0:output" in finding.where for finding in found.findings)
assert found.plan.formats == {"0": "bf16", "3": "fp16"}

with pl.emulate(found.plan, model=model):  # the plan in use
    assert torch.isfinite(model(batches[0][0])).all()
