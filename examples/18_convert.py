"""Convert a model to unit scale, train it in FP16 with no loss scale, and fold it to plain weights."""

import random

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import plimsoll as pl

torch.set_num_threads(1)
WIDTH, CONTEXT, STEPS = 48, 24, 60
WORDS = "the loss of a small model falls while gradients keep their place in what eight bits can hold".split()
DRAW = random.Random(1).random  # the same numbers, so the same text, in every version of Python
TEXT = torch.tensor([ord(letter) for letter in " ".join(WORDS[int(len(WORDS) * DRAW())] for _ in range(20_000))])


class Block(nn.Module):
    """A plain transformer block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Attention and a feed-forward network, each beside a skip path."""
        b, t, d = x.shape
        q, k, v = (part.view(b, t, 4, d // 4).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Characters(nn.Module):
    """A character model with its loss inside."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(128, WIDTH), nn.Sequential(Block(), Block())
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 128, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean cross entropy of the next characters."""
        x = self.blocks(self.embedding(tokens))
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def batch(seed: int) -> tuple[Tensor, Tensor]:
    """Sixteen passages of the text, and what follows each character."""
    starts = torch.randint(len(TEXT) - CONTEXT, (16, 1), generator=torch.Generator().manual_seed(seed))
    found = TEXT[starts + torch.arange(CONTEXT + 1)]
    return found[:, :-1], found[:, 1:]


# 1. The same model, every tensor at unit scale; nothing was left as it was.
model = pl.unit.convert(Characters(), batch(0), seed=0)
print(model.get_submodule("blocks.0").code)
assert (model.coverage, list(model.state_dict())) == ([], list(Characters().state_dict()))

# 2. FP16 without a loss scale.
optimizer = pl.unit.optim.AdamW(model, lr=0.2)
losses = []
for step in range(STEPS):
    optimizer.zero_grad()
    with pl.emulate("fp16"):
        loss = model(*batch(step))
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f} in FP16, no loss scale")
assert losses[-1] < 0.5 * losses[0]

# 3. For inference: the factors go into the weights.
folded = pl.unit.fold(model.eval())
difference = (folded(*batch(99)) - model(*batch(99))).abs().item()
print(f"folded: the loss differs by {difference:.1e}; kept:", *folded.kept, sep="\n  ")
assert difference < 1e-5
assert type(folded.get_submodule("blocks.0.up")) is nn.Linear
