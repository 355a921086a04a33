"""What a plan's scales leave for steps that a run did not record."""

import math
from pathlib import Path

import numpy as np
import pytest
from torch import Tensor

from plimsoll.diagnosis import plan
from plimsoll.diagnosis.planning.series_windows import spare
from plimsoll.formats import E5M2
from tests.support.cases import each
from tests.support.diagnosis.planned import layers, written

STEPS, EVERY = 240, 20


def tops(kind: str, seed: int, steps: int = 2000) -> np.ndarray:
    """The log2 of largest values at each step of a training."""
    noise = np.random.default_rng(seed)
    if kind == "power law":
        return noise.exponential(0.7, steps)
    if kind == "normal":
        return noise.normal(0.0, 0.7, steps)
    return np.linspace(0, 8, steps) + noise.normal(0.0, 0.1, steps)


@each("kind", ["power law", "normal", "rising"])
@each("every", [2, 20, 100])
def test_few_of_many_series_go_beyond_what_is_left_for_the_steps_between(kind: str, every: int) -> None:
    beyond, bare = 0, 0
    for seed in range(1000):
        made = tops(kind, seed)
        seen = made[::every]
        left = spare(np.arange(0, len(made), every), 2.0**seen, len(made))
        beyond += made.max() > seen.max() + left
        bare += made.max() > seen.max() + 1
    assert beyond <= 4  # of 1,000, a risk of 1 in 1,000 for the heaviest tail that is assumed
    assert bare > 100 or kind != "power law"


def test_it_is_the_formula_and_nothing_where_all_is_known() -> None:
    moved = np.array([1.0, 2.0, 1.0, 2.0, 1.0])  # a binade at each of four samples
    b = 1.0 * (1 + 2 / 2)
    assert spare(np.arange(5) * 20, moved, 100) == pytest.approx(b * math.log(19 * 999))
    assert spare(np.arange(5), moved, 5) == 0.0
    assert spare(np.arange(5) * 20, np.ones(5), 100) == 0.0
    assert spare(np.arange(5) * 20, np.full(5, np.nan), 100) == 0.0
    assert spare(np.array([0]), np.array([1.0]), 20) == pytest.approx(math.log(19 * 999))
    assert spare(np.array([0]), np.array([1.0]), 0) == 0.0


def sizes(step: int) -> float:
    return 2.0 ** (np.random.default_rng(step).exponential(0.9) - 12)


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """A run of every 20th step, whose gradients vary in size; and the largest gradient of all steps."""
    path, largest = tmp_path_factory.mktemp("spare") / "run", 0.0
    steps: list[dict[tuple[str, str], Tensor]] = []
    for step in range(STEPS):
        made = layers({"a": sizes(step)}, step=step)
        largest = max(largest, float(made["activation_gradients", "a:output"].abs().max()))
        steps.append(made if step % EVERY == 0 else {})
    return written(path, steps), largest


def test_a_plan_of_a_sparse_run_holds_the_steps_between(sparse: tuple[Path, float]) -> None:
    path, largest = sparse
    bare, made = plan(path, "fp8", margin_binades=1), plan(path, "fp8")
    limit = E5M2.overflow_threshold
    assert largest * bare.scales["a"]["gradients"] >= limit > largest * made.scales["a"]["gradients"]
    assert "room above for steps not recorded" in made.notes["a"] and "room above" not in bare.notes["a"]
    assert all(high < 0.01 for _, _, high in made.predicted["a"].values())


def test_room_is_taken_from_what_is_free_and_not_from_the_tolerance(sparse: tuple[Path, float]) -> None:
    path, _ = sparse
    for tolerance in (1e-3, 1e-4):
        bare, made = plan(path, "fp8", margin_binades=1, tolerance=tolerance), plan(path, "fp8", tolerance=tolerance)
        assert made.formats == bare.formats
        assert all(high < tolerance for _, _, high in made.predicted["a"].values())
