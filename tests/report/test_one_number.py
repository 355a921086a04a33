"""One number, one meaning: every surface says the same of the same run, in the same words."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import plimsoll
from plimsoll.cli import app
from plimsoll.diagnosis import View, diagnose
from plimsoll.diagnosis.remedies import is_of_scale, scale_remedy
from plimsoll.diagnosis.underflow_rate import underflow_by_step, underflow_rate
from plimsoll.diagnosis.wording import collection_words
from plimsoll.report import _summary_words as words, html, markdown, summary
from plimsoll.report._server_answers import Answers
from plimsoll.report._summary import Summary
from plimsoll.runs import Run
from tests.diagnosis.faults import FAULTS, Fault

FALLEN = next(fault for fault in FAULTS if fault.name == "scale frozen low after hard batches").story


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("one")
    FALLEN.write(root / "fp16")
    FALLEN.write(root / "again")
    return root


@pytest.fixture(scope="module")
def told(folder: Path) -> Summary:
    return summary(folder / "fp16")


def plain(page: str) -> str:
    """The page's text on one line, powers of two as in a terminal, Markdown's escapes undone."""
    text = re.sub("2<sup>([^<]*)</sup>", lambda m: f"2^{m[1]}".replace("\N{MINUS SIGN}", "-"), page)
    return " ".join(re.sub(r"\\([^\w\s])", r"\1", text.replace("`", "")).split())


@pytest.fixture(scope="module")
def surfaces(folder: Path) -> dict[str, str]:
    runner = CliRunner(env={"COLUMNS": "400"})
    answers = Answers(folder)
    ids = {run.name: run.id for run in answers.live.list.runs(0)}
    try:
        found = {
            "check": runner.invoke(app, ["check", str(folder / "fp16")]).stdout,
            "markdown": markdown(folder / "fp16"),
            "html": html(folder / "fp16", folder / "fp16.html").read_text("utf-8"),
            "api": json.dumps(json.loads(answers.run(ids["fp16"])), ensure_ascii=False),
            "compare": json.dumps(json.loads(answers.compare(ids["fp16"], ids["again"])), ensure_ascii=False),
            "notebook": Run(folder / "fp16")._repr_mimebundle_()["text/html"],
        }
    finally:
        answers.close()
    return {name: plain(text) for name, text in found.items()}


def test_all_surfaces_say_the_same_verdict(surfaces: dict[str, str], told: Summary, folder: Path) -> None:
    for name, text in surfaces.items():
        assert told.verdict in text, name
    data = json.loads(CliRunner().invoke(app, ["check", str(folder / "fp16"), "--format", "json"]).stdout)
    assert (data["verdict"], data["state"]) == (told.verdict, told.state)


def test_all_surfaces_say_the_same_of_each_finding(surfaces: dict[str, str], told: Summary) -> None:
    for finding in told.findings:
        for name in ("check", "markdown", "html", "api"):
            text = surfaces[name]
            when = words.sentence_case(words.when(finding)) if name == "html" else words.when(finding)
            assert words.heading(finding) in text and when in text and finding.advice in text, (name, finding.rule)
            value = dict(words.evidence(finding)).get("Worst")
            assert value is None or value in text, (name, finding.rule)


def test_the_shares_of_the_verdict_are_the_underflow_rates(told: Summary, folder: Path) -> None:
    view = View(Run(folder / "fp16"))
    since = next(f.since_step for f in told.findings if f.rule == "scale-collapse")
    for collection in ("gradients", "activation_gradients"):
        rate = underflow_rate(view, collection, since)
        assert rate is not None and rate.words.split(" %")[0] + " %" in told.verdict
        at, by_step = underflow_by_step(view, collection)
        later = by_step[at >= since]
        assert later.min() <= rate.share <= later.max() and rate.first_step == at[at >= since][0]
        assert f"{rate.first_step} to {rate.last_step}" in told.verdict
        narrow = view.narrow(collection)
        assert narrow is not None
        lost, kept = np.nansum(narrow.lost_of_cell), np.nansum(narrow.cells.total(narrow.cells.nonzero))
        whole = underflow_rate(view, collection)
        assert whole is not None and whole.share == pytest.approx(lost / (lost + kept), rel=1e-9)


@pytest.mark.parametrize("name", ["scale frozen low after hard batches", "one layer x 1e-4", "layers part at 100"])
def test_there_is_one_remedy(name: str, tmp_path: Path) -> None:
    story = next(fault for fault in FAULTS if fault.name == name).story
    view = View(Run(story.write(tmp_path / "run")))
    found = diagnose(view)
    remedy = scale_remedy(view, found)
    assert remedy is not None and remedy.action in summary(view).verdict
    assert {f.advice for f in found if is_of_scale(f)} == {str(remedy)}


def test_severities_and_collections_have_one_name() -> None:
    script = (Path(plimsoll.__file__).parent / "report" / "_page" / "words.js").read_text("utf-8")
    for severity, word in words.STATES.items():
        assert re.search(rf'\b{severity}: \["[^"]*", "{word}"\]', script), severity
    named: dict[str, Any] = dict(re.findall(r'(\w+): "([^"]+ (?:gradients|state))"', script))
    assert set(named) == {"gradients", "activation_gradients", "optimizer"}
    assert all(words.sentence_case(collection_words(name)) == said for name, said in named.items())


@pytest.mark.parametrize("fault", FAULTS[::7], ids=lambda fault: fault.name)
def test_numbers_of_every_rule_are_spelled_alike(fault: Fault, tmp_path: Path) -> None:
    path = fault.story.write(tmp_path / "run")
    text = CliRunner(env={"COLUMNS": "400"}).invoke(app, ["check", str(path)]).stdout
    found = summary(path).findings
    assert found
    for finding in found:
        assert f"{finding.severity:<8}{finding.rule}  {words.when(finding)}" in text
        for label, value in words.evidence(finding):
            assert value in " ".join(text.split()) or label == "Where"
    assert not re.search(r"\d%|\d{5,}|\d\.0\b|e[+-]0\d", "\n".join(text.splitlines()[1:]))
