"""`ErrorReport`: the errors of a step's tensors, as `microscope` returns them."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

from plimsoll.checks import one_of
from plimsoll.errors import NotRecordedError
from plimsoll.microscope.blame.result import Blame, ends_of, finite, without_model
from plimsoll.results import NotebookRepr
from plimsoll.spectrum import Interval
from plimsoll.spectrum.error_sums import CONFIDENCE
from plimsoll.tensor_collections import COLLECTIONS, LABELS
from plimsoll.text import aligned, counted, number, percent

SHADOWED = tuple(c.name for c in COLLECTIONS if c.is_shadowed)
_SHOWN = 12  # rows of a report's text
_VARIED = {
    "batches": "batches",
    "random numbers": "the step's random numbers",
    "weights": "weights and inputs, changed by amounts as large as the error",
}
_HEADS = ("tensor", "of", "error", "bias", "noise", "SNR dB", "cosine", "NaN/Inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorRow(NotebookRepr):
    """The error of one tensor against the reference, over all draws.

    Attributes:
        name: "MODULE:input" or "MODULE:output" of activations and their gradients, else the parameter's name.
        collection: "activations", "activation_gradients" or "gradients".
        relative_error: Norm of the error over the norm of the reference: the root mean square over draws.
        bias: The part of it that stays from draw to draw, relative too, with a 95 % interval.
        noise: The rest: relative_error^2 = bias^2 + noise^2. NaN with one draw.
        snr_db: Power of the reference over that of the error, in dB.
        cosine: Cosine of the angle between values and reference.
        along_reference: Mean error along the reference, with its sign: -0.01 where values are a hundredth too small.
        largest_error: Largest error of an element, in the tensor's own unit.
        made_nonfinite: Number of values that are NaN or infinite where the reference is finite, over all draws.
        reference_nonfinite: Number of values whose reference is NaN or infinite.
        values: Number of values compared, over all draws.
    """

    name: str
    collection: str
    relative_error: float
    bias: Interval
    noise: float
    snr_db: float
    cosine: float
    along_reference: float
    largest_error: float
    made_nonfinite: int
    reference_nonfinite: int
    values: int

    @property
    def is_bias(self) -> bool:
        """True if bias is surely there, and more of the squared error than noise."""
        return self.bias.low > 0 and self.bias.estimate > self.noise

    def __str__(self) -> str:
        broken = f", {counted(self.made_nonfinite, 'value')} became NaN or infinite" if self.made_nonfinite else ""
        bias = f"{_share(self.bias.estimate)} ({_share(self.bias.low)} to {_share(self.bias.high)})"
        return (
            f"{self.name} ({LABELS[self.collection]}): error {_share(self.relative_error)}, bias {bias}, noise "
            f"{_share(self.noise)}, SNR {number(round(self.snr_db, 1))} dB{broken}"
        )

    def to_dict(self) -> dict[str, object]:
        """Return the row as data that JSON can hold; what is no finite number is None."""
        names = [name for name in self.__dataclass_fields__ if name != "bias"]
        found: dict[str, object] = {name: finite(getattr(self, name)) for name in names}
        return {**found, "bias": ends_of(self.bias), "is_bias": self.is_bias}


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorReport(NotebookRepr):
    """The result of `plimsoll.microscope`.

    Attributes:
        rows: A row for each tensor, in the order of the step.
        reference: Name of the format that the reference was computed in.
        draws: Number of draws that separate bias from noise.
        varied: What differed between draws: "batches", "random numbers" or "weights".
        losses: The loss of each draw, as the step computes it.
    """

    rows: tuple[ErrorRow, ...]
    reference: str
    draws: int
    varied: str
    losses: tuple[float, ...]
    blamer: Callable[..., Blame] | None = field(default=None, repr=False, compare=False)

    def __iter__(self) -> Iterator[ErrorRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def row(self, name: str, collection: str | None = None) -> ErrorRow:
        """Return the row of a tensor.

        Args:
            name: Its name.
            collection: Its collection. Default: the first that has the name.

        Raises:
            ArgumentError: There is no such collection.
            NotRecordedError: There is no such tensor.
        """
        rows = self._of(collection)
        found = [row for row in rows if row.name == name]
        if not found:
            some = ", ".join(dict.fromkeys(row.name for row in rows[:5]))
            raise NotRecordedError(
                f"ErrorReport.row: expected a tensor of the report; got {name!r}"
                f"{f' of {collection}' if collection else ''}. There are {some or 'none'}."
            )
        return found[0]

    def _of(self, collection: str | None) -> list[ErrorRow]:
        if collection is not None:
            one_of("ErrorReport", "collection", collection, SHADOWED)
        return [row for row in self.rows if collection in (None, row.collection)]

    def worst(self, collection: str | None = None) -> list[ErrorRow]:
        """Return the rows, the largest relative error first. NaN is last.

        They are all rows, or those of a collection.

        Raises:
            ArgumentError: There is no such collection.
        """
        rows = self._of(collection)
        return sorted(rows, key=lambda row: math.inf if math.isnan(row.relative_error) else -row.relative_error)

    def blame(self, *, budget: int = 200, of: str = "gradients") -> Blame:
        """Return the contributions to the gradients' error: casts, operations, modules.

        The step is made again as its reference, with one module in low precision at a time, and with one cast of it.
        So the model and the closures must be as they were.

        Args:
            budget: Most passes, forward and backward each, to make.
            of: "gradients", all of them alike whatever their size, or the name of one parameter.

        Raises:
            ArgumentError: `budget` or `of` cannot be.
            StateError: The model is gone, or the report was loaded.
        """
        return (self.blamer or without_model)(budget=budget, of=of)

    def table(self, collection: str | None = None) -> str:
        """Return the rows as a table, a tensor each, the largest relative error first."""
        return "\n".join(_lines(_distinct(self.worst(collection))))

    def __str__(self) -> str:
        """Return the draws' variation and the largest errors."""
        distinct = _distinct(self.worst())
        rows = distinct[:_SHOWN]
        more = len(distinct) - len(rows)
        head = (
            f"Errors against {self.reference.upper()} of {counted(len(distinct), 'tensor')}, over "
            f"{counted(self.draws, 'draw')} of {_VARIED[self.varied]}; bias with its {percent(CONFIDENCE)} interval."
        )
        return "\n".join([head, *(_lines(rows) if rows else []), *([f"and {more:,} more"] if more else [])])

    def to_dict(self) -> dict[str, object]:
        """Return the report as data that JSON can hold."""
        return {
            "reference": self.reference,
            "draws": self.draws,
            "varied": self.varied,
            "losses": [finite(loss) for loss in self.losses],
            "rows": [row.to_dict() for row in self.rows],
        }


