"""The columns' arithmetic against `Spectrum.fit`, spectrum by spectrum: counts, bounds, estimates, noise, windows."""

import functools
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from plimsoll.diagnosis.estimates.element_counts import Populations
from plimsoll.diagnosis.estimates.rounding_noise import Noise
from plimsoll.diagnosis.tables.cells import Cells, Floats, Ints, read
from plimsoll.formats import get
from plimsoll.runs import Batch, Run, RunWriter
from plimsoll.spectrum import Spectrum
from tests.support.cases import each
from tests.support.runs import making

SHIFTS = (-20, -3, 0, 5, 13, 30)
FORMATS = ("fp16", "bf16", "e4m3", "e5m2", "e2m1", "e4m3fnuz", "fp32", "fp64", "e11m2", "e11m0")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Cells]:
    """Tensors of every kind, some of them FP16's, at scales from 1 to 64."""
    tensors = making.tensors(60) + [x.half().float() for x in making.tensors(40, seed=3)]
    path = tmp_path_factory.mktemp("tallies") / "run"
    with RunWriter(path) as writer:
        series = [
            writer.series("gradients", f"n{i}", format="fp16" if i >= 60 else "fp32") for i in range(len(tensors))
        ]
        index, scales = np.arange(len(tensors)), 2.0 ** (np.arange(len(tensors)) % 7)
        rows = making.rows_of(tensors)
        writer.write(Batch(step=0, rows=rows, index=index, series=np.array(series), scales=scales))
    run = Run(path)
    cells = read(run, "gradients")
    assert cells is not None
    return run, cells


@functools.cache
def spectra(run: Run, cells: Cells) -> list[tuple[int, Spectrum]]:
    """All of the gradients, by row; read once for all formats and shifts."""
    found = [(row, run.spectrum("gradients", cells.names[cells.layer[row]], 0)) for row in range(len(cells))]
    return [(row, s) for row, s in found if s.nonzero]


@each("name", FORMATS)
def test_fractions_are_those_of_fit(recorded: tuple[Run, Cells], name: str) -> None:
    run, cells = recorded
    values, fmt = Populations(cells=cells), get(name)
    for shift in SHIFTS:
        lost = values.lost(fmt, shift)
        columns = {
            "lost": lost,
            "subnormal": values.subnormal(fmt, shift, lost),
            "overflow": values.overflow(fmt, shift),
        }
        for row, s in spectra(run, cells):
            fit = s.fit(fmt, shift)
            for what, tallies in columns.items():
                expected = getattr(fit, what)
                assert tallies.low[row] / s.nonzero == expected.low
                assert abs(tallies.estimate[row] / s.nonzero - expected.estimate) < 1e-12
                if not (what == "lost" and s.source and s.source.censors):  # whose zeros `fit` adds to the upper bound
                    assert tallies.high[row] / s.nonzero == expected.high


@each("name", FORMATS)
def test_noise_is_that_of_fit(recorded: tuple[Run, Cells], name: str) -> None:
    run, cells = recorded
    for shift in SHIFTS:
        noise, signal = Noise(values=Populations(cells=cells)).of(get(name), shift)
        for row, s in spectra(run, cells):
            found = 10 * math.log10(signal[row] / noise[row]) if noise[row] > 0 else math.inf
            expected = s.fit(name, shift).snr_db
            if min(found, expected) < 400:  # beyond, squares of the errors leave float64's range
                assert found == pytest.approx(expected, rel=1e-6)


@each("name", FORMATS)
def test_windows_are_those_of_the_spectrum(recorded: tuple[Run, Cells], name: str) -> None:
    run, cells = recorded
    values = Populations(cells=cells)
    low, high = values.lowest_shift(get(name), 0.01), values.highest_shift(get(name))
    compared = 0
    for row, s in spectra(run, cells):
        if s.source is not None and not s.source.censors:
            window = (int(low[row]), int(high[row])) if low[row] <= high[row] else None
            assert window == s.window(name)
            compared += 1
    assert compared > 30


@each("hidden_for_each", [0, 3, 10**9])
@each("name", ["fp16", "e4m3", "fp64"])
def test_the_lowest_shift_of_a_group_is_the_first_at_which_little_of_it_is_lost(
    recorded: tuple[Run, Cells], name: str, hidden_for_each: int
) -> None:
    # Half of the hidden values come back with each binade above a place of their own: above the recorded ones, or, in
    # every second group, far below them.
    _, cells = recorded
    values, fmt = Populations(cells=cells), get(name)
    group, groups = np.arange(len(cells)) % 7, 8  # the last has no rows
    place = np.arange(len(cells)) * 13 % 97 - 40.0 - 200 * (group % 2)

    def hidden(shift: Ints) -> Floats:
        return hidden_for_each * 0.5 ** np.maximum(shift - place, 0.0)

    def lost(shift: Ints) -> Floats:
        rows = values.lost(fmt, shift[group]).high + hidden(shift[group])
        return np.bincount(group, weights=rows, minlength=groups)

    total = np.bincount(group, weights=cells.nonzero + hidden_for_each, minlength=groups)
    lowest = values.lowest_shift_of_groups(fmt, 0.01, group, groups, hidden)
    there = total > 0
    assert list(there) == [True] * 7 + [False]
    assert (lost(lowest) < 0.01 * total)[there].all()
    assert (lost(lowest - 1) >= 0.01 * total)[there].all()
    always = values.lowest_shift_of_groups(fmt, 0.01, group, groups, lambda _: cells.nonzero + 1.0)
    assert (always[there] > 2000).all()  # none will do


def test_a_scale_that_is_no_power_of_two_moves_the_limits(tmp_path: Path) -> None:
    x = torch.rand(4096) * 4e-7
    with RunWriter(tmp_path / "run") as writer:
        series = np.array([writer.series("gradients", "w", format="fp32")])
        scales = np.array([1000.0])
        writer.write(Batch(step=0, rows=making.rows_of([x * 1000]), index=np.array([0]), series=series, scales=scales))
    cells = read(Run(tmp_path / "run"), "gradients")
    assert cells is not None
    for shift in (0, 1, 3):
        lost = Populations(cells=cells).lost(get("fp16"), shift)
        truth = int(((x * 2.0**shift).half() == 0).sum())
        assert lost.low[0] <= truth <= lost.high[0]
        assert abs(lost.estimate[0] - truth) < 0.02 * len(x)
