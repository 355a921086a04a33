"""Base class of rules, and shared thresholds, phrases, evidence and spans."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from plimsoll.diagnosis.finding import Action, Finding, Severity, Spot, collection_words, how_many, layer_name, shown
from plimsoll.diagnosis.tables.cells import Cells
from plimsoll.diagnosis.view import View
from plimsoll.runs import Event
from plimsoll.text import printable, shortened

Mask = NDArray[np.bool_]
Where = Literal["anywhere", "same module"]
# How a value is written: 0.05 as "5 %", 1024 as "2^10", 10 as "2^10", "fp16" as "FP16", a location by its short name.
Unit = Literal["number", "share", "scale", "exponent", "format", "location", "place"]
_LONGEST_NAME = 48  # characters of a layer's name in a sentence


def threshold(default: float, source: str) -> Any:
    """Declare a field of a rule that a user may set.

    Args:
        default: Its value unless the user gives another.
        source: Where the value comes from, as the documentation and ``plimsoll check --rules`` print it.

    Returns:
        The dataclass field.
    """
    return field(default=float(default), metadata={"source": source})


@dataclass(frozen=True, slots=True)
class EvidenceItem:
    """Label and unit of one value of a finding's evidence.

    Attributes:
        label: Its name for readers. Default: the key, with spaces and a capital.
        unit: How the value is written.
        of_worst: If the evidence names the worst location, the value is written after it, with these words.
        hide_zero: Whether a value of 0 is left out.
    """

    label: str = ""
    unit: Unit = "number"
    of_worst: str = ""
    hide_zero: bool = False


# Items that mean the same in every rule.
COMMON_ITEMS: Mapping[str, EvidenceItem] = {
    "confidence": EvidenceItem(unit="share"),
    "format": EvidenceItem(unit="format"),
    "from": EvidenceItem("Changed"),
    "scale": EvidenceItem("Loss scale", "scale"),
    "scale_that_serves": EvidenceItem(unit="scale"),
    "share": EvidenceItem(unit="share"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Phrase:
    """A finding in a sentence.

    Attributes:
        what: What happened and since when.
        effect: What followed. Left out if the sentence becomes too long.
        remedy: What to do. Left out last.
    """

    what: str
    effect: str = ""
    remedy: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingContext:
    """A finding, its run, and all findings of it, for a rule's `phrase`."""

    finding: Finding
    view: View
    findings: Sequence[Finding]

    @property
    def since(self) -> str:
        """The first step: "since step 300"."""
        return f"since step {self.finding.since_step:,}"

    @property
    def at(self) -> str:
        """The first step of something that is over: "at step 300"."""
        return f"at step {self.finding.since_step:,}"

    @property
    def is_single(self) -> bool:
        """True if the finding has exactly one location."""
        return len(self.finding.where) == 1

    @property
    def place(self) -> str:
        """The locations: one by its name, several by their number."""
        return self.layer if self.is_single else how_many(self.finding)

    @property
    def layer(self) -> str:
        """The worst location: its module, if the collection shows which tensor it is."""
        name = self.finding.where[0]
        if self.finding.collection == "optimizer":
            name = name.rpartition(":")[0] or name
        clean = short(layer_name(name))
        # A sequence's modules are numbered: "activations of 0 contained NaN" reads as a count.
        return f"layer {clean}" if clean.replace(".", "").isdigit() else clean

    @property
    def layers(self) -> str:
        """The location, or the number of locations and the worst of them."""
        return self.layer if self.is_single else f"{how_many(self.finding)}, {self.layer} most,"

    @property
    def tensors(self) -> str:
        """The kind of tensor: "parameter gradients"."""
        return collection_words(self.finding.collection)

    @property
    def format(self) -> str:
        """The format in the evidence: "FP16"."""
        return self.text("format").upper()

    def number(self, name: str) -> float:
        """Return a number of the evidence. NaN if there is none of this name."""
        value = self.finding.evidence.get(name, math.nan)
        return math.nan if isinstance(value, str) else float(value)

    @property
    def cause(self) -> str:
        """The cause in the evidence, one of the rule's own phrases and never shortened; "" if there is none."""
        return printable(str(self.finding.evidence.get("cause", "")), lines=False)

    def text(self, name: str) -> str:
        """Return a text of the evidence that is safe to print, "" if there is none."""
        return shown(str(self.finding.evidence.get(name, "")))


