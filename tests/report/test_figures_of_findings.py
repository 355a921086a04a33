"""Every rule's finding has a figure that shows it: something is drawn, of its layers, with the step marked."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from plimsoll.diagnosis import RULES, Finding, View, diagnose
from plimsoll.errors import ArgumentError
from plimsoll.report import FIGURES, figure_for
from plimsoll.runs import Event, Run, RunWriter
from tests.support.cases import each
from tests.support.diagnosis.faults import FAULTS, INNOCENT
from tests.support.diagnosis.recorded import ONE_WORKER, Recorded
from tests.support.diagnosis.stories import SOUND, Story

pytestmark = ONE_WORKER

_STORIES: dict[str, Story] = {fault.name: fault.story for fault in FAULTS} | INNOCENT
# For each rule two faults that raise it, or what there is.
CASES = [
    (rule.id, fault.name) for rule in RULES for fault in [f for f in FAULTS if f.rule == rule.id][:2]
] + [("structural-zeros", "ReLU zeros")]  # fmt: skip


def drawn(figure: Any) -> list[Any]:
    """The numbers of all traces that are something."""
    content = json.loads(figure.to_json())
    return [t for t in content["data"] if t.get("z") or t.get("y")]


def marked_steps(figure: Any) -> set[int]:
    lines = {shape.x0 for shape in figure.layout.shapes if shape.type == "line" and shape.x0 == shape.x1}
    return {int(at) for at in lines}


@each(("rule", "name"), CASES)
def test_a_findings_figure_shows_it(rule: str, name: str, recorded: Callable[[Story], Recorded]) -> None:
    view = View(Run(recorded(_STORIES[name]).path))
    finding = diagnose(view, rules=[rule])[0]
    figure = figure_for(view, finding)
    assert drawn(figure) and not (figure.layout.meta or {}).get("empty")
    assert finding.since_step in marked_steps(figure), figure.layout.shapes
    text = figure.to_json()
    assert len(text) < 300_000
    if finding.where and finding.figure in ("spectrogram", "code_usage"):
        assert finding.where[0] in figure.layout.title.text
    elif finding.where and finding.figure in ("underflow_heatmap", "zero_heatmap", "updates"):
        assert (finding.where[0].rpartition(".weight")[0] or finding.where[0]) in text


def test_records_lost_has_its_figure(tmp_path: Path) -> None:
    SOUND.write(tmp_path / "run", until=20)
    with RunWriter(tmp_path / "run") as writer:
        writer.write(Event(step=7, kind="not measured", message="weights <b>w</b>: on no device"))
    finding = diagnose(tmp_path / "run", rules=["records-lost"])[0]
    figure = figure_for(tmp_path / "run", finding)
    words = str(figure.to_plotly_json())
    assert "not measured (1)" in words and "weights &lt;b&gt;w&lt;/b&gt;: on no device" in words


def test_a_gradient_ahead_of_adams_memory_is_shown_against_it(tmp_path: Path) -> None:
    path = SOUND.write(tmp_path / "run", until=40)
    name = "blocks.1.mlp.weight"
    finding = Finding(
        rule="spike-forerunner", severity="warning", since_step=25, until_step=25, advice="", meaning="",
        figure="updates", collection="gradients", where=(name,),
    )  # fmt: skip
    figure = figure_for(path, finding)
    assert marked_steps(figure) == {25} and "Adam's memory" in figure.layout.title.text
    line = next(t for t in figure.data if t.name == name)
    squares = Run(path).series("gradients", name, "norm")[1] ** 2
    moments = Run(path).series("optimizer", f"{name}:exp_avg_sq", "sum")[1]
    wanted = np.log2(squares / moments * (1 - 0.999 ** (np.asarray(line.x) + 1)))
    assert np.asarray(line.y) == pytest.approx(wanted, abs=1e-4)


def test_every_figure_that_a_rule_names_exists() -> None:
    assert {rule.figure for rule in RULES} <= set(FIGURES)
    covered = {rule for rule, _ in CASES} | {"records-lost"}
    assert covered == {rule.id for rule in RULES}


def test_every_rule_has_its_picture_in_the_documentation() -> None:
    root = Path(__file__).parents[2]
    page = (root / "docs/concepts/rules.md").read_text("utf-8")
    for rule in RULES:
        picture = root / f"docs/images/rules/{rule.id}.png"
        assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size < 60_000
        after = page.split(f"## {rule.id}\n")[1].split("\n## ")[0]
        assert f"](../images/rules/{rule.id}.png)" in after


def test_a_figure_that_there_is_not_is_refused(tmp_path: Path) -> None:
    finding = Finding(rule="mine", severity="info", since_step=0, until_step=0, advice="", meaning="", figure="pie")
    with pytest.raises(ArgumentError, match="expected a finding whose figure is among .*; got 'pie' of mine. Name one"):
        figure_for(SOUND.write(tmp_path / "run", until=5), finding)


def test_a_heat_map_of_many_layers_shows_those_of_the_finding(tmp_path: Path) -> None:
    from plimsoll.report import heatmap
    from tests.support.report.large_run import written

    path = written(tmp_path / "run", layers=300, samples=6)
    focus = ["blocks.7.part3.weight", "blocks.11.part0.weight"]
    figure = heatmap(path, "norm", focus=focus, since_step=10)
    assert list(figure.data[0].y) == focus and "the 2 concerned of 300" in figure.layout.title.subtitle.text
    assert np.shape(figure.data[0].z) == (2, 6)
