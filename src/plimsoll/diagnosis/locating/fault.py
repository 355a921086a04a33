"""`Fault`: the first operation that went wrong, and all that can be said of it."""

import math
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from plimsoll import exports
from plimsoll.diagnosis.finding import shown
from plimsoll.results import JsonRecord, NotebookRepr
from plimsoll.spectrum import Spectrum
from plimsoll.text import printable

Kind = Literal["nan", "inf", "flush"]
Phase = Literal["before", "forward", "backward", "recomputation", "optimizer"]


@exports.exported_by("plimsoll.diagnosis")
@dataclass(frozen=True, slots=True, kw_only=True)
class Source(NotebookRepr):
    """A line of code: of the user's, not of torch's or Plimsoll's."""

    file: str
    line: int
    function: str
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@exports.exported_by("plimsoll.diagnosis")
@dataclass(frozen=True, slots=True, kw_only=True)
class Operand(JsonRecord):
    """A tensor that went into an operation, or came out of it.

    `name` is the operation's own name for it, `called` what it is known as (a parameter's name) if it is. The
    `spectrum` is None where there are no floating values. An operand that is changed in place is as it was before.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    called: str | None = None
    spectrum: Spectrum | None = None


@exports.exported_by("plimsoll.diagnosis")
@dataclass(frozen=True, slots=True, kw_only=True)
class Fault(JsonRecord, NotebookRepr):
    """First operation that made NaN, Inf or zeros that mattered from finite inputs.

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

    def __str__(self) -> str:
        return block(self)


_WIDTH = 80
_INDENT = " " * 11
_MOST = 6  # operands of one kind that are listed
_PLACES = {
    "before": "before any operation",
    "recomputation": "recomputation of a checkpoint",
    "optimizer": "after the backward",
}


def block(fault: Fault) -> str:
    """The fault as lines of at most 80 columns."""
    lines = textwrap.wrap(printable(fault.sentence, lines=False), _WIDTH, break_long_words=True)
    lines += _entry("operation", _operation(fault))
    if fault.module is not None:
        lines += _entry("module", shown(fault.module))
    if fault.source is not None:
        lines += _entry("source", f"{_tail(fault.source.file)}:{fault.source.line}, in {shown(fault.source.function)}")
        lines += [_INDENT + "  " + _cut(printable(fault.source.text, lines=False), _WIDTH - len(_INDENT) - 2)]
    lines += _operands("input", fault.inputs) + _operands("output", fault.outputs)
    if fault.scalars:
        lines += _entry("arguments", ", ".join(f"{name}={value}" for name, value in fault.scalars.items()))
    if fault.count:
        lines += _entry("values", _values(fault))
    if fault.scale is not None:
        lines += _entry("loss scale", number(fault.scale))
    if fault.reached is not None:
        lines += _entry("reached", printable(fault.reached, lines=False))
    if fault.error is not None:
        lines += _entry("raised", printable(fault.error, lines=False))
    return "\n".join(lines)


def number(value: float) -> str:
    """A value in few digits: 65,504, 1.3e-05, NaN."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Inf" if value > 0 else "-Inf"
    if value == 0:
        return "-0" if math.copysign(1, value) < 0 else "0"
    size = abs(value)
    if 1 <= size < 1e7 or (size < 2**53 and value == round(value) and math.frexp(size)[0] == 0.5):
        rounded = f"{value:,.1f}" if size < 1000 else f"{value:,.0f}"
        return rounded.removesuffix(".0")
    return f"{value:.3g}"


def _operation(fault: Fault) -> str:
    of = f" of {fault.forward}" if fault.forward is not None else ""
    return f"{fault.operation}, {_PLACES.get(fault.phase, fault.phase)}{of}"


def _values(fault: Fault) -> str:
    what = {"nan": "not finite", "inf": "not finite", "flush": "flushed to zero"}[fault.kind]
    index = ", ".join(str(i) for i in fault.first_index)
    text = f"{fault.count:,} of {fault.total:,} {what}, the first at ({index})"
    if fault.at:
        text += " from " + ", ".join(f"{name}={number(value)}" for name, value in fault.at.items())
    if fault.expected is not None:
        text += f"; a wider format gives {number(fault.expected)}"
    return text


def _operands(kind: str, operands: tuple[Operand, ...]) -> list[str]:
    lines: list[str] = []
    for operand in operands[:_MOST]:
        shape = "x".join(str(n) for n in operand.shape) or "scalar"
        called = f" ({shown(operand.called)})" if operand.called is not None else ""
        range_words = "" if operand.spectrum is None else f": {held_by(operand.spectrum)}"
        lines += _entry(kind, f"{operand.name}{called} {operand.dtype} {shape}{range_words}")
    if len(operands) > _MOST:
        lines += _entry(kind, f"and {len(operands) - _MOST} more")
    return lines


def held_by(s: Spectrum) -> str:
    """Return a tensor's contents in few words."""
    parts: list[str] = []
    if s.absmax > 0:
        low, high = math.log2(s.absmin), math.log2(s.absmax)
        parts.append(f"|x| {_power(low)} to {_power(high)}" if low != high else f"|x| {_power(low)}")
    parts += [
        f"{count:,} {what}"
        for count, what in ((s.zeros, "zero"), (s.nans, "NaN"), (s.pos_infs, "Inf"), (s.neg_infs, "-Inf"))
        if count
    ]
    return ", ".join(parts) or "no values"


def _power(exponent: float) -> str:
    return f"2^{round(exponent, 1) + 0.0:.1f}"  # + 0.0: no -0.0


def _entry(name: str, text: str) -> list[str]:
    head = f"{name:<{len(_INDENT)}}"
    return textwrap.wrap(
        printable(text, lines=False), _WIDTH, initial_indent=head, subsequent_indent=_INDENT, break_long_words=True
    ) or [head.rstrip()]


def _tail(path: str) -> str:
    clean = printable(path, lines=False)
    return clean if len(clean) <= _WIDTH - 30 else "..." + clean[-(_WIDTH - 33) :]


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."
