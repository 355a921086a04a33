"""Models that several folders test."""

from torch import Tensor, nn


class Halves(nn.Module):
    """Two results of one operation: of the one that nothing uses, hooks get None as the gradient."""

    def __init__(self, inputs: int = 8, outputs: int = 16) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.linear(x).chunk(2, dim=-1)
