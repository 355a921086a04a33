"""Normalisations: their weights begin at one and their biases at zero, as torch's do; the gradients get factors."""

from typing import Any

import torch
from torch import Tensor, nn

from plimsoll.unit import functional as U  # noqa: N812
from plimsoll.unit._kinds import tag


class LayerNorm(nn.LayerNorm):
    """`torch.nn.LayerNorm` whose parameters' gradients are at unit scale. Arguments and state are torch's."""

    def __init__(
        self,
        normalized_shape: Any,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)
        tag(self, weight="norm", bias="bias")

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (torch's name)
        """See `unit.functional.layer_norm`."""
        return U.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)
