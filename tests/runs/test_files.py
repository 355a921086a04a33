"""Files that appear whole or not at all."""

from pathlib import Path

import pytest

from plimsoll.runs import _files


def test_a_file_takes_the_old_ones_place_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(b"old")
    with _files.replacing(path) as file:
        file.write(b"new")
        assert path.read_bytes() == b"old"
        assert [p.suffix for p in tmp_path.iterdir() if p != path] == [".tmp"]  # no glob of *.parquet sees it
    assert path.read_bytes() == b"new" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_failure_on_the_way_leaves_the_old_one_and_nothing_else(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(b"old")

    def write() -> None:
        with _files.replacing(path) as file:
            file.write(b"half")
            raise error

    with pytest.raises(error):
        write()
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]
