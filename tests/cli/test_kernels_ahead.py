"""Kernels that are not on disk are compiled in other processes while a script begins."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from plimsoll.cli.script import kernels_ahead
from tests.support import processes
from tests.support.cases import each
from tests.support.patience import HANG_SECONDS, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="children are forked on Linux alone")
VERSION = f"py{sys.version_info.major}{sys.version_info.minor}"


def keep(folder: Path, *names: str, version: str = VERSION, newer_by: int = 3600) -> None:
    newest = max(file.stat().st_mtime for file in Path(kernels_ahead.__file__).parents[2].rglob("*.py"))
    for name in names:
        file = folder / "kernels_0123" / f"module.{name}-7.{version}.nbi"
        file.parent.mkdir(exist_ok=True)
        file.touch()
        os.utime(file, (newest + newer_by,) * 2)


@each(
    ("kept", "forks"),
    [
        ({}, True),
        ({"names": ("measure_floats",)}, True),
        ({"names": ("measure_floats", "update_float32")}, False),
        ({"names": ("measure_floats", "update_float32"), "newer_by": -360_000_000}, True),
        ({"names": ("measure_floats", "update_float32"), "version": "py20"}, True),
    ],
)
def test_only_what_is_not_kept_is_compiled(
    kept: dict, forks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[object] = []
    monkeypatch.setattr(kernels_ahead, "_apart", calls.append)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    keep(tmp_path, *kept.pop("names", ()), **kept)
    kernels_ahead.compile_when_torch_is_there()
    assert len(calls) == (2 if forks else 0)
    for rank, count in (("1", 0), ("0", len(calls))):  # of several ranks on a machine the first does it for all
        calls.clear()
        monkeypatch.setenv("LOCAL_RANK", rank)
        kernels_ahead.compile_when_torch_is_there()
        assert len(calls) == count


SCRIPT = """
import os, pathlib, sys
from plimsoll.cli.script import kernels_ahead
def compile_it():
    streams = [os.readlink(f"/proc/self/fd/{number}") for number in range(3)]
    pathlib.Path(sys.argv[1]).write_text(repr(streams))
kernels_ahead._apart(compile_it)
kernels_ahead._apart(lambda: 1 / 0)
try:
    os.waitpid(-1, 0)
except ChildProcessError:
    print("no child")
"""


def test_a_script_meets_no_child_and_whoever_reads_it_waits_for_none(tmp_path: Path) -> None:
    done = processes.python("-c", SCRIPT, tmp_path / "streams", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "no child\n", "")
    wait_until((tmp_path / "streams").exists)
    wait_until(lambda: (tmp_path / "streams").read_text() == repr(["/dev/null"] * 3))


# However long a busy machine compiles.
PATIENT = """
from plimsoll.cli import main
from plimsoll.cli.script import kernels_ahead
kernels_ahead._MOST_SECONDS = {}
main()
"""


def test_a_script_that_imports_torch_finds_its_kernels_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "script.py").write_text("import torch\nprint('done')\n")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    # From its very start: a forked one has imported Numba, which reads these settings then.
    command = [sys.executable, "-c", PATIENT.format(int(HANG_SECONDS)), "run", "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=HANG_SECONDS)
    assert (done.returncode, done.stdout) == (0, "done\n")
    if (os.cpu_count() or 1) > 1:
        wait_until(kernels_ahead._are_kept)
