"""The character data: which text, how it is cut, and what happens where there is none."""

import hashlib
import importlib.util
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

from plimsoll.errors import PlimsollError
from plimsoll_lab import source_text
from plimsoll_lab.source_text import (
    ALPHABET,
    HELD_OUT,
    OTHER,
    SYMBOLS,
    TRAINED,
    Text,
    held_out_batch,
    make_batch,
    spelled,
    standard_library,
)
from tests.support.cases import each

STDLIB = Path(sysconfig.get_paths()["stdlib"])


@pytest.fixture(scope="module")
def text() -> Text:
    return standard_library()


def file_of(name: str) -> str:
    return (STDLIB / f"{name.replace('.', '/')}.py").read_text(encoding="utf-8")


def test_the_text_is_the_sources_one_after_the_other(text: Text) -> None:
    for names, codes in ((TRAINED, text.trained), (HELD_OUT, text.held_out)):
        expected = "\n".join(file_of(name) for name in names)
        assert len(codes) == len(expected)
        wrong = [(a, b) for a, b in zip(expected, spelled(codes), strict=True) if a != b]
        assert len(wrong) == (codes == OTHER).sum()
        assert all(a not in ALPHABET and b == "\ufffd" for a, b in wrong)


def test_the_digest_is_of_both_texts(text: Text) -> None:
    both = bytes(text.trained.tolist()) + b"\xff" + bytes(text.held_out.tolist())
    assert text.sha256 == hashlib.sha256(both).hexdigest()
    assert SYMBOLS <= 0xFF  # so that what parts them is in neither


def test_no_module_is_both_trained_on_and_held_out() -> None:
    assert not {*TRAINED} & {*HELD_OUT}
    assert len({*TRAINED}) == len(TRAINED)


def test_reading_imports_no_module_of_the_text() -> None:
    code = (
        "import sys; from plimsoll_lab.source_text import *; before = set(sys.modules); standard_library(); "
        "print(sorted(set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    # To find a module inside a package is to import the package.
    assert set(eval(done.stdout)) & {*TRAINED, *HELD_OUT} == set()


def test_targets_are_the_characters_after_the_inputs(text: Text) -> None:
    batch = make_batch(text, 3, 7, pieces=5, length=32)
    assert batch.inputs.shape == batch.targets.shape == (5, 32)
    assert batch.inputs.dtype == batch.targets.dtype == torch.int64
    assert batch.inputs[:, 1:].equal(batch.targets[:, :-1])
    whole = spelled(text.trained)
    for inputs, targets in zip(batch.inputs, batch.targets, strict=True):
        assert spelled(inputs) + spelled(targets[-1:]) in whole


def test_a_batch_follows_from_seed_and_step_and_from_nothing_else(text: Text) -> None:
    first = make_batch(text, 0, 1, pieces=4, length=16)
    torch.manual_seed(99)
    assert make_batch(text, 0, 1, pieces=4, length=16).inputs.equal(first.inputs)
    others = [make_batch(text, 0, 2, pieces=4, length=16), make_batch(text, 1, 1, pieces=4, length=16)]
    assert not any(other.inputs.equal(first.inputs) for other in others)


def test_batches_reach_every_place_of_the_text() -> None:
    small = Text(trained=torch.arange(9, dtype=torch.uint8), held_out=torch.arange(9, dtype=torch.uint8), sha256="")
    starts = {int(make_batch(small, 0, step, pieces=8, length=4).inputs.min()) for step in range(20)}
    found = torch.cat([make_batch(small, 0, step, pieces=8, length=4).inputs[:, 0] for step in range(20)])
    assert set(found.tolist()) == {0, 1, 2, 3, 4} and starts <= {0, 1}  # 4 + 4 + 1 is the whole text


@each("pieces", [1, 2, 7])
def test_what_is_held_out_is_spread_from_its_beginning_to_its_end(text: Text, pieces: int) -> None:
    batch = held_out_batch(text, pieces=pieces, length=64)
    assert batch.inputs.shape == (pieces, 64)
    assert spelled(batch.inputs[0]) == spelled(text.held_out)[:64]
    if pieces > 1:
        assert batch.targets[-1].equal(text.held_out[-64:].long())
    assert held_out_batch(text, pieces=pieces, length=64).inputs.equal(batch.inputs)


def test_line_ends_of_other_systems_are_one_character(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_text, "_source", lambda _: "a\r\nb\té")
    standard_library.cache_clear()
    try:
        assert spelled(standard_library().held_out) == "\n".join(["a\nb\ufffd\ufffd"] * len(HELD_OUT))
    finally:
        standard_library.cache_clear()


def test_an_interpreter_without_sources_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    standard_library.cache_clear()
    try:
        with pytest.raises(
            PlimsollError, match=r"lab: expected the sources of Python's standard library; got none of 'argparse'"
        ):
            standard_library()
    finally:
        standard_library.cache_clear()
