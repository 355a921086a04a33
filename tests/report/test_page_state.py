"""The live page's scalars, steps, columns, marks and pins: what is chosen is in the address and comes back with it."""

import csv
import fnmatch
import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import numpy as np
import pytest

pytest.importorskip("fastapi", reason="the live page needs the extra serve: pip install '.[serve]'")
pytest.importorskip("playwright", reason="pages are tested through playwright: pip install playwright")

from plimsoll.report import heatmap
from plimsoll.runs import Run
from plimsoll.runs.reading.row_selection import matching
from tests.support.browser import needs_browser, open_page
from tests.support.cases import each
from tests.support.patience import wait_until
from tests.support.report.served import LAYER, Served, at, drawn, expect, hash_of, served, write_sweep

pytestmark = needs_browser

RATES = ("rate 0", "rate 1", "rate 2")
RANGES = "[...document.querySelectorAll('.js-plotly-plot')].map(plot => plot.layout.xaxis.range.map(Math.round))"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sweep")
    write_sweep(root)
    return root


@pytest.fixture(scope="module")
def sweep(folder: Path) -> Iterator[Served]:
    with served(folder) as found:
        yield found


def chosen(page: Any) -> dict[str, list[str]]:
    """What the address says."""
    return parse_qs(hash_of(page).partition("?")[2])


def names(page: Any) -> Any:
    return page.locator(".run-link")


# -- search


TEXTS = (
    "weight",
    "blocks norm1",
    "*norm1*",
    "blocks.?.mlp.weight",
    "*.[wb]*",
    "blocks.[!0].*",
    "blocks.0.mlp.weight",
    "*",
)
NAMES = [f"blocks.{i}.{part}.{kind}" for i in range(12) for part in ("norm1", "mlp") for kind in ("weight", "bias")]
NAMES += ["head[0]", "a+b.weight", "Norm1", "x-y"]


def test_globs_and_exact_names_find_what_the_command_line_finds(page: Any, site: Served) -> None:
    at(page, site, "#/")
    module = page.evaluate("document.querySelector('script[type=module]').src").replace("main.js", "search.js")
    found = page.evaluate(
        "async ([module, names, texts]) => { const { matcher } = await import(module); return texts.map(text => {"
        " const search = matcher(text, names); return [search.kind, names.filter(search.test)] }) }",
        [module, NAMES, [*TEXTS, "weight$", "/mlp|Norm/", "^blocks.1[01]", "(", "head[0]"]],
    )
    kinds, results = zip(*found, strict=True)
    for text, kind, result in zip(TEXTS, kinds, results, strict=False):
        if text in NAMES or kind == "glob":
            assert result == matching(NAMES, text), text
        else:
            assert result == [name for name in NAMES if all(word in name.lower() for word in text.split())]
    assert kinds[: len(TEXTS)] == ("words", "words", *["glob"] * 4, "words", "glob")
    assert fnmatch.filter(NAMES, TEXTS[4]) == results[4] != []
    rest = dict(zip(("end", "slashes", "start", "damaged", "exact"), results[len(TEXTS) :], strict=True))
    assert rest["end"] == [name for name in NAMES if name.endswith("weight")]
    assert rest["slashes"] == [name for name in NAMES if "mlp" in name or "Norm" in name]
    assert rest["start"] == [name for name in NAMES if name.startswith(("blocks.10", "blocks.11"))]
    assert rest["damaged"] == [] and rest["exact"] == ["head[0]"]


def test_a_search_says_how_it_was_read_and_stays_when_the_collection_changes(page: Any, site: Served) -> None:
    at(page, site, "#/run/low/tensor")
    search, tally = page.get_by_label("Search tensors"), page.get_by_role("status").nth(1)
    search.fill("weight$")
    expect(tally).to_have_text("12 tensors by regular expression")
    search.fill("blocks.[01].*")
    expect(tally).to_have_text("4 tensors by glob")
    search.fill("(")
    expect(tally).to_have_text("This is not a regular expression: (")
    search.fill("blocks.0")
    page.get_by_label("Collection").select_option("activations")
    expect(page.locator(".names:not(.pinned) a")).to_have_text(["blocks.0.attn:output", "blocks.0.mlp:output"])
    assert chosen(page) == {"find": ["blocks.0"]}
    search.fill("no such name")
    expect(tally).to_contain_text("No tensor matches. Words find names that contain all of them. A glob")


