"""What a notebook shows of a run."""

import sys
from pathlib import Path

import plotly.graph_objects as go
import pytest

import plimsoll as pl
from plimsoll.formats import Plan
from plimsoll.report._notebook import PLOTLY
from plimsoll.runs import Run, RunWriter
from tests.diagnosis.faults import FAULTS
from tests.diagnosis.stories import SOUND
from tests.report import hostile

FALLEN = next(fault for fault in FAULTS if fault.name == "scale frozen low after hard batches").story


@pytest.fixture(scope="module")
def fallen(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(FALLEN.write(tmp_path_factory.mktemp("notebook") / "exp1"))


def test_the_verdict_and_the_findings(fallen: Run) -> None:
    page = fallen._repr_mimebundle_()["text/html"]
    assert "<strong>Stop: the loss scale collapsed at step 60" in page and "Alarm: run <code>exp1</code>" in page
    assert page.count("<tr>") == 6 and "blocks.{0-5}.attn.weight" in page


def test_the_figure_has_the_verdict_for_a_title(fallen: Run) -> None:
    figure = go.Figure(fallen._repr_mimebundle_()[PLOTLY])
    assert figure.layout.title.text.startswith("Stop: the loss scale collapsed") and len(figure.data) == 2 + 5


def test_the_plain_text_is_the_repr(fallen: Run) -> None:
    assert fallen._repr_mimebundle_()["text/plain"] == repr(fallen)


def test_sound_and_empty_runs(tmp_path: Path) -> None:
    page = Run(SOUND.write(tmp_path / "sound", until=50))._repr_mimebundle_()["text/html"]
    assert "Healthy up to step 50" in page and "<table>" not in page
    RunWriter(tmp_path / "empty").close()
    assert "Nothing was recorded" in Run(tmp_path / "empty")._repr_mimebundle_()["text/html"]


def test_without_plotly_the_page_alone(fallen: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    assert set(fallen._repr_mimebundle_()) == {"text/plain", "text/html"}


def test_names_are_names(tmp_path: Path) -> None:
    page = Run(hostile.write(tmp_path / "run"))._repr_mimebundle_()["text/html"]
    assert "<script" not in page and "<img" not in page and "<svg" not in page and "<style" not in page
    assert len(page) < 20_000


class Printer:
    """What IPython hands to `_repr_pretty_`, as far as it is used."""

    def __init__(self) -> None:
        self.said = ""

    def text(self, words: str) -> None:
        self.said += words


def test_answers_show_their_words_and_not_their_arrays(fallen: Run) -> None:
    whatif, (finding, *_) = pl.whatif(fallen, "e4m3"), pl.diagnose(fallen)
    for answer in (whatif, finding, pl.diff(fallen, fallen)):
        printer = Printer()
        answer._repr_pretty_(printer, False)
        assert printer.said == str(answer) and "array(" not in printer.said
    assert repr(whatif) == f"<WhatIf: e4m3 of gradients in {fallen.path}: {whatif.sentence}>"


def test_a_plan_shows_a_line_for_each_module() -> None:
    made = Plan(
        target="fp8", formats={"a": "e4m3", "b": "bf16"}, backward={"a": "e5m2"},
        notes={"b": "it does not fit"}, remarks=("2 modules.",),
    )  # fmt: skip
    printer = Printer()
    made._repr_pretty_(printer, False)
    assert printer.said == str(made) == "2 modules.\na  e4m3/e5m2\nb  bf16  it does not fit"
    assert str(Plan(target="fp8", formats={})) == "A plan for fp8."
