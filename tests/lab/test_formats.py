"""The formats' figures: both ways agree with what was published, and a wrong format does not."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch

from plimsoll.formats import get
from plimsoll_lab import Bench, perform
from plimsoll_lab.bench import Silent
from plimsoll_lab.experiments.formats import FACTS, FORMATS, Fact, by_cast, by_witness, claims, disagreements
from plimsoll_lab.result import Result
from tests.support.cases import each


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return perform(FORMATS, tmp_path_factory.mktemp("formats") / "out", steps=1)


def test_every_claim_holds_and_is_told_apart(result: Result) -> None:
    assert result.holds, [claim for claim in result.measured.claims if not claim.holds]
    ids = [claim.id for claim in result.measured.claims]
    assert len(set(ids)) == len(ids) == 2 * len(FACTS) + 3
    parsed = json.loads((result.folder / "result.json").read_text("utf-8"))
    assert parsed["holds"] is True and parsed["settings"]["random_patterns"] == 2**18
    assert max(map(len, result.measured.said)) <= 79


@each("fact", FACTS, ids=lambda fact: fact.id)
def test_both_ways_give_the_same_number(fact: Fact) -> None:
    assert by_cast(fact, "cpu") == by_witness(fact, "cpu")


def test_what_casting_finds_is_what_the_catalogue_says() -> None:
    for fact in FACTS:
        fmt = get(fact.format)
        own = {"max": "max", "smallest": "smallest_subnormal", "smallest_normal": "smallest_normal"}
        name = own.get(fact.asks, fact.asks)
        if hasattr(fmt, name):
            assert by_cast(fact, "cpu") == getattr(fmt, name), fact.id


@each("fact", FACTS, ids=lambda fact: fact.id)
def test_another_format_in_its_place_does_not_keep_the_figure(fact: Fact) -> None:
    low, high = fact.bounds
    wrong = [
        value
        for name in ("fp64", "fp32", "tf32", "fp16", "bf16", "e4m3")
        for value in [by_cast(dataclasses.replace(fact, format=name), "cpu")]
        if not low <= value <= (math.inf if high is None else high)
    ]
    assert wrong


@each(
    ("published", "bounds"),
    [
        ("5.96e-8", (5.955e-8, 5.965e-8)),
        ("65504", (65504.0, 65504.0)),
        ("2^-25", (2.0**-25, 2.0**-25)),
        ("0", (0.0, 0.0)),
        ("1.798e308", (1.7975e308, None)),
    ],
)
def test_a_figure_allows_half_a_unit_of_its_last_digit(published: str, bounds: tuple[float, float | None]) -> None:
    fact = Fact(id="x", format="fp16", asks="max", says="", published=published)
    assert fact.bounds[0] == pytest.approx(bounds[0], rel=1e-12)
    assert fact.bounds[1] == (None if bounds[1] is None else pytest.approx(bounds[1], rel=1e-12))


def test_each_claim_can_fail() -> None:
    sound = [(by_cast(fact, "cpu"), by_witness(fact, "cpu")) for fact in FACTS]
    assert all(claim.holds for claim in claims(sound, {"fp16": 0}))
    for place, fact in enumerate(FACTS):
        for side, suffix in enumerate(("", "-witness")):
            wrong = list(sound[place])
            wrong[side] = 1.01 * wrong[side] + 1e-9 if math.isfinite(wrong[side]) else 65504.0
            if fact.asks == "max" and fact.format == "fp64":
                wrong[side] = 1.79e308
            changed = [*sound[:place], (wrong[0], wrong[1]), *sound[place + 1 :]]
            assert {claim.id for claim in claims(changed, {"fp16": 0}) if not claim.holds} == {fact.id + suffix}
    assert [claim.id for claim in claims(sound, {"fp16": 1}) if not claim.holds] == ["fp16-rounding"]


@pytest.mark.parametrize("name", ["tf32", "fp16", "bf16"])
def test_a_value_that_is_rounded_otherwise_is_counted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    halves = torch.tensor([1 + 3 * 2.0**-12, 1 + 3 * 2.0**-9, -0.0, math.inf, math.nan, 1e-45, 3.4e38])
    assert disagreements(halves, name) == 0
    import plimsoll_lab.experiments.formats as witness

    cast = witness.cast
    monkeypatch.setattr(witness, "cast", lambda x, fmt: cast(x, fmt, rounding="toward_zero"))
    assert disagreements(halves, name) > 0


def test_steps_and_full_set_how_many_patterns_are_rounded(tmp_path: Path) -> None:
    def patterns(steps: int | None, *, full: bool) -> object:
        bench = Bench(runs=tmp_path, seed=0, device="cpu", steps=steps, full=full, progress=Silent())
        return FORMATS.settings(bench)["random_patterns"]

    assert patterns(3, full=True) == 3 * 2**18
    assert patterns(None, full=False) < patterns(None, full=True)  # type: ignore[operator]
