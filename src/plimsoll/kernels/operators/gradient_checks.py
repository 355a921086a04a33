"""Which gradients `unscale_` takes: plain floating tensors, each with memory of its own, all on one device."""

from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

from plimsoll.errors import ArgumentError, UnsupportedTensorError
from plimsoll.kernels.dtypes import FLOATING
from plimsoll.kernels.operators.tensor_checks import fail

_OPERATION = "unscale_into"
_KNOWN = frozenset(FLOATING)
_PLAIN = frozenset((Tensor, torch.nn.Parameter))


def check_unscale(
    gradients: Sequence[Tensor], inverse_scale: Tensor, found_inf: Tensor, bank: Tensor | None, rows: Sequence[int]
) -> None:
    """Raises `UnsupportedTensorError` or `ArgumentError` for what a kernel would misread; reads no value."""
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
