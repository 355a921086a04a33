"""The live page's what-if and comparison: what it shows is what the library says."""

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the live page needs the extra serve: pip install '.[serve]'")
pytest.importorskip("playwright", reason="pages are tested through playwright: pip install playwright")

from plimsoll.diagnosis import diff, whatif
from plimsoll.spectrum import Interval
from plimsoll.text import percent
from tests.support.browser import needs_browser
from tests.support.report.served import LAYER, Served, at, drawn, expect, hash_of

pytestmark = needs_browser


def spelled(interval: Interval) -> str:
    """An interval's estimate, as the page and the terminal write it."""
    about = "about " if interval.estimate == 0 < interval.high else ""
    return about + percent(interval.estimate).replace(" %", "\u00a0%")


def overall(page: Any, kind: str) -> Any:
    return page.locator(f".overall [data-kind={kind}] dd")


def answered(page: Any, shift: int) -> None:
    """Waits until the page shows the answer for a shift."""
    expect(page.locator(f".result[data-shift='{shift}']")).to_be_visible()


def test_the_best_scale_is_chosen_at_first(page: Any, site: Served, runs_folder: Path) -> None:
    found = whatif(runs_folder / "low", "fp16")
    at(page, site, "#/run/low/whatif")
    answered(page, found.shift)
    expect(page.get_by_label("Scale", exact=True)).to_have_value(str(found.shift))
    expect(page.locator(".sentence")).to_have_text(found.sentence)
    expect(page.get_by_role("button", name="Best scale")).to_be_disabled()
    assert hash_of(page) == "#/run/low/whatif"


def test_the_slider_by_keys_gives_the_librarys_numbers(page: Any, site: Served, runs_folder: Path) -> None:
    at(page, site, "#/run/low/whatif?shift=6")
    answered(page, 6)
    slider = page.get_by_label("Scale", exact=True)
    slider.focus()
    for _ in range(4):
        page.keyboard.press("ArrowLeft")
    answered(page, 2)
    found = whatif(runs_folder / "low", "fp16", 2)
    for kind in ("lost", "subnormal", "overflow"):
        interval = getattr(found.overall.fit, kind)
        expect(overall(page, kind)).to_contain_text(spelled(interval))
    rows = page.locator(".layers tbody tr")
    expect(rows).to_have_count(len(found.rows))
    worst = found.rows[0]
    assert worst.name == LAYER
    expect(rows.first.locator("th")).to_have_text(LAYER)
    expect(rows.first.locator("[data-kind=lost]")).to_have_text(spelled(worst.fit.lost))
    low, high = worst.window
    expect(rows.first.locator(".window-words")).to_have_text(f"2^{low} to 2^{high}")
    expect(rows.first.locator(".window .line")).to_have_class("line outside")
    assert hash_of(page) == "#/run/low/whatif?collection=gradients&format=fp16&shift=2"
    expect(slider).to_have_attribute("aria-valuetext", "2 to the power 2, 4")
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("ArrowRight")
    answered(page, 3)
    page.keyboard.press("b")
    answered(page, whatif(runs_folder / "low", "fp16").shift)


def test_a_fast_hand_gets_the_last_answer_only(page: Any, site: Served) -> None:
    at(page, site, "#/run/low/whatif?shift=0")
    answered(page, 0)
    asked = []
    page.on("request", lambda request: asked.append(request.url) if "/whatif?" in request.url else None)
    page.get_by_label("Scale", exact=True).evaluate(
        "slider => { for (let shift = 1; shift <= 20; shift += 1) {"
        " slider.value = shift; slider.dispatchEvent(new Event('input')) } }"
    )
    answered(page, 20)
    assert len(asked) == 1 and "shift=20" in asked[0]


def test_an_answer_that_comes_too_late_is_dropped(page: Any, site: Served) -> None:
    at(page, site, "#/run/low/whatif?shift=0")
    answered(page, 0)
    held = []
    page.route("**/whatif?*shift=1&*", lambda route: held.append(route))  # noqa: PLW0108  (its signature is read)
    page.get_by_label("Scale", exact=True).focus()
    with page.expect_request("**/whatif?*shift=1&*"):
        page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    answered(page, 2)
    assert held[0].request.failure is not None  # given up
    expect(page.locator(".shift")).to_contain_text("2^2")


def test_the_load_lines_move_with_the_slider(page: Any, site: Served) -> None:
    at(page, site, "#/run/low/whatif?shift=3")
    figure = drawn(page, ".whatif figure >> nth=0")
    expect(figure.locator("figcaption")).to_contain_text("times 2^3")
    page.get_by_label("Scale", exact=True).focus()
    page.keyboard.press("ArrowRight")
    expect(figure.locator("figcaption")).to_contain_text("times 2^4")


def test_other_formats_and_collections(page: Any, site: Served, runs_folder: Path) -> None:
    at(page, site, "#/run/low/whatif")
    page.get_by_label("Format").select_option("e4m3")
    page.get_by_label("Of", exact=True).select_option("activations")
    found = whatif(runs_folder / "low", "e4m3", collection="activations")
    answered(page, found.shift)
    expect(page.locator(".sentence")).to_have_text(found.sentence)
    assert hash_of(page) == "#/run/low/whatif?collection=activations&format=e4m3"


def test_a_question_that_means_nothing_is_told(page: Any, seen: Any, site: Served) -> None:
    seen.expects("422")
    at(page, site, "#/run/low/whatif?format=nonsense")
    expect(page.get_by_role("alert")).to_contain_text("nonsense")
    page.get_by_label("Format").select_option("bf16")
    expect(page.get_by_role("alert")).to_be_hidden()
    expect(page.locator(".sentence")).to_contain_text("BF16")


def test_two_runs_are_compared(page: Any, site: Served, runs_folder: Path) -> None:
    found = diff(runs_folder / "low", runs_folder / "healthy")
    assert found.first is not None
    at(page, site, "#/compare/low/healthy")
    expect(page.locator("h1")).to_have_text(found.sentence.replace(" %", "\u00a0%"))
    expect(page.get_by_role("region", name="Run A")).to_contain_text(re.compile("Problem: .* underflowed in FP16"))
    expect(page.get_by_role("region", name="Run B")).to_contain_text("Healthy through step 99")
    expect(page.locator("section:has(#diverged-title) tbody tr").first).to_contain_text(found.first.name)
    for place in (".scalars figure >> nth=0", ".wide figure"):
        drawn(page, place)
    colours = "node => node.querySelector('.plot')._fullData.slice(-2).map(trace => trace.marker.color.toLowerCase())"
    of_lines = page.locator(".scalars figure").first.evaluate(colours.replace("marker", "line"))
    assert page.locator(".wide figure").first.evaluate(colours) == of_lines
    assert "low and healthy" in page.title()
    expect(page.locator("#live")).to_have_text("Ended")  # both runs are closed: nothing is live
    page.get_by_role("link", name="Swap the two").click()
    expect(page.get_by_role("region", name="Run A")).to_contain_text("Healthy through step 99")
    page.go_back()
    expect(page.get_by_role("region", name="Run A")).to_contain_text("have underflowed in FP16")
