"""`Question`: the format that a probe is asked about, and what follows from it."""

from dataclasses import dataclass
from typing import Literal

from plimsoll.errors import FormatError
from plimsoll.formats import FP32, BlockFormat, Format, get
from plimsoll.formats.catalogue import NATIVE, TARGETS


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The format of a probe."""

    name: str  # the name as the user gave it, in lower case: of a format, or of a target of `plan` such as "fp8"
    forward: Format | BlockFormat  # format of weights and activations
    backward: Format | BlockFormat  # format of gradients
    target: str | None  # the target of `plan` that tries this format first; None: there is none

    @classmethod
    def of(cls, fmt: object) -> "Question":
        """Return the question about a format, its name or dtype, or a target of `plan` ("fp8", "mxfp8", "mxfp6")."""
        key = fmt.lower() if isinstance(fmt, str) else ""
        if key in TARGETS:
            forward, backward = TARGETS[key][0]
            return cls(name=key, forward=forward, backward=backward, target=key)
        found = get(fmt)
        if isinstance(found, Format) and not found.signed:
            raise FormatError(
                f"probe: expected a format for values; got {found.name}, which holds scales. Ask for another."
            )
        backward = (isinstance(found, Format) and found.gradient_format) or found
        target = next((name for name, pairs in TARGETS.items() if pairs[0][0] == found), None)
        return cls(name=found.name, forward=found, backward=get(backward), target=target)

    @property
    def title(self) -> str:
        """The name as sentences have it."""
        return self.name.upper()

    @property
    def is_native(self) -> bool:
        """True if whole operations compute in the format, so that values have no scales."""
        return self.forward in NATIVE

    @property
    def is_exact(self) -> bool:
        """True if the format holds every FP32 value."""
        fmt = self.forward
        if isinstance(fmt, BlockFormat):
            return False
        return fmt.exponent_bits >= FP32.exponent_bits and fmt.mantissa_bits >= FP32.mantissa_bits

    @property
    def block(self) -> Literal[16, 32] | None:
        """Length of the blocks that must be recorded. None: none."""
        if not isinstance(self.forward, BlockFormat):
            return None
        return 32 if self.forward.block == 32 else 16
