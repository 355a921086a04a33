"""Dropout and softmax at unit scale."""

from typing import cast

from torch import Tensor, nn

from plimsoll.unit import functional as U  # noqa: N812
from plimsoll.unit.factors.constraints import Constraint, check_constraint
from plimsoll.unit.functional.random_masks import refuse_inplace
from plimsoll.unit.nn.initialization import check_mult, own_settings


class Dropout(nn.Dropout):
    """`torch.nn.Dropout` at unit scale, see `unit.functional.dropout`. `inplace` must be False."""

    def __init__(self, p: float = 0.5, inplace: bool = False) -> None:
        refuse_inplace("Dropout", inplace)
        super().__init__(p)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (torch's name)
        """See `unit.functional.dropout`."""
        return U.dropout(input, self.p, self.training)


class Softmax(nn.Softmax):
    """`torch.nn.Softmax` of `mult * input` at unit scale, see `unit.functional.softmax`. `dim` must be given."""

    def __init__(self, dim: int, *, mult: float = 1.0, constraint: Constraint | None = "gmean") -> None:
        check_constraint("Softmax", constraint)
        check_mult("Softmax", mult)
        super().__init__(dim)
        self.mult = mult
        self.constraint: Constraint | None = constraint

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (torch's name)
        """See `unit.functional.softmax`."""
        dim = cast("int", self.dim)
        return U.softmax(input, dim, mult=self.mult, constraint=self.constraint)

    def extra_repr(self) -> str:
        """torch's, and the settings of unit scaling."""
        return super().extra_repr() + own_settings(mult=self.mult, constraint=self.constraint)
