"""Convolutions with kernels of unit variance, and pooling at unit scale."""

from collections.abc import Callable
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from plimsoll.errors import ArgumentError
from plimsoll.unit import functional as U  # noqa: N812
from plimsoll.unit.formulas import Constraint, Factors
from plimsoll.unit.nn.layers import Constrained, Weighted
from plimsoll.unit.optim.parameter_kinds import tag, tag_fan_in


class _Convolution(Weighted, nn.modules.conv._ConvNd):  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    """Base of `Conv1d` and `Conv2d`, which differ in their function alone."""

    _function: ClassVar[Callable[..., Tensor]]

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
        # The class of torch that comes next among the bases takes these. Its own base, _ConvNd, takes more.
        cast("Any", super()).__init__(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode, device, dtype
        )
        self._set_factors(constraint, factors)
        tag(self, weight="weight", bias="bias")

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (torch's name)
        """See `unit.functional.conv1d` and `unit.functional.conv2d`."""
        padding: Any = self.padding
        if self.padding_mode != "zeros":  # padded before the convolution, as torch does it
            input, padding = F.pad(input, self._reversed_padding_repeated_twice, mode=self.padding_mode), 0  # noqa: A001
        return self._function(
            input,
            self.weight,
            self.bias,
            self.stride,
            padding,
            self.dilation,
            self.groups,
            constraint=self.constraint,
            factors=self.factors,
        )


class Conv1d(_Convolution, nn.Conv1d):
    """`torch.nn.Conv1d` at unit scale. Arguments and state are torch's.

    The kernel's kind is "weight", the bias's "bias". `constraint` and `factors` are those of `Linear`.
    """

    _function = staticmethod(U.conv1d)


class Conv2d(_Convolution, nn.Conv2d):
    """`torch.nn.Conv2d` at unit scale. Everything else is as in `Conv1d`.

    >>> Conv2d(3, 8, 3, padding=1)(torch.randn(2, 3, 16, 16)).shape
    torch.Size([2, 8, 16, 16])
    """

    _function = staticmethod(U.conv2d)


class ConvTranspose2d(Weighted, nn.ConvTranspose2d):
    """`torch.nn.ConvTranspose2d` at unit scale, as `Conv1d`.

    `padding_mode` must be "zeros". For the learning rate, an output sums over input channels times kernel over stride.
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
        super().__init__(
            in_channels,
            out_channels,
            kernel_size,
            stride,
            padding,
            output_padding,
            groups,
            bias,
            dilation,
            padding_mode,
            device,
            dtype,
        )
        self._set_factors(constraint, factors)
        tag(self, weight="weight", bias="bias")
        steps = self.stride[0] * self.stride[1]
        tag_fan_in(self, weight=max(1, in_channels // groups * self.kernel_size[0] * self.kernel_size[1] // steps))

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:  # noqa: A002  (torch's name)
        """See `unit.functional.conv_transpose2d`. `output_size` is torch's."""
        whole: Any = self  # torch's types here are those of one particular number of dimensions
        output_padding = whole._output_padding(  # noqa: SLF001
            input, output_size, self.stride, self.padding, self.kernel_size, 2, self.dilation
        )
        return U.conv_transpose2d(
            input,
            self.weight,
            self.bias,
            self.stride,
            whole.padding,
            output_padding,
            self.groups,
            self.dilation,
            constraint=self.constraint,
            factors=self.factors,
        )


# -- pooling: means and largest values of windows ----------------------------------------------------------------------


class AvgPool2d(Constrained, nn.AvgPool2d):
    """`torch.nn.AvgPool2d` at unit scale. `divisor_override` must be None."""

    def __init__(
        self,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: None = None,
        *,
        constraint: Constraint | None = "gmean",
    ) -> None:
        if divisor_override is not None:
            raise ArgumentError(
                f"AvgPool2d: expected divisor_override=None, as the factor takes its place; got {divisor_override!r}. "
                "Leave it out."
            )
        super().__init__(kernel_size, stride, padding, ceil_mode, count_include_pad)
        self._set_constraint(constraint)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (torch's name)
        """See `unit.functional.avg_pool2d`."""
        return U.avg_pool2d(
            input,
            self.kernel_size,
            self.stride,
            self.padding,
            self.ceil_mode,
            self.count_include_pad,
            constraint=self.constraint,
        )


class MaxPool2d(Constrained, nn.MaxPool2d):
    """`torch.nn.MaxPool2d` at unit scale. `return_indices` must be False."""

    def __init__(
        self,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        return_indices: Literal[False] = False,
        ceil_mode: bool = False,
        *,
        constraint: Constraint | None = "gmean",
    ) -> None:
        if return_indices:
            raise ArgumentError(
                f"MaxPool2d: expected return_indices=False, as unpooling has no known scale; got {return_indices!r}. "
                "Leave it out."
            )
        super().__init__(kernel_size, stride, padding, dilation, ceil_mode=ceil_mode)
        self._set_constraint(constraint)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (torch's name)
        """See `unit.functional.max_pool2d`."""
        return U.max_pool2d(
            input,
            self.kernel_size,
            self.stride,
            self.padding,
            self.dilation,
            self.ceil_mode,
            constraint=self.constraint,
        )


class AdaptiveAvgPool2d(Constrained, nn.AdaptiveAvgPool2d):
    """`torch.nn.AdaptiveAvgPool2d` at unit scale."""

    def __init__(self, output_size: Any, *, constraint: Constraint | None = "gmean") -> None:
        super().__init__(output_size)
        self._set_constraint(constraint)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (torch's name)
        """See `unit.functional.adaptive_avg_pool2d`."""
        size: Any = self.output_size
        return U.adaptive_avg_pool2d(input, size, constraint=self.constraint)
