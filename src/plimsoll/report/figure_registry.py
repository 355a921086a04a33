"""All figures by the names that findings carry, and the figure of a finding."""

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any

from plimsoll.diagnosis import Finding, View
from plimsoll.diagnosis.rules.registry import guarded, rule_of
from plimsoll.diagnosis.view import Source, view_of
from plimsoll.errors import ArgumentError
from plimsoll.report import figures
from plimsoll.report.drawing.plotly_parts import Figure
from plimsoll.report.figure_declaration import DECLARED, Declared, Figures
from plimsoll.tensor_collections import COLLECTIONS

# Each of these modules declares its figures when it is loaded.
for _name in ("results", *(f"figures.{module.name}" for module in pkgutil.iter_modules(figures.__path__))):
    importlib.import_module(f"plimsoll.report.{_name}")

FIGURES: Mapping[str, Callable[..., Figure]] = Figures()


def figures_of(runs: int) -> dict[str, Declared]:
    """Return the declared figures of one run or of two, by name in alphabetical order."""
    return {name: DECLARED[name] for name in FIGURES if runs in DECLARED[name].runs}


def plot(run: Source, collection: str | None = None, name: str | None = None, **arguments: Any) -> Figure:
    """Return the figure that fits: a tensor's spectrogram, a collection's heat map, or the run's loss and scale."""
    if collection is None and name is not None:
        raise ArgumentError(
            f"Run.plot: expected the collection of the tensor; got name={name!r} alone. Write "
            f'run.plot("gradients", {name!r}), for example.'
        )
    if collection is None:
        return FIGURES["loss_and_scale"](run, **arguments)
    recorded = view_of(run, None, "Run.plot").run
    if not isinstance(collection, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ArgumentError(
            f"Run.plot: expected the name of a collection; got {collection!r}. Leave it out for loss and loss scale."
        )
    if collection in recorded.scalar_names and collection not in recorded.tensors:
        raise ArgumentError(
            f"Run.plot: expected a collection of tensors; got {collection!r}, which is a scalar. run.plot() draws "
            f"loss and loss scale, and run.to_pandas()[{collection!r}].plot() any scalar."
        )
    if name is None:
        return FIGURES["heatmap"](run, collection=collection, **{**_statistic_of(collection), **arguments})
    return FIGURES["spectrogram"](run, collection, name, **arguments)


def _statistic_of(collection: str) -> dict[str, str]:
    """Return a collection's first heat-map statistic of the report, if any."""
    known = next((c for c in COLLECTIONS if c.name == collection), None)
    return {"statistic": known.heatmaps[0]} if known is not None and known.heatmaps else {}


def expected_height(view: View, finding: Finding) -> int:
    """Return a finding's figure height in pixels, about. 0: there is no such figure."""
    if finding.figure not in FIGURES:
        return 0
    arguments = {"collection": finding.collection, "findings": (finding,)}
    return DECLARED[finding.figure].expected_height(view, arguments)


def figure_for(run: Source, finding: Finding) -> Figure:
    """Return a finding's figure: its layers, with a mark at the step where it began.

    Raises `ArgumentError` for a finding whose figure is none of `FIGURES` (a custom rule may name any of them).
    """
    view = view_of(run, None, "figure_for")
    if finding.figure not in FIGURES:
        raise ArgumentError(
            f"figure_for: expected a finding whose figure is among {', '.join(FIGURES)}; got {finding.figure!r} of "
            f"{finding.rule}. Name one of these."
        )
    declared, rule = DECLARED[finding.figure], rule_of(finding)

    def drawn(arguments: Mapping[str, Any]) -> Figure:
        if declared.of_finding is None:
            return declared.function(view, **arguments)
        return declared.of_finding(view, finding, **arguments)

    # A package's rule may give arguments that the figure does not have.
    figure = guarded(rule, lambda: drawn(rule.figure_arguments(finding)), None)
    return drawn({}) if figure is None else figure
