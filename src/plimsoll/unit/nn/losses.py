"""Losses whose gradients start at unit scale. Their values are torch's."""

from torch import Tensor, nn

from plimsoll.unit import functional as U  # noqa: N812
from plimsoll.unit.arguments import check_mult


class CrossEntropyLoss(nn.CrossEntropyLoss):
    """`torch.nn.CrossEntropyLoss` of `mult * input`."""

    def __init__(
        self,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        *,
        mult: float = 1.0,
    ) -> None:
        check_mult("CrossEntropyLoss", mult)
        super().__init__(weight, size_average, ignore_index, reduce, reduction, label_smoothing)
        self.mult = mult

    def forward(self, input: Tensor, target: Tensor) -> Tensor:  # noqa: A002  (torch's name)
        """See `unit.functional.cross_entropy`."""
        return U.cross_entropy(
            input, target, self.weight, self.ignore_index, self.reduction, self.label_smoothing, mult=self.mult
        )


class MSELoss(nn.MSELoss):
    """`torch.nn.MSELoss`. See `unit.functional.mse_loss`. Arguments are torch's."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:  # noqa: A002  (torch's name)
        """See `unit.functional.mse_loss`."""
        return U.mse_loss(input, target, self.reduction)
