"""What the rules share: findings that stay, thresholds that are a user's, runs that are hardly there."""

import json
import re
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from plimsoll.diagnosis import RULES, Finding, Rule, View, diagnose, threshold
from plimsoll.diagnosis.finding import Spot
from plimsoll.diagnosis.tables.trend import looks, trend
from plimsoll.errors import ArgumentError, RunError
from plimsoll.report.verdicts.verdict_sentence import verdict
from plimsoll.runs import Event, Run, RunWriter, Scalars
from tests.support.diagnosis.faults import FAULTS, falling, put, zeroed
from tests.support.diagnosis.stories import LAYERS, SOUND, constant, make_story
from tests.support.runs import making

STABLE = [f for f in FAULTS if f.name in {
    "underflow rises in one layer", "scale frozen low after hard batches", "attention explodes", "loss diverges",
    "weights drift", "dead ReLU layer", "scale swings since 80",
}]  # fmt: skip


def comparable(findings: list[Finding]) -> str:
    return json.dumps([f.to_dict() for f in findings], sort_keys=True)


@pytest.mark.parametrize("fault", STABLE, ids=lambda fault: fault.name)
def test_findings_are_the_same_live_and_afterwards(fault: object, tmp_path: Path) -> None:
    whole = Run(fault.story.write(tmp_path / "whole"))
    held: set[tuple[str, str | None]] = set()
    for step in (60, 125, 170):
        cut = fault.story.write(tmp_path / f"cut{step}", until=step)
        live = diagnose(cut)
        assert comparable(live) == comparable(diagnose(whole, until=step))
        found = {(f.rule, f.collection) for f in live if f.severity != "info"}
        assert held <= found  # once made, a finding stays
        held |= found
    assert held <= {(f.rule, f.collection) for f in diagnose(whole)}


def test_a_run_that_grows_while_it_is_read_is_judged_as_it_was(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "run", flush_seconds=600) as writer:
        making.write_steps(writer, range(10))
        writer.flush()
        view = View(Run(tmp_path / "run"))
        before = diagnose(view)
        making.write_steps(writer, range(10, 20))
        writer.flush()
        assert diagnose(view) == before and view.last_step == 9


