"""The live page in a real Chromium: what a user does on it, and what it must never do."""

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the live page needs the extra serve: pip install '.[serve]'")
pytest.importorskip("playwright", reason="pages are tested through playwright: pip install playwright")

from plimsoll.diagnosis import diagnose
from plimsoll.diagnosis.finding import layer_name
from tests.support.browser import needs_browser
from tests.support.report.served import LAYER, Served, at, drawn, expect, hash_of, wait_for_title

pytestmark = needs_browser

# -- the list


def test_list_says_of_each_run_how_it_is(page: Any, site: Served) -> None:
    at(page, site, "#/")
    rows = page.locator("table.runs tbody tr")
    expect(rows).to_have_count(5)
    low = rows.filter(has=page.get_by_role("link", name="low", exact=True))
    expect(low.locator(".badge .word")).to_have_text("Alarm")
    expect(low.locator(".badge .sign")).to_have_text("\u2715")
    expect(low).to_contain_text("blocks.2.attn")
    expect(low.locator(".col-step")).to_have_text("99")
    expect(low.locator(".col-tensors")).to_have_text("84")
    expect(low.locator(".col-live")).to_have_text("closed")
    broken = rows.filter(has_text="broken")
    expect(broken.locator(".badge .word")).to_have_text("Unreadable")
    expect(broken.locator(".verdict-line")).not_to_be_empty()
    assert page.title() == "Runs - Plimsoll"


def test_list_is_filtered_and_sorted_and_the_address_keeps_both(page: Any, site: Served) -> None:
    at(page, site, "#/")
    names = page.locator(".run-link")
    expect(names).to_have_count(5)
    page.get_by_role("button", name="Run", exact=True).click()
    expect(names).to_have_text(["broken", "collapsed", "healthy", "low", "seed 1"])
    expect(page.locator("th.col-name[aria-sort]")).to_have_attribute("aria-sort", "ascending")
    page.get_by_role("button", name="Run", exact=True).click()
    expect(names.first).to_have_text("seed 1")
    page.get_by_label("Filter runs").fill("healthy")
    expect(names).to_have_text(["seed 1", "healthy"])
    expect(page.get_by_text("2 of 5 runs")).to_be_visible()
    assert hash_of(page) == "#/?filter=healthy&sort=name.down"
    page.reload()
    expect(names).to_have_text(["seed 1", "healthy"])
    page.get_by_label("Filter runs").fill("nothing like it")
    expect(page.get_by_text("No run matches the filter")).to_be_visible()


def test_list_by_keys_alone(page: Any, site: Served) -> None:
    at(page, site, "#/?sort=name")
    expect(page.locator(".run-link")).to_have_count(5)
    focused = page.locator(".run-link:focus")
    page.keyboard.press("j")
    expect(focused).to_have_text("broken")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("c")
    page.keyboard.press("End")
    expect(focused).to_have_text("seed 1")
    page.keyboard.press("k")
    page.keyboard.press("c")
    expect(page.locator(".tray")).to_contain_text("Compare collapsed with low")
    page.keyboard.press("/")
    page.keyboard.type("underflowed")
    expect(page.locator(".run-link")).to_have_text(["low"])
    page.keyboard.press("ArrowDown")
    expect(focused).to_have_text("low")
    page.keyboard.press("Enter")
    expect(page.locator("h1")).to_contain_text("have underflowed in FP16")
    page.keyboard.press("u")
    expect(page.locator("h1")).to_have_text("Runs")


def test_marked_runs_are_compared(page: Any, site: Served) -> None:
    at(page, site, "#/")
    for name in ("low", "healthy"):
        page.get_by_label(f"Mark {name} for a comparison").check()
    page.keyboard.press("v")
    expect(page.get_by_role("region", name="Run A")).to_contain_text("low")
    assert hash_of(page) == "#/compare/low/healthy"


def test_keys_are_told(page: Any, site: Served) -> None:
    at(page, site, "#/")
    page.keyboard.press("?")
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("Mark the run, or the runs of the group, for a comparison")
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()


# -- a run


def test_run_begins_with_its_verdict_and_shows_the_gravest_finding(page: Any, site: Served, runs_folder: Path) -> None:
    at(page, site, "#/run/low")
    expect(page.locator("h1")).to_contain_text(re.compile("Problem: .* underflowed in FP16"))
    assert "low (alarm)" in page.title()
    found = diagnose(runs_folder / "low")
    items = page.locator(".findings a")
    expect(items).to_have_count(len(found))
    expect(items.first).to_have_attribute("aria-current", "")
    detail = page.locator("section.finding")
    for text in (found[0].meaning, layer_name(found[0].where[0])):
        expect(detail).to_contain_text(text)
    expect(detail.locator(".main-svg").first).to_be_visible()
    expect(detail.locator(".plot[role=group]")).to_have_attribute("aria-label", re.compile(r"\w+"))


