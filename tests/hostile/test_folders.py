"""Any damage to a run's folder gives the right answer, one that says what is missing, or one line of error.

`make fuzz` tries many more: PLIMSOLL_FUZZ is how many.
"""

import contextlib
import json
import os
import resource
import shutil
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from plimsoll.cli.entry_point import app
from plimsoll.errors import PlimsollError, RunError
from plimsoll.report.live.run_index import RunsList
from plimsoll.runs import Run, RunWriter, Scalars
from tests.support.hostile import folders
from tests.support.patience import HANG_SECONDS

CASES = int(os.environ.get("PLIMSOLL_FUZZ", "150"))
_CASES_A_TEST = 20
_FOUND = (2840, 4253)  # seeds that `make fuzz` found: a column of lists that holds text
_MEMORY_BYTES = 1 << 30


class _HungError(Exception):
    """A command did not end."""


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Room for one more gigabyte, and the time of a hang."""

    def hung(*_: object) -> None:
        raise _HungError

    limits = resource.getrlimit(resource.RLIMIT_AS)
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    former = signal.signal(signal.SIGALRM, hung)
    resource.setrlimit(resource.RLIMIT_AS, (held + _MEMORY_BYTES, limits[1]))
    signal.alarm(int(HANG_SECONDS))
    try:
        yield
    finally:
        signal.alarm(0)
        resource.setrlimit(resource.RLIMIT_AS, limits)
        signal.signal(signal.SIGALRM, former)


def answered(*words: str) -> tuple[int, str, str]:
    """A command's exit code, and what it printed; an error has one line."""
    result = CliRunner().invoke(app, [*words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code in (0, 1, 2), (words, result.output)
    lines = result.stderr.splitlines()
    assert "Traceback" not in result.output and len(lines) <= 4, result.stderr
    assert all(line.startswith("plimsoll: ") for line in lines) or "arguments" in words, result.stderr
    assert result.exit_code != 2 or lines, "exit code 2 says why"
    return result.exit_code, result.stdout, result.stderr


def judged(folder: Path) -> tuple[int, list[Any]]:
    """What check says: its exit code, and the findings without what it says about the record."""
    code, out, _ = answered("check", str(folder), "--json")
    found = json.loads(out) if out else {"findings": [], "state": ""}
    assert (code, found["state"]) != (0, "healthy") or "eal" in found["verdict"]
    return code, [each for each in found["findings"] if each["rule"] not in ("records-lost", "run-ended")]


def ask(folder: Path, sound: Path, which: int) -> int:
    """One of the other reading commands; its exit code."""
    return answered(*commands(folder, sound)[which % COMMANDS])[0]


def commands(folder: Path, sound: Path) -> list[tuple[str, ...]]:
    """The reading commands but for check; a page takes longer than the others together."""
    out = folder.parent / "out"
    several = [
        ("report", str(folder), "-o", f"{out}.md"),
        ("report", str(folder), "-o", f"{out}.json"),
        ("whatif", str(folder), "--format", "fp16"),
        ("plan", str(folder), "-o", f"{out}.toml"),
        ("diff", str(sound), str(folder)),
        ("diff", str(folder), str(sound)),
    ]
    return [*several, ("report", str(folder), "-o", f"{out}.html"), *several]


COMMANDS = 13


def read_all(folder: Path) -> dict[tuple[Any, ...], str] | None:
    """All that the library reads of a run; its spectra, or None where it refuses."""
    try:
        run = Run(folder, warn=False)
        found = folders.kept(run.table())
        run.events(), run.casts(), run.steps, run.block_lengths, run.closed, run.dropped, run.was_abandoned, repr(run)
        for name in run.scalar_names:
            run.scalars(name)
        for collection, names in list(run.tensors.items())[:3]:
            for name in names[:2]:
                run.series(collection, name, "rms")
        assert sum(1 for _ in run.spectra()) <= len(found)
    except PlimsollError:
        return None
    return found if not run.missing else None


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The sound runs; each command has run once, so that what it loads is there."""
    made = folders.make(tmp_path_factory.mktemp("sound"))
    for which in range(COMMANDS):
        ask(made["closed"], made["closed"], which)
    return made


@pytest.fixture(scope="module")
def answers(sound: dict[str, Path]) -> dict[str, Any]:
    """What is right."""
    return {name: (judged(path), read_all(path)) for name, path in sound.items()}


@pytest.mark.skipif(threading.current_thread() is not threading.main_thread(), reason="signals go to the main thread")
@pytest.mark.parametrize(
    "seeds",
    [range(first, min(first + _CASES_A_TEST, CASES)) for first in range(0, CASES, _CASES_A_TEST)] + [_FOUND],
    ids=lambda seeds: str(seeds[0]),
)
def test_any_damage_is_answered(
    seeds: Sequence[int], sound: dict[str, Path], answers: dict[str, Any], tmp_path: Path
) -> None:
    went_on = 0
    for seed in seeds:
        name = sorted(sound)[seed % len(sound)]
        folder = tmp_path / f"{seed}" / "run"
        shutil.copytree(sound[name], folder)
        damage, accident = folders.damage(folder, seed)
        with guarded():
            try:
                went_on += try_one(folder, sound[name], seed, answers[name] if accident else None)
            except BaseException as error:
                error.add_note(f"seed {seed}: {damage}, of {name}")
                raise
        shutil.rmtree(folder.parent)
    assert went_on > len(seeds) / 2  # every one of these seeds; what is recorded could be checked


def try_one(folder: Path, sound: Path, seed: int, right: Any) -> bool:
    """Asks everything; where the damage may be an accident, an answer without a word about it is the right one."""
    code, findings = judged(folder)
    table = read_all(folder)
    ask(folder, sound, seed // 3)
    RunsList(folder.parent).runs()  # the live page's list: it raises nothing
    if right is not None and code != 2:
        assert (code, findings) == right[0]
        assert table is None or table == right[1]
    return go_on(folder)


def go_on(folder: Path) -> bool:
    """A training that continues in the folder is not stopped, and what it records is there, if the run can be read."""
    try:
        writer = RunWriter(folder)
    except RunError as error:
        if "schema" not in str(error):  # of a newer version: no damage
            raise
        return False
    writer.write(Scalars(step=999, values={"loss": 1.0}))
    assert writer.flush()
    writer.close()
    try:
        run = Run(writer.path, warn=False)
        losses = run.scalars("loss")[0]
    except PlimsollError:
        return False
    assert 999 in losses
    return True
