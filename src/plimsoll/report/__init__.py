"""Figures of a run, a function each, a report in one file, and a live page.

Figures are Plotly objects, the same in a notebook, in the report and on the page. Names are loaded when they are first
used, and Plotly only when a figure is made. Calling the package writes a report: ``plimsoll.report(run)``.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plimsoll import exports

if TYPE_CHECKING:
    from plimsoll.report.drawing.plotly_parts import TEMPLATES, themed
    from plimsoll.report.figure_registry import FIGURES, figure_for
    from plimsoll.report.figures.audit import audit
    from plimsoll.report.figures.code_usage import code_usage
    from plimsoll.report.figures.heatmap import heatmap, zero_heatmap
    from plimsoll.report.figures.histogram import histogram, spectrogram
    from plimsoll.report.figures.plans import before_after, plan_frontier
    from plimsoll.report.figures.underflow_over_time import underflow_over_time
    from plimsoll.report.figures.updates import updates
    from plimsoll.report.figures.usable_scales import scale_curve, scale_window
    from plimsoll.report.figures.whole_run import loss_and_scale, record
    from plimsoll.report.live.server.launch import serve
    from plimsoll.report.results import blame_bars, layer_errors, parity
    from plimsoll.report.single_file.html_report import html
    from plimsoll.report.single_file.markdown_report import markdown
    from plimsoll.report.single_file.parity_file import write_parity
    from plimsoll.report.verdicts.run_summary import Summary, summary

__all__ = [
    "FIGURES",
    "TEMPLATES",
    "Summary",
    "audit",
    "before_after",
    "blame_bars",
    "code_usage",
    "figure_for",
    "heatmap",
    "histogram",
    "html",
    "layer_errors",
    "loss_and_scale",
    "markdown",
    "parity",
    "plan_frontier",
    "record",
    "scale_curve",
    "scale_window",
    "serve",
    "spectrogram",
    "summary",
    "themed",
    "underflow_over_time",
    "updates",
    "write_parity",
    "zero_heatmap",
]

# Home of each name. A figure's module has the figure's name, except where figures share one.
_HOME_OF = {name: f"figures.{name}" for name in __all__} | {
    "FIGURES": "figure_registry",
    "TEMPLATES": "drawing.plotly_parts",
    "Summary": "verdicts.run_summary",
    "before_after": "figures.plans",
    "blame_bars": "results",
    "figure_for": "figure_registry",
    "html": "single_file.html_report",
    "layer_errors": "results",
    "loss_and_scale": "figures.whole_run",
    "markdown": "single_file.markdown_report",
    "parity": "results",
    "plan_frontier": "figures.plans",
    "record": "figures.whole_run",
    "scale_curve": "figures.usable_scales",
    "scale_window": "figures.usable_scales",
    "serve": "live.server.launch",
    "spectrogram": "figures.histogram",
    "summary": "verdicts.run_summary",
    "themed": "drawing.plotly_parts",
    "write_parity": "single_file.parity_file",
    "zero_heatmap": "figures.heatmap",
}

__getattr__, __dir__ = exports.lazy(__name__, _HOME_OF)


def _write(run: Any, path: str | os.PathLike[str] = "report.html", **options: Any) -> Path:
    """Write a run's report as one HTML file, and return its path.

    `plimsoll.report.html` has the arguments.
    """
    from plimsoll.report.single_file.html_report import html

    return html(run, path, **options)


exports.make_callable(__name__, _write)
