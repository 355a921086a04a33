"""IPython itself shows results as text, alone and in lists."""

import dataclasses
import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from IPython.core.formatters import DisplayFormatter
from torch import nn

import plimsoll as pl
from plimsoll.formats import Plan
from plimsoll.results import NotebookRepr
from tests.support.cases import each
from tests.support.diagnosis.faults import FAULTS

FALLEN = next(fault for fault in FAULTS if fault.name == "scale frozen low after hard batches").story
PACKAGES = ("diagnosis", "emulate", "formats", "fp8", "precision", "rounding", "runs", "scaling", "spectrum", "unit")


def displayed(result: object) -> str:
    data, _ = DisplayFormatter().format(result)
    return data["text/plain"]


@pytest.fixture(scope="module")
def fallen(tmp_path_factory: pytest.TempPathFactory) -> pl.Run:
    return pl.Run(FALLEN.write(tmp_path_factory.mktemp("shown") / "exp1"))


def fault() -> Any:
    x = torch.zeros(4, requires_grad=True)
    found = pl.locate(lambda: torch.log(x - 1).sum())
    assert found is not None
    return found


def recorded(folder: Path) -> pl.Run:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pl.watch(model, optimizer, run=folder, every=1):
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    return pl.Run(folder)


def results(run: pl.Run, fallen: pl.Run) -> list[object]:
    """One of each public result whose text is for people."""
    model, x = nn.Linear(4, 4), torch.ones(2, 4)
    plan = pl.plan(run, target="fp8")
    check = pl.check_plan(plan, run)
    audit = pl.unit.audit(model, x)
    broken = fault()
    with pl.emulate(forward="e4m3") as emulation:
        model(x)
    fit = pl.measure(x).fit("fp16")
    whatif = pl.whatif(run, "e4m3")
    parted = pl.diff(run, run)
    return [
        *pl.diagnose(fallen), whatif, *whatif.rows[:2], plan, check, check.rows[0], parted, broken, broken.source,
        audit, audit.rows[0], audit.worst[0], audit.compare(audit), fit, fit.lost, emulation.operations,
    ]  # fmt: skip


def test_results_show_their_text(fallen: pl.Run, tmp_path: Path) -> None:
    for result in results(recorded(tmp_path / "run"), fallen):
        text = displayed(result)
        assert text == str(result), type(result)
        assert not text.startswith(f"{type(result).__name__}(") and "array(" not in text


def test_results_show_their_text_in_a_list(fallen: pl.Run) -> None:
    findings = pl.diagnose(fallen)
    assert len(findings) > 1
    assert displayed(findings) == "[" + ",\n ".join(str(finding) for finding in findings) + "]"


def test_lines_of_a_text_keep_the_indentation_of_a_list() -> None:
    one = fault()
    first, second, *_ = str(one).split("\n")
    assert displayed([one]).startswith(f"[{first}\n {second}\n")


def test_repr_stays_that_of_the_dataclass(fallen: pl.Run) -> None:
    finding, whatif = pl.diagnose(fallen)[0], pl.whatif(fallen, "e4m3")
    assert repr(finding).startswith("Finding(rule=")
    assert repr(whatif) == f"<WhatIf: e4m3 of gradients in {fallen.path}: {whatif.sentence}>"


@each("package", PACKAGES)
def test_every_public_dataclass_with_a_text_shows_it(package: str) -> None:
    public = vars(importlib.import_module(f"plimsoll.{package}")).values()
    texts = [kind for kind in public if inspect.isclass(kind) and dataclasses.is_dataclass(kind)
             and "__str__" in vars(kind)]  # fmt: skip
    assert [kind for kind in texts if not issubclass(kind, NotebookRepr)] == []


def test_a_subclass_that_is_no_dataclass_shows_its_text() -> None:
    class Plain(NotebookRepr):
        def __str__(self) -> str:
            return "a text"

        def __repr__(self) -> str:
            return "<Plain>"

    assert displayed(Plain()) == "a text"


def test_a_plan_shows_a_line_for_each_module() -> None:
    made = Plan(
        target="fp8", formats={"a": "e4m3", "b": "bf16"}, backward={"a": "e5m2"},
        notes={"b": "it does not fit"}, remarks=("2 modules.",),
    )  # fmt: skip
    assert displayed(made) == str(made) == "2 modules.\na  e4m3/e5m2\nb  bf16  it does not fit"
    assert str(Plan(target="fp8", formats={})) == "A plan for fp8."


def test_objects_of_a_loop_say_what_they_are(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = pl.scaling.DynamicScaler("cpu", init_scale=1024.0)
    assert displayed(scaler) == "<DynamicScaler: scale 2^10>"
    assert displayed(pl.scaling.DynamicScaler("cpu", enabled=False)) == "<DynamicScaler: disabled>"
    emulated = pl.emulate("bf16", forward="e4m3", accumulate="fp16")
    with emulated:
        model(torch.ones(2, 4))
    assert displayed(emulated) == (
        "<Emulation: bf16, forward=e4m3, accumulate=fp16, 1 emulated and 0 native operations>"
    )
    planned = pl.emulate(Plan(target="fp8", formats={"model": "e4m3"}), model=model)
    assert displayed(planned) == "<PlannedEmulation: fp8 of Linear, 0 emulated and 0 native operations>"
    with pl.watch(model, optimizer, run=tmp_path / "run") as watch:
        assert displayed(watch) == f"<Watch: {tmp_path / 'run'}, at step 0>"
    assert displayed(pl.Run(tmp_path / "run")).startswith("<Run: ")
    assert displayed(pl.StepOutcome(stepped=True, scale=2.0)).startswith("StepOutcome(stepped=True, ")
    assert displayed(pl.measure(torch.ones(2))) == repr(pl.measure(torch.ones(2)))
    assert displayed(emulated.operations).startswith("linear ")
    assert displayed(planned.operations) == "No operation ran."
