"""Bases of the modules, matrix products, tables and normalizations."""

from typing import Any, cast

import torch
from torch import Tensor, nn

from plimsoll.unit import functional as U  # noqa: N812  (as F for torch's)
from plimsoll.unit.arguments import check_mult
from plimsoll.unit.formulas import Constraint, Factors, check_constraint
from plimsoll.unit.optim.parameter_kinds import tag

# -- bases: settings of unit scaling, weights of unit variance ---------------------------------------------------------


class Constrained(nn.Module):
    """Base of modules with a constraint, placed before torch's module."""

    constraint: Constraint | None

    def _set_constraint(self, constraint: Constraint | None) -> None:
        check_constraint(type(self).__name__, constraint)
        self.constraint = constraint

    def extra_repr(self) -> str:
        """Return torch's text, then the settings of unit scaling that are not None."""
        settings = {name: getattr(self, name, None) for name in ("mult", "constraint", "factors")}
        texts = [f"{name}={value!r}" for name, value in settings.items() if value is not None]
        return ", ".join(text for text in (super().extra_repr(), *texts) if text)


class Multiplied(Constrained):
    """Base of modules that multiply the input of their non-linearity."""

    mult: float

    def _set_mult(self, mult: float, constraint: Constraint | None) -> None:
        check_mult(type(self).__name__, mult)
        self.mult = mult
        self._set_constraint(constraint)


class Weighted(Constrained):
    """Base of modules with a weight of unit variance, and with custom factors."""

    weight: Any
    bias: Any
    factors: Factors | None

    def _set_factors(self, constraint: Constraint | None, factors: Factors | None) -> None:
        self._set_constraint(constraint)
        self.factors = factors

    def reset_parameters(self) -> None:
        """Draw the weight again: normal, with unit variance. The bias becomes zero."""
        draw_unit(self.weight, self.bias)


def draw_unit(weight: Tensor, bias: Tensor | None = None) -> None:
    """Draw a normal weight with unit variance, and set the bias to zero."""
    with torch.no_grad():
        weight.normal_()
        if bias is not None:
            bias.zero_()


# -- matrix products and tables with weights of unit variance ----------------------------------------------------------


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


# -- normalizations, with factors for the gradients of their parameters ------------------------------------------------

# The constructors are torch's, which end with `reset_parameters`.


class _Affine(nn.Module):
    """Base of norms with a weight and a bias."""

    def reset_parameters(self) -> None:
        """Set the weight to one and the bias to zero, and give them their kinds."""
        cast("Any", super()).reset_parameters()
        tag(self, weight="norm", bias="bias")


class LayerNorm(_Affine, nn.LayerNorm):
    """`torch.nn.LayerNorm` whose parameters' gradients are at unit scale."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (torch's name)
        """See `unit.functional.layer_norm`."""
        return U.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


class RMSNorm(nn.RMSNorm):
    """`torch.nn.RMSNorm` whose weight's gradient is at unit scale."""

    def reset_parameters(self) -> None:
        """Set the weight to one, as torch does, and give it its kind."""
        super().reset_parameters()
        tag(self, weight="norm")

    def forward(self, x: Tensor) -> Tensor:
        """See `unit.functional.rms_norm`."""
        return U.rms_norm(x, self.normalized_shape, self.weight, self.eps)


class GroupNorm(_Affine, nn.GroupNorm):
    """`torch.nn.GroupNorm` whose parameters' gradients are at unit scale."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (torch's name)
        """See `unit.functional.group_norm`."""
        return U.group_norm(input, self.num_groups, self.weight, self.bias, self.eps)


class BatchNorm2d(_Affine, nn.BatchNorm2d):
    """`torch.nn.BatchNorm2d` whose parameters' gradients are at unit scale.

    In evaluation it divides by the running deviation, so its output is at unit scale if that follows the data.
    """

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (torch's name)
        """See `unit.functional.batch_norm`. Buffers are counted and averaged as in torch."""
        self._check_input_dim(input)
        mean, var = self.running_mean, self.running_var
        by_batch = self.training or (mean is None and var is None)
        momentum = self._counted() if self.training else self.momentum
        if self.training and not self.track_running_stats:
            mean = var = None
        return U.batch_norm(
            input, mean, var, self.weight, self.bias, by_batch, 0.0 if momentum is None else momentum, self.eps
        )

    def _counted(self) -> float | None:
        """Count the batch, and return its share in the running statistics."""
        if not self.track_running_stats or self.num_batches_tracked is None:
            return self.momentum
        self.num_batches_tracked.add_(1)
        return 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
