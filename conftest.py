"""What every test and doctest runs under: Triton's interpreter without a GPU, fixed seeds, and nothing left behind."""

import gc
import os
import signal
import sys

# torch's threads read this when it is imported: idle ones sleep, and do not spin while other workers need the cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# A watch that ends judges its run and prints the verdict: some 50 ms for each of thousands of watches.
os.environ.setdefault("PLIMSOLL_QUIET", "1")

# Without cached bytecode each of some hundred processes compiles it again: 0.3 s for a command.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

import doctest
import inspect
import re

import hypothesis
import pytest
import torch

from tests.support import cases, fast_interpreter
from tests.support.patience import HANG_SECONDS
from tests.support.versions import is_older

pytest_plugins = ["tests.tiers", "tests.support.left_behind", "tests.support.diagnosis.recorded"]

# In the background of a shell SIGINT is ignored, and so it would be by every process that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Eight times for each of thousands of runs, and some 4 ms each. No test loses power, and an unopened file still fails.
# tests/runs/test_files.py sees that files are flushed.
os.fsync = os.fstat

# Triton reads this variable when it is imported, so it is set before any test module is.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Seeding keeps the caller's stack for each device that may come later: 2 ms below pytest, before every test and case.
for device in (torch.cuda, torch.xpu, torch.mtia):
    if not device.is_available():
        device.manual_seed_all = lambda _seed: None

# Speed is measured in benchmarks/, never by a test's deadline. Under CI the examples are the same in every run.
hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")

# Public classes name their package as their module (plimsoll/exports.py). doctest would take them for imported ones, so
# it must know that a class belongs to the file that defines it.
_belongs = doctest.DocTestFinder._from_module  # noqa: SLF001  (there is no public way)


def _is_defined_in(finder: doctest.DocTestFinder, module: object, value: object) -> bool:
    if isinstance(value, type) and value.__module__.partition(".")[0] == "plimsoll":
        return re.search(rf"^class {value.__name__}\b", inspect.getsource(module), re.MULTILINE) is not None
    return _belongs(finder, module, value)


doctest.DocTestFinder._from_module = _is_defined_in  # noqa: SLF001


# What Python 3.13 and torch 2.15 warn of besides. With the versions that are pinned, every warning is an error.
_NEWER_WARNINGS = (
    "ignore:.*torch.jit.script.*:FutureWarning",
    "ignore:.*deprecated and (it is just left for JIT|will be removed in a future PyTorch):UserWarning",
    "ignore:There is a performance drop because we have not yet implemented the batching rule:UserWarning",
    "ignore:The tensor attributes .* were assigned during export:UserWarning",
    "ignore:Guards may run slower on Python:RuntimeWarning",
    "ignore:std.*degrees of freedom is <= 0:UserWarning",
)


def pytest_configure(config: pytest.Config) -> None:
    """Ignore warnings that newer versions alone give."""
    if sys.version_info >= (3, 13) or not is_older("2.15"):
        for line in _NEWER_WARNINGS:
            config.addinivalue_line("filterwarnings", line)


def pytest_collection_finish() -> None:
    """Make Triton's interpreter faster, and keep the garbage collector from all that was imported and collected.

    Each of its passes over that would take half a second. Readers of a run that this process still writes wait for
    what it holds, and hundreds of tests read such runs: on a busy machine two seconds are not enough for that.
    """
    if interpreter := sys.modules.get("triton.runtime.interpreter"):
        fast_interpreter.quicken(interpreter)
    if lock := sys.modules.get("plimsoll.runs.storage.lock"):
        lock._READ_SECONDS = HANG_SECONDS  # noqa: SLF001
    _freeze()


_frozen = 0  # modules when that was last done
_MANY = 50  # modules that are worth to do it again


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Keep the collector from what tests import later too, such as torch's compiler, once a test has ended."""
    if len(sys.modules) > _frozen + _MANY:
        _freeze()


def _freeze() -> None:
    global _frozen  # noqa: PLW0603  (pytest calls functions)
    _frozen = len(sys.modules)
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    """The same random numbers in every run and in any order of tests."""
    cases.seed()
