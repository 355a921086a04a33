"""Made scenes for a detector: up to three circles, squares and triangles of any colour on a ground of another.

A batch follows from the seed and its number alone, so that every training sees the same ones. A thing's class is its
shape and nothing else: colours say nothing. Things lie in different quarters of the picture and do not overlap.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from plimsoll.errors import ArgumentError

CLASSES = ("circle", "square", "triangle")
MOST = 3  # things in a picture; there is at least one
PIXELS = 64
STRIDE = 16  # of the coarsest feature map: a picture's side is a multiple of it

_SMALLEST, _LARGEST = 10 / 64, 28 / 64  # of a picture's side
_STRETCH = 0.3  # the most that the longer side is longer
_GROUND = (0.35, 0.65)  # the range of the ground's channels
_APART = 0.35  # by how much, at least, a thing's colour differs from the ground in one channel
_NOISE = 0.04  # standard deviation of a pixel, of 1
_HELD_OUT = 50_000  # batches from this number on are of no training


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenes:
    """Pictures (n, 3, size, size) of values 0 to 1, and what is in them.

    - `boxes` (n, 3, 4): the centre, the width and the height of each thing, as fractions of the side.
    - `classes` (n, 3): its place in `CLASSES`, or -1 where there is no thing; these come last.
    """

    pictures: Tensor
    boxes: Tensor
    classes: Tensor

    def to(self, device: str) -> "Scenes":
        """The same on a device."""
        return replace(
            self,
            pictures=self.pictures.to(device),
            boxes=self.boxes.to(device),
            classes=self.classes.to(device),
        )


def scenes(seed: int, step: int, count: int, size: int = PIXELS) -> Scenes:
    """The scenes of that step; raises `ArgumentError` for a side that the feature maps do not divide."""
    if size < 2 * STRIDE or size % STRIDE:
        raise ArgumentError(
            f"scenes: expected a size that is a multiple of {STRIDE}, and {2 * STRIDE} or more; got size={size}. "
            f"Use {PIXELS}."
        )
    generator = torch.Generator().manual_seed(100_003 * seed + step)
    boxes, classes = _things(count, generator)
    return Scenes(pictures=_pictures(boxes, classes, size, generator), boxes=boxes, classes=classes)


def held_out(seed: int, count: int, size: int = PIXELS) -> Scenes:
    """Scenes that no training of that seed sees."""
    return scenes(seed, _HELD_OUT, count, size)


def _things(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Boxes and classes; each thing is in a quarter of its own."""

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator)

    larger = _SMALLEST * (_LARGEST / _SMALLEST) ** uniform(count, MOST)
    flat, squeezed = uniform(count, MOST) < 0.5, larger / (1 + _STRETCH * uniform(count, MOST))
    sides = torch.stack([torch.where(flat, larger, squeezed), torch.where(flat, squeezed, larger)], dim=-1)
    quarter = uniform(count, 4).argsort(dim=1)[:, :MOST]
    corner = torch.stack([quarter % 2, quarter // 2], dim=-1) * 0.5
    centre = corner + sides / 2 + uniform(count, MOST, 2) * (0.5 - sides)
    classes = torch.randint(len(CLASSES), (count, MOST), generator=generator)
    there = torch.arange(MOST) < torch.randint(1, MOST + 1, (count, 1), generator=generator)
    boxes = torch.cat([centre, sides], dim=-1)
    return torch.where(there[..., None], boxes, 0.0), torch.where(there, classes, -1)


def _pictures(boxes: Tensor, classes: Tensor, size: int, generator: torch.Generator) -> Tensor:
    count = len(boxes)
    ground = _GROUND[0] + (_GROUND[1] - _GROUND[0]) * torch.rand(count, 3, 1, 1, generator=generator)
    canvas = ground.expand(count, 3, size, size)
    for place in range(MOST):
        colour = _apart(ground, torch.rand(count, 3, 1, 1, generator=generator), generator)
        mask = _mask(boxes[:, place], classes[:, place], size)
        canvas = torch.where(mask[:, None], colour, canvas)
    noise = _NOISE * torch.randn(count, 3, size, size, generator=generator)
    return (canvas + noise).clamp(0, 1)


def _apart(ground: Tensor, colour: Tensor, generator: torch.Generator) -> Tensor:
    """The colour, with one channel brought away from the ground's where all are near it."""
    channel = torch.randint(3, (len(colour), 1, 1, 1), generator=generator)
    far = torch.where(ground < 0.5, ground + _APART, ground - _APART)
    near = ((colour - ground).abs() < _APART).all(dim=1, keepdim=True)
    chosen = torch.arange(3).view(1, 3, 1, 1) == channel
    return torch.where(near & chosen, far, colour)


def _mask(box: Tensor, kind: Tensor, size: int) -> Tensor:
    """Which pixels the thing covers, by their middles."""
    at = (torch.arange(size) + 0.5) / size
    y, x = torch.meshgrid(at, at, indexing="ij")
    half = box[:, 2:, None, None].clamp_min(1e-6) / 2
    dx, dy = (x - box[:, 0, None, None]) / half[:, 0], (y - box[:, 1, None, None]) / half[:, 1]
    square = (dx.abs() <= 1) & (dy.abs() <= 1)
    shapes = torch.stack([dx.square() + dy.square() <= 1, square, square & (dx.abs() <= (dy + 1) / 2)], dim=1)
    return shapes[torch.arange(len(kind)), kind.clamp_min(0)] & (kind >= 0)[:, None, None]
