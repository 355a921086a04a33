"""`torch.nn.MultiheadAttention` at unit scale."""

import math
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from plimsoll.errors import ArgumentError
from plimsoll.unit import functional as U  # noqa: N812
from plimsoll.unit.factors.constraints import Constraint, check_constraint
from plimsoll.unit.nn.initialization import check_mult, draw_unit, own_settings
from plimsoll.unit.nn.linear import Linear
from plimsoll.unit.optim.parameter_kinds import Kind, tag

_WEIGHTS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")  # torch registers those unused as None
_WEIGHT: Kind = "weight"


class MultiheadAttention(nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention` at unit scale: unit-scaled projections around unit-scaled attention.

    Arguments, names and state are torch's; `add_bias_kv` and `add_zero_attn` are refused. Masks mean what torch's do:
    True, or minus infinity, is not attended to. `is_causal` needs no mask beside it here; where both are given the mask
    is taken to be causal, as torch takes it.

    The weights that `need_weights` asks for are probabilities before dropout, computed beside the output; no gradient
    goes through them.

    Args:
        embed_dim: the width.
        num_heads: how many heads; they share the width.
        dropout: probability that a weight is dropped in training.
        bias: whether the projections have one.
        add_bias_kv: must be False.
        add_zero_attn: must be False.
        kdim: width of the keys; None: `embed_dim`.
        vdim: width of the values; None: `embed_dim`.
        batch_first: whether inputs are (batch, sequence, width).
        device: where the parameters are made.
        dtype: theirs.
        mult: what multiplies the logits: large ones begin with sharper attention.
        constraint: of the projections and the attention.

    Raises `ArgumentError`.
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
        check_constraint("MultiheadAttention", constraint)
        check_mult("MultiheadAttention", mult)
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
        self.out_proj: Any = Linear(embed_dim, embed_dim, bias, device, dtype, constraint=constraint)
        self.mult = mult
        self.constraint: Constraint | None = constraint
        kinds: dict[str, Kind] = {"in_proj_bias": "bias", **dict.fromkeys(_WEIGHTS, _WEIGHT)}
        tag(self, **kinds)

    def _reset_parameters(self) -> None:
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the projections of queries, keys and values anew; the output's is a module of its own."""
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
        """What is attended to, and the weights or None; arguments and shapes are torch's."""
        single = query.dim() == 2
        q, k, v = (self._heads(each, single) for each in self._projected(query, key, value))
        causal = is_causal and key_padding_mask is None and not need_weights
        mask = None if causal else self._mask(q, k, key_padding_mask, attn_mask, is_causal)
        attended = U.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=self.dropout if self.training else 0.0, is_causal=causal, mult=self.mult,
            constraint=self.constraint,
        )  # fmt: skip
        out = self.out_proj(self._joined(attended, single))
        if not need_weights:
            return out, None
        weights = self._weights(q, k, mask)
        weights = weights.mean(dim=1) if average_attn_weights else weights
        return out, weights.squeeze(0) if single else weights

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values; one product for those that come from the same tensor, whose gradients add up."""
        weights, biases = self._parts()
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
        """(batch, heads, length, width of a head), from any layout that torch takes."""
        x = x.unsqueeze(0) if single else x if self.batch_first else x.transpose(0, 1)
        return cast("Tensor", x.unflatten(-1, (self.num_heads, self.head_dim))).transpose(1, 2)

    def _joined(self, x: Tensor, single: bool) -> Tensor:
        """The inverse of `_heads`."""
        x = x.transpose(1, 2).flatten(-2)
        return x.squeeze(0) if single else x if self.batch_first else x.transpose(0, 1)

    def _mask(
        self, q: Tensor, k: Tensor, padding: Tensor | None, given: Tensor | None, is_causal: bool
    ) -> Tensor | None:
        """Both masks as one that is added to the logits."""
        if given is None and is_causal:
            given = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).triu(1)
        mask = _added(given, q)
        if mask is not None and mask.dim() == 3:
            mask = cast("Tensor", mask.unflatten(0, (-1, self.num_heads)))
        padded = _added(padding, q)
        if padded is None:
            return mask
        padded = padded.view(-1, 1, 1, padded.shape[-1])
        return padded if mask is None else mask + padded

    def _weights(self, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
        """The probabilities, (batch, heads, queries, keys); no gradient goes through."""
        with torch.no_grad():
            logits = q @ k.transpose(-2, -1) * (self.mult / math.sqrt(self.head_dim))
            return F.softmax(logits if mask is None else logits + mask, dim=-1)

    def extra_repr(self) -> str:
        """The width, the heads, and the settings of unit scaling."""
        return f"{self.embed_dim}, heads={self.num_heads}" + own_settings(mult=self.mult, constraint=self.constraint)


def _added(mask: Tensor | None, q: Tensor) -> Tensor | None:
    """A mask that is added: minus infinity where a boolean one is True."""
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
                "Leave it out, or add a token of your own to keys and values."
            )
