"""The numbers of `make house`, on sources made for it."""

from pathlib import Path

import networkx as nx
import pytest

from tests import house

FILES = {
    "__init__.py": "",
    "a/__init__.py": "",
    "a/_one.py": "from plimsoll.a import two  # a reason\n",
    "a/two.py": "import os  # noqa: F401\n# -- a heading\ndef late():\n    from plimsoll.a._one import late\n",
    "b/__init__.py": "",
    "b/three.py": "from plimsoll.a import _one, two\nfrom plimsoll.a._one import late\nfrom plimsoll.a.two import _x\n",
}


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "plimsoll"
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    monkeypatch.setattr(house, "SOURCE", folder)
    return folder


def test_only_underscored_modules_of_other_folders_are_counted(source: Path) -> None:
    assert list(house.foreign_private_imports(source / "a" / "two.py")) == []
    assert list(house.foreign_private_imports(source / "b" / "three.py")) == ["plimsoll.a._one"] * 2


def test_a_lazy_import_closes_a_circle(source: Path) -> None:
    modules = {f"plimsoll.{name[:-3].replace('/', '.')}": source / name for name in FILES if "__init__" not in name}
    graph = house.import_graph(modules)
    assert {len(part) for part in nx.strongly_connected_components(graph)} == {1, 2}
    assert graph.has_edge("plimsoll.b.three", "plimsoll.a.two")


def test_what_tools_read_and_headings_are_no_comments(source: Path) -> None:
    assert [house.comment_lines((source / "a" / name).read_text("utf-8")) for name in ("_one.py", "two.py")] == [1, 0]


def test_docstrings_comments_imports_and_blank_lines_are_no_code() -> None:
    source = '"""What\n\nit is."""\n\nimport os\n\n# why\ndef f():\n    "It."\n    return """a\n\nb"""  # so\n'
    assert house.code_lines(source) == 4


def test_every_goal_is_of_a_number(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(house, "ROOT", source)
    monkeypatch.setattr(house, "_collected", lambda: 5)
    assert house.GOALS.keys() <= house.numbers().keys()
