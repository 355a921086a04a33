"""What `unit.fold` knows of operations: through which a factor may be moved, and into which parameters.

By an operation's name without overload. A factor is a positive number, so ``relu(a x) = a relu(x)``, and minus infinity
stays what it is. What is not here is taken to be non-linear: a factor stays where it is.
"""

from collections.abc import Mapping
from typing import Any

from plimsoll.unit.conversion.codegen.steps import Ref, Step

# f(a x) = a f(x), x the first argument.
_HOMOGENEOUS = frozenset({
    "view", "reshape", "flatten", "unflatten", "transpose", "permute", "t", "contiguous", "clone", "expand", "squeeze",
    "unsqueeze", "select", "slice", "narrow", "split", "split_with_sizes", "chunk", "unbind", "getitem", "repeat",
    "repeat_interleave", "to", "_to_copy", "movedim", "swapaxes", "numpy_T", "roll", "flip", "expand_as", "view_as",
    "relu", "leaky_relu", "neg", "abs", "mean", "sum", "cumsum", "max_pool1d", "max_pool2d", "avg_pool1d", "avg_pool2d",
    "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_max_pool2d", "upsample_nearest2d", "upsample_bilinear2d",
    "detach", "alias", "dropout", "gather", "index_select", "pixel_shuffle", "unfold", "amax", "amin", "unsafe_view",
    "_unsafe_view", "lift_fresh_copy", "index",
})  # fmt: skip
# f(a x, a y) = a f(x, y), the terms being tensors.
_SUMS = frozenset({"add", "sub", "cat", "stack", "concat"})
# f(a x, b y) = a b f(x, y).
_PRODUCTS = frozenset({"mul", "matmul", "mm", "bmm", "einsum"})
_ATTENTION = "scaled_dot_product_attention"

# Positions of input, weight and bias of an operation that is linear in weight and bias together.
WEIGHTS: Mapping[str, tuple[int, int, int | None]] = {
    "linear": (0, 1, 2), "conv1d": (0, 1, 2), "conv2d": (0, 1, 2), "conv3d": (0, 1, 2), "conv_transpose1d": (0, 1, 2),
    "conv_transpose2d": (0, 1, 2), "conv_transpose3d": (0, 1, 2), "addmm": (1, 2, 0),
}  # fmt: skip
# Positions of weight, bias and epsilon of an operation whose result does not change with its input's scale.
NORMS: Mapping[str, tuple[int, int | None, int]] = {
    "layer_norm": (2, 3, 4), "group_norm": (2, 3, 4), "rms_norm": (2, None, 3), "batch_norm": (1, 2, 7),
}  # fmt: skip
# A norm over a batch also compares with what it has seen: running mean and variance.
RUNNING: Mapping[str, tuple[int, int]] = {"batch_norm": (3, 4)}
EMBEDDING = "embedding"


def name_of(step: Step) -> str:
    """The operation's name: "linear", "getitem"."""
    return step.target.split(".")[1] if "." in step.target else step.target


def argument(step: Step, position: int) -> Any:
    """An argument by position, None where it is left out."""
    return step.args[position] if position < len(step.args) else None


def terms_of(step: Step) -> list[tuple[Any, str]] | None:
    """The ports of a sum and the values that they take; None where the step is no sum of tensors."""
    name = name_of(step)
    if name not in _SUMS:
        return None
    if name in ("cat", "stack", "concat"):
        given = [((0, i), one) for i, one in enumerate(step.args[0])]
    else:
        given = [(0, step.args[0]), (1, step.args[1])]
    return [(port, one.name) for port, one in given] if all(isinstance(one, Ref) for _, one in given) else None


def factors_of(step: Step) -> list[tuple[Any, str]] | None:
    """The ports of a product and the values that they take; None where the step is no product.

    A single one where the operation is homogeneous in its first argument alone, by a constant's product too.
    """
    name = name_of(step)
    if name in _PRODUCTS or (name == "div" and "rounding_mode" not in step.kwargs):
        return _operands(step)
    if name == _ATTENTION:
        return _port_list(step, (2,))
    if name in _HOMOGENEOUS or _keeps_scale(step, name):
        return _port_list(step, (0,))
    return None


def _operands(step: Step) -> list[tuple[Any, str]] | None:
    if name_of(step) == "einsum":
        return [((1, i), one.name) for i, one in enumerate(step.args[1])]
    left, right = step.args[:2]
    if name_of(step) == "div":  # a divisor's factor would have to be turned over: it stays with the divisor
        return [(0, left.name)] if isinstance(left, Ref) else None
    return [(port, one.name) for port, one in ((0, left), (1, right)) if isinstance(one, Ref)]


def _keeps_scale(step: Step, name: str) -> bool:
    """Whether what it writes into the tensor is the same at every scale: zeros, or minus infinity."""
    if name == "masked_fill":
        return argument(step, 2) in (0, float("-inf"))
    if name in ("pad", "constant_pad_nd"):
        return not (argument(step, 3) if name == "pad" else argument(step, 2))
    return False


def _port_list(step: Step, ports: tuple[int, ...]) -> list[tuple[Any, str]] | None:
    given = [(port, argument(step, port)) for port in ports]
    return [(port, one.name) for port, one in given] if all(isinstance(one, Ref) for _, one in given) else None
