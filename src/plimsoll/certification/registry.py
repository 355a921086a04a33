"""Registry of requirements: rows of a certificate with source and check.

A requirement is declared where its check is written, by the decorator `requirement`. Certificates, the reference page
and the tests read the registry. `docs/contributing/add-a-requirement.md` says how to add one.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from plimsoll.certification.certificate import Kind, Outcome, Specification, governing

if TYPE_CHECKING:
    from plimsoll.certification.trial import Subject, Trial

Check = Callable[["Trial"], Outcome]
CASTS: tuple[Kind, ...] = ("cast", "pack")
REDUCTIONS: tuple[Kind, ...] = ("matmul", "sum")
NO_SECTIONS: Mapping[Specification, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirement:
    """One thing that holds of a conforming implementation: one row of a certificate."""

    id: str  # name of the row
    says: str  # the requirement as a sentence; ``{rounding}`` stands for the rounding mode in words
    kinds: tuple[Kind, ...]  # kinds of function that it is for
    check: Check  # function that tries it
    sections: Mapping[Specification, str]  # sections that ask for it, by the specification that governs the format
    # A specification that asks for it whatever the format, with the section. None: it is for the formats of `sections`.
    general: tuple[Specification, str] | None
    applies: "Callable[[Subject], bool]"  # whether it is for this function
    may_refuse: bool  # whether a function that raises an error instead still conforms

    def source(self, subject: "Subject") -> str | None:
        """Return the citation for a function; None if the requirement is not for it."""
        if subject.kind not in self.kinds or not self.applies(subject):
            return None
        specification = governing(subject.fmt)
        if "{scale_rule}" in self.says and subject.scale_rule is not None:
            return "asked for"  # no specification has the other rules
        if specification in self.sections:
            return cited(specification, self.sections[specification])
        return None if self.general is None else cited(*self.general)


def cited(specification: Specification, section: str) -> str:
    """Return a citation: the specification's name, and the section if one is known."""
    return f"{specification.name}, {section}" if section else specification.name


REQUIREMENTS: dict[str, Requirement] = {}  # by id, in the order of a certificate's rows


def requirement(
    id: str,  # noqa: A002  (the field's name)
    says: str,
    *,
    kinds: tuple[Kind, ...] = CASTS,
    sections: Mapping[Specification, str] = NO_SECTIONS,
    general: tuple[Specification, str] | None = None,
    applies: "Callable[[Subject], bool]" = lambda _: True,
    may_refuse: bool = False,
) -> Callable[[Check], Check]:
    """Register the decorated check as a requirement (arguments: see `Requirement`)."""

    def register(check: Check) -> Check:
        REQUIREMENTS[id] = Requirement(
            id=id, says=says, kinds=kinds, check=check, sections=sections, general=general, applies=applies,
            may_refuse=may_refuse,
        )  # fmt: skip
        return check

    return register
