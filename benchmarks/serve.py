"""What the live page costs: the list of runs, opening a run, its views, what-if, and how soon new data is seen.

    python benchmarks/serve.py                   1,000 runs; 2,000 tensors x 1,000 samples; minutes
    python benchmarks/serve.py --quick           a smoke run
    python benchmarks/serve.py --runs DIR        with a folder kept from before (made there if it is empty)

The goals: a folder of 1,000 runs lists in under 1 s, from manifests; any view of a run of 2,000 tensors x 1,000 samples
in under 200 ms once the run is open; new samples seen within 3 s of being written.

Times are by the clock, and beside them what all threads of the process computed: on a machine that others use the
second says more. Requests go through the whole application (gate, routes, JSON) within this process. "Cold" is a server
that has just started, files being in the system's cache; a view is timed at each of several questions that were not
asked before. The plain read of all rows of the large run by pyarrow stands beside them.
"""

import argparse
import asyncio
import contextlib
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow.parquet as pq
from _harness import Results
from diagnose import write_narrow
from run_log import Tensors
from starlette.testclient import TestClient

from plimsoll.report.live.server.app import App, app
from plimsoll.report.live.waiting_browsers import Streams
from plimsoll.runs import Batch, RunWriter, Scalars

BASE = "http://localhost"


def make(folder: Path, runs: int, tensors: int, samples: int) -> None:
    """Many small runs that are copies of one, and a large one."""
    if folder.exists() and any(folder.iterdir()):
        return
    write_narrow(folder / "many" / "run0", 300, 4)
    for number in range(1, runs):
        shutil.copytree(folder / "many" / "run0", folder / "many" / f"run{number}")
    write_narrow(folder / "large" / "run", tensors, samples)


@contextlib.contextmanager
def served(folder: Path) -> Iterator[tuple[App, TestClient]]:
    """A server that has just started; verdicts are left out, so that nothing else uses the machine."""
    made = app(folder, hosts=("localhost",))
    made.answers.verdicts.close()
    try:
        yield made, TestClient(made, base_url=BASE)
    finally:
        made.close()


Taken = tuple[float, float]  # seconds by the clock, and of computing in all threads of this process


def timed(call: Callable[[], object]) -> Taken:
    """What a call takes."""
    begun, computed = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - begun, time.process_time() - computed


def ask(client: TestClient, path: str) -> Taken:
    """What a question takes; it must be answered."""
    answers = []
    taken = timed(lambda: answers.append(client.get(path)))
    assert answers[0].status_code == 200, f"{path}: {answers[0].text[:300]}"
    return taken


def listing(folder: Path, rounds: int) -> list[dict[str, object]]:
    """The list, by a new server and again."""
    cold, warm, changed = [], [], []
    for _ in range(rounds):
        with served(folder) as (_made, client):
            cold.append(ask(client, "/api/runs"))
            time.sleep(1.0)  # the answer before is not taken again
            warm.append(ask(client, "/api/runs"))
            time.sleep(1.0)
            (folder / "run0" / "run.json").touch()
            changed.append(ask(client, "/api/runs"))
    return [
        _row("cold", cold, 1.0),
        _row("again, nothing changed", warm, 1.0),
        _row("again, one changed", changed, 1.0),
    ]


def views(folder: Path, rounds: int) -> list[dict[str, object]]:
    """A large run: opened, and looked at in every way."""
    rows: list[dict[str, object]] = []
    plain = [timed(lambda: [pq.ParquetFile(part).read() for part in sorted((folder / "run" / "spectra").iterdir())])]
    rows.append(_row("pyarrow reads all rows", plain, None))
    with served(folder) as (_made, client):
        rows.append(_row("open cold, with its verdict", [ask(client, "/api/runs/run")], None))
        rows.append(_row("open again", [ask(client, "/api/runs/run") for _ in range(rounds)], 0.2))
        names = client.get("/api/runs/run").json()["collections"]
        for figure, questions in _figures(names, rounds).items():
            seconds = [ask(client, f"/api/runs/run/figure/{question}") for question in questions]
            rows.append(_row(figure, seconds[1:] or seconds, 0.2))
        for fmt in ("fp16", "e4m3"):
            first = [ask(client, f"/api/runs/run/whatif?format={fmt}")]
            rows.append(_row(f"what-if {fmt}, asked for the first time", first, None))
            moved = [ask(client, f"/api/runs/run/whatif?format={fmt}&shift={shift}") for shift in range(-5, 2 * rounds)]
            rows.append(_row(f"what-if {fmt}, slider moved", moved, 0.2))
        rows.append(_row("a view once more", [ask(client, "/api/runs/run/figure/scale_curve")] * 2, 0.2))
    return rows


