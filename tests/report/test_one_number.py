"""One number, one meaning: every surface says the same of the same run, in the same words."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import plimsoll
from plimsoll import report
from plimsoll.cli import app
from plimsoll.diagnosis import View, whatif
from plimsoll.diagnosis.estimates.underflow_rate import underflow_by_step, underflow_rate
from plimsoll.diagnosis.estimates.usable_scales import scales
from plimsoll.diagnosis.finding import layer_name
from plimsoll.diagnosis.rules.loss_scale import scale_remedy
from plimsoll.diagnosis.rules.registry import rule_of
from plimsoll.diagnosis.what_if.result import estimate_words, interval_words
from plimsoll.report import html, markdown, summary
from plimsoll.report.live.server.answers import Api
from plimsoll.report.verdicts import summary_text
from plimsoll.report.verdicts.run_summary import Summary
from plimsoll.report.verdicts.verdict_sentence import leading
from plimsoll.runs import Event, Run, RunWriter
from plimsoll.text import capital
from plimsoll_lab.result import Training
from tests.support.cases import each
from tests.support.diagnosis.faults import FAULTS, Fault
from tests.support.diagnosis.recorded import ONE_WORKER, Recorded
from tests.support.diagnosis.stories import Story
from tests.support.report.report_file import ReportFile

pytestmark = ONE_WORKER
FALLEN = next(fault for fault in FAULTS if fault.name == "scale frozen low after hard batches").story


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("one")
    FALLEN.write(root / "fp16")
    FALLEN.write(root / "again")
    return root


@pytest.fixture(scope="module")
def summary_shown(folder: Path) -> Summary:
    return summary(folder / "fp16")


def plain(page: str) -> str:
    """The page's text on one line, powers of two as in a terminal, Markdown's escapes undone."""
    text = re.sub("2<sup>([^<]*)</sup>", lambda m: f"2^{m[1]}".replace("\N{MINUS SIGN}", "-"), page)
    return " ".join(re.sub(r"\\([^\w\s])", r"\1", text.replace("`", "")).split())


@pytest.fixture(scope="module")
def surfaces(folder: Path) -> dict[str, str]:
    runner = CliRunner(env={"COLUMNS": "400"})
    answers = Api(folder)
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


def test_all_surfaces_say_the_same_verdict(surfaces: dict[str, str], summary_shown: Summary, folder: Path) -> None:
    for name, text in surfaces.items():
        assert summary_shown.verdict in text, name
    data = json.loads(CliRunner().invoke(app, ["check", str(folder / "fp16"), "--json"]).stdout)
    assert (data["verdict"], data["state"]) == (summary_shown.verdict, summary_shown.state)


def test_all_surfaces_say_the_same_of_each_finding(surfaces: dict[str, str], summary_shown: Summary) -> None:
    for finding in summary_shown.findings:
        for name in ("check", "markdown", "html", "api"):
            text = surfaces[name]
            when = capital(summary_text.when(finding)) if name == "html" else summary_text.when(finding)
            assert summary_text.heading(finding) in text and when in text and finding.advice in text, (
                name,
                finding.rule,
            )
            value = dict(summary_text.evidence(finding)).get("Worst")
            assert value is None or value in text, (name, finding.rule)


def test_the_shares_of_the_verdict_are_the_underflow_rates(summary_shown: Summary, folder: Path) -> None:
    view = View(Run(folder / "fp16"))
    since = next(f.since_step for f in summary_shown.findings if f.rule == "scale-collapse")
    for collection in ("gradients", "activation_gradients"):
        rate = underflow_rate(view, collection, since)
        assert rate is not None and rate.words.split(" %")[0] + " %" in summary_shown.verdict
        at, by_step = underflow_by_step(view, collection)
        later = by_step[at >= since]
        assert later.min() <= rate.share <= later.max() and rate.first_step == at[at >= since][0]
        assert f"{rate.first_step} to {rate.last_step}" in summary_shown.verdict
        narrow = view.narrow(collection)
        assert narrow is not None
        lost, kept = np.nansum(narrow.lost_of_cell), np.nansum(narrow.cells.total(narrow.cells.nonzero))
        whole = underflow_rate(view, collection)
        assert whole is not None and whole.share == pytest.approx(lost / (lost + kept), rel=1e-9)


@each("name", ["scale frozen low after hard batches", "one layer x 1e-4", "layers part at 100"])
def test_there_is_one_remedy(name: str, recorded: Callable[[Story], Recorded]) -> None:
    summary_shown = recorded(next(fault for fault in FAULTS if fault.name == name).story)
    view, found = View(Run(summary_shown.path)), summary_shown.found
    remedy = scale_remedy(view, found)
    assert remedy is not None and remedy.action in summary(view).verdict
    assert {f.advice for f in found if rule_of(f).needs_other_scale(f)} == {str(remedy)}


def test_a_scale_to_raise_to_is_one_that_the_figure_shows_to_work_at_all_steps(
    recorded: Callable[[Story], Recorded],
) -> None:
    summary_shown = recorded(next(fault for fault in FAULTS if fault.name == "one layer x 1e-4").story)
    view = View(Run(summary_shown.path))
    remedy = scale_remedy(view, summary_shown.found)
    subtitle = plain(report.scale_window(view).layout.title.subtitle.text)
    low, high = re.search(r"(2\^\S+) to (2\^\S+) work at all steps", subtitle).groups()
    assert remedy is not None and remedy.action == f"raise the loss scale to between {low} and {high}"


def test_severities_have_one_name() -> None:
    script = (Path(plimsoll.__file__).parent / "report" / "page" / "files" / "js" / "words.js").read_text("utf-8")
    for severity, word in summary_text.STATES.items():
        assert re.search(rf'\b{severity}: \["[^"]*", "{word}"\]', script), severity


@each("fault", FAULTS[::7], ids=lambda fault: fault.name)
def test_numbers_of_every_rule_are_spelled_alike(fault: Fault, recorded: Callable[[Story], Recorded]) -> None:
    path = recorded(fault.story).path
    text = CliRunner(env={"COLUMNS": "400"}).invoke(app, ["check", str(path)]).stdout
    found = summary(path).findings
    assert found
    for finding in found:
        assert f"{finding.severity:<8}{finding.rule}  {summary_text.when(finding)}" in text
        for label, value in summary_text.evidence(finding):
            assert value in " ".join(text.split()) or label == "Where"
    assert not re.search(r"\d%|(?<!\.)\b\d{5,}|\d\.0\b|e[+-]0\d", "\n".join(text.splitlines()[1:]))


# -- the scales that work, and what is lost at one


@pytest.fixture(scope="module")
def answers(folder: Path) -> Iterator[Api]:
    found = Api(folder)
    yield found
    found.close()


@each("fmt", ["fp16", "bf16", "e4m3"])
def test_there_is_one_window_of_scales(folder: Path, answers: Api, fmt: str) -> None:
    view = View(Run(folder / "fp16"))
    found = whatif(view, fmt)
    window = found.overall.window
    assert report.scale_curve(view, fmt).layout.meta["window"] == (None if window is None else list(window))
    about = plain(report.scale_window(view, fmt).layout.title.subtitle.text)
    asked = json.loads(answers.whatif("fp16", {"format": fmt}))
    assert asked["overall"]["window"] == (None if window is None else list(window))
    if window is None:
        assert "work at all steps" not in about
        return
    assert about.startswith(f"{scales(*window)} work at all steps")
    # The layers that set it are those whose own windows end there, and what-if's rows have the same ends.
    needs, first = re.findall(r"([\w.]+) (?:needs|overflows above) 2", about)
    own = {layer_name(row.name): row.window for row in found.rows if row.window is not None}
    assert own[needs][0] == window[0] and own[first][1] == window[1]


def test_what_a_format_lost_itself_raises_the_scale_that_it_needs(folder: Path) -> None:
    """At the scales below, the run's own underflow proves that values are lost: they cannot be said to work."""
    view = View(Run(folder / "fp16"))
    window = whatif(view, "fp16").overall.window
    assert window is not None and underflow_rate(view, "gradients", 100) is not None
    used = float(view.scalar("scale")[1][-1])
    assert window[0] > np.log2(used)


