"""A language model that is trained without an optimizer, as in a well-known example."""
# ruff: noqa: T201  (a script prints)

import torch
from torch import nn


class RNNModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.rnn, self.decoder = nn.Embedding(11, 6), nn.LSTM(6, 8), nn.Linear(8, 11)

    def forward(self, tokens, hidden):
        output, hidden = self.rnn(self.encoder(tokens), hidden)
        return self.decoder(output).flatten(0, 1), hidden


torch.manual_seed(0)
model, criterion = RNNModel(), nn.CrossEntropyLoss()
hidden = (torch.zeros(1, 3, 8), torch.zeros(1, 3, 8))
for _ in range(12):
    tokens = torch.randint(11, (6, 3))
    model.zero_grad()
    hidden = tuple(state.detach() for state in hidden)
    output, hidden = model(tokens[:-1], hidden)
    loss = criterion(output, tokens[1:].flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    for p in model.parameters():
        p.data.add_(p.grad, alpha=-2.0)
    print(repr(loss.item()))
