"""A run in another filesystem than this machine's is read as one here: whole, damaged, growing or out of reach."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from pyarrow import fs

from plimsoll.diagnosis import diagnose
from plimsoll.errors import ArgumentError, RunError
from plimsoll.runs import Run, RunWriter, Scalars
from tests.support.cases import each
from tests.support.runs import making

STEPS = [0, 10, 20]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks, with several parts of each kind."""
    path = tmp_path_factory.mktemp("run")
    for rank in (0, 1):
        with RunWriter(path, rank=rank, world_size=2, compact_above=64) as writer:
            for step in STEPS:
                making.write_steps(writer, [step], value=float(step + rank + 1))
                writer.write(Scalars(step=step, values={"loss": 1.0 / (1 + step)}))
                assert writer.flush()
    return path


@pytest.fixture
def local(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "bucket" / "exp1"))


@pytest.fixture
def memory(original: Path) -> Iterator[fsspec.AbstractFileSystem]:
    """An object store in memory, which has no folders of its own."""
    store = fsspec.filesystem("memory")
    for path in original.rglob("*"):
        if path.is_file() and not path.name.startswith("."):
            store.pipe_file(f"/bucket/exp1/{path.relative_to(original).as_posix()}", path.read_bytes())
    yield store
    store.rm("/bucket", recursive=True)


def answers(run: Run) -> list[object]:
    """Whatever a run can be asked for."""
    loss, one = run.scalars("loss"), run.spectrum("weights", "w", 10)
    table = run.table(steps=slice(0, 11)).to_pylist()
    series = [x.tolist() for x in (*loss, *run.series("weights", "w", "sum"))]
    return [run.steps, dict(run.tensors), run.ranks, run.scalar_names, series, one, table, run.problems, run.closed]


@pytest.mark.parametrize("kind", ["subtree", "fsspec", "fsspec uri", "file uri"])
def test_a_run_elsewhere_says_what_it_says_here(
    kind: str, original: Path, local: Path, memory: fsspec.AbstractFileSystem
) -> None:
    within = fs.SubTreeFileSystem(str(local.parent), fs.LocalFileSystem())
    opened = {
        "subtree": lambda: Run("exp1", filesystem=within),
        "fsspec": lambda: Run("/bucket/exp1/", filesystem=memory),
        "fsspec uri": lambda: Run("fsspec+memory://bucket/exp1"),
        "file uri": lambda: Run(local.as_uri()),
    }[kind]()
    assert answers(opened) == answers(Run(original))
    assert opened.path.name == "exp1"
    assert diagnose(opened) == diagnose(Run(original))


def test_what_is_added_there_is_found(local: Path) -> None:
    run = Run("exp1", filesystem=fs.SubTreeFileSystem(str(local.parent), fs.LocalFileSystem()))
    assert run.steps == STEPS
    with RunWriter(local, rank=0, world_size=2) as writer:
        making.write_steps(writer, [30])
    with pytest.warns(RuntimeWarning, match="rank 1: ended after step 20"):
        assert run.refresh() == [30]


def test_a_damaged_part_there_costs_that_part_and_is_named(memory: fsspec.AbstractFileSystem) -> None:
    part = next(name for name in memory.find("/bucket/exp1/spectra") if "/r00001-" in name)
    memory.pipe_file(part, memory.cat_file(part)[:-40] + b"x" * 40)
    run = Run("bucket/exp1", filesystem=memory)
    with pytest.warns(RuntimeWarning, match=r"Run: bucket/exp1 \(py::fsspec\+memory\).*damaged"):
        assert run.series("weights", "w", "sum")[1].tolist() == [1.0, 11.0, 21.0]
    assert len(run.problems) == 1 and run.problems[0].startswith(f"spectra/{part.rpartition('/')[2]}: damaged")


