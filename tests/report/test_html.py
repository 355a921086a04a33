"""The report's file: what is in it, in which order, that it is whole, safe and bounded; without a browser."""

import base64
import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from plimsoll.diagnosis import View, diagnose, whatif
from plimsoll.errors import ArgumentError, MissingExtraError, RunError
from plimsoll.report import html, summary
from plimsoll.report.page.answers import drawn, encoded, run_answer
from plimsoll.report.single_file import embedded_answers
from plimsoll.report.single_file.embedded_answers import (
    SHIFTS,
    Figures,
    Offline,
    _packed,
    collection_of,
    merged,
    offline,
    spectrograms,
)
from plimsoll.runs import Run, RunWriter, Scalars
from tests.support.cases import each
from tests.support.diagnosis.faults import FAULTS
from tests.support.diagnosis.stories import SOUND, constant, make_story, of_layer
from tests.support.report import hostile_run as hostile
from tests.support.report.report_file import ReportFile

LOADS = ("src", "href", "action", "data", "poster", "srcset", "background")


FALLEN = next(fault for fault in FAULTS if fault.name == "scale frozen low after hard batches").story


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return FALLEN.write(tmp_path_factory.mktemp("report") / "exp1")


@pytest.fixture(scope="module")
def page(run: Path) -> ReportFile:
    return ReportFile(html(run, run.parent / "exp1.html"))


def test_the_verdict_comes_first_then_findings_then_all_else(page: ReportFile) -> None:
    assert page.headings[0].startswith("Problem: the loss scale fell from 2^10 to 2")
    sections = [h for h in page.headings if h in ("Findings", "What if", "The record")]
    assert sections == ["Findings", "What if", "The record"]
    for fact in ("0 to 199", "FP16", "84", "Loss scale at step 199", "closed"):
        assert fact in page.text
    assert page.text.count("What to do") == 5


def test_findings_are_the_runs_each_with_its_figure(run: Path, page: ReportFile) -> None:
    found = diagnose(run)
    articles = [a for tag, a in page.elements if tag == "article"]
    assert [a["class"] for a in articles] == [f"finding {f.severity}" for f in found]
    for finding in found:
        assert finding.rule in page.text and finding.advice.split("2^")[0] in page.text
    answers = page.answers
    of_finding = {values["finding"]: name for name, values, _ in answers["figures"] if "finding" in values}
    same = answers["run"]["same_figure"]
    assert len(same) == len(found) and all(
        of_finding[i] == found[i].figure for i, first in enumerate(same) if first == i
    )
    assert all(first is not None and first <= i for i, first in enumerate(same))


def test_figures_have_words_and_no_theme_of_their_own(page: ReportFile) -> None:
    bodies = page.answers["bodies"]
    assert len(bodies) > 10
    for body in bodies:
        assert body["layout"]["title"]["text"] and 100 < body["layout"].get("height", 380) < 2000
        assert "template" not in body["layout"]
    assert set(page.answers["templates"]) == {"light", "dark"}