# -- the tensor that is shown first, and pins


def test_the_tensor_that_matters_is_shown_first(page: Any, site: Served) -> None:
    at(page, site, "#/run/low/tensor")
    expect(page.locator(".tensors figure h2").first).to_contain_text(LAYER)
    expect(page.locator(".names a[aria-current]")).to_have_text(LAYER)
    # One parameter has one name in its collections: it stays chosen.
    page.get_by_label("Collection").select_option("weights")
    expect(page.locator(".tensors figure h2").first).to_contain_text(f"Weights of {LAYER}")


def test_pins_stay_in_the_browser_and_in_the_address(page: Any, site: Served) -> None:
    at(page, site, "#/run/low/tensor/gradients/blocks.0.mlp.weight")
    page.get_by_role("button", name="Pin", exact=True).click()
    expect(page.get_by_role("button", name="Unpin")).to_have_attribute("aria-pressed", "true")
    page.locator(".names a", has_text="blocks.1.mlp.weight").first.click()
    page.keyboard.press("p")
    expect(page.locator(".pinned li")).to_have_count(2)
    drawn(page, ".pinned-figures figure")
    expect(page.locator(".pinned-figures .picture-title")).to_contain_text("blocks.0.mlp.weight")
    assert chosen(page)["pin"] == ["gradients/blocks.0.mlp.weight", "gradients/blocks.1.mlp.weight"]
    address = hash_of(page)
    page.evaluate("localStorage.clear()")
    page.goto("about:blank")
    at(page, site, address)  # as someone else gets it
    expect(page.locator(".pinned li")).to_have_count(2)
    page.keyboard.press("p")
    expect(page.locator(".pinned li")).to_have_count(1)
    page.goto("about:blank")
    at(page, site, "#/run/healthy/tensor")
    expect(page.locator(".pinned li")).to_have_count(0)


def test_a_key_after_a_step_to_another_view_acts_on_that_view(page: Any, site: Served) -> None:
    """In one task of the browser, which reports a new address only after it: as on a busy machine."""
    at(page, site, "#/run/low/tensor/gradients/blocks.0.mlp.weight")
    pressed = "document.dispatchEvent(new KeyboardEvent('keydown', { key: 'p' }))"
    other = page.locator(".names a", has_text="blocks.1.mlp.weight").first
    other.evaluate(f"link => {{ link.click(); {pressed}; }}")
    assert chosen(page)["pin"] == ["gradients/blocks.1.mlp.weight"]
    # An address that changes without the page's doing is shown too, though keys change it before it is reported.
    page.evaluate(f"location.hash = '#/run/low/tensor/gradients/blocks.2.mlp.weight'; {pressed}; {pressed}")
    expect(page.locator(".names:not(.pinned) a[aria-current]")).to_have_text("blocks.2.mlp.weight")


# -- scalars


def curves(figure: Any) -> list[dict[str, Any]]:
    """The lines that are drawn, as Plotly has them."""
    return figure.evaluate(
        "node => node.querySelector('.plot').data.map("
        "({ x, y, name, line, opacity }) => ({ x, y, name, line, opacity }))"
    )


def test_every_scalar_is_drawn_over_steps_or_epochs(page: Any, sweep: Served, folder: Path) -> None:
    at(page, sweep, "#/run/rate 0/scalars")
    titles = page.locator(".scalars .picture-title")
    expect(titles).to_have_text(["loss", "acc", "epoch", "lr", "nonfinite", "scale"])
    page.get_by_label("Search scalars").fill("l*")
    expect(titles).to_have_text(["loss", "lr"])
    rate = drawn(page, ".scalars figure >> nth=1")
    steps, values = Run(folder / "rate 0").scalars("lr")
    (line,) = curves(rate)
    assert line["x"] == steps.tolist() and line["y"] == pytest.approx(values.tolist(), rel=1e-5)
    page.get_by_label("Over").select_option("Epochs")
    wait_until(lambda: curves(rate)[0]["x"][1] == 0.1)
    page.get_by_label("Logarithmic").check()
    wait_until(lambda: rate.evaluate("node => node.querySelector('.plot').layout.yaxis.type") == "log")
    assert chosen(page) == {"find": ["l*"], "log": ["1"], "x": ["epoch"]}
    page.reload()
    expect(titles).to_have_text(["loss", "lr"])
    expect(page.get_by_label("Over")).to_have_value("epoch")


