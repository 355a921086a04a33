"""A script that fails in its third step."""
# ruff: noqa: T201  (a script prints)

import atexit

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 3:
            raise RuntimeError("the data are used up")
        return self.layer(x)


atexit.register(print, "goodbye")
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    print("step", step)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
