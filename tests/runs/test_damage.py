"""P8: damage is seen. What is read of a run is checked, and what is missing is named."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from typer.testing import CliRunner

from plimsoll.cli.entry_point import app
from plimsoll.errors import RunError
from plimsoll.runs import Event, Run, RunWriter, Scalars
from plimsoll.runs.reading import run_folder
from plimsoll.runs.storage import limits, manifest as _manifest, parquet
from plimsoll.runs.storage.location import Folder
from plimsoll.runs.writing import rank_folder
from tests.support.runs import making

STEPS = 40


@pytest.fixture(autouse=True)
def each_flush_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_folder, "_LISTING_SHARE", 1e9)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """An open run of four flushes, of parts that are all listed."""
    return written(tmp_path / "run")


def written(path: Path) -> Path:
    writer = RunWriter(path, settings={"lr": 0.1})
    for step in range(STEPS):
        named = {(c, n): torch.randn(32) / 8 for c in ("weights", "gradients") for n in "ab"}
        writer.write(making.batch(writer, step, named))
        writer.write(Scalars(step=step, values={"loss": 2 - step / 50}))
        if step % 10 == 9:
            writer.write(Event(step=step, kind="note", message="ten more", details={"step": step}))
            assert writer.flush()
    making.die(writer)
    return path


def parts(path: Path, kind: str = "spectra") -> list[Path]:
    return sorted((path / kind).glob("*.parquet"))


def checked(path: Path, *options: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["check", str(path), *options])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
    return result.exit_code, result.stdout, result.stderr


def changed(file: Path, name: str, value: Any) -> None:
    """The part with another value in one column, written as anybody may."""
    table = pq.read_table(file).replace_schema_metadata({"plimsoll.schema": "1"})
    field = table.schema.field(name)
    column = pa.array([value, *table[name].to_pylist()[1:]], field.type)
    pq.write_table(table.set_column(table.schema.get_field_index(name), field, column), file)


def manifest(path: Path, **entries: object) -> None:
    """Other entries of a manifest, and a checksum that fits."""
    _manifest.write(path / "run.json", json.loads((path / "run.json").read_text("utf-8")) | entries)


# -- parts


def test_a_bit_that_flips_in_a_part_changes_nothing_unseen(path: Path) -> None:
    victim, right = parts(path)[1], Run(path).table()
    content = victim.read_bytes()
    rng = np.random.default_rng(0)
    seen = 0
    for bit in rng.choice(8 * len(content), 150, replace=False).tolist():
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        victim.write_bytes(damaged)
        try:
            run = Run(path, warn=False)
            table = run.table()
        except RunError:  # a newer schema, it seems
            seen += 1
            continue
        assert run.missing or table.equals(right), f"bit {bit}"
        seen += bool(run.missing)
    assert seen > 120


def test_a_bit_that_flips_in_a_manifest_is_seen(path: Path) -> None:
    file, right = path / "run.json", Run(path)
    content = file.read_bytes()
    rng = np.random.default_rng(1)
    seen = 0
    for bit in rng.choice(8 * len(content), 200, replace=False).tolist():
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        file.write_bytes(damaged)
        try:
            run = Run(path, warn=False)
        except RunError:  # a newer schema, it seems
            continue
        assert run.missing or dict(run.manifest) == dict(right.manifest), f"bit {bit}"
        seen += bool(run.missing)
    assert seen > 150  # of 200; a bit of the schema's number is an error instead


@pytest.mark.parametrize(
    ("column", "value"),
    [("lowest", -30000), ("lowest", 120), ("lowest", None), ("count", -1), ("zeros", 2**62), ("scale", 0.0),
     ("scale", float("nan")), ("step", 10**9), ("format", "nonsense"), ("binades", [1] * 300), ("binades", [-1]),
     ("name", None), ("name", "x" * 70_000), ("absmin", -1.0), ("max", -5.0), ("sumsq", -1.0),
     ("sumfourth", -1.0)],
    ids=lambda value: repr(value)[:20],
)  # fmt: skip
def test_a_column_that_cannot_be_true_costs_the_part(path: Path, column: str, value: object) -> None:
    victim = parts(path)[1]
    changed(victim, column, value)
    code, out, err = checked(path)
    assert code == 2 and victim.name in err and "healthy" not in out.lower(), err
    run = Run(path, warn=False)
    assert len(run.table()) == 3 * STEPS and "damaged" in run.missing[0]


@pytest.mark.parametrize(
    ("details", "says"),
    [("[" * 50_000, "nested deeper"),
     ('{"a": ' * 5000 + "1" + "}" * 5000, "nested deeper"), ('{"a": ' * 100 + "1" + "}" * 100, "nested deeper"),
     ("[1]", "JSON objects"), ("{", "no JSON"), ("1" * 9000, "no JSON")],
    ids=lambda value: repr(value)[:20],
)  # fmt: skip
def test_details_of_events_that_are_none_cost_the_part(path: Path, details: str, says: str) -> None:
    changed(parts(path, "events")[0], "details", details)
    run = Run(path, warn=False)
    assert len(run.events()) == 3 and says in run.missing[0]


def test_more_rows_than_a_part_can_hold_are_not_read(path: Path) -> None:
    victim = parts(path, "scalars")[0]
    table = pa.table({"step": np.zeros(1 << 22, np.int64), "name": ["loss"] * (1 << 22), "value": np.zeros(1 << 22)})
    pq.write_table(table, victim, compression="zstd", use_dictionary=True)
    manifest(path, parts={})
    run = Run(path, warn=False)
    assert len(run.scalars("loss")[0]) == 30 and "more than can be" in run.missing[0]


def test_a_part_of_a_newer_schema_under_an_older_manifest_is_refused(path: Path) -> None:
    victim = parts(path)[2]
    table = pq.read_table(victim).replace_schema_metadata({"plimsoll.schema": "2"})
    pq.write_table(table, victim)
    code, out, err = checked(path)
    assert code == 2 and not out and "expected parts of schema 1 or older; got schema=2" in err
    with pytest.raises(RunError, match="Install the plimsoll that wrote it, or a newer one"):
        _ = Run(path).steps


def test_parts_have_checksums_that_any_reader_can_verify(path: Path) -> None:
    file = parts(path)[0]
    assert len(pq.ParquetFile(file, page_checksum_verification=True).read()) == STEPS
    content = bytearray(file.read_bytes())
    column = pq.ParquetFile(file).metadata.row_group(0).column(0)  # its data are the last bytes of its pages
    content[column.data_page_offset + column.total_compressed_size - 1] ^= 1
    file.write_bytes(content)
    with pytest.raises(OSError, match="CRC checksum verification failed"):
        pq.ParquetFile(file, page_checksum_verification=True).read()


# -- what is missing


@pytest.mark.parametrize("closed", [True, False])
def test_parts_that_are_gone_are_named_and_never_healthy(path: Path, closed: bool) -> None:
    assert checked(path)[0] == 0 and "Healthy" in checked(path)[1]
    for part in parts(path)[1:3]:
        part.unlink()
    if closed:
        RunWriter(path).close()  # a further session does not forget them
    code, out, err = checked(path)
    assert code == 2 and "healthy" not in out.lower()
    assert "0000000002-0000000002-g0-s10_19.parquet: missing; read without it, and 1 more such problem" in err
    code, out, _ = checked(path, "--select", "loss-*", "--json")
    assert code == 2 and json.loads(out)["state"] == "warning" and "records" in json.loads(out)["verdict"]


def test_parts_that_a_killed_writer_has_not_listed_are_read(path: Path) -> None:
    listed = json.loads((path / "run.json").read_text("utf-8"))["parts"]
    assert sorted(listed) == sorted(
        f"{f.parent.name}/{f.name}" for k in ("events", "scalars", "spectra") for f in parts(path, k)
    )
    manifest(path, parts={name: rows for name, rows in listed.items() if "-0000000004-" not in name})
    run = Run(path)
    assert run.steps == list(range(STEPS)) and run.problems == []


def test_a_run_of_an_older_writer_is_read_as_it_was(path: Path) -> None:
    right = Run(path).table()
    for file in [f for kind in ("events", "scalars", "spectra") for f in parts(path, kind)]:
        pq.write_table(pq.read_table(file).replace_schema_metadata({"plimsoll.schema": "1"}), file)
    content = json.loads((path / "run.json").read_text("utf-8"))
    del content["parts"], content["checksum"]
    (path / "run.json").write_text(json.dumps(content))
    run = Run(path)
    assert run.table().equals(right) and run.problems == [] and checked(path)[0] == 0


def test_rows_that_are_fewer_than_the_manifest_has_cost_the_part(path: Path) -> None:
    victim = parts(path)[0]
    pq.write_table(pq.read_table(victim).slice(4).replace_schema_metadata({"plimsoll.schema": "1"}), victim)
    run = Run(path, warn=False)
    assert len(run.table()) == 3 * STEPS and "36 rows, where the manifest has 40" in run.missing[0]


def in_place_of() -> dict[str, Callable[[Path], object]]:
    return {
        "pipe": os.mkfifo,
        "folder": Path.mkdir,
        "loop": lambda p: p.symlink_to(p),
        "nothing": lambda p: p.symlink_to(p.parent / "nowhere"),
        "endless": lambda p: p.symlink_to("/dev/zero"),
    }


@pytest.mark.parametrize("what", in_place_of())
@pytest.mark.parametrize("which", ["run.json", "spectra", "part"])
def test_what_is_no_file_is_not_read(path: Path, which: str, what: str) -> None:
    victim = parts(path)[1] if which == "part" else path / which
    shutil.rmtree(victim) if victim.is_dir() else victim.unlink()
    in_place_of()[what](victim)
    code, out, err = checked(path)
    assert code == 2 and "Traceback" not in err and "healthy" not in out.lower()
    run = Run(path, warn=False)
    assert len(run.table()) == {"run.json": 4, "spectra": 0, "part": 3}[which] * STEPS and run.missing


def test_a_folder_of_parts_that_may_not_be_listed_is_missing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.iterdir

    def refusing(folder: Path) -> Any:
        if folder.name == "spectra":
            raise PermissionError(13, "Permission denied", str(folder))
        return real(folder)

    monkeypatch.setattr(Path, "iterdir", refusing)
    code, _, err = checked(path)
    assert code == 2 and "spectra: cannot be listed (Permission denied); read without it" in err


# -- manifests


@pytest.mark.parametrize(
    ("entries", "says"),
    [({"world_size": 10**12}, "world_size: expected a whole number from 1 to 1048576, got 1000000000000"),
     ({"world_size": True}, "world_size"), ({"rank": 1}, "it is of rank 1"), ({"schema": "1"}, "schema"),
     ({"tensors": {"weights": []}}, "expected an object"),
     ({"tensors": {"weights": {"a": {"format": "nonsense", "shared": True}}}}, "is no format"),
     ({"sessions": [{"session": 1, "started": 0.0, "first_flush": 1, "pid": 2**70}]}, "sessions.pid"),
     ({"sessions": {}}, "expected a list"), ({"dropped": {"queue full": -1}}, "dropped.queue full"),
     ({"versions": [1]}, "versions"), ({"created": 5}, "created"), ({"parts": {"a": 1}}, "names of parts"),
     ({"settings": None}, "settings"), ({"thin": [[1]]}, "thin")],
)  # fmt: skip
def test_entries_of_a_manifest_that_no_writer_writes_cost_the_manifest(path: Path, entries: Any, says: str) -> None:
    manifest(path, **entries)
    run = Run(path, warn=False)
    assert says in run.missing[0] and run.steps == list(range(STEPS)) and run.world_size == 1
    assert checked(path)[0] == 2


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"schema": 1, "settings": {"a": ' + "[" * 900 + "]" * 900 + "}}", "1" * 9000]
)
def test_json_without_bounds_costs_the_manifest(path: Path, text: str) -> None:
    (path / "run.json").write_text(text)
    run = Run(path, warn=False)
    assert "cannot be read" in run.missing[0] and run.steps == list(range(STEPS))


def test_a_manifest_that_is_too_large_is_not_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MANIFEST_BYTES", 100)
    monkeypatch.setattr("plimsoll.runs.storage.location.MANIFEST_BYTES", 100)
    run = Run(path, warn=False)
    assert "of at most 100 that are read" in run.missing[0] and set(run.tensors) == {"weights", "gradients"}


def test_a_manifest_that_somebody_changed_is_read_and_named(path: Path) -> None:
    file = path / "run.json"
    file.write_text(file.read_text("utf-8").replace('"lr": 0.1', '"lr": 0.2'))
    run = Run(path, warn=False)
    assert run.settings == {"lr": 0.2} and "changed since it was written" in run.missing[0]


# -- very much of it


def test_names_beyond_the_bound_are_left_out_and_said(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder, "MOST_NAMES", 1)
    run = Run(path, warn=False)
    assert {c: len(names) for c, names in run.tensors.items()} == {"weights": 1, "gradients": 1}
    assert len(run.table()) == 2 * STEPS
    assert run.missing == [f"2 series of {c}: the first 1 are read, 1 are left out" for c in ("weights", "gradients")]
    code, _, err = checked(path)
    assert code == 2 and "2 series of weights: the first 1 are read" in err


def test_of_very_many_scalars_those_of_the_watch_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RunWriter(tmp_path / "run") as writer:
        writer.write(Scalars(step=3, values={"a": 1.0, "b": 2.0, "loss": 3.0, "scale": 4.0}))
    monkeypatch.setattr(run_folder, "MOST_NAMES", 3)
    run = Run(tmp_path / "run", warn=False)
    assert run.scalar_names == ("a", "loss", "scale") and run.scalar_steps == [3]
    assert run.missing == ["4 scalars: the first 3 are read, 1 are left out"]


def test_very_many_missing_ranks_are_a_short_message(path: Path) -> None:
    manifest(path, world_size=1 << 20)
    run = Run(path, warn=False)
    (problem,) = run.missing
    assert problem.startswith("rank 1, 2, 3, 4, 5, 6 and 1,048,569 more: nothing found, of 1,048,576 ranks")


# -- writing


def test_a_writer_goes_on_in_a_damaged_folder_and_says_so(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shutil.rmtree(path / "spectra")
    (path / "spectra").write_text("?")
    (path / "run.json").unlink()
    os.mkfifo(path / "run.json")
    with RunWriter(path) as writer:
        making.write_steps(writer, [100])
    assert "is damaged" in caplog.text and "set aside as spectra.damaged" in caplog.text
    run = Run(path, warn=False)
    assert run.steps == [100] and len(run.scalars("loss")[0]) == STEPS
    assert [e.kind for e in run.events()][-2:] == ["damaged", "damaged"]
    assert [p.partition(":")[0] for p in run.missing] == ["run.json.damaged", "spectra.damaged"]


def test_a_part_that_lacks_a_column_is_set_aside_when_parts_are_merged(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    victim = parts(path, "scalars")[1]
    table = pq.read_table(victim).replace_schema_metadata({"plimsoll.schema": "1"})
    pq.write_table(table.drop_columns(["value"]), victim)
    RunWriter(path).close()
    assert "a damaged part" in caplog.text
    run = Run(path, warn=False)
    assert len(run.scalars("loss")[0]) == 30
    assert run.missing == [
        f"scalars/{victim.name}.damaged: not a part of this run; left alone",
        f"scalars/{victim.name}: missing; read without it",
    ]


def test_a_session_that_cannot_go_on_in_a_folder_is_recorded_beside_it(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (path / ".lock-r00000").unlink()
    (path / ".lock-r00000").mkdir()
    with RunWriter(path) as writer:
        making.write_steps(writer, [100])
    assert writer.path == path.with_name("run-beside") and "this session is recorded in" in caplog.text
    assert Run(writer.path).steps == [100] and Run(writer.path).events()[0].kind == "damaged"
    assert Run(path).steps == list(range(STEPS))


def test_the_checksum_of_a_footer_is_of_the_footer_without_it(path: Path) -> None:
    file = parts(path)[0]
    part = next(p for p in Run(path)._folder.of("spectra") if p.name.endswith(file.name))
    assert parquet.opened(Folder(path), part).metadata.num_rows == part.rows == STEPS
    with pytest.raises(limits.DamageError, match="40 rows, where the manifest has 41"):
        parquet.opened(Folder(path), replace(part, rows=41))
