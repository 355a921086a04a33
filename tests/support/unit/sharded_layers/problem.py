"""A small model and its batches, the same on every rank."""

import torch
from torch import nn

from plimsoll.unit import nn as unn

# The bias of the keys has no gradient but rounding, since a softmax does not see it. With Adam's usual epsilon such
# noise becomes steps of full size, which no two processes have alike.
EPS = 1e-3


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = unn.Embedding(12, 16)
        layer = unn.TransformerEncoderLayer(16, 2, 32, 0.0, "gelu", batch_first=True, norm_first=True)
        self.body = unn.TransformerEncoder(layer, 2, unn.LayerNorm(16))
        self.head = unn.LinearReadout(16, 12)

    def forward(self, tokens):
        return self.head(self.body(self.embedding(tokens), is_causal=True))


def network():
    torch.manual_seed(0)
    return Network()


def batch(step):
    return torch.randint(12, (8, 9), generator=torch.Generator().manual_seed(step))


def loss_of(model, tokens):
    return unn.CrossEntropyLoss()(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
