"""What an offline run of W&B has in its file is what was logged, and the user's own steps stay."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from plimsoll.errors import ArgumentError, PlimsollError
from plimsoll.runs.records import Event
from plimsoll.runs.sinks import WandB
from tests.support.runs.sinks import TAG, record

wandb = pytest.importorskip("wandb", reason="the extra wandb is not installed")


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DISABLE_GIT", "true")


def records(path: Path) -> Iterator[object]:
    """The messages in a .wandb file: a log of 32 KiB blocks, each record after its checksum, length and kind."""
    from wandb.proto import wandb_internal_pb2

    data, place, message = path.read_bytes(), 7, b""
    while place + 7 <= len(data):
        if (left := 2**15 - place % 2**15) < 7:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        message += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in {1, 4}:  # whole, or the last part
            yield wandb_internal_pb2.Record.FromString(message)
            message = b""


def rows(folder: Path) -> list[dict[str, object]]:
    """The history of the one run in `folder`, once W&B's service, which writes it, has ended.

    A finished run's file is still being written: on a busy machine a quarter of them were short.
    """
    wandb.teardown()
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    history = [message.history for message in records(path) if message.WhichOneof("record_type") == "history"]
    return [
        {"|".join(item.nested_key) or item.key: json.loads(item.value_json) for item in row.item} for row in history
    ]


def test_a_run_of_its_own_is_read_back(tmp_path: Path) -> None:
    sink = WandB(mode="offline", statistics=("norm", "min"))
    sink.open(tmp_path, {"every": 10})
    assert wandb.run is None, "the user's own wandb.log must not find it"
    sink.put(record(10, 3.0, -4.0, loss=0.5))
    events = (Event(step=20, kind="overflow", message="one"), Event(step=20, kind="overflow", message="two"))
    sink.put(record(20, 0.25, 1.0, events=events))
    sink.flush()
    sink.close()
    first, second = rows(tmp_path)
    assert first["plimsoll/step"] == 10 and second["plimsoll/step"] == 20
    assert first[f"plimsoll/{TAG}/norm"] == 5 and first[f"plimsoll/{TAG}/min"] == -4
    assert first["plimsoll/loss"] == 0.5
    assert second[f"plimsoll/{TAG}|bins"] == [-2, -1, 0, 1]
    assert second[f"plimsoll/{TAG}|values"] == [1, 0, 1]
    assert second["plimsoll/events/overflow"] == 2 and second["plimsoll/events/overflow/message"] == "two"


def test_the_axis_is_the_training_step(tmp_path: Path) -> None:
    run = FakeRun()
    WandB(run=run).open(tmp_path, {})
    assert run.metrics == {
        "plimsoll/step": {"hidden": True},
        "plimsoll/*": {"step_metric": "plimsoll/step", "step_sync": False},
    }


def test_a_users_run_keeps_its_own_steps(tmp_path: Path) -> None:
    with wandb.init(mode="offline", dir=str(tmp_path), settings=wandb.Settings(console="off")) as run:
        sink = WandB(run=run, statistics=("norm",), histograms=False)
        sink.open(tmp_path, {})
        for step in range(3):
            run.log({"mine": step}, step=step)
            sink.put(record(100 + step, 2.0))
        sink.close()
        run.log({"mine": 3}, step=3)
    found = rows(tmp_path)
    assert [(row["_step"], row["mine"]) for row in found] == [(step, step) for step in range(4)]
    assert [row.get("plimsoll/step") for row in found] == [100, 101, 102, None]


class FakeRun:
    """As much of a run as the sink uses."""

    def __init__(self) -> None:
        self.step = 0
        self.logged: list[tuple[dict[str, object], bool]] = []
        self.metrics: dict[str, dict[str, object]] = {}

    def define_metric(self, name: str, **arguments: object) -> None:
        self.metrics[name] = arguments

    def log(self, row: dict[str, object], commit: bool) -> None:
        self.logged.append((row, commit))
        self.step += commit

    def finish(self) -> None:
        raise AssertionError("a run that is not ours")


def test_steps_that_meet_in_one_row_are_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = FakeRun()
    sink = WandB(run=run)
    sink.open(tmp_path, {})
    sink.put(record(1, loss=1.0))
    run.step = 5
    sink.put(record(2, loss=1.0))
    with pytest.warns(RuntimeWarning, match="WandB: several steps fell into one row"):
        sink.put(record(3, loss=1.0))
    sink.put(record(4, loss=1.0))  # said once: a second warning would be an error here, and be logged
    sink.close()
    assert caplog.messages == []
    assert [commit for _, commit in run.logged] == [False] * 4


def test_with_commit_each_step_has_its_row(tmp_path: Path) -> None:
    run = FakeRun()
    sink = WandB(run=run, commit=True)
    sink.open(tmp_path, {})
    sink.put(record(1, loss=1.0))
    sink.put(record(2, loss=0.5, events=(Event(step=1, kind="late", message="m"),)))
    sink.close()
    late = {"plimsoll/step": 1, "plimsoll/events/late": 1, "plimsoll/events/late/message": "m"}
    assert run.logged == [
        ({"plimsoll/step": 1, "plimsoll/loss": 1.0}, True),
        ({"plimsoll/step": 2, "plimsoll/loss": 0.5}, True),
        (late, True),
    ]


def test_without_a_login_it_fails_instead_of_asking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def login(*, prompt: bool) -> bool:
        asked.append(prompt)
        return False

    monkeypatch.setattr(wandb, "login", login)
    with pytest.raises(PlimsollError, match="WandB: expected a login to W&B; got none. Run `wandb login`"):
        WandB(mode="online").open(tmp_path, {})
    assert asked == [False]


def test_a_run_and_arguments_for_a_new_one_contradict() -> None:
    with pytest.raises(ArgumentError, match="WandB: expected either run= or arguments for a new run; got both"):
        WandB(run=FakeRun(), entity="me")
