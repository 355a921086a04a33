"""The character model twice: of torch's own modules as torch draws them, and of `unit.nn`'s; the same architecture.

A transformer as language models have it now: embedded characters and places, blocks of attention and a network of two
layers, each behind a norm and beside a residual, a norm, and the readout. No biases, and norms without gains.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from plimsoll import unit
from plimsoll.unit import functional as U  # noqa: N812  (as torch's is F)
from plimsoll_lab.source_text import SYMBOLS


class Block(nn.Module):
    """Attention to what was before, and a network of two layers."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = (nn.LayerNorm(width, elementwise_affine=False) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape, (pieces, length, width)."""
        q, k, v = split_heads(self.qkv(self.norm1(x)), self.heads)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(join_heads(attended))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Plain(nn.Module):
    """Of `torch.nn`, every parameter drawn as torch draws it."""

    def __init__(self, *, width: int, layers: int, heads: int, length: int) -> None:
        super().__init__()
        self.characters, self.places = nn.Embedding(SYMBOLS, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.readout = nn.Linear(width, SYMBOLS, bias=False)

    def forward(self, characters: Tensor) -> Tensor:
        """Of each character (pieces, length) the scores of what comes next (pieces, length, symbols)."""
        places = torch.arange(characters.shape[1], device=characters.device)
        x = self.characters(characters) + self.places(places)
        return self.readout(self.norm(self.blocks(x)))

    def loss(self, scores: Tensor, targets: Tensor) -> Tensor:
        """The mean over all characters, in nats."""
        return functional.cross_entropy(scores.flatten(0, 1), targets.flatten())


class UnitBlock(nn.Module):
    """`Block` at unit scale; `taus`: the shares of its two branches, which the stack sets.

    Attention has one factor, that of its output. The mean of it with those of the gradients would make outputs louder
    than 1, and so the branch's share larger than it says.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.taus = heads, [0.5, 0.5]
        self.norm1, self.norm2 = (unit.nn.LayerNorm(width, elementwise_affine=False) for _ in range(2))
        self.qkv, self.out = unit.nn.Linear(width, 3 * width, bias=False), unit.nn.Linear(width, width, bias=False)
        self.up = unit.nn.Linear(width, 4 * width, bias=False)
        self.down = unit.nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape, (pieces, length, width)."""
        branch, skip = U.residual_split(x, self.taus[0])
        q, k, v = split_heads(self.qkv(self.norm1(branch)), self.heads)
        attended = U.scaled_dot_product_attention(q, k, v, is_causal=True, constraint="to_output_scale")
        x = U.residual_add(self.out(join_heads(attended)), skip, self.taus[0])
        branch, skip = U.residual_split(x, self.taus[1])
        return U.residual_add(self.down(U.gelu(self.up(self.norm2(branch)))), skip, self.taus[1])


class Unit(nn.Module):
    """`Plain` at unit scale: other factors and other draws, the same operations in the same places."""

    def __init__(self, *, width: int, layers: int, heads: int, length: int) -> None:
        super().__init__()
        self.characters, self.places = unit.nn.Embedding(SYMBOLS, width), unit.nn.Embedding(length, width)
        self.blocks = unit.nn.Stack(*[UnitBlock(width, heads) for _ in range(layers)])
        self.norm = unit.nn.LayerNorm(width, elementwise_affine=False)
        self.readout = unit.nn.LinearReadout(width, SYMBOLS, bias=False)

    def forward(self, characters: Tensor) -> Tensor:
        """Of each character (pieces, length) the scores of what comes next (pieces, length, symbols)."""
        places = torch.arange(characters.shape[1], device=characters.device)
        x = U.add(self.characters(characters), self.places(places), constraint=None)
        return self.readout(self.norm(self.blocks(x)))

    def loss(self, scores: Tensor, targets: Tensor) -> Tensor:
        """The mean over all characters, in nats; its gradient is at unit scale, however many there are."""
        return U.cross_entropy(scores.flatten(0, 1), targets.flatten())


def split_heads(x: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values (pieces, heads, length, width of a head) of their projections side by side."""
    pieces, length, _ = x.shape
    q, k, v = x.view(pieces, length, 3, heads, -1).permute(2, 0, 3, 1, 4)
    return q, k, v


def join_heads(x: Tensor) -> Tensor:
    """The heads side by side again, (pieces, length, width)."""
    return x.transpose(1, 2).flatten(2)
