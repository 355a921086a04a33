"""Runs of many layers and steps, written quickly: spectra of two binades, and nothing else."""

from pathlib import Path

import numpy as np

from plimsoll import row_layout
from plimsoll.runs import Batch, RunWriter


def name_of(layer: int) -> str:
    return f"blocks.{layer // 8}.part{layer % 8}.weight"


def written(path: Path, layers: int, samples: int, every: int = 10, fmt: str = "fp32") -> Path:
    """Gradients whose layer i holds 1000 values at step s: `i` zeros, the others 2^-(s % 7)."""
    with RunWriter(path, flush_seconds=600) as writer:
        series = np.array([writer.series("gradients", name_of(i), format=fmt) for i in range(layers)])
        for sample in range(samples):
            rows = rows_of(np.minimum(np.arange(layers), 999), -(sample % 7))
            writer.write(Batch(step=sample * every, rows=rows, index=np.arange(layers), series=series))
    return path


def rows_of(zeros: np.ndarray, exponent: int) -> np.ndarray:
    rows = np.zeros((len(zeros), row_layout.NARROW), dtype=np.int64)
    value, held = 2.0**exponent, 1000 - zeros
    rows[:, row_layout.COUNT], rows[:, row_layout.ZEROS] = 1000, zeros
    rows[:, row_layout.HISTOGRAM + exponent - row_layout.LOWEST_BINADE] = held
    sums = np.stack([value**power * held for power in (1, 1, 2, 4)], axis=1)
    rows[:, row_layout.SUMS] = sums.view(np.int64)
    key = int(np.float64(value).view(np.int64))
    rows[:, row_layout.POSITIVE], rows[:, row_layout.NEAREST] = key, row_layout.ABSMIN_TOP - key
    return rows
