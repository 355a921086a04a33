import math
from collections.abc import Mapping

import numpy as np
import pytest
import torch

from plimsoll.errors import ArgumentError
from plimsoll.runs.records import StepRecord
from plimsoll.runs.sinks.tracker import DEFAULT_STATISTICS, STATISTICS, Selection, histogram
from plimsoll.spectrum import Spectrum, measure
from tests.support.cases import each
from tests.support.runs.sinks import TAG, record, spectrum


def selection(statistics: tuple[str, ...] = ("norm",), every: int = 1, max_histograms: int = 1000) -> Selection:
    return Selection("Test", statistics, every, max_histograms)


def test_statistics_are_all_numbers_that_a_spectrum_has() -> None:
    one = spectrum(1.0, -2.0)
    fields = {name for name in dir(Spectrum) if not name.startswith("_")}
    numbers = {name for name in fields if isinstance(getattr(one, name), int | float)}
    assert set(STATISTICS) == numbers
    assert set(DEFAULT_STATISTICS) <= numbers


def test_numbers_by_tag_beside_logged_ones() -> None:
    found = selection(("norm", "min", "zeros")).of(record(3, 3.0, -4.0, 0.0, loss=0.5))
    assert found.scalars == {f"{TAG}/norm": 5.0, f"{TAG}/min": -4.0, f"{TAG}/zeros": 1.0, "loss": 0.5}


def test_non_finite_statistics_are_kept() -> None:
    found = selection(("mean", "nonfinite")).of(record(3, math.nan))
    assert math.isnan(found.scalars[f"{TAG}/mean"])
    assert found.scalars[f"{TAG}/nonfinite"] == 1
    assert found.histograms == {}


def test_a_tensor_without_values_is_left_out() -> None:
    empty = StepRecord(step=1, spectra=lambda: {("gradients", "w"): Spectrum.empty()})
    assert selection().of(empty).scalars == {}


def test_a_histogram_counts_each_binade_between_its_exponents() -> None:
    found = histogram(spectrum(0.25, -0.3, 1.0, 1.999, -2.0, 0.0, math.inf))
    assert found.edges.tolist() == [-2, -1, 0, 1, 2]
    assert found.counts.tolist() == [2, 0, 2, 1]


def test_histograms_against_numpy_over_the_whole_range() -> None:
    values = torch.randn(5000, generator=torch.Generator().manual_seed(1)) * 1e-3
    found = histogram(measure(values))
    exponents = np.frexp(values.abs().numpy().astype(np.float64))[1] - 1
    counts, edges = np.histogram(exponents, bins=found.edges)
    assert counts[:-1].tolist() == found.counts[:-1].tolist()
    assert found.counts.sum() == 5000
    assert np.array_equal(edges, found.edges)
    lowest = histogram(spectrum(2.0**-149))
    assert lowest.edges.tolist() == [-149, -148]


@each(
    ("steps", "taken"),
    [((0, 5, 10, 15, 20), [0, 10, 20]), ((1, 11, 21), [1, 11, 21]), ((0, 10, 3, 8, 13), [0, 10, 3, 13])],
    ids=["every second", "another offset", "taken back to a checkpoint"],
)
def test_every_is_a_distance_between_steps(steps: tuple[int, ...], taken: list[int]) -> None:
    chosen = selection(every=10)
    found = {step: chosen.of(record(step, 1.0, loss=2.0)) for step in steps}
    assert [step for step in steps if f"{TAG}/norm" in found[step].scalars] == taken
    assert all(values.scalars["loss"] == 2.0 for values in found.values())


def test_spectra_that_are_not_due_are_not_decoded() -> None:
    def forbidden() -> Mapping[tuple[str, str], Spectrum]:
        raise AssertionError("decoded")

    chosen = selection(every=10)
    chosen.of(record(0, 1.0))
    chosen.of(StepRecord(step=5, spectra=forbidden))


def test_steps_without_spectra_do_not_count() -> None:
    chosen = selection(every=10)
    chosen.of(record(0, loss=1.0))
    assert f"{TAG}/norm" in chosen.of(record(5, 1.0)).scalars


def test_more_histograms_than_the_cap_are_said_once() -> None:
    spectra = {("weights", name): spectrum(1.0) for name in "dcab"}
    many = StepRecord(step=1, spectra=lambda: spectra)
    chosen = selection(max_histograms=2)
    with pytest.warns(RuntimeWarning, match="Test: a step has 4 histograms; the first 2 are written") as caught:
        assert [list(chosen.of(many).histograms) for _ in range(2)] == [["weights/a", "weights/b"]] * 2
    assert len(caught) == 1
    assert len(chosen.of(many).scalars) == 4
    assert selection(max_histograms=0).of(many).histograms == {}


@each(
    ("arguments", "message"),
    [
        (
            {"statistics": ("norm", "median")},
            "Test: expected statistics of a spectrum; got 'median'. Choose from absmax, ",
        ),
        ({"statistics": "average"}, "got 'average'"),
        ({"every": 0}, "Test: expected every to be an integer of at least 1; got every=0"),
        ({"every": 2.5}, "got every=2.5"),
        ({"max_histograms": -1}, "expected max_histograms to be an integer of at least 0; got max_histograms=-1"),
    ],
)
def test_arguments_are_checked(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        selection(**arguments)
