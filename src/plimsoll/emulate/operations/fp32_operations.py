"""Operations on 16-bit tensors, computed in FP32 and rounded once, as on a GPU.

Covered are products and convolutions, and the operations that keep intermediate results in 16 bits only on a CPU
(statistics of normalization, sums of the gradient of an embedding). All others compute in FP32 and round once natively.
docs/design/emulation.md has the measurements.
"""

from typing import Any, cast as typed

import torch
from torch import Tensor

from plimsoll.emulate.dispatch import thread_frame
from plimsoll.emulate.operations.lstm import lstm
from plimsoll.kernels.dtypes import SIXTEEN_BIT

_aten: Any = torch.ops.aten

PRODUCTS = tuple(
    """
    addbmm addmm addmv addr baddbmm bmm dot linear matmul mm mv vdot _trilinear scaled_dot_product_attention
""".split()
)
CONVOLUTIONS = tuple(
    """
    _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d convolution
""".split()
)
# Called by autograd's own formulas for graphs that were recorded outside a context.
_BACKWARDS = (
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
    "convolution_backward",
    "embedding_dense_backward",
)
_IN_PLACE = ("addbmm_", "addmm_", "addmv_", "addr_", "baddbmm_")
_OUT = tuple(
    """
    addbmm.out addmm.out addmv.out addr.out baddbmm.out bmm.out dot.out linear.out matmul.out mm.out mv.out
""".split()
)
_STATISTICS = ("embedding_bag", "_embedding_bag", "group_norm", "layer_norm")


# A tensor core multiplies 16-bit values exactly and adds in FP32. The result is rounded to 16 bits when it is stored.
# On a CPU: widen the operands (exact), run the FP32 operation, narrow the result (rounds to nearest even). Autograd
# records these three steps, so the backward also consists of FP32 products of widened gradients, each rounded once,
# wherever it runs: after the context, in a checkpoint, or a second time.
def wide(op: Any, args: Any, kwargs: Any) -> Any:
    """Run the operation in FP32 and round its results to its tensors' 16-bit dtype."""
    dtype = _common(args, kwargs)
    if dtype is None or "dtype" in op._overloadname:  # noqa: SLF001  (results in FP32, which only GPUs have)
        return NotImplemented
    return narrow(op(*widen(args), **widen(kwargs)), dtype)


def _wide_first(op: Any, args: Any, kwargs: Any) -> Any:
    """Run the operation in FP32 and round to the dtype of the first argument."""
    # The operation's parameters may be FP32 while its values are 16-bit.
    dtype = args[0].dtype if args else None
    if dtype not in SIXTEEN_BIT or not _on_cpu(args[0]):
        return NotImplemented
    return narrow(op(*widen(args), **widen(kwargs)), dtype)


def _in_place(op: Any, args: Any, kwargs: Any) -> Any:
    """Run the functional form of an operation such as `x.addmm_`, and copy it to x."""
    functional = getattr(getattr(_aten, op.overloadpacket.__name__[:-1]), op._overloadname)  # noqa: SLF001
    result = wide(functional, args, kwargs)
    return result if result is NotImplemented else args[0].copy_(result)


def _into_out(op: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation with ``out=``, which has no gradient."""
    out = kwargs["out"]
    inputs = {name: value for name, value in kwargs.items() if name != "out"}
    if out.dtype is not _common(args, inputs):
        return NotImplemented
    result = wide(op.overloadpacket.default, args, inputs)
    return out.resize_(result.shape).copy_(result) if out.shape != result.shape else out.copy_(result)


def _batch_norm(op: Any, args: Any, kwargs: Any) -> Any:
    """Run batch norm in FP32, and round 16-bit running statistics once."""
    x, weight, bias, mean, var, *rest = args
    if x.dtype not in SIXTEEN_BIT or not _on_cpu(x):
        return NotImplemented
    wide_mean, wide_var = widen(mean), widen(var)
    result = op(x.float(), widen(weight), widen(bias), wide_mean, wide_var, *rest, **kwargs).to(x.dtype)
    for statistic, updated in ((mean, wide_mean), (var, wide_var)):
        if statistic is not None and statistic is not updated:
            statistic.copy_(updated)
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


def _embedding(op: Any, args: Any, kwargs: Any) -> Any:  # noqa: ARG001  (signature of a rule)
    defaults: tuple[Any, ...] = (-1, False, False)
    weight, indices, padding, by_frequency, sparse = (*args, *defaults[len(args) - 2 :])
    if kwargs or sparse or weight.dtype not in SIXTEEN_BIT or not _on_cpu(weight):
        return NotImplemented
    return typed("Any", _Embedding).apply(weight, indices, padding, by_frequency)


def rules() -> dict[str, thread_frame.Rule]:
    """Return the rules of a 16-bit emulation, by the name of the operation."""
    rules: dict[str, thread_frame.Rule] = dict.fromkeys((*PRODUCTS, *CONVOLUTIONS, *_BACKWARDS), wide)
    rules |= dict.fromkeys(_IN_PLACE, _in_place)
    rules |= dict.fromkeys(_OUT, _into_out)
    rules |= dict.fromkeys(_STATISTICS, _wide_first)
    return rules | {"batch_norm": _batch_norm, "embedding": _embedding, "lstm": lstm}


def widen(x: Any) -> Any:
    """Return the argument with every 16-bit tensor in it in FP32."""
    if isinstance(x, Tensor):
        return x.float() if x.dtype in SIXTEEN_BIT else x
    if isinstance(x, tuple | list):
        return [widen(item) for item in typed("list[Any]", x)]
    if isinstance(x, dict):
        return {name: widen(item) for name, item in typed("dict[str, Any]", x).items()}
    return x


def narrow(result: Any, dtype: torch.dtype) -> Any:
    """Return the result with every FP32 tensor in it rounded to the dtype."""
    if isinstance(result, Tensor):
        return result.to(dtype) if result.dtype is torch.float32 else result
    if isinstance(result, tuple | list):
        return tuple(narrow(item, dtype) for item in typed("list[Any]", result))
    return result


def _common(args: Any, kwargs: Any) -> torch.dtype | None:
    """Return the 16-bit dtype of all floating tensors, on the CPU only, or None."""
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
