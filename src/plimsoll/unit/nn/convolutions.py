"""Convolutions with kernels of unit variance."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from plimsoll.errors import ArgumentError
from plimsoll.unit import functional as U  # noqa: N812
from plimsoll.unit.factors.constraints import Constraint, check_constraint
from plimsoll.unit.factors.formulas import Factors
from plimsoll.unit.nn.initialization import draw_unit, own_settings
from plimsoll.unit.optim.parameter_kinds import tag, tag_fan_in


class _Convolution(nn.modules.conv._ConvNd):  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    """What the convolutions share: how they are drawn, and their settings."""

    constraint: Constraint | None
    factors: Factors | None

    def _set_up(self, constraint: Constraint | None, factors: Factors | None) -> None:
        check_constraint(type(self).__name__, constraint)
        self.constraint, self.factors = constraint, factors
        tag(self, weight="weight", bias="bias")

    def reset_parameters(self) -> None:
        """Draws the kernel anew: normal, of unit variance; the bias becomes zero."""
        draw_unit(self.weight, self.bias)

    def _padded(self, x: Tensor) -> tuple[Tensor, Any]:
        """The input and what padding is left to do: a mode other than zeros is done beforehand, as torch does it."""
        if self.padding_mode == "zeros":
            return x, self.padding
        return F.pad(x, self._reversed_padding_repeated_twice, mode=self.padding_mode), 0

    def extra_repr(self) -> str:
        """torch's, and the factors' origin."""
        return super().extra_repr() + own_settings(constraint=self.constraint, factors=self.factors)


class Conv1d(_Convolution, nn.Conv1d):
    """`torch.nn.Conv1d` at unit scale, see `unit.functional.conv1d`; arguments and state are torch's.

    The kernel's kind is "weight", the bias's "bias". By keyword come `constraint` and `factors`, as in `Linear`.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Any,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: Any = "zeros",
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        constraint: Constraint | None = "gmean",
        factors: Factors | None = None,
    ) -> None:
        nn.Conv1d.__init__(
            self, in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode, device,
            dtype,
        )  # fmt: skip
        self._set_up(constraint, factors)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (torch's name)
        """See `unit.functional.conv1d`."""
        x, padding = self._padded(input)
        return U.conv1d(
            x, self.weight, self.bias, self.stride, padding, self.dilation, self.groups, constraint=self.constraint,
            factors=self.factors,
        )  # fmt: skip


class Conv2d(_Convolution, nn.Conv2d):
    """`torch.nn.Conv2d` at unit scale, see `unit.functional.conv2d`; as `Conv1d`.

    >>> Conv2d(3, 8, 3, padding=1)(torch.randn(2, 3, 16, 16)).shape
    torch.Size([2, 8, 16, 16])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Any,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: Any = "zeros",
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        constraint: Constraint | None = "gmean",
        factors: Factors | None = None,
    ) -> None:
        nn.Conv2d.__init__(
            self, in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode, device,
            dtype,
        )  # fmt: skip
        self._set_up(constraint, factors)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (torch's name)
        """See `unit.functional.conv2d`."""
        x, padding = self._padded(input)
        return U.conv2d(
            x, self.weight, self.bias, self.stride, padding, self.dilation, self.groups, constraint=self.constraint,
            factors=self.factors,
        )  # fmt: skip


class ConvTranspose2d(_Convolution, nn.ConvTranspose2d):
    """`torch.nn.ConvTranspose2d` at unit scale, see `unit.functional.conv_transpose2d`; as `Conv1d`.

    Padding must be zeros. For the learning rate an output sums over input channels times kernel over stride.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Any,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: Any = 1,
        padding_mode: Any = "zeros",
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        constraint: Constraint | None = "gmean",
        factors: Factors | None = None,
    ) -> None:
        if padding_mode != "zeros":
            raise ArgumentError(
                f"ConvTranspose2d: expected padding_mode='zeros', the only one torch has for it; got {padding_mode!r}. "
                "Leave it out."
            )
        nn.ConvTranspose2d.__init__(
            self, in_channels, out_channels, kernel_size, stride, padding, output_padding, groups, bias, dilation,
            padding_mode, device, dtype,
        )  # fmt: skip
        self._set_up(constraint, factors)
        steps = self.stride[0] * self.stride[1]
        tag_fan_in(self, weight=max(1, in_channels // groups * self.kernel_size[0] * self.kernel_size[1] // steps))

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:  # noqa: A002  (torch's name)
        """See `unit.functional.conv_transpose2d`; `output_size` as torch's."""
        whole: Any = self  # torch's types here are those of one particular number of dimensions
        output_padding = whole._output_padding(  # noqa: SLF001
            input, output_size, self.stride, self.padding, self.kernel_size, 2, self.dilation
        )
        return U.conv_transpose2d(
            input, self.weight, self.bias, self.stride, whole.padding, output_padding, self.groups, self.dilation,
            constraint=self.constraint, factors=self.factors,
        )  # fmt: skip
