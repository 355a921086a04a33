"""`Receipt`: what one training step ran in, and differences from the declared."""

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from plimsoll.errors import ArgumentError
from plimsoll.receipts import wording
from plimsoll.receipts.rows import ReceiptRecord, Row
from plimsoll.results import NotebookRepr

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt(ReceiptRecord, NotebookRepr):
    """Precision receipt of one training step.

    Attributes:
        subject: Name of the model, script or run.
        did: Parts of the step that ran: "forward", "backward", and the names of the optimizers that stepped.
        declared: Name of the level, policy or plan that the step is held against; None: nothing was declared.
        rows: Operations, in the order in which they first ran.
        deviations: Differences from what was declared, the worst first. Empty if there are none, or if nothing was
            declared.
        tensors: Parameters, buffers, gradients, optimizer state and masters.
        memory: Bytes alive and moved.
        settings: torch's switches and versions that the step ran with.
        notes: Facts that are worth knowing and contradict nothing that was declared.
        parameters: Number of parameters' values.
        cache_hits: Casts of weights that autocast did not repeat, since it had kept them.
        cache_misses: Casts of weights by autocast.
    """

    @property
    def verdict(self) -> str:
        """One sentence: what was declared, and how many deviations there are."""
        return wording.verdict(self)

    def of_module(self, glob: str) -> tuple[Row, ...]:
        """Return the rows of the modules that match a name or glob; the root is "model".

        Raises:
            ArgumentError: `glob` is no text.
        """
        if not isinstance(glob, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ArgumentError(
                f"Receipt.of_module: expected glob to be a name or a glob; got {glob!r}. Use '*' for all modules."
            )
        return tuple(row for row in self.rows if row.module is not None and wording.matches(row.module, glob))

    def to_dict(self) -> dict[str, object]:
        """Return the receipt as data that JSON can hold."""
        from plimsoll.receipts.rendering import data

        return data(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the receipt to a file: .html, .json, .md or .txt.

        Raises:
            ArgumentError: The path ends in something else, or cannot be written.
        """
        from plimsoll.receipts.rendering import write

        write(self, path)

    def table(self, *, full: bool = False) -> "RenderableType":
        """Return the receipt for the terminal.

        Args:
            full: Whether every row is listed. Default: rows that are alike are one line.
        """
        from plimsoll.receipts.rendering import renderable

        return renderable(self, full=full)

    def __str__(self) -> str:
        """Return the receipt as plain text."""
        from plimsoll.receipts.rendering import text

        return text(self)

    def _repr_html_(self) -> str:
        from plimsoll.receipts.rendering import fragment

        return fragment(self)
