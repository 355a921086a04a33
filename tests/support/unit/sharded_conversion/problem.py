"""The model and the batch of the sharded test, the same on every rank and without ranks."""

import torch
from torch import Tensor

import plimsoll as pl
from tests.support.unit.models import GPT


def batch() -> dict[str, Tensor]:
    tokens = torch.randint(0, 64, (8, 17), generator=torch.Generator().manual_seed(0))
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def converted() -> pl.unit.Converted:
    return pl.unit.convert(GPT(), batch(), seed=0)