def test_what_if_says_the_same_in_the_report_the_terminal_and_the_page(
    surfaces: dict[str, str], folder: Path, answers: Api
) -> None:
    for fmt in ("fp16", "bf16", "e4m3", "e5m2"):
        found = whatif(folder / "fp16", fmt)
        asked = json.loads(answers.whatif("fp16", {"format": fmt}))
        assert (asked["sentence"], asked["best_shift"]) == (found.sentence, found.shift)
        lost = interval_words(found.overall.fit.lost)
        row = re.search(rf"<td>{fmt.upper()}</td>(.*?)</tr>", surfaces["html"])
        assert row is not None and f">2^{found.shift}</td>" in row[1] and f">{lost}</td>" in row[1], fmt
        terminal = (
            CliRunner(env={"COLUMNS": "400"}).invoke(app, ["whatif", str(folder / "fp16"), "--format", fmt]).stdout
        )
        assert found.sentence in terminal and f"at 2^{found.shift}" in terminal
    assert "about 0 % (0 % to" in surfaces["html"]  # what FP16 has lost is in the bounds


def test_tensors_of_a_what_if_stand_in_one_order(surfaces: dict[str, str], folder: Path, answers: Api) -> None:
    found = whatif(folder / "fp16", "fp16").rows
    asked = json.loads(answers.whatif("fp16", {"format": "fp16"}))["rows"]
    assert [row["name"] for row in asked] == [row.name for row in found]
    table = surfaces["html"].split("tensors, the worst first</h3>")[1].split("</table>")[0]
    assert re.findall(r"<tr><td>(.*?)</td><td>(.*?)</td>", table) == [
        (row.name, estimate_words(row.fit.lost)) for row in found[:15]
    ]