def test_smoothing_is_the_debiased_exponential_mean(page: Any, sweep: Served, folder: Path) -> None:
    at(page, sweep, "#/run/rate 0/scalars?find=acc&smooth=0.8")
    raw, line = curves(drawn(page, ".scalars figure"))
    _, values = Run(folder / "rate 0").scalars("acc")
    assert raw["y"] == pytest.approx(values.tolist()) and raw["opacity"] < 1
    weights = [0.8 ** np.arange(i, -1, -1) for i in range(len(values))]
    expected = [float(np.average(values[: i + 1], weights=w)) for i, w in enumerate(weights)]
    assert line["y"] == pytest.approx(expected, rel=1e-5)
    expect(page.get_by_label("Smoothing", exact=True)).to_have_value("0.8")


def test_runs_without_scalars_say_how_to_log_some(page: Any, site: Served) -> None:
    at(page, site, "#/run/low/scalars?find=nothing")
    expect(page.locator(".scalars")).to_contain_text("No scalar matches")
    expect(page.locator(".scalars figure")).to_have_count(0)


# -- steps that are shown


def test_zoom_is_that_of_all_figures_and_of_the_address(page: Any, site: Served) -> None:
    at(page, site, "#/run/low/scalars")
    for place in range(2):
        drawn(page, f".scalars figure >> nth={place}")
    box = page.locator(".scalars .nsewdrag").first.bounding_box()
    across, middle = box["width"], box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + 0.25 * across, middle)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.5 * across, middle, steps=4)
    page.mouse.up()
    wait_until(lambda: "zoom" in chosen(page))
    low, high = (float(step) for step in chosen(page)["zoom"][0].split("_"))
    assert 20 < low < 30 and 45 < high < 55  # of 0 to 99
    wait_until(lambda: len({tuple(r) for r in page.evaluate(RANGES)}) == 1)
    assert page.evaluate(RANGES)[0] == [round(low), round(high)]
    page.locator(".parts a", has_text="Tensors").click()  # a link within the run keeps the steps
    drawn(page, ".tensors figure >> nth=0")
    assert page.evaluate(RANGES) == [[round(low), round(high)]]
    page.locator(".tensors .nsewdrag").first.dblclick()
    wait_until(lambda: "zoom" not in chosen(page))
    page.go_back()  # to the figures as they were left
    drawn(page, ".scalars figure >> nth=0")
    wait_until(lambda: page.evaluate(RANGES)[0] == [round(low), round(high)])


def test_the_step_under_the_mouse_is_marked_in_all_figures(page: Any, site: Served) -> None:
    at(page, site, "#/run/low")
    for figure in (".layers-figure", ".spectrogram-figure"):
        drawn(page, figure)
    page.locator(".layers-figure .nsewdrag").first.scroll_into_view_if_needed()
    box = page.locator(".layers-figure .nsewdrag").first.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 20)
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 22)
    for figure in (".layers-figure", ".spectrogram-figure"):
        expect(page.locator(f"{figure} .crosshair")).to_have_text("step 48")
    page.mouse.move(5, 5)
    expect(page.locator(".spectrogram-figure .crosshair")).to_be_hidden()


# -- figures: what is chosen, and their numbers


def test_a_heat_map_is_chosen_by_the_address(page: Any, site: Served) -> None:
    at(page, site, "#/run/low")
    heat = drawn(page, ".layers-figure")
    heat.get_by_label("Show").select_option(label="Update / weight")
    wait_until(lambda: chosen(page) == {"layers": ["heatmap:ratio:updates"]})
    page.locator(".findings a").nth(1).click()
    wait_until(lambda: "finding/1?" in hash_of(page))
    page.reload()
    expect(drawn(page, ".layers-figure").locator(".picture-title")).to_contain_text("Updates")


def test_the_first_heat_map_of_a_wide_format_is_not_blank(page: Any, sweep: Served) -> None:
    at(page, sweep, "#/run/rate 0")
    heat = drawn(page, ".layers-figure")
    expect(heat.locator("option").first).to_have_text("Update / weight")
    expect(heat.locator("option", has_text="Underflow")).to_have_count(0)
    values = heat.evaluate("node => [...node.querySelector('.plot')._fullData[0].z].map(row => [...row]).flat()")
    assert len(values) > 10 and all(-12 < value < -8 for value in values)  # the updates are 2^-10 of the weights


