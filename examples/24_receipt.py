"""Which precision did this step really run in? A receipt of a small transformer that should train in BF16."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import plimsoll as pl

torch.manual_seed(0)


class Attention(nn.Module):
    """Attention that takes its softmax in FP16, as a line that was once written to save memory."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Each position sees all others."""
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        weights = (q @ k.mT / q.shape[-1] ** 0.5).half().softmax(-1)
        return self.out(weights.to(v.dtype) @ v)


class Block(nn.Module):
    """Attention and a feed-forward part, whose gate forgets autocast."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attn, self.norm = Attention(width), nn.LayerNorm(width)
        self.up, self.gate, self.down = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """Add both parts to the residual stream."""
        x = x + self.attn(self.norm(x))
        with torch.autocast("cpu", enabled=False):
            gate = self.gate(x.float()).sigmoid()
        return x + self.down(F.gelu(self.up(x)) * gate)


class Model(nn.Module):
    """An embedding, four blocks and a head."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, width), nn.Linear(width, 50)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(4)))

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of each position."""
        return self.head(self.blocks(self.embed(tokens)))


model, tokens = Model(), torch.randint(50, (2, 16))
optimizer = torch.optim.AdamW(model.parameters())


def step() -> None:
    """One step, as the training loop has it."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(tokens)
    F.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()


receipt = pl.receipt(model, step=step, declared="amp-bf16")
print(receipt)

found = {deviation.kind for deviation in receipt.deviations}
assert found == {"softmax", "double-rounding", "autocast-disabled", "loss"}
assert len(receipt.of_module("blocks.0.gate")) > 0
