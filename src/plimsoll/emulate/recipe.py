"""Arithmetic of an emulated format: rounding of operands, sums of products."""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast as cast_type

import torch
from torch import Tensor

from plimsoll import checks
from plimsoll.errors import ArgumentError
from plimsoll.formats import ROLES, BlockFormat, Format, Role, get
from plimsoll.rounding import cast, fake_quantize
from plimsoll.rounding.arguments import plan, signed
from plimsoll.watch.thread_casts import active_casts

_PASSED_ON = ("rounding", "saturate", "scale", "scale_rule", "generator")
AnyFormat = Format | BlockFormat
# Contexts to enter around each product with an accumulator of its own: its operations are no product to an observer.
around_sums: list[Callable[[Format, Tensor, Tensor], contextlib.AbstractContextManager[object]]] = []


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Recipe:
    """Formats of both directions, arguments of their casts, and the accumulator."""

    forward: AnyFormat | None
    backward: AnyFormat | None
    accumulate: Format | None  # None: the FP32 (or FP64) sums of the machine's own matrix product
    chunk: int
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])
    scales: Mapping[str, float] = field(default_factory=dict[str, float])  # by role; empty: one for all
    idle: frozenset[str] = frozenset()  # casts that are left out, as `watch.thread_casts.ActiveCasts` names them

    def acting(self) -> "Recipe":
        """Return the recipe with the casts that act on this thread, also for its backward."""
        formats = {"weights": self.forward, "activations": self.forward, "gradients": self.backward}
        formats |= {"sums": self.accumulate}
        named = {cast: fmt.name for cast, fmt in formats.items() if fmt is not None}
        idle = frozenset(cast for cast, name in named.items() if not active_casts.acts(cast, name))
        return replace(self, idle=idle) if idle else self

    def operand(self, x: Tensor, axis: int, role: Role = "activations") -> Tensor:
        """Return an operand of a product in the forward format.

        Blocks run along `axis`, which the product sums over. The role of the operand selects its scale.
        """
        return self._cast(x, self.forward, axis, role)

    def gradient(self, g: Tensor, axis: int) -> Tensor:
        """Return the gradient among a product's operands in the backward format."""
        return self._cast(g, self.backward, axis, "gradients")

    @property
    def sums_apart(self) -> bool:
        """True if products are summed in a format of the recipe, not the machine's."""
        return self.accumulate is not None and "sums" not in self.idle

    @property
    def described(self) -> list[str]:
        """The formats as arguments of `emulate`: "forward=e4m3"."""
        formats = {"forward": self.forward, "backward": self.backward, "accumulate": self.accumulate}
        return [f"{name}={fmt.name}" for name, fmt in formats.items() if fmt is not None]

    @property
    def of_results(self) -> dict[str, str]:
        """The formats of `anywhere` by collection of a run, if they are unscaled."""
        if self.scales or self.arguments.get("scale", 1.0) != 1.0:
            return {}
        formats = {"activations": self.forward, "activation_gradients": self.backward}
        return {name: fmt.name for name, fmt in formats.items() if isinstance(fmt, Format)}

    @property
    def in_blocks(self) -> bool:
        """True if each product rounds its operands again, along its own axis."""
        return isinstance(self.forward, BlockFormat)

    def anywhere(self, x: Tensor) -> Tensor:
        """Return a result in the forward format, with its gradient in the backward one."""
        formats = [fmt for fmt in (self.forward, self.backward) if fmt is not None]
        if not formats or (not x.dim() and any(isinstance(fmt, BlockFormat) for fmt in formats)):
            return x  # a block format does not apply to a scalar
        names = [fmt.name for fmt in formats]
        if not active_casts.acts("results", "/".join(dict.fromkeys(names))):
            return x
        return fake_quantize(x, forward=self.forward, backward=self.backward, **self.arguments)

    def _cast(self, x: Tensor, fmt: AnyFormat | None, axis: int, role: Role) -> Tensor:
        if fmt is None or role in self.idle:
            return x
        arguments = dict(self.arguments)
        if role in self.scales:
            arguments["scale"] = self.scales[role]
        if isinstance(fmt, BlockFormat):
            return cast(x, fmt, axis=axis, **arguments)
        arguments.pop("scale_rule", None)
        return cast(x, fmt, **arguments)

    def multiply(self, a: Tensor, b: Tensor) -> Tensor:
        """Return ``a @ b`` of 2 or 3 dimensions, summed by the accumulator.

        With an accumulator of a format, `chunk` neighbouring products along the summed axis are added in FP64. Their
        sum is added to the accumulator in FP64 and rounded to the format, from the first chunk to the last.
        """
        if self.accumulate is None or not self.sums_apart:
            return a @ b
        with contextlib.ExitStack() as stack:
            for enter in around_sums:
                stack.enter_context(enter(self.accumulate, a, b))
            return self._sum(a, b, self.accumulate)

    def _sum(self, a: Tensor, b: Tensor, accumulator: Format) -> Tensor:
        total = a.new_zeros((*a.shape[:-1], b.shape[-1]), dtype=torch.float64)
        wide_a, wide_b = a.double(), b.double()
        for start in range(0, a.shape[-1], self.chunk):
            part = slice(start, start + self.chunk)
            total = cast(total + wide_a[..., part] @ wide_b[..., part, :], accumulator)
        return total.to(a.dtype)


