"""A small CLIP (Radford et al. 2021): two transformers, and a contrastive loss.

Three things make its numbers lie where those of large trained networks lie. None of them changes what it computes, or
how well it learns; all of them matter to FP16:

- *Loud activations.* Normed activations are multiplied by 2^11, as large networks' activations lie far above 1. What
  follows is linear, ReLU or normalised, so that the factor cancels in the output, and gradients of activations are
  2^-11 times as large.
- *The mean over a large batch.* CLIP's loss is a mean over 32,768 pairs. A device that holds 32 of them reports their
  mean, as training scripts do; of the gradient of the whole mean its part is 2^-10 of its own mean's.
- *Patches count by direction only*: their embeddings are normalised, with an epsilon of 1e-8. The gradient of a patch
  is divided by its brightness, and by 1e-8 if it is black.
"""

import math
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

SIZES = ("small", "large")
COLOURS = {
    "red": (255, 40, 40), "green": (40, 200, 60), "blue": (50, 80, 255),
    "yellow": (240, 220, 40), "white": (255, 255, 255), "purple": (170, 40, 220),
}  # fmt: skip
SHAPES = ("circle", "square", "triangle", "cross")
RELATIONS = ("left of", "right of", "above", "below")
PIXELS = 32
LENGTH = 12  # tokens of the longest caption, its ends included

_SPECIAL = ("<pad>", "<start>", "<end>")
VOCABULARY = (*_SPECIAL, "a", "of", *SIZES, *COLOURS, *SHAPES, "left", "right", "above", "below")
_TOKEN = {word: number for number, word in enumerate(VOCABULARY)}
_KINDS = len(SIZES) * len(COLOURS) * len(SHAPES)
_NOISE = 12.0  # of 255, the standard deviation of a pixel


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Pictures (n, 3, 32, 32), values 0 to 1, and their captions as tokens (n, 12)."""

    pictures: Tensor
    captions: Tensor


def tokens(caption: str) -> list[int]:
    """Return the caption's words as numbers, with start and end, padded."""
    words = ["<start>", *caption.split(), "<end>"]
    return [_TOKEN[word] for word in words + ["<pad>"] * (LENGTH - len(words))]


def make_batch(seed: int, step: int, size: int, *, black: int = 0) -> Batch:
    """The batch of that step; the first `black` of its pictures are black."""
    generator = torch.Generator().manual_seed(100_003 * seed + step)
    scenes = torch.randperm(_KINDS * _KINDS * len(RELATIONS), generator=generator)[:size]
    first, rest = scenes % _KINDS, scenes // _KINDS
    second, relation = rest % _KINDS, rest // _KINDS
    drawn = cast("list[list[int]]", torch.stack([first, relation, second], dim=1).tolist())
    captions = [_caption(*scene) for scene in drawn]
    pictures = _pictures(first, relation, second, generator)
    pictures[:black] = 0.0
    return Batch(pictures=pictures, captions=torch.tensor([tokens(caption) for caption in captions]))


def _caption(first: int, relation: int, second: int) -> str:
    return f"{_thing(first)} {RELATIONS[relation]} {_thing(second)}"


def _thing(kind: int) -> str:
    size, rest = kind % len(SIZES), kind // len(SIZES)
    return f"a {SIZES[size]} {list(COLOURS)[rest % len(COLOURS)]} {SHAPES[rest // len(COLOURS)]}"


def _pictures(first: Tensor, relation: Tensor, second: Tensor, generator: torch.Generator) -> Tensor:
    """Noise, and on it the two shapes, each a little off its place."""
    size = len(first)
    canvas = _NOISE * torch.randn(size, 3, PIXELS, PIXELS, generator=generator)
    near = torch.where(relation % 2 == 0, 0.25, 0.75)  # left of, above: the first thing has the lower coordinate
    middle = torch.full((size,), 0.5)
    beside = relation < 2
    for kind, along in ((first, near), (second, 1.0 - near)):
        centre = torch.stack([torch.where(beside, along, middle), torch.where(beside, middle, along)]) * PIXELS
        centre += 3.0 * (torch.rand(2, size, generator=generator) - 0.5)
        canvas = torch.where(_mask(kind, centre)[:, None], canvas + _colour(kind), canvas)
    return canvas.clamp(0, 255).round() / 255.0


