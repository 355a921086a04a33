"""Starts gloo ranks, each a process that runs every scenario of one worker script."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.patience import HANG_SECONDS

HERE = Path(__file__).parent


def seen_by_ranks(worker: str, world: int, folder: Path) -> list[dict[str, Any]]:
    """What each rank saw of every scenario."""
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[2]), "OMP_NUM_THREADS": "1"}
    results = [folder / f"{rank}.json" for rank in range(world)]
    started = [
        subprocess.Popen(
            [sys.executable, str(HERE / worker), str(folder / "store"), str(rank), str(world), str(result)],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank, result in enumerate(results)
    ]  # fmt: skip
    try:
        printed = [process.communicate(timeout=HANG_SECONDS)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0] * world, "\n".join(printed)
    return [json.loads(result.read_text("utf-8")) for result in results]
