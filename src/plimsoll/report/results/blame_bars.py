"""`blame_bars`: contributions to a step's gradient error, bias and noise apart."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from plimsoll.errors import ArgumentError
from plimsoll.report.drawing.plotly_parts import Layout, Trace, build_figure, empty_figure
from plimsoll.report.drawing.theme import BLUE, GREY, ORANGE
from plimsoll.report.labels import safe, wrapped
from plimsoll.text import percent

if TYPE_CHECKING:
    from plotly.graph_objects import Figure  # pyright: ignore[reportMissingTypeStubs]

    from plimsoll.microscope import Blame, BlameRow

_MOST = 20  # contributions with a bar of their own
_LINE = 48  # characters that a narrow page has room for
_KINDS = (("noise", BLUE), ("bias", ORANGE), ("not split", GREY))


def blame_bars(found: "Blame") -> "Figure":
    """Return bars of the contributions to the gradients' error, with their shares.

    Each has a module, a cast and a direction.

    A bar is split into bias and noise by their squares where the blame has asked for them. It points left where a
    contribution cancels a part of the others. Beyond 20 contributions the smaller ones share the last bar.

    Raises `ArgumentError` for what is no `Blame`.
    """
    from plimsoll.microscope import Blame  # which needs torch

    if not isinstance(found, Blame):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ArgumentError(
            f"blame_bars: expected the result of ErrorReport.blame; got {type(found).__name__}. Pass that."
        )
    whose = "the gradients" if found.of == "gradients" else safe(found.of)
    title = f"Blame for the error of {whose}"
    meta: Layout = {"figure": "blame_bars", "of": found.of}
    if not found.rows:
        return empty_figure("blame_bars", title, wrapped(found.sentence), meta)
    shown, rest = found.rows[:_MOST], found.rows[_MOST:]
    texts = [_label(row) for row in shown]
    parts = [_parts(row) for row in shown]
    if rest:
        texts.append(f"{len(rest):,} smaller ones")
        parts.append(tuple(sum(part) for part in zip(*map(_parts, rest), strict=True)))
    layout: Layout = {
        "barmode": "relative",
        "bargap": 0.3,
        "xaxis": {"title": {"text": "share of the squared error"}, "tickformat": ".0%", "zeroline": True},
        "yaxis": {"type": "category", "autorange": "reversed", "ticks": "", "ticklabelstandoff": 6},
        "height": 206 + 36 * len(texts),
        "margin": {"t": 108},
    }
    subtitle = f"{wrapped(found.sentence, _LINE)}<br>Relative error: {percent(found.relative_error)}"
    return build_figure("blame_bars", title, subtitle, _traces(texts, parts), layout, meta)


def _label(row: "BlameRow") -> str:
    direction = "" if row.direction == "both" else f", {row.direction}"
    return f"{safe(row.module, 28)}<br>{safe(row.cast, 24)}{direction}"


def _parts(row: "BlameRow") -> tuple[float, ...]:
    """Return the share as noise, bias, and what was not split."""
    if row.bias is None or row.noise is None:
        return 0.0, 0.0, row.share
    squares = row.noise**2, row.bias.estimate**2
    whole = sum(squares)
    return (row.share * squares[0] / whole, row.share * squares[1] / whole, 0.0) if whole > 0 else (0.0, 0.0, row.share)


def _traces(texts: Sequence[str], parts: Sequence[tuple[float, ...]]) -> list[Trace]:
    traces: list[Trace] = []
    for i, (kind, colour) in enumerate(_KINDS):
        values = [part[i] for part in parts]
        if any(values):
            shown = [f"-{percent(-x)}" if x < 0 else percent(x) for x in values]
            traces.append({
                "type": "bar", "orientation": "h", "x": values, "y": texts, "name": kind, "marker": {"color": colour},
                "customdata": shown, "showlegend": True,
                "hovertemplate": f"%{{y}}<br>{kind} %{{customdata}}<extra></extra>",
            })  # fmt: skip
    return traces
