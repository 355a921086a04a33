"""Starting ranks as processes of their own, and comparing what they recorded with a single process's run."""

import os
from pathlib import Path

import pytest

from plimsoll.runs import Run
from plimsoll.spectrum import Spectrum
from plimsoll.watch.ranks import collector, store_channel
from plimsoll.watch.shadow import data_parallel
from tests.support import processes
from tests.support.patience import HANG_SECONDS

HERE = Path(__file__).parent
ROOT = HERE.parents[3]
EXACT = ("count", "zeros", "nans", "pos_infs", "neg_infs", "min", "max", "absmin", "absmax")
SUMS = ("sum", "abssum", "sumsq", "sumfourth")
MOVES = ("pushed", "unmoved", "weight_norm")


def wait_for_each_other() -> None:
    """In a rank: waits of ranks for each other end with what they wait for, however slow the machine is."""
    store_channel.PATIENCE_SECONDS = store_channel._TAKEN_SECONDS = store_channel._SECONDS = HANG_SECONDS
    collector._HELLO_SECONDS = collector._END_SECONDS = collector._OPEN_SECONDS = HANG_SECONDS
    data_parallel.MEETING_SECONDS = HANG_SECONDS


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": processes.PYTHONPATH, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


def torchrun(script: str, world: int, *arguments: object) -> None:
    """Runs a script of this folder on so many ranks as under torchrun."""
    processes.ranks(HERE / script, [arguments] * world)


def assert_same(run: Run, reference: Run, *, roots: bool = True) -> None:
    """That two runs hold the same statistics of the same series: counts and extremes exactly, sums to 1e-6.

    Without `roots` what the root module takes and gives is left out: a pipeline has several.
    """
    assert run.steps == reference.steps
    found, expected = (
        {key: spectrum for key, spectrum in spectra(r).items() if roots or not key[1].startswith("model:")}
        for r in (run, reference)
    )
    assert found.keys() ^ expected.keys() == set()
    wrong = [f"{key}: {found[key]} for {expected[key]}" for key in expected if not same(found[key], expected[key])]
    assert not wrong, "\n".join(wrong)
    found_moves, expected_moves = moves(run), moves(reference)
    assert sorted(found_moves) == sorted(expected_moves)
    for key, values in expected_moves.items():
        assert found_moves[key] == pytest.approx(values, rel=1e-6, nan_ok=True), key
    for name in ("loss", "nonfinite"):
        (steps, values), (expected_steps, expected_values) = run.scalars(name), reference.scalars(name)
        assert steps.tolist() == expected_steps.tolist(), name
        assert values.tolist() == pytest.approx(expected_values.tolist(), rel=1e-6, nan_ok=True), name


def spectra(run: Run) -> dict[tuple[str, str, int], Spectrum]:
    return {(collection, name, step): spectrum for step, collection, name, spectrum in run.spectra()}


def same(found: Spectrum, expected: Spectrum) -> bool:
    exact = all(repr(getattr(found, name)) == repr(getattr(expected, name)) for name in EXACT)
    sums = all(getattr(found, name) == pytest.approx(getattr(expected, name), rel=1e-6, abs=1e-12) for name in SUMS)
    return exact and sums and bool((found.binades == expected.binades).all())


def moves(run: Run) -> dict[tuple[str, int], list[float]]:
    """What updates have beside their spectra."""
    rows = run.table("updates").to_pylist() if "updates" in run.tensors else []
    return {(row["name"], row["step"]): [row[name] for name in MOVES] for row in rows}
