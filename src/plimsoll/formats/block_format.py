"""Record of a block format, whose elements share a scale."""

from dataclasses import dataclass, field

from plimsoll.errors import FormatError
from plimsoll.formats.element_format import Format, set_fields


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockFormat:
    """Element codes in blocks of values, each block with one scale.

    The value of an element is ``element * scale``, or ``element * scale * tensor_scale`` if the format also has an FP32
    scale for the whole tensor.

    Args:
        name: The catalogue's name, in lower case.
        element: Format of the elements; it has a sign.
        block: Number of values that share a scale, at least 1.
        scale: Format of the scales.
        tensor_scale: Whether there is an FP32 scale for the tensor, as in NVFP4. Default: False.
        in_report: Whether the single-file report answers what-if questions for it. Default: False.
        cuda_capability: First compute capability whose matrix units multiply it. Default: None, there is none.

    Raises:
        FormatError: The fields contradict each other.

    >>> from plimsoll.formats import NVFP4
    >>> NVFP4.element.name, NVFP4.block, NVFP4.scale.name, NVFP4.bits
    ('e2m1', 16, 'e4m3', 4.5)
    """

    name: str
    element: Format
    block: int
    scale: Format
    tensor_scale: bool = False
    in_report: bool = field(default=False, compare=False, repr=False)
    cuda_capability: tuple[int, int] | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.block < 1:
            raise FormatError(f"BlockFormat: expected a block of at least one value; got {self!r}")
        if not self.element.signed:
            raise FormatError(f"BlockFormat: expected signed elements; got {self!r}")
        if self.tensor_scale and not self.scale.signed:
            raise FormatError(
                "BlockFormat: expected a scale with a mantissa (as E4M3) under an FP32 tensor scale; got a pure "
                f"exponent in {self!r}"
            )

    __setstate__ = set_fields

    @property
    def bits(self) -> float:
        """Bits of storage per value, including its share of the block's scale."""
        return self.element.bits + self.scale.bits / self.block