def saved(page: Any, figure: Any, button: str) -> str:
    with page.expect_download() as waiting:
        figure.locator(f'.modebar-btn[data-title="{button}"]').click()
    return Path(waiting.value.path()).read_text(encoding="utf-8")


def test_a_heat_map_is_saved_as_the_numbers_that_hovering_shows(page: Any, site: Served, runs_folder: Path) -> None:
    at(page, site, "#/run/low?layers=heatmap:underflow:activation_gradients")
    figure = drawn(page, ".layers-figure")
    figure.hover()
    rows = list(csv.DictReader(io.StringIO(saved(page, figure, "Download the numbers as CSV"))))
    trace = heatmap(runs_folder / "low", "underflow", "activation_gradients").data[0]
    shares = np.asarray(trace.customdata)
    assert list(rows[0]) == ["step", "row", "lost (%)"] and len(rows) == shares.size
    expected = {
        (int(step), str(name)): shares[i, j] for i, name in enumerate(trace.y) for j, step in enumerate(trace.x)
    }
    assert {(int(r["step"]), r["row"]): float(r["lost (%)"]) for r in rows} == pytest.approx(expected, abs=1e-4)
    saved_figure = json.loads(saved(page, figure, "Download the figure as JSON"))
    assert set(saved_figure) == {"data", "layout"} and saved_figure["data"][0]["type"] == "heatmap"


def module_of(page: Any, name: str) -> str:
    return page.evaluate("document.querySelector('script[type=module]').src").replace("main.js", name)


def test_lines_are_saved_with_a_column_for_each_and_formulas_as_text(page: Any, sweep: Served) -> None:
    at(page, sweep, "#/compare/rate 0/rate 1?find=acc")
    figure = drawn(page, ".scalars figure")
    figure.hover()
    rows = list(csv.reader(io.StringIO(saved(page, figure, "Download the numbers as CSV"))))
    assert rows[0] == ["step", "rate 0", "rate 1"] and [float(cell) for cell in rows[3]] == [2, 0.05, 0.075]
    text = page.evaluate(
        "async (module) => (await import(module)).csv({ data: ["
        " { type: 'scatter', name: '=cmd()', x: [1, 2], y: [3, null] },"
        " { type: 'scatter', name: 'a,\"b\"', x: [2], y: [0.5] }], layout: { xaxis: { title: { text: 'step' } } } })",
        module_of(page, "figures/export.js"),
    )
    assert list(csv.reader(io.StringIO(text))) == [["step", "'=cmd()", 'a,"b"'], ["1", "3", ""], ["2", "", "0.5"]]


def test_the_rows_of_two_heat_maps_in_one_figure_say_whose_they_are(page: Any, sweep: Served) -> None:
    at(page, sweep, "")
    text = page.evaluate(
        "async (module) => (await import(module)).csv({ layout: { xaxis: { title: { text: 'step' } } }, data: ["
        " { type: 'heatmap', name: 'rounded to zero', x: [1], y: ['a'], z: [[0.5]] },"
        " { type: 'heatmap', name: 'zero before', x: [1], y: ['a'], z: [[0.25]] }] })",
        module_of(page, "figures/export.js"),
    )
    head, *rows = csv.reader(io.StringIO(text))
    assert head[0] == "series" and [row[0] for row in rows] == ["rounded to zero", "zero before"]


def test_values_between_gaps_are_dots(page: Any, sweep: Served) -> None:
    at(page, sweep, "")
    drawn_as = page.evaluate(
        "async ([module, mean, log]) => (await import(module)).traces({ step: mean.map((_, i) => i), mean }, "
        "{ name: 'a', line: { color: '#000', dash: 'solid' } }, { axis: 'step', unit: 1, smoothing: 0.5, log }).pop()",
        [module_of(page, "figures/scalar_grid.js"), [3, None, 2, -1, 1, 1], True],
    )
    assert drawn_as["mode"] == "lines+markers"
    assert [size > 0 for size in drawn_as["marker"]["size"]] == [True, False, True, False, False, False]


def test_findings_alike_are_told_apart(page: Any, sweep: Served) -> None:
    at(page, sweep, "")
    alike = {"rule": "loss-spike", "collection": None, "since_step": 3}
    keys = page.evaluate(
        "async ([module, findings]) => (await import(module)).keysOf(findings)",
        [module_of(page, "views/finding.js"), [alike, {**alike, "since_step": 4}, alike, alike]],
    )
    assert len(set(keys)) == 4 and keys[0] == "loss-spike|null|3"


