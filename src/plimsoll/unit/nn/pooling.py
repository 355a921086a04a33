"""Pooling at unit scale: means and largest values of windows."""

from typing import Any, Literal

from torch import Tensor, nn

from plimsoll.errors import ArgumentError
from plimsoll.unit import functional as U  # noqa: N812
from plimsoll.unit.factors.formulas import Constraint
from plimsoll.unit.nn.base import Constrained


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
