"""Runs of other trackers: what their own clients wrote is read back, and damaged files are an error in words."""

import contextlib
import gc
import shutil
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import plimsoll as pl
from plimsoll.cli import app
from plimsoll.errors import ArgumentError, MissingExtraError, PlimsollError, RunError
from plimsoll.runs.importing import scalar_table, tracker_files
from plimsoll.runs.importing.scalar_table import without_replaced
from plimsoll.runs.sinks.tensorboard import masked_crc
from tests.support.cases import each

LOSSES = [2.0, 1.5, 1.25, 1.125, 1.0]


def values(run: pl.Run, name: str = "loss") -> list[tuple[int, float]]:
    steps, found = run.scalars(name)
    return [*zip(steps.tolist(), found.tolist(), strict=True)]


@each("count", [1, 2, 3, 10, 100])
def test_which_records_a_restart_replaces(count: int) -> None:
    rng = np.random.default_rng(count)
    for _ in range(20):
        steps = rng.integers(0, max(1, count // 2) + 1, count)
        kept: dict[int, int] = {}  # place of each step that counts, by a reader that forgets what is repeated
        for place, step in enumerate(steps.tolist()):
            kept = {known: at for known, at in kept.items() if known < step} | {step: place}
        assert np.flatnonzero(without_replaced(steps)).tolist() == sorted(kept.values())


# -- CSV


def csv(tmp_path: Path, text: str, name: str = "losses.csv") -> Path:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def test_columns_of_numbers_are_scalars(tmp_path: Path) -> None:
    path = csv(tmp_path, "\ufeffstep,loss, accuracy ,note\n0,2.0,,first\n10,nan,0.5,\n\n20,-inf,0.75,last\n")
    run = pl.Run.from_csv(path)
    assert run.scalar_names == ("accuracy", "loss")
    assert values(run, "accuracy") == [(10, 0.5), (20, 0.75)]
    steps, losses = run.scalars("loss")
    assert steps.tolist() == [0, 10, 20] and str(losses.tolist()) == "[2.0, nan, -inf]"
    assert run.closed and run.settings == {"imported_from": str(path), "tracker": "csv"} and run.path.name == "losses"


@each(
    "text,options",
    [
        ("loss,Step\n1.5,3\n", {}),
        ("global_step\tloss\n3\t1.5\n", {"delimiter": "\t"}),
        ("batch;loss\n3.0;1.5\n", {"delimiter": ";", "step": "batch"}),
        ('"step","loss"\n"3","1.5"\n', {}),
        ("step,loss\r\n3,1.5\r\n", {}),
    ],
)
def test_files_of_many_tools_are_read(text: str, options: dict[str, str], tmp_path: Path) -> None:
    assert values(pl.Run.from_csv(csv(tmp_path, text), **options)) == [(3, 1.5)]


def test_a_tsv_file_has_tabs(tmp_path: Path) -> None:
    assert values(pl.Run.from_csv(csv(tmp_path, "step\tloss\n3\t1.5\n", "losses.tsv"))) == [(3, 1.5)]


@each("heads", [("Wall time", 1.7e9), ("_runtime", 0.0), ("elapsed_seconds", 0.0)])
def test_times_become_seconds_since_the_beginning(heads: tuple[str, float], tmp_path: Path) -> None:
    name, began = heads
    rows = "".join(f"{step},{began + 0.5 * step},1\n" for step in range(4))
    run = pl.Run.from_csv(csv(tmp_path, f"step,{name},loss\n{rows}"))
    assert run.scalar_names == ("elapsed_seconds", "loss")
    assert values(run, "elapsed_seconds") == [(0, 0.0), (1, 0.5), (2, 1.0), (3, 1.5)]


def test_a_restart_in_a_file_replaces_what_it_repeats(tmp_path: Path) -> None:
    with pytest.warns(RuntimeWarning, match=r"losses\.csv: 4 of 7 values of 'loss' are left out, since a later row"):
        run = pl.Run.from_csv(csv(tmp_path, "step,loss\n0,9\n1,8\n2,7\n3,6\n1,5\n2,4\n2,3\n"))
    assert values(run) == [(0, 9.0), (1, 5.0), (2, 3.0)]


def test_rows_of_one_step_are_not_left_out_without_a_word(tmp_path: Path) -> None:
    rows = "".join(f"{row // 10},{row}\n" for row in range(30))
    with pytest.warns(RuntimeWarning, match=r"27 of 30 values of 'loss' are left out.* a column of steps"):
        run = pl.Run.from_csv(csv(tmp_path, f"epoch,loss\n{rows}"))
    assert values(run) == [(0, 9.0), (1, 19.0), (2, 29.0)]


@each("order", [[3, 0, 4, 1, 2], [1, 0, 2, 3, 4], [2, 3, 4, 0, 1]])
def test_rows_in_any_order_are_rows_of_one_run(order: list[int], tmp_path: Path) -> None:
    rows = "".join(f"{step},{50 + step},{step / 10}\n" for step in order)
    run = pl.Run.from_csv(csv(tmp_path, f"step,wall time,loss\n{rows}"))
    assert values(run) == [(0, 0.0), (1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4)]
    assert values(run, "elapsed_seconds") == [(step, float(step)) for step in range(5)]


def test_a_file_with_the_newest_row_first_is_no_row_of_restarts(tmp_path: Path) -> None:
    rows = "".join(f"{step},{50 + step},{step / 10}\n" for step in reversed(range(5)))
    run = pl.Run.from_csv(csv(tmp_path, f"step,wall time,loss\n{rows}"))
    assert values(run) == [(0, 0.0), (1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4)]
    assert values(run, "elapsed_seconds") == [(step, float(step)) for step in range(5)]


@each("delimiter", ["", "ab", "\n", 3])
def test_a_delimiter_is_one_character(delimiter: Any, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="expected delimiter to be one character; got delimiter="):
        pl.Run.from_csv(csv(tmp_path, "step,loss\n0,1\n"), delimiter=delimiter)


def test_an_imported_run_is_kept_in_a_folder_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ArgumentError, match=r"Run.from_csv: expected a folder of this machine to write to; got the URI"
    ):
        pl.Run.from_csv(csv(tmp_path, "step,loss\n0,1\n"), to="s3://bucket/run")
    assert [path.name for path in tmp_path.iterdir()] == ["losses.csv"]


@each(
    "text,error,match",
    [
        ("", ArgumentError, "column of steps"),
        ("loss,accuracy\n1,2\n", ArgumentError, "column of steps named step.*'loss', 'accuracy'"),
        ("step,loss\n", RunError, "expected scalars; got none"),
        ("step,loss\n1,a\n", RunError, "expected scalars; got none"),
        (f"step,{'x' * 70_000}\n1,1.0\n", RunError, "expected names of at most 65,536 bytes; got 'xxx"),
        (
            "step,loss\n1,1.0\n2,high\n",
            RunError,
            "^[^;]*losses.csv: expected a number under 'loss', as before, in line 3; got 'high'",
        ),
        ("step,loss\n1.5,1.0\n", RunError, "whole number as the step in line 2; got '1.5'"),
        ("step,loss\n,1.0\n", RunError, "whole number as the step in line 2; got ''"),
        ("step,loss\ninf,1.0\n", RunError, "whole number as the step in line 2"),
        ("step,loss\n1e300,1.0\n", RunError, "steps of 64 bits"),
        ("step,loss\n1\n", RunError, "expected 2 cells in line 2; got 1"),
        ("step,loss\n1,2,3\n", RunError, "expected 2 cells in line 2; got 3"),
        ('step,loss\n1,"2\n', RunError, "CSV file that can be read"),
        ("step,loss\n1," + "9" * 200_000 + "\n", RunError, "CSV file that can be read"),
        ("\0\0\0\0", PlimsollError, "losses.csv"),
    ],
)
def test_what_is_no_table_of_numbers_is_an_error_in_words(
    text: str, error: type[Exception], match: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=match):
        pl.Run.from_csv(csv(tmp_path, text))


def test_a_column_of_steps_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="step='iters'. Its columns are iter"):
        pl.Run.from_csv(csv(tmp_path, "iter,loss\n1,1\n"), step="iters")
    with pytest.raises(RunError, match="can be read"):
        pl.Run.from_csv(tmp_path / "none.csv")
    with pytest.raises(RunError, match="can be read"):
        pl.Run.from_csv(tmp_path)


