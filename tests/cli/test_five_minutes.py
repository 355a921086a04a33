"""The tutorial for newcomers: the script on its page, watched as it is, gives the finding on its page."""

import os
import re
import subprocess
from pathlib import Path

from tests.support import processes

PAGE = (Path(__file__).parents[2] / "docs" / "tutorial" / "five-minutes.md").read_text("utf-8")


def command(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return processes.python("-m", "plimsoll", *arguments, cwd=folder, env=os.environ | {"COLUMNS": "100"})


def test_the_script_of_the_page_gives_the_finding_of_the_page(tmp_path: Path) -> None:
    script = re.search(r"^```python\n(import torch\n.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    shown = re.search(r"^plimsoll check runs/first\n```\n\n```text\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert script is not None and shown is not None
    (tmp_path / "train.py").write_text(script[1])
    ran = command("run", "--output", "runs/first", "train.py", folder=tmp_path)
    assert ran.returncode == 0 and "plimsoll: watching Sequential (85,002 parameters, AdamW)" in ran.stderr
    checked = command("check", "runs/first", folder=tmp_path)
    assert checked.returncode == 1
    assert [line.rstrip() for line in checked.stdout.splitlines()] == shown[1].splitlines()
