"""Spectra of the gradients of each unit and place, in sampled steps."""

import functools
import threading
from collections.abc import Callable
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from plimsoll import kernels
from plimsoll.spectrum import Source, Spectrum

Place = Literal["outputs", "inputs", "weights"]
PLACES: tuple[Place, ...] = ("outputs", "inputs", "weights")


class Meter:
    """Meter of gradients, with a bank on each device. Reading it waits for them."""

    def __init__(self, units: int, fmt: str) -> None:
        self.rows, self.fmt = len(PLACES) * units, fmt
        self.measuring = False
        self._banks: dict[torch.device, Tensor] = {}
        self._lock = threading.Lock()  # the engine has a thread for each device

    def tap(self, unit: int, place: Place) -> Callable[[Tensor], None]:
        """Return a hook that measures a gradient of a unit and place in sampled steps."""
        return functools.partial(self._take, len(PLACES) * unit + PLACES.index(place))

    def _take(self, row: int, g: Tensor) -> None:
        if not self.measuring:
            return
        plain = g.detach()
        plain = plain.coalesce().values() if plain.is_sparse else plain
        plain = torch.view_as_real(plain) if plain.is_complex() else plain
        with self._lock:
            bank = self._banks.get(plain.device)
            if bank is None:
                bank = self._banks[plain.device] = kernels.new_bank(self.rows, device=plain.device)
            kernels.measure_into([plain], bank, [row])

    def read(self) -> list[dict[Place, Spectrum]]:
        """Return the spectra of each unit's scaled gradients, and empty the rows."""
        banks = [bank.cpu().numpy().copy() for bank in self._banks.values()]
        self.drop()
        merged = [sum((self._spectrum(bank[row]) for bank in banks), Spectrum.empty()) for row in range(self.rows)]
        return [
            dict(zip(PLACES, merged[start : start + len(PLACES)], strict=True))
            for start in range(0, self.rows, len(PLACES))
        ]

    def _spectrum(self, row: "np.ndarray[tuple[int], np.dtype[np.int64]]") -> Spectrum:
        return Spectrum.from_row(row, Source(self.fmt))

    def drop(self) -> None:
        """Drop all measurements since the last reading."""
        for bank in self._banks.values():
            bank.zero_()
