"""Made pictures of two coloured shapes, and captions: "a large red circle left of a small blue square".

A batch follows from the seed and its number alone, so that every training sees the same ones. The captions of a batch
are all different; which picture belongs to which caption can be told, though not from one shape alone.

Hard batches are what a loader gives when a shard of pictures fails to decode: captions as ever, some pictures black.
"""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

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
    """The caption's words as numbers between those of its ends, filled up to the longest caption's length."""
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
    """Which pixels the shape covers."""
    y, x = torch.meshgrid(torch.arange(PIXELS), torch.arange(PIXELS), indexing="ij")
    radius = torch.where(kind % len(SIZES) == 0, 3.5, 6.0)[:, None, None]
    dx, dy = (x - centre[0][:, None, None]) / radius, (y - centre[1][:, None, None]) / radius
    circle = dx.square() + dy.square() < 1.0
    square = (dx.abs() < 0.85) & (dy.abs() < 0.85)
    triangle = (dy.abs() < 0.9) & (dx.abs() < (dy + 0.9) / 1.8)
    cross = ((dx.abs() < 0.3) & (dy.abs() < 1.0)) | ((dy.abs() < 0.3) & (dx.abs() < 1.0))
    shapes = torch.stack([circle, square, triangle, cross], dim=1)
    return shapes[torch.arange(len(kind)), kind // (len(SIZES) * len(COLOURS))]
