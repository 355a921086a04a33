"""The default boxes of a one-stage detector: where they lie, what each is to find, and how offsets become boxes.

As in SSD (Liu et al. 2016): each cell of each feature map has boxes of fixed sizes; one belongs to a thing if it
overlaps it by half, or if none overlaps that thing more. Boxes are centre, width and height, as fractions of the side.
"""

import torch
from torch import Tensor

STRIDES = (4, 8, 16)  # of the feature maps, pixels
PER_CELL = 2
_SIZES = ((10 / 64, 13 / 64), (16 / 64, 19 / 64), (23 / 64, 27 / 64))  # of a picture's side, by map
_OVERLAP = 0.5
_VARIANCES = (0.1, 0.2)  # SSD's units of offsets: of the centre, in box sides, and of the sides' logarithms


def anchors(size: int) -> Tensor:
    """All default boxes (anchors, 4) of pictures of that side, in the order of the detector's outputs."""
    rows: list[Tensor] = []
    for stride, sides in zip(STRIDES, _SIZES, strict=True):
        cells = size // stride
        at = (torch.arange(cells) + 0.5) / cells
        y, x = torch.meshgrid(at, at, indexing="ij")
        centre = torch.stack([x, y], dim=-1).view(-1, 1, 2).expand(-1, PER_CELL, 2)
        side = torch.tensor(sides).view(1, PER_CELL, 1).expand(cells * cells, PER_CELL, 2)
        rows.append(torch.cat([centre, side], dim=-1).reshape(-1, 4))
    return torch.cat(rows)


def overlaps(these: Tensor, those: Tensor) -> Tensor:
    """The intersection over the union of each of these boxes (..., n, 4) with each of those (..., m, 4)."""
    low = torch.maximum(_low(these)[..., :, None, :], _low(those)[..., None, :, :])
    high = torch.minimum(_high(these)[..., :, None, :], _high(those)[..., None, :, :])
    common = (high - low).clamp_min(0).prod(dim=-1)
    whole = these[..., 2:].prod(dim=-1)[..., :, None] + those[..., 2:].prod(dim=-1)[..., None, :] - common
    return common / whole.clamp_min(1e-12)


def matched(boxes: Tensor, classes: Tensor, defaults: Tensor) -> tuple[Tensor, Tensor]:
    """What each default box is to find: a class (n, anchors), 0 for none and else one above it, and a box.

    Things are `boxes` (n, things, 4) of `classes` (n, things), -1 for none.
    """
    found = overlaps(defaults.expand(len(boxes), -1, -1), boxes).masked_fill((classes < 0)[:, None, :], -1.0)
    best, thing = found.max(dim=2)
    # The default box that overlaps a thing most is that thing's, however little it does.
    most = found.argmax(dim=1)
    rows = torch.arange(len(boxes), device=boxes.device)
    for place in range(boxes.shape[1]):
        there = classes[:, place] >= 0
        thing[rows[there], most[there, place]] = place
        best[rows[there], most[there, place]] = 1.0
    target = torch.where(best >= _OVERLAP, classes.gather(1, thing) + 1, 0)
    return target, boxes.gather(1, thing[..., None].expand(-1, -1, 4))


def encoded(boxes: Tensor, defaults: Tensor) -> Tensor:
    """The offsets that lead from default boxes to boxes of the same shape; sides above zero."""
    centre = (boxes[..., :2] - defaults[..., :2]) / defaults[..., 2:] / _VARIANCES[0]
    sides = (boxes[..., 2:].clamp_min(1e-6) / defaults[..., 2:]).log() / _VARIANCES[1]
    return torch.cat([centre, sides], dim=-1)


def decoded(offsets: Tensor, defaults: Tensor) -> Tensor:
    """The boxes that offsets lead to; the inverse of `encoded`."""
    centre = offsets[..., :2] * _VARIANCES[0] * defaults[..., 2:] + defaults[..., :2]
    return torch.cat([centre, (offsets[..., 2:] * _VARIANCES[1]).exp() * defaults[..., 2:]], dim=-1)


def _low(boxes: Tensor) -> Tensor:
    return boxes[..., :2] - boxes[..., 2:] / 2


def _high(boxes: Tensor) -> Tensor:
    return boxes[..., :2] + boxes[..., 2:] / 2
