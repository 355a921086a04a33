"""Train at the level that is named, by the loop of `plimsoll.prepare`, and print each loss."""
# ruff: noqa: T201  (a script prints)

import sys

import torch
from torch import nn

import plimsoll as pl

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
with pl.prepare(model, optimizer, sys.argv[1]) as loop:
    for _ in range(30):
        x = torch.randn(64, 16)
        with loop.forward():
            loss = nn.functional.cross_entropy(model(x).float(), x[:, :4].argmax(dim=1))
        loop.step(loss)
        print(loss.item())
