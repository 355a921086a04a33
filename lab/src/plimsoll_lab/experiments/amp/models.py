"""The three networks of the benchmark of A4: feed-forward with embeddings, a UNet of 7,703,497 parameters, BERT-base.

Sizes are those of the publication's own code where that names them: four depths of 64 to 512 channels, transposed
convolutions, batch norm behind ReLU, no padding and nine classes make the UNet's number of parameters exactly.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from plimsoll.errors import MissingExtraError
from plimsoll.extras import install_line

UNET_PARAMETERS = 7_703_497
CLASSES = 9
CATEGORIES = (1000, 7, 3, 12, 31, 2, 25, 26, 4, 3, 4, 23, 8, 12, 52, 22)  # the values of each categorical column
NUMBERS = 16  # numerical columns
_LEAST = 92  # the smallest picture that leaves a row after all convolutions without padding


class FeedForward(nn.Module):
    """Embeds categories, norms numbers, and puts both through three linear layers: one number for each row."""

    def __init__(self, widths: Sequence[int] = (1000, 500)) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(count, min(50, (count + 1) // 2)) for count in CATEGORIES)
        self.norm = nn.BatchNorm1d(NUMBERS)
        inputs = sum(min(50, (count + 1) // 2) for count in CATEGORIES) + NUMBERS
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise((inputs, *widths)):
            layers += [nn.Linear(before, after), nn.ReLU(), nn.BatchNorm1d(after)]
        self.layers = nn.Sequential(*layers, nn.Linear(widths[-1], 1))

    def forward(self, categories: Tensor, numbers: Tensor) -> Tensor:
        """What is predicted of each row, (n,)."""
        embedded = [embed(categories[:, column]) for column, embed in enumerate(self.embeddings)]
        return self.layers(torch.cat([*embedded, self.norm(numbers)], dim=1)).squeeze(1)


class UNet(nn.Module):
    """The UNet of the benchmark; `width`: the channels of its first depth, of which each next has twice as many."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        widths = [width * 2**depth for depth in range(4)]
        self.down = nn.ModuleList(_block(before, after) for before, after in itertools.pairwise([3, *widths]))
        up = list(itertools.pairwise(widths[::-1]))
        self.rise = nn.ModuleList(nn.ConvTranspose2d(before, after, 2, stride=2) for before, after in up)
        self.up = nn.ModuleList(_block(before, after) for before, after in up)
        self.head = nn.Conv2d(width, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        """The score of each class at each place of the middle of the pictures, (n, 9, side, side)."""
        kept: list[Tensor] = []
        for depth, block in enumerate(self.down):
            x = block(nn.functional.max_pool2d(x, 2) if depth else x)
            kept.append(x)
        for rise, block, beside in zip(self.rise, self.up, kept[-2::-1], strict=True):
            x = rise(x)
            x = block(torch.cat([middle(beside, x.shape[-1]), x], dim=1))
        return self.head(x)


def _block(inputs: int, outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before in (inputs, outputs):
        layers += [nn.Conv2d(before, outputs, 3), nn.ReLU(), nn.BatchNorm2d(outputs)]
        nn.init.kaiming_normal_(layers[-3].weight)  # pyright: ignore[reportArgumentType]
    return nn.Sequential(*layers)


def middle(x: Tensor, side: int) -> Tensor:
    """The middle of so many places in both of the last dimensions."""
    start = (x.shape[-1] - side) // 2
    return x[..., start : start + side, start : start + side]


def side_of(pixels: int) -> int:
    """The side of what the UNet gives for pictures of so many pixels a side.

    >>> side_of(256)
    164
    """
    side = pixels
    for _ in range(3):
        side = (side - 4) // 2
    side -= 4
    for _ in range(3):
        side = side * 2 - 4
    return side


def bert(**sizes: Any) -> nn.Module:
    """The BERT-base of transformers, with a head for spans, weights drawn at random; `sizes`: of its configuration.

    Attention is computed by separate products, as it was in the benchmark's time.
    """
    transformers = needed_transformers()
    config = transformers.BertConfig(attn_implementation="eager", **sizes)
    return transformers.BertForQuestionAnswering(config)


def needed_transformers() -> Any:
    """The package, or an error that names the extra it belongs to."""
    try:
        import transformers  # optional, and slow to import
    except ImportError as e:
        raise MissingExtraError(
            "lab amp: expected the package transformers, whose BERT is measured; got none. "
            f"Install it: {install_line('transformers')}"
        ) from e
    return transformers


def count(model: nn.Module) -> int:
    """How many parameters it has."""
    return sum(p.numel() for p in model.parameters())
