"""Transformer layers and stacks: `torch.nn`'s, their names, arguments and state, at unit scale.

Every branch is weighted (`_residual`), its weight applied backward at its start. torch's fused fast path for inference
is not taken: it knows no factors.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from plimsoll.errors import ArgumentError
from plimsoll.unit import functional as U  # noqa: N812
from plimsoll.unit.factors.constraints import Constraint
from plimsoll.unit.functional.sums import check_tau
from plimsoll.unit.nn.attention import MultiheadAttention
from plimsoll.unit.nn.dropout import Dropout
from plimsoll.unit.nn.mlp import activation_from, chained
from plimsoll.unit.nn.normalization import LayerNorm
from plimsoll.unit.nn.residual import residual_tau, spread


class _Layer(nn.Module):
    """What both layers share: parts that torch's constructor has put there become unit-scaled ones."""

    taus: list[float]
    norm_first: bool

    def _replace_parts(
        self, attentions: tuple[str, ...], width: int, heads: int, hidden: int, dropout: float, activation: object,
        eps: float, batch_first: bool, bias: bool, device: Any, dtype: Any, mult: float, constraint: Constraint | None,
        taus: tuple[float, ...] | None,
    ) -> None:  # fmt: skip
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        branches = len(attentions) + 1
        for name in attentions:
            attention = MultiheadAttention(
                width, heads, dropout, bias, batch_first=batch_first, mult=mult, constraint=constraint, **made
            )
            setattr(self, name, attention)
        self.linear1, self.linear2 = chained(width, hidden, width, bias, constraint, device, dtype)
        for name in ("dropout", *(f"dropout{i + 1}" for i in range(branches))):
            setattr(self, name, Dropout(dropout))
        for i in range(branches):
            setattr(self, f"norm{i + 1}", LayerNorm(width, eps, bias=bias, **made))
        delattr(self, "activation")
        self.activation = activation_from(type(self).__name__, activation, constraint)
        self.taus = [residual_tau(i, 1) for i in range(branches)] if taus is None else list(taus)
        _check_taus(type(self).__name__, self.taus, branches)

    def _residual(self, index: int, x: Tensor, branch: Callable[[Tensor], Tensor]) -> Tensor:
        """One branch: its norm before it, or behind the sum."""
        norm: Callable[[Tensor], Tensor] = getattr(self, f"norm{index + 1}")
        start, skip = U.residual_split(x, self.taus[index])
        if self.norm_first:
            return U.residual_add(branch(norm(start)), skip, self.taus[index])
        return norm(U.residual_add(branch(start), skip, self.taus[index]))

    def __setstate__(self, state: dict[str, Any]) -> None:
        # torch's layers put a plain activation into a state that seems to have none; ours is a module, and is there.
        nn.Module.__setstate__(self, state)

    def extra_repr(self) -> str:
        """The branches' shares."""
        return f"taus=({', '.join(f'{tau:.4g}' for tau in self.taus)})"


class TransformerEncoderLayer(_Layer, nn.TransformerEncoderLayer):
    """`torch.nn.TransformerEncoderLayer` at unit scale; arguments, names and state are torch's.

    Args:
        d_model: the width.
        nhead: how many heads.
        dim_feedforward: the width within the feed-forward part.
        dropout: probability, in attention and behind both parts.
        activation: a name, torch's function, or a module of `unit.nn`; see `MLP`.
        layer_norm_eps: as torch's.
        batch_first: as torch's.
        norm_first: whether norms stand at the start of branches; otherwise behind the sums.
        bias: whether linear layers and norms have one.
        device: where the parameters are made.
        dtype: theirs.
        taus: the shares of attention and feed-forward part in the variance; None: as in a stack of one layer.
        mult: what multiplies attention's logits, see `unit.functional.scaled_dot_product_attention`.
        constraint: of every operation.

    Raises `ArgumentError`.
    """

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: object = F.relu,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        taus: tuple[float, float] | None = None,
        mult: float = 1.0,
        constraint: Constraint | None = "gmean",
    ) -> None:
        # On the meta device, since all of its parts are replaced.
        nn.TransformerEncoderLayer.__init__(
            self, d_model, nhead, dim_feedforward, norm_first=norm_first, bias=bias, device="meta"
        )
        self.activation_relu_or_gelu = 0
        self._replace_parts(
            ("self_attn",), d_model, nhead, dim_feedforward, dropout, activation, layer_norm_eps, batch_first, bias,
            device, dtype, mult, constraint, taus,
        )  # fmt: skip

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """The stream after attention and feed-forward part; arguments are torch's."""
        x = self._residual(0, src, lambda x: self._sa_block(x, src_mask, src_key_padding_mask, is_causal))
        return self._residual(1, x, self._ff_block)