# -- TensorBoard


def summary_writer(folder: Path) -> Any:
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder))


def written_by_tensorboard(folder: Path) -> Path:
    with summary_writer(folder) as writer:
        for step, loss in enumerate(LOSSES):
            writer.add_scalar("loss", loss, step * 10, walltime=1.7e9 + step)
            writer.add_histogram("weights", np.arange(9.0), step * 10)
        writer.add_scalar("eval/accuracy", 0.5, 40, new_style=True, double_precision=True)
        writer.add_text("note", "hello", 0)
    (file,) = folder.iterdir()
    return file


def test_scalars_of_torch_s_writer_are_read(tmp_path: Path) -> None:
    file = written_by_tensorboard(tmp_path / "tb")
    for path in (file, tmp_path / "tb"):
        run = pl.Run.from_tensorboard(path)
        assert run.scalar_names == ("elapsed_seconds", "eval/accuracy", "loss")
        assert values(run) == [(10 * k, loss) for k, loss in enumerate(LOSSES)]
        assert values(run, "eval/accuracy") == [(40, 0.5)]
        assert np.diff(run.scalars("elapsed_seconds")[1]).tolist() == [1.0] * 4


def test_a_later_file_that_begins_again_replaces_later_steps(tmp_path: Path) -> None:
    """As TensorBoard shows it: `purge_step` says from where on."""
    written_by_tensorboard(tmp_path)
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path), purge_step=20) as writer:
        writer.add_scalar("loss", 7.0, 20)
    first, second = sorted(tmp_path.iterdir(), key=lambda file: file.stat().st_size, reverse=True)
    first.rename(tmp_path / "events.out.tfevents.0000000001")
    second.rename(tmp_path / "events.out.tfevents.0000000002")
    assert values(pl.Run.from_tensorboard(tmp_path)) == [(0, 2.0), (10, 1.5), (20, 7.0)]


