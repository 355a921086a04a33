"""What a large run costs to keep and to read, and what that makes of a larger one.

    python benchmarks/scale.py                     10,000 tensors, 100 samples, 4 ranks; minutes, and 400 MB of disk
    python benchmarks/scale.py --quick             a smoke run
    python benchmarks/scale.py --tensors 500 --samples 100 --ranks 4

The run goes through a `RunWriter` for each rank, one part for each sample, as a training leaves it that takes a sample
every few seconds. Its spectra are those of `run_log.py`: of normal values whose standard deviation drifts, drawn again
for each rank, spread over six collections. One tensor in twenty is a replica that all ranks have the same of (as a
norm's weight under tensor parallelism), which readers must find out; the others are shards, which they add up.

Besides the run that is asked for, smaller ones are measured: a quarter of the tensors, a quarter of the samples, half
of the ranks. How a figure grows with each is the power between the two, and the last tables take the figures to larger
runs on the line through both. That is a calculation and no measurement, and says so.
"""

import argparse
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import run_log
from _harness import Results, peak_extra_bytes
from numpy.typing import NDArray

from plimsoll.diagnosis import diagnose
from plimsoll.runs import Batch, Run, RunWriter, Scalars

KINDS = {"weights": "fp32", "gradients": "bf16", "activations": "bf16", "activation_gradients": "bf16",
         "updates": "fp32", "optimizer": "fp32"}  # fmt: skip
