"""Four ranks, started once, that run every scenario of the scalers."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
WORLD = 4


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of four ranks saw of every scenario."""
    folder = tmp_path_factory.mktemp("ranks")
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[2]), "OMP_NUM_THREADS": "1"}
    results = [folder / f"{rank}.json" for rank in range(WORLD)]
    started = [
        subprocess.Popen(
            [sys.executable, str(HERE / "worker.py"), str(folder / "store"), str(rank), str(WORLD), str(results[rank])],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(WORLD)
    ]  # fmt: skip
    try:
        printed = [process.communicate(timeout=240)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0] * WORLD, "\n".join(printed)
    return [json.loads(result.read_text()) for result in results]