def test_a_file_that_is_being_written_is_read_up_to_its_end(tmp_path: Path) -> None:
    file = written_by_tensorboard(tmp_path)
    whole = file.read_bytes()
    for cut in (len(whole) - 1, len(whole) - 20, len(whole) // 2):
        file.write_bytes(whole[:cut])
        found = values(pl.Run.from_tensorboard(tmp_path))
        assert found == [(10 * k, loss) for k, loss in enumerate(LOSSES)][: len(found)] and found


def record(payload: bytes) -> bytes:
    head = struct.pack("<Q", len(payload))
    return head + masked_crc(head) + payload + masked_crc(payload)


def test_a_record_that_is_too_long_for_scalars_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = written_by_tensorboard(tmp_path)
    monkeypatch.setattr(tracker_files, "_MOST_BYTES", 5000)
    file.write_bytes(record(b"x" * 6000) + file.read_bytes())
    assert len(values(pl.Run.from_tensorboard(tmp_path))) == len(LOSSES)
    file.write_bytes(file.read_bytes() + struct.pack("<Q", 1 << 62) + masked_crc(struct.pack("<Q", 1 << 62)))
    assert len(values(pl.Run.from_tensorboard(tmp_path))) == len(LOSSES)


def test_a_folder_without_event_files_names_those_below(tmp_path: Path) -> None:
    written_by_tensorboard(tmp_path / "runs" / "train")
    with pytest.raises(RunError, match="expected event files of TensorBoard; got none. Name one of .*train"):
        pl.Run.from_tensorboard(tmp_path / "runs")
    with pytest.raises(RunError, match="Name the folder of one run"):
        pl.Run.from_tensorboard(tmp_path / "nowhere")


# -- W&B


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = pytest.importorskip("wandb", reason="the extra wandb is not installed")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DISABLE_GIT", "true")
    return module


def written_by_wandb(wandb: Any, folder: Path, rows: list[dict[str, Any]]) -> Path:
    run = wandb.init(mode="offline", dir=folder, project="tests")
    for row in rows:
        run.log(row)
    run.finish()
    wandb.teardown()  # its service, which writes the file, has ended then
    (offline,) = folder.glob("wandb/offline-run-*")
    return offline


def test_the_history_of_an_offline_run_is_read(wandb: Any, tmp_path: Path) -> None:
    rows = [
        {"loss": loss, "train": {"accuracy": k / 4}, "rows": 10 * k, "text": "x", "flag": True, "long": "y" * 20_000}
        for k, loss in enumerate(LOSSES)
    ]
    offline = written_by_wandb(wandb, tmp_path, [*rows, {"loss": float("nan")}, {"loss": float("inf")}])
    (file,) = offline.glob("*.wandb")
    for path in (file, offline):
        run = pl.Run.from_wandb(path)
        assert run.scalar_names == ("elapsed_seconds", "loss", "rows", "train.accuracy")
        assert str(values(run)[-2:]) == "[(5, nan), (6, inf)]" and values(run)[:5] == [*enumerate(LOSSES)]
        assert values(run, "train.accuracy")[1] == (1, 0.25)
    assert values(pl.Run.from_wandb(offline, step="rows")) == [(10 * k, loss) for k, loss in enumerate(LOSSES)]
    with pytest.raises(ArgumentError, match="expected a key of steps that the run has logged; got step='row'"):
        pl.Run.from_wandb(offline, step="row")
    cut(file)


def cut(file: Path) -> None:
    """A file that is being written is read up to its end."""
    whole = file.read_bytes()
    for length in (len(whole) // 2, len(whole) - 3):
        file.write_bytes(whole[:length])
        found = [row for row in values(pl.Run.from_wandb(file)) if row[0] < 5]
        assert found == [*enumerate(LOSSES)][: len(found)] and found


def test_a_folder_without_one_wandb_file_names_those_below(tmp_path: Path) -> None:
    for name in ("offline-run-1", "offline-run-2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run-1.wandb").touch()
    with pytest.raises(RunError, match="got none. Name one of .*offline-run-1, .*offline-run-2"):
        pl.Run.from_wandb(tmp_path)
    with pytest.raises(RunError, match="begin as these do"):
        pl.Run.from_wandb(tmp_path / "offline-run-1")


def wandb_file_of(messages: list[bytes]) -> bytes:
    """A log as W&B writes it, for messages that fit into its first block."""
    data = b":W&B" + struct.pack("<H", 0xBEE1) + b"\0"
    for message in messages:
        data += struct.pack("<IHB", zlib.crc32(message, zlib.crc32(b"\x01")), len(message), 1) + message
    return data


# -- damage


def made_by_tensorboard(folder: Path) -> Path:
    return written_by_tensorboard(folder)


def made_like_wandb(folder: Path) -> Path:
    protos = pytest.importorskip("wandb.proto.wandb_internal_pb2", reason="the extra wandb is not installed")
    messages: list[bytes] = []
    for step, loss in enumerate(LOSSES):
        message = protos.Record()
        item = message.history.item.add()
        item.nested_key.append("loss")
        item.value_json = str(loss)
        message.history.step.num = step
        messages.append(message.SerializeToString())
    file = folder / "run-x.wandb"
    file.write_bytes(wandb_file_of(messages))
    return file


@pytest.mark.parametrize(
    ("make", "read"),
    [(made_by_tensorboard, pl.Run.from_tensorboard), (made_like_wandb, pl.Run.from_wandb)],
    ids=["tensorboard", "wandb"],
)
def test_damage_is_found_and_nothing_else_is_raised(
    make: Callable[[Path], Path], read: Callable[[Path], pl.Run], tmp_path: Path
) -> None:
    """Each byte of a record is under a checksum: a changed one is an error, or the file ends there."""
    file = make(tmp_path)
    whole, sound = file.read_bytes(), values(read(file))
    assert sound
    rng = np.random.default_rng(0)
    for place in rng.integers(0, len(whole), 60).tolist():
        damaged = bytearray(whole)
        damaged[place] ^= 1 << int(rng.integers(0, 8))
        file.write_bytes(damaged)
        with contextlib.suppress(RunError):
            found = values(read(file))
            assert found == sound[: len(found)], f"byte {place} changed what was read"


def test_messages_that_are_none_are_an_error(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    pytest.importorskip("wandb", reason="the extra wandb is not installed")
    events = tmp_path / "events.out.tfevents.1"
    events.write_bytes(record(b"\xff" * 9))
    with pytest.raises(RunError, match="expected events of TensorBoard; got another message"):
        pl.Run.from_tensorboard(events)
    log = tmp_path / "run-x.wandb"
    log.write_bytes(wandb_file_of([b"\xff" * 9]))
    with pytest.raises(RunError, match="expected records of W&B; got another message"):
        pl.Run.from_wandb(log)


def test_what_is_read_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = csv(tmp_path, "step,a,b,c\n1,1,1,1\n2,1,1,1\n")
    with monkeypatch.context() as limits:
        limits.setattr(scalar_table, "_MOST_VALUES", 4)
        with pytest.raises(RunError, match="at most 4 values"):
            pl.Run.from_csv(path)
    with monkeypatch.context() as limits:
        limits.setattr(scalar_table, "MOST_NAMES", 2)
        with pytest.raises(RunError, match="at most 2 scalars"):
            pl.Run.from_csv(path)
    monkeypatch.setattr(tracker_files, "_MOST_BYTES", 8)
    with pytest.raises(RunError, match="expected records of W&B"):
        pl.Run.from_wandb(made_like_wandb(tmp_path))


# -- the run that is made


def test_a_run_may_be_kept_and_every_command_reads_it(tmp_path: Path) -> None:
    path = csv(tmp_path, "step,loss\n" + "".join(f"{k},{2 - k / 50}\n" for k in range(50)))
    run = pl.Run.from_csv(path, to=tmp_path / "kept")
    assert run.path == tmp_path / "kept" and pl.Run(tmp_path / "kept").problems == []
    result = CliRunner().invoke(app, ["check", str(tmp_path / "kept")])
    assert result.exit_code == 0, result.output
    with pytest.raises(RunError, match="expected an empty folder"):
        pl.Run.from_csv(path, to=tmp_path / "kept")
    with pytest.raises(RunError, match="expected an empty folder"):
        pl.Run.from_csv(path, to=path)


def test_a_run_that_is_not_kept_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    run = pl.Run.from_csv(csv(tmp_path, "step,loss\n1,1\n"))
    assert any(temporary.iterdir())
    del run
    gc.collect()
    assert not any(temporary.iterdir())
    with pytest.raises(RunError):
        pl.Run.from_csv(csv(tmp_path, "step,loss\n"))
    assert not any(temporary.iterdir())


def test_a_path_says_whose_run_it_is(tmp_path: Path) -> None:
    table = csv(tmp_path, "step,loss\n0,1\n")
    events = written_by_tensorboard(tmp_path / "tb")
    own = pl.Run.from_csv(table, to=tmp_path / "own")
    (tmp_path / "own" / "events.out.tfevents.1").touch()  # a sink's, say
    offline = tmp_path / "offline"
    offline.mkdir()
    made_like_wandb(offline)
    kinds = {table: "csv", events: "tensorboard", tmp_path / "tb": "tensorboard", offline: "wandb", own.path: None}
    assert {path: tracker_files.kind_of(path) for path in kinds} == kinds
    assert values(pl.Run.of(offline)) == [*enumerate(LOSSES)]
    assert [pl.Run.of(path).path.name for path in (table, events, tmp_path / "tb", offline)] == [
        "losses", "tb", "tb", "offline"
    ]  # fmt: skip
    shutil.copytree(tmp_path / "tb", tmp_path / "lr0.001")
    assert pl.Run.of(tmp_path / "lr0.001").path.name == "lr0.001"
    assert pl.parity(table, events, tolerance=1.0, until=1).verdict == "undecided"
    for path in (tmp_path / "none.csv", tmp_path / "none", "memory://nowhere"):
        assert tracker_files.kind_of(path) is None
        with pytest.raises(PlimsollError):
            pl.Run.of(path)


@pytest.mark.parametrize("kind", ["tensorboard", "wandb"])
def test_a_missing_package_names_the_line_that_installs_it(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(module: str) -> None:
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    make = made_by_tensorboard if kind == "tensorboard" else made_like_wandb
    path = make(tmp_path)
    monkeypatch.setattr(tracker_files, "load", missing)
    with pytest.raises(MissingExtraError, match=f"expected the package {kind}.*pip install '{kind}>="):
        pl.Run.of(path)
