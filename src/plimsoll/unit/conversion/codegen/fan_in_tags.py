"""What an optimizer's rules need to know of a parameter beyond its shape, told from the operations that use it.

A weight that is multiplied from the right, ``x @ w``, sums over its first dimension; torch's linear products and
convolutions sum over all but the first.
"""

import math
from typing import Any, cast

from torch import fx, nn

from plimsoll.unit.capture.captured_program import Captured
from plimsoll.unit.capture.gradient_graph import base_name
from plimsoll.unit.optim.parameter_kinds import tag_fan_in

# The argument that is multiplied from the right.
_RIGHT = {"matmul": 1, "mm": 1, "bmm": 1, "addmm": 2, "baddbmm": 2}
_TRANSPOSED = frozenset({"conv_transpose1d", "conv_transpose2d", "conv_transpose3d"})


def tag_fans(made: nn.Module, captured: Captured) -> None:
    """Notes how many inputs an output sums over, for the parameters where the shape alone would not tell it."""
    ties = {name: group for group in captured.ties for name in group}
    names = captured.parameters
    for node in captured.graph.nodes:
        for one in node.all_input_nodes if node.op == "call_function" else ():
            if one.name not in names:
                continue
            fan = _fan_in(node, one)
            if fan is not None:
                for path in ties.get(names[one.name], (names[one.name],)):
                    owner, _, name = path.rpartition(".")
                    tag_fan_in(made.get_submodule(owner), **{name: fan})


def _fan_in(node: fx.Node, parameter: fx.Node) -> int | None:
    shape = tuple(int(size) for size in parameter.meta["val"].shape)
    operation = base_name(node)
    if operation in _TRANSPOSED and len(node.args) > 1 and node.args[1] is parameter:
        strides = _strides(node)
        return max(1, shape[0] * math.prod(shape[2:]) // strides)
    if operation == "einsum" and len(node.args) > 1:
        return _einsum_fan_in(node, parameter, shape)
    at = _RIGHT.get(operation)
    right = at is not None and len(node.args) > at and node.args[at] is parameter
    return max(1, shape[-2]) if right and len(shape) > 1 else None


def _strides(node: fx.Node) -> int:
    stride: Any = (*node.args, None, None)[3] or 1  # input, weight, bias, stride
    return stride if isinstance(stride, int) else math.prod(cast("list[int]", stride))


def _einsum_fan_in(node: fx.Node, parameter: fx.Node, shape: tuple[int, ...]) -> int | None:
    left, _, out = str(node.args[0]).replace(" ", "").partition("->")
    operands = list(node.args[1])  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType, reportUnknownVariableType, reportUnknownArgumentType]
    letters = left.split(",")[operands.index(parameter)]
    if "." in letters or not out or len(letters) != len(shape):
        return None
    return max(1, math.prod(size for letter, size in zip(letters, shape, strict=True) if letter not in out))
