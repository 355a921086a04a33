"""What a run shows: figures, each made by one function; a report in one file; a live page.

Figures are Plotly objects, the same in a notebook, in the report and on the page. Names are loaded when they are first
used, and Plotly only when a figure is made.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plimsoll.report._figure_audit import audit
    from plimsoll.report._figure_before import before_after
    from plimsoll.report._figure_codes import code_usage
    from plimsoll.report._figure_heatmap import heatmap
    from plimsoll.report._figure_loss import loss_and_scale
    from plimsoll.report._figure_record import record
    from plimsoll.report._figure_scale import scale_curve
    from plimsoll.report._figure_spectrogram import spectrogram
    from plimsoll.report._figure_underflow import underflow_over_time
    from plimsoll.report._figure_updates import updates
    from plimsoll.report._figure_window import scale_window
    from plimsoll.report._figure_zeros import zero_heatmap
    from plimsoll.report._figures import FIGURES, figure_for
    from plimsoll.report._html import html
    from plimsoll.report._markdown import markdown
    from plimsoll.report._serve import serve
    from plimsoll.report._summary import Summary, summary
    from plimsoll.report._theme import TEMPLATES, themed

__all__ = [
    "FIGURES",
    "TEMPLATES",
    "Summary",
    "audit",
    "before_after",
    "code_usage",
    "figure_for",
    "heatmap",
    "html",
    "loss_and_scale",
    "markdown",
    "record",
    "scale_curve",
    "scale_window",
    "serve",
    "spectrogram",
    "summary",
    "themed",
    "underflow_over_time",
    "updates",
    "zero_heatmap",
]

# Where each name lives: the same as the block for type checkers above (a test compares them).
_HOME_OF = {
    "FIGURES": "_figures",
    "TEMPLATES": "_theme",
    "Summary": "_summary",
    "audit": "_figure_audit",
    "before_after": "_figure_before",
    "code_usage": "_figure_codes",
    "figure_for": "_figures",
    "heatmap": "_figure_heatmap",
    "html": "_html",
    "loss_and_scale": "_figure_loss",
    "markdown": "_markdown",
    "record": "_figure_record",
    "scale_curve": "_figure_scale",
    "scale_window": "_figure_window",
    "serve": "_serve",
    "spectrogram": "_figure_spectrogram",
    "summary": "_summary",
    "themed": "_theme",
    "underflow_over_time": "_figure_underflow",
    "updates": "_figure_updates",
    "zero_heatmap": "_figure_zeros",
}


def __getattr__(name: str) -> object:
    if name in _HOME_OF:
        value = getattr(importlib.import_module(f"plimsoll.report.{_HOME_OF[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'plimsoll.report' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
