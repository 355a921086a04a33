"""Damaged and hostile folders of runs: small sound runs, and what may happen to a copy of one, by a seed."""

import json
import os
import random
import shutil
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from plimsoll.runs import Event, RunWriter, Scalars
from plimsoll.runs.writing import rank_folder
from tests.support.runs import making

STEPS = 12
COLLECTIONS = ("weights", "gradients", "activations")


def make(root: Path) -> dict[str, Path]:
    """The sound runs, by name: one that was closed, one whose writer was killed, and one of two ranks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_folder, "_LISTING_SHARE", 1e9)  # each flush is listed, however quickly they follow
        _write(root / "closed", closed=True)
        _write(root / "killed", closed=False)
        for rank in (0, 1):
            _write(root / "ranks", closed=True, rank=rank, world_size=2)
    return {name: root / name for name in ("closed", "killed", "ranks")}


def _write(path: Path, *, closed: bool, rank: int = 0, world_size: int = 1) -> None:
    writer = RunWriter(path, settings={"lr": 0.1, "layers": [1, 2]}, rank=rank, world_size=world_size)
    writer.write_manifest(model="net.Small", root="net")
    generator = torch.Generator().manual_seed(rank)
    for step in range(STEPS):
        named = {(c, f"layer.{i}"): torch.randn(64, generator=generator) / 8 for c in COLLECTIONS for i in range(2)}
        writer.write(making.batch(writer, step, named))
        writer.write(Scalars(step=step, values={"loss": 2.0 - step / 50, "scale": 1024.0}))
        if step % 4 == 3:
            writer.write(Event(step=step, kind="note", message="four more", details={"step": step, "in": {"a": [1]}}))
            assert writer.flush()
    if closed:
        writer.close()
    else:
        making.die(writer)


# -- what happens to any file, by accident: either the answer stays the same or something is said to be missing


def _files(path: Path) -> list[Path]:
    return sorted(p for p in path.rglob("*") if p.is_file() and not p.name.startswith("."))


def _changed(path: Path, rng: random.Random, change: Callable[[bytearray], object]) -> None:
    victim = rng.choice(_files(path))
    content = bytearray(victim.read_bytes())
    change(content)
    victim.write_bytes(content)


def _flip(path: Path, rng: random.Random) -> None:
    def change(content: bytearray) -> None:
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)

    _changed(path, rng, change)


def _overwrite(path: Path, rng: random.Random) -> None:
    def change(content: bytearray) -> None:
        at = rng.randrange(len(content))
        length = min(rng.choice((1, 8, 64, 512)), len(content) - at)
        content[at : at + length] = bytes(length) if rng.random() < 0.5 else rng.randbytes(length)

    _changed(path, rng, change)


def _truncate(path: Path, rng: random.Random) -> None:
    def change(content: bytearray) -> None:
        del content[rng.randrange(len(content)) :]

    _changed(path, rng, change)


def _remove(path: Path, rng: random.Random) -> None:
    rng.choice(_files(path)).unlink()


def _swap(path: Path, rng: random.Random) -> None:
    first, second = rng.sample(_files(path), 2)
    held = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(held)


def _replace(path: Path, rng: random.Random) -> None:
    """Something else in the place of a file or a folder."""
    victim = rng.choice([*_files(path), *(path / kind for kind in ("spectra", "scalars", "events"))])
    shutil.rmtree(victim) if victim.is_dir() else victim.unlink()
    other: list[Callable[[], object]] = [
        lambda: os.mkfifo(victim),
        victim.mkdir,
        victim.touch,
        lambda: victim.symlink_to(victim),
        lambda: victim.symlink_to(path / "nowhere"),
        lambda: victim.symlink_to("/dev/zero"),
        lambda: victim.symlink_to("/dev/null"),
    ]
    rng.choice(other)()


ACCIDENTS = (_flip, _flip, _overwrite, _truncate, _remove, _swap, _replace)


# -- what somebody may have made on purpose: any answer, but an answer

_VALUES: tuple[Any, ...] = (
    10**12, 10**30, -1, 0, 2**63, 1e308, float("nan"), True, None, "x", "x" * 100_000, "\x00\ud800", [], {}, [[]],
    {"a": 1}, [None] * 1000, "../../etc/passwd", "<script>alert(1)</script>", [{"session": 1}],
)  # fmt: skip


def _manifest(path: Path, rng: random.Random) -> None:
    """Another value at any place of a manifest, with the checksum made new, left as it was, or left out."""
    file = rng.choice([p for p in _files(path) if p.suffix == ".json"])
    content = json.loads(file.read_bytes())
    places = list(_places(content))
    holder, key = rng.choice([p for p in places if p[0] is content] if rng.random() < 0.5 else places)
    holder[key] = rng.choice(_VALUES)
    checksum = content.pop("checksum", "") if rng.random() < 0.7 else ""
    if rng.random() < 0.3:
        content.pop("parts", None)
    text = json.dumps(content)
    if rng.random() < 0.05:
        text = rng.choice(
            ("[" * 100_000, '{"schema": 1, "settings": ' + "[" * 900 + "]" * 900 + "}", '{"schema": 1' * 9)
        )
    file.write_bytes(signed(text) if checksum else text.encode())


def signed(text: str) -> bytes:
    """A manifest's text with its checksum."""
    lines = text.removesuffix("}").encode()
    return lines + b',\n"checksum": "crc32:%08x"\n}\n' % zlib.crc32(lines)


