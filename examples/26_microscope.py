"""Which layer pays for FP8? Every tensor's error against FP32, and which cast the gradients' error comes from."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import plimsoll as pl

torch.manual_seed(0)


class Block(nn.Module):
    """A feed-forward part of a transformer. Its way back can be kept in BF16."""

    def __init__(self, backward: str = "e5m2") -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 128), nn.Linear(128, 64)
        self.backward = backward

    def forward(self, x: Tensor) -> Tensor:
        """Add the part to the residual stream."""
        with pl.emulate(forward="e4m3", backward=self.backward, scale={"gradients": 2.0**12}):
            return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Three blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.Sequential(Block(), Block(), Block()), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        return self.head(self.blocks(x))


model = Model()
batches = [(torch.randn(64, 64), torch.randint(10, (64,))) for _ in range(8)]
steps = [lambda x=x, y=y: F.cross_entropy(model(x), y) for x, y in batches]

report = pl.microscope(model, steps)
print(report)
before = report.row("blocks.0.up.weight", "gradients")
assert before.noise > before.bias.estimate, "rounding to nearest errs both ways"

blame = report.blame()
print(blame)
by_cast: dict[str, float] = {}
for row in blame:
    by_cast[row.cast] = by_cast.get(row.cast, 0.0) + row.share
worst = max(by_cast, key=lambda cast: by_cast[cast])
print({cast: f"{share:.0%}" for cast, share in by_cast.items()})
assert worst == "e5m2 of gradients"
assert abs(blame.explained - 1) < 0.1

for block in model.blocks:
    block.backward = "bf16"  # type: ignore[assignment]
after = pl.microscope(model, steps).row("blocks.0.up.weight", "gradients")
print(f"{before.name}: error {before.relative_error:.1%} in E5M2, {after.relative_error:.1%} with a backward in BF16")
assert after.relative_error < before.relative_error
