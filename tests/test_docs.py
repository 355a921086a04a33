"""The Python code blocks of README and docs run, page by page, each in the names of the blocks before it."""

import re
from pathlib import Path

import pytest

from tests.support.cases import each

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
_BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[tuple[int, str]]:
    """The line number and text of each Python block."""
    text = page.read_text(encoding="utf-8")
    return [(text.count("\n", 0, match.start(1)), match[1]) for match in _BLOCK.finditer(text)]


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: str(page.relative_to(ROOT)))
def test_code_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "__docs__"}
    for line, block in blocks(page):
        exec(compile("\n" * line + block, str(page), "exec"), names)


def test_the_readme_is_short() -> None:
    assert (ROOT / "README.md").read_text("utf-8").count("\n") <= 90


def test_the_readme_shows_the_two_commands() -> None:
    commands = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    for command in ("demo", "test"):  # the two that do everything on a new machine
        assert f"`make {command}`" in (ROOT / "README.md").read_text("utf-8") and command in commands


def test_there_are_blocks_to_run() -> None:
    assert blocks(ROOT / "README.md")


@each("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"
