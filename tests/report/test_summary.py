"""The verdict in one sentence, over the faults that rules are tested with; and the record that all pages tell from."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from plimsoll.diagnosis import RULES, SEVERITIES, Finding, Rule, View, diagnose
from plimsoll.diagnosis.rules.base import short
from plimsoll.diagnosis.rules.registry import rule_of
from plimsoll.errors import ArgumentError, RunError
from plimsoll.report import markdown, summary
from plimsoll.report.verdicts import summary_text
from plimsoll.report.verdicts.run_summary import Summary
from plimsoll.report.verdicts.verdict_sentence import LONGEST, leading, verdict
from plimsoll.runs import Event, Run, RunWriter, Scalars
from tests.support.cases import each
from tests.support.diagnosis.faults import FAULTS, WORDS, A, B, Fault
from tests.support.diagnosis.recorded import ONE_WORKER, Recorded
from tests.support.diagnosis.stories import SOUND, Story, constant, make_story

pytestmark = ONE_WORKER

BEGINS = {"alarm": "Problem: ", "warning": "Warning: ", "info": "Healthy through step 199, but note: "}


@each("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_verdict_names_what_and_since_when(fault: Fault, recorded: Callable[[Story], Recorded]) -> None:
    view, found = View(Run(recorded(fault.story).path)), recorded(fault.story).found
    gravest = max((f.severity for f in found), key=SEVERITIES.index)
    sentence = verdict(view, found)
    if gravest == "info" and not any(rule_of(f).is_noted for f in found):
        assert sentence.startswith("Healthy through step 199: ")
        return
    assert sentence.startswith(BEGINS[gravest]) and sentence.endswith(".") and len(sentence) <= LONGEST
    lead = leading([f for f in found if f.severity == gravest], 199) if gravest != "info" else found[0]
    assert re.search(WORDS[lead.rule], sentence), sentence
    steps = [int(step) for step in re.findall(r"steps? (\d+)", sentence)]
    assert lead.since_step in steps and lead.severity == gravest
    assert lead.since_step <= max(fault.first, fault.last)
    if fault.layer is not None and lead.rule == fault.rule and len(lead.where) == 1:
        assert fault.layer.removesuffix(":output") in sentence
    assert verdict(view, list(found)) == sentence


def test_sentences_as_they_are(recorded: Callable[[Story], Recorded]) -> None:
    by_name = {fault.name: fault.story for fault in FAULTS}

    def said(name: str) -> str:
        return summary(recorded(by_name[name]).path).verdict

    assert said("scale frozen low after hard batches") == (
        "Problem: the loss scale fell from 2^10 to 2^-4 at steps 60 to 199, and 18 % of parameter and 18 % of "
        "activation gradient values underflowed at steps 60 to 195; use a SpectralScaler or BF16."
    )
    assert said("one layer x 1e-4") == (
        f"Problem: up to 44 % of the parameter gradients of {A} have underflowed in FP16 since step 0; raise the loss "
        "scale to between 2^16 and 2^21."
    )
    assert said("layers part at 100") == (
        f"Problem: no single loss scale has worked for all layers since step 100, {A} needs 2^19 or more, {B} "
        "overflows above 2^10; use a LayerScaler or BF16."
    )
    collapsed = "scale frozen low after hard batches"
    for name, scaler, remedy in (
        (
            "scale frozen low after hard batches",
            "SpectralScaler",
            "clip gradients, lower the learning rate or use BF16",
        ),
        (collapsed, "GradScaler", "use a SpectralScaler or BF16"),
        ("layers part at 100", "LayerScaler", "use BF16"),
    ):
        view = View(Run(recorded(by_name[name]).path))
        view.run.manifest["scaler"] = scaler
        assert verdict(view, diagnose(view)).endswith(f"; {remedy}.")
    assert said("attention explodes") == (
        f"Problem: activations of {A} came within a factor of two of the format's largest value at step 170, and NaN "
        "or Inf came at step 180; run the layer in BF16 or clamp it."
    )


def test_every_rule_has_its_phrase() -> None:
    assert all(type(rule).phrase is not Rule.phrase for rule in RULES)
    assert set(WORDS) | {"structural-zeros", "records-lost"} == {rule.id for rule in RULES}


def test_a_median_of_losses_that_are_not_finite_is_no_number(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "run") as writer:
        for step in range(5):
            writer.write(Scalars(step=step, values={"loss": math.nan}))
    facts = dict(summary_text.facts(summary(tmp_path / "run")))
    assert (facts["Loss at step 4"], facts["Median loss of the last 60 steps"]) == ("nan", "NaN or Inf")


# -- which finding leads


def finding(rule: str, severity: str = "alarm", since: int = 0, **more: object) -> Finding:
    fields = {"advice": "a", "meaning": "m", "figure": "record", "until_step": 199, **more}
    return Finding(rule=rule, severity=severity, since_step=since, **fields)  # type: ignore[arg-type]


def test_what_ends_a_training_leads_over_what_came_first(tmp_path: Path) -> None:
    layer = finding("underflow-high", since=0, where=("a",), collection="gradients")
    collapse = finding("scale-collapse", since=100, evidence={"from": 1024.0, "to": 1.0})
    nan = finding("nonfinite", since=120, evidence={"steps_with_loss": 79})
    assert leading([layer, nan, collapse], 199) is collapse
    passing = finding("nonfinite", since=5, evidence={"steps_with_loss": 1}, until_step=5)
    assert leading([layer, passing], 199) is layer
    view = View(Run(SOUND.write(tmp_path / "run", until=5)))
    assert "and NaN or Inf came at step 120" in verdict(view, [collapse, nan])


def test_warnings_that_say_less_lead_only_alone() -> None:
    drift, dead = finding("distribution-drift", "warning", 5), finding("dead-layer", "warning", 90)
    assert leading([drift, dead], 199) is dead
    assert leading([drift], 199) is drift


def test_a_rule_of_ones_own_is_named(tmp_path: Path) -> None:
    view = View(Run(SOUND.write(tmp_path / "run", until=5)))
    own = finding("too-blue", "warning", 3, where=("sky",))
    assert verdict(view, [own]) == "Warning: too-blue holds in sky since step 3."


@each("rule", WORDS)
def test_no_verdict_is_longer_however_long_the_names(rule: str, tmp_path: Path) -> None:
    names = tuple("x" * 10_000 + str(i) for i in range(3))
    evidence = {"worst": names[0], "smallest_layer": names[0], "largest_layer": names[1], "format": "fp16", "lost": 0.9}
    view = View(Run(SOUND.write(tmp_path / rule, until=5)))
    for where in (names, names[:1]):
        one = finding(rule, where=where, collection="activations", evidence=evidence)
        assert len(verdict(view, [one, finding("nonfinite", since=3, where=names)])) <= LONGEST
    assert len(short(names[0])) <= 48


# -- sound and empty runs


def test_health_says_how_far_and_how_much_is_lost(tmp_path: Path) -> None:
    small = make_story(scale=lambda step: 1.0, gradient_std=constant(2.0**-17)).write(tmp_path / "small")
    share = r"at most ([\d.]+) % of any layer's parameter gradients lost to underflow"
    found = re.fullmatch(rf"Healthy through step 199: {share}\.", summary(small).verdict)
    assert found and 0.1 < float(found[1]) < 1
    assert summary(SOUND.write(tmp_path / "sound")).verdict == (
        "Healthy through step 199: no parameter gradients lost to underflow."
    )


def test_weights_at_rest_are_noted(tmp_path: Path) -> None:
    still = make_story(unmoved=constant(1.0)).write(tmp_path / "run")
    assert summary(still).verdict == (
        "Healthy through step 199, but note: steps leave up to 100 % of the weights of 12 tensors unchanged since step "
        "0."
    )


def test_without_gradients_health_says_so(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "run") as writer:
        writer.write(Scalars(step=0, values={"loss": 1.0}))
    found = summary(tmp_path / "run")
    assert found.verdict == "Healthy through step 0: no findings, but gradients were not recorded."
    assert (found.state, found.first_step, found.last_step, found.samples, found.scale) == ("healthy", 0, 0, 0, None)


def test_an_empty_run_is_empty(tmp_path: Path) -> None:
    RunWriter(tmp_path / "run").close()
    found = summary(tmp_path / "run")
    assert (found.verdict, found.state, found.first_step, found.last_step) == ("Nothing was recorded.", "empty", -1, -1)


# -- the record


def whole(path: Path) -> Summary:
    with RunWriter(path, settings={"lr": float("nan"), "deep": {"x": [1, float("inf")]}}) as writer:
        for step in (3, 4, 5):
            writer.write(Scalars(step=step, values={"loss": 0.5, "scale": 2.0**step}))
        writer.write(Event(step=5, kind="note", message="said"))
    return summary(path)


def test_the_facts_are_those_of_the_run(tmp_path: Path) -> None:
    found = whole(tmp_path / "run")
    assert (found.name, found.first_step, found.last_step, found.loss, found.scale) == ("run", 3, 5, 0.5, 32.0)
    assert found.closed and found.created is not None and found.seconds is not None and found.versions["torch"]
    assert (found.ranks, found.world_size, found.problems, dict(found.dropped)) == (1, 1, (), {})
    assert summary(tmp_path / "run", until=4).scale == 16.0
    sound = summary(SOUND.write(tmp_path / "sound"))
    assert sound.tensors["optimizer"] == 24 and sound.samples == 40
    assert sound.formats["gradients"] == ("fp16",) and sound.formats["weights"] == ("fp32",)


def test_all_of_it_is_json(tmp_path: Path) -> None:
    data = json.loads(json.dumps(whole(tmp_path / "run").to_dict(), allow_nan=False))
    assert data["settings"] == {"lr": "nan", "deep": {"x": [1, "inf"]}}
    fields = set(Summary.__dataclass_fields__)
    assert set(data) == fields
    fault = next(f for f in FAULTS if f.name == "loss is NaN").story.write(tmp_path / "nan")
    told_of = summary(fault)
    data = json.loads(json.dumps(told_of.to_dict(), allow_nan=False))
    assert data["loss"] == "nan" and data["counts"]["alarm"] == 1 and len(data["findings"]) == len(told_of.findings)


def test_findings_that_are_given_count(tmp_path: Path) -> None:
    path = SOUND.write(tmp_path / "run", until=20)
    given = [finding("scale-collapse", since=7, evidence={"from": 2.0, "to": 1.0})]
    found = summary(path, given)
    assert found.state == "alarm" and found.counts == {"alarm": 1, "warning": 0, "info": 0}
    assert "fell from 2^1 to 2^0 at steps 7 to 199" in found.verdict and summary(path, []).state == "healthy"


def test_damage_is_told_of(tmp_path: Path) -> None:
    path = SOUND.write(tmp_path / "run")
    part = next((path / "spectra").glob("*.parquet"))
    part.write_bytes(part.read_bytes()[:100])
    with pytest.warns(RuntimeWarning, match="damaged"):
        found = summary(path)
    assert found.state == "warning" and part.name in found.problems[0]
    assert found.verdict.startswith("Warning: parts of the run are missing or were not measured since step 0, so this")


def test_what_cannot_be_asked_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="Run: expected the folder of a run"):
        summary(tmp_path / "none")
    view = View(Run(SOUND.write(tmp_path / "run", until=5)))
    for ask in (summary, markdown):
        with pytest.raises(ArgumentError, match="summary: expected until=None with a View"):
            ask(view, until=3)


def test_a_loss_that_came_back_late_is_not_said_to_be_up_still(tmp_path: Path) -> None:
    up = {fault.name: fault for fault in FAULTS}["loss stays up and comes back"].story
    whole = summary(up.write(tmp_path / "whole"))
    assert whole.verdict == (
        "Warning: the loss rose from 2.03 at step 90 to 9 and came back only after step 129; look at the batches there."
    )
    assert "did not come back" in summary(tmp_path / "whole", until=125).verdict
    finding = next(f for f in whole.findings if f.rule == "loss-spike")
    assert finding.until_step == 129 and "before it came back" in finding.meaning
