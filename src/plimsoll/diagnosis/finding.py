"""`Finding`: the result of a rule, and the words for collections and layers."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from plimsoll.results import JsonRecord, NotebookRepr
from plimsoll.tensor_collections import LABELS
from plimsoll.text import counted, grouped as grouped, shown as shown

Severity = Literal["info", "warning", "alarm"]
SEVERITIES: tuple[Severity, ...] = ("info", "warning", "alarm")

# What may be done about a finding; the names under which a guard allows it.
Action = Literal["lower_scale", "raise_scale", "layer_scale", "to_bf16", "clamp", "skip", "rollback", "stop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spot:
    """One location of a finding.

    Attributes:
        name: The tensor or layer.
        since_step: The first step at which the finding held there.
        value: The number by which the rule judged it. NaN: it judged by no number.
    """

    name: str
    since_step: int
    value: float = float("nan")

    # Dataclasses of Python 3.13 compare each field by itself, so that NaN would make a finding differ from its copy.
    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Spot):
            return NotImplemented
        alike = self.value == other.value or (math.isnan(self.value) and math.isnan(other.value))
        return alike and (self.name, self.since_step) == (other.name, other.since_step)

    def __hash__(self) -> int:
        return hash((self.name, self.since_step))


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding(JsonRecord, NotebookRepr):
    """Result of a rule: a problem of a run, with its place, numbers and advice.

    Attributes:
        rule: The rule's id.
        severity: "info", "warning" or "alarm".
        since_step: The first step at which it held.
        until_step: The last one.
        collection: The collection of the locations. None: none.
        where: The locations, the worst first. Empty if the whole run is meant.
        spots: The locations with the first step and the number of each.
        evidence: The numbers behind it, by name.
        meaning: One sentence on what it means.
        advice: What to do.
        actions: What of that a guard may do by itself.
        figure: Name of the figure that shows it.
    """

    rule: str
    severity: Severity
    since_step: int
    until_step: int
    collection: str | None = None
    where: tuple[str, ...] = ()
    spots: tuple[Spot, ...] = ()
    evidence: Mapping[str, float | int | str] = field(default_factory=dict[str, "float | int | str"])
    meaning: str
    advice: str
    actions: tuple[Action, ...] = ()
    figure: str

    def __str__(self) -> str:
        """Return one line: severity, rule, first step, locations and meaning."""
        place = f" in {grouped(self.where)}" if self.where else ""
        return f"{self.severity}: {self.rule} since step {self.since_step:,}{place}: {self.meaning}"


# -- words that all surfaces use for collections, layers and their numbers ---------------------------------------------


def collection_words(collection: str | None) -> str:
    """Return what a collection is called within a sentence.

    >>> collection_words("gradients"), collection_words("weights"), collection_words(None)
    ('parameter gradients', 'weights', 'values')
    """
    name = collection or "values"
    return LABELS.get(name, shown(name.replace("_", " ")))


def value_words(collection: str) -> str:
    """Return what a collection's values are called.

    >>> value_words("gradients"), value_words("activation_gradients"), value_words("activations")
    ('parameter gradient values', 'activation gradient values', 'activation values')
    """
    return f"{collection_words(collection).removesuffix('s')} values"


def layer_name(name: str) -> str:
    """Return the layer that a parameter or an output stands for.

    >>> layer_name("blocks.0.qkv.weight"), layer_name("blocks.0.qkv:output"), layer_name("blocks.0.qkv:input")
    ('blocks.0.qkv', 'blocks.0.qkv', 'blocks.0.qkv:input')
    """
    return name.removesuffix(".weight").removesuffix(":output") or name


def how_many(finding: Finding) -> str:
    """Return the number of a finding's locations, of how many: "15 of 35 layers"."""
    # Gradients of parameters are judged by layer, all else tensor by tensor.
    noun = "layer" if finding.collection == "gradients" else "tensor"
    many, of = len(finding.where), finding.evidence.get("of_layers")
    if not isinstance(of, int) or of < many:
        return counted(many, noun)
    return f"all {counted(of, noun)}" if of == many and many > 1 else f"{many:,} of {counted(of, noun)}"


def located(finding: Finding, most: int = 3) -> str:
    """Return a finding's location: its name, or the number of several and the worst, "..." for the others."""
    names = [layer_name(name) for name in finding.where] if finding.collection == "gradients" else finding.where
    if not names:
        return ""
    return grouped(names) if len(names) == 1 else f"{how_many(finding)}: {first_of(names, most)}"


def first_of(names: Sequence[str], most: int = 3) -> str:
    """Return the first names, those alike as one, with "..." for the others.

    >>> first_of(["a.0.w", "a.1.w", "b", "c"], 2)
    'a.{0-1}.w, b, ...'
    """
    listed, more, _ = grouped(names, most).partition(" and ")
    return f"{listed}, ..." if more else listed