# -- the list


def test_settings_are_columns_that_sort_and_filter(page: Any, sweep: Served) -> None:
    at(page, sweep, "#/")
    expect(names(page)).to_have_count(3)
    page.locator(".menu summary").click()
    boxes = page.locator(".menu label")
    expect(boxes.first).to_have_text("lr")  # those that differ come first
    page.locator(".menu").get_by_label("lr", exact=True).check()
    page.locator(".menu").get_by_label("optimizer.name").check()
    expect(page.locator(".col-setting").first).to_be_visible()
    page.locator(".menu summary").click()
    page.get_by_role("button", name="lr", exact=True).click()
    expect(names(page)).to_have_text(["rate 2", "rate 1", "rate 0"])
    expect(page.locator("tbody .col-setting")).to_have_text(["0.001", "AdamW", "0.01", "AdamW", "0.1", "SGD"])
    page.get_by_label("Filter runs").fill("lr<0.05 optimizer.name=adamw")
    expect(names(page)).to_have_text(["rate 2", "rate 1"])
    assert chosen(page) == {
        "column": ["lr", "optimizer.name"],
        "filter": ["lr<0.05 optimizer.name=adamw"],
        "sort": ["setting:lr"],
    }
    page.reload()
    expect(names(page)).to_have_text(["rate 2", "rate 1"])
    page.get_by_label("Filter runs").fill("rate[12] batch=32")  # no name is "rate1"
    expect(names(page)).to_have_count(0)
    page.get_by_label("Filter runs").fill("rate?[12] batch=32")  # a setting that is no column, and a glob of the name
    expect(names(page)).to_have_text(["rate 2", "rate 1"])


def test_marks_are_in_the_address_and_tags_in_the_browser(page: Any, sweep: Served) -> None:
    at(page, sweep, "#/?sort=name")
    for run in RATES:
        page.get_by_label(f"Mark {run} for a comparison").check()
    assert chosen(page)["mark"] == list(RATES)
    expect(page.locator(".tray")).to_contain_text("Compare rate 0 with rate 1 with rate 2")
    page.get_by_label("Tag of the marked runs").fill("baseline")
    page.keyboard.press("Enter")
    expect(page.locator(".tag")).to_have_text(["baseline"] * 3)
    page.get_by_label("Mark rate 0 for a comparison").uncheck()
    page.get_by_label("Tag of the marked runs").fill("baseline")
    page.get_by_role("button", name="Tag", exact=True).click()  # all of them have it: it is taken away
    expect(page.locator(".tag")).to_have_count(1)
    page.get_by_label("Filter runs").fill("baseline")
    expect(names(page)).to_have_text(["rate 0"])
    page.get_by_label("Filter runs").fill("")
    page.keyboard.press("Escape")
    page.keyboard.press("v")
    expect(page.locator("h1")).not_to_contain_text("\u2026")
    page.go_back()
    expect(page.get_by_label("Mark rate 1 for a comparison")).to_be_checked()


