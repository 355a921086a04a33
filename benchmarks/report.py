"""What a report costs: to write, in bytes, and to open.

    python benchmarks/report.py                   300 tensors, 1,000 samples; some minutes
    python benchmarks/report.py --quick           a smoke run

The goals: under 10 MB, and open in under 3 s. Opening is measured in a headless Chromium, from the call that opens the
file: until the verdict is painted (largest contentful paint), until the first figure is drawn, and until all are, as
printing asks for. Without Chromium the table of opening is left out, and says so.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import diagnose
import run_log
from _harness import Results, interleave

from plimsoll.diagnosis import View
from plimsoll.report import html, markdown, summary
from plimsoll.runs import Run

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.support.browser import ARGUMENTS, find_chromium

_PAINTED = """new Promise(done => new PerformanceObserver(list => done(list.getEntries().at(-1).startTime))
    .observe({type: 'largest-contentful-paint', buffered: true}))"""


def write(folders: Mapping[str, Path], place: Path, rounds: int) -> list[dict[str, object]]:
    """How long each form of the report takes to make, and how large it is."""
    calls: dict[str, Any] = {}
    for name, folder in folders.items():
        calls[f"{name}: the view read, for comparison"] = lambda folder=folder: View(Run(folder)).cells("gradients")
        calls[f"{name}: summary (JSON)"] = lambda folder=folder: summary(folder).to_dict()
        calls[f"{name}: Markdown"] = lambda folder=folder: markdown(folder)
        calls[f"{name}: HTML"] = lambda folder=folder, name=name: html(folder, place / f"{name}.html")
    found = interleave(calls, rounds=rounds, sample_seconds=0.0)
    sizes = {f"{name}: HTML": (place / f"{name}.html").stat().st_size / 1e6 for name in folders}
    sizes |= {f"{name}: Markdown": len(markdown(folder).encode()) / 1e6 for name, folder in folders.items()}
    return [
        {"form": form, "s": timing.median, "spread": timing.spread, "MB": sizes.get(form)}
        for form, timing in found.items()
    ]


def open_all(names: list[str], place: Path, rounds: int) -> list[dict[str, object]]:
    """How long until a page's verdict, first figure and all figures are there."""
    from playwright.sync_api import sync_playwright

    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in names}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=ARGUMENTS)
        for _ in range(rounds):
            for name in names:
                found[name].append(_opened(browser, place / f"{name}.html"))
        browser.close()
    return [
        {"page": name, **dict(zip(("verdict s", "first figure s", "all figures s"), _medians(times), strict=True))}
        for name, times in found.items()
    ]


def _opened(browser: Any, path: Path) -> tuple[float, float, float]:
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    start = time.perf_counter()
    page.goto(path.absolute().as_uri(), wait_until="commit")
    page.wait_for_selector(".plot[data-drawn] .main-svg", state="attached")
    first = time.perf_counter() - start
    painted = page.evaluate(_PAINTED) / 1e3
    start = time.perf_counter()
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    whole = time.perf_counter() - start
    page.close()
    return painted, first, whole


def _medians(times: list[tuple[float, float, float]]) -> list[float]:
    return [statistics.median(each) for each in zip(*times, strict=True)]


def main() -> None:
    """Measures and writes the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--note", default="", help="what is to be known of the machine: a sentence in the tables")
    arguments = parser.parse_args()
    tensors, samples, rounds = (60, 50, 2) if arguments.quick else (300, 1000, 3)
    results = Results("The report", "cpu")
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        folders = {"FP32": place / "fp32", "FP16": place / "fp16"}
        run_log.write(folders["FP32"], tensors, samples)
        diagnose.write_narrow(folders["FP16"], tensors, samples)
        note = f"{tensors} tensors x {samples:,} samples. {arguments.note}".strip()
        results.add("To write", f"{note} The goal is 10 MB.", write(folders, place, rounds))
        if find_chromium() is None:
            print("No Chromium is installed: opening is not measured.")
        else:
            results.add("To open", f"{note} The goal is 3 s.", open_all(list(folders), place, 2 * rounds + 1))
    if not arguments.quick:
        results.write("report")


if __name__ == "__main__":
    main()