class TransformerDecoderLayer(_Layer, nn.TransformerDecoderLayer):
    """`torch.nn.TransformerDecoderLayer` at unit scale; arguments, names and state are torch's.

    Arguments are those of `TransformerEncoderLayer`; `taus` has three shares: of self-attention, of attention to the
    memory, of the feed-forward part.
    """

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: object = F.relu,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        taus: tuple[float, float, float] | None = None,
        mult: float = 1.0,
        constraint: Constraint | None = "gmean",
    ) -> None:
        nn.TransformerDecoderLayer.__init__(
            self, d_model, nhead, dim_feedforward, norm_first=norm_first, bias=bias, device="meta"
        )
        self._replace_parts(
            ("self_attn", "multihead_attn"), d_model, nhead, dim_feedforward, dropout, activation, layer_norm_eps,
            batch_first, bias, device, dtype, mult, constraint, taus,
        )  # fmt: skip

    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool = False,
        memory_is_causal: bool = False,
    ) -> Tensor:
        """The stream after both attentions and the feed-forward part; arguments are torch's."""
        x = self._residual(0, tgt, lambda x: self._sa_block(x, tgt_mask, tgt_key_padding_mask, tgt_is_causal))
        x = self._residual(
            1, x, lambda x: self._mha_block(x, memory, memory_mask, memory_key_padding_mask, memory_is_causal)
        )
        return self._residual(2, x, self._ff_block)


class TransformerEncoder(nn.TransformerEncoder):
    """`torch.nn.TransformerEncoder` of unit-scaled layers; the branches' shares and the depth follow `num_layers`.

    Every layer is a copy of the one given whose parameters are drawn anew (torch's copies start out equal). Nested
    tensors know no factors: `enable_nested_tensor` must be False. A causal mask is not looked for: say `is_causal`.
    """

    def __init__(
        self,
        encoder_layer: nn.TransformerEncoderLayer,
        num_layers: int,
        norm: nn.Module | None = None,
        enable_nested_tensor: bool = False,
        mask_check: bool = True,
    ) -> None:
        _check_layer("TransformerEncoder", encoder_layer, TransformerEncoderLayer)
        if enable_nested_tensor:
            raise ArgumentError(
                "TransformerEncoder: expected enable_nested_tensor=False, since nested tensors know no factors; got "
                "True. Leave it out: the result is the same."
            )
        super().__init__(encoder_layer, num_layers, norm, enable_nested_tensor=False, mask_check=mask_check)
        _prepare_stack(self)

    def forward(
        self,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        """The stream after all layers, and the norm."""
        for layer in self.layers:
            src = layer(src, mask, src_key_padding_mask, bool(is_causal))
        return src if self.norm is None else self.norm(src)


class TransformerDecoder(nn.TransformerDecoder):
    """`torch.nn.TransformerDecoder` of unit-scaled layers, as `TransformerEncoder`."""

    def __init__(
        self, decoder_layer: nn.TransformerDecoderLayer, num_layers: int, norm: nn.Module | None = None
    ) -> None:
        _check_layer("TransformerDecoder", decoder_layer, TransformerDecoderLayer)
        super().__init__(decoder_layer, num_layers, norm)
        _prepare_stack(self)

    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool | None = None,
        memory_is_causal: bool = False,
    ) -> Tensor:
        """The stream after all layers, and the norm. Every layer attends to the memory: its gradient is their sum."""
        for layer in self.layers:
            tgt = layer(
                tgt, memory, tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask, bool(tgt_is_causal),
                memory_is_causal,
            )  # fmt: skip
        return tgt if self.norm is None else self.norm(tgt)


def _prepare_stack(stack: Any) -> None:
    """Draws the copied layers anew and spreads the shares."""
    for layer in list(stack.layers)[1:]:
        for module in layer.modules():
            reset: Callable[[], None] | None = getattr(module, "reset_parameters", None)
            if reset is not None:
                reset()
    spread(stack.layers, stack.layers)


def _check_layer(operation: str, layer: object, wanted: type[nn.Module]) -> None:
    if not isinstance(layer, wanted):
        raise ArgumentError(
            f"{operation}: expected a plimsoll.unit.nn.{wanted.__name__}; got {type(layer).__module__}."
            f"{type(layer).__name__}. A plain layer is not at unit scale."
        )


def _check_taus(operation: str, taus: list[float], branches: int) -> None:
    if len(taus) != branches:
        raise ArgumentError(
            f"{operation}: expected taus to be {branches} shares, one for each branch; got {tuple(taus)!r}. Leave it "
            "out for a stack's rule."
        )
    for tau in taus:
        check_tau(operation, tau)
