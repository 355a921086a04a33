"""Numbers about the source itself: ``make house``. How large it is, how flat its folders are, what imports what."""

import ast
import functools
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import networkx as nx

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "plimsoll"
LAB = ROOT / "lab" / "src" / "plimsoll_lab"
PAGE = {".js", ".css", ".html"}
GOALS = {
    "Lines of Python and of the page in src": "at most 62,000: missed, since more hold code",
    "Modules": "at most 420",
    "Modules in the largest folder": "at most 14",
    "Imports of another folder's underscored modules": "0",
    "The same in tests": "0",
    "Circles of imports, with lazy and type-only ones": "0",
    "Lines that hold a comment which gives a reason": "at least 3 %",
    "Tests": "at most 6,000",
}
_LAYOUT = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.COMMENT, tokenize.ENDMARKER}
_PRAGMA = re.compile(r"#\s*(noqa|type:|pragma|pyright|fmt|ruff|!|--)")  # no reasons, and headings


def main() -> None:
    """Prints one line for each number, with its goal."""
    for name, value in numbers().items():
        sys.stdout.write(f"{name:54}{value:28}{GOALS.get(name, '')}".rstrip() + "\n")


def numbers() -> Mapping[str, str]:
    """What is measured, by name."""
    files = sorted(SOURCE.rglob("*.py"))
    modules = {path: dotted(path) for path in files}
    folders = Counter(path.parent for path in files if path.name != "__init__.py")
    largest, entries = folders.most_common(1)[0]
    python = sum(_lines(path) for path in files)
    page = sum(_lines(path) for path in SOURCE.rglob("*") if path.suffix in PAGE and ".min." not in path.name)
    graph = import_graph({name: path for path, name in modules.items()})
    tests = sorted((ROOT / "tests").rglob("*.py"))
    private = sum(1 for path in files for _ in foreign_private_imports(path))
    circles = [part for part in nx.strongly_connected_components(graph) if len(part) > 1]
    comments = sum(comment_lines(path.read_text("utf-8")) for path in files)
    return {
        "Lines of Python and of the page in src": f"{python + page:,} ({python:,} + {page:,})",
        "of Python, those with code": f"{sum(code_lines(path.read_text('utf-8')) for path in files):,}",
        "Lines of Python in the laboratory": f"{sum(map(_lines, LAB.rglob('*.py'))):,}",
        "Modules": f"{sum(folders.values()):,}",
        "Modules in the largest folder": f"{entries} ({largest.relative_to(SOURCE)})",
        "Imports of another folder's underscored modules": f"{private:,}",
        "The same in tests": f"{sum(1 for path in tests for _ in foreign_private_imports(path)):,}",
        "Circles of imports, with lazy and type-only ones": f"{len(circles)}, of {sum(map(len, circles))} modules",
        "Lines that hold a comment which gives a reason": f"{comments:,} ({comments / python:.1%})",
        "Tests": f"{_collected():,}",
    }


def import_graph(modules: Mapping[str, Path]) -> "nx.DiGraph[str]":
    """Which module imports which, wherever in the file; a package's own `__init__` that loads lazily is left out."""
    graph: nx.DiGraph[str] = nx.DiGraph()
    for name, path in modules.items():
        if path.name == "__init__.py":
            continue
        for imported in _imports(path):
            if imported in modules and imported != name and modules[imported].name != "__init__.py":
                graph.add_edge(name, imported)
    return graph


def foreign_private_imports(path: Path) -> Iterator[str]:
    """Imports of modules whose name begins with an underscore from a folder that is not the file's own."""
    own = dotted(path.parent / "__init__.py") if SOURCE in path.parents else ""
    for imported in _imports(path):
        folder, _, module = imported.rpartition(".")
        if imported.startswith("plimsoll.") and module.startswith("_") and folder != own and _is_module(imported):
            yield imported


def comment_lines(source: str) -> int:
    """Lines that hold a comment; those that only tools read, and headings, are left out."""
    lines = {
        token.start[0]
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT and not _PRAGMA.match(token.string)
    }
    return len(lines)


def code_lines(source: str) -> int:
    """Lines that hold code: no docstring, no comment alone, no import, not blank."""
    tree = ast.parse(source)
    apart: set[int] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Import() | ast.ImportFrom() | ast.Expr(value=ast.Constant(value=str())):
                apart.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
            case _:
                pass
    held: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _LAYOUT:
            held.update(range(token.start[0], token.end[0] + 1))
    return len(held - apart)


def statements(path: Path) -> Iterator[ast.AST]:
    """Every statement of a file, at whatever depth: `ast.walk` without the expressions, which are most of it."""
    waiting: list[ast.AST] = [ast.parse(path.read_text("utf-8"))]
    while waiting:
        node = waiting.pop()
        yield node
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            waiting += getattr(node, name, ())


@functools.cache
def _imports(path: Path) -> Sequence[str]:
    """Every module that a file names in an import: `from a import b` may name the module a.b."""
    names: list[str] = []
    for node in statements(path):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            members = [f"{node.module}.{alias.name}" for alias in node.names]
            found = [member for member in members if _is_module(member)]
            names += found
            if len(found) < len(members):
                names.append(node.module)
    return names


@functools.cache
def _is_module(name: str) -> bool:
    place = SOURCE.parent / Path(*name.split("."))
    return place.with_suffix(".py").is_file() or (place / "__init__.py").is_file()


def dotted(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _lines(path: Path) -> int:
    return path.read_text("utf-8").count("\n")


def _collected() -> int:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "tests"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return sum(1 for line in said.splitlines() if "::" in line)


if __name__ == "__main__":
    main()
