"""The report in a real Chromium: what is seen, drawn, chosen and printed, and that nothing else happens."""

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from plimsoll.diagnosis import View, diagnose, whatif
from plimsoll.report import html
from plimsoll.report.page.answers import offered
from plimsoll.runs import Run, RunWriter, Scalars
from tests.support.browser import address, needs_browser, open_page
from tests.support.diagnosis.faults import FAULTS
from tests.support.report import hostile_run as hostile
from tests.support.report.served import expect, wait_for_title

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


@pytest.fixture(scope="module")
def looked_at(browser: Any, file: Path) -> Iterator[Any]:
    """The report, opened once for the tests that change nothing in it."""
    with open_page(browser, viewport={"width": 1280, "height": 900}) as (page, seen):
        page.goto(address(file))
        yield page
        assert {url for url in seen.requests if not url.startswith(("blob:", "data:"))} == {address(file)}


DRAWN = ".picture .js-plotly-plot"


def drawn(page: Any) -> int:
    return page.locator(DRAWN).count()


def shown_pictures(page: Any) -> int:
    return page.locator(".picture:not([hidden])").count()


def test_the_verdict_is_seen_first_and_figures_when_they_are_scrolled_to(shown: Any) -> None:
    expect(shown.locator("h1")).to_have_text(re.compile("Problem: the loss scale fell from"))
    assert shown.locator("h1").bounding_box()["y"] < 300
    shown.wait_for_selector(DRAWN)
    before = drawn(shown)
    assert before < shown_pictures(shown)
    shown.locator(".tensors .picture").scroll_into_view_if_needed()
    shown.wait_for_selector(".tensors .picture .main-svg")
    assert drawn(shown) > before


def test_a_figure_is_in_the_pages_font_and_colours(looked_at: Any) -> None:
    looked_at.wait_for_selector(f"{DRAWN} .xtick text")
    fonts = looked_at.evaluate(
        "[...document.querySelectorAll('.xtick text, body')].map(e => getComputedStyle(e).fontFamily)"
    )
    assert len({font.split(",")[0] for font in fonts}) == 1
    assert looked_at.evaluate("getComputedStyle(document.documentElement).backgroundColor") == "rgb(255, 255, 255)"


def test_no_figure_offers_to_upload_its_data(looked_at: Any) -> None:
    looked_at.wait_for_selector(f"{DRAWN} .modebar-btn", state="attached")
    titles = looked_at.locator(".modebar-btn").evaluate_all("all => all.map(each => each.dataset.title)")
    assert "Download plot as a PNG" in titles
    assert not [title for title in titles if re.search("share|cloud|upload|send", title, re.IGNORECASE)]


def test_the_theme_is_switched_and_kept(shown: Any) -> None:
    shown.wait_for_selector(f"{DRAWN} .main-svg")
    shown.get_by_role("button", name="Use the dark theme").click()
    assert shown.evaluate("getComputedStyle(document.documentElement).backgroundColor") == "rgb(20, 25, 31)"
    paper = "[...document.querySelectorAll('.js-plotly-plot')].map(p => p._fullLayout.paper_bgcolor)"
    assert set(shown.evaluate(paper)) == {"#14191f"}
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
        assert page.evaluate("getComputedStyle(document.documentElement).backgroundColor") == "rgb(20, 25, 31)"


def test_a_heat_map_is_chosen(shown: Any) -> None:
    shown.get_by_label("Show", exact=True).select_option(label="Norm of weights")
    plot = shown.locator("section.pictures").first.locator("> .picture")
    wait_for_title(plot, "Weights: ")
    expect(plot.locator(".main-svg").first).to_be_visible()


def test_what_the_registry_offers_is_drawn_unless_a_finding_shows_it(looked_at: Any, run: Path) -> None:
    looked_at.get_by_role("link", name="Pictures").click()
    above = {finding.figure for finding in diagnose(run)}
    offered = [d["figure"] for d in _offered(run, "scale")]
    assert len(offered) > 3 and set(offered) & above
    expect(looked_at.locator(".offered .picture:not([hidden])")).to_have_count(
        len([f for f in offered if f not in above])
    )
    labels = looked_at.locator("#layers-figure option").all_inner_texts()
    assert sorted(labels) == sorted(str(d["label"]) for d in _offered(run, "layers"))


