"""Activations, softmax, dropout and losses as modules. None of them works in place."""

from typing import cast

from torch import Tensor, nn

from plimsoll.unit import functional as U  # noqa: N812
from plimsoll.unit.arguments import check_mult, check_not_inplace
from plimsoll.unit.formulas import Constraint
from plimsoll.unit.nn.layers import Constrained, Multiplied


class GELU(Multiplied, nn.GELU):
    """`torch.nn.GELU` of `mult * input` at unit scale. See `unit.functional.gelu`."""

    def __init__(
        self, approximate: str = "none", *, mult: float = 1.0, constraint: Constraint | None = "gmean"
    ) -> None:
        super().__init__(approximate)
        self._set_mult(mult, constraint)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (torch's name)
        """See `unit.functional.gelu`."""
        return U.gelu(input, self.approximate, mult=self.mult, constraint=self.constraint)


class SiLU(Multiplied, nn.SiLU):
    """`torch.nn.SiLU` of `mult * input` at unit scale, never in place."""

    def __init__(self, inplace: bool = False, *, mult: float = 1.0, constraint: Constraint | None = "gmean") -> None:
        check_not_inplace("SiLU", inplace)
        super().__init__()
        self._set_mult(mult, constraint)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (torch's name)
        """See `unit.functional.silu`."""
        return U.silu(input, mult=self.mult, constraint=self.constraint)


class ReLU(Constrained, nn.ReLU):
    """`torch.nn.ReLU` at unit scale, never in place."""

    def __init__(self, inplace: bool = False, *, constraint: Constraint | None = "gmean") -> None:
        check_not_inplace("ReLU", inplace)
        super().__init__()
        self._set_constraint(constraint)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (torch's name)
        """See `unit.functional.relu`."""
        return U.relu(input, constraint=self.constraint)


class Tanh(Multiplied, nn.Tanh):
    """`torch.nn.Tanh` of `mult * input` at unit scale. See `unit.functional.tanh`."""

    def __init__(self, *, mult: float = 1.0, constraint: Constraint | None = "gmean") -> None:
        super().__init__()
        self._set_mult(mult, constraint)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (torch's name)
        """See `unit.functional.tanh`."""
        return U.tanh(input, mult=self.mult, constraint=self.constraint)


class Sigmoid(Multiplied, nn.Sigmoid):
    """`torch.nn.Sigmoid` of `mult * input` at unit scale."""

    def __init__(self, *, mult: float = 1.0, constraint: Constraint | None = "gmean") -> None:
        super().__init__()
        self._set_mult(mult, constraint)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (torch's name)
        """See `unit.functional.sigmoid`."""
        return U.sigmoid(input, mult=self.mult, constraint=self.constraint)


class Softmax(Multiplied, nn.Softmax):
    """`torch.nn.Softmax` of `mult * input` at unit scale. `dim` is required."""

    def __init__(self, dim: int, *, mult: float = 1.0, constraint: Constraint | None = "gmean") -> None:
        super().__init__(dim)
        self._set_mult(mult, constraint)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (torch's name)
        """See `unit.functional.softmax`."""
        return U.softmax(input, cast("int", self.dim), mult=self.mult, constraint=self.constraint)


class Dropout(nn.Dropout):
    """`torch.nn.Dropout` at unit scale, never in place."""

    def __init__(self, p: float = 0.5, inplace: bool = False) -> None:
        check_not_inplace("Dropout", inplace)
        super().__init__(p)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (torch's name)
        """See `unit.functional.dropout`."""
        return U.dropout(input, self.p, self.training)


# -- losses, whose gradients start at unit scale; their values are torch's ---------------------------------------------


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