def test_a_missing_rank_and_foreign_files_are_named(memory: fsspec.AbstractFileSystem) -> None:
    for name in [name for name in memory.find("/bucket/exp1") if "r00001" in name]:
        memory.rm_file(name)
    memory.pipe_file("/bucket/exp1/spectra/notes.txt", b"")
    memory.pipe_file("/bucket/exp1/run.json.bak", b"")
    with pytest.warns(RuntimeWarning, match="3 more|2 more"):
        run = Run("bucket/exp1", filesystem=memory)
    assert [problem.partition(":")[0] for problem in run.problems] == ["run.json.bak", "spectra/notes.txt", "rank 1"]
    assert run.spectrum("weights", "w", 10).sum == 11.0


class Flaky(fs.FileSystemHandler):
    """A filesystem whose files cannot be opened for so many attempts, or whose listing fails."""

    def __init__(self, inner: fs.FileSystem, *, failing: int = 0, deaf: bool = False) -> None:
        self.inner, self.failing, self.deaf = inner, failing, deaf

    def _fail(self, path: str) -> None:
        if self.failing and path.endswith(".parquet"):
            self.failing -= 1
            raise OSError("connection reset")

    def open_input_file(self, path: str) -> Any:
        self._fail(path)
        return self.inner.open_input_file(path)

    def open_input_stream(self, path: str) -> Any:
        self._fail(path)
        return self.inner.open_input_stream(path)

    def get_file_info_selector(self, selector: fs.FileSelector) -> Any:
        if self.deaf:
            raise OSError("no route to host")
        return self.inner.get_file_info(selector)

    def get_file_info(self, paths: list[str]) -> Any:
        return self.inner.get_file_info(paths)

    def get_type_name(self) -> str:
        return "flaky"

    def normalize_path(self, path: str) -> str:
        return path

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def _never(self, *_: object) -> Any:
        raise AssertionError("reading changed something")

    create_dir = delete_dir = delete_dir_contents = delete_root_dir_contents = delete_file = move = copy_file = _never
    open_output_stream = open_append_stream = _never


def test_storage_that_does_not_answer_is_an_error_and_no_damage(local: Path) -> None:
    flaky = Flaky(fs.LocalFileSystem())
    run = Run(str(local), filesystem=fs.PyFileSystem(flaky))
    flaky.failing = 1000
    with pytest.raises(RunError, match=r"expected storage that answers; got OSError for spectra/.*connection reset"):
        run.series("weights", "w", "sum")
    assert run.problems == []
    flaky.failing = 0
    assert run.series("weights", "w", "sum")[1].tolist() == [3.0, 23.0, 43.0]


def test_a_request_that_fails_once_is_made_again(local: Path) -> None:
    flaky = Flaky(fs.LocalFileSystem(), failing=1)
    run = Run(str(local), filesystem=fs.PyFileSystem(flaky))
    assert run.series("weights", "w", "sum")[1].tolist() == [3.0, 23.0, 43.0]
    assert run.problems == [] and flaky.failing == 0


def test_a_listing_that_fails_is_no_empty_run(local: Path) -> None:
    with pytest.raises(RunError, match=r"expected storage that answers; got OSError for the folder.*no route to host"):
        Run(str(local), filesystem=fs.PyFileSystem(Flaky(fs.LocalFileSystem(), deaf=True)))


@each(
    ("path", "filesystem", "error", "said"),
    [
        ("nothing/here", fsspec.filesystem("memory"), RunError, r"got nothing/here \(py::fsspec.*which holds no run"),
        ("s3://bucket/exp1", fs.LocalFileSystem(), ArgumentError, "got the URI s3://bucket/exp1"),
        ("exp1", "s3", ArgumentError, "expected filesystem to be a pyarrow.fs.FileSystem or one of fsspec's; got str"),
        ("foo://bucket/exp1", None, ArgumentError, "expected a URI that pyarrow knows .*; got foo://bucket/exp1"),
    ],
)
def test_what_cannot_be_opened_is_refused(path: str, filesystem: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        Run(path, filesystem=filesystem)


def test_runs_are_found_on_this_machine_only() -> None:
    with pytest.raises(ArgumentError, match="expected a local folder; got s3://bucket"):
        Run.find("s3://bucket")
