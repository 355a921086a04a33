"""Files that appear whole or not at all."""

import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from plimsoll.errors import ArgumentError
from plimsoll.formats import Plan
from plimsoll.report.single_file.html_report import checked_path
from plimsoll.runs.storage import atomic_files


def test_a_file_takes_the_old_ones_place_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(b"old")
    with atomic_files.replacing(path) as file:
        file.write(b"new")
        assert path.read_bytes() == b"old"
        assert [p.suffix for p in tmp_path.iterdir() if p != path] == [".tmp"]  # no glob of *.parquet sees it
    assert path.read_bytes() == b"new" and list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows cannot flush a folder")
def test_a_file_is_on_the_disk_before_it_has_its_name_and_its_name_is_when_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that stands between a loss of power and a file that is empty under its name."""
    done: list[tuple[str, int, int]] = []
    rename = atomic_files.rename
    path = tmp_path / "a.parquet"

    def flushed(descriptor: int) -> None:
        found = os.fstat(descriptor)
        done.append(("flushed", found.st_ino, 0 if stat.S_ISDIR(found.st_mode) else found.st_size))

    def renamed(source: Path, target: Path) -> None:
        assert target == path
        done.append(("renamed", source.stat().st_ino, source.stat().st_size))
        rename(source, target)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(atomic_files, "rename", renamed)
    with atomic_files.replacing(path) as file:
        file.write(b"new")
    own, folder = path.stat().st_ino, tmp_path.stat().st_ino
    assert done == [("flushed", own, 3), ("renamed", own, 3), ("flushed", folder, 0)]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_failure_on_the_way_leaves_the_old_one_and_nothing_else(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(b"old")

    def write() -> None:
        with atomic_files.replacing(path) as file:
            file.write(b"half")
            raise error

    with pytest.raises(error):
        write()
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_a_file_is_opened_to_be_written_only_where_there_is_none(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with pytest.raises(FileExistsError):
        atomic_files.open_for_writing(tmp_path / "link")
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("kind", ["run's file", "plan"])
def test_no_link_can_lie_in_wait_under_the_hidden_name(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever knows the process and has seen a name before does not know the next one."""
    opened: list[Path] = []
    real = Path.open

    def noted(path: Path, mode: str = "r", *given: Any, **options: Any) -> Any:
        if path.parent == tmp_path:
            assert "x" in mode
            opened.append(path)
        return real(path, mode, *given, **options)

    monkeypatch.setattr(Path, "open", noted)
    for _ in range(2):
        if kind == "plan":
            Plan(target="fp16", default="fp16", formats={}).save(tmp_path / "plan.toml")
        else:
            with atomic_files.replacing(tmp_path / "a") as file:
                file.write(b"new")
    first, second = opened
    assert first.name != second.name and not {first, second} & set(tmp_path.iterdir())
    assert all(name.name.startswith(atomic_files.HIDDEN) for name in opened)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pipes in folders")
def test_a_device_or_pipe_does_not_give_way_to_a_file(tmp_path: Path) -> None:
    """An administrator who writes to /dev/null would lose the device. A pipe needs no rights."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    refused: list[tuple[type[Exception], Callable[[], object]]] = [
        (OSError, lambda: atomic_files.replacing(path).__enter__()),
        (ArgumentError, lambda: atomic_files.write_text("report", path, "text")),
        (ArgumentError, lambda: atomic_files.check_place("certify", path, [""])),
        (ArgumentError, lambda: checked_path(path)),
        (ArgumentError, lambda: Plan(target="fp16", formats={}).save(path)),
    ]
    for kind, write in refused:
        with pytest.raises(kind, match=r"expected (the path of a file; got .*, a device or a pipe|a regular file)"):
            write()
    assert [p for p in tmp_path.iterdir() if stat.S_ISFIFO(p.stat().st_mode)] == list(tmp_path.iterdir()) == [path]
