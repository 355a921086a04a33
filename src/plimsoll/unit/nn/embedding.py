"""A table of rows of unit variance."""

from typing import Any

import torch
from torch import Tensor, nn

from plimsoll.unit import functional as U  # noqa: N812
from plimsoll.unit.optim.parameter_kinds import tag


class Embedding(nn.Embedding):
    """`torch.nn.Embedding` at unit scale: torch's rows have unit variance already, the table's gradient gets a factor.

    Arguments, attributes and the state are torch's. The table's kind is "embedding".

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
            num_embeddings, embedding_dim, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse, _weight,
            _freeze, device, dtype,
        )  # fmt: skip
        tag(self, weight="embedding")

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (torch's name)
        """The rows of these indices, see `unit.functional.embedding`."""
        return U.embedding(
            input, self.weight, self.padding_idx, self.max_norm, self.norm_type, self.scale_grad_by_freq, self.sparse
        )
