"""A cast as plain integers for operators and graphs, and as backends' record."""

from typing import Generic, NamedTuple, TypeVar

from torch import Tensor

from plimsoll.formats import BlockFormat, Format
from plimsoll.formats.records import SPECIALS

ROUNDINGS = ("nearest_even", "nearest_away", "toward_zero", "up", "down", "stochastic")
NEAREST_EVEN, NEAREST_AWAY, TOWARD_ZERO, UP, DOWN, STOCHASTIC = range(6)

OVERFLOW_INF, OVERFLOW_MAX, OVERFLOW_NAN = range(3)

SCALE_RULES = ("floor", "ceil", "rceil", "even")
FLOOR, CEIL, RCEIL, EVEN = range(4)


class CastSpec(NamedTuple):
    """An element format with its rounding and overflow rule: seven integers."""

    exponent_bits: int
    mantissa_bits: int
    bias: int
    specials: int
    signed: int
    rounding: int
    overflow: int

    @classmethod
    def of(cls, fmt: Format, rounding: int, saturate: bool) -> "CastSpec":
        """The spec for `fmt`; `saturate` is already resolved (`Format.saturates`)."""
        overflow = OVERFLOW_MAX if saturate else OVERFLOW_INF if fmt.has_inf else OVERFLOW_NAN
        return cls(
            fmt.exponent_bits, fmt.mantissa_bits, fmt.bias, SPECIALS.index(fmt.specials), int(fmt.signed),
            rounding, overflow,
        )  # fmt: skip

    @property
    def format(self) -> Format:
        """The format again, named by its fields."""
        return Format(
            name=f"e{self.exponent_bits}m{self.mantissa_bits}",
            exponent_bits=self.exponent_bits,
            mantissa_bits=self.mantissa_bits,
            bias=self.bias,
            specials=SPECIALS[self.specials],
            signed=bool(self.signed),
        )


class BlockSpec(NamedTuple):
    """A block format with the rule that chooses scales: elements always saturate."""

    element: CastSpec
    block: int
    scale: CastSpec
    tensor_scale: bool
    rule: int

    @classmethod
    def of(cls, fmt: BlockFormat, rounding: int, rule: int) -> "BlockSpec":
        """Return the spec for `fmt`. `rule` sets the rounding of scales with a mantissa."""
        element = CastSpec.of(fmt.element, rounding, saturate=True)
        scale_rounding = UP if rule in (CEIL, RCEIL) else NEAREST_EVEN
        scale = CastSpec.of(fmt.scale, scale_rounding, saturate=True)
        return cls(element, fmt.block, scale, fmt.tensor_scale, rule)

    def to_ints(self) -> list[int]:
        """The seventeen integers that an operator's schema carries."""
        return [*self.element, self.block, *self.scale, int(self.tensor_scale), self.rule]

    @classmethod
    def from_ints(cls, ints: "list[int]") -> "BlockSpec":
        """The inverse of `to_ints`."""
        return cls(CastSpec(*ints[:7]), ints[7], CastSpec(*ints[8:15]), bool(ints[15]), ints[16])


Spec = TypeVar("Spec", CastSpec, BlockSpec)


class CastArguments(NamedTuple, Generic[Spec]):
    """Arguments of a backend's cast, without the tensors that it reads and writes.

    Values are multiplied by the scale before they are rounded, and divided by it after. Tensors take the place of the
    numbers, so that a graph does not hold them: `scale_tensor` (float64) of `scale`, `key` (int64) of `seed`.
    """

    spec: Spec
    scale: float = 1.0
    scale_tensor: Tensor | None = None
    seed: int = 0
    key: Tensor | None = None
    tensor_scale: Tensor | None = None  # of block formats whose scales have a mantissa

    @property
    def scaled(self) -> bool:
        """True if there is a scale other than 1.

        One in a tensor counts, since its value is not known here.
        """
        return self.scale_tensor is not None or self.scale != 1.0
