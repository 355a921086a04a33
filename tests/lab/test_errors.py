"""Mechanisms of bias and noise: what is planted is what does it, and every claim can fail."""

from pathlib import Path

import pytest

from plimsoll.errors import ArgumentError
from plimsoll_lab import Bench
from plimsoll_lab.bench import Silent
from plimsoll_lab.experiments import errors
from plimsoll_lab.experiments.errors import (
    DESCENTS,
    ERRORS,
    HEADS,
    NORMS,
    Numbers,
    attention,
    efficiencies,
    norms,
    stall,
)


def bench(folder: Path, steps: int | None = None, *, full: bool = False) -> Bench:
    return Bench(runs=folder, seed=5, device="cpu", steps=steps, full=full, progress=Silent())


def failed(table: str, numbers: dict[str, Numbers]) -> set[str]:
    return {claim.id for claim in errors.claims(table, last=0.875, **numbers) if not claim.holds}


def test_attention_with_tied_scores_is_biased_and_its_controls_are_not(tmp_path: Path) -> None:
    found = {head.name: attention(head, bench(tmp_path), 20)[1] for head in HEADS}
    table = errors.ATTENTION_CLAIMS
    assert not failed(table, found)
    # The remedy in place of the fault, and the fault in place of the remedy.
    assert failed(table, {**found, "tied": found["shifted"]}) >= {"tied-product", "tied-gradient", "tied-scores"}
    assert failed(table, {**found, "shifted": found["tied"]}) == {
        "shifted-product", "shifted-gradient", "shifted-scores",
    }  # fmt: skip
    assert found["wide"]["along"] == 0


def test_norm_weights_in_one_bin_bias_the_gradients_and_their_controls_do_not(tmp_path: Path) -> None:
    found = {kind.name: norms(kind, bench(tmp_path), 20)[1] for kind in NORMS}
    assert not failed(errors.NORM_CLAIMS, found)
    assert failed(errors.NORM_CLAIMS, {**found, "clustered": found["apart"]}) >= {
        "clustered-output", "apart-gradient", "clustered-reported",
    }  # fmt: skip
    assert failed(errors.NORM_CLAIMS, {**found, "apart": found["clustered"]}) == {
        "apart-output", "apart-gradient", "others-unreported",
    }  # fmt: skip


def test_the_loss_stands_still_where_noise_exceeds_the_gradient_and_its_controls_go_on(tmp_path: Path) -> None:
    found = {kind.name: stall(kind, bench(tmp_path))[1] for kind in DESCENTS}
    found["steps"] = efficiencies(5)
    assert not failed(errors.STALL_CLAIMS, found)
    assert failed(errors.STALL_CLAIMS, {**found, "fp4": found["fp32"]}) == {"crossed", "after", "warned"}
    assert failed(errors.STALL_CLAIMS, {**found, "fp32": found["fp4"]}) == {"fp32", "unwarned"}
    assert failed(errors.STALL_CLAIMS, {**found, "switched": found["fp4"]}) == {"bf16"}


def test_steps_and_full_set_how_long_it_trains(tmp_path: Path) -> None:
    assert ERRORS.settings(bench(tmp_path, 60))["steps"] == 60
    assert ERRORS.settings(bench(tmp_path, full=True))["steps"] == errors.FULL_STEPS > errors.STEPS
    with pytest.raises(ArgumentError, match=r"lab errors: expected 20 steps or more, so that .*; got 19\. Use 100"):
        ERRORS.settings(bench(tmp_path, 19))
