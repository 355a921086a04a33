"""Starts gloo ranks, each a process that runs every scenario of one worker script."""

import json
from pathlib import Path
from typing import Any

from tests.support import processes

HERE = Path(__file__).parent


def seen_by_ranks(worker: str, world: int, folder: Path) -> list[dict[str, Any]]:
    """What each rank saw of every scenario."""
    results = [folder / f"{rank}.json" for rank in range(world)]
    processes.ranks(HERE / worker, [(folder / "store", rank, world, result) for rank, result in enumerate(results)])
    return [json.loads(result.read_text("utf-8")) for result in results]
