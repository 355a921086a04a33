"""What TensorBoard's own reader finds in the folder is what the spectra hold."""

import math
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from plimsoll.runs.records import Event, StepRecord
from plimsoll.runs.sinks import TensorBoard
from plimsoll.runs.sinks.tracker import DEFAULT_STATISTICS, STATISTICS
from plimsoll.spectrum import measure
from tests.support.runs.sinks import NAME, TAG, record

reader = pytest.importorskip(
    "tensorboard.backend.event_processing.event_accumulator", reason="the extra tensorboard is not installed"
)
EVERYTHING = {"scalars": 0, "histograms": 0, "tensors": 0}


def read(folder: Path) -> object:
    """TensorBoard's view of a folder."""
    return reader.EventAccumulator(str(folder), size_guidance=EVERYTHING).Reload()


@contextmanager
def opened(sink: TensorBoard, run_path: Path) -> Iterator[TensorBoard]:
    sink.open(run_path, {})
    yield sink
    sink.close()


def test_scalars_read_back_as_the_spectrum_has_them(tmp_path: Path) -> None:
    spectra = {step: measure(torch.randn(999, generator=torch.Generator().manual_seed(step))) for step in (10, 20)}
    with opened(TensorBoard(statistics=STATISTICS), tmp_path) as sink:
        for step, spectrum in spectra.items():
            sink.put(StepRecord(step=step, spectra=lambda s=spectrum: {NAME: s}, scalars={"loss": 1 / step}))
    found = read(tmp_path / "tensorboard")
    assert sorted(found.Tags()["scalars"]) == sorted([*(f"{TAG}/{name}" for name in STATISTICS), "loss"])
    for name in STATISTICS:
        points = [(point.step, point.value) for point in found.Scalars(f"{TAG}/{name}")]
        assert points == [(step, float(np.float32(getattr(s, name)))) for step, s in spectra.items()]
    assert [point.value for point in found.Scalars("loss")] == [float(np.float32(1 / step)) for step in spectra]


def test_the_statistics_of_the_mission_are_written_unasked() -> None:
    assert {"norm", "min", "max", "absmean", "mean", "std"} <= set(DEFAULT_STATISTICS)


def test_histograms_lie_between_the_right_edges(tmp_path: Path) -> None:
    with opened(TensorBoard(), tmp_path) as sink:
        sink.put(record(3, 0.25, -0.3, 1.0, 1.999, -2.0, 0.0))
    (event,) = read(tmp_path / "tensorboard").Histograms(TAG)
    histogram = event.histogram_value
    assert event.step == 3
    # Right edges; the empty bucket in front ends where the first one begins.
    assert list(histogram.bucket_limit) == [-2, -1, 0, 1, 2]
    assert list(histogram.bucket) == [0, 2, 0, 2, 1]
    assert (histogram.min, histogram.max, histogram.num) == (-2, 2, 5)
    assert histogram.sum == 2 * -1.5 + 2 * 0.5 + 1.5
    assert histogram.sum_squares == 2 * 1.5**2 + 2 * 0.5**2 + 1.5**2


def test_the_web_page_sees_the_same_buckets(tmp_path: Path) -> None:
    from tensorboard import data_compat
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
    from tensorboard.util import tensor_util

    with opened(TensorBoard(), tmp_path) as sink:
        sink.put(record(3, 0.25, -0.3, 1.0, 1.999, -2.0, 0.0))
    (path,) = (tmp_path / "tensorboard").iterdir()
    values = [value for event in LegacyEventFileLoader(str(path)).Load() for value in event.summary.value]
    (histogram,) = [data_compat.migrate_value(value) for value in values if value.tag == TAG]
    buckets = tensor_util.make_ndarray(histogram.tensor)
    assert buckets.tolist() == [[-2, -1, 2], [-1, 0, 0], [0, 1, 2], [1, 2, 1]]


def test_events_are_text(tmp_path: Path) -> None:
    event = Event(step=7, kind="overflow", message="skipped", details={"scale": 2.0}, time=1234.5, rank=3)
    with opened(TensorBoard(), tmp_path) as sink:
        sink.put(record(8, events=(event,)))
    found = read(tmp_path / "tensorboard")
    (text,) = found.Tensors("events/overflow")
    assert text.tensor_proto.string_val[0].decode() == 'skipped (rank 3)\n\n`{"scale": 2.0}`'
    assert (text.step, text.wall_time) == (7, 1234.5)
    assert found.summary_metadata["events/overflow"].plugin_data.plugin_name == "text"


