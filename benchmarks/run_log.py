"""What a run costs: on disk, in the training thread, in the background, and to read.

    python benchmarks/run_log.py                   2,000 series, 1,000 steps; minutes
    python benchmarks/run_log.py --quick           a smoke run

The goals: 2,000 series sampled 1,000 times in under 1 GB, opened and one tensor's spectra over all steps read in under
2 s; a step of 500 spectra merged and made columns in under 2 ms on the background thread.

Spectra are those of normal values whose standard deviation drifts from step to step, of tensors of 4K to 16M values:
25 to 40 occupied binades, counts drawn again at each step, extremes as float32 holds them.
"""

import argparse
import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from _harness import Results, Timing, interleave
from numpy.typing import NDArray
from scipy.special import erf

from plimsoll import row_layout
from plimsoll.runs import Batch, Run, RunWriter, Scalars
from plimsoll.runs.columns.schema import Series
from plimsoll.runs.columns.spectrum_columns import columns_of, spectra_table
from plimsoll.runs.columns.step_table import from_batch
from plimsoll.runs.reading.run_folder import RunFolder
from plimsoll.runs.storage import parquet

COLLECTIONS = ("weights", "gradients", "activations", "activation_gradients")
# What is occupied: standard deviations lie between 2^-20 and 2^4, tensors hold at most 2^24 values.
_FIRST, _LAST = -64 - row_layout.LOWEST_BINADE, 16 - row_layout.LOWEST_BINADE
_EDGES = np.ldexp(1.0, np.arange(row_layout.BINADES + 1) + row_layout.LOWEST_BINADE)


class Tensors:
    """Imagined tensors whose standard deviations walk, and their rows of a bank at each step.

    Drawn again for each rank, of the same tensors: their values differ, their standard deviations do not.
    """

    def __init__(self, count: int) -> None:
        self.random, self.walk = np.random.default_rng(0), np.random.default_rng(1)
        self.sizes = np.exp2(self.random.uniform(12, 24, count)).astype(np.int64)
        self.log_std = self.random.uniform(-18, 2, count)
        self.rates = np.empty((count, 0))

    def advance(self) -> None:
        """The standard deviations of the next step."""
        self.log_std += self.walk.normal(0, 0.02, len(self.sizes))
        edges = _EDGES[_FIRST : _LAST + 1] / (np.exp2(self.log_std)[:, None] * math.sqrt(2))
        self.rates = np.diff(erf(np.clip(edges, 0, 7)), axis=1) * self.sizes[:, None]

    def rows(self) -> NDArray[np.int64]:
        """The rows of the next step."""
        self.advance()
        return self.drawn()

    def drawn(self, share: float = 1.0) -> NDArray[np.int64]:
        """Rows of this step, of tensors that hold such a share of the values."""
        std = np.exp2(self.log_std)
        rows = np.zeros((len(std), row_layout.NARROW), dtype=np.int64)
        first = row_layout.HISTOGRAM + _FIRST
        rows[:, first : first + _LAST - _FIRST] = self.random.poisson(self.rates * share)
        counts = rows[:, row_layout.HISTOGRAM :].sum(axis=1)
        rows[:, row_layout.COUNT] = counts
        self._add_extremes(rows)
        signed = self.random.normal(size=len(std)) * std * np.sqrt(counts)
        sums = [signed, std * counts * 0.7979, std**2 * counts, 3 * std**4 * counts]
        rows[:, row_layout.SUMS] = np.stack(sums, axis=1).view(np.int64)
        return rows

    def _add_extremes(self, rows: NDArray[np.int64]) -> None:
        occupied = rows[:, row_layout.HISTOGRAM :] > 0
        top = row_layout.BINADES - 1 - occupied[:, ::-1].argmax(axis=1)
        place = 1 + self.random.random((3, len(rows)))
        largest, other, least = (
            (factor * _EDGES[index]).astype(np.float32).astype(np.float64).view(np.int64)
            for factor, index in zip(place, (top, top - 1, occupied.argmax(axis=1)), strict=True)
        )
        rows[:, row_layout.POSITIVE], rows[:, row_layout.NEGATIVE] = largest, other
        rows[:, row_layout.NEAREST] = row_layout.ABSMIN_TOP - least


def steps_of(count: int, steps: int) -> Iterator[Batch]:
    """A batch for each step."""
    tensors, index = Tensors(count), np.arange(count)
    for step in range(steps):
        yield Batch(step=step * 10, rows=tensors.rows(), index=index, series=index)


