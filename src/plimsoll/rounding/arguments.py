"""Checked arguments of a cast: specs from names, seeds from generators, errors."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from plimsoll import checks
from plimsoll.errors import ArgumentError
from plimsoll.formats import BlockFormat, Format, get
from plimsoll.kernels.operators.cast_spec import ROUNDINGS, SCALE_RULES, STOCHASTIC, BlockSpec, CastSpec

Generator = torch.Generator | int | Tensor | None

_WORD = 1 << 64
_SIGN = 1 << 63


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Cast with checked arguments.

    Attributes:
        format: Format of the result.
        ints: Settings of the operator.
        stochastic: Whether rounding is stochastic.
        axis: Axis along which blocks run.
    """

    format: Format | BlockFormat
    ints: list[int]
    stochastic: bool
    axis: int


class Numbers(NamedTuple):
    """Scale and key of a cast, each as a number or as a tensor on a device."""

    scale: float
    scale_tensor: Tensor | None
    seed: int
    key: Tensor | None


def plan(operation: str, fmt: object, *, rounding: str, saturate: bool | None, scale_rule: str, axis: int) -> Plan:
    """Return the cast, after a check of all arguments but the tensor's."""
    chosen = get(fmt)
    axis = checks.integer(operation, "axis", axis, remedy="Use -1 for the last one.")
    mode = _index(operation, "rounding", rounding, ROUNDINGS)
    rule = _index(operation, "scale_rule", scale_rule, SCALE_RULES)
    if isinstance(chosen, BlockFormat):
        if saturate is not None and saturate is not True:
            raise ArgumentError(
                f"{operation}: expected saturate=True or None for {chosen.name}, whose elements always saturate; "
                f"got saturate={saturate!r}. Leave saturate out."
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
    """Return checked scale and generator, with their tensors on the device of x."""
    number, scale_tensor = check_scale(operation, scale)
    check_generator(operation, plan, generator)
    if scale_tensor is not None:
        scale_tensor = scale_tensor.to(device=x.device, dtype=torch.float64, non_blocking=True)
    seed, key = _seed(x, generator) if plan.stochastic else (0, None)
    return Numbers(scale=number, scale_tensor=scale_tensor, seed=seed, key=key)


def _index(operation: str, argument: str, value: str, known: tuple[str, ...]) -> int:
    return known.index(checks.one_of(operation, argument, value, known))


def check_scale(operation: str, scale: float | Tensor | None) -> tuple[float, Tensor | None]:
    """Return the scale as a number, or as a 0-d tensor, or raise `ArgumentError`."""
    if scale is None:
        return 1.0, None
    if isinstance(scale, Tensor):
        if scale.numel() != 1 or not scale.dtype.is_floating_point:
            raise ArgumentError(
                f"{operation}: expected scale to be a number or a floating tensor of one value; got a tensor of "
                f"{scale.dtype}, shape {tuple(scale.shape)}. For a scale per channel, multiply before and divide after."
            )
        return 1.0, scale.detach().reshape(())
    return checks.number(operation, "scale", scale, above=0, remedy="Use 1.0, for example."), None


def check_generator(operation: str, plan: Plan, generator: object) -> None:
    """Raise an `ArgumentError` for a generator that a cast cannot draw from."""
    if generator is None:
        return
    if not plan.stochastic:
        raise ArgumentError(
            f"{operation}: expected a generator with rounding='stochastic' only; got "
            f"generator={_described(generator)}. Leave it out, or round stochastically."
        )
    if isinstance(generator, Tensor):
        if generator.numel() != 1 or generator.dtype != torch.int64:
            raise ArgumentError(
                f"{operation}: expected a key tensor to be one int64; got {generator.dtype}, "
                f"shape {tuple(generator.shape)}. Make one with torch.tensor(seed)."
            )
    elif isinstance(generator, bool) or not (
        isinstance(generator, int) or (isinstance(generator, torch.Generator) and generator.device.type == "cpu")
    ):
        raise ArgumentError(
            f"{operation}: expected a CPU torch.Generator, an int or an int64 key tensor; got {_described(generator)}. "
            "Draw a key tensor on the device instead: torch.randint(2**62, (), device=...)."
        )


def _seed(x: Tensor, generator: Generator) -> tuple[int, Tensor | None]:
    if isinstance(generator, Tensor):
        return 0, generator.reshape(()).to(x.device, non_blocking=True)
    if isinstance(generator, int):
        return signed(generator), None
    if generator is None and torch.compiler.is_compiling():
        # A compiled graph draws from the device's default generator, so that no number returns to the host.
        return 0, torch.randint(-_SIGN, _SIGN - 1, (), dtype=torch.int64, device=x.device)
    return int(torch.randint(-_SIGN, _SIGN - 1, (), dtype=torch.int64, generator=generator, device="cpu")), None


def signed(seed: int) -> int:
    """Return the seed modulo 2**64 as an int64, which is the same key."""
    return (seed % _WORD + _SIGN) % _WORD - _SIGN


def _described(generator: object) -> str:
    return f"{generator!r} ({type(generator).__name__})"