def _places(content: Any) -> Any:
    items = content.items() if isinstance(content, dict) else enumerate(content)
    for key, value in list(items):
        yield content, key
        if isinstance(value, dict | list):
            yield from _places(value)


_HOSTILE: Mapping[str, tuple[Any, ...]] = {
    "int64": (-1, 2**62, -(2**63), 2**63 - 1, 10**15),
    "int32": (-1, 2**31 - 1, -(2**31)),
    "int16": (-30000, 32767, -150, 128),
    "double": (float("nan"), float("inf"), -1.0, 0.0, 1e308, 5e-324),
    "string": ("", "x" * 70_000, "nonsense", "\x00", "e8m99", "<b>", "[1]", "[" * 5000, '{"a": 1e999}', "\U0001f6a2"),
    "bool": (True, False),
    "list<element: int64>": ([], [-1], [2**62] * 3, [1] * 300, [1] * 20_000),
}


def _columns(path: Path, rng: random.Random) -> None:
    """A part of which one column holds other values, is of another type, missing, or too many."""
    file = rng.choice([p for p in _files(path) if p.suffix == ".parquet"])
    table = pq.read_table(file)
    place = rng.randrange(table.num_columns)
    field = table.schema.field(place)
    how = rng.random()
    if how < 0.7:
        values = table.column(place).to_pylist()
        for row in range(len(values)) if rng.random() < 0.5 else [rng.randrange(len(values))]:
            values[row] = rng.choice((*_HOSTILE[str(field.type)], None))
        table = table.set_column(place, field.name, pa.array(values, field.type))
    elif how < 0.8:
        table = table.set_column(place, field.name, pa.array(["?"] * len(table)))
    elif how < 0.9:
        table = table.remove_column(place)
    else:
        table = pa.concat_tables([table] * rng.choice((0, 2, 50)) or [table.slice(0, 0)])
    metadata = {b"plimsoll.schema": rng.choice((*[b"1"] * 20, b"2", b"99", b"x", b"-1"))}
    pq.write_table(table.replace_schema_metadata(metadata), file, compression="zstd")


_KINDS = ("update", "wiring", "casts", "emulation", "trigger", "fault", "origin", "loss", "closure", "dropped", "note")
_KEYS = ("parameters", "groups", "epsilon", "optimizer", "optimizers", "fact", "reason", "names", "where", "formats",
         "modules", "update", "others", "nonfinite", "of", "found")  # fmt: skip
_FACTS = ("in no optimizer", "without gradient", "never stepped", "no gradients", "foreign optimizer", "carried over",
          "not unscaled", "groups", "joined", "gradient came", "exception", "signal", "stochastic")  # fmt: skip


def _events(path: Path, rng: random.Random) -> None:
    """Events of the watch's own kinds whose details are whatever they are."""
    file = rng.choice(sorted((path / "events").iterdir()))
    steps = pq.read_table(file)["step"].to_pylist()
    values = (*_VALUES[:-2], *_FACTS, "fp16", "e4m3", ["layer.0"], [{"parameters": ["layer.0"], "decay": 0.1}], [{}])
    groups = [{"parameters": rng.choice(values), "rate": rng.choice(("nan", "zero", 1)), "decay": rng.choice(values)}]
    rows = [
        {
            "step": step, "kind": rng.choice(_KINDS), "message": rng.choice(("", "KeyError: 'x'", "<b>")), "time": 1.0,
            "details": json.dumps(
                {key: rng.choice((*values, groups)) for key in rng.sample(_KEYS, 6)} | {"fact": rng.choice(_FACTS)}
            ),
        }
        for step in steps
    ]  # fmt: skip
    table = pa.Table.from_pylist(rows).select(["step", "kind", "message", "details", "time"])
    pq.write_table(table.replace_schema_metadata({"plimsoll.schema": "1"}), file)


def _names(path: Path, rng: random.Random) -> None:
    """Parts and manifests under names that say something else."""
    file = rng.choice(_files(path))
    kind = file.parent.name if file.suffix == ".parquet" else "spectra"
    huge = rng.choice((0, 1, 7, 99, 10**6, 2**31, 2**63, 10**40))
    names = [
        f"{kind}/r{huge:05d}-0000000001-0000000002-g0-s0_7.parquet",
        f"{kind}/r00000-{huge:010d}-{huge:010d}-g0-s0_7.parquet",
        f"{kind}/r00000-0000000001-{huge:010d}-g{huge}-s0_7.parquet",
        f"{kind}/r00000-0000000001-0000000001-g0-s-{huge}_{huge}.parquet",
        f"run-r{huge:05d}.json",
        "script.json",
        f"{file.relative_to(path)}.damaged",
        "notes\udcff.txt",
        "\x1b[31m.txt",
    ]
    target = path / rng.choice(names)
    shutil.copyfile(file, target) if rng.random() < 0.5 else file.rename(target)


PURPOSES = (_manifest, _manifest, _columns, _columns, _columns, _events, _events, _names)


def damage(path: Path, seed: int) -> tuple[str, bool]:
    """Damages the run in a folder; returns what was done, and whether it may have been an accident."""
    rng = random.Random(seed)
    accident = rng.random() < 0.6
    kind = rng.choice(ACCIDENTS if accident else PURPOSES)
    kind(path, rng)
    return kind.__name__.strip("_"), accident


def kept(table: pa.Table) -> dict[tuple[Any, ...], str]:
    """The rows of a table of spectra by what tells them apart, to compare."""
    assert np.unique(table["step"]).size <= STEPS
    return {(r["collection"], r["name"], r["step"], r["format"], r["scale"]): repr(r) for r in table.to_pylist()}
