"""Every example runs, prints something and passes its own assertions."""

from pathlib import Path

import pytest

from tests.support import processes
from tests.support.cases import each

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_it_runs(example: Path, tmp_path: Path) -> None:
    result = processes.python("-W", "error", example, cwd=tmp_path, forks=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()
    assert result.stderr == ""


@each("example", EXAMPLES, ids=lambda path: path.stem)
def test_it_is_one_idea(example: Path) -> None:
    lines = example.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 80
    assert any(line.lstrip().startswith("assert ") for line in lines)
