"""Figures as answers: their JSON, their arguments, and the list for a run."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from plimsoll.diagnosis import Finding, View
from plimsoll.errors import ArgumentError, NotRecordedError
from plimsoll.report.figure_declaration import DECLARED, PARAMETER_OF, Case, Declared
from plimsoll.report.figure_registry import FIGURES, figure_for, figures_of


def needs_findings(name: str, query: Mapping[str, str]) -> bool:
    """Return whether a figure takes the findings."""
    return "finding" in query or _known(name).takes_findings


def drawn(view: View, name: str, query: Mapping[str, str], findings: Sequence[Finding]) -> str:
    """Return a figure of one run as JSON; with `finding`, that finding's own.

    Raises `NotRecordedError` for a figure or finding that there is not, and `ArgumentError` for words that mean nothing
    to the figure.
    """
    if "finding" in query:
        return json_of(figure_for(view, _finding(name, query, findings)))
    known = _known(name)
    arguments = _arguments(known, query)
    if known.takes_findings:
        arguments["findings"] = tuple(findings)
    return json_of(known.function(view, **arguments))


def drawn_of_two(first: View, second: View, name: str, query: Mapping[str, str]) -> str:
    """A figure of two runs as JSON."""
    of_two = figures_of(2)
    if name not in of_two:
        raise NotRecordedError(f"serve: expected {' or '.join(of_two)} of two runs; got {name[:60]!r}. Choose one.")
    known = of_two[name]
    arguments = _arguments(known, query)
    if 1 in known.runs:  # the second run is then an option of the figure of one
        return json_of(known.function(first, findings=(), beside=second, **arguments))
    return json_of(known.function(first, second, **arguments))


def listed() -> list[dict[str, object]]:
    """Return all figures and their arguments, for `GET /api/figures`."""
    return [
        {
            "name": each.name,
            "runs": each.runs,
            "offered": each.offered,
            "arguments": [{"name": word, "required": word in each.required} for word in each.arguments],
        }
        for each in (DECLARED[name] for name in FIGURES)
    ]


def offered(view: View, findings: Sequence[Finding] = ()) -> list[dict[str, object]]:
    """Return the drawings that a run's page and report offer, as figures declare.

    Args:
        view: The run.
        findings: Its findings, which some figures show.
    """
    return [
        {
            "figure": each.name,
            "section": each.offered,
            "label": case.label,
            "arguments": dict(case.arguments),
            "height": each.expected_height(view, {**case.arguments, "findings": findings}),
        }
        for each in figures_of(1).values()
        if each.offered is not None
        for case in ([Case(label=each.name, arguments={})] if each.cases is None else each.cases(view))
    ]


def json_of(figure: Any) -> str:
    """The figure as ``{"figure": ...}``; numbers that JSON lacks are null."""
    made = figure.to_json()
    json.loads(made, parse_constant=_refuse) if "NaN" in made or "Infinity" in made else None
    return f'{{"figure": {made}}}'


def _refuse(constant: str) -> None:
    raise ValueError(f"a figure's JSON holds {constant}")


def _known(name: str) -> Declared:
    known = figures_of(1)
    if name not in known:
        raise NotRecordedError(f"serve: expected a figure among {', '.join(known)}; got {name[:60]!r}. Choose one.")
    return known[name]


def _finding(name: str, query: Mapping[str, str], findings: Sequence[Finding]) -> Finding:
    unused = sorted(query.keys() - {"finding"})
    if unused:
        raise ArgumentError(f"serve: expected no other argument with finding; got {', '.join(unused)}. Leave it out.")
    index = whole(query["finding"], "finding")
    if not 0 <= index < len(findings):
        raise NotRecordedError(
            f"serve: expected the number of one of {len(findings)} findings, from 0 on; got {index}. They may have "
            "changed since; load the run again."
        )
    if findings[index].figure != name:
        raise NotRecordedError(
            f"serve: expected the figure of that finding, {findings[index].figure}; got {name[:60]!r}. They may have "
            "changed since; load the run again."
        )
    return findings[index]


def _arguments(known: Declared, query: Mapping[str, str]) -> dict[str, Any]:
    """Return the query as the figure's arguments. Empty values count as absent."""
    unknown = sorted(query.keys() - set(known.arguments))
    if unknown:
        raise ArgumentError(
            f"serve: expected for {known.name} only {', '.join(known.arguments) or 'nothing'}; got "
            f"{', '.join(unknown)[:200]}. Leave it out."
        )
    missing = [word for word in known.required if not query.get(word)]
    if missing:
        raise ArgumentError(
            f"serve: expected {' and '.join(missing)} for {known.name}; got none. Add it to the address."
        )
    return {PARAMETER_OF[word]: _value(word, value) for word, value in query.items() if value != ""}


def _value(word: str, value: str) -> object:
    if word == "shift":
        return whole(value, word)
    return tuple(each for each in value.split(",") if each) if word == "formats" else value


def whole(value: str, word: str) -> int:
    """A number of the address; `ArgumentError` for what is none."""
    try:
        return int(value)
    except ValueError as error:
        raise ArgumentError(
            f"serve: expected {word} to be an integer; got {value[:60]!r}. Correct the address."
        ) from error
