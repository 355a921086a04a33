"""Ledger of a sweep: a line for each finished configuration, to continue from.

A file of JSON lines. The first says of what setup the results are, each other one is a configuration's result with a
checksum over it. A line is written by one call and brought to disk before the next one. A process that is killed leaves
whole lines and at most the beginning of one, which is cut off, and its configuration trained again.
"""

import itertools
import json
import os
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self, cast, get_args

from plimsoll.errors import ArgumentError, RunError
from plimsoll.results import as_data
from plimsoll.runs.storage.atomic_files import replacing

Sequencer = Literal["attention", "convolution", "recurrent"]
Norm = Literal["pre", "post", "no"]
Residual = Literal["none", "sum", "fixed", "running-mean"]
Optimizer = Literal["adamw", "sgd"]
Precision = Literal["fp32", "fp16"]
Scaling = Literal["none", "static", "unit"]
DEPTHS = (2, 8)
RATES = 5  # learning rates of a configuration, a geometric row
DEFAULT_RATES = (1, 2, 3)  # the places of those in a default run


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Design:
    """A model and its optimizer; trainings of one design are compared."""

    sequence: Sequencer
    norm: Norm
    residual: Residual
    optimizer: Optimizer
    depth: int

    def __str__(self) -> str:
        return f"{self.sequence}-{self.norm}norm-{self.residual}-{self.optimizer}-{self.depth}"


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Way:
    """A design's precision, and the scaling that keeps its gradients in range."""

    precision: Precision
    scaling: Scaling

    def __str__(self) -> str:
        return f"{self.precision}-{self.scaling}"


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Configuration:
    """One training; `rate`: its learning rate's place in its kind's row, from 0."""

    design: Design
    way: Way
    rate: int

    @property
    def name(self) -> str:
        """One word, which no other configuration has."""
        return f"{self.design}-{self.way}-r{self.rate}"

    def to_dict(self) -> dict[str, Any]:
        """As plain data, flat."""
        return {**asdict(self.design), **asdict(self.way), "rate": self.rate}


WAYS = (
    Way(precision="fp32", scaling="none"),
    Way(precision="fp16", scaling="none"),
    Way(precision="fp16", scaling="static"),
    Way(precision="fp32", scaling="unit"),
    Way(precision="fp16", scaling="unit"),
)
FP32, FP16, STATIC, UNIT_FP32, UNIT_FP16 = WAYS


def meaningless(design: Design, way: Way) -> str | None:
    """Why a combination is no configuration of its own; None where it is one."""
    if way.precision == "fp32" and way.scaling == "static":
        return "FP32 needs no loss scale: a power of two changes none of its digits"
    if design.norm == "post" and design.residual == "none":
        return "without a residual a norm behind a branch is one in front of the next"
    if way.scaling == "unit" and design.residual == "sum":
        return "at unit scale every addition is weighted: it is another of the schemes"
    if way.scaling != "unit" and design.norm == "post" and design.residual == "fixed":
        return "a norm divides the fixed factor out: it is the plain sum"
    return None


def whole_grid() -> tuple[Configuration, ...]:
    """Every configuration, in a fixed order."""
    return tuple(
        Configuration(design=design, way=way, rate=rate)
        for design in designs()
        for way in every_way()
        if meaningless(design, way) is None
        for rate in range(RATES)
    )


def default_grid() -> tuple[Configuration, ...]:
    """Return the part of the grid of a default run, at the three middle rates.

    Every sequence with every norm, two layers deep, with AdamW, the residual schemes "running-mean" and "fixed" in
    turns as on a chessboard; every sequence once more with SGD; the plain sum, no residual, and eight layers once each.
    So each value of each axis occurs, and sequences and norms in all pairs.
    """
    chosen = {each for design in _default_designs() for each in (design, reference(design))}
    return tuple(each for each in whole_grid() if each.design in chosen and each.rate in DEFAULT_RATES)


def _default_designs() -> Iterator[Design]:
    for row, sequence in enumerate(get_args(Sequencer)):
        for column, norm in enumerate(get_args(Norm)):
            residual: Residual = "fixed" if (row + column) % 2 else "running-mean"
            design = Design(sequence=sequence, norm=norm, residual=residual, optimizer="adamw", depth=2)
            yield design
            if norm == "pre":
                yield replace(design, optimizer="sgd")
    yield Design(sequence="attention", norm="pre", residual="sum", optimizer="adamw", depth=2)
    yield Design(sequence="convolution", norm="no", residual="none", optimizer="adamw", depth=2)
    yield Design(sequence="convolution", norm="pre", residual="running-mean", optimizer="adamw", depth=8)


def designs() -> tuple[Design, ...]:
    """Every design, whether or not all ways fit it."""
    axes = itertools.product(get_args(Sequencer), get_args(Norm), get_args(Residual), get_args(Optimizer), DEPTHS)
    return tuple(
        Design(sequence=sequence, norm=norm, residual=residual, optimizer=optimizer, depth=depth)
        for sequence, norm, residual, optimizer, depth in axes
    )


