"""Casts of tensors to FP8 codes, by rows and by columns, and their scales.

A scaled product reads its first operand by rows and its second by columns, the only order for FP8 on Hopper. So one
read of a tensor makes two copies: its codes, and the codes of its transpose. Sizes are padded with zeros to multiples
of 16, as FP8 units require. Zeros add nothing to a sum.
"""

from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

from plimsoll import kernels
from plimsoll.errors import ArgumentError
from plimsoll.formats import E4M3, E5M2, Format
from plimsoll.kernels.dtypes import dtype_of
from plimsoll.kernels.operators.fp8_cast import Layout, padded

# -- scales: powers of two, which multiply exactly ---------------------------------------------------------------------

# A power of two also has an exact inverse, by which the product is multiplied. This wastes up to one binade at the top
# of the format, of 18 (E4M3) or 32 (E5M2). Delayed scaling takes the scale from the largest magnitudes of the last N
# training steps.

Role = Literal["activations", "weights", "gradients"]
ROLES: tuple[Role, ...] = ("activations", "weights", "gradients")
FORMATS: dict[Role, Format] = {"activations": E4M3, "weights": E4M3, "gradients": E5M2}
DTYPES: dict[Role, torch.dtype] = {role: dtype_of(fmt) for role, fmt in FORMATS.items()}

_BIAS = 127
_MAGNITUDE, _FRACTION = (1 << 31) - 1, (1 << 23) - 1
_TOP_FIELD = 255  # exponent field of NaN and Inf
_LEAST, _MOST = 1, 253  # exponent fields of a normal float32 whose inverse is normal too
_TOPS = {fmt: int(np.float32(fmt.max).view(np.int32)) for fmt in (E4M3, E5M2)}


def absmax_of(x: Tensor) -> Tensor:
    """Return the largest magnitude as a 0-d float32: NaN of a NaN, 0 of no values."""
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=x.device)
    lowest, highest = torch.aminmax(x)
    return torch.maximum(-lowest, highest).to(torch.float32)


def scale_for(absmax: Tensor, fmt: Format, margin: int) -> Tensor:
    """Return the largest power of two at which absmax fits `fmt` with a margin.

    It is a float32, 1 if absmax is 0 or not finite, and always between 2**-126 and 2**126. So many binades stay free
    between the scaled absmax and the largest value of the format.
    """
    # Integer arithmetic: a logarithm rounds values just below a power of two up to it.
    bits = absmax.view(torch.int32) & _MAGNITUDE  # -0 and NaN of either sign are what they are without it
    field, fraction = bits >> 23, bits & _FRACTION
    top = _TOPS[fmt]
    shift = (top >> 23) - field - (fraction > (top & _FRACTION)).to(torch.int32) - margin
    scale = ((shift + _BIAS).clamp(_LEAST, _MOST) << 23).view(torch.float32)
    return torch.where((bits == 0) | (field == _TOP_FIELD), 1.0, scale)


# Delayed scaling: the scale of a step comes from the largest magnitudes of the last N steps.
#
# A step is a forward with its backward: the first forward after a backward starts a new one. So each micro-batch is a
# step, several uses of a layer in one forward are one step, and a forward repeated in the backward (activation
# checkpointing) changes nothing, since the largest of the same values is the same.
#
# The backward only reads what the forward writes, and vice versa: compiled code would otherwise lose one of the two
# writes. Each side keeps a history, the largest magnitude of the current step, and that step's number. A forward whose
# number the backward has reached starts the next step. Magnitudes that are not finite are not recorded. Without a
# history, in the first step, scales follow the tensor itself.

BACKWARD = ("fp8_gradient_history", "fp8_gradient_absmax", "fp8_gradient_step")


def add_buffers(module: nn.Module, steps: int, device: torch.device) -> None:
    """Add the empty buffers of delayed scaling to the state of a module."""
    module.register_buffer("fp8_history", torch.zeros(2, steps, device=device))
    module.register_buffer("fp8_absmax", torch.zeros(2, device=device))
    module.register_buffer("fp8_step", torch.zeros((), dtype=torch.int64, device=device))
    module.register_buffer("fp8_gradient_history", torch.zeros(1, steps, device=device))
    module.register_buffer("fp8_gradient_absmax", torch.zeros(1, device=device))
    module.register_buffer("fp8_gradient_step", torch.full((), -1, dtype=torch.int64, device=device))


def begin(history: Tensor, absmax: Tensor, new: Tensor) -> None:
    """Move the last step's magnitudes into the history if `new` is true."""
    moved = torch.cat((absmax[:, None], history[:, :-1]), dim=1)
    history.copy_(torch.where(new, moved, history))
    absmax.copy_(torch.where(new, 0.0, absmax))


def record(absmax: Tensor, value: Tensor) -> None:
    """Record a magnitude of the current step in `absmax`, if it is finite."""
    absmax.copy_(torch.maximum(absmax, torch.where(value.isfinite(), value, 0.0)))


def delayed_scale(history: Tensor, absmax: Tensor, value: Tensor | None, fmt: Format, margin: int) -> Tensor:
    """Return the scale of a row of history, or of this step if the row is empty."""
    known = history.amax()
    fallback = absmax if value is None else torch.maximum(absmax, value)
    return scale_for(torch.where(known > 0, known, fallback), fmt, margin)


def gradient_scale(
    history: Tensor, absmax: Tensor, step: Tensor, forward_step: Tensor, value: Tensor, first: bool, margin: int
) -> Tensor:
    """Record a gradient's magnitude, in a new step if it starts one; return the scale."""
    begin(history, absmax, forward_step > step)
    step.copy_(torch.maximum(step, forward_step))
    scale = delayed_scale(history[0], absmax[0], value if first else None, E5M2, margin)
    record(absmax[0], value)
    return scale


