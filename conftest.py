"""What every test and doctest runs under: Triton's interpreter without a GPU, fixed seeds, and nothing left behind."""

import os
import signal

# torch's threads read this when it is imported: idle ones sleep, and do not spin while other workers need the cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import hypothesis
import pytest
import torch

from tests.support import cases

pytest_plugins = ["tests.tiers", "tests.support.left_behind"]

# In the background of a shell SIGINT is ignored, and so it would be by every process that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Triton reads this variable when it is imported, so it is set before any test module is.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Speed is measured in benchmarks/, never by a test's deadline. Under CI the examples are the same in every run.
hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    """The same random numbers in every run and in any order of tests."""
    cases.seed()
