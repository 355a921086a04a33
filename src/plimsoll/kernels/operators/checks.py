"""Checks of the tensors that operations take, with remedies; layout in memory.

Measuring, casting and packing take floating values in plain memory. `unscale_` takes gradients, each with memory of its
own, all on one device. Some operations cannot run inside of `torch.func` transforms.
"""

from collections.abc import Sequence
from typing import Any, NoReturn, cast

import torch
from torch import Tensor

from plimsoll.errors import ArgumentError, UnsupportedTensorError
from plimsoll.kernels.dtypes import EIGHT_BIT, FLOATING, SCALES

_is_dense = torch.ops.aten.is_non_overlapping_and_dense.default

# torch has no public name for it; all versions from 2.9 on have this one.
_innermost: Any = cast("Any", torch)._C._functorch.peek_interpreter_stack  # noqa: SLF001


def is_dense(x: Tensor) -> bool:
    """Return True if the values fill one stretch of memory, in any order."""
    return x.is_contiguous() or _is_dense(x)


def alike(*tensors: Tensor) -> bool:
    """Return True if tensors of one shape are dense and in the same memory order."""
    if all([x.is_contiguous() for x in tensors]):  # noqa: C419  (a list is twice as fast as a generator here)
        return True
    first = tensors[0]
    return _is_dense(first) and all(x.stride() == first.stride() for x in tensors)


def check_tensor(x: object, operation: str, place: str = "") -> None:
    """Raise `UnsupportedTensorError` unless `x` is a strided floating tensor.

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
        remedy = "Write list(x)." if operation == "measure" else "Give one tensor: torch.tensor(x) of numbers."
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


_OPERATION = "unscale_into"
_KNOWN = frozenset(FLOATING)
_PLAIN = frozenset((Tensor, torch.nn.Parameter))


def check_unscale(
    gradients: Sequence[Tensor], inverse_scale: Tensor, found_inf: Tensor, bank: Tensor | None, rows: Sequence[int]
) -> None:
    """Raise an error for arguments that a kernel would misread; reads no value."""
    device = found_inf.device
    _check_number(inverse_scale, "inverse_scale", device)
    _check_number(found_inf, "found_inf", device)
    for index, x in enumerate(gradients):
        if x.dtype not in _KNOWN or x.layout is not torch.strided or x.device != device or type(x) not in _PLAIN:
            _refuse(x, index, device)
        if not x.is_contiguous() and any(n > 1 and not step for n, step in zip(x.shape, x.stride(), strict=True)):
            fail(x, _OPERATION, f" at index {index}", "an expanded tensor, whose values share memory", "Use x.clone().")
    _check_rows(len(gradients), bank, rows, device)
    if device.type != "meta":
        _check_apart([address for x in gradients if (address := x.data_ptr())])  # 0 for an empty one


def _check_apart(addresses: list[int]) -> None:
    if len(set(addresses)) < len(addresses):
        raise ArgumentError(
            f"{_OPERATION}: expected gradients that share no memory; got {len(addresses)} of which only "
            f"{len(set(addresses))} differ. Give each gradient once, else it is multiplied twice."
        )


def _check_number(x: Tensor, name: str, device: torch.device) -> None:
    if x.dtype is not torch.float32 or x.numel() != 1 or x.device != device:
        raise ArgumentError(
            f"{_OPERATION}: expected one float32 number on {device} as {name}; got {x.dtype}, shape {tuple(x.shape)}, "
            f"on {x.device}. Make it with torch.full((1,), value, device=...)."
        )


def _check_rows(count: int, bank: Tensor | None, rows: Sequence[int], device: torch.device) -> None:
    if bank is None:
        if rows:
            raise ArgumentError(
                f"{_OPERATION}: expected a bank where rows are given; got rows={list(rows)}. Give both, or neither."
            )
    elif len(rows) != count or bank.device != device:
        raise ArgumentError(
            f"{_OPERATION}: expected a row of a bank on {device} for each of {count} gradients; got {len(rows)} rows "
            f"of one on {bank.device}. Make it with new_bank."
        )


def _refuse(x: Tensor, index: int, device: torch.device) -> NoReturn:
    place = f" at index {index}"
    if x.layout is not torch.strided:
        stored = "x.coalesce().values(), the stored values" if x.layout == torch.sparse_coo else "x.values()"
        fail(x, _OPERATION, place, f"a tensor of layout {x.layout}", f"Use {stored}.")
    if type(x) not in _PLAIN:
        fail(
            x, _OPERATION, place, f"one of type {type(x).__name__}", "Use its local tensor: x.to_local() of a DTensor."
        )
    if x.dtype not in _KNOWN:
        remedy = "Gradients are float64, float32, bfloat16 or float16: use x.float()."
        raise UnsupportedTensorError(f"{_OPERATION}: expected floating gradients; got {x.dtype}{place}. {remedy}")
    raise ArgumentError(
        f"{_OPERATION}: expected all gradients on the device of found_inf, {device}; got one on {x.device}{place}. "
        "Call it once for each device."
    )


# -- `torch.func` transforms -------------------------------------------------------------------------------------------


def is_transformed() -> bool:
    """Return True if the calling code runs inside a `torch.func` transform on this thread."""
    return _innermost() is not None


# An autograd function that keeps tensors in its context cannot run there. The error of torch asks to rewrite it.
def refuse_transforms(operation: str, remedy: str) -> None:
    """Raise `UnsupportedTensorError` inside a `torch.func` transform. A compiler that traces is not asked."""
    if not torch.compiler.is_compiling() and is_transformed():
        raise UnsupportedTensorError(
            f"{operation}: expected a call outside of torch.func transforms; got one inside of vmap, grad, jvp or "
            f"another. {remedy}"
        )
