"""Two ranks that locate together; locate_rank.py holds what each of them asserts."""

import os
import subprocess
import sys
from pathlib import Path

from tests.patience import HANG_SECONDS

RANK = Path(__file__).with_name("locate_rank.py")


def test_the_rank_that_broke_names_the_operation(tmp_path: Path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    started = [
        subprocess.Popen(
            [sys.executable, str(RANK), str(tmp_path), str(rank), "2"],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=HANG_SECONDS)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], "\n".join(said)
