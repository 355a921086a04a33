"""Operations on 16-bit tensors computed in FP32 and rounded once: what a GPU's kernels do, at a CPU's FP32 speed.

A tensor core multiplies 16-bit values exactly and adds in FP32; the result is rounded to 16 bits when it is stored. The
same on a CPU: widen the operands (exact), run the FP32 operation, narrow the result (rounds to nearest even). Autograd
records these three steps as they are, so the backward too is FP32 products of widened gradients, each rounded once,
whenever and wherever it runs: after the context, in a checkpoint, a second time.

Which operations: products and convolutions, and those that on a CPU alone keep intermediate results in 16 bits
(statistics of normalisation, sums of an embedding's gradient). Everything else computes in FP32 and rounds once
natively; docs/design/emulation.md has the measurements.
"""

from typing import Any, cast as typed

import torch
from torch import Tensor

from plimsoll.emulate.dispatch import thread_frame
from plimsoll.emulate.operations.lstm import lstm
from plimsoll.kernels.dtypes import SIXTEEN_BIT

_aten: Any = torch.ops.aten

PRODUCTS = (
    "addbmm", "addmm", "addmv", "addr", "baddbmm", "bmm", "dot", "linear", "matmul", "mm", "mv", "vdot",
    "_trilinear", "scaled_dot_product_attention",
)  # fmt: skip
CONVOLUTIONS = (
    "_convolution", "conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d", "conv_transpose2d",
    "conv_transpose3d", "convolution",
)  # fmt: skip
# What autograd's own formulas call for graphs that were recorded outside of a context.
_BACKWARDS = (
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward",
    "convolution_backward", "embedding_dense_backward",
)  # fmt: skip
_IN_PLACE = ("addbmm_", "addmm_", "addmv_", "addr_", "baddbmm_")
_OUT = (
    "addbmm.out", "addmm.out", "addmv.out", "addr.out", "baddbmm.out", "bmm.out", "dot.out", "linear.out", "matmul.out",
    "mm.out", "mv.out",
)  # fmt: skip
_STATISTICS = ("embedding_bag", "_embedding_bag", "group_norm", "layer_norm")


def wide(op: Any, args: Any, kwargs: Any) -> Any:
    """Return the operation in FP32, its floating results rounded to the 16-bit dtype of its tensors."""
    dtype = _common(args, kwargs)
    if dtype is None or "dtype" in op._overloadname:  # noqa: SLF001  (results in FP32, which only GPUs have)
        return NotImplemented
    return narrow(op(*widen(args), **widen(kwargs)), dtype)


def _wide_first(op: Any, args: Any, kwargs: Any) -> Any:
    """Likewise where parameters may be FP32 beside 16-bit values, whose dtype the result has."""
    dtype = args[0].dtype if args else None
    if dtype not in SIXTEEN_BIT or not _on_cpu(args[0]):
        return NotImplemented
    return narrow(op(*widen(args), **widen(kwargs)), dtype)


def _in_place(op: Any, args: Any, kwargs: Any) -> Any:
    """``x.addmm_(...)``: the functional form, copied into x."""
    functional = getattr(getattr(_aten, op.overloadpacket.__name__[:-1]), op._overloadname)  # noqa: SLF001
    result = wide(functional, args, kwargs)
    return result if result is NotImplemented else args[0].copy_(result)


def _into_out(op: Any, args: Any, kwargs: Any) -> Any:
    """``torch.mm(..., out=y)``: likewise, into y, which no gradient flows through."""
    out = kwargs["out"]
    inputs = {name: value for name, value in kwargs.items() if name != "out"}
    if out.dtype is not _common(args, inputs):
        return NotImplemented
    result = wide(op.overloadpacket.default, args, inputs)
    return out.resize_(result.shape).copy_(result) if out.shape != result.shape else out.copy_(result)


def _batch_norm(op: Any, args: Any, kwargs: Any) -> Any:
    """Batch norm in FP32; running statistics that are kept in 16 bits are updated in FP32 and rounded once."""
    x, weight, bias, mean, var, *rest = args
    if x.dtype not in SIXTEEN_BIT or not _on_cpu(x):
        return NotImplemented
    wide_mean, wide_var = widen(mean), widen(var)
    result = op(x.float(), widen(weight), widen(bias), wide_mean, wide_var, *rest, **kwargs).to(x.dtype)
    for kept, updated in ((mean, wide_mean), (var, wide_var)):
        if kept is not None and kept is not updated:
            kept.copy_(updated)
    return result


class _Embedding(torch.autograd.Function):
    """Rows of a 16-bit table, whose gradient is summed in FP32."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, indices: Tensor, padding: int, by_frequency: bool) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.rest = (weight.shape[0], padding, by_frequency)
        ctx.dtype = weight.dtype
        return _aten.embedding(weight, indices, padding, by_frequency, False)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        (indices,) = ctx.saved_tensors
        summed = _aten.embedding_dense_backward(gradient.float(), indices, *ctx.rest)
        return summed.to(ctx.dtype), None, None, None


def _embedding(op: Any, args: Any, kwargs: Any) -> Any:  # noqa: ARG001  (a rule's signature)
    defaults: tuple[Any, ...] = (-1, False, False)
    weight, indices, padding, by_frequency, sparse = (*args, *defaults[len(args) - 2 :])
    if kwargs or sparse or weight.dtype not in SIXTEEN_BIT or not _on_cpu(weight):
        return NotImplemented
    return typed("Any", _Embedding).apply(weight, indices, padding, by_frequency)


def rules() -> dict[str, thread_frame.Rule]:
    """What an emulation of a 16-bit format puts in the place of torch's operations, by name."""
    found: dict[str, thread_frame.Rule] = dict.fromkeys((*PRODUCTS, *CONVOLUTIONS, *_BACKWARDS), wide)
    found |= dict.fromkeys(_IN_PLACE, _in_place)
    found |= dict.fromkeys(_OUT, _into_out)
    found |= dict.fromkeys(_STATISTICS, _wide_first)
    return found | {"batch_norm": _batch_norm, "embedding": _embedding, "lstm": lstm}


def widen(x: Any) -> Any:
    """Return the argument with every 16-bit tensor in it in FP32."""
    if isinstance(x, Tensor):
        return x.float() if x.dtype in SIXTEEN_BIT else x
    if isinstance(x, tuple | list):
        return [widen(one) for one in typed("list[Any]", x)]
    if isinstance(x, dict):
        return {name: widen(one) for name, one in typed("dict[str, Any]", x).items()}
    return x


def narrow(result: Any, dtype: torch.dtype) -> Any:
    """Return the result with every FP32 tensor in it rounded to the dtype."""
    if isinstance(result, Tensor):
        return result.to(dtype) if result.dtype is torch.float32 else result
    if isinstance(result, tuple | list):
        return tuple(narrow(one, dtype) for one in typed("list[Any]", result))
    return result


def _common(args: Any, kwargs: Any) -> torch.dtype | None:
    """Return the one 16-bit dtype of all floating tensors if they are on the CPU, else None."""
    dtype = None
    for x in (*args, *kwargs.values()):
        if not isinstance(x, Tensor) or not x.is_floating_point():
            continue
        if x.dtype not in SIXTEEN_BIT or dtype not in (None, x.dtype) or not _on_cpu(x):
            return None
        dtype = x.dtype
    return dtype


def _on_cpu(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.layout is torch.strided