def test_nothing_is_loaded_and_only_its_own_scripts_run(page: ReportFile) -> None:
    policy = next(a["content"] for tag, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'; script-src 'sha256-") and "connect" not in policy
    hashes = [f"'sha256-{base64.b64encode(hashlib.sha256(t.encode()).digest()).decode()}'" for t in page.code]
    assert re.findall(r"'sha256-[^']*'", policy) == hashes and len(hashes) == 3
    for tag, attributes in page.elements:
        for name in LOADS:
            assert (attributes.get(name) or "#").startswith("#"), (tag, attributes)
        assert not any(name.startswith("on") for name in attributes)
        assert tag not in ("link", "iframe", "object", "embed", "base")


def test_a_sound_run_and_one_of_an_earlier_step(run: Path, tmp_path: Path) -> None:
    early = ReportFile(html(run, tmp_path / "early.html", until=50, title="As it was"))
    assert early.headings[0] == "Healthy through step 50: no parameter gradients lost to underflow."
    assert "No findings." in early.text and "As it was" in early.text
    assert ReportFile(html(View(Run(run), 50), tmp_path / "view.html")).headings[0] == early.headings[0]


def test_findings_that_are_given_are_those_told(run: Path, tmp_path: Path) -> None:
    only = [f for f in diagnose(run) if f.rule == "underflow-rising"]
    given = ReportFile(html(run, tmp_path / "page.html", findings=only))
    assert (
        given.headings[0].startswith("Problem: the underflow of parameter gradients")
        and given.text.count("What to do") == 1
    )


# -- runs that lack something


def test_an_empty_run(tmp_path: Path) -> None:
    RunWriter(tmp_path / "run").close()
    page = ReportFile(html(tmp_path / "run", tmp_path / "page.html"))
    assert page.headings == ["Nothing was recorded.", "Findings", "The record", "Keys"]
    assert page.answers["bodies"] == [] and page.answers["run"]["whatif"] is None


def test_a_run_of_scalars_only_and_one_of_one_step(tmp_path: Path) -> None:
    with RunWriter(tmp_path / "scalars") as writer:
        writer.write(Scalars(step=0, values={"loss": 1.0}))
    page = ReportFile(html(tmp_path / "scalars", tmp_path / "page.html"))
    assert "What if" not in page.headings and [d["figure"] for d in page.answers["run"]["pictures"]] == [
        "loss_and_scale"
    ]
    page = ReportFile(html(SOUND.write(tmp_path / "one", until=0), tmp_path / "page.html"))
    assert page.headings[0].startswith("Healthy through step 0") and "What if" in page.headings


def test_a_damaged_run_says_what_is_missing(tmp_path: Path) -> None:
    path = SOUND.write(tmp_path / "run")
    part = next((path / "spectra").glob("*.parquet"))
    part.write_bytes(b"PAR1" + bytes(100))
    with pytest.warns(RuntimeWarning, match="damaged"):
        page = ReportFile(html(path, tmp_path / "page.html"))
    assert "Problems" in page.headings and part.name in page.text


# -- the file


def test_a_path_that_cannot_be_written_is_refused(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArgumentError, match="report: expected the path of a file; got .*, a folder. Name a file in it"):
        html(run, tmp_path)
    with pytest.raises(ArgumentError, match=r"report: expected a file that ends in .html.*; got .*x\.pdf"):
        html(run, tmp_path / "x.pdf")
    with pytest.raises(ArgumentError, match="report: expected a path in a folder that exists; got .*/no/page.html"):
        html(run, tmp_path / "no" / "page.html")
    with pytest.raises(RunError, match="Run: expected the folder of a run"):
        html(tmp_path / "none", tmp_path / "page.html")
    with pytest.raises(ArgumentError, match="report: expected until=None with a View"):
        html(View(Run(run)), tmp_path / "page.html", until=3)
    assert list(tmp_path.iterdir()) == []


@each("wrong", [None, 3, b"x", [], {}, "", "a\0b"])
def test_what_is_no_path_of_a_report_is_refused_in_words(wrong: object, run: Path) -> None:
    with pytest.raises(ArgumentError, match=r"report: expected the path of a file.*; got .*\. Name a file\."):
        html(run, wrong)  # pyright: ignore[reportArgumentType]


def test_findings_are_a_list(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="summary: expected findings to be a list; got findings=3"):
        html(run, tmp_path / "page.html", findings=3)  # pyright: ignore[reportArgumentType]


def test_the_file_is_there_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RunWriter(tmp_path / "run") as writer:
        writer.write(Scalars(step=0, values={"loss": 1.0}))
    target = tmp_path / "page.html"
    target.write_text("the one before")

    def full(source: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("plimsoll.runs.storage.atomic_files.rename", full)
    with pytest.raises(RunError, match="report: expected a file that can be written; got .*No space left"):
        html(tmp_path / "run", target)
    assert target.read_text("utf-8") == "the one before" and len(list(tmp_path.iterdir())) == 2


def test_a_missing_extra_is_named(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    with pytest.raises(MissingExtraError, match=r"Install it: pip install 'plotly>=6.0'$") as caught:
        html(run, tmp_path / "page.html")
    assert caught.value.__cause__ is not None and not (tmp_path / "page.html").exists()


def test_a_newer_schema_is_refused(tmp_path: Path) -> None:
    path = SOUND.write(tmp_path / "run", until=5)
    manifest = json.loads((path / "run.json").read_text("utf-8"))
    (path / "run.json").write_text(json.dumps(manifest | {"schema": 99}))
    with pytest.raises(RunError, match="99"):
        html(path, tmp_path / "page.html")


def test_a_summary_needs_no_extra(run: Path) -> None:
    code = (
        "import sys, plimsoll.report as r; r.summary(sys.argv[1]).to_dict(); r.markdown(sys.argv[1]); "
        "print(*({'plotly', 'fastapi'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code, str(run)], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == ""


# -- hostile names


def test_names_are_text_and_nothing_else(tmp_path: Path) -> None:
    path = html(hostile.write(tmp_path / "run"), tmp_path / "page.html", title="</title><script>alert(8)</script>")
    page = ReportFile(path)
    assert len(page.code) == 3 and len(page.scripts) == 4
    assert not any(tag in ("img", "b", "base", "link") for tag, _ in page.elements)
    assert len([tag for tag, _ in page.elements if tag == "style"]) == 1
    assert len([tag for tag, _ in page.elements if tag == "svg"]) == 0
    for name in ("</script><script>alert(1)</script>", "<img src=x onerror=alert(2)>", "{{ 7 * 7 }}{% raw %}"):
        assert name in page.text
    assert "&lt;script&gt;alert(6)&lt;/script&gt;" in page.text  # as it was written, entities and all
    assert "</title><script>alert(8)</script>" in page.text
    assert len(page.answers["bodies"]) > 5 and path.stat().st_size < 3_000_000
    assert not set(page.text) & set("\u202e\u2028\u2029\x1b\x00")


# -- bounds


def test_figures_stay_within_their_budget(run: Path) -> None:
    view = View(Run(run))
    found = spectrograms(Figures(view, ()), view, (), [])
    assert sum(map(len, found.values())) == sum(len(set(names)) for names in found.values()) == 36
    tight = Figures(view, tuple(diagnose(view)))
    tight.bytes = embedded_answers.BUDGET_BYTES
    assert spectrograms(tight, view, diagnose(view), []) == {} and tight.bodies == []


def test_tensors_that_findings_name_come_first(run: Path) -> None:
    view = View(Run(run))
    found = diagnose(view)
    listed = list(embedded_answers._ordered(view, found, [("gradients", "blocks.5.mlp.weight"), ("gradients", "none")]))
    assert listed[0] == (found[1].collection, found[1].where[0])
    assert ("gradients", "blocks.5.mlp.weight") in listed[:8] and ("gradients", "none") not in listed
    assert len(listed) == len(set(listed)) and {c for c, _ in listed} == set(view.run.tensors)


def test_the_same_figure_is_there_once(tmp_path: Path) -> None:
    figures = Figures(View(Run(SOUND.write(tmp_path / "run", until=20))), ())
    assert figures.add("loss_and_scale", {}) == figures.add("loss_and_scale", {}) == 0
    assert len(figures.bodies) == 1 and len(figures.asked) == 2


def test_answers_are_those_of_the_live_page(run: Path, page: ReportFile) -> None:
    view = View(Run(run))
    findings = summary(view).findings
    answers = page.answers
    for name, values, index in answers["figures"]:
        if "finding" not in values:
            body = json.loads(drawn(view, name, {k: str(v) for k, v in values.items()}, findings))["figure"]
            del body["layout"]["template"]
            assert answers["bodies"][index] == body, name
    live = json.loads(encoded(run_answer(view, summary(view))))
    for name in ("summary", "shown", "collection_labels", "steps"):
        assert answers["run"][name] == live[name], name
    drawings = [(d["figure"], d["arguments"]) for d in answers["run"]["pictures"]]
    assert all(drawing in [(d["figure"], d["arguments"]) for d in live["pictures"]] for drawing in drawings)


# -- what-if without Python

WIDE = make_story(
    scale=lambda step: 1024.0 if step < 100 else 3000.0,
    gradient_std=of_layer("blocks.2.attn", constant(2.0**-35), constant(2.0**-1)),
)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> View:
    return View(Run(WIDE.write(tmp_path_factory.mktemp("whatif") / "run")))


@pytest.fixture(scope="module")
def answers(wide: View) -> list[Offline]:
    return offline(wide, "gradients")


@each("shift", [-20, -3, 0, 4, 11, 17, 30])
def test_answers_lie_between_those_of_whatif(wide: View, answers: list[Offline], shift: int) -> None:
    at = shift - SHIFTS[0]
    for item in answers:
        below, here, above = (whatif(wide, item.answer.format, shift + d) for d in (-1, 0, 1))
        rows = [{row.name: row for row in w.rows} for w in (below, here, above)]
        for i, name in enumerate(item.names):
            least, most = rows[2][name].fit.lost.low, rows[0][name].fit.lost.high
            assert least - 1e-9 <= item.lost[i, at] <= most + 1e-9, (item.answer.format, name)
            least, most = rows[0][name].fit.overflow.low, rows[2][name].fit.overflow.high
            assert least - 1e-9 <= item.overflow[i, at] <= most + 1e-9, (item.answer.format, name)
            assert item.windows[i] == rows[1][name].window
        assert item.overall["lost"][at] == pytest.approx(here.overall.fit.lost.estimate, abs=0.01)
        assert item.overall["overflow"][at] == pytest.approx(here.overall.fit.overflow.estimate, abs=0.01)


def test_every_value_is_counted_once(wide: View) -> None:
    cells = wide.cells("gradients")
    assert cells is not None
    few = merged(cells)
    assert len(few) < len(cells) and few.nonzero.sum() == cells.nonzero.sum()
    layers = [np.bincount(c.layer, weights=c.nonzero) for c in (few, cells)]
    assert (layers[0] == layers[1]).all()


def test_a_scale_at_every_step_costs_no_more(wide: View, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = wide.cells("activation_gradients")  # these are stored at the loss scale
    assert cells is not None and len(merged(cells)) == 24
    monkeypatch.setattr("plimsoll.report.single_file.embedded_answers._GROUPS", 20)
    few = merged(cells)
    assert len(few) == 12 and (few.scale == 1).all() and few.nonzero.sum() == cells.nonzero.sum()
    assert float(np.nanmax(few.column("absmax"))) == pytest.approx(float(np.nanmax(cells.true_absmax)))


def test_what_it_says_beside_the_numbers(answers: list[Offline]) -> None:
    fp16, bf16 = answers[:2]
    assert fp16.sentence == "No scale works for FP16 at any step." and bf16.best == 0
    assert fp16.best == fp16.answer.shift and "survived the run's own format" in fp16.censored


def test_layers_beyond_the_most_are_counted(wide: View, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plimsoll.report.single_file.embedded_answers.LAYERS", 5)
    (item,) = offline(wide, "gradients", ["e4m3"])
    assert (len(item.names), item.left_out) == (5, 7) and "blocks.2.attn.weight" in item.names


def test_shares_in_16_bits_hide_no_loss() -> None:
    packed = np.frombuffer(
        base64.b64decode(_packed(np.array([[0.0, 0.0, 1e-9, 0.5, 1.0]]), np.array([[0.0, 0.1, 0.1, 1.0, 1.0]]))), "<u2"
    )
    assert packed.tolist() == [0, 1, 2, 32768, 65535]


def test_gradients_are_asked_about_or_what_there_is(tmp_path: Path, wide: View) -> None:
    assert collection_of(wide) == "gradients"
    RunWriter(tmp_path / "run").close()
    assert (
        collection_of(View(Run(tmp_path / "run"))) is None and offline(View(Run(tmp_path / "run")), "gradients") == []
    )
