"""A small, deep encoder of T5's kind (Raffel et al. 2020), whose residual stream is as loud as a large trained one's.

As in T5: norms stand in front of each branch, divide by the root mean square and take no mean away; attention's scores
are not divided by the root of the width, for which the queries begin smaller; positions are a learned bias of the
scores; nothing has a bias; and what the branches give is added up as it is. Nothing brings the sum back until the norm
behind the last layer, and in training it grows: by itself, two to three times within a hundred steps.

One thing makes the sum as large as a large T5's, whose last layers pass 65,504: the embedding and every branch's output
are multiplied by the same gain. The norms divide by it, so that in FP32 it changes nothing that is computed but for the
norms' epsilon.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 16
LENGTH = 16


class Attention(nn.Module):
    """The attention branch, added to its input."""

    def __init__(self, width: int, heads: int, gain: float) -> None:
        super().__init__()
        self.heads, self.gain = heads, gain
        self.norm = nn.RMSNorm(width, eps=1e-6)
        # T5's: queries begin smaller by the root of a head's width, which the scores are not divided by.
        self.query = _linear(width, width, 1 / math.sqrt(width * (width // heads)))
        self.key, self.value = (_linear(width, width, 1 / math.sqrt(width)) for _ in range(2))
        self.out = _linear(width, width, 1 / math.sqrt(width))

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """The same shape, (batch, tokens, width); `bias`: of the scores, (heads, tokens, tokens)."""
        size, length, width = x.shape
        seen = self.norm(x).to(self.query.weight.dtype)
        q, k, v = (
            each(seen).view(size, length, self.heads, -1).transpose(1, 2) for each in (self.query, self.key, self.value)
        )
        shares = functional.softmax(q @ k.transpose(-1, -2) + bias, dim=-1, dtype=torch.float32).to(v.dtype)
        return x + self.gain * self.out((shares @ v).transpose(1, 2).reshape(size, length, width))


class FeedForward(nn.Module):
    """The two-layer branch, added to its input."""

    def __init__(self, width: int, gain: float) -> None:
        super().__init__()
        self.gain = gain
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.wi = _linear(width, 4 * width, 1 / math.sqrt(width))
        self.wo = _linear(4 * width, width, 1 / math.sqrt(4 * width))

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        seen = self.norm(x).to(self.wi.weight.dtype)
        return x + self.gain * self.wo(functional.relu(self.wi(seen)))


class Layer(nn.Module):
    """Attention and feed-forward, each behind a norm and beside a residual."""

    def __init__(self, width: int, heads: int, gain: float) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(width, heads, gain), FeedForward(width, gain)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """The same shape."""
        return self.feed_forward(self.attention(x, bias))


class Encoder(nn.Module):
    """Tokens (batch, tokens) to logits (batch, tokens, vocabulary)."""

    def __init__(self, *, width: int, heads: int, layers: int, gain: float) -> None:
        super().__init__()
        self.gain = gain
        self.embed = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(2 * LENGTH - 1, heads)
        nn.init.normal_(self.positions.weight, std=width**-0.5)
        self.layers = nn.ModuleList([Layer(width, heads, gain) for _ in range(layers)])
        self.norm, self.head = nn.RMSNorm(width, eps=1e-6), _linear(width, VOCABULARY, 1 / math.sqrt(width))

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits, in the dtype of the head's weights."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        bias = self.positions(places[None, :] - places[:, None] + LENGTH - 1).permute(2, 0, 1)
        x = self.gain * self.embed(tokens)
        for layer in self.layers:
            x = layer(x, bias)
        return self.head(self.norm(x).to(self.head.weight.dtype))


def batch_of(seed: int, step: int, size: int) -> tuple[Tensor, Tensor]:
    """Random tokens, a third of each row overwritten with one of them; that one is what every place has to say."""
    generator = torch.Generator().manual_seed((seed + 1) * 1_000_003 + step)
    tokens = torch.randint(VOCABULARY, (size, LENGTH), generator=generator)
    frequent = torch.randint(VOCABULARY, (size, 1), generator=generator)
    drawn = torch.rand(size, LENGTH, generator=generator) < 1 / 3
    return torch.where(drawn, frequent, tokens), frequent.expand(size, LENGTH)


def _linear(inputs: int, outputs: int, std: float) -> nn.Linear:
    made = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(made.weight, std=std)
    return made
