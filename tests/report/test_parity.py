"""The figure of a parity verdict, and its page in one file, which says and draws the same and asks no one."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("plotly", reason="figures need the extra report: pip install 'plotly>=6.0'")

import plimsoll as pl
from plimsoll import report
from plimsoll.errors import ArgumentError
from plimsoll.report.page.assets import PLOTLY
from tests.support.browser import needs_browser
from tests.support.cases import each

STEPS = 800


def judged(added: float = 0.0, tolerance: float | str = "2 %", **options: Any) -> pl.Parity:
    rng = np.random.default_rng(0)
    base = 2 + np.exp(-np.arange(STEPS) / 80) + rng.normal(0, 0.1, STEPS)
    return pl.parity(base, base + rng.normal(0, 0.01, STEPS) + added, tolerance=tolerance, **options)


def diverged() -> pl.Parity:
    base = np.linspace(2, 1, STEPS)
    return pl.parity(base, np.where(np.arange(STEPS) > 700, np.nan, base), tolerance=0.1)


def test_the_figure_shows_differences_interval_and_tolerance() -> None:
    found = judged()
    figure = report.parity(found)
    by_name = {trace.name: trace for trace in figure.data if trace.name}
    scale = 100 / found.level
    assert by_name["weighted mean so far"].y[-1] == pytest.approx(scale * float(found.difference), rel=1e-5)
    assert by_name["interval at that step"].y[-1] == pytest.approx(scale * found.difference.high, rel=1e-5)
    assert by_name["paired difference"].x.tolist() == [step for step, _ in found.paired]
    assert sorted(s.y0 for s in figure.layout.shapes if s.xref == "paper") == pytest.approx([-2.0, 2.0])
    assert figure.layout.title.text == "Equivalent: paired difference of the loss"
    assert any(f"equivalent since step {found.since_step:,}" in note.text for note in figure.layout.annotations)


def test_points_are_means_of_what_was_paired() -> None:
    found = judged(0.01, tolerance=0.1)
    steps, means = np.array([s for s, _ in found.paired]), np.array([d for _, d in found.paired])
    assert len(found.paired) == 120 and steps[-1] == STEPS - 1
    assert np.average(means, weights=np.diff(steps, prepend=-1)) == pytest.approx(0.01, abs=0.002)
    assert report.parity(found).layout.yaxis.ticksuffix == ""


@each("added", [0.5, -0.5, 0.04])
def test_the_interval_lies_in_the_picture(added: float) -> None:
    found = judged(added)
    low, high = report.parity(found).layout.yaxis.range
    scale = 100 / found.level
    assert low < scale * found.difference.low and scale * found.difference.high < high


def test_of_a_run_that_diverged_the_figure_says_so() -> None:
    figure = report.parity(diverged())
    assert figure.layout.meta["empty"] and "diverged" in figure.layout.annotations[0].text
    with pytest.raises(ArgumentError, match="expected the result of plimsoll.parity; got str"):
        report.parity("runs/bf16")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="write_parity: expected the result of plimsoll.parity; got str"):
        report.write_parity("runs/bf16", "page.md")  # type: ignore[arg-type]


@each("name", ["<script>alert(1)</script> loss", "loss\x1b[31m", "loss|*a*"])
def test_names_from_a_run_are_shown_and_not_obeyed(name: str, tmp_path: Path) -> None:
    found = judged(scalar=name)
    page = report.write_parity(found, tmp_path / "page.html").read_text("utf-8")
    assert "<script>alert" not in page and "\x1b" not in page
    assert "<script>" not in report.parity(found).layout.title.text
    text = report.write_parity(found, tmp_path / "page.md").read_text("utf-8")
    assert not re.search(r"(?<!\\)<script", text) and "\x1b" not in text and "|*a*" not in text


def test_the_page_needs_nothing_else(tmp_path: Path) -> None:
    page = report.write_parity(judged(), tmp_path / "page.html").read_text("utf-8")
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//""", page.replace(PLOTLY.read_text("utf-8"), ""))
    assert "default-src 'none'" in page
    assert "<script" not in report.write_parity(diverged(), tmp_path / "lost.html").read_text("utf-8")


def test_other_forms_say_the_same(tmp_path: Path) -> None:
    found = judged()
    assert json.loads(report.write_parity(found, tmp_path / "a.json").read_text("utf-8")) == found.to_dict()
    assert (
        report.write_parity(found, tmp_path / "a.md").read_text("utf-8").startswith(f"**{found.sentence}**\n\n| | |\n")
    )
    text = report.write_parity(found, tmp_path / "a.txt").read_text("utf-8")
    assert text.startswith(str(found)) and all(f"{name}: {value}\n" in text for name, value in found.facts())


@each("name", ["a.pdf", "a", "none/a.html"])
def test_a_file_that_cannot_be_written_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="parity: expected a file"):
        report.write_parity(judged(), tmp_path / name)


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_draws_the_page_in_both_themes(scheme: Any, page: Any, tmp_path: Path) -> None:
    found = judged()
    page.emulate_media(color_scheme=scheme)
    page.goto(report.write_parity(found, tmp_path / "page.html").as_uri())
    page.wait_for_selector("#picture .main-svg")
    assert page.inner_text("h1") == found.sentence
    assert page.get_attribute("#picture", "aria-label") == found.sentence
    paper = page.evaluate("getComputedStyle(document.querySelector('#picture .main-svg')).backgroundColor")
    assert paper == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 25, 31)"}[scheme]
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
