"""Starting ranks as processes of their own."""

from pathlib import Path

from tests.support import processes

HERE = Path(__file__).parent


def torchrun(world: int, *arguments: object) -> None:
    """Runs the worker on so many ranks as under torchrun."""
    processes.ranks(HERE / "worker.py", [arguments] * world)
