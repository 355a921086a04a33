"""The two themes: the same figure in both, readable on both papers, distinguished without red and green."""

import json
from itertools import pairwise

import numpy as np
import pytest

from plimsoll.errors import ArgumentError
from plimsoll.report import TEMPLATES, themed
from plimsoll.report.drawing.plotly_parts import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, SEVERITY, build_figure, line

MARKS = {"blue": BLUE, "orange": ORANGE, "green": GREEN, "red": RED, "purple": PURPLE, "grey": GREY}


def channels(colour: str) -> np.ndarray:
    return np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255


def luminance(colour: str) -> float:
    """Relative luminance as WCAG 2 defines it."""
    c = channels(colour)
    linear = np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", TEMPLATES)
def test_text_and_marks_stand_out_from_the_paper(theme: str) -> None:
    layout = TEMPLATES[theme]["layout"]
    paper = layout["paper_bgcolor"]
    assert contrast(layout["font"]["color"], paper) >= 12
    assert contrast(layout["title"]["subtitle"]["font"]["color"], paper) >= 4.5
    for name, colour in MARKS.items():
        assert contrast(colour, paper) >= 3, name
    assert set(SEVERITY.values()) <= set(MARKS.values())


@pytest.mark.parametrize("theme", TEMPLATES)
def test_the_map_is_monotonous_in_lightness_and_its_rarest_is_seen(theme: str) -> None:
    layout = TEMPLATES[theme]["layout"]
    stops = [colour for _, colour in layout["coloraxis"]["colorscale"]]
    light = [luminance(colour) for colour in stops]
    assert all((a > b) == (theme == "light") for a, b in pairwise(light))
    assert contrast(stops[0], layout["paper_bgcolor"]) >= 1.25


def test_no_font_is_fetched_and_templates_are_plain_data() -> None:
    text = json.dumps({name: dict(template) for name, template in TEMPLATES.items()})
    assert "http" not in text and "url(" not in text


def test_a_theme_changes_the_template_and_leaves_the_figure() -> None:
    trace = line(np.arange(3), np.ones(3), "a", BLUE, "%{y}")
    figure = build_figure("test", "title", "", [trace], {"height": 300}, {})
    dark = themed(figure, "dark")
    assert dark.layout.template.layout.paper_bgcolor == TEMPLATES["dark"]["layout"]["paper_bgcolor"]
    assert figure.layout.template.layout.paper_bgcolor == "#ffffff"
    assert dark.to_plotly_json()["data"][0]["name"] == "a" and dark.layout.height == 300


def test_another_theme_is_refused() -> None:
    figure = build_figure("test", "title", "", [], {"height": 300}, {})
    with pytest.raises(ArgumentError, match="themed: expected a theme, 'light' or 'dark'; got 'sepia'. Choose one"):
        themed(figure, "sepia")  # pyright: ignore[reportArgumentType]


def test_no_figure_offers_to_upload_its_data() -> None:
    for template in TEMPLATES.values():
        assert "sendChartToCloud" in template["layout"]["modebar"]["remove"]
    figure = build_figure("test", "title", "", [], {"height": 300}, {})
    assert "sendChartToCloud" in figure.layout.modebar.remove  # whatever template a user gives it
