"""What every test of the laboratory runs under: workers that start at once."""

import pytest

from plimsoll_lab.running import workers
from tests.support.lab.forked_workers import SUBPROCESS


@pytest.fixture(autouse=True)
def forked_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forks workers; `tests/lab/test_workers.py` starts those of the product too."""
    monkeypatch.setattr(workers, "subprocess", SUBPROCESS)
