"""Formats as records: frozen, hashable, equal by value, and unchanged by copies and pickles."""

import copy
import dataclasses
import pickle

import pytest

from plimsoll.errors import ArgumentError
from plimsoll.formats import BLOCKS, E2M1, E4M3, E5M2, ELEMENTS, FP16, Format, get
from tests.support.cases import each

RECORDS = [*ELEMENTS, *BLOCKS, get("e5m7")]
each_record = each("fmt", RECORDS, ids=lambda fmt: fmt.name)


@each_record
def test_records_are_frozen_and_slotted(fmt):
    for field in dataclasses.fields(fmt):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(fmt, field.name, getattr(fmt, field.name))
    assert not hasattr(fmt, "__dict__")
    with pytest.raises(TypeError, match="positional"):
        type(fmt)("e4m3", 4, 3, 7)


@each_record
def test_copies_and_pickles_are_equal(fmt):
    for other in (copy.copy(fmt), copy.deepcopy(fmt), _pickled(fmt), dataclasses.replace(fmt)):
        assert other == fmt
        assert hash(other) == hash(fmt)
        assert dataclasses.asdict(other) == dataclasses.asdict(fmt)


def test_all_records_differ():
    assert len(set(RECORDS)) == len(RECORDS)


@each(
    "change",
    [{"name": "x"}, {"exponent_bits": 5}, {"mantissa_bits": 2}, {"bias": 8}, {"specials": "fnuz"}],
)
def test_every_field_counts_in_equality(change):
    assert dataclasses.replace(E4M3, **change) != E4M3


def test_saturation():
    assert (FP16.saturates(None), FP16.saturates(True), FP16.saturates(False)) == (False, True, False)
    assert (E4M3.saturates(None), E4M3.saturates(True), E4M3.saturates(False)) == (True, True, False)
    with pytest.raises(
        ArgumentError, match=r"saturate: expected True or None for e2m1, .*; got saturate=False\. Leave"
    ):
        E2M1.saturates(False)


def _thresholds(fmt: Format) -> tuple[float, bool]:
    return fmt.overflow_threshold, fmt.overflow_at_threshold


def test_overflow_thresholds():
    assert _thresholds(FP16) == (65520.0, True)  # IEEE 754: the tie rounds to even, which is Inf
    assert _thresholds(E5M2) == (61440.0, True)
    assert _thresholds(E4M3) == (464.0, False)  # 448 is S.1111.110: the tie stays
    assert _thresholds(E2M1) == (7.0, True)


def test_magnitudes_count_up_to_the_largest():
    values = [E2M1.magnitude(code) for code in range(8)]
    assert values == [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    assert E2M1.max_code == 7


def _pickled(record):
    return pickle.loads(pickle.dumps(record))
