"""Which tensors the operations take: those with floating values in plain memory. The others are told why not."""

import torch
from torch import Tensor

from plimsoll.errors import UnsupportedTensorError

FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
EIGHT_BIT = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


def check_tensor(x: object, operation: str) -> None:
    """Raises `UnsupportedTensorError`, with what to do, unless `x` is a strided tensor of floating values."""
    reason = _why_not(x)
    if reason is not None:
        raise UnsupportedTensorError(f"{operation}: expected a tensor of floating values in plain memory; got {reason}")


def _why_not(x: object) -> str | None:
    if not isinstance(x, Tensor):
        hint = "Convert it with torch.from_numpy(x)." if type(x).__module__ == "numpy" else "Wrap it in torch.tensor(...)."
        return f"a {type(x).__name__}. {hint}"
    kind = f"a tensor of {x.dtype}, shape {tuple(x.shape)}"
    if x.is_nested:
        return f"a nested tensor. Take its x.values(), or each part of x.unbind()."
    if x.layout is not torch.strided:
        return f"{kind}, layout {x.layout}. Take the stored values: x.coalesce().values() (COO) or x.values() (CSR)."
    if x.is_quantized:
        return f"{kind}, quantized. Take x.dequantize()."
    if x.dtype.is_complex:
        return f"{kind}. Take torch.view_as_real(x): its real and imaginary parts are separate values."
    if x.dtype not in FLOATING and x.dtype not in EIGHT_BIT:
        if not x.dtype.is_floating_point:
            return f"{kind}. Integers have no exponent; convert with x.double() if that is meant."
        return f"{kind}. Convert with x.float()."
    return None
