"""Algebra of operations for `unit.fold`, by the operation's name without overload."""

from collections.abc import Mapping
from typing import Any

from plimsoll.unit.conversion.codegen.steps import Ref, Step

# f(a x) = a f(x), x the first argument.
_HOMOGENEOUS = frozenset(
    """
    view reshape flatten unflatten transpose permute t contiguous clone expand squeeze unsqueeze select slice narrow
    split split_with_sizes chunk unbind getitem repeat repeat_interleave to _to_copy movedim swapaxes numpy_T roll
    flip expand_as view_as relu leaky_relu neg abs mean sum cumsum max_pool1d max_pool2d avg_pool1d avg_pool2d
    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_max_pool2d upsample_nearest2d upsample_bilinear2d detach alias
    dropout gather index_select pixel_shuffle unfold amax amin unsafe_view _unsafe_view lift_fresh_copy index
    """.split()
)
# f(a x, a y) = a f(x, y) if all terms are tensors.
_SUMS = frozenset({"add", "sub", "cat", "stack", "concat"})
# f(a x, b y) = a b f(x, y).
_PRODUCTS = frozenset({"mul", "matmul", "mm", "bmm", "einsum"})
_ATTENTION = "scaled_dot_product_attention"

# Positions of input, weight and bias of an operation that is linear in weight and bias together.
WEIGHTS: Mapping[str, tuple[int, int, int | None]] = {
    "linear": (0, 1, 2),
    "conv1d": (0, 1, 2),
    "conv2d": (0, 1, 2),
    "conv3d": (0, 1, 2),
    "conv_transpose1d": (0, 1, 2),
    "conv_transpose2d": (0, 1, 2),
    "conv_transpose3d": (0, 1, 2),
    "addmm": (1, 2, 0),
}
# Positions of weight, bias and epsilon of an operation whose result does not change with its input's scale.
NORMS: Mapping[str, tuple[int, int | None, int]] = {
    "layer_norm": (2, 3, 4),
    "group_norm": (2, 3, 4),
    "rms_norm": (2, None, 3),
    "batch_norm": (1, 2, 7),
}
# Positions of the running mean and variance of a norm over the batch.
RUNNING: Mapping[str, tuple[int, int]] = {"batch_norm": (3, 4)}
EMBEDDING = "embedding"


def name_of(step: Step) -> str:
    """Return the operation's name: "linear", "getitem"."""
    return step.target.split(".")[1] if "." in step.target else step.target


def argument(step: Step, position: int) -> Any:
    """Return an argument by position, or None if it is omitted."""
    return step.args[position] if position < len(step.args) else None


def terms_of(step: Step) -> list[tuple[Any, str]] | None:
    """Return a sum's ports with their values, or None if it is no sum of tensors."""
    name = name_of(step)
    if name not in _SUMS:
        return None
    if name in ("cat", "stack", "concat"):
        return _named([((0, i), term) for i, term in enumerate(step.args[0])])
    return _named([(0, step.args[0]), (1, step.args[1])])


def factors_of(step: Step) -> list[tuple[Any, str]] | None:
    """Return a product's ports with their values, or None for another step.

    An operation that is homogeneous in its first argument alone has that port.
    """
    name = name_of(step)
    if name in _PRODUCTS or (name == "div" and "rounding_mode" not in step.kwargs):
        return _operands(step)
    if name == _ATTENTION:
        return _named([(2, argument(step, 2))])
    if name in _HOMOGENEOUS or _keeps_scale(step, name):
        return _named([(0, argument(step, 0))])
    return None


def _operands(step: Step) -> list[tuple[Any, str]] | None:
    if name_of(step) == "einsum":
        return [((1, i), operand.name) for i, operand in enumerate(step.args[1])]
    left, right = step.args[:2]
    if name_of(step) == "div":  # a divisor's factor would have to be inverted, so it stays with the divisor
        return [(0, left.name)] if isinstance(left, Ref) else None
    return [(port, operand.name) for port, operand in ((0, left), (1, right)) if isinstance(operand, Ref)]


# A factor is a positive number, so `relu(a x) = a relu(x)`, and minus infinity does not change. Operations that are not
# listed count as non-linear: factors stay in front of them.
def _keeps_scale(step: Step, name: str) -> bool:
    """Return whether the step writes only zeros or -Inf, equal at every scale."""
    if name == "masked_fill":
        return argument(step, 2) in (0, float("-inf"))
    if name in ("pad", "constant_pad_nd"):
        return not (argument(step, 3) if name == "pad" else argument(step, 2))
    return False


def _named(ports: list[tuple[Any, Any]]) -> list[tuple[Any, str]] | None:
    """Return the names of values at ports, or None if one is no tensor."""
    return [(port, value.name) for port, value in ports] if all(isinstance(value, Ref) for _, value in ports) else None
