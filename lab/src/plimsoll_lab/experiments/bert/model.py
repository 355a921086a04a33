"""A small BERT (Devlin et al. 2019) of torch's own modules, with its loss inside, for both of its trainings.

As the original: words, places and segments added up and normed, blocks of attention and a network of two layers whose
norms stand behind the residual additions, and heads of their own. Masked tokens are predicted at their places alone.
The readout has a table of its own (BERT's is its table of words), so that at unit scale each has its own factors.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from plimsoll_lab.experiments.bert.data import LENGTH


class Block(nn.Module):
    """Attention to all tokens and a network of two layers, each beside a residual and in front of a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape, (batch, length, width)."""
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v)
        x = self.norm1(x + self.out(attended.transpose(1, 2).reshape(batch, length, width)))
        return self.norm2(x + self.down(functional.gelu(self.up(x))))


class Body(nn.Module):
    """What both trainings share."""

    def __init__(self, *, vocabulary: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.words, self.segments = nn.Embedding(vocabulary, width), nn.Embedding(2, width)
        self.register_buffer("places", waves(LENGTH, width))
        self.norm = nn.LayerNorm(width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(layers)])

    def forward(self, tokens: Tensor, segments: Tensor) -> Tensor:
        """The states (batch, length, width) of tokens (batch, length)."""
        return self.blocks(self.norm(self.words(tokens) + self.places + self.segments(segments)))


class MaskedModel(nn.Module):
    """BERT as it is trained first: a layer, a norm and the readout at the places that are to be predicted."""

    def __init__(self, *, vocabulary: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.body = Body(vocabulary=vocabulary, width=width, layers=layers, heads=heads)
        self.transform, self.norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.readout = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor, segments: Tensor, places: Tensor, targets: Tensor) -> Tensor:
        """The mean loss, in nats."""
        states = self.body(tokens, segments).flatten(0, 1)[places]
        scores = self.readout(self.norm(functional.gelu(self.transform(states))))
        return functional.cross_entropy(scores, targets)


class SpanModel(nn.Module):
    """BERT as it is tuned: two scores for each token, of being the answer's first and its last."""

    def __init__(self, *, vocabulary: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.body = Body(vocabulary=vocabulary, width=width, layers=layers, heads=heads)
        self.ends = nn.Linear(width, 2)

    def forward(self, tokens: Tensor, segments: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
        """The mean loss of both ends (batch, 2), and the scores (batch, 2, length)."""
        scores = self.ends(self.body(tokens, segments)).transpose(1, 2)
        return functional.cross_entropy(scores.flatten(0, 1), ends.flatten()), scores


def waves(length: int, width: int) -> Tensor:
    """The first transformer's places (Vaswani et al. 2017): sines and cosines, here with a mean square of 1."""
    rates = 10_000.0 ** (-torch.arange(0, width, 2) / width)
    angles = torch.arange(length)[:, None] * rates
    return math.sqrt(2.0) * torch.cat((angles.sin(), angles.cos()), dim=1)
