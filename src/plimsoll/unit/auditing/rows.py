"""The rows of an audit: one for each tensor, with what it holds and what its gradient holds."""

import math
from dataclasses import dataclass
from typing import Literal

from plimsoll.notebook_repr import NotebookRepr
from plimsoll.spectrum import Spectrum
from plimsoll.text import number

Kind = Literal["input", "operation", "parameter"]
Direction = Literal["forward", "backward"]
# Why there is no gradient: none was asked for here, nothing here is trained, or one was to come and did not.
Absence = Literal["no_grad", "frozen", "never came"]

DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")
FORMATS = ("fp16", "e4m3", "e5m2")  # those that an audit judges by


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading(NotebookRepr):
    """One direction of a row: the values of the tensor, or those of its gradient.

    Fractions are estimates (`Spectrum.fit`), of the nonzero finite values, at the scale that the values have now.
    """

    row: "Row"
    direction: Direction
    spectrum: Spectrum

    @property
    def scale(self) -> float:
        """log2 of the standard deviation: 0 at unit scale; -Inf where all values are zero.

        NaN where there is none to speak of: fewer than two finite values, or all of them equal and not zero.
        """
        s = self.spectrum
        if s.finite < 2:
            return math.nan
        if not s.nonzero:
            return -math.inf
        return math.log2(s.std) if s.std > 0 else math.nan

    @property
    def distance(self) -> float:
        """How many binades the standard deviation lies from 1, above or below."""
        return abs(self.scale)

    @property
    def spoiled(self) -> int:
        """How many values are NaN or +Inf. A -Inf is not counted: masks are made of them."""
        return self.spectrum.nans + self.spectrum.pos_infs

    def lost(self, fmt: object) -> float:
        """The fraction that the format would round to zero."""
        return self.spectrum.fit(fmt).lost.estimate

    def overflow(self, fmt: object) -> float:
        """The fraction beyond the format's largest value."""
        return self.spectrum.fit(fmt).overflow.estimate

    def outside(self, fmt: object) -> float:
        """The fraction that the format would lose at either end."""
        fit = self.spectrum.fit(fmt)
        return fit.lost.estimate + fit.overflow.estimate

    def __str__(self) -> str:
        """One line: the tensor, the direction and its standard deviation."""
        return f"{self.row.name}, {self.direction}: {_std(self.spectrum)}"

    def to_dict(self) -> dict[str, object]:
        """The reading as JSON-able data."""
        s = self.spectrum
        return {
            "std": plain(s.std), "log2_std": plain(self.scale), "rms": plain(s.rms), "absmax": plain(s.absmax),
            "zero_fraction": plain(s.zero_fraction), "nans": s.nans, "pos_infs": s.pos_infs, "neg_infs": s.neg_infs,
            "lost": {name: self.lost(name) for name in FORMATS},
            "overflow": {name: self.overflow(name) for name in FORMATS},
            "spectrum": s.to_dict(),
        }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Row(NotebookRepr):
    """One tensor of a forward: an operation's result, an input of the model, or a parameter.

    - `position`: its place in program order; parameters come after all operations, in the model's order.
    - `operation`: "linear"; of an input its index or name, of a parameter its own name ("weight"). `module`: the path
      of the innermost module that runs it, "model" for the root, "loss" for the loss. `call`, `output`: which call of
      this operation in this module it is, and which of its results, from 0.
    - `source`: the line of the user's code, "file:line"; None where there is none.
    - `moved`: the values are those of another tensor, only elsewhere (a view, a copy, a join), or made of no values.
    - `backward`: what the gradient holds; None where there is none, and `absence` says why.
    """

    position: int
    kind: Kind
    operation: str
    module: str
    call: int = 0
    output: int = 0
    source: str | None = None
    shape: tuple[int, ...]
    dtype: str
    moved: bool = False
    forward: Spectrum
    backward: Spectrum | None = None
    absence: Absence | None = None

    @property
    def name(self) -> str:
        """What it is called: "blocks.0.mlp linear", with the call and the output where there are several."""
        call = f" #{self.call + 1}" if self.call else ""
        output = f" [{self.output}]" if self.output else ""
        if self.kind == "parameter":
            return f"{self.module}.{self.operation}" if self.module != "model" else self.operation
        return f"{self.module} {self.operation}{call}{output}"

    @property
    def key(self) -> tuple[str, str, str, int, int]:
        """What it is matched by in another audit."""
        return self.kind, self.module, self.operation, self.call, self.output

    @property
    def forward_std(self) -> float:
        """Standard deviation of the values."""
        return self.forward.std

    @property
    def backward_std(self) -> float:
        """Standard deviation of the gradient's values; NaN without a gradient."""
        return math.nan if self.backward is None else self.backward.std

    def reading(self, direction: Direction) -> Reading | None:
        """One direction of it; None where there is no gradient."""
        found = self.forward if direction == "forward" else self.backward
        return None if found is None else Reading(row=self, direction=direction, spectrum=found)

    def __str__(self) -> str:
        """One line: the tensor and its standard deviation in both directions."""
        backward = self.absence or "none" if self.backward is None else _std(self.backward)
        return f"{self.name}: forward {_std(self.forward)}, backward {backward}"

    def to_dict(self) -> dict[str, object]:
        """The row as JSON-able data."""
        forward, backward = self.reading("forward"), self.reading("backward")
        return {
            "position": self.position, "kind": self.kind, "name": self.name, "operation": self.operation,
            "module": self.module, "call": self.call, "output": self.output, "source": self.source,
            "shape": list(self.shape), "dtype": self.dtype, "moved": self.moved,
            "forward": None if forward is None else forward.to_dict(),
            "backward": None if backward is None else backward.to_dict(),
            "absence": self.absence,
        }  # fmt: skip


def _std(spectrum: Spectrum) -> str:
    return f"std {number(spectrum.std)}"


def plain(value: float) -> float | str:
    """A number as JSON has it; by its name where JSON has none for it."""
    return value if math.isfinite(value) else str(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """The same row before and after."""

    before: Row
    after: Row

    @property
    def name(self) -> str:
        """What the row is called."""
        return self.before.name

    def distances(self, direction: Direction) -> tuple[float, float]:
        """How many binades from unit scale it lies, before and after; NaN where there is no scale to speak of."""
        found = [row.reading(direction) for row in (self.before, self.after)]
        before, after = (math.nan if reading is None else reading.distance for reading in found)
        return before, after
