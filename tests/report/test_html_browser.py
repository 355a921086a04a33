"""The report in a real Chromium: what is seen, drawn, chosen and printed, and that nothing else happens."""

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from plimsoll.diagnosis import whatif
from plimsoll.report import html
from tests.support.browser import address, needs_browser, open_page
from tests.support.diagnosis.faults import FAULTS
from tests.support.report import hostile_run as hostile

pytestmark = needs_browser

STORY = next(fault for fault in FAULTS if fault.name == "scale frozen low after hard batches").story


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return STORY.write(tmp_path_factory.mktemp("report") / "exp1")


@pytest.fixture(scope="module")
def file(run: Path) -> Path:
    return html(run, run.parent / "exp1.html")


@pytest.fixture
def shown(page: Any, seen: Any, file: Path) -> Iterator[Any]:
    """The report, opened; all that it asks for is itself."""
    page.goto(address(file))
    yield page
    assert {url for url in seen.requests if not url.startswith(("blob:", "data:"))} == {address(file)}


def drawn(page: Any) -> int:
    return page.locator(".plot[data-drawn]").count()


def test_the_verdict_is_seen_first_and_figures_when_they_are_scrolled_to(shown: Any) -> None:
    assert shown.locator("h1").inner_text().startswith("Problem: the loss scale fell from")
    assert shown.locator("h1").bounding_box()["y"] < 300
    shown.wait_for_selector(".plot[data-drawn]")
    before = drawn(shown)
    assert before < shown.locator(".plot").count()
    shown.locator("#shown-tensors .plot").scroll_into_view_if_needed()
    shown.wait_for_selector("#shown-tensors .plot[data-drawn] .main-svg")
    assert drawn(shown) > before


def test_a_figure_is_in_the_pages_font_and_colours(shown: Any) -> None:
    shown.wait_for_selector(".plot[data-drawn] .xtick text")
    fonts = shown.evaluate(
        "[...document.querySelectorAll('.xtick text, body')].map(e => getComputedStyle(e).fontFamily)"
    )
    assert len({font.split(",")[0] for font in fonts}) == 1
    assert shown.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"


def test_no_figure_offers_to_upload_its_data(shown: Any) -> None:
    shown.wait_for_selector(".plot[data-drawn] .modebar-btn", state="attached")
    titles = shown.locator(".modebar-btn").evaluate_all("all => all.map(each => each.dataset.title)")
    assert "Download plot as a PNG" in titles
    assert not [title for title in titles if re.search("share|cloud|upload|send", title, re.IGNORECASE)]


def test_the_theme_is_switched_and_kept(shown: Any) -> None:
    shown.wait_for_selector(".plot[data-drawn] .main-svg")
    shown.get_by_role("button", name="Use the dark theme").click()
    assert shown.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 25, 31)"
    expect(shown.locator(".plot[data-drawn] .main-svg").first).to_have_css("background-color", "rgb(20, 25, 31)")
    kept = False
    for _ in range(5):  # the browser writes what a page keeps in its own time; a reload may come before it
        shown.reload()
        kept = shown.locator("html").get_attribute("data-theme") == "dark"
        if kept:
            break
    assert kept and shown.get_by_role("button", name="Use the light theme").count() == 1


def test_the_systems_theme_is_followed(browser: Any, file: Path) -> None:
    with open_page(browser, color_scheme="dark") as (page, _):
        page.goto(address(file))
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 25, 31)"


def test_a_heat_map_is_chosen(shown: Any) -> None:
    shown.get_by_label("Show").select_option(label="Norm of weights")
    plot = shown.locator("#shown-layers .plot")
    assert re.match(r"Weights: .*norm", plot.locator(".title").inner_text(), re.IGNORECASE)
    assert plot.get_attribute("data-drawn") == plot.get_attribute("data-figure")


def test_a_tensor_is_found_and_chosen_by_keyboard(shown: Any) -> None:
    find = shown.get_by_label("Tensors").first
    find.fill("blocks.5.mlp gradients")
    options = shown.locator("#tensors option")
    assert 0 < options.count() < 6
    assert all("blocks.5.mlp" in text and "gradients" in text for text in options.all_inner_texts())
    assert shown.locator("#found").inner_text().startswith(f"{options.count()} of ")
    find.press("Enter")
    title = shown.locator("#shown-tensors .title").inner_text()
    assert "blocks.5.mlp" in title and shown.evaluate("document.activeElement.id") == "tensors"
    find.fill("no such tensor")
    assert options.count() == 0


def test_the_slider_answers_as_whatif_does(shown: Any, run: Path) -> None:
    shown.locator("#rows").scroll_into_view_if_needed()
    shown.get_by_role("combobox", name="Format").select_option(label="E4M3")
    slider = shown.get_by_label("Scale", exact=True)
    slider.focus()
    slider.press("Home")
    for _ in range(30):
        slider.press("ArrowRight")
    assert slider.get_attribute("aria-valuetext") == "2 to the power 6"
    answer = whatif(run, "e4m3", 6)
    told = shown.locator("#told").inner_text()
    assert told.startswith("E4M3 at 26: lost")  # the exponent is raised
    lost, overflow = re.findall(r"(?:lost|overflow) (?:under )?([\d.]+) %", told)
    assert float(lost) == pytest.approx(100 * answer.overall.fit.lost.estimate, abs=0.5)
    assert float(overflow) == pytest.approx(100 * answer.overall.fit.overflow.estimate, abs=0.5)
    worst = shown.locator("#rows tbody tr").first
    cells = worst.locator("td").all_inner_texts()
    row = next(row for row in answer.rows if row.name == cells[0])
    assert float(cells[1].strip(" %")) == pytest.approx(100 * row.fit.lost.estimate, rel=0.1)
    low, high = row.window
    assert cells[3].replace("\N{MINUS SIGN}", "-") == f"2{low} to 2{high}"
    mark = "document.querySelector('#rows .span b').style.left"
    assert shown.evaluate(mark) == f"{100 * 30 / 64}%"
    shown.get_by_role("button", name="Best scale").click()
    assert slider.input_value() == str(whatif(run, "e4m3").shift)


