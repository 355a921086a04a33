"""A small convolutional network with batch norm, and the pictures that it is trained on: which two shapes are there?

The pictures are those of `clip._data`. Two shapes of four kinds, whichever comes first, make ten classes.
"""

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from plimsoll_lab.experiments.clip.data import SHAPES, VOCABULARY, make_batch

_PAIRS = [(one, other) for one in range(len(SHAPES)) for other in range(one, len(SHAPES))]
CLASSES = len(_PAIRS)
_FIRST_SHAPE = VOCABULARY.index(SHAPES[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Pictures:
    """Pictures (n, 3, 32, 32), values about zero, and the class of each."""

    pixels: Tensor
    classes: Tensor


def make_pictures(seed: int, step: int, size: int, device: str = "cpu") -> Pictures:
    """The batch of that step; it follows from the seed and the step alone."""
    batch = make_batch(seed, step, size)
    return Pictures(
        pixels=(batch.pictures * 2.0 - 0.5).to(device), classes=classes_of(batch.captions).to(device)
    )  # fmt: skip


def classes_of(captions: Tensor) -> Tensor:
    """The class of each caption's picture: the number of its pair of shapes."""
    shapes = captions - _FIRST_SHAPE
    named = (shapes >= 0) & (shapes < len(SHAPES))
    both = shapes[named].view(len(captions), 2).sort(dim=1).values
    numbers = torch.full((len(SHAPES), len(SHAPES)), -1)
    for number, (one, other) in enumerate(_PAIRS):
        numbers[one, other] = number
    return numbers[both[:, 0], both[:, 1]]


class SmallNet(nn.Module):
    """Three convolutions, each with batch norm, ReLU and pooling; the mean over places; a linear layer."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        widths = (3, width, 2 * width, 4 * width)
        self.convolutions = nn.ModuleList(
            nn.Conv2d(before, after, 3, padding=1, bias=False) for before, after in itertools.pairwise(widths)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(after) for after in widths[1:])
        self.head = nn.Linear(widths[-1], CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """The score of each class, (n, 10)."""
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = nn.functional.max_pool2d(torch.relu(norm(convolution(x))), 2)
        return self.head(x.mean(dim=(2, 3)))


def loss_of(scores: Tensor, classes: Tensor) -> Tensor:
    """The mean cross-entropy, in FP32 (N6): of FP16 scores torch's own lists would round the logarithms to FP16."""
    return nn.functional.cross_entropy(scores.float(), classes)
