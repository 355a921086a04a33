"""Registry of rules: Plimsoll's own, installed packages', and users' objects.

A package offers a rule by an entry point in the group `plimsoll.rules`. The entry points are looked up when all rules
are asked for, or one that is not Plimsoll's. An error of a package's rule never stops a diagnosis. It is a warning.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import TypeVar

from plimsoll.diagnosis.finding import Finding
from plimsoll.diagnosis.rules.base import Rule
from plimsoll.diagnosis.view import View
from plimsoll.text import clause, warn_user

GROUP = "plimsoll.rules"
OWN: dict[str, Rule] = {}  # filled by the `__init__` of this folder, which is loaded before any module in it
_custom: dict[str, Rule] = {}
_reported: set[str] = set()
_REQUIRED = ("id", "says", "meaning", "advice", "figure")
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagedRules:
    """Rules of installed packages."""

    rules: dict[str, Rule] = field(default_factory=dict[str, Rule])  # those that can be used, by id
    packages: dict[str, str] = field(default_factory=dict[str, str])  # the package of each, by id
    errors: dict[str, str] = field(default_factory=dict[str, str])  # why the others cannot be used, by id


class _UnknownRule(Rule):
    """Rule of a finding that this process has no rule for: defaults for everything."""

    id, says, meaning, advice, figure = "unknown", "", "", "", ""

    def findings(self, view: View) -> Iterator[Finding]:  # noqa: ARG002
        yield from ()


_UNKNOWN = _UnknownRule()


def add_own(module: ModuleType) -> None:
    """Register each rule that a module defines, in the order of the source."""
    for name, member in vars(module).items():
        if name.startswith("_") or not inspect.isclass(member) or member.__module__ != module.__name__:
            continue
        if issubclass(member, Rule) and not inspect.isabstract(member):
            OWN[member.id] = member()


def known_rules() -> dict[str, Rule]:
    """Return all rules by id: Plimsoll's in order, then installed ones by name."""
    return {**OWN, **packaged_rules().rules}


def remember(rule: Rule) -> None:
    """Register a user's rule, so that its findings are put into its words."""
    if rule.id not in OWN:
        _custom[rule.id] = rule


def rule_of(finding: Finding) -> Rule:
    """Return the rule of a finding. One with all defaults if it is not known."""
    name = finding.rule
    if name in OWN or name in _custom:
        return OWN.get(name) or _custom[name]
    # Entry points are never read here: a rule of a package that made a finding was loaded for it.
    return _looked_up().rules.get(name, _UNKNOWN)


def guarded(rule: Rule, ask: Callable[[], Answer], otherwise: Answer) -> Answer:
    """Return what `ask` returns; if a package's rule raises, warn once and return `otherwise`."""
    packaged = _looked_up()
    # Errors of Plimsoll's own rules, and of one that a user gave as an object, are for that user to see.
    if type(rule) is not type(packaged.rules.get(rule.id)):
        return ask()
    try:
        return ask()
    except Exception as error:  # noqa: BLE001  (whatever the code of another package raises)
        package = packaged.packages[rule.id]
        _report(
            f"diagnose: expected the rule {rule.id!r} of the package {package} to judge the run; got "
            f"{type(error).__name__}: {clause(error)}. Update that package, or uninstall it."
        )
        return otherwise


# Once for the process: the look-up reads the metadata of all installed packages, and a live page judges all the time.
@functools.cache
def packaged_rules() -> PackagedRules:
    """Return the rules of installed packages. Warn of those that cannot be used."""
    result = PackagedRules()
    points: dict[str, list[EntryPoint]] = {}
    for point in entry_points(group=GROUP):
        points.setdefault(point.name, []).append(point)
    for name, offered in sorted(points.items()):
        packages = sorted({_package(point) for point in offered})
        try:
            result.rules[name] = _loaded(name, packages, offered[0])
            result.packages[name] = packages[0]
        except Exception as error:  # noqa: BLE001
            reason = str(error) if isinstance(error, _UnusableError) else f"{type(error).__name__}: {error}"
            result.errors[name] = (
                f"diagnose: expected the rule {name!r} of the package {' and '.join(packages)} to load from "
                f"{offered[0].value!r}; got {clause(reason)}. Update that package, or uninstall it."
            )
            _report(result.errors[name])
    return result


def _looked_up() -> PackagedRules:
    """Return the rules of installed packages if they were looked up before, else none."""
    return packaged_rules() if packaged_rules.cache_info().currsize else PackagedRules()


class _UnusableError(Exception):
    """An entry point whose object is no rule, or not the only one of its name."""


def _loaded(name: str, packages: list[str], point: EntryPoint) -> Rule:
    """Return an entry point's rule: a class, or a function that returns a rule."""
    if name in OWN:
        raise _UnusableError("the id of one of Plimsoll's rules")
    if len(packages) > 1:
        raise _UnusableError("several rules of that id")
    rule = point.load()()
    if not isinstance(rule, Rule):
        raise _UnusableError(f"{rule!r}, which is no plimsoll.diagnosis.Rule")
    missing = [member for member in _REQUIRED if not isinstance(getattr(rule, member, None), str)]
    if missing:
        raise _UnusableError(f"a rule without {', '.join(missing)}")
    if rule.id != name:
        raise _UnusableError(f"a rule with the id {rule.id!r}")
    return rule


def _package(point: EntryPoint) -> str:
    # A folder of metadata that lacks its METADATA file has no name.
    return str(getattr(point.dist, "name", None) or "of unknown name")


def _report(message: str) -> None:
    if message not in _reported:
        _reported.add(message)
        warn_user(f"{message} It is left out.")
