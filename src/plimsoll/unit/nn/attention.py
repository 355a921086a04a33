"""Multi-head attention at unit scale."""

import math
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from plimsoll.errors import ArgumentError
from plimsoll.unit import functional as U  # noqa: N812
from plimsoll.unit.factors.formulas import Constraint
from plimsoll.unit.nn.base import Multiplied, draw_unit
from plimsoll.unit.nn.linear import Linear
from plimsoll.unit.optim.parameter_kinds import Kind, tag

_WEIGHTS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")  # torch registers those unused as None
_WEIGHT: Kind = "weight"


class MultiheadAttention(Multiplied, nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention` at unit scale: projections and attention.

    Arguments, names and state are torch's. Masks mean what torch's do: positions with True or minus infinity are not
    attended to. `is_causal` needs no mask here. If both are given, the mask is taken to be causal, as in torch.

    With `need_weights` the returned weights are probabilities before dropout, computed apart from the output. No
    gradient flows through them.

    Args:
        embed_dim: Width.
        num_heads: Number of heads, which share the width.
        dropout: Probability that a weight is dropped in training. Default: 0.
        bias: Whether the projections have one. Default: True.
        add_bias_kv: Must be False.
        add_zero_attn: Must be False.
        kdim: Width of the keys. Default: `embed_dim`.
        vdim: Width of the values. Default: `embed_dim`.
        batch_first: Whether inputs have shape (batch, sequence, width). Default: False.
        device: Device of the parameters. Default: torch's.
        dtype: Dtype of the parameters. Default: torch's.
        mult: Multiplies the logits. A large one starts with sharper attention. Default: 1.
        constraint: Constraint of the projections and the attention. Default: `"gmean"`.

    Raises:
        ArgumentError: An option is not allowed.
    """

    num_heads: int
    head_dim: int

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        mult: float = 1.0,
        constraint: Constraint | None = "gmean",
    ) -> None:
        _refuse(add_bias_kv=add_bias_kv, add_zero_attn=add_zero_attn)
        super().__init__(
            embed_dim,
            num_heads,
            dropout,
            bias,
            kdim=kdim,
            vdim=vdim,
            batch_first=batch_first,
            device=device,
            dtype=dtype,
        )
        self._set_mult(mult, constraint)
        self.out_proj: Any = Linear(embed_dim, embed_dim, bias, device, dtype, constraint=constraint)
        kinds: dict[str, Kind] = {"in_proj_bias": "bias", **dict.fromkeys(_WEIGHTS, _WEIGHT)}
        tag(self, **kinds)

    def _reset_parameters(self) -> None:
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the projections of queries, keys and values again."""
        for name in _WEIGHTS:
            if self._parameters[name] is not None:
                draw_unit(self.get_parameter(name), self.in_proj_bias)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the attended values, and the weights or None, as torch's module."""
        single = query.dim() == 2
        q, k, v = (self._heads(x, single) for x in self._projected(query, key, value))
        causal = is_causal and key_padding_mask is None and not need_weights
        mask = None if causal else self._mask(q, k, key_padding_mask, attn_mask, is_causal)
        attended = U.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=causal,
            mult=self.mult,
            constraint=self.constraint,
        )
        out = self.out_proj(self._joined(attended, single))
        if not need_weights:
            return out, None
        weights = self._weights(q, k, mask)
        weights = weights.mean(dim=1) if average_attn_weights else weights
        return out, weights.squeeze(0) if single else weights

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """Return queries, keys and values."""
        weights, biases = self._parts()
        # Projections of the same tensor come from one product, so that one factor scales the sum of their gradients.
        if self._qkv_same_embed_dim and query is key and key is value:
            return self._linear(query, self.in_proj_weight, self.in_proj_bias).chunk(3, dim=-1)
        if self._qkv_same_embed_dim and key is value:
            width = self.embed_dim
            both = self._linear(key, self.in_proj_weight[width:], self._rest_of_bias())
            return self._linear(query, weights[0], biases[0]), *both.chunk(2, dim=-1)
        inputs = (query, key, value)
        return tuple(self._linear(x, w, b) for x, w, b in zip(inputs, weights, biases, strict=True))

    def _parts(self) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]:
        if self._qkv_same_embed_dim:
            weights = self.in_proj_weight.chunk(3)
        else:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        bias = cast("Tensor | None", self.in_proj_bias)
        return weights, (None, None, None) if bias is None else bias.chunk(3)

    def _rest_of_bias(self) -> Tensor | None:
        bias = cast("Tensor | None", self.in_proj_bias)
        return None if bias is None else bias[self.embed_dim :]

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return U.linear(x, weight, bias, constraint=self.constraint)

    def _heads(self, x: Tensor, single: bool) -> Tensor:
        """Return (batch, heads, length, width of a head), from torch's layouts."""
        x = x.unsqueeze(0) if single else x if self.batch_first else x.transpose(0, 1)
        return cast("Tensor", x.unflatten(-1, (self.num_heads, self.head_dim))).transpose(1, 2)

    def _joined(self, x: Tensor, single: bool) -> Tensor:
        """Invert `_heads`."""
        x = x.transpose(1, 2).flatten(-2)
        return x.squeeze(0) if single else x if self.batch_first else x.transpose(0, 1)

    def _mask(
        self, q: Tensor, k: Tensor, padding: Tensor | None, mask: Tensor | None, is_causal: bool
    ) -> Tensor | None:
        """Return both masks as one that is added to the logits."""
        if mask is None and is_causal:
            mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).triu(1)
        mask = _additive(mask, q)
        if mask is not None and mask.dim() == 3:
            mask = cast("Tensor", mask.unflatten(0, (-1, self.num_heads)))
        padded = _additive(padding, q)
        if padded is None:
            return mask
        padded = padded.view(-1, 1, 1, padded.shape[-1])
        return padded if mask is None else mask + padded

    def _weights(self, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
        """Return the probabilities, (batch, heads, queries, keys), without gradients."""
        with torch.no_grad():
            logits = q @ k.transpose(-2, -1) * (self.mult / math.sqrt(self.head_dim))
            return F.softmax(logits if mask is None else logits + mask, dim=-1)

    def extra_repr(self) -> str:
        """Return the width, the heads, and the settings of unit scaling."""
        return f"{self.embed_dim}, heads={self.num_heads}, {super().extra_repr()}"


def _additive(mask: Tensor | None, q: Tensor) -> Tensor | None:
    """Return a mask that is added: minus infinity where a boolean one is True."""
    if mask is None or mask.dtype.is_floating_point:
        return mask if mask is None else mask.to(q.dtype)
    if mask.dtype != torch.bool:
        raise ArgumentError(
            f"MultiheadAttention: expected masks to be boolean or floating point; got {mask.dtype} of shape "
            f"{tuple(mask.shape)}. True means: not attended to."
        )
    return torch.zeros_like(mask, dtype=q.dtype).masked_fill(mask, -math.inf)


def _refuse(**options: bool) -> None:
    for name, value in options.items():
        if value:
            raise ArgumentError(
                f"MultiheadAttention: expected {name}=False, as what it adds has no known scale; got {value!r}. "
                "Leave it out, or add a custom token to keys and values."
            )
