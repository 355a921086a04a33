"""What the tests of runs are made of: rows of a bank with known spectra, and small writers."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from plimsoll.kernels import measure_into, new_bank
from plimsoll.runs import Batch, RunWriter
from plimsoll.runs.writing.worker import _Produce
from plimsoll.spectrum import Source, Spectrum
from tests.support.patience import HANG_SECONDS

INF, NAN = float("inf"), float("nan")


def tensors(count: int, seed: int = 0) -> list[Tensor]:
    """Tensors that between them have whatever a spectrum can have."""
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(64, generator=generator) * 2.0 ** (i % 30 - 20) for i in range(count)]
    odd = [[], [0.0, -0.0], [NAN], [INF, -INF, 1.0], [-3.0], [1e-45, 3e38], [0.0, 5.0, NAN]]
    for i, values in enumerate(odd[: count // 2]):
        made[2 * i] = torch.tensor(values)
    return made


def rows_of(measured: Sequence[Tensor]) -> NDArray[np.int64]:
    bank = new_bank(max(1, len(measured)))
    measure_into(measured, bank, list(range(len(measured))), accumulate=False)
    return bank.numpy()[: len(measured)]


def spectrum_of(row: NDArray[np.int64], fmt: str = "fp32") -> Spectrum:
    return Spectrum.from_row(row, Source(fmt))


def batch(writer: RunWriter, step: int, named: Mapping[tuple[str, str], Tensor], **fields: object) -> Batch:
    """One entry for each (collection, name)."""
    shared = bool(fields.pop("shared", True))
    ids = [writer.series(c, n, format="fp32", shared=shared) for c, n in named]
    index = np.arange(len(ids))
    return Batch(step=step, rows=rows_of(list(named.values())), index=index, series=np.array(ids), **fields)


def write_steps(writer: RunWriter, steps: Sequence[int], value: float = 1.0, name: str = "w") -> None:
    """At each step the one number `value`, so that what is read back tells who wrote it."""
    for step in steps:
        writer.write(batch(writer, step, {("weights", name): torch.tensor([value])}))


def die(writer: RunWriter) -> None:
    """Ends a writer as a kill would: nothing more is written, and its thread ends.

    Left alone, that would take the lock of the run again when it next looks, after 15 seconds.
    """
    writer._finalizer.detach()
    worker = writer._worker
    worker.after_fork()
    worker._running, worker._deadline = False, None
    worker._queue.put((_Produce(lambda: ()), 0, worker._numbers))  # wakes it
    worker._thread.join(HANG_SECONDS)


def written(path: Path, steps: Sequence[int], value: float = 1.0, **arguments: object) -> Path:
    """A closed run of those steps."""
    with RunWriter(path, **arguments) as writer:
        write_steps(writer, steps, value)
    return path