EVERY = 10  # steps between samples
REPLICAS = 20  # one tensor in so many is a replica
NAME = ("gradients", "blocks.1.part.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How large a run is."""

    tensors: int
    samples: int
    ranks: int

    def __str__(self) -> str:
        return f"{self.tensors:,} x {self.samples:,} x {self.ranks:,}"

    @property
    def spectra(self) -> int:
        """How many are stored."""
        return self.tensors * self.samples * self.ranks


def write(folder: Path, size: Size) -> dict[str, object]:
    """Writes the run; what it cost."""
    writers = [
        RunWriter(folder, rank=r, world_size=size.ranks, flush_seconds=3600, queue_bytes=1 << 30)
        for r in range(size.ranks)
    ]
    series = [_register(writer, size.tensors) for writer in writers]
    tensors = run_log.Tensors(size.tensors)
    replica, background = np.arange(size.tensors) % REPLICAS == 0, 0.0
    for step in range(0, EVERY * size.samples, EVERY):
        tensors.advance()
        common = tensors.drawn()
        for writer, numbers in zip(writers, series, strict=True):
            rows = np.where(replica[:, None], common, tensors.drawn(1 / size.ranks))
            start = time.perf_counter()
            writer.write(Scalars(step=step, values={"loss": 2.0 + 1 / (1 + step)}))
            writer.write(Batch(step=step, rows=rows, index=np.arange(size.tensors), series=numbers))
            assert writer.flush()
            background += time.perf_counter() - start
    start = time.perf_counter()
    for writer in reversed(writers):  # rank 0 last: it then finds the others complete, and says how ranks merge
        writer.close(timeout=None)
        assert not writer.dropped, writer.dropped
    files = [path for path in folder.rglob("*") if path.is_file()]
    disk = sum(path.stat().st_size for path in files)
    return {
        "tensors x samples x ranks": str(size),
        "MB on disk": disk / 1e6,
        "bytes a tensor, sample and rank": disk / size.spectra,
        "files": len(files),
        "ms to write a sample of a rank": background / size.samples / size.ranks * 1e3,
        "s to close a rank": (time.perf_counter() - start) / size.ranks,
    }


def _register(writer: RunWriter, tensors: int) -> NDArray[np.int64]:
    kinds = list(KINDS.items())
    numbers = []
    for i in range(tensors):
        kind, fmt = kinds[i % len(kinds)]
        suffix = ":exp_avg_sq" if kind == "optimizer" else ":output" if kind.startswith("activation") else ".weight"
        name = f"blocks.{i // len(kinds)}.part{suffix}"
        numbers.append(writer.series(kind, name, format=fmt, shared=i % REPLICAS != 0))
    return np.array(numbers)


def questions(folder: Path, size: Size) -> Mapping[str, Callable[[], object]]:
    """What is asked of a run that is opened for it."""
    step = EVERY * (size.samples // 2)
    return {
        "open": lambda: Run(folder),
        "open, steps and names": lambda: (Run(folder).steps, Run(folder).tensors),
        "open, one tensor's spectra at all steps": lambda: list(Run(folder).spectra(*NAME)),
        "open, one statistic of it": lambda: Run(folder).series(*NAME, "rms"),
        "open, table of all tensors at one step": lambda: Run(folder).table(steps=slice(step, step + 1)),
        "open, diagnose": lambda: diagnose(Run(folder)),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What one question cost: by the clock, in processor time of all threads, and in memory at its peak."""

    seconds: float
    processor_seconds: float
    peak_bytes: int


def read(folder: Path, size: Size, rounds: int) -> dict[str, Answer]:
    """What each question costs, asked so many times: the median times, and the memory of one more time."""
    found = {}
    for question, ask in questions(folder, size).items():
        clock, processor = [], []
        for _ in range(rounds):
            start = time.perf_counter(), time.process_time()
            ask()
            clock.append(time.perf_counter() - start[0])
            processor.append(time.process_time() - start[1])
        found[question] = Answer(
            seconds=statistics.median(clock),
            processor_seconds=statistics.median(processor),
            peak_bytes=peak_extra_bytes(ask),
        )
    return found


def measured(size: Size, rounds: int) -> tuple[dict[str, object], dict[str, Answer]]:
    """A run of that size, written and read."""
    with tempfile.TemporaryDirectory() as folder:
        written = write(Path(folder) / "run", size)
        return written, read(Path(folder) / "run", size, rounds)


def smaller(size: Size) -> dict[str, tuple[Size, float]]:
    """For each way to grow, a smaller run and the factor between. Never one rank: alone, it needs no merging."""
    sizes = {
        "tensors": replace(size, tensors=max(24, size.tensors // 4)),
        "samples": replace(size, samples=max(4, size.samples // 4)),
        "ranks": replace(size, ranks=max(2, size.ranks // 2)),
    }
    return {way: (each, getattr(size, way) / getattr(each, way)) for way, each in sizes.items() if each != size}


def exponents(
    whole: Mapping[str, Answer], less: Mapping[str, Mapping[str, Answer]], factors: Mapping[str, float]
) -> dict[str, dict[str, float]]:
    """For each question, the power of tensors, samples and ranks that its processor time grew by."""
    return {
        question: {
            way: math.log(answer.processor_seconds / less[way][question].processor_seconds) / math.log(factors[way])
            for way in factors
        }
        for question, answer in whole.items()
    }


def taken_to(
    size: Size, way: str, numbers: Sequence[int], whole: Mapping[str, Answer], less: tuple[Size, Mapping[str, Answer]]
) -> list[dict[str, object]]:
    """The processor time of each question to runs with larger numbers of tensors, samples or ranks.

    On the straight line through the two measured runs, whose fixed costs do not grow; where time grew faster than the
    number, by the power that it grew by.
    """
    here, there = getattr(size, way), getattr(less[0], way)
    rows: list[dict[str, object]] = []
    for question, answer in whole.items():
        seconds, before = answer.processor_seconds, less[1][question].processor_seconds
        slope, power = max(0.0, seconds - before) / (here - there), math.log(seconds / before) / math.log(here / there)
        row: dict[str, object] = {"question": question}
        for number in numbers:
            line, curve = seconds + slope * (number - here), seconds * (number / here) ** power
            row[f"s at {replace(size, **{way: number})}"] = max(line, curve) if power > 1 else line
        rows.append(row)
    return rows


def options_from(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=10_000)
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=1, help="how often each question is timed")
    parser.add_argument("--quick", action="store_true", help="a small run")
    parser.add_argument("--out", type=Path, help="folder of the result files; default benchmarks/results")
    options = parser.parse_args(arguments)
    if options.quick:
        options.tensors, options.samples, options.ranks = 96, 16, 4
    return options


def main() -> None:
    """Writes runs, reads them, and writes the tables, unless it is a smoke run without a folder to write to."""
    options = options_from()
    size = Size(tensors=options.tensors, samples=options.samples, ranks=options.ranks)
    results = Results("scale", "cpu")
    written, whole = measured(size, options.rounds)
    note = "A part for each sample of each rank; closing merges parts. No goal was set."
    results.add("Writing", note, [written])
    note = (
        "Files in the page cache. Processor seconds are of all threads, and what other work on the machine touches "
        "least. Peak: memory beyond what the process held. No goal was set."
    )
    results.add(f"Reading {size}", note, [_row(question, answer) for question, answer in whole.items()])
    below = smaller(size)
    found = {way: measured(each, options.rounds) for way, (each, _) in below.items()}
    results.add("Writing smaller runs", "For comparison.", [row for row, _ in found.values()])
    growth = exponents(
        whole, {way: answers for way, (_, answers) in found.items()}, {w: f for w, (_, f) in below.items()}
    )
    note = (
        f"From {', '.join(str(each) for each, _ in below.values())}: processor time grows as the number to this power."
    )
    results.add("Growth", note, [{"question": question, **powers} for question, powers in growth.items()])
    targets = {"ranks": 1000, "tensors": 1_000_000, "samples": 10 * size.samples}
    note = "Calculated, not measured: on the line through the measured runs. ranks='reduce' makes the ranks one."
    for way, number in targets.items():
        rows = taken_to(size, way, [number], whole, (below[way][0], found[way][1]))
        results.add(f"More {way}, processor seconds", note, rows)
    larger = [replace(size, **{way: number}) for way, number in targets.items()]
    share = written["MB on disk"] / size.spectra / 1e3
    disk = [{"tensors x samples x ranks": str(t), "GB": share * t.spectra} for t in larger]
    results.add("Larger runs, on disk", "In proportion to the number of spectra. Calculated, not measured.", disk)
    if options.out or not options.quick:
        results.write("scale", *([options.out] if options.out else []))


def _row(question: str, answer: Answer) -> dict[str, object]:
    return {
        "question": question,
        "s": answer.seconds,
        "processor s": answer.processor_seconds,
        "peak MB": answer.peak_bytes / 1e6,
    }


if __name__ == "__main__":
    main()