def forward_scale(module: nn.Module, index: int, x: Tensor, training: bool, first: bool, margin: int) -> Tensor:
    """Return the scale of activations (0) or weights (1), recorded in training."""
    history, absmax = module.get_buffer("fp8_history")[index], module.get_buffer("fp8_absmax")[index]
    value = absmax_of(x) if first or training else None
    scale = delayed_scale(history, absmax, value if first else None, E4M3, margin)
    if training and value is not None:
        record(absmax, value)
    return scale


def begin_forward(module: nn.Module) -> None:
    """Start the next step if the last one has had its backward."""
    step = module.get_buffer("fp8_step")
    new = module.get_buffer("fp8_gradient_step") == step
    begin(module.get_buffer("fp8_history"), module.get_buffer("fp8_absmax"), new)
    step.add_(new)


_NAMES = ("fp8_history", "fp8_absmax", "fp8_gradient_history", "fp8_gradient_absmax")


def agree(model: nn.Module, process_group: object = None) -> None:
    """Set the histories of delayed scaling to the largest magnitudes of all ranks.

    Ranks have different batches, so their histories and scales differ. Each rank undoes its own, and nothing else
    depends on them. But a checkpoint that one rank writes for all has only one history. Call this before, and resumed
    training equals uninterrupted training. All ranks must call it. It is one collective for the whole model, and none
    without histories or without a process group.

    Args:
        model: The model, on each rank.
        process_group: The group of ranks. Default: all.
    """
    buffers = cast("Iterable[tuple[str, Tensor]]", model.named_buffers())
    histories = [buffer for name, buffer in buffers if name.rpartition(".")[2] in _NAMES]
    if not histories or not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    flat = torch.cat([buffer.flatten() for buffer in histories])
    torch.distributed.all_reduce(flat, torch.distributed.ReduceOp.MAX, group=process_group)  # pyright: ignore[reportArgumentType]
    parts = cast("tuple[Tensor, ...]", flat.split([buffer.numel() for buffer in histories]))
    for buffer, part in zip(histories, parts, strict=True):
        buffer.copy_(part.view_as(buffer))


# -- casts -------------------------------------------------------------------------------------------------------------

LIMITS = {DTYPES[role]: fmt.max for role, fmt in FORMATS.items()}


class Codes(NamedTuple):
    """Codes of a tensor in FP8 by rows, those of its transpose, and their scale."""

    rows: Tensor | None = None
    columns: Tensor | None = None
    scale: Tensor | None = None  # None: 1


def to_codes(
    x: Tensor, dtype: torch.dtype, scale: Tensor | None, layout: Layout, bank: Tensor | None = None, row: int = 0
) -> Codes:
    """Return the codes of a matrix times a 0-d float32 `scale`, as `kernels.fp8_cast`."""
    if bank is None and x.is_cuda and torch.compiler.is_compiling():
        return Codes(*by_formula(x, dtype, scale, layout), scale)
    return Codes(*kernels.fp8_cast(x, dtype, 1.0 if scale is None else scale, layout, bank, row), scale)


# Two implementations give the same bits, except the sign of NaN: the operator `plimsoll::fp8_cast`, which can also
# count the values that it reads, and plain operations, which a compiler on a GPU fuses with the operation before.
def by_formula(
    x: Tensor, dtype: torch.dtype, scale: Tensor | None, layout: Layout
) -> tuple[Tensor | None, Tensor | None]:
    """Return the result of `kernels.fp8_cast`, by operations that a compiler can fuse."""
    rows, columns = x.shape
    height, width = padded(rows), padded(columns)
    if (height, width) != (rows, columns):
        x = torch.nn.functional.pad(x, (0, width - columns, 0, height - rows))
    values = x.to(torch.float32)
    if scale is not None:
        values = values * scale
    codes = values.clamp(-LIMITS[dtype], LIMITS[dtype]).to(dtype)
    return codes if layout != "columns" else None, codes.t().contiguous() if layout != "rows" else None


class Counting(NamedTuple):
    """Banks and rows of counts: one bank for the forward, one for the backward."""

    forward: Tensor | None
    backward: Tensor | None
    rows: Mapping[Role, int]

    def row(self, role: Role) -> tuple[Tensor | None, int]:
        """Return the bank and the row of a role, or None if it is not counted."""
        if role not in self.rows:
            return None, 0
        return self.backward if role == "gradients" else self.forward, self.rows[role]


def check_counting(
    forward: Tensor | None, backward: Tensor | None, rows: Mapping[Role, int], device: torch.device
) -> Counting | None:
    """Return the counting, or None without rows.

    Raises an `ArgumentError` if a role is unknown, a bank lacks its row, or both directions have the same bank.
    """
    unknown = [role for role in rows if role not in ROLES]
    if unknown:
        raise ArgumentError(
            f"count_into: expected rows of {', '.join(ROLES)}; got {unknown[0]!r}. A linear layer casts nothing else."
        )
    if rows and forward is not None and forward is backward:
        raise ArgumentError("count_into: expected two banks; got one for both directions. Make another with new_bank.")
    counting = Counting(forward, backward, dict(rows))
    for role in rows:
        bank, row = counting.row(role)
        if bank is None or bank.dim() != 2 or not 0 <= row < bank.shape[0] or bank.device != device:
            passed = "None" if bank is None else f"one of shape {tuple(bank.shape)} on {bank.device}"
            raise ArgumentError(
                f"count_into: expected a bank on {device} with a row {row} for {role}; got {passed}. Make it with "
                "new_bank."
            )
    return counting if rows else None
