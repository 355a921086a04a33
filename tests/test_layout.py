"""The layout of the source: folders small enough to read, names that need no decoding, modules that hide no export."""

import ast
import pkgutil
import re
from collections import Counter
from pathlib import Path

import networkx as nx
import pytest

import plimsoll
from tests import house
from tests.support.cases import each

PACKAGES = [package.name for package in pkgutil.iter_modules(plimsoll.__path__) if package.ispkg]
MODULES = sorted([*house.SOURCE.rglob("*.py"), *house.LAB.rglob("*.py")])
_MOST = 14  # modules of a folder


def test_folders_are_small() -> None:
    found = Counter(path.parent for path in MODULES if path.name != "__init__.py")
    assert {str(folder): count for folder, count in found.items() if count > _MOST} == {}


def test_every_folder_says_what_it_holds() -> None:
    """An empty folder would be none to git, but a package to Python where it was not removed."""
    folders = {path.parent for path in MODULES}
    silent = [folder for folder in sorted(folders) if not (folder / "__init__.py").read_text("utf-8").startswith('"""')]
    assert silent == []


@pytest.mark.parametrize("files", [MODULES, sorted(Path(__file__).parent.rglob("*.py"))], ids=["src", "tests"])
def test_an_underscored_module_is_imported_from_its_own_folder_alone(files: list[Path]) -> None:
    assert {str(path): found for path in files if (found := list(house.foreign_private_imports(path)))} == {}


def test_the_map_of_the_source_names_what_there_is() -> None:
    text = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text("utf-8")
    start = text.index("## Where is what")
    paths = re.findall(r"`([a-z_0-9]+/[a-z_0-9/.]*)`", text[start : text.index("## How to add", start)])
    assert [
        path for path in paths if path != "lab/" and not (house.SOURCE / path.removeprefix("src/plimsoll/")).exists()
    ] == []
    packages = {path.split("/")[0] for path in paths}
    assert set(PACKAGES) - packages == set()


def test_sections_of_docstrings_begin_a_line() -> None:
    """Or the reference would show arguments and errors as one paragraph."""
    section = re.compile(r"\S (Args|Attributes|Returns|Raises|Yields):")
    lost = [
        f"{path}:{node.lineno}"
        for path in MODULES
        if section.search(path.read_text("utf-8"))  # parsing all files would take two seconds
        for node in house.statements(path)
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and section.search(ast.get_docstring(node) or "")
    ]
    assert lost == []


def test_there_is_no_circle_of_imports() -> None:
    """Neither of lazy imports nor of those for types alone: import-linter sees no circle within a layer."""
    graph = house.import_graph({house.dotted(path): path for path in house.SOURCE.rglob("*.py")})
    assert [sorted(part) for part in nx.strongly_connected_components(graph) if len(part) > 1] == []


@each("package", PACKAGES)
def test_no_module_has_the_name_of_an_export(package: str) -> None:
    """Exports are loaded when they are first used: importing such a module would put it in the export's place."""
    folder = house.SOURCE / package
    tree = ast.parse((folder / "__init__.py").read_text("utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    exports = {alias.asname or alias.name: f"{node.module}.{alias.name}" for node in imports for alias in node.names}
    modules = {f"plimsoll.{package}.{path.stem}" for path in folder.iterdir() if path.suffix in ("", ".py")}
    hidden = [name for name, origin in exports.items() if f"plimsoll.{package}.{name}" in modules - {origin}]
    assert hidden == []
