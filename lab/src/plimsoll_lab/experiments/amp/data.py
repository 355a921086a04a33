"""Made data for the three networks: rows of a table, scenes to be segmented, and texts with a span to be found.

A batch follows from the seed and the step alone. Nothing is downloaded.
"""

import torch
from torch import Tensor

from plimsoll_lab.experiments.amp.models import CATEGORIES, CLASSES, NUMBERS, middle, side_of

_EFFECTS = 20  # the seed of the rule that tables follow, the same one for all seeds
_THINGS = 6  # discs in a scene
_KINDS = 8  # of spans that may be asked for
_CLS, _SEP = 101, 102  # of BERT's vocabulary
_FIRST_WORD = 1000  # below it are special tokens and characters


def make_rows(seed: int, step: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Categories (n, 16), numbers (n, 16), and the target of each row: effects of both, and noise."""
    generator, rule = _generator(seed, step), torch.Generator().manual_seed(_EFFECTS)
    categories = torch.stack([torch.randint(many, (size,), generator=generator) for many in CATEGORIES], dim=1)
    numbers = torch.randn(size, NUMBERS, generator=generator)
    target = 0.1 * torch.randn(size, generator=generator)
    for column, many in enumerate(CATEGORIES):
        target += 0.25 * torch.randn(many, generator=rule)[categories[:, column]]
    weights = torch.randn(NUMBERS, 4, generator=rule) / NUMBERS**0.5
    target += torch.tanh(numbers @ weights).sum(dim=1)
    return categories, numbers, target


def make_scenes(seed: int, step: int, size: int, pixels: int) -> tuple[Tensor, Tensor]:
    """Pictures (n, 3, pixels, pixels), and the class of each place in the middle that the UNet gives scores for.

    Sky above ground, and discs of seven other classes before them, each class in a colour of its own, under noise.
    """
    generator = _generator(seed, step)
    y, x = torch.meshgrid(torch.arange(pixels), torch.arange(pixels), indexing="ij")
    horizon = pixels * (0.3 + 0.4 * torch.rand(size, 1, 1, generator=generator))
    classes = (y > horizon).long()
    for _ in range(_THINGS):
        across, down, radius = torch.rand(3, size, 1, 1, generator=generator)
        inside = (x - across * pixels).square() + (y - down * pixels).square() < (pixels * (0.05 + 0.12 * radius)) ** 2
        kind = torch.randint(2, CLASSES, (size, 1, 1), generator=generator)
        classes = torch.where(inside, kind, classes)
    colours = torch.randn(CLASSES, 3, generator=torch.Generator().manual_seed(_EFFECTS))
    pictures = colours[classes].permute(0, 3, 1, 2) + 0.5 * torch.randn(size, 3, pixels, pixels, generator=generator)
    return pictures, middle(classes, side_of(pixels)).contiguous()


def make_spans(seed: int, step: int, size: int, length: int, words: int) -> dict[str, Tensor]:
    """Texts of so many tokens as BERT takes them: a kind is asked for, and a span of words of that kind is in the text.

    All other words are of other kinds. `words`: of the vocabulary.
    """
    generator = _generator(seed, step)
    kinds = torch.randint(_KINDS, (size, 1), generator=generator)
    many = (words - _FIRST_WORD) // _KINDS
    drawn = torch.randint(many, (size, length), generator=generator)
    others = (kinds + torch.randint(1, _KINDS, (size, length), generator=generator)) % _KINDS
    start = torch.randint(3, length - 6, (size, 1), generator=generator)
    end = start + torch.randint(5, (size, 1), generator=generator)
    places = torch.arange(length)
    tokens = _FIRST_WORD + torch.where((places >= start) & (places <= end), kinds, others) + drawn * _KINDS
    tokens[:, 0], tokens[:, 1:2], tokens[:, 2], tokens[:, -1] = _CLS, _FIRST_WORD + kinds, _SEP, _SEP
    kinds_of_text = (places > 2).long().expand(size, length).contiguous()
    return {
        "input_ids": tokens, "token_type_ids": kinds_of_text,
        "start_positions": start.squeeze(1), "end_positions": end.squeeze(1),
    }  # fmt: skip


def _generator(seed: int, step: int) -> torch.Generator:
    return torch.Generator().manual_seed(100_003 * seed + step)
