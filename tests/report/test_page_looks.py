"""The live page's looks and manners: themes, widths, landmarks, words for what is wrong; and names that are hostile."""

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("fastapi", reason="the live page needs the extra serve: pip install '.[serve]'")
pytest.importorskip("playwright", reason="pages are tested through playwright: pip install playwright")

from plimsoll.kernels import measure_into, new_bank
from plimsoll.report import TEMPLATES
from plimsoll.runs import Batch, Event, RunWriter, Scalars
from tests.support.browser import Seen, needs_browser, open_page
from tests.support.cases import each
from tests.support.report.served import Served, at, drawn, expect, served

pytestmark = needs_browser

VIEWS = ("#/", "#/run/low", "#/run/low/tensor", "#/run/low/whatif", "#/run/low/events", "#/compare/low/healthy")
WITH_FIGURES = ("#/run/low", "#/run/low/tensor", "#/compare/low/healthy")
UNNAMED = (
    "[...document.querySelectorAll('button, a, input, select')].filter(e => e.checkVisibility()"
    " && !e.textContent.trim() && !e.ariaLabel && !e.labels?.length).length"
)
HOSTILE = (
    "<img src=x onerror=alert(1)>",
    "</script><script>alert(2)</script>",
    "a\u202eb\u0000c\u2028d",
    "../../etc/passwd",
    "%2e%2e%2f?x=1#y&z",
    "long" * 2500,
    "javascript:alert(3)",
    "<b>bold</b> & <sup>2</sup> %{x} $x$",
)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_theme_is_the_systems_until_one_is_chosen(browser: Any, site: Served, scheme: str) -> None:
    other = {"light": "dark", "dark": "light"}[scheme]
    with open_page(browser, color_scheme=scheme) as (page, _):
        at(page, site, "#/run/low")
        figure = drawn(page, "section.finding figure")
        paper = "node => node.querySelector('.plot').layout.template.layout.paper_bgcolor"
        body = "getComputedStyle(document.documentElement).backgroundColor"
        assert figure.evaluate(paper) == TEMPLATES[scheme]["layout"]["paper_bgcolor"]
        before = page.evaluate(body)
        page.get_by_role("button", name=f"Use the {other} theme").click()
        expect(page.get_by_role("button", name=f"Use the {scheme} theme")).to_be_visible()
        assert page.evaluate(body) != before
        expect(figure).to_have_js_property("isConnected", True)
        assert figure.evaluate(paper) == TEMPLATES[other]["layout"]["paper_bgcolor"]
        page.reload()
        expect(page.get_by_role("button", name=f"Use the {scheme} theme")).to_be_visible()
        assert page.evaluate(body) != before


def offers_no_upload(page: Any) -> None:
    page.wait_for_selector(".plot .modebar-btn", state="attached")
    titles = page.locator(".modebar-btn").evaluate_all("all => all.map(each => each.dataset.title)")
    assert "Download plot as a PNG" in titles
    assert not [title for title in titles if re.search("share|cloud|upload|send", title, re.IGNORECASE)]


@pytest.mark.parametrize("width", [1280, 400])
def test_every_view_fits_its_width_and_is_a_page_with_landmarks(browser: Any, site: Served, width: int) -> None:
    with open_page(browser, viewport={"width": width, "height": 800}) as (page, _):
        for view in VIEWS:
            at(page, site, view)
            expect(page.locator("h1")).to_have_count(1)
            expect(page.locator("h1")).not_to_contain_text("\u2026")  # it is read
            expect(page.get_by_role("main")).to_be_visible()
            expect(page.get_by_role("banner")).to_be_visible()
            assert page.evaluate("document.documentElement.scrollWidth") <= width, view
            assert page.evaluate(UNNAMED) == 0, view
            if width == 1280 and view in WITH_FIGURES:
                offers_no_upload(page)
            page.goto("about:blank")


def test_the_focus_is_seen_and_the_content_can_be_jumped_to(page: Any, site: Served) -> None:
    at(page, site, "#/run/low")
    expect(page.locator("h1")).to_contain_text("Problem")
    page.keyboard.press("Tab")
    expect(page.locator("#skip")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_role("main")).to_be_focused()
    page.keyboard.press("Tab")
    outline = "getComputedStyle(document.activeElement).outlineWidth"
    assert page.evaluate("document.activeElement.textContent") == "Overview"
    assert page.evaluate(outline) == "2px"


def test_nothing_moves_for_who_wants_no_motion(browser: Any, site: Served) -> None:
    moves = "document.getAnimations().length"
    for motion, some in (("no-preference", True), ("reduce", False)):
        with open_page(browser, reduced_motion=motion) as (page, _):
            at(page, site, "#/")
            expect(page.locator("#live")).to_have_text("Live")
            assert (page.evaluate(moves) > 0) == some