def test_a_scale_that_was_never_higher_has_not_collapsed(tmp_path: Path) -> None:
    low = make_story(scale=lambda s: 2.0**-6).write(tmp_path / "low")
    assert "scale-collapse" not in {f.rule for f in diagnose(low)}
    sinking = make_story(scale=lambda s: 2.0 ** -(s // 30)).write(tmp_path / "sinking")
    (found,) = (f for f in diagnose(sinking) if f.rule == "scale-collapse")
    assert found.since_step < 60 and found.evidence["binades"] > 0


def test_the_search_for_the_first_scale_is_no_part_of_the_fall_after_it(tmp_path: Path) -> None:
    story = make_story(scale=lambda s: 2.0 ** (20 - min(s, 4)) if s < 100 else 2.0 ** (16 - min(s - 99, 8)))
    (found,) = (f for f in diagnose(story.write(tmp_path / "run")) if f.rule == "scale-collapse")
    assert found.since_step == 100
    assert found.evidence == {"from": 2.0**16, "to": 2.0**8, "binades": 8.0}


def test_a_scale_that_sinks_to_its_floor_at_once_has_collapsed(tmp_path: Path) -> None:
    story = make_story(scale=lambda s: 2.0 ** max(16 - s, -14))  # it settles only at the bottom
    (found,) = (f for f in diagnose(story.write(tmp_path / "run")) if f.rule == "scale-collapse")
    assert found.since_step <= 17 and found.evidence["to"] == 2.0**-14


def test_structural_zeros_are_told_of_and_are_no_underflow(tmp_path: Path) -> None:
    story = make_story(change_gradient=lambda g, name, step: g * (torch.arange(len(g)) < 20))
    found = {(f.rule, f.collection): f for f in diagnose(story.write(tmp_path / "run"))}
    zeros = found["structural-zeros", "gradients"]
    assert zeros.severity == "info" and zeros.evidence["zeros"] == pytest.approx(1 - 20 / 512)
    assert zeros.meaning.startswith(
        "Most of these parameter gradients are zero"
    )  # a layer's activations are named alike
    assert not any(rule.startswith("underflow") for rule, _ in found)


def test_a_gradient_that_was_always_zero_asks_for_a_shadow_step(tmp_path: Path) -> None:
    story = make_story(gradient_std=lambda name, step: 2.0**-60 if name == LAYERS[2] else 2.0**-8)
    finding = next(f for f in diagnose(story.write(tmp_path / "run")) if f.rule == "dead-layer")
    assert finding.where == (f"{LAYERS[2]}.weight",) and "shadow" in finding.advice


def test_overflow_that_the_scaler_handles_is_information(tmp_path: Path) -> None:
    story = make_story(skipped=lambda step: float(step in (30, 90)))
    finding = next(f for f in diagnose(story.write(tmp_path / "run")) if f.rule == "nonfinite")
    assert finding.severity == "info" and finding.evidence["steps"] == 2 and finding.actions == ()
    assert finding.meaning.endswith("the scaler skipped them.")


def test_a_step_counts_as_skipped_only_if_that_is_recorded(tmp_path: Path) -> None:
    story = make_story(skipped=lambda step: float(step in (30, 90)), skips_recorded=False)
    path = story.write(tmp_path / "run")
    (finding,) = (f for f in diagnose(path) if f.rule == "nonfinite")
    assert finding.severity == "info" and finding.evidence["skipped"] == 0
    assert "no skipped step is recorded" in finding.meaning and "nan_to_num" in finding.advice
    assert "skipped" not in verdict(View(Run(path)), [finding])


def test_a_scale_that_falls_at_once_without_an_overflow_was_set(tmp_path: Path) -> None:
    def found(name: str, **changes: object) -> Finding:
        return next(f for f in diagnose(make_story(**changes).write(tmp_path / name)) if f.rule == "scale-collapse")

    restored = found("restored", scale=lambda s: 2.0**16 if s < 100 else 1.0)
    assert (restored.severity, restored.since_step) == ("alarm", 100)
    assert "no overflow is recorded" in restored.meaning and "skipped" not in restored.meaning
    assert restored.advice.startswith("Restore the scaler's state with the checkpoint")
    back = found("back", scale=lambda s: 1.0 if 60 <= s < 80 else 2.0**16)
    assert back.severity == "warning" and "set or restored so. It has come back since." in back.meaning
    for name, scale in {"at once": lambda s: 2.0**16 if s < 100 else 1.0, "by halves": falling(100, 10)}.items():
        overflowed = found(name, scale=scale, skipped=lambda s: float(99 <= s < 109))
        assert overflowed.meaning.startswith("Many steps in a row overflowed and were skipped.")


def test_the_first_place_of_infinities_is_the_earliest_and_the_cause(tmp_path: Path) -> None:
    bad = put(float("nan"), LAYERS[4], 50)
    also = put(float("nan"), LAYERS[2], 50)
    story = make_story(change_activation=bad, change_gradient=also)
    finding = next(f for f in diagnose(story.write(tmp_path / "run")) if f.rule == "nonfinite")
    assert finding.evidence["first_seen_in"] == f"activations {LAYERS[4]}:output"


def test_lost_records_are_told_of(tmp_path: Path) -> None:
    path = SOUND.write(tmp_path / "run")
    part = next((path / "spectra").glob("*.parquet"))
    shutil.copy(part, path / "spectra" / "notes.parquet")  # a foreign file
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = diagnose(path, rules=["records-lost"])
    assert found[0].severity == "warning" and found[0].evidence["problems"] == 1
    with RunWriter(tmp_path / "other") as writer:
        writer.write(Event(step=7, kind="not measured", message="weights w: a tensor on no device"))
    told_of = diagnose(tmp_path / "other")
    assert [(f.rule, f.severity, f.since_step) for f in told_of] == [("records-lost", "info", 7)]


def test_a_collection_that_a_failure_has_left_out_is_no_healthy_run(tmp_path: Path) -> None:
    why = "Parameters.read_gradients failed and was left out (RuntimeError: no data)"

    def found(path: Path) -> Finding:
        (finding,) = diagnose(path, rules=["records-lost"])
        return finding

    for name, collect in (("lost", ["gradients", "weights"]), ("unasked", ["weights"])):
        with RunWriter(tmp_path / name, settings={"collect": dict.fromkeys(collect, 1)}) as writer:
            writer.write(Scalars(step=0, values={"loss": 1.0}))
            writer.write(Event(step=0, kind="failure", message=why, details={"collections": ["gradients"]}))
            writer.flush()
            assert found(tmp_path / name).severity == "info"  # its first sample may be written yet
    lost = found(tmp_path / "lost")
    assert lost.severity == "warning" and lost.evidence["not_recorded"] == "parameter gradients"
    assert why in lost.meaning and lost.evidence["failure"] == why
    sentence = verdict(View(Run(tmp_path / "lost")), [lost])
    assert sentence.startswith("Warning: the watch failed to record parameter gradients")
    assert "RuntimeError: no data" in sentence
    unasked = found(tmp_path / "unasked")
    assert unasked.severity == "info" and "not_recorded" not in unasked.evidence


# -- thresholds, selection


def test_thresholds_are_a_users(tmp_path: Path) -> None:
    path = make_story(change_activation=zeroed(LAYERS[0], 100)).write(tmp_path / "run")
    assert [f.rule for f in diagnose(path, rules=["dead-*"])] == ["dead-layer"]
    assert diagnose(path, rules=["dead-layer"], thresholds={"dead-layer.samples": 30}) == []
    assert diagnose(path, rules=["dead-layer"], thresholds={"scale-low.lost": 0.5}) != []


def test_a_rule_of_ones_own_is_applied(tmp_path: Path) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Loud(Rule):
        id = "loud"
        says = "the loss is above a level"
        meaning, advice, figure = "It is loud.", "Turn it down.", "loss_and_scale"
        level: float = threshold(2.5, "taste")

        def findings(self, view: View) -> object:
            steps, loss = view.scalar("loss")
            if (loss > self.level).any():
                yield self.finding("warning", (), {"loss": float(loss.max())}, since_step=0, until_step=int(steps[-1]))

    path = SOUND.write(tmp_path / "run")
    assert [str(f) for f in diagnose(path, rules=[Loud()])] == ["warning: loud since step 0: It is loud."]
    assert diagnose(path, rules=[Loud()], thresholds={"loud.level": 99.0}) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"rules": ["underflow-hihg"]},
            "diagnose: expected rules by their ids; got 'underflow-hihg'. Nearest: underflow-high",
        ),
        ({"thresholds": {"nothing.values": 1.0}}, "diagnose: expected a threshold written as rule.threshold; got"),
        (
            {"thresholds": {"underflow-high.cats": 1.0}},
            "expected a threshold of underflow-high; got .*There are underf",
        ),
        ({"rules": 3}, "diagnose: expected rules to be a list; got rules=3"),
        ({"rules": [3]}, "diagnose: expected rules by their ids; got 3"),
        ({"thresholds": ["underflow-high.values"]}, "diagnose: expected thresholds by their names; got \\['under"),
        ({"thresholds": {3: 1.0}}, "diagnose: expected a threshold written as rule.threshold; got '3'"),
        ({"until": "9"}, "View: expected until to be an integer; got until='9'"),
        ({"thresholds": {"underflow-high.values": -1.0}}, "expected underflow-high.values to be a number of 0 or more"),
    ],
)
def test_what_does_not_exist_is_refused(arguments: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=message):
        diagnose(making.written(tmp_path / "run", [0]), **arguments)


