"""The figures that the live page may ask for, and how the words of its address become their arguments."""

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from plimsoll import report
from plimsoll.diagnosis import Finding, View
from plimsoll.errors import ArgumentError, NotRecordedError

# Figures of one run and of two; those that findings name are beside these in `report.FIGURES`.
OF_ONE = ("spectrogram", "heatmap", "scale_curve", "loss_and_scale", "underflow_over_time", "updates", "code_usage",
          "record")  # fmt: skip
OF_TWO = ("before_after", "loss_and_scale")
_WORDS = ("collection", "name", "statistic", "format", "formats", "shift")
_ARGUMENT_OF = {"format": "fmt"}


def needs_findings(name: str, query: Mapping[str, str]) -> bool:
    """Whether a figure is made of the findings."""
    return "finding" in query or "findings" in inspect.signature(_known(name)).parameters


def drawn(view: View, name: str, query: Mapping[str, str], findings: Sequence[Finding]) -> str:
    """A figure of one run as JSON. With `finding` in the query, that finding's own figure.

    Raises `NotRecordedError` for a figure or finding that there is not, and `ArgumentError` for words that mean nothing
    to the figure.
    """
    if "finding" in query:
        return json_of(report.figure_for(view, _finding(name, query, findings)))
    function = _known(name)
    parameters = inspect.signature(function).parameters
    arguments = _arguments(name, query, parameters)
    if "findings" in parameters:
        arguments["findings"] = tuple(findings)
    return json_of(function(view, **arguments))


def drawn_of_two(first: View, second: View, name: str, query: Mapping[str, str]) -> str:
    """A figure of two runs as JSON."""
    if name not in OF_TWO:
        raise NotRecordedError(f"serve: expected {' or '.join(OF_TWO)} of two runs; got {name[:60]!r}. Choose one.")
    function: Callable[..., Any] = getattr(report, name)
    arguments = _arguments(name, query, inspect.signature(function).parameters)
    if name == "loss_and_scale":
        return json_of(function(first, findings=(), beside=second, **arguments))
    return json_of(function(first, second, **arguments))


def json_of(figure: Any) -> str:
    """The figure as ``{"figure": ...}``; numbers that JSON lacks are null."""
    made = figure.to_json()
    json.loads(made, parse_constant=_refuse) if "NaN" in made or "Infinity" in made else None
    return f'{{"figure": {made}}}'


def _refuse(constant: str) -> None:
    raise ValueError(f"a figure's JSON holds {constant}")


def _known(name: str) -> Callable[..., Any]:
    of_findings = {each: function for each, function in report.FIGURES.items() if each not in OF_TWO}
    known = {**of_findings, **{each: getattr(report, each) for each in OF_ONE}}
    if name not in known:
        raise NotRecordedError(
            f"serve: expected a figure among {', '.join(sorted(known))}; got {name[:60]!r}. Choose one."
        )
    return known[name]


def _finding(name: str, query: Mapping[str, str], findings: Sequence[Finding]) -> Finding:
    unused = sorted(query.keys() - {"finding"})
    if unused:
        raise ArgumentError(
            f"serve: expected nothing beside finding, which says all; got {', '.join(unused)}. Leave it out."
        )
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


def _arguments(name: str, query: Mapping[str, str], parameters: Mapping[str, object]) -> dict[str, Any]:
    """The words of the query as the figure's arguments; those left empty as not given."""
    offered = [word for word in _WORDS if _ARGUMENT_OF.get(word, word) in parameters]
    unknown = sorted(query.keys() - set(offered))
    if unknown:
        raise ArgumentError(
            f"serve: expected for {name} only {', '.join(offered) or 'nothing'}; got {', '.join(unknown)[:200]}. Leave "
            "it out."
        )
    needed = [p.name for p in parameters.values() if isinstance(p, inspect.Parameter) and p.default is p.empty]
    given = {_ARGUMENT_OF.get(word, word): _value(word, value) for word, value in query.items() if value != ""}
    missing = [each for each in needed if each in _WORDS and each not in given]
    if missing:
        raise ArgumentError(f"serve: expected {' and '.join(missing)} for {name}; got none. Add it to the address.")
    return given


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
