"""Facts about tensors for `locate`: a check that all are finite, and a record."""

import torch
from torch import Tensor, nn

from plimsoll import kernels
from plimsoll.diagnosis.locating.fault import Operand
from plimsoll.errors import PlimsollError
from plimsoll.formats import get_element
from plimsoll.spectrum import Spectrum, measure
from plimsoll.spectrum.measurement import plain

_PLAIN = (Tensor, nn.Parameter)


def readable(x: Tensor) -> Tensor | None:
    """Return the plain floating tensor that can be read; None without one."""
    if x.is_complex() and x.layout == torch.strided:
        return readable(torch.view_as_real(x.resolve_conj().detach()))
    if not x.is_floating_point():
        return None
    if type(x) in _PLAIN and x.layout == torch.strided and not x.is_meta and not x.is_neg():
        return x.detach()
    try:
        return plain(x._values() if x.is_sparse else x, "")  # noqa: SLF001  (values() refuses what is not coalesced)
    except PlimsollError:
        return None


def count_nonfinite(x: Tensor) -> int:
    """Return the number of NaN and Inf values; waits for the device."""
    counts = kernels.new_counts(1, x.device)
    kernels.count_nonfinite_into([x], counts, 0)
    return int(counts.item())


def spectrum_of(x: Tensor) -> Spectrum | None:
    """Return the tensor's spectrum; None where there is nothing to measure."""
    seen = readable(x)
    return None if seen is None else measure(seen)


def operand(name: str, x: Tensor, spectrum: Spectrum | None = None) -> Operand:
    """The record of a tensor."""
    return Operand(name=name, dtype=dtype_name(x.dtype), shape=tuple(x.shape), spectrum=spectrum or spectrum_of(x))


def dtype_name(dtype: torch.dtype) -> str:
    """The format's name, or torch's where it is none: "fp16", "int64"."""
    if not dtype.is_floating_point:
        return str(dtype).removeprefix("torch.")
    return get_element(dtype, "locate").name


def first_bad(x: Tensor) -> tuple[int, ...]:
    """The index of the first value that is not finite."""
    return first_true(~torch.isfinite(x.float() if x.dtype.itemsize == 1 else x))


def first_true(mask: Tensor) -> tuple[int, ...]:
    """The index of the first true value."""
    flat = int(mask.reshape(-1).to(torch.uint8).argmax().item())
    index: list[int] = []
    for size in reversed(mask.shape):
        flat, place = divmod(flat, size)
        index.append(place)
    return tuple(reversed(index))
