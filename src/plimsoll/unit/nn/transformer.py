"""Multi-head attention, Transformer layers and stacks of `torch.nn` at unit scale.

Every branch is weighted (`_residual`). Its weight is applied backward at its start. Torch's fused path for inference
has no factors, so it is not used.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from plimsoll.errors import ArgumentError
from plimsoll.unit import functional as U  # noqa: N812
from plimsoll.unit.arguments import check_tau
from plimsoll.unit.formulas import Constraint
from plimsoll.unit.nn.blocks import activation_from, chained, residual_tau, spread
from plimsoll.unit.nn.functions import Dropout
from plimsoll.unit.nn.layers import LayerNorm, Linear, Multiplied, draw_unit
from plimsoll.unit.optim.parameter_kinds import Kind, tag

# -- attention ---------------------------------------------------------------------------------------------------------

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


# -- layers and stacks -------------------------------------------------------------------------------------------------


class _Layer(nn.Module):
    """Base of both layers, which replaces torch's parts by unit-scaled ones."""

    taus: list[float]
    norm_first: bool
    _attentions: ClassVar[tuple[str, ...]]

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
        taus: tuple[float, ...] | None = None,
        mult: float = 1.0,
        constraint: Constraint | None = "gmean",
    ) -> None:
        # The class of torch that comes next among the bases takes these. On the meta device, since all of its parts are
        # replaced.
        cast("Any", super()).__init__(d_model, nhead, dim_feedforward, norm_first=norm_first, bias=bias, device="meta")
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        branches = len(self._attentions) + 1
        for name in self._attentions:
            attention = MultiheadAttention(
                d_model, nhead, dropout, bias, batch_first=batch_first, mult=mult, constraint=constraint, **place
            )
            setattr(self, name, attention)
        self.linear1, self.linear2 = chained(d_model, dim_feedforward, d_model, bias, constraint, device, dtype)
        for name in ("dropout", *(f"dropout{i + 1}" for i in range(branches))):
            setattr(self, name, Dropout(dropout))
        for i in range(branches):
            setattr(self, f"norm{i + 1}", LayerNorm(d_model, layer_norm_eps, bias=bias, **place))
        if len(self._attentions) == 1:
            self.activation_relu_or_gelu = 0  # an encoder of torch asks whether its fused path is possible
        delattr(self, "activation")
        self.activation = activation_from(type(self).__name__, activation, constraint)
        self.taus = (
            [residual_tau(i, 1) for i in range(branches)]
            if taus is None
            else _checked_taus(type(self).__name__, taus, branches)
        )

    def _residual(self, index: int, x: Tensor, branch: Callable[[Tensor], Tensor]) -> Tensor:
        """Run one branch, with its norm before it or after the sum."""
        norm: Callable[[Tensor], Tensor] = getattr(self, f"norm{index + 1}")
        start, skip = U.residual_split(x, self.taus[index])
        if self.norm_first:
            return U.residual_add(branch(norm(start)), skip, self.taus[index])
        return norm(U.residual_add(branch(start), skip, self.taus[index]))

    def __setstate__(self, state: dict[str, Any]) -> None:
        # torch's layers add a plain activation to a state without that key. Here it is a module, kept among the
        # modules.
        nn.Module.__setstate__(self, state)

    def extra_repr(self) -> str:
        """Return the shares of the branches."""
        return f"taus=({', '.join(f'{tau:.4g}' for tau in self.taus)})"


class TransformerEncoderLayer(_Layer, nn.TransformerEncoderLayer):
    """`torch.nn.TransformerEncoderLayer` at unit scale.

    Arguments, names and state are torch's.

    Args:
        d_model: Width.
        nhead: Number of heads.
        dim_feedforward: Width within the feed-forward part. Default: 2048.
        dropout: Probability of dropout in attention and after both parts. Default: 0.1.
        activation: A name, torch's function, or a module of `unit.nn`. See `MLP`. Default: ReLU.
        layer_norm_eps: As in torch. Default: 1e-5.
        batch_first: As in torch. Default: False.
        norm_first: Whether norms stand at the start of branches, or else after the sums. Default: False.
        bias: Whether linear layers and norms have one. Default: True.
        device: Device of the parameters. Default: torch's.
        dtype: Dtype of the parameters. Default: torch's.
        taus: Shares of attention and feed-forward part in the variance. Default: those in a stack of one layer.
        mult: Multiplies attention's logits. See `unit.functional.scaled_dot_product_attention`. Default: 1.
        constraint: Constraint of every operation. Default: `"gmean"`.

    Raises:
        ArgumentError: An option is not allowed.
    """

    _attentions = ("self_attn",)

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """Return the stream after attention and feed-forward part. Arguments are torch's."""
        x = self._residual(0, src, lambda x: self._sa_block(x, src_mask, src_key_padding_mask, is_causal))
        return self._residual(1, x, self._ff_block)


class TransformerDecoderLayer(_Layer, nn.TransformerDecoderLayer):
    """`torch.nn.TransformerDecoderLayer` at unit scale.

    Arguments are those of `TransformerEncoderLayer`. `taus` has three shares: of self-attention, of attention to the
    memory, and of the feed-forward part.
    """

    _attentions = ("self_attn", "multihead_attn")

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
        """Return the stream after both attentions and the feed-forward part."""
        x = self._residual(0, tgt, lambda x: self._sa_block(x, tgt_mask, tgt_key_padding_mask, tgt_is_causal))
        x = self._residual(
            1, x, lambda x: self._mha_block(x, memory, memory_mask, memory_key_padding_mask, memory_is_causal)
        )
        return self._residual(2, x, self._ff_block)


class TransformerEncoder(nn.TransformerEncoder):
    """`torch.nn.TransformerEncoder` of unit-scaled layers.

    The branches' shares and the depth follow `num_layers`. Every layer is a copy of `encoder_layer` whose parameters
    are drawn again (torch's copies start out equal). Nested tensors have no factors, so `enable_nested_tensor` must be
    False. A causal mask is not detected: pass `is_causal`.
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
                "TransformerEncoder: expected enable_nested_tensor=False, since nested tensors have no factors; got "
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
        """Return the stream after all layers and the norm."""
        for layer in self.layers:
            src = layer(src, mask, src_key_padding_mask, bool(is_causal))
        return src if self.norm is None else self.norm(src)


class TransformerDecoder(nn.TransformerDecoder):
    """`torch.nn.TransformerDecoder` of unit-scaled layers. As `TransformerEncoder`."""

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
        """Return the stream after all layers and the norm."""
        for layer in self.layers:
            tgt = layer(
                tgt,
                memory,
                tgt_mask,
                memory_mask,
                tgt_key_padding_mask,
                memory_key_padding_mask,
                bool(tgt_is_causal),
                memory_is_causal,
            )
        return tgt if self.norm is None else self.norm(tgt)


def _prepare_stack(stack: Any) -> None:
    """Draw the copied layers again, and spread the shares."""
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


def _checked_taus(operation: str, taus: object, branches: int) -> list[float]:
    listed = list(cast("Iterable[Any]", taus)) if isinstance(taus, Iterable) else []
    if len(listed) != branches:
        raise ArgumentError(
            f"{operation}: expected taus to be {branches} shares, one for each branch; got {taus!r}. Leave it out for "
            "a stack's rule."
        )
    for tau in listed:
        check_tau(operation, tau)
    return listed
