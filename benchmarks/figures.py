"""What it costs to make a figure of a large run, and how large its JSON is.

    python benchmarks/figures.py                   2,000 tensors, 1,000 samples; some minutes, most of them writing
    python benchmarks/figures.py --quick           a smoke run

The goals: under 200 ms a figure once what it shows of the run has been read (the live page keeps a `View`), and under
300 KB of JSON, however many layers and steps. "first" is the first figure of a view whose cells are read; later ones
find what the first has computed of them. The run is `diagnose.py`'s, its tensors spread over six collections; besides,
one whose tensors are gradients all.
"""

import argparse
import gc
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import run_log
from _harness import Results, interleave
from diagnose import write_narrow

from plimsoll import report
from plimsoll.diagnosis import View
from plimsoll.runs import Batch, Run, RunWriter, Scalars

FIGURES: dict[str, Callable[[View], object]] = {
    "spectrogram": lambda view: report.spectrogram(view, "gradients", view.run.tensors["gradients"][0]),
    "heatmap, underflow": report.heatmap,
    "heatmap, norm": lambda view: report.heatmap(view, "norm"),
    "zero_heatmap": lambda view: report.zero_heatmap(view, "gradients"),
    "underflow_over_time": lambda view: report.underflow_over_time(view, findings=()),
    "scale_curve": report.scale_curve,
    "scale_window": report.scale_window,
    "loss_and_scale": lambda view: report.loss_and_scale(view, ()),
    "updates": report.updates,
    "code_usage": lambda view: report.code_usage(view, "gradients"),
    "before_after": lambda view: report.before_after(view, view),
    "record": report.record,
}


def read(folder: Path) -> View:
    """A view with the cells of all collections read."""
    view = View(Run(folder))
    for collection in view.run.tensors:
        view.cells(collection)
    return view


def ask(folder: Path, rounds: int) -> list[dict[str, object]]:
    """For each figure: the first one of a view, later ones, and the size of its JSON."""
    rows: list[dict[str, object]] = []
    view = read(folder)
    for name, make in FIGURES.items():
        fresh = View(view.run)
        fresh._cells = {name: None if cells is None else replace(cells) for name, cells in view._cells.items()}  # noqa: SLF001
        gc.collect()
        start = time.perf_counter()
        figure = make(fresh)
        first = time.perf_counter() - start
        again = interleave({name: lambda make=make, fresh=fresh: make(fresh)}, rounds=rounds, sample_seconds=0.0)[name]
        size = len(figure.to_json())
        rows.append({"figure": name, "first ms": 1e3 * first, "again ms": 1e3 * again.median, "JSON KB": size / 1e3})
    return rows


def write_gradients(folder: Path, tensors: int, samples: int) -> None:
    """A run of FP16 gradients and nothing else, at a loss scale that rises."""
    source = run_log.Tensors(tensors)
    with RunWriter(folder, flush_seconds=3600, queue_bytes=1 << 30) as writer:
        names = (f"blocks.{i // 8}.part{i % 8}.weight" for i in range(tensors))
        series = np.array([writer.series("gradients", name, format="fp16") for name in names])
        for sample in range(samples):
            step, scale = 10 * sample, 2.0 ** (8 + 8 * sample // samples)
            writer.write(Scalars(step=step, values={"loss": 2.0 + 1 / (1 + step), "scale": scale}))
            writer.write(Batch(step=step, rows=source.rows(), index=np.arange(tensors), series=series))
            if sample % 50 == 49:
                writer.flush()


def main() -> None:
    """Measures and writes the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    tensors, samples, rounds = (60, 50, 2) if arguments.quick else (2000, 1000, 5)
    results = Results("Figures", "cpu")
    note = "First: of a view whose cells are read. Again: the median of later ones. The goals are 200 ms and 300 KB."
    for title, write in (("six collections", write_narrow), ("gradients alone", write_gradients)):
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder) / "run", tensors, samples)
            rows = ask(Path(folder) / "run", rounds)
            results.add(f"{tensors:,} tensors x {samples:,} samples, {title}", note, rows)
    if not arguments.quick:
        results.write("figures")


if __name__ == "__main__":
    main()
