"""Files of the front end: one script of all modules, and a copy of Plotly that draws every figure."""

import ast
import re
from pathlib import Path

from plimsoll import report
from plimsoll.report.page.assets import FILES, PLOTLY, script

MODULES = sorted((FILES / "js").rglob("*.js"))


def test_one_script_holds_every_module_once() -> None:
    text = script()
    assert not re.search(r"^\s*(import|export)\b", text, re.MULTILINE)
    places = {path.stem: text.find(f"const {path.stem}_module = ") for path in MODULES if path.stem != "first"}
    assert len(places) > 15 and min(places.values()) > 0
    assert all(text.count(f"const {name}_module = ") == 1 for name in places)
    # What a module imports stands before it.
    for path in MODULES:
        source = path.read_text("utf-8")
        for imported in re.findall(r'from "[./]+(?:views/)?(\w+)\.js"', source):
            assert places[imported] < places[path.stem], (path.stem, imported)


def test_plotly_has_the_traces_that_figures_draw() -> None:
    banner = PLOTLY.read_text("utf-8")[:200]
    traces = set(re.findall(r"with ([\w, ]+);", banner)[0].split(", "))
    assert traces == {"scatter", "bar", "heatmap"}
    drawn: set[str] = set()
    for path in Path(report.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Dict):
                entries = {
                    k.value: v for k, v in zip(node.keys, node.values, strict=True) if isinstance(k, ast.Constant)
                }
                kind = entries.get("type")
                if isinstance(kind, ast.Constant) and "x" in entries and "y" in entries:
                    drawn.add(str(kind.value))
    assert {"scatter", "bar", "heatmap"} == drawn
    for path in MODULES:
        assert set(re.findall(r'type: "(\w+)"', path.read_text("utf-8"))) <= traces | {
            "line",
            "button",
            "search",
            "range",
            "checkbox",
            "text",
            "submit",
        }


def test_plotlys_licences_are_beside_it() -> None:
    licences = (FILES / "plotly.LICENSE.txt").read_text("utf-8")
    version = re.findall(r"plotly\.js ([\d.]+) with", PLOTLY.read_text("utf-8")[:200])[0]
    assert f"plotly.js {version} (MIT)" in licences and "Permission is hereby granted" in licences
    assert "@plotly/d3" in licences and "BSD" in licences
