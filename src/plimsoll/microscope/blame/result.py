"""`Blame`: what contributed how much to the error of a step's gradients."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NoReturn, overload

from plimsoll.errors import StateError
from plimsoll.results import NotebookRepr
from plimsoll.spectrum import Interval
from plimsoll.text import aligned, number, percent

Direction = Literal["forward", "backward", "both"]
_SHOWN = 12  # rows of a blame's text
_HEADS = ("share", "module", "contribution", "direction", "kind")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlameRow(NotebookRepr):
    """One contribution to the error.

    Attributes:
        module: Name of the module, "loss" for what the step computes outside of the model, or a glob over modules that
            the budget did not allow to tell apart.
        cast: What it is: "e5m2 of gradients", "bf16 arithmetic", "operations".
        direction: Where it arises: in the "forward", in the "backward", or "both", where it is not known which.
        share: Part of the whole error that it makes up, as a fraction. Negative where it cancels a part of the rest.
        bias: Of the contribution: what stays from draw to draw, relative to the gradients. None: not asked.
        noise: The rest of the contribution. None: not asked.
    """

    module: str
    cast: str
    direction: Direction
    share: float
    bias: Interval | None = None
    noise: float | None = None

    @property
    def is_bias(self) -> bool | None:
        """True if bias is surely there and outweighs noise. None: not asked."""
        if self.bias is None or self.noise is None:
            return None
        return self.bias.low > 0 and self.bias.estimate > self.noise

    def __str__(self) -> str:
        return "  ".join(filter(None, self.cells))

    @property
    def cells(self) -> tuple[str, ...]:
        """The row of a table: share, module, cast, direction, and bias or noise."""
        kind = {None: "", True: "bias", False: "noise"}[self.is_bias]
        return _share(self.share), self.module, self.cast, self.direction, kind

    def to_dict(self) -> dict[str, object]:
        """Return the row as data that JSON can hold."""
        return {
            "module": self.module, "cast": self.cast, "direction": self.direction, "share": finite(self.share),
            "bias": None if self.bias is None else ends_of(self.bias), "noise": finite(self.noise),
            "is_bias": self.is_bias,
        }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Blame(NotebookRepr, Sequence[BlameRow]):
    """Contributions to the error of a step's gradients, the largest first.

    Attributes:
        rows: The contributions.
        of: "gradients", or the parameter whose gradient's error it is.
        relative_error: The whole error: root mean square over the gradients' relative errors.
        passes: Number of passes that were made.
        remarks: What is to be known about the answer.
    """

    rows: tuple[BlameRow, ...]
    of: str
    relative_error: float
    passes: float
    remarks: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[BlameRow]:
        return iter(self.rows)

    @overload
    def __getitem__(self, place: int) -> BlameRow: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[BlameRow]: ...

    def __getitem__(self, place: int | slice) -> BlameRow | Sequence[BlameRow]:
        return self.rows[place]

    @property
    def explained(self) -> float:
        """Sum of the shares: 1 if errors add up, which large ones may not."""
        return sum(row.share for row in self.rows)

    @property
    def sentence(self) -> str:
        """The largest contribution, as a sentence."""
        whose = "the gradients' error" if self.of == "gradients" else f"the error of {self.of}'s gradient"
        if not self.rows:
            return f"Nothing contributes to {whose}: there is none."
        row = self.rows[0]
        kind = {None: "", True: " It is bias.", False: " It is noise."}[row.is_bias]
        where = {"forward": " in the forward", "backward": " in the backward", "both": ""}[row.direction]
        return f"{_share(row.share)} of {whose} comes from the {row.cast} of {row.module}{where}.{kind}"

    def __str__(self) -> str:
        """The sentence, the largest contributions, and the remarks."""
        more = len(self.rows) - _SHOWN
        rest = [f"and {more} more"] if more > 0 else []
        table = aligned([_HEADS, *(row.cells for row in self.rows[:_SHOWN])], right=_HEADS[:1]) if self.rows else []
        return "\n".join([self.sentence, *table, *rest, *self.remarks])

    def to_dict(self) -> dict[str, object]:
        """Return the blame as data that JSON can hold."""
        return {
            "of": self.of, "relative_error": finite(self.relative_error), "passes": self.passes,
            "explained": finite(self.explained), "sentence": self.sentence,
            "rows": [row.to_dict() for row in self.rows], "remarks": list(self.remarks),
        }  # fmt: skip


def without_model(**_: object) -> NoReturn:
    """Raise: a report that was loaded knows no model."""
    raise StateError(
        "ErrorReport.blame: expected the model and the closures that the report is of; got a report that was loaded, "
        "or whose model is gone. Call plimsoll.microscope again."
    )


def _share(value: float) -> str:
    return (
        f"-{percent(-value)}"
        if value < 0
        else f"{number(round(100 * value))} %"
        if 1 < value < math.inf
        else percent(value)
    )


def finite(value: object) -> object:
    """Return a value as JSON can hold it: None for what is no finite number."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def ends_of(bias: Interval) -> dict[str, object]:
    """Return a bias with its interval as data that JSON can hold."""
    return {name: finite(getattr(bias, name)) for name in ("low", "estimate", "high")}
