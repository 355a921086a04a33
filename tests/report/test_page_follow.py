"""The live page while runs are written, servers end and browsers leave."""

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the live page needs the extra serve: pip install '.[serve]'")
pytest.importorskip("playwright", reason="pages are tested through playwright: pip install playwright")

from plimsoll.runs import RunWriter
from tests.support.browser import Seen, needs_browser, open_page
from tests.support.patience import wait_until
from tests.support.report.served import COLLAPSED, LOW, Served, at, drawn, expect, kept, served, write_steps

pytestmark = needs_browser


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("growing")


@pytest.fixture(scope="module")
def site(folder: Path) -> Iterator[Served]:
    with served(folder) as found:
        yield found


@pytest.fixture
def writer(folder: Path) -> Iterator[RunWriter]:
    """A run that is being written; it goes when the test ends."""
    with RunWriter(folder / "run", flush_seconds=600) as found:
        write_steps(found, LOW, 0, 29)
        yield found
    shutil.rmtree(folder / "run", ignore_errors=True)


def last_step(page: Any) -> Any:
    return page.locator(".head .facts dd").first


def test_a_run_appears_in_the_list(page: Any, site: Served, folder: Path) -> None:
    at(page, site, "#/")
    expect(page.get_by_text("No run is here yet")).to_be_visible()
    expect(page.locator("#live")).to_have_text("Live")
    COLLAPSED.write(folder / "new", until=99)
    row = page.locator("table.runs tbody tr")
    expect(row).to_have_count(1)
    expect(row).to_contain_text("new")
    expect(row).to_contain_text("the loss scale fell from")
    shutil.rmtree(folder / "new")
    expect(row).to_have_count(0)


def test_new_samples_are_shown_without_losing_zoom_scroll_or_focus(page: Any, site: Served, writer: RunWriter) -> None:
    at(page, site, "#/run/run")
    expect(last_step(page)).to_have_text("0 to 29")
    expect(page.locator("#live")).to_have_text("Live")
    loss = drawn(page, ".offered > figure >> nth=0")
    loss.evaluate("node => Plotly.relayout(node.querySelector('.plot'), {'xaxis.range': [5, 20]})")
    page.locator(".findings a").first.focus()
    loss.scroll_into_view_if_needed()
    before = page.evaluate("scrollY")
    assert before > 0
    write_steps(writer, LOW, 30, 59)
    expect(last_step(page)).to_have_text("0 to 59")
    drawn_to = "document.querySelector('.offered > figure .plot').calcdata[0].at(-1).x"
    wait_until(lambda: page.evaluate(drawn_to) == 59)
    assert loss.evaluate("node => node.querySelector('.plot').layout.xaxis.range") == [5, 20]
    assert abs(page.evaluate("scrollY") - before) < 2
    expect(page.locator(".findings a").first).to_be_focused()


def test_sample_after_sample_is_shown(page: Any, site: Served, writer: RunWriter) -> None:
    at(page, site, "#/run/run")
    expect(last_step(page)).to_have_text("0 to 29")
    for last in (34, 39, 44):
        write_steps(writer, LOW, last - 4, last)
        expect(last_step(page)).to_have_text(f"0 to {last}")


def test_a_paused_page_stays_as_it_is_until_it_follows_again(page: Any, site: Served, writer: RunWriter) -> None:
    at(page, site, "#/run/run")
    expect(last_step(page)).to_have_text("0 to 29")
    page.keyboard.press(" ")
    expect(page.locator("#live")).to_have_text("Paused")
    write_steps(writer, LOW, 30, 39)
    expect(page.locator("#live")).to_have_text("Paused: there is more")
    expect(last_step(page)).to_have_text("0 to 29")
    page.get_by_role("button", name="Follow the run again").click()
    expect(last_step(page)).to_have_text("0 to 39")
    expect(page.locator("#live")).to_have_text("Live")


def test_a_run_that_ends_or_goes_is_told(page: Any, seen: Seen, site: Served, folder: Path, writer: RunWriter) -> None:
    seen.expects("404|409")
    at(page, site, "#/run/run")
    expect(page.locator("#live")).to_have_text("Live")
    writer.close()
    expect(page.locator("#live")).to_have_text("Ended")
    shutil.rmtree(folder / "run")
    expect(page.get_by_role("alert")).to_contain_text("No run of this name")


def test_an_empty_run_fills_while_it_is_looked_at(page: Any, site: Served, folder: Path) -> None:
    with RunWriter(folder / "fresh", flush_seconds=600) as writer:
        assert writer.flush()
        writer.write_manifest()
        at(page, site, "#/run/fresh")
        expect(page.locator("h1")).to_contain_text("Nothing was recorded")
        expect(page.locator(".badge .word")).to_have_text("Empty")
        write_steps(writer, LOW, 0, 9)
        expect(last_step(page)).to_have_text("0 to 9")
        drawn(page, ".spectrogram-figure")
    shutil.rmtree(folder / "fresh")


def test_the_page_comes_back_after_its_server_did(page: Any, seen: Seen, tmp_path: Path) -> None:
    seen.expects("ERR_CONNECTION_REFUSED|ERR_INCOMPLETE_CHUNKED|ERR_CONNECTION_RESET|ERR_EMPTY_RESPONSE")
    with RunWriter(tmp_path / "run", flush_seconds=600) as writer, ExitStack() as until_the_end:
        write_steps(writer, LOW, 0, 9)
        with served(tmp_path) as first:
            until_the_end.enter_context(kept(first.port))
            at(page, first, "#/run/run")
            expect(last_step(page)).to_have_text("0 to 9")
            expect(page.locator("#live")).to_have_text("Live")
        expect(page.locator("#live")).to_have_text("Reconnecting\u2026")
        expect(last_step(page)).to_have_text("0 to 9")  # what was read stays
        write_steps(writer, LOW, 10, 14)
        with served(tmp_path, port=first.port):
            expect(last_step(page)).to_have_text("0 to 14")
            expect(page.locator("#live")).to_have_text("Live")
            page.goto("about:blank")


def test_a_browser_that_leaves_frees_its_streams(browser: Any, site: Served, writer: RunWriter) -> None:
    streams = site.app.streams
    wait_until(lambda: streams.open == 0)
    with open_page(browser) as (page, _):
        at(page, site, "#/run/run")
        expect(page.locator("#live")).to_have_text("Live")
        wait_until(lambda: streams.open == 1)
        page.evaluate("location.hash = '#/'")
        expect(page.locator("h1")).to_have_text("Runs")
        wait_until(lambda: streams.open == 1)  # the run's is closed, the list's open
    wait_until(lambda: streams.open == 0 and streams.tasks == 0)
