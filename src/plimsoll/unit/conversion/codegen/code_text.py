"""Operations and arguments as Python text.

An operation is written as the function of torch that it came from where that is torch's own binding, with the same
arguments in the same order: ``torch.ops`` costs several times as much per call (measured: 79 against 11 microseconds
for `gelu` of 16 values on a loaded core). All others are written as ``torch.ops.aten...``.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

# Python functions of torch, not bindings, that take the operator's arguments as they are.
_SAME = {"aten.split.Tensor": "torch.split", "aten.split_with_sizes.default": "torch.split",
         "aten.einsum.default": "torch.einsum"}  # fmt: skip
_C: Any = torch._C  # pyright: ignore[reportPrivateUsage]  # noqa: SLF001
_METHODS = frozenset({
    "view", "expand", "contiguous", "clone", "reshape", "to", "type_as", "repeat", "unfold", "masked_fill", "new_zeros",
    "new_ones", "new_full", "expand_as", "view_as", "reshape_as",
})  # fmt: skip
_OTHERS = frozenset({"aten.to.dtype_layout", "aten.to.prim_Device", "aten.to.prim_dtype", "aten.to.prim_other"})


def call_text(target: str, args: list[str], kwargs: dict[str, str]) -> str:
    """A call of an operation with arguments that are text already.

    >>> call_text("aten.gelu.default", ["x"], {"approximate": "'tanh'"})
    "torch._C._nn.gelu(x, approximate='tanh')"
    >>> call_text("aten.view.default", ["x", "[4]"], {})
    'x.view([4])'
    """
    special = _SPECIAL.get(target)
    if special is not None and not kwargs:
        written = special(args)
        if written is not None:
            return written
    named = [f"{name}={value}" for name, value in kwargs.items()]
    function = function_text(target)
    if function.startswith("."):
        return f"{args[0]}{function}({', '.join([*args[1:], *named])})"
    return f"{function}({', '.join([*args, *named])})"


@functools.cache
def function_text(target: str) -> str:
    """How an operation is called; with a leading dot where it is a method of its first argument."""
    if not target.startswith("aten."):
        return target if target.startswith(("torch.", "operator.", "math.")) else f"torch.ops.{target}"
    name = target.split(".")[1]
    if target in _SAME:
        return _SAME[target]
    if name in _METHODS and target not in _OTHERS:
        return f".{name}"
    own = getattr(_C._VariableFunctions, name, None)  # noqa: SLF001
    if own is not None and own is getattr(
        torch, name, None
    ):  # not a Python function of that name, whose arguments differ
        return f"torch.{name}"
    return f"torch._C._nn.{name}" if hasattr(_C._nn, name) else f"torch.ops.{target}"  # noqa: SLF001


def constant_text(value: object) -> str:
    """A constant of the graph as Python text.

    >>> constant_text(torch.float16), constant_text(float("-inf")), constant_text(torch.contiguous_format)
    ('torch.float16', "float('-inf')", 'torch.contiguous_format')
    """
    if isinstance(value, float) and not math.isfinite(value):
        return f"float('{value}')"
    if isinstance(value, torch.device):
        return f"torch.device('{value}')"
    return str(value) if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)) else repr(value)


def _slice(args: list[str]) -> str | None:
    dim, start, end, step = (*args[1:], *("0", "None", "None", "1")[len(args) - 1 :])
    if not dim.isdigit():
        return None
    end = "" if end in ("None", "9223372036854775807") else end
    start = "" if start in ("None", "0") else start
    within = f"{start}:{end}" + (f":{step}" if step != "1" else "")
    return f"{args[0]}[{':, ' * int(dim)}{within}]"


def _index(args: list[str]) -> str | None:
    inside = args[1].strip("[]")
    return None if "(" in inside or "[" in inside else f"{args[0]}[{inside.replace('None', ':')},]"


def _getitem(args: list[str]) -> str:
    return f"{args[0]}[{args[1]}]"


def _clone(args: list[str]) -> str:
    return f"{args[0]}.clone()"


_SPECIAL: dict[str, Callable[[list[str]], str | None]] = {
    "aten.slice.Tensor": _slice, "aten.index.Tensor": _index, "operator.getitem": _getitem,
    "aten.lift_fresh_copy.default": _clone,
}  # fmt: skip
