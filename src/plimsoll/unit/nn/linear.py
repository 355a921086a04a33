"""Matrix products and tables with weights of unit variance."""

from typing import Any

import torch
from torch import Tensor, nn

from plimsoll.unit import functional as U  # noqa: N812  (as F for torch's)
from plimsoll.unit.formulas import Constraint, Factors
from plimsoll.unit.nn.base import Weighted
from plimsoll.unit.optim.parameter_kinds import tag


class Linear(Weighted, nn.Linear):
    """`torch.nn.Linear` at unit scale: a weight of unit variance, with factors.

    Arguments, attributes and state are torch's. The weight's kind is "weight", the bias's "bias".

    Args:
        in_features: Size of an input's last dimension.
        out_features: Size of an output's last dimension.
        bias: Whether a bias is added. It starts at zero. Default: True.
        device: Device of the parameters. Default: torch's.
        dtype: Dtype of the parameters. Default: torch's.
        constraint: How the factors of output and input's gradient become one. None leaves each ideal. See
            `unit.functional.linear`. Default: `"gmean"`.
        factors: Custom factors. They replace the ideal ones and the constraint.

    Raises:
        ArgumentError: The constraint is unknown.

    >>> layer = Linear(1024, 64, constraint=None)
    >>> round(layer(torch.randn(64, 1024)).std().item(), 1)
    1.0
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        constraint: Constraint | None = "gmean",
        factors: Factors | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self._set_factors(constraint, factors)
        tag(self, weight="weight", bias="bias")

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (torch's name)
        """See `unit.functional.linear`."""
        return U.linear(input, self.weight, self.bias, constraint=self.constraint, factors=self.factors)


class LinearReadout(Linear):
    """Last product of a model: `Linear` with outputs of fan_in^-1 times the sums.

    So outputs start small. That is u-muP's rule for outputs. The first step moves them equally at any width. Only the
    loss follows, which is a cut edge, so there is no constraint by default. The weight's kind is "readout". Arguments
    are those of `Linear`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        constraint: Constraint | None = None,
        factors: Factors | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype, constraint=constraint, factors=factors)
        tag(self, weight="readout")

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (torch's name)
        """See `unit.functional.linear_readout`."""
        return U.linear_readout(input, self.weight, self.bias, constraint=self.constraint, factors=self.factors)


class Embedding(nn.Embedding):
    """`torch.nn.Embedding` with a factor for the table's gradient.

    Torch draws rows with unit variance already. Arguments, attributes and state are torch's. The table's kind is
    "embedding".

    >>> table = Embedding(100, 16)
    >>> table(torch.tensor([3, 5])).shape
    torch.Size([2, 16])
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        _weight: Tensor | None = None,
        _freeze: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            num_embeddings,
            embedding_dim,
            padding_idx,
            max_norm,
            norm_type,
            scale_grad_by_freq,
            sparse,
            _weight,
            _freeze,
            device,
            dtype,
        )
        tag(self, weight="embedding")

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (torch's name)
        """See `unit.functional.embedding`."""
        return U.embedding(
            input, self.weight, self.padding_idx, self.max_norm, self.norm_type, self.scale_grad_by_freq, self.sparse
        )
