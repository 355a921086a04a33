"""What a rule is: an id, thresholds that are a user's to set, and the findings it makes of a view."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from plimsoll.diagnosis.finding import Action, Finding, Severity, Spot
from plimsoll.diagnosis.tables.cells import Cells
from plimsoll.diagnosis.view import View

Mask = NDArray[np.bool_]
Where = Literal["anywhere", "same module"]


def threshold(default: float, source: str) -> Any:
    """A field of a rule that a user may set, with where its value comes from."""
    return field(default=float(default), metadata={"source": source})


@dataclass(frozen=True, kw_only=True)
class Rule(ABC):
    """One rule; its fields are its thresholds.

    A rule sees the record up to a step and nothing after it. A finding stays when the run is longer; at its end it may
    be more severe, or a note where what it found is over.
    """

    id: ClassVar[str]
    says: ClassVar[str]  # what it looks for, in one line
    meaning: ClassVar[str]
    advice: ClassVar[str]
    actions: ClassVar[tuple[Action, ...]] = ()
    figure: ClassVar[str]
    explained_by: ClassVar[Mapping[str, Where]] = {}  # rules whose findings are the cause of this one's, and where

    @abstractmethod
    def findings(self, view: View) -> Iterator[Finding]:
        """What it finds; nothing where what it needs was not recorded."""

    @property
    def thresholds(self) -> list[tuple[str, float, str]]:
        """Name, value and source of each threshold."""
        return [(f.name, getattr(self, f.name), f.metadata["source"]) for f in fields(self)]

    def finding(
        self,
        severity: Severity,
        spots: Sequence[Spot],
        evidence: Mapping[str, float | int | str],
        *,
        until_step: int,
        collection: str | None = None,
        since_step: int | None = None,
        meaning: str | None = None,
        advice: str | None = None,
        actions: tuple[Action, ...] | None = None,
    ) -> Finding:
        """A finding of this rule; `spots` are the worst first."""
        return Finding(
            rule=self.id,
            severity=severity,
            since_step=min(s.since_step for s in spots) if since_step is None else since_step,
            until_step=until_step,
            collection=collection,
            where=tuple(s.name for s in spots),
            spots=tuple(spots),
            evidence=evidence,
            meaning=meaning or self.meaning,
            advice=advice or self.advice,
            actions=self.actions if actions is None else actions,
            figure=self.figure,
        )


def spells(holds: Mask, recorded: Mask, least: float) -> list[tuple[int, int, int]]:
    """The layers in which something holds for at least so many samples on end: layer, first and last place.

    Steps at which a layer was not recorded neither count nor interrupt. First and last are those of the first and the
    last such spell.
    """
    found: list[tuple[int, int, int]] = []
    for layer in np.flatnonzero((holds & recorded).any(axis=1)).tolist():
        places = np.flatnonzero(recorded[layer])
        spans = stretches(holds[layer][places], least)
        if spans:
            found.append((layer, int(places[spans[0][0]]), int(places[spans[-1][1]])))
    return found


def stretches(holds: Mask, least: float) -> list[tuple[int, int]]:
    """First and last place of each stretch of at least so many true values on end."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], holds, [False]]).astype(np.int8)))
    return [(int(a), int(b) - 1) for a, b in zip(edges[::2], edges[1::2], strict=True) if b - a >= least]


def worst(
    cells: Cells, found: list[tuple[int, int, int]], values: NDArray[np.float64], names: Sequence[str] | None = None
) -> list[Spot]:
    """A spot for each layer found, with the largest of its values while it lasted; the worst first."""
    names = cells.names if names is None else names
    spots = [
        Spot(name=names[layer], since_step=int(cells.steps[a]), value=float(np.nanmax(values[layer, a : b + 1])))
        for layer, a, b in found
    ]
    return sorted(spots, key=lambda spot: (-spot.value, spot.since_step))


def last_of(cells: Cells, found: list[tuple[int, int, int]]) -> int:
    """The last step of all that was found."""
    return int(cells.steps[max(b for _, _, b in found)])