@dataclass(frozen=True, kw_only=True)
class Rule(ABC):
    """A rule: a frozen dataclass whose fields are its thresholds.

    A rule reads the record up to a step and nothing after it. A finding stays when the run gets longer. At the end of
    the run it may be more severe, or a note if what it found is over.

    `findings` and the first five attributes are required. Whatever else is not given has a default that fits most
    rules.

    Attributes:
        id: The name in findings, in `--select` and in thresholds, in lower case with hyphens.
        says: What the rule finds, as one line without a period.
        meaning: One sentence: what a finding means.
        advice: What to do.
        figure: Name of the figure that shows a finding, one of `plimsoll.report.FIGURES`.
        actions: What a guard may do about it.
        explained_by: Ids of rules whose findings are the cause of this rule's findings, and where.
        items: Evidence whose label or unit is not the default. `COMMON_ITEMS` applies as well.
        location_item: Heading and unit of the number by which the rule judges each location.
        is_secondary: Whether a warning says less than other warnings. It then leads the verdict only alone.
        is_noted: Whether the verdict on a healthy run mentions a note.
    """

    id: ClassVar[str]
    says: ClassVar[str]
    meaning: ClassVar[str]
    advice: ClassVar[str]
    figure: ClassVar[str]
    actions: ClassVar[tuple[Action, ...]] = ()
    explained_by: ClassVar[Mapping[str, Where]] = {}
    items: ClassVar[Mapping[str, EvidenceItem]] = {}
    location_item: ClassVar[EvidenceItem] = EvidenceItem("Value")
    is_secondary: ClassVar[bool] = False
    is_noted: ClassVar[bool] = False

    @abstractmethod
    def findings(self, view: View) -> Iterator[Finding]:
        """Yield the findings in a view. None if what the rule needs was not recorded."""

    def phrase(self, context: FindingContext) -> Phrase:
        """Return the finding as part of the one-sentence verdict.

        Args:
            context: The finding, its run and all other findings.
        """
        place = f" in {context.place}" if context.finding.where else ""
        return Phrase(what=f"{short(context.finding.rule)} holds{place} {context.since}")

    def figure_arguments(self, finding: Finding) -> Mapping[str, Any]:  # noqa: ARG002  (for rules that override it)
        """Return arguments of the figure besides the tensors and the first step."""
        return {}

    def is_fatal(self, finding: Finding, last_step: int) -> bool:  # noqa: ARG002
        """Return whether a training does not recover from this alarm.

        Args:
            finding: An alarm of this rule.
            last_step: The last recorded step.
        """
        return False

    def consequence(self, finding: Finding, last_step: int) -> str:  # noqa: ARG002
        """Return the words for an alarm that follows another, as a sentence's end."""
        return ""

    def needs_other_scale(self, finding: Finding) -> bool:  # noqa: ARG002
        """Return whether another loss scale may fix it, by the run's one remedy."""
        return False

    @property
    def thresholds(self) -> list[tuple[str, float, str]]:
        """Name, value and source of each threshold."""
        return [(f.name, getattr(self, f.name), f.metadata.get("source", "")) for f in fields(self)]

    def item(self, name: str) -> EvidenceItem:
        """Return how a value of the evidence is labelled and written."""
        return self.items.get(name) or COMMON_ITEMS.get(name) or EvidenceItem()

    def since_event(
        self, severity: Severity, event: Event, view: View, evidence: Mapping[str, float | int | str], **more: Any
    ) -> Finding:
        """Return a finding that holds from an event to the end of the record.

        Args:
            severity: "info", "warning" or "alarm".
            event: A fact of the watch.
            view: The record.
            evidence: The numbers behind it, by name.
            more: Other arguments of `finding`.
        """
        until = max(view.last_step, event.step)
        return self.finding(severity, (), evidence, since_step=event.step, until_step=until, **more)

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
        figure: str | None = None,
    ) -> Finding:
        """Return a finding of this rule.

        Args:
            severity: "info", "warning" or "alarm".
            spots: The locations, the worst first. None if the whole run is meant.
            evidence: The numbers behind it, by name.
            until_step: The last step at which it held.
            collection: The collection of the locations.
            since_step: The first step at which it held. Default: the first one of the locations.
            meaning: Default: the rule's.
            advice: Default: the rule's.
            actions: Default: the rule's.
            figure: Default: the rule's.
        """
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
            figure=self.figure if figure is None else figure,
        )


def short(name: str) -> str:
    """Return a name as a sentence can contain it."""
    return shortened(printable(name, lines=False), _LONGEST_NAME)


def layer_spans(holds: Mask, recorded: Mask, least: float) -> list[tuple[int, int, int]]:
    """Return the layers in which a condition holds for enough consecutive samples.

    Each comes with the first place of its first such span, and the last place of its last one. Steps at which a layer
    was not recorded neither count nor interrupt.
    """
    result: list[tuple[int, int, int]] = []
    for layer in np.flatnonzero((holds & recorded).any(axis=1)).tolist():
        places = np.flatnonzero(recorded[layer])
        spans = find_spans(holds[layer][places], least)
        if spans:
            result.append((layer, int(places[spans[0][0]]), int(places[spans[-1][1]])))
    return result


def find_spans(holds: Mask, least: float) -> list[tuple[int, int]]:
    """Return first and last place of spans of at least `least` true values."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], holds, [False]]).astype(np.int8)))
    return [(int(a), int(b) - 1) for a, b in zip(edges[::2], edges[1::2], strict=True) if b - a >= least]


def worst(
    cells: Cells, spans: list[tuple[int, int, int]], values: NDArray[np.float64], names: Sequence[str] | None = None
) -> list[Spot]:
    """Return each span's location with its largest value, the worst first."""
    names = cells.names if names is None else names
    spots = [
        Spot(name=names[layer], since_step=int(cells.steps[a]), value=float(np.nanmax(values[layer, a : b + 1])))
        for layer, a, b in spans
    ]
    return sorted(spots, key=lambda spot: (-spot.value, spot.since_step))


def outcome(cells: Cells, spots: Sequence[Spot]) -> str:
    """Return what sizes that do not grow any more came to, as the end of a sentence."""
    layers = [cells.names.index(spot.name) for spot in spots]
    last = [int(np.flatnonzero(cells.recorded[layer])[-1]) for layer in layers]
    broken = bool((cells.nonfinite[layers, last] > 0).any())
    return "until they became NaN or Inf" if broken else "and have settled"


def last_of(cells: Cells, spans: list[tuple[int, int, int]]) -> int:
    """Return the last step of all spans."""
    return int(cells.steps[max(b for _, _, b in spans)])
