"""What a notebook shows of a run."""

import sys
from pathlib import Path

import plotly.graph_objects as go
import pytest

from plimsoll.report.single_file.notebook import PLOTLY
from plimsoll.runs import Run, RunWriter
from tests.support.diagnosis.faults import FAULTS
from tests.support.diagnosis.stories import SOUND
from tests.support.report import hostile_run as hostile

FALLEN = next(fault for fault in FAULTS if fault.name == "scale frozen low after hard batches").story


@pytest.fixture(scope="module")
def fallen(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(FALLEN.write(tmp_path_factory.mktemp("notebook") / "exp1"))


def test_the_verdict_and_the_findings(fallen: Run) -> None:
    page = fallen._repr_mimebundle_()["text/html"]
    assert "<strong>Problem: the loss scale fell from" in page and "Alarm: run <code>exp1</code>" in page
    assert page.count("<tr>") == 6 and "all 12 layers: blocks.{0-5}.attn" in page


def test_the_figure_has_the_verdict_for_a_title(fallen: Run) -> None:
    figure = go.Figure(fallen._repr_mimebundle_()[PLOTLY])
    assert figure.layout.title.text.startswith("Problem: the loss scale fell") and len(figure.data) == 2 + 5


def test_the_plain_text_is_the_repr(fallen: Run) -> None:
    assert fallen._repr_mimebundle_()["text/plain"] == repr(fallen)


def test_sound_and_empty_runs(tmp_path: Path) -> None:
    page = Run(SOUND.write(tmp_path / "sound", until=50))._repr_mimebundle_()["text/html"]
    assert "Healthy through step 50" in page and "<table>" not in page
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
