"""`Fault`: the first operation that went wrong, and all that can be said of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from plimsoll.diagnosis.finding import plain
from plimsoll.notebook_repr import NotebookRepr
from plimsoll.spectrum import Spectrum

Kind = Literal["nan", "inf", "flush"]
Phase = Literal["before", "forward", "backward", "recomputation", "optimizer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source(NotebookRepr):
    """A line of code: of the user's, not of torch's or Plimsoll's."""

    file: str
    line: int
    function: str
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """A tensor that went into an operation, or came out of it.

    `name` is the operation's own name for it, `called` what it is known as (a parameter's name) if it is. The
    `spectrum` is None where there are no floating values. An operand that is changed in place is told as it was before.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    spectrum: Spectrum | None = None
    called: str | None = None

    def to_dict(self) -> dict[str, object]:
        """As JSON-able data."""
        spectrum = None if self.spectrum is None else self.spectrum.to_dict()
        shape = list(self.shape)
        return {"name": self.name, "dtype": self.dtype, "shape": shape, "called": self.called, "spectrum": spectrum}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault(NotebookRepr):
    """The first operation whose finite inputs gave a NaN or an Inf that mattered, or that flushed values to zero.

    - `kind`: "nan", "inf" or "flush". `sentence`: what happened, in one sentence.
    - `operation`: torch's name of it ("aten.exp"). `phase`: "forward", "backward", "recomputation" (a checkpoint's
      forward, run again in the backward), "optimizer" (all that comes after a backward: unscaling, clipping, the step),
      or "before": the values were there when the closure began, and the operation is the first that met them.
    - `module`: the module that ran it ("blocks.3.attn"; "model" is the root). `source`: the line of the user's code;
      in the backward that of the forward operation it differentiates, unless the user's own code was running.
    - `forward`: in the backward, the forward operation ("aten.log"); None where there is no single one.
    - `inputs`, `outputs`: its tensors. `scalars`: its other arguments.
    - `count` of `total` output values were not finite (or were flushed, of those that should not be zero), the first of
      them at `first_index`; `at` has the inputs' values there, where the operation works value by value, and `expected`
      what a wider format gives.
    - `scale`: the loss scale that the backward ran with. `reached`: what it spoiled ("the loss").
    - `error`: what the closure raised, if it did.
    """

    kind: Kind
    operation: str
    phase: Phase
    sentence: str
    module: str | None = None
    source: Source | None = None
    forward: str | None = None
    inputs: tuple[Operand, ...] = ()
    outputs: tuple[Operand, ...] = ()
    scalars: Mapping[str, float | int | str] = field(default_factory=dict[str, "float | int | str"])
    count: int = 0
    total: int = 0
    first_index: tuple[int, ...] = ()
    at: Mapping[str, float] = field(default_factory=dict[str, float])
    expected: float | None = None
    scale: float | None = None
    reached: str | None = None
    error: str | None = None

    def to_dict(self) -> dict[str, object]:
        """The fault as JSON-able data; a number that JSON has no form for is its name ("nan", "inf")."""
        s = self.source
        where = None if s is None else {"file": s.file, "line": s.line, "function": s.function, "text": s.text}
        return {
            "kind": self.kind,
            "operation": self.operation,
            "phase": self.phase,
            "sentence": self.sentence,
            "module": self.module,
            "source": where,
            "forward": self.forward,
            "inputs": [operand.to_dict() for operand in self.inputs],
            "outputs": [operand.to_dict() for operand in self.outputs],
            "scalars": {name: plain(value) for name, value in self.scalars.items()},
            "count": self.count,
            "total": self.total,
            "first_index": list(self.first_index),
            "at": {name: plain(value) for name, value in self.at.items()},
            "expected": None if self.expected is None else plain(self.expected),
            "scale": None if self.scale is None else plain(self.scale),
            "reached": self.reached,
            "error": self.error,
        }

    def __str__(self) -> str:
        from plimsoll.diagnosis.locating.fault_text import block  # it needs the records above

        return block(self)