def test_a_view_has_its_own_end(tmp_path: Path) -> None:
    view = View(Run(making.written(tmp_path / "run", [0])))
    with pytest.raises(ArgumentError, match="diagnose: expected until=None with a View"):
        diagnose(view, until=3)


def test_every_rule_has_an_id_a_figure_and_thresholds_with_sources() -> None:
    assert len({rule.id for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert rule.says and rule.meaning.endswith(".") and rule.advice.endswith(".") and rule.figure
        assert rule.thresholds and all(source for *_, source in rule.thresholds)


# -- runs that are hardly there


def test_runs_of_nothing_or_of_one_step_are_healthy(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "empty"):
        pass
    assert diagnose(tmp_path / "empty") == []
    assert diagnose(making.written(tmp_path / "one", [0])) == []
    with RunWriter(tmp_path / "scalars") as writer:
        for step in range(50):
            writer.write(Scalars(step=step, values={"loss": 1.0}))
    assert diagnose(tmp_path / "scalars") == []


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="Run: expected the folder of a run"):
        diagnose(tmp_path)


def test_hostile_names_are_told_without_harm(tmp_path: Path) -> None:
    names = ["</script><b>", "../../etc/passwd", "x" * 10_000, "[bold red]", "a\x1b[31m\nb", "1" * 400]
    with RunWriter(tmp_path / "run") as writer:
        for step in range(12):
            named = {("gradients", f"{name}.weight"): torch.full((4,), float("nan")) for name in names}
            writer.write(making.batch(writer, step, named))
    found = diagnose(tmp_path / "run")
    assert found[0].rule == "nonfinite" and set(found[0].where) == {f"{name}.weight" for name in names}
    line = str(found[0])
    assert len(line) < 500 and line.isprintable()
    json.dumps(found[0].to_dict(), allow_nan=False)


def test_several_scales_in_one_step_are_added_up(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "run") as writer:
        series = np.array([writer.series("gradients", "w", format="fp32")] * 2)
        from plimsoll.runs import Batch

        rows = making.rows_of([torch.full((8,), 2.0), torch.full((8,), 4.0)])
        scales = np.array([2.0, 4.0])
        writer.write(Batch(step=0, rows=rows, index=np.arange(2), series=series, scales=scales))
    cells = View(Run(tmp_path / "run")).cells("gradients")
    assert cells is not None and len(cells) == 2 and cells.shape == (1, 1)
    assert cells.true_absmax[0, 0] == 1.0 and cells.rms[0, 0] == 1.0 and cells.total_of("count")[0, 0] == 16


# -- trends


def test_a_trend_is_scipys_and_robust() -> None:
    steps, random = np.arange(300), np.random.default_rng(0)
    rising = 0.01 * steps + random.normal(0, 0.3, 300)
    rising[::50] = 100.0
    found = trend(steps, rising)
    assert found is not None and found.confidence > 0.999
    assert found.slope == pytest.approx(0.01, rel=0.1) and found.low < found.slope < found.high
    assert found.steps_to(5.0) == pytest.approx(200, rel=0.2)
    flat = trend(steps, random.normal(0, 1, 300))
    assert flat is not None and flat.confidence < 0.99
    assert trend(steps[:5], rising[:5]) is None
    still = trend(steps, np.ones(300))
    assert still is not None and (still.slope, still.confidence, still.steps_to(2.0)) == (0.0, 0.0, float("inf"))


def test_a_growing_series_is_looked_at_at_the_same_places() -> None:
    for samples in range(200):
        assert looks(samples) == [at for at in looks(200) if at <= samples]


def test_an_estimate_of_underflow_is_near_the_truth(tmp_path: Path) -> None:
    sizes = {layer: -24.0 - i for i, layer in enumerate(LAYERS)}
    story = make_story(scale=lambda step: 1.0, gradient_std=lambda name, step: 2.0 ** sizes[name], samples=8)
    narrow = View(Run(story.write(tmp_path / "run"))).narrow("gradients")
    assert narrow is not None
    for i, layer in enumerate(LAYERS[:2]):
        true = float((torch.randn(100_000).abs() * 2.0 ** sizes[layer] <= 2.0**-25).double().mean())
        assert np.median(narrow.fraction[i]) == pytest.approx(true, abs=0.12)
    assert story.gradient_fmt == "fp16" and constant(1.0)("a", 0) == 1.0


def test_every_rule_and_threshold_is_explained() -> None:
    page = (Path(__file__).parents[2] / "docs" / "concepts" / "rules.md").read_text("utf-8")
    sections = dict(part.split("\n", 1) for part in page.split("\n## ")[1:])
    assert list(sections) == [rule.id for rule in RULES]
    for rule in RULES:
        words = " ".join(sections[rule.id].split())
        assert f"**{rule.says[:1].upper()}{rule.says[1:]}.**" in words
        for text in (f"*It means:* {rule.meaning}", f"*What to do:* {rule.advice}"):
            assert re.search(rf"{re.escape(text)}( [A-Z*]|$)", words), (rule.id, text)  # and no rest of older words
        for name, value, source in rule.thresholds:
            assert f"| `{name}` | {value:g} | {source} |" in sections[rule.id]
        assert all(f"`{action}`" in sections[rule.id] for action in rule.actions)
        assert f"`{rule.figure}`" in sections[rule.id]


def test_spots_without_a_number_are_equal() -> None:
    one, same = (Spot(name="a", since_step=3, value=float("nan")) for _ in range(2))
    assert one == same and hash(one) == hash(same)
    assert one != Spot(name="a", since_step=3, value=1.0) and one != Spot(name="b", since_step=3) and one != "a"
