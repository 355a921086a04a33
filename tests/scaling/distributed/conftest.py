"""Four ranks, started once, that run every scenario of the scalers."""

from typing import Any

import pytest

from tests.support.scaling.ranks.starting import seen_by_ranks

WORLD = 4


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of four ranks saw of every scenario."""
    return seen_by_ranks("worker.py", WORLD, tmp_path_factory.mktemp("ranks"))
