"""The figures by the names that findings carry, and the figure of a finding."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from plimsoll.diagnosis import Finding
from plimsoll.errors import ArgumentError
from plimsoll.report.drawing.plotly_parts import Source, view_of
from plimsoll.report.figures.before_after import before_after
from plimsoll.report.figures.code_usage import code_usage
from plimsoll.report.figures.heatmap import heatmap
from plimsoll.report.figures.loss_and_scale import loss_and_scale
from plimsoll.report.figures.record import record
from plimsoll.report.figures.scale_curve import scale_curve
from plimsoll.report.figures.scale_window import scale_window
from plimsoll.report.figures.spectrogram import spectrogram
from plimsoll.report.figures.underflow_over_time import underflow_over_time
from plimsoll.report.figures.updates import lag, updates
from plimsoll.report.figures.zero_heatmap import zero_heatmap

if TYPE_CHECKING:
    from plotly.graph_objects import Figure  # pyright: ignore[reportMissingTypeStubs]

    from plimsoll.diagnosis import View


def _underflow_heatmap(run: Source, collection: str = "gradients", **more: Any) -> "Figure":
    return heatmap(run, "underflow", collection, **more)


FIGURES: Mapping[str, Callable[..., "Figure"]] = MappingProxyType(
    {
        "before_after": before_after,
        "code_usage": code_usage,
        "heatmap": heatmap,
        "loss_and_scale": loss_and_scale,
        "record": record,
        "scale_curve": scale_curve,
        "scale_window": scale_window,
        "spectrogram": spectrogram,
        "underflow_heatmap": _underflow_heatmap,
        "underflow_over_time": underflow_over_time,
        "updates": updates,
        "zero_heatmap": zero_heatmap,
    }
)


def figure_for(run: Source, finding: Finding) -> "Figure":
    """The figure that shows a finding: of its layers, with the step marked since which it holds.

    Raises `ArgumentError` for a finding whose figure is none of `FIGURES` (a rule of one's own may name any of them).
    """
    view = view_of(run, None, "figure_for")
    if finding.figure not in FIGURES:
        raise ArgumentError(
            f"figure_for: expected a finding whose figure is among {', '.join(FIGURES)}; got {finding.figure!r} of "
            f"{finding.rule}. Name one of these."
        )
    return _MAKERS.get(finding.figure, _plain)(view, finding)


def _plain(view: "View", finding: Finding) -> "Figure":
    return FIGURES[finding.figure](view)


def _over_layers(view: "View", finding: Finding) -> "Figure":
    collection = finding.collection or "gradients"
    return FIGURES[finding.figure](view, collection, focus=finding.where, since_step=finding.since_step)


def _over_time(view: "View", finding: Finding) -> "Figure":
    return underflow_over_time(
        view, finding.collection or "gradients", findings=[finding], focus=finding.where, since_step=finding.since_step
    )


def _window(view: "View", finding: Finding) -> "Figure":
    return scale_window(view, since_step=finding.since_step)


def _loss(view: "View", finding: Finding) -> "Figure":
    return loss_and_scale(view, [finding])


def _spectrum(view: "View", finding: Finding) -> "Figure":
    """Of the first layer; with the lines of the format that the rule is about, and epsilon's where it is about that."""
    if not finding.where or finding.collection is None:
        return loss_and_scale(view, [finding])
    formats = ["fp16"] if finding.rule == "activation-growth" else None
    if finding.rule == "unit-drift" and finding.evidence.get("scale") == 1.0:  # the format's lines are of cast values
        formats = [finding.evidence.get("format")]
    epsilon = finding.evidence.get("epsilon")
    if finding.rule != "epsilon-dominates" or not isinstance(epsilon, int | float) or not epsilon > 0:
        epsilon = None
    mark = None if epsilon is None else (float(epsilon) ** 2, "roots below epsilon")
    return spectrogram(
        view, finding.collection, finding.where[0], formats=formats, since_step=finding.since_step, mark=mark
    )


def _updates(view: "View", finding: Finding) -> "Figure":
    if finding.collection == "gradients":
        return lag(view, focus=finding.where, since_step=finding.since_step)
    return updates(view, focus=finding.where, since_step=finding.since_step)


def _codes(view: "View", finding: Finding) -> "Figure":
    collection = finding.collection or "activations"
    return code_usage(view, collection, finding.where[0] if finding.where else None, since_step=finding.since_step)


_MAKERS: Mapping[str, Callable[["View", Finding], "Figure"]] = {
    "underflow_heatmap": _over_layers,
    "zero_heatmap": _over_layers,
    "underflow_over_time": _over_time,
    "scale_window": _window,
    "loss_and_scale": _loss,
    "spectrogram": _spectrum,
    "updates": _updates,
    "code_usage": _codes,
}