@pytest.fixture(scope="module")
def grouped(folder: Path, runs_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Two groups, of which one has an alarm, one run alone in its folder, and one in the served folder."""
    root = tmp_path_factory.mktemp("grouped")
    shutil.copytree(folder, root / "sweep")
    shutil.copytree(runs_folder / "low", root / "sweep" / "rate 3")
    for place in ("depth/four/seed 1", "depth/four/seed 2", "alone/seed 1", "healthy"):
        shutil.copytree(runs_folder / "healthy", root / place)
    with served(root) as found:
        yield found


def rows_of(page: Any) -> Any:
    return page.locator("table.runs tbody th.col-name").locator(".run-link, .group-toggle")


CLOSED = ["seed 1", "depth/four 2 runs", "healthy", "sweep 4 runs"]
OPEN = [*CLOSED, *RATES, "rate 3"]


@pytest.mark.parametrize("width", [1400, 400])
def test_runs_of_a_folder_are_a_group_that_opens(browser: Any, grouped: Served, width: int) -> None:
    with open_page(browser, viewport={"width": width, "height": 900}) as (page, _):
        at(page, grouped, "#/?sort=name")
        expect(rows_of(page)).to_have_text(CLOSED)
        sweep = page.locator("tr.group", has_text="sweep")
        expect(sweep.locator(".badge")).to_have_attribute("data-state", "alarm")
        expect(sweep.locator(".verdict-line")).to_contain_text("rate 3: Problem: up to 44")
        expect(page.locator("tr", has_text="alone/").locator(".run-link")).to_have_text("seed 1")
        sweep.get_by_role("button").click()
        expect(rows_of(page)).to_have_text(OPEN)
        assert hash_of(page) == "#/?open=sweep&sort=name"
        page.reload()
        expect(rows_of(page)).to_have_text(OPEN)
        expect(sweep.get_by_role("button")).to_have_attribute("aria-expanded", "true")
        expect(sweep.locator(".verdict-line")).to_be_hidden()
        sweep.locator(".badge").click()
        expect(rows_of(page)).to_have_text(CLOSED)
        page.get_by_label("Filter runs").fill("seed")
        expect(page.locator("tr.group")).to_have_count(0)
        expect(page.locator("th.col-name").filter(has=page.locator(".run-link"))).to_contain_text(
            ["alone/seed 1", "depth/four/seed 1", "depth/four/seed 2"]
        )
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_group_is_opened_and_marked_by_keys(page: Any, grouped: Served) -> None:
    at(page, grouped, "#/?sort=name")
    expect(rows_of(page)).to_have_text(CLOSED)
    page.keyboard.press("j")
    page.keyboard.press("End")
    toggle = page.locator(".group-toggle:focus")
    expect(toggle).to_have_text("sweep 4 runs")
    page.keyboard.press("ArrowRight")
    expect(rows_of(page)).to_have_text(OPEN)
    page.keyboard.press("j")
    page.keyboard.press("j")
    expect(page.locator(".run-link:focus")).to_have_text("rate 1")
    page.keyboard.press("c")
    box = page.get_by_label("Mark the runs of sweep for a comparison")
    assert box.evaluate("box => box.indeterminate && !box.checked")
    page.keyboard.press("ArrowLeft")
    expect(rows_of(page)).to_have_text(CLOSED)
    expect(toggle).to_have_text("sweep 4 runs")
    page.keyboard.press("c")
    expect(box).to_be_checked()
    assert chosen(page)["mark"] == [f"sweep/rate {i}" for i in (1, 0, 2, 3)]
    expect(page.locator(".tray")).to_contain_text("and 1 more")
    page.keyboard.press("c")
    expect(box).not_to_be_checked()
    expect(page.locator(".tray")).to_be_hidden()
    page.keyboard.press("Enter")
    expect(rows_of(page)).to_have_text(OPEN)
    box.click()
    page.keyboard.press("v")
    expect(page.locator(".side")).to_have_count(4)


def test_settings_of_a_group_are_shown_where_its_runs_agree(page: Any, grouped: Served) -> None:
    at(page, grouped, "#/?column=lr&column=optimizer.name")
    expect(page.locator("tr.group", has_text="sweep").locator(".col-setting").first).to_have_text("differs")


def test_columns_are_chosen_by_keyboard_from_a_menu_that_escape_closes(page: Any, sweep: Served) -> None:
    at(page, sweep, "#/")
    expect(names(page)).to_have_count(3)
    menu = page.locator("details.menu")
    menu.locator("summary").focus()
    page.keyboard.press("Enter")
    labels = menu.locator("label")
    expect(labels.first).to_have_text("lr")  # which differs
    assert all(labels.nth(i).bounding_box()["height"] < 32 for i in range(labels.count()))  # each one line
    page.keyboard.press("Tab")
    page.keyboard.press("Space")
    expect(page.locator("th.col-setting")).to_have_text(["lr"])
    assert chosen(page) == {"column": ["lr"]}
    page.keyboard.press("Escape")
    expect(menu).not_to_have_attribute("open", "")
    expect(menu.locator("summary")).to_be_focused()


# -- several runs


def test_many_runs_are_overlaid_hidden_and_compared_with_the_first(page: Any, sweep: Served) -> None:
    at(page, sweep, "#/compare/rate 0/rate 1/rate 2?find=acc")
    expect(page.locator("h1")).to_have_text("3 runs, each compared with rate 0")
    expect(page.locator(".side")).to_have_count(3)
    lines = curves(drawn(page, ".scalars figure"))
    assert [line["name"] for line in lines] == list(RATES)
    assert len({line["line"]["color"] for line in lines}) == 3
    shown = [page.locator(".swatch").nth(i).evaluate("node => getComputedStyle(node).borderTopColor") for i in range(3)]
    assert shown == [
        f"rgb({int(c[1:3], 16)}, {int(c[3:5], 16)}, {int(c[5:], 16)})"
        for c in (line["line"]["color"] for line in lines)
    ]
    page.get_by_role("region", name="Run B").get_by_label("Show").uncheck()
    wait_until(lambda: [line["name"] for line in curves(page.locator(".scalars figure"))] == ["rate 0", "rate 2"])
    assert chosen(page) == {"find": ["acc"], "hide": ["rate 1"]}
    expect(page.locator("section:has(#changed-title) tbody")).to_contain_text("lr")
    cells = page.locator("section:has(#changed-title) tr", has_text="lr").locator("td")
    expect(cells).to_have_text(["0.1", "0.01", "0.001"])
    page.get_by_role("region", name="Run C").get_by_role("link", name="Make it the first").click()
    expect(page.locator("h1")).to_have_text("3 runs, each compared with rate 2")
    page.get_by_role("region", name="Run B").get_by_role("link", name="Leave out").click()
    expect(page.locator(".side")).to_have_count(2)
    assert hash_of(page).startswith("#/compare/rate%202/rate%201")


def test_an_address_brings_the_tags_along(page: Any, sweep: Served) -> None:
    at(page, sweep, "#/compare/rate 0/rate 1?tag=rate 1:before the fix&tag=other:x")
    expect(page.get_by_role("region", name="Run B").locator(".tag")).to_have_text(["before the fix"])
    expect(page.locator(".tag")).to_have_count(1)


# -- what-if


def test_the_tensors_of_a_what_if_are_sorted_by_a_column(page: Any, site: Served) -> None:
    at(page, site, "#/run/low/whatif?shift=0")
    expect(page.locator(".result[data-shift='0']")).to_be_visible()
    rows = page.locator(".layers tbody th")
    expect(rows.first).to_have_text(LAYER)
    page.get_by_role("button", name="Tensor", exact=True).click()
    expect(rows.first).to_have_text("blocks.0.attn.weight")
    expect(page.locator(".layers th[data-kind=tensor]")).to_have_attribute("aria-sort", "ascending")
    assert chosen(page)["sort"] == ["tensor"]
    page.reload()
    expect(rows.first).to_have_text("blocks.0.attn.weight")
    for _ in range(2):
        page.get_by_role("button", name="Tensor", exact=True).click()
    expect(rows.first).to_have_text(LAYER)


# -- where the page is


def test_a_part_begins_in_view_and_the_focus_is_not_lost(page: Any, site: Served) -> None:
    at(page, site, "#/run/low")
    drawn(page, ".spectrogram-figure")
    assert page.evaluate("scrollY") > 200
    page.locator(".spots a").first.focus()
    page.keyboard.press("t")
    title = page.locator(".tensors figure h2").first
    expect(title).to_contain_text("blocks")
    wait_until(lambda: title.bounding_box()["y"] > page.locator(".top").bounding_box()["height"])
    expect(page.locator(".part")).to_be_focused()
    page.keyboard.press("u")
    expect(page.locator("h1")).to_have_text("Runs")
    expect(page.get_by_role("main")).to_be_focused()


def moved(page: Any, site: Served, route: str) -> float:
    """How far what is below the first figure moves when that arrives."""
    held: list[Any] = []
    free: list[bool] = []
    page.goto("about:blank")
    page.route("**/figure/**", lambda request: request.continue_() if free else held.append(request))
    at(page, site, route)
    wait_until(lambda: page.evaluate("document.querySelectorAll('.picture .plot').length") and held)
    top = "document.querySelector('.pictures').getBoundingClientRect().top"
    before = page.evaluate(top)
    free.append(True)
    for request in held:
        request.continue_()
    expect(page.locator(".plot .main-svg").first).to_be_attached()
    after = page.evaluate(top)
    page.unroute("**/figure/**")
    return after - before


@each("route", ["#/run/low", "#/run/collapsed", "#/run/low/finding/1"])
def test_a_figure_takes_the_room_that_was_kept_for_it(page: Any, site: Served, route: str) -> None:
    assert moved(page, site, route) == pytest.approx(0, abs=25)  # a subtitle may have a second line
