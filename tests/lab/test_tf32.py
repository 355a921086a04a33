"""TF32's digits and range, the loops as text and as they run, and what is claimed of a GPU only where there is one."""

import dataclasses
import math
from pathlib import Path

import pytest
import torch

from plimsoll_lab.bench import Bench, Silent
from plimsoll_lab.evidence import rows_of
from plimsoll_lab.experiments.tf32 import (
    TF32,
    Errors,
    amp_loop,
    bf16_loop,
    changed_lines,
    changed_tokens,
    claims,
    errors,
    fp16_loop,
    fp32_loop,
    measure,
    plimsoll_loop,
    tf32_loop,
    trained,
)
from plimsoll_lab.result import Claim
from tests.support.cases import each

OF_DEVICE = {"rate-half-of-fp16", "rate-above-fp32", "device-agrees"}
RATE = {"fp32": 50.0, "tf32": 400.0, "fp16": 800.0, "bf16": 800.0}


@pytest.fixture(scope="module")
def found() -> Errors:
    return errors(2, 128, 1, "cpu")


@pytest.fixture(scope="module")
def losses() -> dict[str, list[float]]:
    return dict(trained(1, "cpu")[0])


def by_id(all_of_them: tuple[Claim, ...]) -> dict[str, Claim]:
    return {claim.id: claim for claim in all_of_them}


def test_the_claims_hold(found: Errors, losses: dict[str, list[float]]) -> None:
    checked = by_id(claims(found, losses, 2, None))
    assert not {name: claim.measured for name, claim in checked.items() if not claim.holds}
    assert len(checked) == 16 and not OF_DEVICE & set(checked)


def test_of_a_gpu_nothing_is_claimed_without_one(tmp_path: Path) -> None:
    bench = Bench(runs=tmp_path, seed=0, device="cpu", steps=1, full=False, progress=Silent())
    measured = measure(bench)
    assert not OF_DEVICE & set(by_id(measured.claims))
    assert "not measured" in measured.said[-1] and "GPU" in measured.said[-1]
    assert TF32.settings(bench)["rates"] == "not measured: no GPU" and TF32.settings(bench)["products"] == 1
    device = dataclasses.replace(bench, device="cuda", full=True, steps=None)
    assert TF32.settings(device)["rates"] == "measured" and TF32.settings(device)["size"] == 2048


@each(
    ("rate", "own", "breaks"),
    [
        (RATE, 1.5, None),
        (RATE | {"tf32": 700.0}, 1.5, "rate-half-of-fp16"),
        (RATE | {"tf32": 90.0, "fp16": 180.0}, 1.5, "rate-above-fp32"),
        (RATE, 8.0, "device-agrees"),
        (RATE, 0.001, "device-agrees"),
    ],
)
def test_what_is_claimed_of_a_gpu_can_fail(
    found: Errors, losses: dict[str, list[float]], rate: dict[str, float], own: float, breaks: str | None
) -> None:
    device = dataclasses.replace(found, device=own * found.error["tf32", 0])
    checked = by_id(claims(device, losses, 2, rate))
    assert set(checked) >= OF_DEVICE
    assert {name for name, claim in checked.items() if not claim.holds} == ({breaks} if breaks else set())


@each(
    ("key", "factor", "breaks"),
    [
        (("tf32", 0), 8.0, {"only-inputs", "digits-of-fp16", "digits-over-bf16", "range-of-bf16"}),
        (("bf16", 0), 2.0, {"digits-over-bf16", "bf16-range"}),
        (("fp16", 0), 2.0, {"digits-of-fp16"}),
        (("fp32", 0), 100.0, {"digits-under-fp32"}),
        (("tf32", 100), math.inf, {"range-of-bf16"}),
        (("bf16", -50), 1.1, {"bf16-range"}),
        (("fp16", 100), 0.0, {"fp16-overflows"}),
        (("fp16", -50), 0.5, {"fp16-underflows"}),
    ],
)
def test_each_claim_of_products_can_fail(
    found: Errors, losses: dict[str, list[float]], key: tuple[str, int], factor: float, breaks: set[str]
) -> None:
    value = found.error[key] * factor if math.isfinite(found.error[key]) else 1.0
    wrong = dataclasses.replace(found, error={**found.error, key: value})
    assert {claim.id for claim in claims(wrong, losses, 2, None) if not claim.holds} == breaks


def test_each_claim_of_loops_can_fail(found: Errors, losses: dict[str, list[float]]) -> None:
    def failing(changed: dict[str, list[float]], settings: int, what: Errors = found) -> set[str]:
        return {claim.id for claim in claims(what, changed, settings, None) if not claim.holds}

    assert failing(losses, 1) == {"settings-made"}
    assert failing(losses | {"plimsoll": losses["fp32"]}, 2) == {"level-computes"}
    assert failing(losses | {"bf16": [2.0]}, 2) == failing(losses | {"fp16": [2.0]}, 2) == {"loops-train"}
    assert failing(losses | {"bf16": [math.nan]}, 2) == {"loops-train"}
    assert failing(losses, 2, dataclasses.replace(found, differing=1)) == {"inputs-rounded"}


def test_loops_are_compared_as_they_are_written() -> None:
    assert changed_tokens(fp32_loop, fp32_loop) == 0 and changed_lines(bf16_loop, bf16_loop) == (0, 0)
    assert changed_tokens(fp16_loop, bf16_loop) == 1 and changed_lines(fp16_loop, bf16_loop) == (1, 1)
    assert changed_lines(fp32_loop, tf32_loop) == (2, 0) and changed_lines(tf32_loop, fp32_loop) == (0, 2)
    assert changed_tokens(fp32_loop, plimsoll_loop) > 10
    assert changed_lines(fp32_loop, amp_loop, indents=False) == (5, 2)  # of which two stand for others
    assert changed_lines(fp32_loop, amp_loop) == (6, 3)  # the loss is the same line, further in


def test_the_tf32_loops_settings_are_made_and_taken_back() -> None:
    places = [torch.backends.cuda.matmul, torch.backends.cudnn.conv]
    before = [place.fp32_precision for place in places]
    assert trained(3, "cpu")[1] == 2
    assert [place.fp32_precision for place in places] == before


def test_products_of_other_formats_are_found_out(
    monkeypatch: pytest.MonkeyPatch, losses: dict[str, list[float]]
) -> None:
    from plimsoll_lab.experiments import tf32

    emulate = tf32.emulate
    monkeypatch.setattr(tf32, "emulate", lambda forward: emulate(forward="e8m9" if forward == "tf32" else forward))
    checked = by_id(claims(errors(1, 64, 1, "cpu"), losses, 2, None))
    assert not checked["inputs-rounded"].holds and not checked["digits-of-fp16"].holds


def test_every_claim_is_of_a_row_and_every_row_has_one(found: Errors, losses: dict[str, list[float]]) -> None:
    checked = claims(found, losses, 2, None)
    assert {row for claim in checked for row in claim.rows} == set(rows_of(TF32.source))
    assert all(claim.rows for claim in checked)