def _offered(run: Path, section: str) -> list[dict[str, object]]:
    return [drawing for drawing in offered(View(Run(run))) if drawing["section"] == section]


def test_a_tensor_is_found_and_chosen_by_keyboard(shown: Any) -> None:
    find = shown.get_by_label("Search tensors")
    find.fill("blocks.5.mlp")
    names = shown.locator(".names a")
    expect(names).to_have_count(1)
    find.press("Enter")
    title = shown.locator(".tensors .picture-title")
    expect(title).to_have_text(re.compile("blocks.5.mlp"))
    shown.get_by_label("Collection").select_option("activation_gradients")
    expect(title).to_have_text(re.compile("Activation gradients"))
    find.fill("no such tensor")
    expect(names).to_have_count(0)


def test_a_layer_of_a_finding_leads_to_its_spectrogram(shown: Any) -> None:
    link = shown.locator(".finding .spots a").last
    name = link.inner_text()
    link.click()
    expect(shown.locator(".tensors .picture-title")).to_have_text(re.compile(re.escape(name)))
    expect(shown.locator(".tensors .picture .main-svg").first).to_be_in_viewport()


def test_the_slider_answers_as_whatif_does(shown: Any, run: Path) -> None:
    shown.get_by_role("combobox", name="Format").select_option(label="E4M3")
    slider = shown.get_by_label("Scale", exact=True)
    slider.focus()
    slider.press("Home")
    for _ in range(30):
        slider.press("ArrowRight")
    expect(slider).to_have_attribute("aria-valuetext", "2 to the power 6, 64")
    result = shown.locator(".whatif .result")
    expect(result).to_have_attribute("data-shift", "6")
    answer = whatif(run, "e4m3", 6)
    lost, overflow = (result.locator(f".overall [data-kind={kind}] dd").inner_text() for kind in ("lost", "overflow"))
    share = re.compile(r"^(?:under )?([\d.]+)")
    assert float(share.findall(lost)[0]) == pytest.approx(100 * answer.overall.fit.lost.estimate, abs=0.5)
    assert float(share.findall(overflow)[0]) == pytest.approx(100 * answer.overall.fit.overflow.estimate, abs=0.5)
    worst = result.locator("tbody tr").first
    row = next(row for row in answer.rows if row.name == worst.locator("th").inner_text())
    cell = worst.locator("[data-kind=lost]").inner_text()
    assert float(cell.strip("\N{NO-BREAK SPACE}%")) == pytest.approx(100 * row.fit.lost.estimate, rel=0.1)
    low, high = row.window
    assert re.sub(r"\s*\^\s*", "^", worst.locator(".window-words").inner_text()) == f"2^{low} to 2^{high}"
    shown.get_by_role("button", name="Best scale").click()
    expect(slider).to_have_value(str(whatif(run, "e4m3").shift))


def test_findings_unfold_and_links_within_the_page_lead_there(shown: Any) -> None:
    second = shown.locator(".finding").nth(1)
    shown.locator(".findings a").nth(1).click()
    expect(second).to_be_in_viewport()
    expect(second).to_be_focused()
    assert shown.url.endswith("/finding/1")
    assert second.locator(".spots li").count() == 12
    for link in shown.locator("#contents a").all():
        link.click()
        expect(shown.locator("h2:visible", has_text=HEADINGS[link.inner_text()])).to_be_in_viewport()
    shown.go_back()
    shown.reload()
    expect(shown.locator("h2", has_text="What if")).to_be_in_viewport()


HEADINGS = {
    "Findings": "Findings",
    "Pictures": "The run in pictures",
    "Scalars": re.compile("^Scalars$"),
    "Tensors": re.compile("^Tensors$"),
    "What if": "What if",
    "Record": "The record",
}