def test_findings_open_and_links_within_the_page_lead_there(shown: Any) -> None:
    details = shown.locator(".finding details").first
    details.locator("summary").press("Enter")
    assert details.locator("tbody tr").count() == 12
    shown.get_by_role("link", name="What if").click()
    assert shown.url.endswith("#whatif")
    for anchor in shown.evaluate("[...document.querySelectorAll('nav a')].map(a => a.hash)"):
        assert shown.locator(anchor).count() == 1


def test_printing_draws_and_opens_everything_in_light_and_puts_it_back(shown: Any) -> None:
    shown.get_by_role("button", name="Use the dark theme").click()
    shown.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert drawn(shown) == shown.locator(".plot").count()
    assert shown.locator("details:not([open])").count() == 0
    plots = "[...document.querySelectorAll('.js-plotly-plot')]"
    assert set(shown.evaluate(f"{plots}.map(p => p._fullLayout.width)")) == {680}
    assert set(shown.evaluate(f"{plots}.map(p => p._fullLayout.paper_bgcolor)")) == {"#ffffff"}
    shown.evaluate("dispatchEvent(new Event('afterprint'))")
    assert shown.locator("details[open]").count() == 0
    assert set(shown.evaluate(f"{plots}.map(p => p._fullLayout.paper_bgcolor)")) == {"#14191f"}
    assert len(shown.pdf(format="A4")) > 20_000


def test_without_scripts_all_of_the_text_is_there(browser: Any, file: Path) -> None:
    with open_page(browser, java_script_enabled=False) as (page, _):
        page.goto(address(file))
        assert page.locator("h1").inner_text().startswith("Problem: the loss scale fell")
        text = page.locator("main").inner_text()
        assert "The figure needs JavaScript." in text and "E5M2" in text and "What to do" in text
        assert not page.locator("#shift").is_visible() and not page.locator("#theme").is_visible()
        assert page.locator("#rows tbody tr").count() == 12


def test_a_narrow_window_shows_all_of_it(browser: Any, file: Path) -> None:
    with open_page(browser, viewport={"width": 400, "height": 800}) as (page, _):
        page.goto(address(file))
        page.evaluate("dispatchEvent(new Event('beforeprint')); dispatchEvent(new Event('afterprint'))")  # draws all
        page.wait_for_selector(".plot[data-drawn] .main-svg", state="attached")
        assert page.evaluate("document.documentElement.scrollWidth") == 400


def test_every_control_has_a_name_and_headings_are_in_order(shown: Any) -> None:
    names = shown.evaluate(
        "[...document.querySelectorAll('select, input, button')]"
        ".map(e => e.labels?.[0]?.textContent || e.getAttribute('aria-label') || e.textContent)"
    )
    assert names and all(name.strip() for name in names)
    levels = shown.evaluate("[...document.querySelectorAll('h1,h2,h3')].map(h => Number(h.tagName[1]))")
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
    assert shown.locator("main, header, nav, footer").count() >= 4


# -- what comes from a run


def test_hostile_names_run_nothing(page: Any, seen: Any, tmp_path: Path) -> None:
    path = html(hostile.write(tmp_path / "run"), tmp_path / "page.html", title="<img src=x onerror=alert(9)>")
    page.goto(address(path))
    page.evaluate("dispatchEvent(new Event('beforeprint'))")  # everything is drawn and opened
    for select in ("[data-shows=layers]", "#tensors"):
        for value in page.evaluate(f"[...document.querySelector('{select}').options].map(o => o.value)"):
            page.select_option(select, value)
    page.get_by_role("combobox", name="Format").select_option(label="E5M2")
    page.wait_for_timeout(200)
    assert (
        page.locator("main img, main b:not(.span b), main iframe, main a[href^=http], svg image[href^=http]").count()
        == 0
    )
    assert page.evaluate("document.scripts.length") == page.evaluate(
        "document.querySelectorAll('body > script, head > script').length"
    )
    assert seen.dialogs == [] and [url for url in seen.requests if not url.startswith(("data:", "blob:"))] == [
        address(path)
    ]
    assert "<img src=x onerror=alert(2)>" in page.locator("main").inner_text()


def test_the_policy_stops_what_would_be_put_in_later(page: Any, seen: Any, file: Path) -> None:
    page.goto(address(file))
    page.evaluate("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.bad = 1\">')")
    page.evaluate(
        "document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.bad = 2'}))"
    )
    asked = page.evaluate("fetch('http://127.0.0.1:9/').then(() => 'answered', () => 'refused')")
    page.wait_for_timeout(100)
    assert page.evaluate("window.bad") is None and asked == "refused"
    seen.expects("Content Security Policy")
    assert any("Content Security Policy" in error for error in seen.errors)
