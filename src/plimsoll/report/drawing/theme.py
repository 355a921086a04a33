"""Colours of figures: a light and a dark Plotly template, and marks for both.

Everything that depends on the paper (text, grid, the map from few to many) stands in the template and nowhere else, so
that a page changes the theme of a drawn figure by changing its template. Marks (lines, bars, warnings) keep their
colours: each stands out from both papers by at least 3 to 1 (a test computes it), and they differ without red
and green. The maps are mako's (seaborn): even in lightness, readable for the colour-blind and in print.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from plimsoll.errors import ArgumentError

if TYPE_CHECKING:
    from plotly.graph_objects import Figure  # pyright: ignore[reportMissingTypeStubs]

Theme = Literal["light", "dark"]

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"  # nothing is fetched

BLUE, ORANGE, GREEN, RED, PURPLE, GREY = "#2f83cc", "#c9781a", "#1f9d78", "#dc5340", "#a26fd0", "#7d8791"
# Of every figure, wherever it is drawn: plotly.js 7 by itself has a button that uploads the figure's data to a cloud.
MODEBAR_REMOVE = ("sendChartToCloud",)
SEVERITY = {"alarm": RED, "warning": ORANGE, "info": GREY}

# From few to many; on light paper many is dark, on dark paper light.
_LIGHT_MAP = ("#cdebd8", "#8bdab2", "#40b7ad", "#348fa7", "#37659e", "#413d7b", "#2e1e3b")
_DARK_MAP = ("#38325e", "#413d7b", "#37659e", "#348fa7", "#40b7ad", "#8bdab2", "#e4f7ea")
# From less over none to more.
_LIGHT_BOTH = ("#a4510b", "#dd9b4d", "#f4dfc2", "#f2f2f2", "#c3dcf2", "#5fa3da", "#165d9c")
_DARK_BOTH = ("#f2a34a", "#b26f22", "#5c4020", "#2a3036", "#24466a", "#3479b8", "#7cbdf5")


def _template(paper: str, ink: str, soft: str, grid: str, few_to_many: tuple[str, ...], both: tuple[str, ...]) -> Any:
    axis = {
        "gridcolor": grid,
        "linecolor": soft,
        "zerolinecolor": grid,
        "tickcolor": soft,
        "automargin": True,
        "title": {"standoff": 8, "font": {"size": 12}},
        "tickfont": {"size": 11},
    }
    bar = {"outlinewidth": 0, "thickness": 12, "ticks": "outside", "tickcolor": soft, "tickfont": {"size": 11},
           "title": {"side": "right", "font": {"size": 12}}}  # fmt: skip
    return {
        "layout": {
            "paper_bgcolor": paper,
            "plot_bgcolor": paper,
            "font": {"family": FONT, "size": 12, "color": ink},
            "title": {"x": 0, "xanchor": "left", "y": 1, "yanchor": "top", "pad": {"l": 16, "t": 16},
                      "font": {"size": 16}, "subtitle": {"font": {"size": 12, "color": soft}}},
            "colorway": [BLUE, ORANGE, GREEN, PURPLE, RED, GREY],
            "colorscale": {"sequential": _stops(few_to_many), "sequentialminus": _stops(few_to_many[::-1]),
                           "diverging": _stops(both)},
            "coloraxis": {"colorscale": _stops(few_to_many), "colorbar": bar},
            "xaxis": axis,
            "yaxis": axis,
            "hoverlabel": {"bgcolor": paper, "bordercolor": soft, "font": {"color": ink, "family": FONT, "size": 12},
                           "align": "left", "namelength": 60},
            "legend": {"orientation": "h", "x": 0, "y": 0, "yref": "container", "yanchor": "bottom",
                       "bgcolor": "rgba(0,0,0,0)", "font": {"size": 11}},
            "annotationdefaults": {"font": {"size": 11, "color": ink}, "showarrow": False, "bgcolor": _veil(paper)},
            "margin": {"l": 64, "r": 24, "t": 92, "b": 48},
            "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": soft, "activecolor": ink, "remove": [*MODEBAR_REMOVE]},
            "hovermode": "closest",
        }
    }  # fmt: skip


def _veil(paper: str) -> str:
    """Paper that lets a little through: the ground of words that stand on a picture."""
    return f"rgba({int(paper[1:3], 16)},{int(paper[3:5], 16)},{int(paper[5:7], 16)},0.78)"


def _stops(colours: tuple[str, ...]) -> list[list[float | str]]:
    return [[round(i / (len(colours) - 1), 6), colour] for i, colour in enumerate(colours)]


TEMPLATES: Mapping[Theme, Mapping[str, Any]] = MappingProxyType(
    {
        "light": _template("#ffffff", "#1d252c", "#5d6872", "#e4e8ec", _LIGHT_MAP, _LIGHT_BOTH),
        "dark": _template("#14191f", "#e3e8ed", "#9aa5b0", "#2b333c", _DARK_MAP, _DARK_BOTH),
    }
)


def themed(figure: "Figure", theme: Theme) -> "Figure":
    """A copy of a figure in the light or the dark theme.

    Raises `ArgumentError` for another theme.
    """
    if theme not in TEMPLATES:
        raise ArgumentError(f"themed: expected a theme, 'light' or 'dark'; got {theme!r}. Choose one of the two.")
    return type(figure)(figure).update_layout(template=TEMPLATES[theme])
