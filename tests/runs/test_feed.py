"""What sinks are given: one record for each step, in order, with what belongs to it."""

import re
import threading
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from plimsoll.runs import Event, Run, RunWriter, Scalars, StepRecord
from plimsoll.runs.writing import sink_feed
from tests.support.patience import HANG_SECONDS, wait_until
from tests.support.runs import making


class Keeping:
    """A sink that keeps what it is given."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.records: list[StepRecord] = []

    def open(self, run_path: Path, settings: Mapping[str, object]) -> None:
        self.calls.append(f"open {run_path.name} {dict(settings)}")

    def put(self, record: StepRecord) -> None:
        self.records.append(record)

    def flush(self) -> None:
        self.calls.append("flush")

    def close(self) -> None:
        self.calls.append("close")


class Failing(Keeping):
    def put(self, record: StepRecord) -> None:
        raise ValueError("no such tracker")


def test_a_step_comes_with_its_scalars_and_events(tmp_path: Path) -> None:
    sink = Keeping()
    with RunWriter(tmp_path / "run", settings={"lr": 1}, sinks=[sink]) as writer:
        for step in (1, 2):
            writer.write(Scalars(step=step, values={"loss": float(step)}))
            writer.write(Event(step=step, kind="tick", message=""))
            making.write_steps(writer, [step], float(step))
    assert sink.calls[0] == "open run {'lr': 1}" and sink.calls[-1] == "close"
    assert [(r.step, dict(r.scalars), [e.kind for e in r.events]) for r in sink.records] == [
        (1, {"loss": 1.0}, ["tick"]),
        (2, {"loss": 2.0}, ["tick"]),
    ]
    assert {key: s.sum for key, s in sink.records[1].spectra().items()} == {("weights", "w"): 2.0}
    assert sink.records[1].spectra() is sink.records[1].spectra()  # decoded once


def test_steps_without_a_batch_come_on_their_own_and_in_order(tmp_path: Path) -> None:
    sink = Keeping()
    with RunWriter(tmp_path, sinks=[sink]) as writer:
        for step in range(1, 6):
            writer.write(Scalars(step=step, values={"loss": float(step)}))
            if step == 3:
                making.write_steps(writer, [step])
    assert [(r.step, len(r.spectra())) for r in sink.records] == [(1, 0), (2, 0), (3, 1), (4, 0), (5, 0)]


def test_scalars_that_come_after_their_batch_come_after_it(tmp_path: Path) -> None:
    sink = Keeping()
    with RunWriter(tmp_path, sinks=[sink]) as writer:
        making.write_steps(writer, [1])
        writer.write(Scalars(step=1, values={"loss": 1.0}))
    assert [(r.step, dict(r.scalars)) for r in sink.records] == [(1, {}), (1, {"loss": 1.0})]


def test_spectra_are_of_true_values_like_the_runs(tmp_path: Path) -> None:
    sink = Keeping()
    with RunWriter(tmp_path, sinks=[sink]) as writer:
        scales = np.array([1024.0, 3.0])
        named = {("gradients", n): torch.tensor([6.0]) for n in "ab"}
        writer.write(making.batch(writer, 0, named, scales=scales))
    run = Run(tmp_path)
    (record,) = sink.records
    assert record.spectra() == {("gradients", n): run.spectrum("gradients", n, 0) for n in "ab"}


def test_a_sink_that_raises_is_an_event_and_nothing_more(tmp_path: Path) -> None:
    good = Keeping()
    writer = RunWriter(tmp_path, sinks=[Failing(), good])
    with pytest.warns(RuntimeWarning, match="no such tracker"):  # from the sink's thread, as soon as it has a record
        assert all([making.write_steps(writer, [1, 2]) is None, writer.flush()])
    writer.close()
    run = Run(tmp_path)
    assert run.steps == [1, 2] and [r.step for r in good.records][:2] == [1, 2]
    (event,) = [e for e in run.events() if e.kind == "sink failed"]
    assert "no such tracker" in event.message


def test_an_incomplete_step_waits_for_its_last_batch(tmp_path: Path) -> None:
    sink = Keeping()
    with RunWriter(tmp_path, sinks=[sink]) as writer:
        for last in (False, True):
            writer.write(making.batch(writer, 1, {("weights", "w"): torch.ones(2)}, last=last))
    assert [r.spectra()["weights", "w"].count for r in sink.records] == [4]


class Hangs(Keeping):
    """A sink that does not close until it is let go."""

    sink_name = "tracker"

    def __init__(self, go_on: threading.Event) -> None:
        super().__init__()
        self._go_on = go_on

    def close(self) -> None:
        super().close()
        assert self._go_on.wait(HANG_SECONDS)


def test_a_sink_that_hangs_is_named_while_the_run_waits_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink_feed, "_SAY_SECONDS", 0.01)
    monkeypatch.setattr(sink_feed, "_CLOSE_SECONDS", HANG_SECONDS)
    go_on = threading.Event()
    sinks = [Hangs(go_on), Hangs(go_on), Keeping()]
    writer = RunWriter(tmp_path, sinks=sinks)
    making.write_steps(writer, [1])

    def closing(message: str) -> None:
        assert Run(tmp_path).steps == [1]  # the run itself is written before
        said.append(message)
        wait_until(lambda: all(sink.calls[1:] == ["flush", "close"] for sink in sinks))  # at the same time
        go_on.set()

    said: list[str] = []
    monkeypatch.setattr(sink_feed, "warn_user", closing)
    writer.close(HANG_SECONDS)
    (message,) = said
    # On a busy machine the third sink, which closes at once, may not have done so yet.
    assert re.search("waiting for tracker, tracker(, Keeping)? to close", message)
    assert Run(tmp_path).closed and not Run(tmp_path).events()


def test_a_sink_that_never_closes_holds_the_run_up_for_a_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sink_feed, "_SAY_SECONDS", 0.01)
    monkeypatch.setattr(sink_feed, "_CLOSE_SECONDS", 0.02)
    go_on = threading.Event()
    writer = RunWriter(tmp_path, sinks=[Hangs(go_on)])
    making.write_steps(writer, [1])
    with pytest.warns(RuntimeWarning) as warned:
        writer.close(HANG_SECONDS)
    assert str(warned[0].message).startswith("plimsoll: waiting for tracker to close")
    run = Run(tmp_path)
    assert run.closed and run.steps == [1]
    assert ["tracker: close took more than" in event.message for event in run.events()] == [True]
    go_on.set()