def _state_of(report: ErrorReport) -> dict[str, Any]:
    """Return all but the way back to the model."""
    return {name: getattr(report, name) for name in report.__dataclass_fields__ if name != "blamer"}


def _set_state(report: ErrorReport, state: dict[str, Any]) -> None:
    for name, value in {**state, "blamer": None}.items():
        object.__setattr__(report, name, value)


# Up to Python 3.11.3 a frozen dataclass with slots would replace methods of these names in the class itself.
cast("Any", ErrorReport).__getstate__ = _state_of
cast("Any", ErrorReport).__setstate__ = _set_state


def _distinct(rows: list[ErrorRow]) -> list[ErrorRow]:
    """Return the rows with each tensor once: an output is the next module's input."""
    found: dict[object, ErrorRow] = {}
    for row in rows:
        errors = row.collection, row.values, row.relative_error, row.bias, row.largest_error
        # Parameters are tensors of their own, and so may be all that have no error.
        found.setdefault(errors if row.largest_error and ":" in row.name else (row.name, row.collection), row)
    return list(found.values())


def _lines(rows: list[ErrorRow]) -> list[str]:
    """Return a table: its heads, and a line for each row."""
    cells = [
        (
            row.name, LABELS[row.collection], _share(row.relative_error),
            f"{_share(row.bias.estimate)} ({_share(row.bias.low)} to {_share(row.bias.high)})", _share(row.noise),
            number(round(row.snr_db, 1)), f"{row.cosine:.6f}", f"{row.made_nonfinite:,}",
        )
        for row in rows
    ]  # fmt: skip
    return aligned([_HEADS, *cells], right=("error", "noise", "SNR dB", "cosine", "NaN/Inf"))


def _share(value: float) -> str:
    """Write a relative error: in per cent, small ones with an exponent."""
    if not math.isfinite(value):
        return "unknown" if math.isnan(value) else "infinite"
    return percent(value) if value == 0 or value >= 1e-4 else number(value)
