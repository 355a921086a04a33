"""What a URI opens, how a store is listed, and that one which fails is never a smaller run."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from pyarrow import fs

from plimsoll.errors import ArgumentError, RunError
from plimsoll.integrations.session import Session
from plimsoll.runs import Run, RunWriter, Scalars
from plimsoll.runs.storage import location
from plimsoll.runs.storage.location import Folder, Stored, place_of
from plimsoll.watch import watch


class Fickle(MemoryFileSystem):
    """Keeps listings until it is to forget them, as stores over the network do; some folders it cannot list."""

    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    kept: ClassVar[dict[str, list[Any]]] = {}
    failing: str | None = None

    def ls(self, path: str, detail: bool = True, **options: Any) -> list[Any]:
        if self.failing is not None and path.endswith(self.failing):
            raise ConnectionError("reset")
        if path not in self.kept:
            self.kept[path] = super().ls(path, detail=True, **options)
        return self.kept[path] if detail else [info["name"] for info in self.kept[path]]

    def invalidate_cache(self, path: str | None = None) -> None:
        self.kept.clear()


@pytest.fixture
def fickle() -> Iterator[Fickle]:
    made = Fickle(skip_instance_cache=True)
    yield made
    made.store.clear()
    made.kept.clear()
    made.pseudo_dirs[:] = [""]


def put(store: Fickle, folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file() and not path.name.startswith("."):
            store.pipe_file(f"/bucket/exp1/{path.relative_to(folder).as_posix()}", path.read_bytes())


def test_what_is_added_is_seen_where_listings_are_kept(tmp_path: Path, fickle: Fickle) -> None:
    with RunWriter(tmp_path) as writer:
        writer.write(Scalars(step=1, values={"loss": 1.0}))
        assert writer.flush()
        put(fickle, tmp_path)
        run = Run("/bucket/exp1", filesystem=fickle)
        assert run.scalars("loss")[0].tolist() == [1]
        writer.write(Scalars(step=2, values={"loss": 1.0}))
        assert writer.flush()
    put(fickle, tmp_path)
    run.refresh()
    assert run.scalars("loss")[0].tolist() == [1, 2]


@pytest.mark.parametrize("folder", ["exp1", "scalars"])
def test_a_listing_that_fails_is_an_error_and_no_smaller_run(folder: str, tmp_path: Path, fickle: Fickle) -> None:
    with RunWriter(tmp_path) as writer:
        writer.write(Scalars(step=1, values={"loss": 1.0}))
    put(fickle, tmp_path)
    run = Run("/bucket/exp1", filesystem=fickle)
    fickle.failing = folder
    with pytest.raises(
        RunError, match="expected storage that answers; got ConnectionError for the folder in .*: reset. L"
    ):
        run.refresh()
    with pytest.raises(RunError, match="got ConnectionError for the folder"):
        place_in(fickle).tree()
    fickle.failing = None
    run.refresh()
    assert run.scalars("loss")[0].tolist() == [1] and run.problems == []


def place_in(store: Fickle) -> Stored:
    return Stored("/bucket", fs.PyFileSystem(fs.FSSpecHandler(store)), "bucket")


def test_a_tree_has_all_files_with_sizes_and_times(tmp_path: Path, fickle: Fickle) -> None:
    (tmp_path / "b" / "c").mkdir(parents=True)
    for name, content in (("a", b"1"), ("b/c/d", b"123")):
        (tmp_path / name).write_bytes(content)
        fickle.pipe_file(f"/bucket/{name}", content)
    here = Stored(str(tmp_path), fs.LocalFileSystem(), "here")
    assert {name: size for name, (size, _) in place_in(fickle).tree().items()} == {"a": 1, "b/c/d": 3}
    assert here.tree() == {
        n: ((tmp_path / n).stat().st_size, (tmp_path / n).stat().st_mtime_ns) for n in ("a", "b/c/d")
    }
    assert all(time > 1e18 for _, time in place_in(fickle).tree().values())
    assert here.within("b").tree().keys() == {"c/d"} and here.within("none").tree() == {}
    assert Stored(str(tmp_path / "a"), fs.LocalFileSystem(), "a file").tree() == {}


def test_a_uri_of_this_machine_is_a_folder_of_it(tmp_path: Path) -> None:
    assert isinstance(place_of(tmp_path.as_uri()), Folder) and place_of(tmp_path.as_uri()).path == tmp_path
    assert not isinstance(place_of("memory://bucket"), Folder)


@pytest.mark.parametrize("address", ["s3://key:word@bucket/exp1", "file:///tmp/exp1"])
def test_nothing_is_written_to_a_uri(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shown = address.replace("key:word@", "")
    with pytest.raises(
        ArgumentError, match=f"RunWriter: expected a folder of this machine .*; got the URI {shown}. Wr"
    ):
        RunWriter(address)
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ArgumentError, match=f"expected a folder of this machine .*; got the URI {shown}. Wr"):
        watch(model, torch.optim.SGD(model.parameters(), lr=0.1), run=address)
    with pytest.raises(ArgumentError, match=f"Callback: expected a folder of this machine .*; got the URI {shown}. Wr"):
        Session("Callback", address, {}, guard=None, verdict=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("uri", "asked"),
    [
        ("gs://bucket/exp1", "gs://bucket/exp1?retry_limit_seconds=15"),
        ("gcs://bucket/exp1?scheme=http", "gcs://bucket/exp1?scheme=http&retry_limit_seconds=15"),
        ("gs://bucket/exp1?retry_limit_seconds=600", "gs://bucket/exp1?retry_limit_seconds=600"),
        ("s3://bucket/exp1", "s3://bucket/exp1"),
    ],
)
def test_googles_storage_is_not_waited_for_a_quarter_of_an_hour(
    uri: str, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Recorder:
        @staticmethod
        def from_uri(given: str) -> tuple[str, str]:
            return given, "exp1"

    monkeypatch.setattr(location.fs, "FileSystem", Recorder)
    assert location.filesystem_of(uri) == (asked, "exp1")


def test_a_pyarrow_without_a_storage_leaves_it_to_fsspec(monkeypatch: pytest.MonkeyPatch) -> None:
    class Bare:
        @staticmethod
        def from_uri(_: str) -> Any:
            raise location.pa.ArrowNotImplementedError("Got S3 URI but Arrow compiled without S3 support")

    monkeypatch.setattr(location.fs, "FileSystem", Bare)
    monkeypatch.setattr(fsspec, "url_to_fs", lambda uri: (fsspec.filesystem("memory"), uri.removeprefix("s3://")))
    made, inside = location.filesystem_of("s3://bucket/exp1")
    assert made.type_name == "py::fsspec+memory" and inside == "bucket/exp1"