def test_printing_draws_and_opens_everything_in_light_and_puts_it_back(shown: Any) -> None:
    shown.get_by_role("button", name="Use the dark theme").click()
    shown.wait_for_selector(DRAWN)
    shown.evaluate("dispatchEvent(new Event('beforeprint'))")
    expect(shown.locator(DRAWN)).to_have_count(shown_pictures(shown))
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
        assert "The figures need JavaScript." in text and "E5M2" in text and "What to do" in text
        assert not page.locator("#theme").is_visible()
        assert page.locator("table").last.locator("tbody tr").count() == 12


def test_a_narrow_window_shows_all_of_it_and_no_words_below_buttons(browser: Any, file: Path) -> None:
    with open_page(browser, viewport={"width": 400, "height": 800}) as (page, _):
        page.goto(address(file))
        page.wait_for_selector(DRAWN)
        page.evaluate("dispatchEvent(new Event('beforeprint')); dispatchEvent(new Event('afterprint'))")  # draws all
        expect(page.locator(f"{DRAWN} .main-svg").last).to_be_attached()
        assert page.evaluate("document.documentElement.scrollWidth") == 400
        covered = page.evaluate(
            "[...document.querySelectorAll('.js-plotly-plot')].flatMap(plot => {"
            " const bar = plot.querySelector('.modebar').getBoundingClientRect();"
            " return [...plot.querySelectorAll('.annotation-text-g')].filter(words => {"
            "  const at = words.getBoundingClientRect();"
            "  return at.width && at.right > bar.left && at.top < bar.bottom && at.bottom > bar.top;"
            " }).map(words => words.textContent); })"
        )
        assert page.locator(".annotation-text-g", has_text="since step").count() and covered == []


def test_every_control_has_a_name_and_headings_are_in_order(looked_at: Any) -> None:
    looked_at.wait_for_selector(DRAWN)
    names = looked_at.evaluate(
        "[...document.querySelectorAll('select, input, button')]"
        ".map(e => e.labels?.[0]?.textContent || e.getAttribute('aria-label') || e.textContent)"
    )
    assert names and all(name.strip() for name in names)
    levels = looked_at.evaluate(
        "[...document.querySelectorAll('main :is(h1,h2,h3,h4)')].map(h => Number(h.tagName[1]))"
    )
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
    assert looked_at.locator("main, header, nav, footer").count() >= 4


# -- what comes from a run


def test_hostile_names_run_nothing(page: Any, seen: Any, tmp_path: Path) -> None:
    path = html(hostile.write(tmp_path / "run"), tmp_path / "page.html", title="<img src=x onerror=alert(9)>")
    page.goto(address(path))
    page.wait_for_selector(DRAWN)
    page.evaluate("dispatchEvent(new Event('beforeprint'))")  # everything is drawn and opened
    for value in page.evaluate("[...document.querySelector('#layers-figure').options].map(o => o.value)"):
        page.select_option("#layers-figure", value)
    for collection in page.evaluate("[...document.querySelector('#tensor-collection').options].map(o => o.value)"):
        page.select_option("#tensor-collection", collection)
        for i in range(page.locator(".names a").count()):
            page.locator(".names a").nth(i).click()
    page.get_by_role("combobox", name="Format").select_option(label="E5M2")
    expect(page.locator(".whatif .result")).to_be_visible()
    bad = "main img, main b, main iframe, main a[href^=http], svg image[href^=http]"
    assert page.locator(bad).count() == 0
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


def test_a_run_whose_only_picture_is_its_findings_has_no_empty_section(page: Any, tmp_path: Path) -> None:
    with RunWriter(tmp_path / "run") as writer:
        for step in range(200):
            writer.write(Scalars(step=step, values={"loss": 1.0 if step < 100 else 1e6}))
    page.goto(address(html(tmp_path / "run", tmp_path / "run.html")))
    page.wait_for_selector(DRAWN)
    assert drawn(page) == 1 and page.locator(".finding").count() == 1
    assert "The run in pictures" not in page.locator("h2:visible").all_inner_texts()
    assert "Pictures" not in page.locator("#contents a").all_inner_texts()
