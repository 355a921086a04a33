"""The page of promises names tests that there are."""

import ast
import re
from pathlib import Path

from tests.support.cases import each

ROOT = Path(__file__).parents[1]
SECTIONS = re.split(r"^## ", (ROOT / "docs" / "promises.md").read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]


def test_all_promises_are_there() -> None:
    assert [section.split()[0] for section in SECTIONS] == [f"P{number}" for number in range(1, 10)]


@each("section", SECTIONS, ids=lambda section: section.split()[0])
def test_a_promise_is_held_by_tests(section: str) -> None:
    named = re.findall(r"^- `(tests/[^`]+)::(test_\w+)`$", section, re.MULTILINE)
    assert len(named) >= 2 and len(named) == section.count("::")
    for path, function in named:
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, (path, function)
