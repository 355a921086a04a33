"""Records as data that JSON can hold."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from plimsoll.intervals import Interval
from plimsoll.results import JsonRecord, as_data


@dataclass(frozen=True, slots=True, kw_only=True)
class _Inner(JsonRecord):
    share: float
    at: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outer(JsonRecord):
    name: str
    ok: bool
    inner: _Inner
    bounds: Interval | None
    numbers: dict[str, float]


class _Own:
    def to_dict(self) -> dict[str, object]:
        return {"mine": 1}


def test_a_record_is_its_fields_in_their_order() -> None:
    inner = _Inner(share=float("nan"), at=(1, 2))
    bounds = Interval(low=0.0, high=float("inf"), estimate=0.5)
    data = _Outer(name="a", ok=True, inner=inner, bounds=bounds, numbers={"x": -float("inf")}).to_dict()
    assert json.dumps(data, allow_nan=False) == (
        '{"name": "a", "ok": true, "inner": {"share": "nan", "at": [1, 2]}, '
        '"bounds": {"low": 0.0, "high": "inf", "estimate": 0.5}, "numbers": {"x": "-inf"}}'
    )


def test_other_values_have_their_own_data_or_are_text() -> None:
    assert as_data([_Own(), None, Path("a"), 3]) == [{"mine": 1}, None, "a", 3]


def test_scalars_of_numpy_are_numbers() -> None:
    data = as_data([np.float32(1.5), np.int64(3), np.bool_(True), np.float16("inf"), np.array(2), np.array([1.0])])
    assert data == [1.5, 3, True, "inf", 2, "[1.]"] and type(data[1]) is int and data[2] is True


def test_what_a_manifest_holds_is_text_where_json_has_no_kind_for_it() -> None:
    assert as_data({"own": (_Own,), "nan": float("nan")}, lambda value: type(value).__name__) == {
        "own": ["type"],
        "nan": "nan",
    }
    assert as_data([_Inner(share=0.5, at=(1, 2))], str) == ["_Inner(share=0.5, at=(1, 2))"]