def _figures(names: dict[str, list[str]], rounds: int) -> dict[str, list[str]]:
    """Questions that were not asked before, by figure."""
    gradients = names["gradients"]
    each = ["gradients", "weights", "activations", "activation_gradients", "optimizer"]
    picked = [gradients[i * len(gradients) // (rounds + 1)] for i in range(rounds + 1)]
    return {
        "spectrogram": [f"spectrogram?collection=gradients&name={name}&formats=fp16,e4m3" for name in picked],
        "heat map, underflow": [f"heatmap?statistic=underflow&collection={c}" for c in each[:4]],
        "heat map, norm": [f"heatmap?statistic=norm&collection={c}" for c in each],
        "underflow against scale": [f"scale_curve?format={fmt}" for fmt in ("fp16", "e5m2", "e4m3")],
        "underflow over time": ["underflow_over_time"],
        "loss and scale": ["loss_and_scale"],
        "updates": ["updates"],
        "record": ["record"],
    }


def seen(folder: Path, rounds: int, tensors: int) -> list[dict[str, object]]:
    """From a flush's end to the event, and to a figure with the new step; by the real polling, of a run that grows."""
    source, reported, drawn = Tensors(tensors), [], []
    with RunWriter(folder / "growing", flush_seconds=3600, queue_bytes=1 << 30) as writer:
        series = [writer.series("gradients", f"layer{i}.weight", format="fp16") for i in range(tensors)]

        def sample(step: int) -> None:
            index = range(tensors)
            writer.write(Scalars(step=step, values={"loss": 1.0, "scale": 1024.0, "nonfinite": 0.0}))
            writer.write(Batch(step=step, rows=source.rows(), index=_ints(index), series=_ints(series)))
            writer.flush()

        sample(0)
        with served(folder) as (made, client):
            ask(client, "/api/runs/growing/figure/heatmap?statistic=norm&collection=gradients")
            for step in range(1, rounds + 1):
                reported.append(asyncio.run(_until_told(made, sample, step)))
                drawn.append(ask(client, "/api/runs/growing/figure/heatmap?statistic=norm&collection=gradients"))
    return [_row("from written to shown", reported, 3.0), _row("from shown to a heat map with it", drawn, 0.2)]


async def _until_told(made: App, sample: Callable[[int], None], step: int) -> Taken:
    """From the end of writing until the stream says that step."""
    streams = Streams(made.answers.look)
    events = streams.events(("growing",))
    written, computed = 0.0, 0.0
    async for event in events:
        if not written and b"event: run\n" in event:
            await asyncio.to_thread(sample, step)
            written, computed = time.perf_counter(), time.process_time()
        elif f'"last_step": {step}'.encode() in event:
            break
    taken = time.perf_counter() - written, time.process_time() - computed
    streams.close()
    await events.aclose()
    return taken


def _ints(values: object) -> object:
    import numpy as np

    return np.array(list(values), dtype=np.int64)


def _row(what: str, taken: list[Taken], goal: float | None) -> dict[str, object]:
    clock, computing = zip(*taken, strict=True)
    return {"what": what, "ms": 1e3 * statistics.median(clock), "worst ms": 1e3 * max(clock),
            "computing ms": 1e3 * statistics.median(computing), "goal ms": None if goal is None else 1e3 * goal,
            "asked": len(taken)}  # fmt: skip


def main() -> None:
    """Measures and writes the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--runs", type=Path)
    parser.add_argument("--note", default="")
    arguments = parser.parse_args()
    runs, tensors, samples, rounds = (20, 60, 30, 2) if arguments.quick else (1000, 2000, 1000, 5)
    results = Results("The live page", "cpu")
    with tempfile.TemporaryDirectory() as made:
        folder = arguments.runs or Path(made)
        make(folder, runs, tensors, samples)
        note = f" {arguments.note}".rstrip()
        results.add("The list", f"{runs:,} runs of 300 tensors, closed.{note}", listing(folder / "many", rounds))
        what = f"A run of {tensors:,} tensors x {samples:,} samples, six collections.{note}"
        results.add("One run", what, views(folder / "large", rounds))
        growing = f"A run of {tensors // 4:,} tensors that grows; streams look once a second.{note}"
        results.add("New samples", growing, seen(Path(made) / "new", rounds, tensors // 4))
    if not arguments.quick:
        results.write("serve")


if __name__ == "__main__":
    main()