# -- facts, events, findings


def test_facts_have_one_name_and_one_value(surfaces: dict[str, str], summary_shown: Summary, answers: Api) -> None:
    asked = json.loads(answers.run("fp16"))["shown"]
    facts = [list(fact) for fact in summary_text.facts(summary_shown)]
    assert asked["facts"] == facts and {"Steps", "Samples", "Started", "Record"} <= {name for name, _ in facts}
    for name, value in facts:
        assert (
            f"<dt>{name}</dt><dd>{value}</dd>" in surfaces["html"] and f"| {name} | {value} |" in surfaces["markdown"]
        )


def test_events_stand_in_the_same_columns_and_order(tmp_path: Path) -> None:
    path = FALLEN.write(tmp_path / "run")
    with RunWriter(path) as writer:
        writer.write(
            Event(step=60, kind="skip", message="skipped at scale 2^10", details={"scale": 1024.0, "steps": []})
        )
        writer.write(Event(step=70, kind="trigger", message="the loss rose", details={"loss": 2.26279, "count": 12288}))
    found = Api(tmp_path)
    try:
        asked = json.loads(found.run("run"))["shown"]["events"]
    finally:
        found.close()
    page = plain(html(path, tmp_path / "page.html").read_text("utf-8")).split("<h2>Events</h2>")[1].split("</table>")[0]
    assert re.findall('<th scope="col"[^>]*>(.*?)</th>', page) == ["Step", "What", "Message", "When"]
    rows = [
        [re.sub("<[^>]*>", " ", cell).split() for cell in re.findall("<td[^>]*>(.*?)</td>", row)]
        for row in page.split("<tr>")[2:]
    ]
    assert rows == [[step.split(), kind.split(), f"{message} {details}".split(), at.split()]
                    for step, kind, message, details, at in asked]  # fmt: skip
    assert [row[0] for row in asked] == ["199", "70", "60"]  # the run was resumed at its last step
    assert [row[3] for row in asked[1:]] == ["loss: 2.26, count: 12,288", "scale: 2^10"]
    assert all(row[4].endswith(" UTC") for row in asked)


def test_the_verdict_is_about_the_finding_that_stands_first(recorded: Callable[[Story], Recorded]) -> None:
    for fault in FAULTS[::5]:
        path, found = recorded(fault.story).path, recorded(fault.story).found
        view = View(Run(path))
        if all(finding.severity == "info" for finding in found):
            continue
        lead, listed = leading(found, view.last_step), summary(path).findings
        assert repr(listed[0]) == repr(lead) and sorted(map(repr, listed)) == sorted(map(repr, found))
        checked = json.loads(CliRunner().invoke(app, ["check", str(path), "--json"]).stdout)["findings"]
        assert [each["rule"] for each in checked] == [finding.rule for finding in listed], fault.name


def test_the_report_draws_no_figure_twice(summary_shown: Summary, folder: Path, tmp_path: Path) -> None:
    answers = ReportFile(html(folder / "fp16", tmp_path / "page.html")).answers
    bodies = [json.dumps(body) for body in answers["bodies"]]
    titles = [body["layout"]["title"]["text"] for body in answers["bodies"]]
    assert len(bodies) == len(set(bodies)) and titles.count("Loss and loss scale") == 1
    losses = [i for i, finding in enumerate(summary_shown.findings) if finding.figure == "loss_and_scale"]
    assert {answers["run"]["same_figure"][i] for i in losses} == {losses[0]}


def test_findings_name_layers_as_the_heat_maps_do(summary_shown: Summary, folder: Path) -> None:
    view = View(Run(folder / "fp16"))
    of_gradients = [finding for finding in summary_shown.findings if finding.collection == "gradients"]
    assert of_gradients
    for finding in of_gradients:
        rows = set(report.heatmap(view, "underflow", "gradients").data[0].y)
        shown = summary_text.shown_as(finding)["names"]
        assert isinstance(shown, list) and {re.sub("<[^>]*>", "", row) for row in rows} >= set(shown)


def test_verdict_means_one_thing_in_json(summary_shown: Summary, folder: Path) -> None:
    training = Training(
        name="a", title="A", run=folder, numbers={}, outcome="trains on", good=True, verdict=summary_shown.verdict
    )
    data = training.to_dict()
    assert (data["verdict"], data["outcome"]) == (summary_shown.to_dict()["verdict"], "trains on")
