"""Which tensors the operations take: floating values in plain memory. Others are told what to use instead.

Also how their values lie in memory.
"""

from typing import NoReturn

import torch
from torch import Tensor

from plimsoll.errors import UnsupportedTensorError
from plimsoll.kernels.dtypes import EIGHT_BIT, FLOATING, SCALES

_is_dense = torch.ops.aten.is_non_overlapping_and_dense.default


def is_dense(x: Tensor) -> bool:
    """Whether the values fill one stretch of memory, in whatever order."""
    return x.is_contiguous() or _is_dense(x)


def alike(*tensors: Tensor) -> bool:
    """Whether tensors of one shape are dense and hold their values in the same order."""
    if all([x.is_contiguous() for x in tensors]):  # noqa: C419  (a list is twice as fast as a generator here)
        return True
    first = tensors[0]
    return _is_dense(first) and all(x.stride() == first.stride() for x in tensors)


def check_tensor(x: object, operation: str, place: str = "") -> None:
    """Raises `UnsupportedTensorError` unless `x` is a strided tensor of floating values.

    `place` says where among several `x` stands (" at index 3").
    """
    if not isinstance(x, Tensor):
        refuse(x, operation, place)
    if x.is_nested:
        fail(x, operation, place, "a nested tensor", "Use x.values() if it is jagged, else each of x.unbind().")
    if x.is_quantized:
        fail(x, operation, place, "a quantized tensor", "Use x.dequantize().")
    if x.layout == torch.sparse_coo:
        remedy = "Use x.coalesce().values(), the stored values, or x.to_dense() for the zeros too."
        fail(x, operation, place, "a sparse tensor", remedy)
    if x.layout != torch.strided:
        stored = "x.to_dense()" if "mkldnn" in str(x.layout) else "x.values(), the stored values, or x.to_dense()"
        fail(x, operation, place, f"a tensor of layout {x.layout}", f"Use {stored}.")
    if x.dtype not in FLOATING and x.dtype not in EIGHT_BIT:
        fail(x, operation, place, *_problem_of_dtype(x))


def refuse(x: object, operation: str, place: str = "") -> NoReturn:
    """Raises for what is no tensor."""
    kind = f"{type(x).__module__}.{type(x).__qualname__}".removeprefix("builtins.")
    if x is None:
        remedy = "A parameter that took no part in the backward has no gradient: leave it out."
    elif type(x).__module__ == "numpy":
        remedy = "Write torch.from_numpy(x), or torch.as_tensor(x)."
    elif isinstance(x, torch.nn.Module):
        remedy = "Write dict(module.named_parameters())."
    elif isinstance(x, (bool, int, float)):
        remedy = "Write torch.tensor(x, dtype=torch.float64)."
    elif hasattr(x, "__iter__") and not isinstance(x, str):
        remedy = "Write list(x)."
    else:
        remedy = "Give the tensor itself."
    several = ", or a list, tuple or mapping of them" if operation == "measure" else ""
    raise UnsupportedTensorError(f"{operation}: expected a torch tensor{several}; got {kind}{place}. {remedy}")


def fail(x: Tensor, operation: str, place: str, problem: str, remedy: str) -> NoReturn:
    """Raises for a tensor with a problem, saying what to use in its place."""
    shape = "" if x.is_nested else f", shape {tuple(x.shape)}"
    raise UnsupportedTensorError(
        f"{operation}: expected a tensor of plain floating values; got {problem}{place} ({x.dtype}{shape}). {remedy}"
    )


def _problem_of_dtype(x: Tensor) -> tuple[str, str]:
    if x.is_complex():
        return "a complex tensor", "Use torch.view_as_real(x.resolve_conj()): both parts together."
    if x.dtype in SCALES:
        return "a tensor of scales, which have no sign and no zero", "Use x.double()."
    if x.dtype == torch.float4_e2m1fn_x2:
        return "packed codes, two values a byte", "Unpack it first: plimsoll.unpack gives the values."
    return f"a tensor of dtype {x.dtype}", "Use x.double(), if its values are numbers and not codes."
