"""The epoch at each step of a scalar, from what a training logs of its epochs."""

from collections.abc import Callable
from pathlib import Path

import pytest

from plimsoll.diagnosis import View
from plimsoll.report.page.answers import scalar_answer
from plimsoll.runs import Run, RunWriter, Scalars
from tests.support.cases import each

STEPS, LENGTH = 30, 8  # steps in all, and in an epoch


@each(
    "logged",
    [
        lambda step: step / LENGTH,
        lambda step: step // LENGTH,  # a whole number at every step
        lambda step: step // LENGTH if step % LENGTH == 0 else None,  # where an epoch begins
        lambda step: (step + 1) // LENGTH if step % LENGTH == LENGTH - 1 else None,  # where one ends
        lambda step: step / LENGTH if step in (4, 10) else None,
        lambda step: step / LENGTH if step != 3 else float("nan"),
    ],
    ids=["fractions", "numbers", "beginnings", "ends", "two", "nan"],
)
def test_epochs_are_of_equal_length_between_and_around_those_logged(
    logged: Callable[[int], float | None], tmp_path: Path
) -> None:
    answer = scalar_answer(View(written(tmp_path, logged)), "acc")
    late = 1 / LENGTH if logged(LENGTH - 1) == 1 else 0  # an epoch that ends is logged with its last step
    assert answer["step"] == list(range(STEPS))
    assert answer["epoch"] == pytest.approx([step / LENGTH + late for step in range(STEPS)], abs=1e-5)


@each("logged", [lambda _: None, lambda _: 0, lambda step: -step, lambda step: step % 3], ids=str)
def test_epochs_that_do_not_grow_are_no_axis(logged: Callable[[int], float | None], tmp_path: Path) -> None:
    assert "epoch" not in scalar_answer(View(written(tmp_path, logged)), "acc")


def written(folder: Path, logged: Callable[[int], float | None]) -> Run:
    path = folder / f"run{len(list(folder.iterdir()))}"
    with RunWriter(path) as writer:
        for step in range(STEPS):
            epoch = logged(step)
            writer.write(Scalars(step=step, values={"acc": 0.5, **({} if epoch is None else {"epoch": epoch})}))
    return Run(path)
