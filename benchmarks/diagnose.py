"""What it costs to diagnose a run, and to ask what another format would have made of it.

    python benchmarks/diagnose.py                   300 tensors, 1,000 samples; a minute
    python benchmarks/diagnose.py --quick           a smoke run

The goal: a run of 300 tensors x 1,000 samples diagnosed in under 2 s, opened and read from its folder.

The run is that of `run_log.py` (spectra of normal values whose standard deviation drifts) and, beside it, one in FP16
at a loss scale, with what the rules look at: updates, optimizer state, narrow formats, scalars of every step. The plain
read of all of its rows by pyarrow stands beside them, since no diagnosis can be faster.
"""

import argparse
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import run_log
from _harness import Results, interleave

from plimsoll.diagnosis import diagnose, whatif
from plimsoll.runs import Batch, Run, RunWriter, Scalars

KINDS = {"weights": "fp32", "gradients": "fp16", "activations": "fp16", "activation_gradients": "fp16",
         "updates": "fp32", "optimizer": "fp32"}  # fmt: skip


def write_narrow(folder: Path, tensors: int, samples: int) -> None:
    """A run in FP16, of so many tensors over all collections."""
    each = tensors // len(KINDS)
    source = run_log.Tensors(each * len(KINDS))
    with RunWriter(folder, flush_seconds=3600, queue_bytes=1 << 30) as writer:
        series, scales = [], []
        for kind, fmt in KINDS.items():
            suffix = ":exp_avg_sq" if kind == "optimizer" else ":output" if kind.startswith("activation") else ".weight"
            series += [writer.series(kind, f"blocks.{i}.part{suffix}", format=fmt) for i in range(each)]
            scales += [1024.0 if kind == "activation_gradients" else 1.0] * each
        moved = np.array([float(number >= 4 * each) for number in range(len(series))])
        extras = {"pushed": moved * 1000, "unmoved": moved * 10, "weight_norm": moved * 30}
        for sample in range(samples):
            for step in range(sample * 10, sample * 10 + 10):
                values = {"loss": 2.0 + 1 / (1 + step) + 0.01 * np.sin(step), "scale": 1024.0, "nonfinite": 0.0}
                writer.write(Scalars(step=step, values=values))
            index, scale = np.arange(len(series)), np.array(scales)
            batch = Batch(step=sample * 10, rows=source.rows(), index=index, series=np.array(series), scales=scale,
                          extras=extras)  # fmt: skip
            writer.write(batch)
            if sample % 50 == 49:
                writer.flush()


def ask(folders: Mapping[str, Path], rounds: int) -> list[dict[str, object]]:
    """How long each question takes, to a run opened for it."""

    def plain(folder: Path) -> None:
        for part in (folder / "spectra").iterdir():
            pq.ParquetFile(part).read()

    calls = {}
    for name, folder in folders.items():
        calls[f"{name}: pyarrow reads all rows"] = lambda folder=folder: plain(folder)
        calls[f"{name}: diagnose, all rules"] = lambda folder=folder: diagnose(Run(folder))
        calls[f"{name}: whatif fp16 at 2^10, gradients"] = lambda folder=folder: whatif(folder, "fp16", 10)
        calls[f"{name}: whatif e4m3, best shift"] = lambda folder=folder: whatif(folder, "e4m3")
    found = interleave(calls, rounds=rounds, sample_seconds=0.0)
    baseline = {name: found[f"{name}: pyarrow reads all rows"] for name in folders}
    return [
        {
            "question": question,
            "s": timing.median,
            "spread": timing.spread,
            "x plain read": timing.ratio(baseline[question.partition(":")[0]]),
        }
        for question, timing in found.items()
    ]


def main() -> None:
    """Measures and writes the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    tensors, samples, rounds = (60, 50, 2) if arguments.quick else (300, 1000, 5)
    results = Results("Diagnosis", "cpu")
    with tempfile.TemporaryDirectory() as folder:
        wide, narrow = Path(folder) / "fp32", Path(folder) / "fp16"
        run_log.write(wide, tensors, samples)
        write_narrow(narrow, tensors, samples)
        note = f"{tensors} tensors x {samples:,} samples. The goal is 2 s for diagnose. Spread: as in every table."
        results.add("Questions to a run", note, ask({"FP32": wide, "FP16": narrow}, rounds))
    if not arguments.quick:
        results.write("diagnose")


if __name__ == "__main__":
    main()
