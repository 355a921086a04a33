"""Numbers as text: one spelling, in one module, for all surfaces."""

import math
import re

import pytest

from plimsoll.text import clause, escaped_cell, grouped, number, percent, power, shortened, steps
from tests import house
from tests.support.cases import each

SOURCES = [house.SOURCE, house.LAB]


@each("share", [0.0, 1e-9, 1e-4, 0.0099, 0.1, 0.58, 0.985, 0.9951, 0.99999, 1.0])
def test_a_share_is_none_or_all_only_where_it_is(share: float) -> None:
    reported = percent(share)
    assert reported.endswith(" %")
    assert (reported == "0 %") == (share == 0) and (reported == "100 %") == (share == 1)


@each("value", [0.738, 12.34, 999.4, 1234.5, 65504.0, 7.17e-4, 2.0**-24, 3.4e38, -0.5, 1.7e308])
def test_a_number_reads_back_within_its_three_digits(value: float) -> None:
    assert float(number(value).replace(",", "")) == pytest.approx(value, rel=5.1e-3, abs=0.0)
    assert len(number(value)) <= 9


def test_one_number_has_one_spelling() -> None:
    assert number(65536) == number(65536.0) == "65,536"
    assert power(65536) == power(65536.0) == "2^16"
    assert number(math.inf) == "inf" and number(math.nan) == "nan" and percent(math.nan) == "unknown"
    assert steps(300, 300) == "step 300"


def test_no_other_module_spells_shares() -> None:
    own = re.compile(r":\.?\d*%\}|\bdef _?percent\b|[0-9}]%[\"' ,;.)]")
    hover = ("hovertemplate", "tickformat", "hover", "width: ", "olerance")  # Plotly, style sheets, what users type
    found = [
        f"{path.relative_to(house.ROOT)}:{number}: {line.strip()}"
        for path in sorted(path for source in SOURCES for path in source.rglob("*.py"))
        if path.name not in ("text.py", "intervals.py")  # an Interval takes a format of the caller's own
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        if own.search(line) and not any(word in line for word in hover)
    ]
    assert not found, "\n".join(found)


def test_an_error_within_a_sentence_has_no_period_of_its_own() -> None:
    for text, wanted in {
        "expected two; got three. Leave one out.": "expected two; got three. Leave one out",
        "no period": "no period",
        "0.5": "0.5",
        "": "",
    }.items():
        assert clause(ValueError(text)) == wanted and clause(text) == wanted


def test_a_long_name_keeps_its_numbers_and_what_they_count() -> None:
    lora = "base_model.model.model.layers.11.self_attn.q_proj.lora_A.default.weight"
    assert shortened(lora, 80) == lora
    assert shortened(lora, 61) == "base_model...layers.11.self_attn.q_proj.lora_A.default.weight"
    assert shortened(lora, 48) == "base_model...layers.11...lora_A.default.weight"
    attention = "encoder.block.{0-3}.layer.0.SelfAttention.relative_attention_bias.weight"
    assert shortened(attention, 60) == "encoder.block.{0-3}.layer.0...relative_attention_bias.weight"
    for name in ("x" * 100, "a." + "b" * 100, "a" * 30 + ".1.2.3.4.5.6.7.8.9." + "b" * 30, "." * 100, "a..b." * 20):
        assert len(shortened(name, 48)) <= 48 and "..." in shortened(name, 48)


def test_names_that_come_twice_are_one() -> None:
    assert grouped(["a.1", "a.1", "a.2", "b", "b"]) == "a.{1-2}, b"


def test_a_cell_has_no_markup_of_its_own() -> None:
    assert escaped_cell("blocks.0.exp_avg_sq") == "blocks.0.exp_avg_sq"
    assert escaped_cell("__init__ ~~a~~ &lt;") == r"\_\_init\_\_ \~\~a\~\~ \&lt;"
