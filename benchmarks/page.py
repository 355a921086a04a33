"""How soon the live page shows something: the verdict, the first figure, and what the browser fetches for them.

    python benchmarks/page.py                     a server and a Chromium for each round; minutes
    python benchmarks/page.py --quick             a smoke run
    python benchmarks/page.py --run DIR           of this run, in place of a synthetic one
    python benchmarks/page.py --baseline SRC      beside the page of another checkout, whose `src` this is

The goal: the first figure within 1.5 s of opening the address, on a machine with nothing else to do. Times by the clock
grow with the load of the machine, which the table has. So each has the processor time of the server, and of the page's
own thread in the browser, beside it. Rounds are interleaved, and a number is the median of its rounds.

- "server just started": nothing of the run has been read, and Python has just begun to load what figures need.
- "run read": the same server, another browser that has fetched nothing yet.
- "page known": that browser again, which keeps the page's files.
"""

import argparse
import contextlib
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

from _harness import Results
from diagnose import write_narrow

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.support.browser import ARGUMENTS, find_chromium

_TICKS = os.sysconf("SC_CLK_TCK")
# What the page did until the first figure: bytes on the way, requests, and how far things moved that were there before.
_DONE = """() => {
  const files = performance.getEntriesByType('resource');
  const bytes = files.reduce((sum, { transferSize }) => sum + transferSize, 0);
  return { bytes, requests: files.length, shift: window.shift ?? 0 };
}"""
_WATCH_SHIFT = """new PerformanceObserver((list) => {
  for (const { value, hadRecentInput } of list.getEntries()) {
    if (!hadRecentInput) window.shift = (window.shift ?? 0) + value;
  }
}).observe({ type: 'layout-shift', buffered: true });"""
_READ = "h1.verdict:not(:has-text('Reading'))"
_FIGURE = ".plot .main-svg"


@contextlib.contextmanager
def served(source: Path, folder: Path) -> Iterator[tuple[str, int]]:
    """The live page of a folder by the code of a source tree: its address and process."""
    command = [sys.executable, "-m", "plimsoll", "serve", str(folder), "--port", "0"]
    environment = {**os.environ, "PYTHONPATH": str(source)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as server:
        try:
            lines = iter(server.stdout.readline, "") if server.stdout else iter(())
            yield next(m[0] for line in lines if (m := re.search(r"http://\S+", line))), server.pid
        finally:
            server.terminate()


def processor_seconds(pid: int) -> float:
    """What a process has computed so far, in all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def visit(context: Any, address: str, pid: int) -> dict[str, float]:
    """Open a run's page and wait for its first figure."""
    page = context.new_page()
    page.add_init_script(_WATCH_SHIFT)
    session = context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})
    computed, begun = processor_seconds(pid), time.perf_counter()
    page.goto(address, wait_until="commit")
    page.wait_for_selector(_READ)
    verdict = time.perf_counter() - begun
    page.wait_for_selector(_FIGURE, state="attached")
    figure = time.perf_counter() - begun
    served_in = processor_seconds(pid) - computed
    metrics = {entry["name"]: entry["value"] for entry in session.send("Performance.getMetrics")["metrics"]}
    done = page.evaluate(_DONE)
    page.close()
    return {
        "verdict s": verdict,
        "first figure s": figure,
        "server CPU s": served_in,
        "page CPU s": metrics["TaskDuration"],
        "KB": done["bytes"] / 1000,
        "requests": float(done["requests"]),
        "layout shift": done["shift"],
    }


def measure(sources: dict[str, Path], folder: Path, run: str, rounds: int) -> list[dict[str, object]]:
    """Visits of each kind to the page of each source tree."""
    from playwright.sync_api import sync_playwright

    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    with sync_playwright() as playwright:
        for number in range(rounds):
            for name in list(sources)[:: 1 if number % 2 else -1]:
                browser = playwright.chromium.launch(executable_path=find_chromium(), args=ARGUMENTS)
                with served(sources[name], folder) as (address, pid):
                    route = f"{address}#/run/{quote(run, safe='')}"
                    first, second = browser.new_context(), browser.new_context()
                    visits = (("server just started", first), ("run read", second), ("page known", second))
                    for kind, context in visits:
                        found.setdefault((name, kind), []).append(visit(context, route, pid))
                browser.close()
    return [
        {"page": name, "visit": kind, **{key: statistics.median(v[key] for v in visits) for key in visits[0]}}
        for (name, kind), visits in found.items()
    ]


def main() -> None:
    """Measures and writes the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--run", type=Path, help="the run's folder")
    parser.add_argument("--baseline", type=Path, help="the src of another checkout")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--note", default="", help="what is to be known of the machine: a sentence in the table")
    arguments = parser.parse_args()
    if find_chromium() is None:
        raise SystemExit("No Chromium is installed: there is nothing to measure with.")
    sources = {"this": Path(__file__).parents[1] / "src"}
    sources |= {} if arguments.baseline is None else {"baseline": arguments.baseline}
    results = Results("The live page in a browser", "cpu")
    with tempfile.TemporaryDirectory() as made:
        if arguments.run is None:
            write_narrow(Path(made) / "run", *((60, 50) if arguments.quick else (300, 200)))
        folder, run = (Path(made), "run") if arguments.run is None else (arguments.run.parent, arguments.run.name)
        rows = measure(sources, folder, run, 2 if arguments.quick else arguments.rounds)
        load = os.getloadavg()[1]
        what = "300 tensors x 200 samples in FP16" if arguments.run is None else f"the run {run}"
        note = (
            f"A page of {what}, medians of {arguments.rounds} rounds, load average {load:.1f}. {arguments.note}".strip()
        )
        results.add("From the address to the first figure", f"{note} The goal is 1.5 s, of a machine at rest.", rows)
    if not arguments.quick:
        results.write("page")


if __name__ == "__main__":
    main()
