"""Functions of one number as modules. They work on a copy always: a scaled result does not fit into its input."""

from torch import Tensor, nn

from plimsoll.unit import functional as U  # noqa: N812
from plimsoll.unit.factors.constraints import Constraint, check_constraint
from plimsoll.unit.functional.random_masks import refuse_inplace
from plimsoll.unit.nn.initialization import check_mult, own_settings


class GELU(nn.GELU):
    """`torch.nn.GELU` of `mult * input` at unit scale, see `unit.functional.gelu`."""

    def __init__(
        self, approximate: str = "none", *, mult: float = 1.0, constraint: Constraint | None = "gmean"
    ) -> None:
        check_constraint("GELU", constraint)
        check_mult("GELU", mult)
        super().__init__(approximate)
        self.mult = mult
        self.constraint: Constraint | None = constraint

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (torch's name)
        """See `unit.functional.gelu`."""
        return U.gelu(input, self.approximate, mult=self.mult, constraint=self.constraint)

    def extra_repr(self) -> str:
        """torch's, and the settings of unit scaling."""
        return super().extra_repr() + own_settings(mult=self.mult, constraint=self.constraint)


class SiLU(nn.SiLU):
    """`torch.nn.SiLU` of `mult * input` at unit scale, see `unit.functional.silu`. `inplace` must be False."""

    def __init__(self, inplace: bool = False, *, mult: float = 1.0, constraint: Constraint | None = "gmean") -> None:
        refuse_inplace("SiLU", inplace)
        check_constraint("SiLU", constraint)
        check_mult("SiLU", mult)
        super().__init__()
        self.mult = mult
        self.constraint: Constraint | None = constraint

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (torch's name)
        """See `unit.functional.silu`."""
        return U.silu(input, mult=self.mult, constraint=self.constraint)

    def extra_repr(self) -> str:
        """The settings of unit scaling."""
        return own_settings(mult=self.mult, constraint=self.constraint)[2:]


class ReLU(nn.ReLU):
    """`torch.nn.ReLU` at unit scale, see `unit.functional.relu`. `inplace` must be False; ReLU needs no mult."""

    def __init__(self, inplace: bool = False, *, constraint: Constraint | None = "gmean") -> None:
        refuse_inplace("ReLU", inplace)
        check_constraint("ReLU", constraint)
        super().__init__()
        self.constraint: Constraint | None = constraint

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (torch's name)
        """See `unit.functional.relu`."""
        return U.relu(input, constraint=self.constraint)

    def extra_repr(self) -> str:
        """The constraint."""
        return own_settings(constraint=self.constraint)[2:]


class Tanh(nn.Tanh):
    """`torch.nn.Tanh` of `mult * input` at unit scale, see `unit.functional.tanh`."""

    def __init__(self, *, mult: float = 1.0, constraint: Constraint | None = "gmean") -> None:
        check_constraint("Tanh", constraint)
        check_mult("Tanh", mult)
        super().__init__()
        self.mult = mult
        self.constraint: Constraint | None = constraint

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (torch's name)
        """See `unit.functional.tanh`."""
        return U.tanh(input, mult=self.mult, constraint=self.constraint)

    def extra_repr(self) -> str:
        """The settings of unit scaling."""
        return own_settings(mult=self.mult, constraint=self.constraint)[2:]


class Sigmoid(nn.Sigmoid):
    """`torch.nn.Sigmoid` of `mult * input` at unit scale, see `unit.functional.sigmoid`."""

    def __init__(self, *, mult: float = 1.0, constraint: Constraint | None = "gmean") -> None:
        check_constraint("Sigmoid", constraint)
        check_mult("Sigmoid", mult)
        super().__init__()
        self.mult = mult
        self.constraint: Constraint | None = constraint

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (torch's name)
        """See `unit.functional.sigmoid`."""
        return U.sigmoid(input, mult=self.mult, constraint=self.constraint)

    def extra_repr(self) -> str:
        """The settings of unit scaling."""
        return own_settings(mult=self.mult, constraint=self.constraint)[2:]