def recipe(
    forward: object, backward: object, accumulate: object, chunk: int, arguments: Mapping[str, Any]
) -> Recipe | None:
    """Return the recipe of the arguments, or None if they request nothing.

    `arguments` are those of `plimsoll.cast`, with `scale` also as a mapping by role. Raises an `ArgumentError` if two
    arguments contradict each other, or one is out of range.
    """
    _check_arguments(forward, backward, arguments)
    by_role = isinstance(arguments.get("scale"), Mapping)
    accumulator = get(accumulate)
    if isinstance(accumulator, BlockFormat):
        raise ArgumentError(
            f"emulate: expected accumulate to be an element format; got {accumulator.name}, whose values share scales. "
            "Use fp32, fp16, bf16 or an eXmY."
        )
    chunk = checks.integer("emulate", "chunk", chunk, low=1, remedy="Use 1, for example.")
    plain = accumulator.name == "fp32"
    if plain and chunk != 1:
        raise ArgumentError(
            f"emulate: expected chunk with an accumulator other than fp32, whose sums are the machine's own; got "
            f"chunk={chunk}. Leave it out, or name accumulate=."
        )
    if forward is None and backward is None and plain:
        return None
    return Recipe(
        forward=None if forward is None else get(forward),
        backward=None if backward is None else get(backward),
        accumulate=None if plain else accumulator,
        chunk=chunk,
        arguments=_seeded({name: value for name, value in arguments.items() if name != "scale" or not by_role}),
        scales=arguments["scale"] if by_role else {},
    )


def _check_arguments(forward: object, backward: object, arguments: Mapping[str, Any]) -> None:
    unknown = [name for name in arguments if name not in _PASSED_ON]
    if unknown:
        raise ArgumentError(
            f"emulate: expected arguments of a cast among {', '.join(_PASSED_ON)}; got {', '.join(unknown)}. "
            "Blocks run along the axis that a product sums over."
        )
    formats = [get(fmt) for fmt in (forward, backward) if fmt is not None]
    if arguments and not formats:
        raise ArgumentError(
            f"emulate: expected {', '.join(arguments)} with a forward or a backward format; got neither. Name one."
        )
    if "scale_rule" in arguments and not any(isinstance(fmt, BlockFormat) for fmt in formats):
        raise ArgumentError(
            f"emulate: expected scale_rule with a block format only; got {arguments['scale_rule']!r} with "
            f"{', '.join(fmt.name for fmt in formats)}. Leave it out."
        )
    for fmt in formats:
        rule = arguments.get("scale_rule", "floor") if isinstance(fmt, BlockFormat) else "floor"
        rounding, saturate = arguments.get("rounding", "nearest_even"), arguments.get("saturate")
        plan("emulate", fmt, rounding=rounding, saturate=saturate, scale_rule=rule, axis=-1)
        for scale in _scales(arguments.get("scale")):
            cast(torch.zeros(1), fmt, rounding=rounding, scale=scale)
    _check_roles(forward, backward, arguments.get("scale"))
    generator = arguments.get("generator")
    if generator is not None and arguments.get("rounding") != "stochastic":
        raise ArgumentError(
            f"emulate: expected a generator with rounding='stochastic' only; got generator={generator!r}. Leave it "
            "out, or round stochastically."
        )


def _check_roles(forward: object, backward: object, scale: object) -> None:
    """Raise `ArgumentError` for a scale of what is not cast."""
    for role in cast_type("Mapping[Any, Any]", scale) if isinstance(scale, Mapping) else ():
        if (backward if role == "gradients" else forward) is None:
            name = "backward" if role == "gradients" else "forward"
            raise ArgumentError(
                f"emulate: expected scales of what is cast; got one of {role} without {name}=. Name a format, or leave "
                "the scale out."
            )


def _scales(scale: object) -> list[Any]:
    """Return the scales of all casts: one, or one by role."""
    if not isinstance(scale, Mapping):
        return [scale]
    by_role = cast_type("Mapping[Any, Any]", scale)
    strange = [role for role in by_role if role not in ROLES]
    if strange:
        raise ArgumentError(
            f"emulate: expected scale as a number, or a mapping by {', '.join(ROLES)}; got {strange[0]!r}. Use these."
        )
    return list(by_role.values())


def _seeded(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments with a generator for their seed."""
    seed = arguments.get("generator")
    if seed is None:
        return {name: value for name, value in arguments.items() if name != "generator"}
    # One generator for all casts: each then draws other noise, in the order of the calls.
    if type(seed) is int:
        return {**arguments, "generator": torch.Generator().manual_seed(signed(seed))}
    if not isinstance(seed, torch.Generator) or seed.device.type != "cpu":
        raise ArgumentError(
            f"emulate: expected generator to be an int or a CPU torch.Generator; got {seed!r}. A key tensor would give "
            "every cast the same noise."
        )
    return dict(arguments)


Multiply = Callable[[Tensor, Tensor], Tensor]