def names(count: int) -> list[tuple[str, str]]:
    """Collections and names as a model has them."""
    each = -(-count // len(COLLECTIONS))
    return [(c, f"model.blocks.{i // 12}.part{i % 12}.weight") for c in COLLECTIONS for i in range(each)][:count]


def write(folder: Path, count: int, steps: int) -> dict[str, object]:
    """Writes a run, a part for every 20 steps; what it cost."""
    in_training, in_all = [], 0.0
    writer = RunWriter(folder, flush_seconds=3600, queue_bytes=1 << 30)
    for collection, name in names(count):
        writer.series(collection, name, format="fp32")
    for batch in steps_of(count, steps):
        start = time.perf_counter()
        writer.write(batch)
        writer.write(Scalars(step=batch.step, values={"loss": 1.0 / (1 + batch.step), "scale": 65536.0}))
        in_training.append(time.perf_counter() - start)
        if batch.step // 10 % 20 == 19:
            start = time.perf_counter()
            assert writer.flush()
            in_all += time.perf_counter() - start
    start = time.perf_counter()
    writer.close(timeout=None)
    closing = time.perf_counter() - start
    assert not writer.dropped, writer.dropped
    files = [path for path in folder.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    return {
        "series": count,
        "steps": steps,
        "MB on disk": size / 1e6,
        "bytes a spectrum": size / (count * steps),
        "files": len(files),
        "us in training, a step": float(np.median(in_training)) * 1e6,
        "ms in background, a step": in_all / steps * 1e3,
        "s to close": closing,
    }


def read(folder: Path, rounds: int) -> list[dict[str, object]]:
    """How long questions take, each to a `Run` opened for it."""
    collection, name = names(8)[7]

    def spectra() -> None:
        assert list(Run(folder).spectra(collection, name))

    calls = {
        "open": lambda: Run(folder),
        "open, one tensor's spectra at all steps": spectra,
        "open, one statistic of it at all steps": lambda: Run(folder).series(collection, name, "rms"),
        "open, its spectrum at one step": lambda: Run(folder).spectrum(collection, name, 100),
        "open, all steps": lambda: Run(folder).steps,
        "open, a scalar": lambda: Run(folder).scalars("loss"),
    }
    found = interleave(calls, rounds=rounds, sample_seconds=0.0)
    return [{"question": question, "s": timing.median, "spread": timing.spread} for question, timing in found.items()]


def background(entries: int, rounds: int) -> list[dict[str, object]]:
    """What the background thread does with one step, and once a flush."""
    batch = next(steps_of(entries, 1))
    series = [Series(collection=c, name=n, format="fp32", shared=True) for c, n in names(entries)]
    doubled = Batch(
        step=0, rows=batch.rows, index=np.repeat(batch.index, 2), series=np.repeat(batch.series, 2)
    )  # every series in two entries
    chunks = [columns_of(0, from_batch(batch, entries))] * 10

    def columns(given: Batch) -> None:
        columns_of(0, from_batch(given, entries))

    calls = {
        "merge a step, make its columns": lambda: columns(batch),
        "likewise, two entries for each series": lambda: columns(doubled),
        "table of ten steps": lambda: spectra_table(chunks, series),
    }
    found: dict[str, Timing] = interleave(calls, rounds=rounds)
    return [
        {"work": f"{entries} series: {work}", "ms": t.median * 1e3, "spread": t.spread} for work, t in found.items()
    ]


def checks(folder: Path, rounds: int) -> list[dict[str, object]]:
    """What checksums, and looking at what is read, add to writing and reading the run's largest part of spectra."""
    listed = RunFolder(folder)
    part = max(listed.of("spectra"), key=lambda p: (folder / p.name).stat().st_size)
    table = pq.read_table(folder / part.name)
    options = parquet._options("spectra", table.column_names)  # noqa: SLF001

    def written(checksums: bool) -> Path:
        path = folder / f".benchmark-{checksums}.parquet"
        with pq.ParquetWriter(path, table.schema, **{**options, "write_page_checksum": checksums}) as writer:
            writer.write_table(table, row_group_size=parquet.ROW_GROUP)
        return path

    plain, summed = written(False), written(True)
    calls = {
        "write": (lambda: written(False), lambda: written(True)),
        "read": (
            lambda: pq.ParquetFile(plain).read(),
            lambda: pq.ParquetFile(summed, page_checksum_verification=True).read(),
        ),
        "read and look at all columns": (
            lambda: pq.ParquetFile(plain).read(),
            lambda: parquet.read(parquet.opened(listed.place, part), part, table.column_names),
        ),
    }
    found: list[dict[str, object]] = []
    for work, (without, with_them) in calls.items():
        pair = interleave({"without": without, "with": with_them}, rounds=rounds, sample_seconds=0.0)
        a, b = pair["without"], pair["with"]
        ms = {"ms without": a.median * 1e3, "ms with": b.median * 1e3, "ratio": b.median / a.median}
        found.append({"work": f"{work}, {len(table):,} rows", **ms, "spread": max(a.spread, b.spread)})
    sizes = plain.stat().st_size, summed.stat().st_size
    found.append({"work": "bytes", "ms without": None, "ms with": None, "ratio": sizes[1] / sizes[0], "spread": None})
    for path in (plain, summed):
        path.unlink()
    return found


def options_from(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--series", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--quick", action="store_true", help="few series and steps")
    parser.add_argument("--out", type=Path, help="folder of the result files; default benchmarks/results")
    options = parser.parse_args(arguments)
    if options.quick:
        options.series, options.steps = 200, 50
    return options


def main() -> None:
    """Writes a run, reads it, and writes the tables, unless it is a smoke run without a folder to write to."""
    options = options_from()
    rounds = 3 if options.quick else 9
    results = Results("run log", "cpu")
    results.add("The background thread", "One thread. Goal: under 2 ms for a step.", background(500, rounds))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        results.add("Writing", "Goal: under 1,000 MB.", [write(path, options.series, options.steps)])
        results.add("Reading", "Files in the page cache. Goal: under 2 s.", read(path, rounds))
        results.add("Checks", "The largest part; with checksums of pages against without.", checks(path, rounds))
    if options.out or not options.quick:
        results.write("run-log", *([options.out] if options.out else []))


if __name__ == "__main__":
    main()
