"""The models of the sweep: one architecture with its choices, of torch's modules or of `unit.nn`'s.

Characters and places are embedded and added up; each layer mixes what came before (attention, a convolution, or a
recurrence) and then works on every place (a network of two layers): two branches, each with its norm and its residual;
at the end the readout, behind a norm where there are any in front. No biases, and norms without gains.

Unscaled weights are drawn with the variance 1 / fan_in, which is what unit scaling's factors are made for: a design
begins as the same function either way, but for constants. (torch's own draw has a third of that variance. Residual
branches are then quieter, and one would compare two initialisations.)
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (as everyone calls it)

from plimsoll import unit
from plimsoll.unit import functional as U  # noqa: N812  (as torch's is F)
from plimsoll_lab.experiments.unit.model import join_heads, split_heads
from plimsoll_lab.experiments.unit_sweep.grid import Design, Residual
from plimsoll_lab.source_text import SYMBOLS

HEADS, KERNEL = 2, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a model is built of, in torch's way or at unit scale: modules, and functions.

    `split` and `join` are the two ends of a residual branch with the share tau of the sum.
    """

    linear: Callable[..., nn.Module]
    readout: Callable[..., nn.Module]
    embedding: Callable[..., nn.Module]
    convolution: Callable[..., nn.Module]
    norm: Callable[..., nn.Module]
    gelu: Callable[[Tensor], Tensor]
    tanh: Callable[[Tensor], Tensor]
    add: Callable[[Tensor, Tensor], Tensor]
    attention: Callable[..., Tensor]
    split: Callable[[Tensor, float], tuple[Tensor, Tensor]]
    join: Callable[[Tensor, Tensor, float], Tensor]
    cross_entropy: Callable[[Tensor, Tensor], Tensor]


def _linear(width: int, outputs: int, *, bias: bool) -> nn.Module:
    return _drawn(nn.Linear(width, outputs, bias=bias), width)


def _convolution(width: int, outputs: int, kernel: int, *, bias: bool) -> nn.Module:
    return _drawn(nn.Conv1d(width, outputs, kernel, bias=bias), width * kernel)


def _drawn(module: nn.Linear | nn.Conv1d, fan_in: int) -> nn.Module:
    nn.init.normal_(module.weight, std=fan_in**-0.5)
    return module


def _twice(x: Tensor, _: float) -> tuple[Tensor, Tensor]:
    """Unscaled, nothing happens at the branch's start, whatever its share."""
    return x, x


def _weighted(branch: Tensor, skip: Tensor, tau: float) -> Tensor:
    return math.sqrt(tau) * branch + math.sqrt(1.0 - tau) * skip


def _unit_sum(x: Tensor, y: Tensor) -> Tensor:
    """Of a recurrence's two terms: gradients have the factor of the sum, or a long row of them would grow."""
    return U.add(x, y, constraint="to_output_scale")


def _unit_attention(q: Tensor, k: Tensor, v: Tensor, **told: Any) -> Tensor:
    """The output's own factor: a branch must be as loud as its share says."""
    return U.scaled_dot_product_attention(q, k, v, constraint="to_output_scale", **told)


PLAIN = Parts(
    linear=_linear, readout=_linear, embedding=nn.Embedding, convolution=_convolution, norm=nn.LayerNorm, gelu=F.gelu,
    tanh=torch.tanh, add=torch.add, attention=F.scaled_dot_product_attention, split=_twice, join=_weighted,
    cross_entropy=F.cross_entropy,
)  # fmt: skip
UNIT = Parts(
    linear=unit.nn.Linear, readout=unit.nn.LinearReadout, embedding=unit.nn.Embedding, convolution=unit.nn.Conv1d,
    norm=unit.nn.LayerNorm, gelu=U.gelu, tanh=U.tanh, add=_unit_sum, attention=_unit_attention, split=U.residual_split,
    join=U.residual_add, cross_entropy=U.cross_entropy,
)  # fmt: skip


