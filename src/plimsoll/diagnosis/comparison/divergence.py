"""`Divergence`: where two runs part, as a sentence, a table, or data."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from plimsoll import exports
from plimsoll.diagnosis.finding import collection_words, shown
from plimsoll.results import JsonRecord, NotebookRepr, as_data
from plimsoll.text import number

if TYPE_CHECKING:
    from rich.table import Table

# Kinds of divergence: values beyond rounding, zeros that a narrow format made of them or that have another cause, NaN
# and infinities, steps that one scaler skipped, tensors of another size.
Kind = Literal["values", "underflow", "zeros", "nonfinite", "skipped", "size"]


@exports.exported_by("plimsoll.diagnosis")
@dataclass(frozen=True, slots=True, kw_only=True)
class Parting(JsonRecord, NotebookRepr):
    """One tensor (or scalar) at one step, of both runs.

    `a` and `b` are what was compared: root mean squares for "values", numbers of non-finite values, shares of zeros,
    skipped steps (0 or 1), or numbers of values. `distance` is how far apart they are, `allowed` how far rounding, and
    what had parted before, may bring them.
    """

    kind: Kind
    step: int
    collection: str
    name: str
    a: float
    b: float
    distance: float
    allowed: float
    reason: str

    def __str__(self) -> str:
        """Return one line: the step, the tensor and how it diverges."""
        place = f"{collection_words(self.collection)} {shown(self.name)}".rstrip()
        return f"step {self.step:,}, {place}: {self.reason}"


@exports.exported_by("plimsoll.diagnosis")
@dataclass(frozen=True, kw_only=True)
class Divergence(NotebookRepr):
    """Answer of `diff`: the place where two runs diverge.

    Attributes:
        a: Path of the first run.
        b: Path of the second run.
        first: The first tensor that diverges, in the order of computation. None if none does.
        partings: All tensors of that step that nothing before them explains.
        compared: Number of steps and series that both runs have.
        until_step: The last step at which values were comparable. None: none were. Chance moves any two trainings apart
            in time. From then on only zeros, NaN and skipped steps count.
        drift: Distance of the runs before anything diverged, by step.
        only_a: Series that only the first run has.
        only_b: Series that only the second run has.
        changed: Settings and versions in which the runs differ.
        notes: Sentences on what was not compared, and why.
    """

    a: str
    b: str
    first: Parting | None
    partings: tuple[Parting, ...]
    compared: tuple[int, int]
    until_step: int | None
    drift: tuple[tuple[int, float], ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    changed: tuple[tuple[str, str, str], ...]
    notes: tuple[str, ...] = ()

    @property
    def sentence(self) -> str:
        """The answer in one sentence."""
        if self.first is not None:
            others = len(self.partings) - 1
            more = f" ({others} more at that step)" if others else ""
            what = collection_words(self.first.collection)
            place = f"{what} of {shown(self.first.name)}" if self.first.name else what
            return f"They diverge at step {self.first.step:,}, first in {place}{more}: {self.first.reason}."
        steps, series = self.compared
        last = self.drift[-1][1] if self.drift else 0.0
        if last == 0:
            return f"They do not diverge: {series:,} series are alike at {steps:,} steps."
        alike = f"They do not diverge by more than rounding explains, in {series:,} series at {steps:,} steps"
        if self.until_step is not None and self.drift[-1][0] > self.until_step:
            return f"{alike}; since step {self.until_step:,} they are too far apart for values to be compared."
        return f"{alike}; at the end they are {number(last)} apart."

    def to_dict(self) -> dict[str, object]:
        """Return all of it as JSON-able data."""
        return {
            "a": self.a,
            "b": self.b,
            "parts": self.first is not None,
            "sentence": self.sentence,
            "first": as_data(self.first),
            "partings": as_data(self.partings),
            "compared": {"steps": self.compared[0], "series": self.compared[1]},
            "until_step": self.until_step,
            "drift": [{"step": step, "distance": as_data(distance)} for step, distance in self.drift],
            "only_a": list(self.only_a),
            "only_b": list(self.only_b),
            "changed": [{"name": name, "a": a, "b": b} for name, a, b in self.changed],
            "notes": list(self.notes),
        }

    def table(self, most: int = 20, width: int | None = None) -> "Table":
        """Return a table for the terminal: what diverges at the first step.

        Args:
            most: Largest number of rows. Default: 20.
            width: Width in columns. Default: that of the content.
        """
        from rich import box
        from rich.table import Table

        title = (
            "They do not diverge" if self.first is None else f"At step {self.first.step:,}, in the order of computation"
        )
        table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, show_edge=False,
                      pad_edge=False, width=width)  # fmt: skip
        table.add_column("tensor", overflow="ellipsis", no_wrap=True, ratio=1)
        for head in ("what", "A", "B", "difference", "allowed"):
            table.add_column(head, justify="left" if head == "what" else "right", no_wrap=True)
        for parting in self.partings[:most]:
            numbers = (number(value) for value in (parting.a, parting.b, parting.distance, parting.allowed))
            table.add_row(
                f"{collection_words(parting.collection)} {shown(parting.name)}".rstrip(), parting.kind, *numbers
            )
        if len(self.partings) > most:
            table.caption = f"and {len(self.partings) - most} more"
            table.caption_justify = "left"
        return table

    def __str__(self) -> str:
        """Return the sentence."""
        return self.sentence
