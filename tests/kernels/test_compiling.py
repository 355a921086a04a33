"""Compiled kernels: one process compiles, and others that need the same kernel wait for it."""

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

fcntl = pytest.importorskip("fcntl", reason="locks of files are POSIX's")
compiling = pytest.importorskip("plimsoll.kernels.numba_backend.compiling", reason="needs Numba")


def twice(x):
    return 2 * x


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("numba.core.config.CACHE_DIR", str(tmp_path))
    return compiling.kernel(twice)


def lock_of(kernel: Any) -> Path:
    return Path(kernel._cache._cache_file._index_path + ".lock")


def clock(monkeypatch: pytest.MonkeyPatch, sleep: Callable[[float], None], monotonic: Callable[[], float]) -> None:
    monkeypatch.setattr(compiling, "time", SimpleNamespace(sleep=sleep, monotonic=monotonic))


def test_a_kernel_that_another_process_compiles_is_waited_for(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with lock_of(kernel).open("w") as other:  # a file opened again is as another process's
        fcntl.flock(other, fcntl.LOCK_EX)
        waits: list[float] = []

        def sleep(seconds: float) -> None:
            assert not kernel.signatures
            waits.append(seconds)
            if len(waits) == 3:
                fcntl.flock(other, fcntl.LOCK_UN)

        clock(monkeypatch, sleep, time.monotonic)
        assert kernel(4) == 8 and len(waits) == 3
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)  # and it is free again


def test_a_process_that_does_not_come_to_an_end_is_not_waited_for(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    clock(monkeypatch, lambda _: now.__setitem__(0, now[0] + 10), lambda: now[0])
    with lock_of(kernel).open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert kernel(4) == 8
    assert now[0] == 60


def test_where_nothing_can_be_locked_it_compiles_all_the_same(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lock_of(kernel).mkdir()
    assert kernel(4) == 8
    monkeypatch.setattr(compiling, "fcntl", None)
    assert kernel(4.0) == 8.0


def test_a_kernel_within_a_kernel_waits_for_no_one(kernel: Any, tmp_path: Path) -> None:
    outer = compiling.kernel(lambda x: kernel(x) + 1)
    assert outer(4) == 9 and lock_of(outer).parent == lock_of(kernel).parent