def _colour(kind: Tensor) -> Tensor:
    palette = torch.tensor(list(COLOURS.values()), dtype=torch.float32)
    return palette[(kind // len(SIZES)) % len(COLOURS)][:, :, None, None]


def _mask(kind: Tensor, centre: Tensor) -> Tensor:
    """Return the mask of the pixels that the shape covers."""
    y, x = torch.meshgrid(torch.arange(PIXELS), torch.arange(PIXELS), indexing="ij")
    radius = torch.where(kind % len(SIZES) == 0, 3.5, 6.0)[:, None, None]
    dx, dy = (x - centre[0][:, None, None]) / radius, (y - centre[1][:, None, None]) / radius
    circle = dx.square() + dy.square() < 1.0
    square = (dx.abs() < 0.85) & (dy.abs() < 0.85)
    triangle = (dy.abs() < 0.9) & (dx.abs() < (dy + 0.9) / 1.8)
    cross = ((dx.abs() < 0.3) & (dy.abs() < 1.0)) | ((dy.abs() < 0.3) & (dx.abs() < 1.0))
    shapes = torch.stack([circle, square, triangle, cross], dim=1)
    return shapes[torch.arange(len(kind)), kind // (len(SIZES) * len(COLOURS))]


PATCH = 8
GLOBAL_BATCH = 32_768
EPSILON = 1e-8


class Embed(nn.Module):
    """Linear map of a patch's pixels; a module, for a watch to see its gradient."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, 3 * PATCH**2))

    def forward(self, cut: Tensor) -> Tensor:
        """The last dimension, of pixels, becomes `width`."""
        return functional.linear(cut, self.weight)


class Patches(nn.Module):
    """Patches of pictures, embedded as directions of length sqrt(width)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = Embed(width)

    def forward(self, pictures: Tensor) -> Tensor:
        """The embedded patches (batch, patches, width)."""
        size, side = len(pictures), PIXELS // PATCH
        cut = pictures.view(size, 3, side, PATCH, side, PATCH).permute(0, 2, 4, 1, 3, 5).reshape(size, side**2, -1)
        seen: Tensor = self.embed(cut)
        return functional.normalize(seen, dim=-1, eps=EPSILON) * math.sqrt(seen.shape[-1])


class Block(nn.Module):
    """Attention and a two-layer network, each behind a norm and beside a residual."""

    def __init__(self, width: int, heads: int, gain: float, layers: int) -> None:
        super().__init__()
        self.heads, self.gain = heads, gain
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = _linear(width, 3 * width), _linear(width, width, layers)
        self.up, self.down = _linear(width, 4 * width), _linear(4 * width, width, layers)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape, (batch, tokens, width)."""
        size, length, width = x.shape
        mixed = self.qkv(self.norm1(x) * self.gain)
        q, k, v = mixed.view(size, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        # Scores as without the gain, which both sides have.
        scale = 1.0 / (self.gain**2 * math.sqrt(width / self.heads))
        attended = functional.scaled_dot_product_attention(q, k, v, scale=scale)
        x = x + self.out(attended.transpose(1, 2).reshape(size, length, width))
        return x + self.down(functional.relu(self.up(self.norm2(x) * self.gain)))


class Tower(nn.Module):
    """Blocks over tokens of one kind, whose normed and projected mean is the feature."""

    def __init__(self, tokens: int, width: int, layers: int, heads: int, gain: float) -> None:
        super().__init__()
        self.gain = gain
        self.places = nn.Parameter(torch.randn(tokens, width))
        self.norm_before = nn.LayerNorm(width)
        self.blocks = nn.Sequential(*[Block(width, heads, gain, layers) for _ in range(layers)])
        self.norm, self.project = nn.LayerNorm(width), _linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """The feature (batch, width) of embedded tokens (batch, tokens, width)."""
        found = self.blocks(self.norm_before(x + self.places) * self.gain)
        return self.project(self.norm(found.mean(dim=1)) * self.gain)


class Clip(nn.Module):
    """Pictures and captions, as features that are close where they belong together."""

    def __init__(self, *, width: int = 64, layers: int = 2, heads: int = 4, gain: float = 2.0**11) -> None:
        super().__init__()
        self.patches = Patches(width)
        self.words = nn.Embedding(len(VOCABULARY), width)
        self.image = Tower((PIXELS // PATCH) ** 2, width, layers, heads, gain)
        self.text = Tower(LENGTH, width, layers, heads, gain)
        self.temperature = nn.Parameter(torch.tensor(math.log(1 / 0.07)))  # CLIP's own beginning, as a logarithm

    def forward(self, pictures: Tensor, captions: Tensor) -> Tensor:
        """The similarity of each picture to each caption, times the learned temperature."""
        image, text = self.image(self.patches(pictures)), self.text(self.words(captions))
        image, text = functional.normalize(image, dim=-1), functional.normalize(text, dim=-1)
        return self.temperature.exp() * image @ text.T


def contrastive_loss(similarity: Tensor) -> Tensor:
    """Return the contrastive loss of pictures and captions, over this device's pairs.

    It asks which caption belongs to each picture, and which picture to each caption, and takes the mean.

    Its gradient is this device's part of that of the mean over the whole batch.
    """
    pairs = torch.arange(len(similarity), device=similarity.device)
    both = [functional.cross_entropy(side, pairs, reduction="sum") for side in (similarity, similarity.T)]
    mean = (both[0] + both[1]) / (2 * len(similarity))
    part = mean * (len(similarity) / GLOBAL_BATCH)
    return mean.detach() + (part - part.detach())


def _linear(inputs: int, outputs: int, layers: int | None = None) -> nn.Linear:
    """Return a linear layer without bias, of unit gain or of GPT-2's initialization."""
    made = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(made.weight, std=inputs**-0.5 / (1.0 if layers is None else math.sqrt(2 * layers)))
    return made
