"""From what a user writes to what a kernel takes: names become specs, generators seeds, and mistakes errors."""

import math
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor

from plimsoll.errors import ArgumentError
from plimsoll.formats import BlockFormat, Format, get
from plimsoll.kernels.operators.cast_spec import ROUNDINGS, SCALE_RULES, STOCHASTIC, BlockSpec, CastSpec

Generator = torch.Generator | int | Tensor | None

_WORD = 1 << 64
_SIGN = 1 << 63


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A cast with every argument checked: the format, the integers for the operator, and the axis of blocks."""

    format: Format | BlockFormat
    ints: list[int]
    stochastic: bool
    axis: int


class Numbers(NamedTuple):
    """The numbers of a cast that may live on a device: scale and key, each as a number or as a tensor."""

    scale: float
    scale_tensor: Tensor | None
    seed: int
    key: Tensor | None


def plan(operation: str, fmt: object, *, rounding: str, saturate: bool | None, scale_rule: str, axis: int) -> Plan:
    """Checks what does not depend on the tensor."""
    chosen = get(fmt)
    mode = _index(operation, "rounding", rounding, ROUNDINGS)
    rule = _index(operation, "scale_rule", scale_rule, SCALE_RULES)
    if isinstance(chosen, BlockFormat):
        if saturate is False:
            raise ArgumentError(
                f"{operation}: expected saturate=True or None for {chosen.name}, whose elements always saturate; "
                "got saturate=False. Leave saturate out."
            )
        ints = BlockSpec.of(chosen, mode, rule).to_ints()
    else:
        if rule != 0 or axis != -1:
            raise ArgumentError(
                f"{operation}: expected scale_rule and axis with a block format only; got scale_rule={scale_rule!r}, "
                f"axis={axis} with {chosen.name}. Leave them out."
            )
        ints = list(CastSpec.of(chosen, mode, chosen.saturates(saturate)))
    return Plan(format=chosen, ints=ints, stochastic=mode == STOCHASTIC, axis=axis)


def numbers(operation: str, x: Tensor, plan: Plan, scale: float | Tensor | None, generator: Generator) -> Numbers:
    """Checks scale and generator, and brings tensors to x's device."""
    if generator is not None and not plan.stochastic:
        raise ArgumentError(
            f"{operation}: expected a generator with rounding='stochastic' only; got generator={_say(generator)}. "
            "Leave it out, or round stochastically."
        )
    number, scale_tensor = _scale(operation, x, scale)
    seed, key = _seed(operation, x, generator) if plan.stochastic else (0, None)
    return Numbers(scale=number, scale_tensor=scale_tensor, seed=seed, key=key)


def _index(operation: str, argument: str, value: str, known: tuple[str, ...]) -> int:
    if value not in known:
        raise ArgumentError(f"{operation}: expected {argument} to be one of {', '.join(known)}; got {value!r}.")
    return known.index(value)


def _scale(operation: str, x: Tensor, scale: float | Tensor | None) -> tuple[float, Tensor | None]:
    if scale is None:
        return 1.0, None
    if isinstance(scale, Tensor):
        if scale.numel() != 1 or not scale.dtype.is_floating_point:
            raise ArgumentError(
                f"{operation}: expected scale to be a number or a floating tensor of one value; got a tensor of "
                f"{scale.dtype}, shape {tuple(scale.shape)}. For a scale per channel, multiply before and divide after."
            )
        return 1.0, scale.detach().reshape(()).to(device=x.device, dtype=torch.float64, non_blocking=True)
    number = cast("object", scale)  # whatever came, in spite of the annotation
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not (math.isfinite(number) and number > 0):
        raise ArgumentError(f"{operation}: expected scale to be a finite number above zero; got {scale!r}.")
    return float(number), None


def _seed(operation: str, x: Tensor, generator: Generator) -> tuple[int, Tensor | None]:
    if isinstance(generator, Tensor):
        if generator.numel() != 1 or generator.dtype != torch.int64:
            raise ArgumentError(
                f"{operation}: expected a key tensor to be one int64; got {generator.dtype}, "
                f"shape {tuple(generator.shape)}. Make one with torch.tensor(seed)."
            )
        return 0, generator.reshape(()).to(x.device, non_blocking=True)
    if isinstance(generator, int) and not isinstance(generator, bool):
        return signed(generator), None
    if generator is None and torch.compiler.is_compiling():
        # In a graph the default generator is drawn from on the device: no number comes back to the host.
        return 0, torch.randint(-_SIGN, _SIGN - 1, (), dtype=torch.int64, device=x.device)
    if generator is not None and (not isinstance(generator, torch.Generator) or generator.device.type != "cpu"):
        raise ArgumentError(
            f"{operation}: expected a CPU torch.Generator, an int or an int64 key tensor; got {_say(generator)}. "
            "Draw a key tensor on the device instead: torch.randint(2**62, (), device=...)."
        )
    return int(torch.randint(-_SIGN, _SIGN - 1, (), dtype=torch.int64, generator=generator)), None


def signed(seed: int) -> int:
    """The seed modulo 2**64 as an int64: the two hold the same key."""
    return (seed % _WORD + _SIGN) % _WORD - _SIGN


def _say(generator: object) -> str:
    return f"{generator!r} ({type(generator).__name__})"
