"""A small character model of unit-scaled modules trains: in FP32, and in FP16 with no loss scale at all."""

import pytest
import torch
from torch import nn

import plimsoll as pl
from plimsoll.unit import nn as unn
from plimsoll.unit.optim import SGD, Adam, AdamW
from tests.support.made_text import made_text

CONTEXT = 16
TEXT = torch.tensor([ord(c) for c in made_text(20_000)])


class Characters(nn.Module):
    def __init__(self, width=32, tied=False):
        super().__init__()
        self.embedding = unn.Embedding(128, width)
        layer = unn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.body = unn.TransformerEncoder(layer, 2, unn.LayerNorm(width))
        self.head = unn.LinearReadout(width, 128, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.body(self.embedding(tokens), is_causal=True))


def trained(context, optimizer=AdamW, lr=0.25, steps=40, **keywords):
    torch.manual_seed(0)
    model = Characters(**keywords)
    stepper = optimizer(model, lr=lr)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        batch = TEXT[torch.randint(len(TEXT) - CONTEXT - 1, (16, 1), generator=generator) + torch.arange(CONTEXT + 1)]
        stepper.zero_grad()
        with context():
            logits = model(batch[:, :-1])
            loss = unn.CrossEntropyLoss()(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
            loss.backward()
        stepper.step()
        losses.append(loss.item())
    return sum(losses[-5:]) / 5, model


@pytest.fixture(scope="module")
def wide():
    return trained(torch.enable_grad)


def test_it_learns_in_fp32(wide):
    assert wide[0] < 1  # from 4.85; the text's own entropy is 0.61


def test_it_learns_as_well_in_fp16_without_a_loss_scale(wide):
    narrow, model = trained(lambda: pl.emulate("fp16"))
    assert narrow == pytest.approx(wide[0], rel=0.02)
    zeros = {n: (p.grad == 0).float().mean().item() for n, p in model.named_parameters() if "embedding" not in n}
    assert max(zeros.values()) < 0.01  # nothing underflows


@pytest.mark.parametrize(("optimizer", "lr"), [(Adam, 0.25), (SGD, 0.02)])
def test_other_optimizers_learn(optimizer, lr):
    assert trained(torch.enable_grad, optimizer, lr)[0] < 1


def test_tied_weights_learn(wide):
    assert trained(torch.enable_grad, tied=True)[0] < 1
