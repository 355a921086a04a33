"""Recorded traces of gradients: what a loss scaler met in a real training, step by step, without the values.

A trace holds, for each step, how many unscaled gradients lay in each binade, for the parameters' gradients (`weights`,
what a scaler sees) and for the gradients of activations (`hidden`, what only the backward pass sees), and the largest
magnitude of each. The files are compressed numpy archives of plain arrays and are read without pickle.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from plimsoll import row_layout

LOWEST = -64  # what lies below is counted there: FP16 loses it at every scale up to 2^38
FOLDER = Path(__file__).parent / "traces"


@dataclass(frozen=True, slots=True, kw_only=True)
class Population:
    """The gradients of one kind, by step: counts of shape [steps, binades], zeros and largest magnitudes of [steps].

    `lowest` is the exponent of the first binade, which holds all that lies below it too.
    """

    counts: NDArray[np.int64]
    zeros: NDArray[np.int64]
    absmax: NDArray[np.float64]
    lowest: int

    @classmethod
    def from_rows(cls, rows: NDArray[np.int64]) -> "Population":
        """From merged rows of a bank, one a step."""
        histogram = rows[:, row_layout.HISTOGRAM : row_layout.HISTOGRAM + row_layout.BINADES].copy()
        cut = LOWEST - row_layout.LOWEST_BINADE
        histogram[:, cut] += histogram[:, :cut].sum(axis=1)
        histogram[:, :cut] = 0
        occupied = np.flatnonzero(histogram.any(axis=0))
        first, last = int(occupied[0]), int(occupied[-1])
        extremes = rows[:, row_layout.POSITIVE : row_layout.NEGATIVE + 1].copy().view(np.float64)
        return cls(
            counts=histogram[:, first : last + 1].copy(),
            zeros=rows[:, row_layout.ZEROS].copy(),
            absmax=extremes.max(axis=1),
            lowest=first + row_layout.LOWEST_BINADE,
        )

    def arrays(self, prefix: str) -> dict[str, NDArray[np.generic]]:
        """As arrays for a file, each as narrow as it may be."""
        kind = np.min_scalar_type(int(max(self.counts.max(), self.zeros.max())))
        return {
            f"{prefix}_counts": self.counts.astype(kind),
            f"{prefix}_zeros": self.zeros.astype(kind),
            f"{prefix}_absmax": self.absmax,
            f"{prefix}_lowest": np.array(self.lowest, dtype=np.int64),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A recorded training: its name, what it was, and its gradients."""

    name: str
    about: str
    weights: Population
    hidden: Population

    def __len__(self) -> int:
        return len(self.weights.absmax)

    def save(self, folder: Path) -> Path:
        """Writes ``<name>.npz``."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}.npz"
        arrays = {**self.weights.arrays("weights"), **self.hidden.arrays("hidden"), "about": np.array(self.about)}
        np.savez_compressed(path, **arrays)  # type: ignore[arg-type]
        return path

    @classmethod
    def load(cls, path: Path) -> "Trace":
        """Reads one file."""
        with np.load(path, allow_pickle=False) as file:
            populations = {
                prefix: Population(
                    counts=file[f"{prefix}_counts"].astype(np.int64),
                    zeros=file[f"{prefix}_zeros"].astype(np.int64),
                    absmax=file[f"{prefix}_absmax"],
                    lowest=int(file[f"{prefix}_lowest"]),
                )
                for prefix in ("weights", "hidden")
            }
            return cls(name=path.stem, about=str(file["about"]), **populations)


def recorded(folder: Path = FOLDER) -> Iterator[Trace]:
    """The committed traces, by name."""
    for path in sorted(folder.glob("*.npz")):
        yield Trace.load(path)
