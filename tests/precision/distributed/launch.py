"""Starting ranks as processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

from tests.patience import HANG_SECONDS

HERE = Path(__file__).parent


def torchrun(world: int, *arguments: object) -> None:
    """Runs the worker on so many ranks under torchrun; all of its output is shown if it fails."""
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[2]), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world}"]
    done = subprocess.run(
        [*command, str(HERE / "worker.py"), *map(str, arguments)],
        env=environment, capture_output=True, text=True, timeout=HANG_SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-15000:]