@each(
    ("route", "words"),
    [
        ("#/run/nowhere", "This run is not there"),
        ("#/run/..%2F..%2Fetc", "This run is not there"),
        ("#/run/%E0%A4%A", "There is no such page"),
        ("#/elsewhere", "There is no such page"),
        ("#/run/low/finding/99", "There is no such finding"),
        ("#/run/low/tensor/gradients/nowhere", "This tensor is not in the record"),
        ("#/run/broken", "run.json: cannot be read"),
        ("#/compare/low/nowhere", "cannot be compared"),
    ],
)
def test_what_is_not_there_is_told_in_words(page: Any, seen: Seen, site: Served, route: str, words: str) -> None:
    seen.expects("404|409")
    page.goto("about:blank")
    at(page, site, route)
    expect(page.get_by_role("main")).to_contain_text(words)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A run in which every name is hostile, the folder's too."""
    root = tmp_path_factory.mktemp("hostile")
    with RunWriter(
        root / "<img src=x onerror=alert(4)>", settings={HOSTILE[0]: HOSTILE[1]}, flush_seconds=600
    ) as writer:
        series = [writer.series("gradients", name, format="fp16") for name in HOSTILE]
        index = np.arange(len(series))
        for step in range(0, 40, 5):
            bank = new_bank(len(series))
            tensors = [torch.full((64,), 2.0**-24 if step < 20 else 0.0) for _ in HOSTILE]
            measure_into(tensors, bank, index.tolist(), accumulate=False)
            ones = np.ones(len(series))
            writer.write(Scalars(step=step, values={"loss": 1.0, "scale": 1.0}))
            writer.write(
                Batch(step=step, rows=bank.numpy(), index=index, series=np.array(series), scales=ones, extras={})
            )
        writer.write(Event(step=5, kind=HOSTILE[1], message=HOSTILE[0], details={HOSTILE[7]: HOSTILE[5]}))
    with served(root) as found:
        yield found


def test_hostile_names_are_text(page: Any, hostile: Served) -> None:
    at(page, hostile, "#/")
    link = page.locator(".run-link")
    expect(link).to_have_text("<img src=x onerror=alert(4)>")
    link.click()
    expect(page.locator(".head .badge")).to_be_visible()
    for figure in (".offered > figure >> nth=0", ".layers-figure", ".spectrogram-figure"):
        drawn(page, figure)
    assert "onerror" in page.title()
    page.keyboard.press("e")
    expect(page.locator(".events tbody")).to_contain_text("<img src=x onerror=alert(1)>")
    expect(page.get_by_role("region", name="Settings").locator(".settings")).to_contain_text(
        "</script><script>alert(2)</script>"
    )
    page.keyboard.press("t")
    names = page.locator(".names a")
    expect(names).to_have_count(len(HOSTILE))
    expect(names.nth(2)).to_have_text("a\ufffdb\ufffdc\ufffdd")
    for place in range(len(HOSTILE)):
        names.nth(place).click()
        drawn(page, ".tensors figure")
        expect(names.nth(place)).to_have_attribute("aria-current", "")
    long = names.nth(5)
    assert len(long.text_content()) < 60
    expect(long.locator("span")).to_have_attribute("title", ("long" * 2500)[:2000])
    page.keyboard.press("w")
    expect(page.locator(".layers tbody tr")).to_have_count(len(HOSTILE))
    assert page.locator("main img, main script, main b, main iframe").count() == 0


def test_no_part_of_the_page_reads_text_as_html() -> None:
    from plimsoll import report

    page = Path(report.__file__).with_name("page") / "files"
    forbidden = (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "new Function",
        "srcdoc",
        "://",
    )
    sources = [p for p in page.rglob("*") if p.suffix in (".js", ".html", ".css") and p.name != "plotly.min.js"]
    assert len(sources) > 10
    for source, word in itertools.product(sources, forbidden):
        text = source.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert word not in text, (source.name, word)


def test_every_key_is_in_the_documentation() -> None:
    from plimsoll import report

    page = Path(report.__file__).with_name("page") / "files"
    reported = {
        what for path in page.rglob("*.js") for what in re.findall(r'says: "([^"]+)"', path.read_text(encoding="utf-8"))
    }
    text = (Path(__file__).parents[2] / "docs" / "how-to" / "serve.md").read_text(encoding="utf-8")
    assert len(reported) > 15
    assert [what for what in sorted(reported) if what not in text] == []
