"""`fake_quantize`: a cast under autograd, with a format for each direction."""

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from plimsoll.errors import ArgumentError
from plimsoll.formats import BlockFormat, Format, get
from plimsoll.kernels.operators.checks import check_tensor
from plimsoll.rounding.arguments import Generator, Plan, check_generator, check_scale, plan
from plimsoll.rounding.casting import cast_checked

_BACKWARD_KEY = 0x5851F42D4C957F2D  # any odd constant, so that the two directions have different noise
_REFUSED = ("dtype", "out")


def fake_quantize(
    x: Tensor, forward: object | None = None, backward: object | None = None, **cast_arguments: Any
) -> Tensor:
    """Cast a tensor in the forward and its gradient in the backward.

    Otherwise the gradient passes unchanged (straight-through), and so does each further derivative. It works under
    torch.compile and torch.func.vmap.

    Args:
        x: A floating tensor.
        forward: Format of the result. Default: None, `x` is not cast.
        backward: Format of the gradient. Default: None, it is not cast.
        cast_arguments: rounding, saturate, scale, scale_rule, axis and generator of `cast`, for both casts. scale_rule
            and axis apply to block formats only. With stochastic rounding and a seed or key, the backward cast draws
            other noise of the same key.

    Returns:
        A tensor like `x`.

    Raises:
        ArgumentError: `dtype` or `out` is given, or an argument contradicts another.
        UnsupportedTensorError: `x` is no strided tensor of floating values.

    >>> x = torch.tensor([0.1, 300.0], requires_grad=True)
    >>> y = fake_quantize(x, forward="e4m3", backward="e5m2")
    >>> (y * 3.3).sum().backward()
    >>> y.tolist(), x.grad.tolist()
    ([0.1015625, 288.0], [3.5, 3.5])
    """
    for name in _REFUSED:
        if name in cast_arguments:
            raise ArgumentError(
                f"fake_quantize: expected arguments of cast without {name}, since the result stands in for x; "
                f"got {name}={cast_arguments[name]!r}. Leave it out."
            )
    check_tensor(x, "fake_quantize")
    arguments = _Arguments(**cast_arguments)
    formats = [None if fmt is None else get(fmt) for fmt in (forward, backward)]
    in_blocks = any(isinstance(fmt, BlockFormat) for fmt in formats)
    return cast("Tensor", _FakeQuantize.apply(x, *(_plan(fmt, arguments, in_blocks) for fmt in formats), arguments))


class _Arguments(NamedTuple):
    """Arguments of `cast` for both directions, with its defaults."""

    rounding: str = "nearest_even"
    saturate: bool | None = None
    scale: float | Tensor | None = None
    scale_rule: str = "floor"
    axis: int = -1
    generator: Generator = None


class _FakeQuantize(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, forward: Plan | None, _backward: Plan | None, arguments: _Arguments) -> Tensor:
        if forward is None:
            return x.view_as(x)
        return cast_checked(x, forward, arguments.scale, arguments.generator)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG004  (torch's names)
        _, _, ctx.backward_plan, ctx.arguments = inputs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if ctx.backward_plan is None:
            return gradient, None, None, None
        arguments = ctx.arguments._replace(generator=_other_key(ctx.arguments.generator))
        return cast("Tensor", _FakeQuantize.apply(gradient, ctx.backward_plan, None, arguments)), None, None, None


def _plan(fmt: Format | BlockFormat | None, arguments: _Arguments, in_blocks: bool) -> Plan | None:
    """Return the cast of one direction, with checked arguments.

    The backward's are checked in the forward too, and not when a gradient comes.
    """
    if fmt is None:
        return None
    rounding, saturate, scale, scale_rule, axis, generator = arguments
    if in_blocks and not isinstance(fmt, BlockFormat):
        scale_rule, axis = "floor", -1  # these belong to the block format of the other direction
    made = plan("fake_quantize", fmt, rounding=rounding, saturate=saturate, scale_rule=scale_rule, axis=axis)
    check_scale("fake_quantize", scale)
    check_generator("fake_quantize", made, generator)
    return made


def _other_key(generator: Generator) -> Generator:
    """Return another key of the same seed. A torch.Generator draws one by itself."""
    if isinstance(generator, (int, Tensor)) and not isinstance(generator, bool):
        return generator ^ _BACKWARD_KEY
    return generator
