"""One declaration of a figure reaches every list of figures."""

import ast
import json
import pkgutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the live page needs the extra serve: pip install '.[serve]'")

import plotly.graph_objects as go
from starlette.testclient import TestClient

from plimsoll import report
from plimsoll.diagnosis import View, diagnose
from plimsoll.errors import ArgumentError
from plimsoll.report import FIGURES, figure_for, figures, html
from plimsoll.report.figure_declaration import DECLARED, Case, figure
from plimsoll.report.live.server.app import app
from plimsoll.report.page.answers import offered
from plimsoll.runs import Run
from tests.support.diagnosis.stories import constant, make_story
from tests.support.report.report_file import ReportFile


@pytest.fixture
def declared() -> Iterator[str]:
    def cases(view: View) -> list[Case]:
        return [Case(label=f"Layers of {c}", arguments={"collection": c}) for c in sorted(view.run.tensors)[:2]]

    def of_finding(view: View, finding: object) -> go.Figure:
        return layer_count(view, "gradients", shift=7)

    @figure(offered="layers", cases=cases, of_finding=of_finding)
    def layer_count(run: View, collection: str, shift: int = 0) -> go.Figure:
        return go.Figure(go.Bar(x=[collection], y=[len(run.run.tensors[collection]) + shift]))

    try:
        yield "layer_count"
    finally:
        DECLARED.pop("layer_count")


def test_what_a_page_shows_until_a_figure_is_drawn_is_a_title(tmp_path: Path) -> None:
    view = View(Run(make_story(samples=4).write(tmp_path / "run")))
    labels = {str(each["figure"]): str(each["label"]) for each in offered(view)}
    assert labels["loss_and_scale"] == FIGURES["loss_and_scale"](view, ()).layout.title.text == "Loss and loss scale"
    assert not [label for label in labels.values() if "_" in label]


def test_a_declared_figure_is_on_every_surface(declared: str, tmp_path: Path) -> None:
    path = make_story(samples=4, gradient_std=constant(2.0**-34)).write(tmp_path / "run")
    view = View(Run(path))
    count = len(view.run.tensors["gradients"])
    assert declared in FIGURES and list(FIGURES) == sorted(FIGURES)
    finding = replace(diagnose(view)[0], figure=declared)
    assert figure_for(view, finding).data[0].y == (count + 7,)

    answers = ReportFile(html(path, tmp_path / "page.html")).answers
    ours = [d for d in answers["run"]["pictures"] if d["figure"] == declared]
    assert [(d["section"], d["label"]) for d in ours] == [
        ("layers", f"Layers of {c}") for c in sorted(view.run.tensors)[:2]
    ]
    assert [name for name, _, _ in answers["figures"]].count(declared) == 2

    with TestClient(app(tmp_path), base_url="http://localhost:8642") as client:
        listed = {each["name"]: each for each in client.get("/api/figures").json()["figures"]}
        assert list(listed) == list(FIGURES)
        assert listed[declared] == {
            "name": declared,
            "runs": [1],
            "offered": "layers",
            "arguments": [{"name": "collection", "required": True}, {"name": "shift", "required": False}],
        }
        assert listed["loss_and_scale"]["runs"] == [1, 2]
        pictures = client.get("/api/runs/run").json()["pictures"]
        assert [d["arguments"] for d in pictures if d["figure"] == declared] == [d["arguments"] for d in ours]
        address = f"/api/runs/run/figure/{declared}"
        answer = client.get(address, params={"collection": "gradients", "shift": "3"})
        assert answer.json()["figure"]["data"][0]["y"] == [count + 3], json.dumps(answer.json())
        assert "expected collection" in client.get(address).json()["error"]
        assert client.get(address, params={"collection": "gradients", "statistic": "std"}).status_code == 422


def test_a_name_is_declared_once(declared: str) -> None:
    with pytest.raises(ArgumentError, match="expected a name that no figure has; got name='layer_count'"):

        @figure(name=declared)
        def other(run: View) -> go.Figure: ...


def test_every_public_figure_is_exported() -> None:
    modules = {"results", *(f"figures.{module.name}" for module in pkgutil.iter_modules(figures.__path__))}
    homes = {name: home for name, home in report._HOME_OF.items() if home in modules}
    assert set(homes.values()) == modules
    assert all(getattr(report, name).__module__ == f"plimsoll.report.{home}" for name, home in homes.items())
    assert all(FIGURES[name] is getattr(report, name) for name in homes.keys() & FIGURES.keys())
    assert FIGURES.keys() - homes.keys() == {"underflow_heatmap", "flips_heatmap"}
    # Type checkers read the imports of this block, and not the list that the package derives.
    tree = ast.parse(Path(report.__file__).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    typed = {a.name: n.module for n in block.body if isinstance(n, ast.ImportFrom) for a in n.names}
    assert typed == {name: f"plimsoll.report.{home}" for name, home in report._HOME_OF.items()}
    assert sorted(typed) == sorted(report.__all__)
