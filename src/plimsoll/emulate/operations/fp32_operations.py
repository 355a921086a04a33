"""Operations on 16-bit tensors, computed in FP32 and rounded once, as on a GPU.

Covered are products and convolutions, and the operations that keep intermediate results in 16 bits only on a CPU
(statistics of normalization, sums of the gradient of an embedding). All others compute in FP32 and round once natively.
docs/design/emulation.md has the measurements.
"""

from collections.abc import Sequence
from typing import Any, cast as typed

import torch
import torch.nn.functional as F  # noqa: N812  (as everyone calls it)
from torch import Tensor

from plimsoll.emulate.dispatch import operation_kernels, thread_frame
from plimsoll.kernels.dtypes import SIXTEEN_BIT

# -- the LSTM as separate operations, which can be intercepted ---------------------------------------------------------

State = tuple[Tensor, Tensor]


# On a CPU torch runs a layer of an LSTM as one kernel, so lists and rules cannot affect the operations inside. GRU and
# RNN consist of separate operations already.
def lstm(op: Any, args: Any, kwargs: Any) -> Any:
    """Run `lstm` as separate operations, for padded or packed sequences."""
    # An LSTM with projections has another number of weights: torch itself runs it as separate operations.
    packed = op._overloadname == "data"  # noqa: SLF001
    weights, biased = args[3:5] if packed else args[2:4]
    layers, both_ways = args[5 if packed else 4], args[8 if packed else 7]
    per_direction = 4 if biased else 2
    if kwargs or len(weights) != layers * (2 if both_ways else 1) * per_direction:
        return NotImplemented
    return operation_kernels.run_intercepted(_packed if packed else _padded, args, {})


def _padded(
    x: Tensor,
    state: Sequence[Tensor],
    weights: Sequence[Tensor],
    biased: bool,
    layers: int,
    dropout: float,
    training: bool,
    both_ways: bool,
    batch_first: bool,
) -> Any:
    x = x.transpose(0, 1) if batch_first else x
    sizes = [x.shape[1]] * x.shape[0]
    rest = (weights, biased, layers, dropout, training, both_ways)
    y, h, c = _layers(x.flatten(0, 1), sizes, state, *rest)
    y = typed("Any", y).unflatten(0, x.shape[:2])
    return y.transpose(0, 1) if batch_first else y, h, c


def _packed(data: Tensor, sizes: Tensor, *rest: Any) -> Any:
    return _layers(data, typed("Any", sizes).tolist(), *rest)


def _layers(
    x: Tensor,
    sizes: list[int],
    state: Sequence[Tensor],
    weights: Sequence[Tensor],
    biased: bool,
    layers: int,
    dropout: float,
    training: bool,
    both_ways: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    directions, count = 2 if both_ways else 1, 4 if biased else 2
    last = list[State]()
    for layer in range(layers):
        outputs = list[Tensor]()
        for index in range(layer * directions, (layer + 1) * directions):
            start = (state[0][index], state[1][index])
            way = _backwards if index % directions else _forwards
            y, end = way(x, sizes, start, *weights[index * count : (index + 1) * count])
            outputs.append(y)
            last.append(end)
        x = torch.cat(outputs, 1) if both_ways else outputs[0]
        if dropout and training and layer < layers - 1:
            x = torch.dropout(x, dropout, train=True)
    return x, torch.stack([h for h, _ in last]), torch.stack([c for _, c in last])


def _forwards(x: Tensor, sizes: list[int], start: State, w: Tensor, u: Tensor, *b: Tensor) -> tuple[Tensor, State]:
    """Run forwards over sequences by falling length; `sizes` are left at each step."""
    steps: Sequence[Tensor] = typed("Any", F.linear(x, w, b[0] if b else None)).split(sizes)
    h, c = (state[: sizes[0]] for state in start)
    outputs, ended = list[Tensor](), list[State]()
    for gates in steps:
        if len(gates) < len(h):
            ended.append((h[len(gates) :], c[len(gates) :]))
        h, c = _cell(gates, h[: len(gates)], c[: len(gates)], u, *b[1:])
        outputs.append(h)
    ended.append((h, c))
    return torch.cat(outputs), (torch.cat([h for h, _ in ended[::-1]]), torch.cat([c for _, c in ended[::-1]]))


def _backwards(x: Tensor, sizes: list[int], start: State, w: Tensor, u: Tensor, *b: Tensor) -> tuple[Tensor, State]:
    """Run from the last step to the first. A shorter sequence joins at its end."""
    steps: Sequence[Tensor] = typed("Any", F.linear(x, w, b[0] if b else None)).split(sizes)
    h, c = (state[: sizes[-1]] for state in start)
    outputs = list[Tensor]()
    for gates in reversed(steps):
        h, c = (torch.cat((now, first[len(now) : len(gates)])) for now, first in zip((h, c), start, strict=True))
        h, c = _cell(gates, h, c, u, *b[1:])
        outputs.append(h)
    return torch.cat(outputs[::-1]), (h, c)


def _cell(gates: Tensor, h: Tensor, c: Tensor, u: Tensor, bias: Tensor | None = None) -> State:
    i, f, g, o = (gates + F.linear(h, u, bias)).chunk(4, 1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


# -- operations --------------------------------------------------------------------------------------------------------

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
