"""The sheet as text, JSON, Markdown and HTML: it has everything, and shows what comes from others as text."""

import copy
import json
import math
import pickle
from html.parser import HTMLParser

import pytest
import torch

import plimsoll as pl
from plimsoll.certification import Certificate, Counterexample, Inferred, Row
from plimsoll.certification.certificate import written
from plimsoll.results import as_data
from tests.support.certification.casts import TableCast


@pytest.fixture(scope="module")
def ill() -> Certificate:
    def kernel_of_somebody(x: torch.Tensor) -> torch.Tensor:
        if not x.numel():
            raise ValueError("<script>alert(1)</script> | \x1b[31m*bold*")
        return TableCast(nan=0.0)(x)

    return pl.certify(kernel_of_somebody, "e4m3")


def test_the_parts_of_a_certificate(ill: Certificate) -> None:
    assert (ill.format, ill.kind, ill.device, ill.conforms) == ("e4m3", "cast", "cpu", False)
    assert ill.function.endswith("ill.kernel_of_somebody")
    assert [row.requirement for row in ill.deviations] == ["nan", "empty"]
    assert ill.verdict.endswith("(cast, e4m3) deviates in 2 of 18 rows: nan, empty.")
    assert ill.row("nan").source == "OFP8 1.0, 5.2, table 3"
    with pytest.raises(KeyError):
        ill.row("no such row")
    assert ill.versions["torch"] == torch.__version__ and ill.calls > 20 and ill.seconds > 0


def test_facts_are_found_by_name_and_as_attributes(ill: Certificate) -> None:
    assert ill.inferred.nan == ill.inferred["nan"] == "zero"
    assert {*ill.inferred} >= {"rounding", "saturate", "subnormals", "negative_zero", "infinities"}
    with pytest.raises(AttributeError, match="no fact 'accumulate'"):
        _ = ill.inferred.accumulate
    assert pickle.loads(pickle.dumps(ill)).to_dict() == ill.to_dict()
    assert copy.deepcopy(ill.inferred) == ill.inferred
    assert repr(Inferred({"a": 1})) == "Inferred({'a': 1})"


def test_json_has_every_field(ill: Certificate) -> None:
    data = json.loads(json.dumps(ill.to_dict(), allow_nan=False))
    assert set(data) == {
        "function", "format", "kind", "device", "date", "versions", "conforms", "verdict", "inferred", "rows",
        "counterexamples", "not_tried", "notes", "calls", "seconds",
    }  # fmt: skip
    assert len(data["rows"]) == len(ill.rows)
    assert set(data["rows"][0]) == set(Row.__dataclass_fields__)
    assert data["counterexamples"][0] == {
        "requirement": "nan", "input": "nan", "expected": "nan", "got": 0.0, "note": "bfloat16 0x7fc0",
    }  # fmt: skip


def test_the_text_has_every_row_within_its_width(ill: Certificate) -> None:
    lines = str(ill).splitlines()
    assert all(len(line) <= 100 for line in lines) and "\x1b" not in str(ill)
    joined = " ".join(str(ill).split())
    assert all(row.requirement in joined for row in ill.rows)
    assert "input nan (bfloat16 0x7fc0), expected nan, got 0" in joined
    assert joined.index("deviates nan") < joined.index("conforms exact")
    assert "OFP8 1.0: conforms in 9 rows, deviates in 1 (nan)" in joined


def test_markdown_shows_texts_as_they_are(ill: Certificate) -> None:
    table = [line for line in ill.to_markdown().splitlines() if line.startswith("| ")]
    row = next(line for line in table if "`empty`" in line)
    assert r"\<script\>" in row and r"\*bold\*" in row and r"\|" in row and "\x1b" not in row
    assert all(line.replace(r"\|", "").count("|") in (3, 6) for line in table)


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


def test_html_is_one_page_and_runs_nothing(ill: Certificate) -> None:
    parser = _Tags()
    parser.feed(ill.to_html())
    assert parser.tags[0] == "html" and not {"script", "link", "img"} & {*parser.tags}
    assert "<script>alert(1)</script>" in parser.text
    assert all(row.requirement in parser.text for row in ill.rows)
    assert ill._repr_html_() in ill.to_html()


def test_a_conforming_one_says_so() -> None:
    found = pl.certify(torch.float8_e5m2, "e5m2")
    assert found.verdict == "torch.float8_e5m2 (cast, e5m2) conforms in all 19 rows that were tried."
    assert found.counterexamples == () and "conforms in all" in found.to_html()


def test_values_are_written_in_full() -> None:
    assert [written(v) for v in (464.0, -0.0, 1e300, math.inf, 0.1, [1.0, math.nan])] == [
        "464", "-0", "1e+300", "inf", "0.1", "[1, nan]",
    ]  # fmt: skip
    assert as_data([1.0, math.inf, "a", None, True]) == [1.0, "inf", "a", None, True]
    assert str(Counterexample(input=1.0, expected=2.0, got="an error")) == "input 1, expected 2, got an error"
