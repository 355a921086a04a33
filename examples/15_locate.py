"""Which operation made the NaN? Five steps that break in different ways, each explained in one sentence."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import plimsoll as pl

torch.manual_seed(0)


class Attention(nn.Module):
    """Causal attention whose padding mask may hide a whole row."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        """Each position sees those that are not hidden from it."""
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        scores = (q @ k.transpose(-1, -2)).masked_fill(padding, float("-inf"))
        return scores.softmax(-1) @ v


class Model(nn.Module):
    """An embedding, attention and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attn, self.head = nn.Embedding(10, 16), Attention(), nn.Linear(16, 4)

    def forward(self, tokens: Tensor, padding: Tensor) -> Tensor:
        """Logits of each position."""
        return self.head(self.attn(self.embed(tokens), padding))


model = Model()
tokens, target = torch.randint(10, (2, 5)), torch.randint(4, (10,))
causal = torch.ones(5, 5).triu(1).bool()


def loss_of(padding: Tensor, target: Tensor = target) -> Tensor:
    """The loss of the batch."""
    return F.cross_entropy(model(tokens, padding).flatten(0, 1), target)


def autocast_step() -> None:
    """One step with a loss scale that is too high for FP16."""
    with torch.autocast("cpu", dtype=torch.float16):
        loss = loss_of(causal)
    torch.amp.GradScaler("cpu", init_scale=2.0**24).scale(loss).backward()


hidden = causal.clone()
hidden[0] = True
steps = {
    "a causal mask, as it should be": lambda: loss_of(causal),
    "a row that is all masked": lambda: loss_of(hidden),
    "every target ignored": lambda: loss_of(causal, torch.full((10,), -100)),
    "a loss scale of 2^24": autocast_step,
    "a distance of zero": lambda: (model.embed(tokens) * 0).square().sum(-1).sqrt().sum(),
}
found = {}
for name, step in steps.items():
    found[name] = fault = pl.locate(step, model=model)
    print(f"{name}\n    {'no fault' if fault is None else fault.sentence}")
    if fault is not None and fault.source is not None:
        print(f"    line {fault.source.line}: {fault.source.text}")

print(f"\n{found['a row that is all masked']}")
assert found["a causal mask, as it should be"] is None
operations = [fault.operation for fault in found.values() if fault is not None]
assert operations[:2] == ["aten._softmax", "aten.nll_loss_forward"]
assert found["a row that is all masked"].module == "attn"
assert found["a loss scale of 2^24"].scale == 2.0**24
assert (found["a distance of zero"].phase, found["a distance of zero"].forward) == ("backward", "aten.sqrt")
