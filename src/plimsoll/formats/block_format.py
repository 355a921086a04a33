"""The record of one block format: elements that share a scale."""

from dataclasses import dataclass

from plimsoll.errors import FormatError
from plimsoll.formats.element_format import Format


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockFormat:
    """Element codes in blocks of `block` values, each block with one scale.

    The value of an element is ``element * scale``, and ``element * scale * tensor_scale`` where the format has an FP32
    scale for the whole tensor besides (`tensor_scale`, NVFP4).

    >>> from plimsoll.formats import NVFP4
    >>> NVFP4.element.name, NVFP4.block, NVFP4.scale.name, NVFP4.bits
    ('e2m1', 16, 'e4m3', 4.5)
    """

    name: str
    element: Format
    block: int
    scale: Format
    tensor_scale: bool = False

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

    @property
    def bits(self) -> float:
        """Storage per value, the block's share of its scale included (the one tensor scale is left out)."""
        return self.element.bits + self.scale.bits / self.block