def test_from_a_finding_to_the_spectrogram_and_back(page: Any, site: Served) -> None:
    at(page, site, "#/run/low")
    page.locator(".findings a").nth(1).click()
    expect(page.locator("section.finding h2")).to_have_text("scale-low")
    assert hash_of(page) == "#/run/low/finding/1"
    page.keyboard.press("k")
    page.keyboard.press("Enter")
    expect(page.locator("section.finding h2")).to_have_text("underflow-high")
    page.locator(".spots a", has_text=layer_name(LAYER)).click()
    assert hash_of(page) == f"#/run/low/tensor/gradients/{LAYER}"
    figure = drawn(page, ".tensors figure")
    expect(figure.locator("h2")).to_contain_text(LAYER)
    expect(page.locator(".names a[aria-current]")).to_have_text(LAYER)
    page.go_back()
    expect(page.locator("section.finding h2")).to_have_text("underflow-high")
    page.go_back()
    page.go_back()
    expect(page.locator("section.finding h2")).to_have_text("underflow-high")
    assert hash_of(page) == "#/run/low"
    page.go_forward()
    expect(page.locator("section.finding h2")).to_have_text("scale-low")


def test_the_pictures_are_there_and_a_row_of_the_heat_map_opens_its_layer(page: Any, site: Served) -> None:
    at(page, site, "#/run/low")
    expect(page.locator(".findings a").first).to_be_visible()
    for figure in (".offered > figure >> nth=0", ".layers-figure", ".spectrogram-figure"):
        drawn(page, figure)
    heat = page.locator(".layers-figure")
    expect(heat.locator("h3")).to_contain_text("Activation gradients")  # the finding shows those of parameters
    heat.get_by_label("Show").select_option(label="Underflow of parameter gradients")
    wait_for_title(heat, "Parameter gradients")
    plot = heat.locator(".heatmaplayer").first.bounding_box()
    rows = heat.evaluate("node => node.querySelector('.js-plotly-plot').layout.meta.rows")
    row = rows.index(LAYER)
    heat.locator(".nsewdrag").first.scroll_into_view_if_needed()
    plot = heat.locator(".nsewdrag").first.bounding_box()
    page.mouse.move(plot["x"] + plot["width"] / 2, plot["y"] + plot["height"] * (row + 0.5) / len(rows))
    expect(heat.locator(".hoverlayer .hovertext")).to_contain_text("blocks.2.attn")
    page.mouse.down()
    page.mouse.up()
    expect(page.locator(".tensors figure h2")).to_contain_text(LAYER)


def test_heat_maps_of_other_numbers(page: Any, site: Served) -> None:
    at(page, site, "#/run/low")
    heat = drawn(page, ".layers-figure")
    heat.get_by_label("Show").select_option(label="Norm of weights")
    wait_for_title(heat, "Weights")


def test_tensors_are_searched_and_walked_through(page: Any, site: Served) -> None:
    at(page, site, "#/run/low/tensor")
    names = page.locator(".names a")
    expect(names).to_have_count(12)
    page.get_by_label("Collection").select_option("optimizer")
    expect(names).to_have_count(24)
    page.keyboard.press("Escape")
    page.get_by_label("Search tensors").fill("blocks.1 mlp")
    expect(names).to_have_count(2)
    page.keyboard.press("Enter")
    expect(page.locator(".tensors figure h2")).to_contain_text("blocks.1.mlp.weight:exp_avg")
    page.locator(".names a").first.focus()
    page.keyboard.press("j")
    expect(page.locator(".tensors figure h2")).to_contain_text("exp_avg_sq")
    page.get_by_label("e5m2", exact=True).check()
    assert hash_of(page).endswith("?find=blocks.1+mlp&formats=e5m2")
    expect(page.locator(".tensors figure .plot")).to_contain_text("e5m2")


def test_events_and_settings(page: Any, site: Served) -> None:
    at(page, site, "#/run/low/events")
    expect(page.get_by_role("heading", name="The record")).to_be_visible()
    expect(page.get_by_text("No event was recorded")).to_be_visible()
    expect(page.locator(".settings").first).to_contain_text("numpy")
