"""The ledger of a sweep: killed anywhere it goes on, and whatever is not its own is refused by name."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from plimsoll.errors import ArgumentError, RunError
from plimsoll_lab.experiments.unit_sweep.grid import Ledger, results

SETUP = {"steps": 100, "seed": 0, "text_sha256": "abc", "device": "cpu"}
NAMES = ("first", "second", "third")
FOUND = {
    "first": {"bits": 3.25, "train_bits": 0.1, "first_bits": 6.0},
    "second": {"bits": math.nan, "train_bits": math.inf, "first_bits": -0.0},
    "third": {"bits": 1e300, "train_bits": 5e-324, "first_bits": 2.0},
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A ledger with three results."""
    with Ledger(tmp_path / "sweep.jsonl", SETUP, NAMES) as ledger:
        for name in NAMES:
            ledger.add(name, FOUND[name])
    return tmp_path / "sweep.jsonl"


def test_results_come_back_whole(path: Path) -> None:
    assert repr(results(path, SETUP, NAMES)) == repr(FOUND)
    with Ledger(path, SETUP, NAMES) as ledger:
        assert repr(ledger.found) == repr(FOUND)
    for line in path.read_text(encoding="utf-8").splitlines():
        json.loads(line, parse_constant=pytest.fail)  # plain JSON, for any reader


def test_killed_at_any_byte_it_goes_on(path: Path) -> None:
    """What is cut off is done again, and the file is then as if nothing had been."""
    whole = path.read_bytes()
    head = whole.index(b"\n") + 1
    for end in range(head, len(whole)):
        path.write_bytes(whole[:end])
        done = whole[:end].count(b"\n") - 1
        assert list(results(path, SETUP, NAMES)) == list(NAMES[:done])
        assert path.stat().st_size == end  # asking changes nothing
        with Ledger(path, SETUP, NAMES) as ledger:
            assert list(ledger.found) == list(NAMES[:done])
            for name in NAMES[done:]:
                ledger.add(name, FOUND[name])
        assert path.read_bytes() == whole


def test_a_file_that_is_not_there_is_none(tmp_path: Path) -> None:
    assert results(tmp_path / "none", SETUP, NAMES) == {} and not any(tmp_path.iterdir())


def test_a_flipped_digit_is_found_wherever_it_is(path: Path) -> None:
    whole = path.read_bytes()
    for place, byte in enumerate(whole):
        if byte in b"0123456789":
            path.write_bytes(whole[:place] + (b"1" if byte != ord("1") else b"2") + whole[place + 1 :])
            line = 1 + whole[:place].count(10)
            with pytest.raises(RunError, match=f"in line {line} "):
                results(path, SETUP, NAMES)


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("{", "in line 3 one that is no JSON. Delete that line; its configuration is trained again."),
        ("[]", "in line 3 one that is no record"),
        ('{"name": "second"}', "in line 3 one whose checksum is wrong"),
    ],
)
def test_damaged_lines_are_refused_by_their_number(path: Path, line: str, what: str) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join([*lines[:2], line, *lines[3:]]) + "\n", encoding="utf-8")
    before = path.read_bytes()
    with pytest.raises(RunError, match=f"expected whole results of this sweep in .*sweep.jsonl; got {what}"):
        Ledger(path, SETUP, NAMES)
    assert path.read_bytes() == before


def test_a_foreign_line_is_refused_by_its_name(path: Path) -> None:
    with pytest.raises(RunError, match="got in line 4 'third', which is no configuration of this sweep. Delete that"):
        Ledger(path, SETUP, NAMES[:2])


def test_two_results_of_one_configuration_must_agree(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    path.write_text("".join([*lines, lines[2]]), encoding="utf-8")
    assert repr(results(path, SETUP, NAMES)) == repr(FOUND)
    path.write_text("".join(lines), encoding="utf-8")
    with Ledger(path, SETUP, NAMES) as ledger:
        ledger.add("first", {**FOUND["first"], "bits": 3.5})
    with pytest.raises(RunError, match="in line 5 another result of 'first' than before"):
        results(path, SETUP, NAMES)


@pytest.mark.parametrize("changed", [{"steps": 150}, {"seed": 1}, {"text_sha256": "def"}, {"device": "cuda"}])
def test_another_setup_is_refused_with_what_differs(path: Path, changed: dict[str, Any]) -> None:
    ((key, value),) = changed.items()
    with pytest.raises(
        ArgumentError,
        match=f"sweep.jsonl was begun with; got {key} {SETUP[key]} there and {value} now. Go on with .* --output.",
    ):
        Ledger(path, {**SETUP, **changed}, NAMES)


def test_a_file_that_is_no_ledger_is_refused(tmp_path: Path) -> None:
    (tmp_path / "sweep.jsonl").write_text('{"some": "thing"}\n')
    with pytest.raises(RunError, match="in line 1 one whose checksum is wrong. Delete the file to start again."):
        Ledger(tmp_path / "sweep.jsonl", SETUP, NAMES)
    (tmp_path / "sweep.jsonl").write_text("")
    with pytest.raises(RunError, match="in line 1 one that is no JSON. Delete the file to start again."):
        Ledger(tmp_path / "sweep.jsonl", SETUP, NAMES)
