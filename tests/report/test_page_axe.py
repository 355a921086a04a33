"""The live page and the report against the rules of axe-core: every view, both themes, three widths.

``npm ci`` in tools/axe installs it. Without it, these tests are skipped.
"""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the live page needs the extra serve: pip install '.[serve]'")
pytest.importorskip("playwright", reason="pages are tested through playwright: pip install playwright")

from plimsoll.report import html
from tests.support.browser import address, needs_browser, open_page
from tests.support.cases import each
from tests.support.report.served import Served, at, expect

AXE = Path(__file__).parents[2] / "tools" / "axe" / "node_modules" / "axe-core" / "axe.min.js"
pytestmark = [needs_browser, pytest.mark.skipif(not AXE.exists(), reason="install axe-core: npm ci in tools/axe")]

WIDTHS = (1400, 1024, 400)
THEMES = ("light", "dark")
VIEWS = (
    "#/?column=every&mark=low&mark=healthy",
    "#/run/low",
    "#/run/low/finding/1",
    "#/run/low/scalars?smooth=0.5",
    "#/run/low/tensor?pin=gradients/blocks.0.mlp.weight&find=mlp",
    "#/run/low/whatif?sort=lost.down",
    "#/run/collapsed/events",
    "#/run/nowhere",
    "#/compare/low/healthy",
    "#/compare/low/healthy/collapsed",
)
# Violations as texts; figures in view must be drawn first.
CHECK = """async () => {
  const { violations } = await axe.run(document, { resultTypes: ["violations"] });
  return violations.flatMap(({ id, nodes }) => nodes.map(({ html }) => `${id}: ${html.slice(0, 200)}`));
}"""
IN_VIEW_DRAWN = """() => [...document.querySelectorAll('.picture[aria-busy=true]:not([hidden])')].every(figure => {
  const { top, bottom } = figure.getBoundingClientRect();
  return bottom < 0 || top > innerHeight;
})"""


def violations(page: Any) -> list[str]:
    """What axe finds on the page, once its figures are drawn."""
    expect(page.locator("h1")).not_to_contain_text("\u2026")
    page.wait_for_function(IN_VIEW_DRAWN)
    page.evaluate(AXE.read_text(encoding="utf-8"))
    return page.evaluate(CHECK)


@each("theme", THEMES)
@each("width", WIDTHS)
def test_no_view_breaks_a_rule(browser: Any, site: Served, width: int, theme: str) -> None:
    with open_page(browser, viewport={"width": width, "height": 900}, color_scheme=theme) as (page, seen):
        seen.expects("404")
        for view in VIEWS:
            page.goto("about:blank")
            at(page, site, view)
            assert violations(page) == [], view


@each("theme", THEMES)
@each("width", WIDTHS)
def test_the_report_breaks_no_rule(browser: Any, report: Path, width: int, theme: str) -> None:
    with open_page(browser, viewport={"width": width, "height": 900}, color_scheme=theme) as (page, _):
        page.goto(address(report))
        page.wait_for_selector(".plot .main-svg")
        assert violations(page) == []


@pytest.fixture(scope="module")
def report(runs_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return html(runs_folder / "low", tmp_path_factory.mktemp("report") / "low.html")