class Attention(nn.Module):
    """Attention to what was before."""

    def __init__(self, parts: Parts, width: int) -> None:
        super().__init__()
        self.parts = parts
        self.qkv, self.out = parts.linear(width, 3 * width, bias=False), parts.linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape, (pieces, length, width)."""
        q, k, v = split_heads(self.qkv(x), HEADS)
        return self.out(join_heads(self.parts.attention(q, k, v, is_causal=True)))


class Convolution(nn.Module):
    """A convolution over a place and the three before it."""

    def __init__(self, parts: Parts, width: int) -> None:
        super().__init__()
        self.parts = parts
        self.kernel = parts.convolution(width, width, KERNEL, bias=False)
        self.out = parts.linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape, (pieces, length, width)."""
        before = F.pad(x.transpose(1, 2), (KERNEL - 1, 0))
        return self.out(self.parts.gelu(self.kernel(before)).transpose(1, 2))


class Recurrent(nn.Module):
    """Elman's recurrence: the state is tanh of what comes in plus a product of the state before."""

    def __init__(self, parts: Parts, width: int) -> None:
        super().__init__()
        self.parts = parts
        self.enter, self.again, self.out = (parts.linear(width, width, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """The same shape, (pieces, length, width)."""
        first, *rest = self.enter(x).unbind(1)
        states = [self.parts.tanh(first)]
        for entered in rest:
            states.append(self.parts.tanh(self.parts.add(entered, self.again(states[-1]))))
        return self.out(torch.stack(states, dim=1))


class Network(nn.Module):
    """Two layers at every place, with a GELU between."""

    def __init__(self, parts: Parts, width: int) -> None:
        super().__init__()
        self.parts = parts
        self.up, self.down = parts.linear(width, 4 * width, bias=False), parts.linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        return self.down(self.parts.gelu(self.up(x)))


class Branch(nn.Module):
    """A branch with its norm and its residual; `number`: which it is in the whole model, from 1."""

    def __init__(self, parts: Parts, design: Design, inner: nn.Module, width: int, number: int) -> None:
        super().__init__()
        self.parts, self.inner = parts, inner
        self.before = parts.norm(width, elementwise_affine=False) if design.norm == "pre" else nn.Identity()
        self.after = parts.norm(width, elementwise_affine=False) if design.norm == "post" else nn.Identity()
        self.residual: Residual = design.residual
        self.tau = 1.0 / (number + 1) if design.residual == "running-mean" else 0.5

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        if self.residual == "none":
            return self.after(self.inner(self.before(x)))
        if self.residual == "sum":
            return self.after(x + self.inner(self.before(x)))
        start, skip = self.parts.split(x, self.tau)
        return self.after(self.parts.join(self.inner(self.before(start)), skip, self.tau))


_SEQUENCES: dict[str, Callable[[Parts, int], nn.Module]] = {
    "attention": Attention, "convolution": Convolution, "recurrent": Recurrent,
}  # fmt: skip


class Characters(nn.Module):
    """The model of a design, of the parts that are given."""

    def __init__(self, design: Design, parts: Parts, *, width: int, length: int) -> None:
        super().__init__()
        self.parts = parts
        self.characters, self.places = parts.embedding(SYMBOLS, width), parts.embedding(length, width)
        kinds = (_SEQUENCES[design.sequence], Network)
        self.branches = nn.Sequential(
            *[
                Branch(parts, design, kind(parts, width), width, 2 * layer + place)
                for layer in range(design.depth)
                for place, kind in enumerate(kinds, start=1)
            ]
        )
        self.norm = parts.norm(width, elementwise_affine=False) if design.norm == "pre" else nn.Identity()
        self.readout = parts.readout(width, SYMBOLS, bias=False)

    def forward(self, characters: Tensor) -> Tensor:
        """Of each character (pieces, length) the scores of what comes next (pieces, length, symbols)."""
        places = torch.arange(characters.shape[1], device=characters.device)
        x = self.parts.add(self.characters(characters), self.places(places))
        return self.readout(self.norm(self.branches(x)))

    def loss(self, scores: Tensor, targets: Tensor) -> Tensor:
        """The mean over all characters, in nats."""
        return self.parts.cross_entropy(scores.flatten(0, 1), targets.flatten())
