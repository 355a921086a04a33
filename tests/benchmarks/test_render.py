"""The page of benchmarks is what its script makes of the committed results, and says met, missed or not measured."""

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
NO_MEASUREMENT = {"render.py", "record_traces.py"}


@pytest.fixture
def render(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("render")


def test_the_committed_page_is_what_the_script_writes(render: ModuleType) -> None:
    written = render.page(render.newest())
    assert render.PAGE.read_text(encoding="utf-8") == written, "python benchmarks/render.py writes it again"


def test_every_benchmark_is_on_the_page(render: ModuleType) -> None:
    scripts = {path.name for path in BENCHMARKS.glob("[a-z]*.py")} - NO_MEASUREMENT
    assert scripts == {script for script, _ in render.BENCHMARKS.values()}
    assert {stem for stem, _ in render.newest()} <= set(render.BENCHMARKS)


def test_every_goal_finds_its_number_in_the_results(render: ModuleType) -> None:
    results = render.newest()
    goals = [*render.NUMBERS_TO_REACH, *render.OWN]
    lost = [
        goal.what
        for goal in goals
        for device in goal.devices
        if (goal.stem, device) in results and goal.worst(results[goal.stem, device]) is None
    ]
    assert lost == []
    assert {goal.stem for goal in goals} <= set(render.BENCHMARKS)


def test_the_page_says_what_limits_each_goal_that_is_missed(render: ModuleType) -> None:
    goals = [*render.NUMBERS_TO_REACH, *render.OWN]
    missed = [g for g in goals if any("missed" in render._state(g, d, render.newest()) for d in render.DEVICES)]
    assert [goal.what for goal in missed if not goal.limit] == []
    assert "\n".join(render._limits(goals, render.newest())).count("- **") == len(missed)
    assert render._limits(goals, {}) == []
    goal = goal_of(render, limit="Memory.")
    assert render._limits([goal], {("watch", "cpu"): result(1.3)})[-2] == "- **watching**: Memory."
    assert render._limits([goal], {("watch", "cpu"): result(1.1)}) == []


def result(ratio: object, date: str = "2026-01-01 10:00 UTC") -> dict[str, Any]:
    rows = [{"what": "ours: a | b", "ratio": ratio}, {"what": "other", "ratio": 9.0}]
    table = {"title": "One step, of a model", "note": "A note.", "columns": ["what", "ratio"], "rows": rows}
    return {"title": "watch", "machine": {"date": date, "processor": "P", "torch": "2.x"}, "tables": [table]}


def goal_of(render: ModuleType, **changed: Any) -> Any:
    plain = {"stem": "watch", "table": "One step*", "rows": {"what": "ours:*"}, "column": "ratio", "value": 1.2}
    return render.Goal(**{"what": "watching", "bound": "at most", "unit": "x", **plain, **changed})


@pytest.mark.parametrize(
    ("ratio", "changed", "said"),
    [
        (1.2, {}, "1.2x: **met**"),
        (1.21, {}, "1.21x: **missed**"),
        ("1.201", {}, "1.201x: **missed**"),
        (1.3, {"bound": "at least"}, "1.3x: **met**"),
        (1.3, {"rows": {}}, "9x: **missed**"),  # the worst of the rows
        (1.3, {"rows": {}, "bound": "at least"}, "1.3x: **met**"),
        (None, {}, "not measured yet"),
        (1.0, {"rows": {"what": "nobody"}}, "not measured yet"),
        (1.0, {"table": "Another"}, "not measured yet"),
        (1.0, {"devices": ("cuda",)}, "no goal"),
    ],
)
def test_a_goal_is_met_missed_or_not_measured(
    render: ModuleType, ratio: object, changed: dict[str, Any], said: str
) -> None:
    assert render._state(goal_of(render, **changed), "cpu", {("watch", "cpu"): result(ratio)}) == said


def test_without_results_nothing_is_measured(render: ModuleType) -> None:
    page = render.page({})
    assert "**met**" not in page and "**missed**" not in page
    assert page.count("\nGPU: not measured yet.\n") == sum(render.has_device(s) for s, _ in render.BENCHMARKS.values())


def test_the_newest_result_of_each_device_is_shown(render: ModuleType, tmp_path: Path) -> None:
    for date, device, ratio in (("2026-02-01", "cpu", 2.0), ("2026-01-09", "cpu", 1.0), ("2026-01-01", "cuda", 3.0)):
        text = json.dumps(result(ratio, f"{date} 10:00 UTC"))
        (tmp_path / f"{date}-watch-{device}.json").write_text(text, encoding="utf-8")
    (tmp_path / "notes.json").write_text("{}")
    found = render.newest(tmp_path)
    assert {key: content["tables"][0]["rows"][0]["ratio"] for key, content in found.items()} == {
        ("watch", "cpu"): 2.0,
        ("watch", "cuda"): 3.0,
    }
    page = render.page(found)
    assert "2026-02-01 10:00 UTC, P; torch 2.x." in page and "2026-01-09" not in page
    assert "| ours: a \\| b | 2 |" in page