def every_way() -> Iterable[Way]:
    """Each precision with each scaling, also where it means nothing."""
    pairs = itertools.product(get_args(Precision), get_args(Scaling))
    return (Way(precision=cast("Precision", one), scaling=cast("Scaling", other)) for one, other in pairs)


def reference(design: Design) -> Design:
    """Return the unscaled design that a unit-scaled one is compared with."""
    if design.norm == "post" and design.residual == "fixed":
        return replace(design, residual="sum")
    return design


LEDGER = "sweep.jsonl"
NUMBERS = ("bits", "train_bits", "first_bits")
_KIND, _VERSION = "plimsoll unit-sweep", 1
Numbers = Mapping[str, float]


class Ledger:
    """The results so far, and the file that the next ones are added to.

    - `path`: of the file, which is made where it is not there.
    - `setup`: JSON-able; all results are of it. `names`: of all configurations that can be in it.

    Raises `ArgumentError` for a file of another setup, `RunError` for one with a damaged or foreign line.
    """

    def __init__(self, path: Path, setup: Mapping[str, Any], names: Collection[str]) -> None:
        self.found = results(path, setup, names)
        if not path.exists():
            with replacing(path) as file:
                file.write(_line({"kind": _KIND, "version": _VERSION, "setup": dict(setup)}))
        self._file = os.open(path, os.O_RDWR | os.O_APPEND)
        os.ftruncate(self._file, _whole(path.read_bytes()))

    def add(self, name: str, numbers: Numbers) -> None:
        """One configuration's result; afterwards it is on the disk."""
        line = _line({"name": name, **{key: as_data(numbers[key]) for key in NUMBERS}})
        written = os.write(self._file, line)
        if written != len(line):
            raise RunError(
                f"lab unit-sweep: expected room for {len(line)} bytes more; got {written} written. Make room on the "
                "disk and start again: what is done is kept."
            )
        os.fsync(self._file)
        self.found[name] = {key: float(numbers[key]) for key in NUMBERS}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)


def results(path: Path, setup: Mapping[str, Any], names: Collection[str]) -> dict[str, dict[str, float]]:
    """Return the file's results by configuration; none where there is no file.

    Changes nothing; raises as `Ledger`.
    """
    if not path.exists():
        return {}
    data = path.read_bytes()
    head, *lines = data[: _whole(data)].decode("utf-8", "replace").splitlines() or [""]
    _check_setup(path, _read(path, 1, head), setup)
    found: dict[str, dict[str, float]] = {}
    for number, line in enumerate(lines, start=2):
        name, numbers = _result(path, number, _read(path, number, line))
        if name not in names:
            raise _damaged(path, number, f"{name!r}, which is no configuration of this sweep")
        if name in found and repr(found[name]) != repr(numbers):  # repr: a NaN equals itself
            raise _damaged(path, number, f"another result of {name!r} than before")
        found[name] = numbers
    return found


def _whole(data: bytes) -> int:
    """Return the number of bytes that are whole lines."""
    return data.rfind(b"\n") + 1


def _line(record: Mapping[str, Any]) -> bytes:
    return json.dumps({**record, "crc32": _checksum(record)}, allow_nan=False).encode() + b"\n"


def _checksum(record: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(record, sort_keys=True).encode())


def _read(path: Path, number: int, line: str) -> dict[str, Any]:
    """The record of a line, whose checksum is right."""
    try:
        record = json.loads(line)
    except json.JSONDecodeError:
        raise _damaged(path, number, "one that is no JSON") from None
    if not isinstance(record, dict):
        raise _damaged(path, number, "one that is no record")
    entry = cast("dict[str, Any]", record)
    if entry.pop("crc32", None) != _checksum(entry):
        raise _damaged(path, number, "one whose checksum is wrong")
    return entry


def _result(path: Path, number: int, record: Mapping[str, Any]) -> tuple[str, dict[str, float]]:
    try:
        return str(record["name"]), {key: float(record[key]) for key in NUMBERS}
    except (KeyError, TypeError, ValueError):
        raise _damaged(path, number, "one that is no configuration's result") from None


def _check_setup(path: Path, head: Mapping[str, Any], setup: Mapping[str, Any]) -> None:
    if (head.get("kind"), head.get("version")) != (_KIND, _VERSION):
        raise _damaged(path, 1, f"kind {head.get('kind')!r}, version {head.get('version')!r}")
    there = cast("dict[str, Any]", head["setup"])
    here = json.loads(json.dumps(dict(setup)))
    changed = [key for key in sorted({*there, *here}) if there.get(key) != here.get(key)]
    if changed:
        apart = ", ".join(f"{key} {there.get(key)} there and {here.get(key)} now" for key in changed)
        raise ArgumentError(
            f"lab unit-sweep: expected the setup that {path} was begun with; got {apart}. Go on with that one, or give "
            "another folder with --output."
        )


def _damaged(path: Path, number: int, what: str) -> RunError:
    remedy = "the file to start again" if number == 1 else "that line; its configuration is trained again"
    return RunError(
        f"lab unit-sweep: expected whole results of this sweep in {path}; got in line {number} {what}. Delete {remedy}."
    )
