"""A small one-stage detector as SSD (Liu et al. 2016): convolutions and ReLU, three feature maps, boxes in every cell.

It has what makes an SSD's gradients what they are. There is no batch norm; pictures shrink by max pooling, whose
gradient goes to one value of four, and then by strides; feature maps are normalised before their heads, as SSD's first
one is. The loss takes the boxes that match a thing and three times as many of the others, the hardest; all others have
none. So most gradients of activations are zero in any precision.

`loudness` multiplies the pictures, as the VGG under SSD takes pixels of 0 to 255. Convolutions without a bias and ReLU
are homogeneous, so all activations are that much larger until the maps are normalised. What the detector computes and
the gradients of its weights stay the same; the gradients of its activations are that much smaller.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from plimsoll_lab.models.detector.anchors import PER_CELL, anchors, encoded, matched
from plimsoll_lab.models.detector.data import CLASSES, PIXELS, Scenes

_NEGATIVES = 3  # for each box that matches a thing
_EPSILON = 1e-4


class Found(NamedTuple):
    """What is said of each default box: scores (n, anchors, 1 + classes), none's first; offsets (n, anchors, 4)."""

    scores: Tensor
    offsets: Tensor


class Normed(nn.Module):
    """Brings the channels of each cell to unit mean square, and multiplies each by its own gain; in FP32."""

    def __init__(self, channels: int, loudness: float) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(channels))
        self.epsilon = _EPSILON * loudness**2

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        wide = x.float()
        return wide * (wide.square().mean(dim=1, keepdim=True) + self.epsilon).rsqrt() * self.gain.view(1, -1, 1, 1)


class Detector(nn.Module):
    """Pictures (n, 3, size, size) of values 0 to 1 to what is `Found` in them."""

    anchors: Tensor

    def __init__(self, *, width: int = 12, size: int = PIXELS, loudness: float = 1.0) -> None:
        super().__init__()
        self.loudness = loudness
        self.fine = nn.Sequential(
            *_block(3, width, 2), *_block(width, 2 * width, 1), nn.MaxPool2d(2), *_block(2 * width, 2 * width, 1)
        )  # fmt: skip
        self.middle = nn.Sequential(*_block(2 * width, 4 * width, 2), *_block(4 * width, 4 * width, 1))
        self.coarse = nn.Sequential(*_block(4 * width, 4 * width, 2), *_block(4 * width, 4 * width, 1))
        channels = (2 * width, 4 * width, 4 * width)
        self.norms = nn.ModuleList(Normed(each, loudness) for each in channels)
        self.heads = nn.ModuleList(_head(each) for each in channels)
        self.register_buffer("anchors", anchors(size), persistent=False)

    def forward(self, pictures: Tensor) -> Found:
        """Scores and offsets of all default boxes, in the order of `anchors`."""
        fine = self.fine((pictures - 0.5) * self.loudness)
        middle = self.middle(fine)
        maps = (fine, middle, self.coarse(middle))
        rows = [head(norm(each)) for each, norm, head in zip(maps, self.norms, self.heads, strict=True)]
        flat = torch.cat([row.permute(0, 2, 3, 1).reshape(len(row), -1, 5 + len(CLASSES)) for row in rows], dim=1)
        return Found(flat[..., :-4], flat[..., -4:])


def detection_loss(found: Found, seen: Scenes, defaults: Tensor) -> Tensor:
    """SSD's loss, in FP32: of the class, and of the offsets of boxes that match; a mean over the latter.

    `defaults` are the detector's `anchors`. Of the boxes that match nothing, only the hardest count: in each picture
    three times as many as match.
    """
    target, boxes = matched(seen.boxes, seen.classes, defaults)
    matches = target > 0
    of_class = functional.cross_entropy(found.scores.float().flatten(0, 1), target.flatten(), reduction="none")
    of_class = of_class.view_as(target)
    hardness = of_class.detach().masked_fill(matches, -1.0)
    rank = hardness.argsort(dim=1, descending=True).argsort(dim=1)
    counted = matches | (rank < _NEGATIVES * matches.sum(dim=1, keepdim=True))
    offsets = encoded(boxes, defaults)[matches]
    of_box = functional.smooth_l1_loss(found.offsets.float()[matches], offsets, reduction="sum")
    return (of_class[counted].sum() + of_box) / matches.sum()


def _block(inputs: int, outputs: int, stride: int) -> tuple[nn.Module, nn.Module]:
    convolution = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
    nn.init.kaiming_normal_(convolution.weight)
    return convolution, nn.ReLU()


def _head(channels: int) -> nn.Conv2d:
    head = nn.Conv2d(channels, PER_CELL * (5 + len(CLASSES)), 3, padding=1)
    nn.init.normal_(head.weight, std=0.01)
    nn.init.zeros_(head.bias)  # pyright: ignore[reportArgumentType]
    return head
