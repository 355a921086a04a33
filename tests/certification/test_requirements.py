"""The registry of requirements: each is a sentence with a source, and is for the functions that it should be for."""

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

import plimsoll as pl
from plimsoll.certification.certificate import SPECIFICATIONS, allowed_saturation, governing
from plimsoll.certification.requirements import REQUIREMENTS
from plimsoll.formats import BLOCKS, ELEMENTS, get
from tests.support.cases import each


@each("name", REQUIREMENTS)
def test_a_requirement_says_what_holds_and_who_asks_for_it(name: str) -> None:
    found = REQUIREMENTS[name]
    assert found.id == name and found.says[0].isupper() and found.says.endswith(".")
    assert found.sections or found.general is not None
    assert found.kinds and (found.check.__doc__ or "").endswith(".")
    assert {*found.sections} | {found.general[0] if found.general else SPECIFICATIONS[0]} <= {*SPECIFICATIONS}


def test_every_specification_is_cited() -> None:
    cited = {known for each_ in REQUIREMENTS.values() for known in each_.sections}
    cited |= {each_.general[0] for each_ in REQUIREMENTS.values() if each_.general is not None}
    assert cited == {*SPECIFICATIONS}


@each(
    ("name", "specification", "saturation"),
    [
        ("fp16", "IEEE 754-2019", (False,)),
        ("bf16", "IEEE 754-2019", (False,)),
        ("e5m7", "IEEE 754-2019", (False,)),
        ("e4m3", "OFP8 1.0", (False, True)),
        ("e5m2", "OFP8 1.0", (False, True)),
        ("e4m3fnuz", "FNUZ", (False, True)),
        ("e2m1", "OCP MX 1.0", (True,)),
    ],
)
def test_the_specification_of_a_format(name: str, specification: str, saturation: tuple[bool, ...]) -> None:
    fmt = get(name)
    assert governing(fmt).name == specification
    assert allowed_saturation(fmt) == saturation


def test_every_format_has_a_specification() -> None:
    assert {governing(fmt).name for fmt in BLOCKS} == {"OCP MX 1.0", "NVFP4"}
    assert {governing(fmt) for fmt in (*ELEMENTS, *BLOCKS)} <= {*SPECIFICATIONS}


@each("kind", ["cast", "pack", "unpack", "matmul", "sum"])
def test_rows_are_those_of_the_registry_in_its_order(kind: str) -> None:
    function = {"cast": torch.float8_e5m2, "pack": torch.float8_e5m2, "unpack": pl.unpack, "matmul": torch.matmul}
    found = pl.certify(function.get(kind, torch.sum), "e5m2", kind=kind)
    names = [name for name, each_ in REQUIREMENTS.items() if kind in each_.kinds]
    shown = [row.requirement for row in found.rows]
    assert shown == [name for name in names if name in shown] and len(shown) >= 5
    assert all(row.source for row in found.rows)


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(Path(__file__).parents[2] / "docs" / "certificates.py"))


def test_the_reference_has_every_requirement(script: dict[str, Any]) -> None:
    assert script["REFERENCE"].read_text("utf-8") == script["reference"](), "run: python docs/certificates.py --table"


def test_the_page_of_certificates_has_every_subject(script: dict[str, Any]) -> None:
    heads = [line[3:] for line in script["PAGE"].read_text("utf-8").splitlines() if line.startswith("## ")]
    assert heads == [script["title"](subject) for subject in script["SUBJECTS"]], "run: python docs/certificates.py"