def test_nan_and_inf_are_written(tmp_path: Path) -> None:
    with opened(TensorBoard(statistics=("mean", "nonfinite")), tmp_path) as sink:
        sink.put(record(1, math.nan, math.inf, loss=math.inf))
    found = read(tmp_path / "tensorboard")
    assert math.isnan(found.Scalars(f"{TAG}/mean")[0].value)
    assert found.Scalars(f"{TAG}/nonfinite")[0].value == 2
    assert found.Scalars("loss")[0].value == math.inf
    assert found.Tags()["histograms"] == []


def test_a_folder_of_ones_own_without_histograms(tmp_path: Path) -> None:
    with opened(TensorBoard(tmp_path / "elsewhere", histograms=False), tmp_path / "run") as sink:
        assert (tmp_path / "elsewhere").is_dir(), "there before the first step, for TensorBoard to be started on"
        sink.put(record(1, 1.0))
        assert read(tmp_path / "elsewhere").Tags()["histograms"] == [], "readable while the file is open"
    assert not (tmp_path / "run").exists()


def test_a_continued_run_replaces_what_lay_past_its_first_step(tmp_path: Path) -> None:
    for steps in ((1, 2, 3), (2, 3)):
        with opened(TensorBoard(statistics=("norm",)), tmp_path) as sink:
            for step in steps:
                sink.put(record(step, 10.0 * len(steps)))
    points = read(tmp_path / "tensorboard").Scalars(f"{TAG}/norm")
    assert [(point.step, point.value) for point in points] == [(1, 30.0), (2, 20.0), (3, 20.0)]


def test_a_folder_removed_under_way_is_made_again(tmp_path: Path) -> None:
    with opened(TensorBoard(), tmp_path) as sink:
        sink.put(record(1, 1.0))
        for path in (tmp_path / "tensorboard").iterdir():
            path.unlink()
        (tmp_path / "tensorboard").rmdir()
        sink.put(record(2, 1.0))
    assert [point.step for point in read(tmp_path / "tensorboard").Scalars(f"{TAG}/norm")] == [2]


@contextmanager
def no_file_longer_than(length_bytes: int) -> Iterator[None]:
    """What a full disk does, without one: writes are cut short, then fail."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (length_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_costs_the_steps_it_was_full_for(tmp_path: Path) -> None:
    with opened(TensorBoard(), tmp_path) as sink:
        sink.put(record(1, 1.0))
        (path,) = (tmp_path / "tensorboard").iterdir()
        length = path.stat().st_size
        with no_file_longer_than(length + 100), pytest.raises(OSError, match="too large"):
            sink.put(record(2, 1.0))
        assert path.stat().st_size == length
        sink.put(record(3, 1.0))
    assert [point.step for point in read(tmp_path / "tensorboard").Scalars(f"{TAG}/norm")] == [1, 3]


def test_a_file_that_could_not_be_begun_is_not_left(tmp_path: Path) -> None:
    with opened(TensorBoard(), tmp_path) as sink:
        with no_file_longer_than(70), pytest.raises(OSError, match="too large"):
            sink.put(record(1, 1.0))
        assert list((tmp_path / "tensorboard").iterdir()) == []
        sink.put(record(2, 1.0))
    assert [point.step for point in read(tmp_path / "tensorboard").Scalars(f"{TAG}/norm")] == [2]


def test_tensorflow_is_not_asked_for(tmp_path: Path) -> None:
    code = """
import sys
class Watcher:
    def find_spec(self, name, *_):
        if name.split(".")[0] == "tensorflow":
            sys.exit("asked for tensorflow")
sys.meta_path.insert(0, Watcher())
from pathlib import Path
from plimsoll.runs.records import Event, StepRecord
from plimsoll.runs.sinks import TensorBoard
sink = TensorBoard()
sink.open(Path(sys.argv[1]), {})
sink.put(StepRecord(step=1, scalars={"loss": 1.0}, events=(Event(step=1, kind="k", message="m"),)))
sink.close()
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code, str(tmp_path)], check=True)
    assert read(tmp_path / "tensorboard").Scalars("loss")
