"""Checks of arguments: what passes, what does not, and that the message has the rule, the value and the remedy."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import plimsoll as pl
from plimsoll import checks
from plimsoll.errors import ArgumentError, UnsupportedTensorError
from tests.support.cases import each

REMEDY = "Use another."


@each("value", [1, 3, np.int64(2)])
def test_whole_numbers_within_the_bounds_come_back_as_int(value: object) -> None:
    result = checks.integer("watch", "every", value, low=1, high=3, remedy=REMEDY)
    assert type(result) is int
    assert result == value


@each("value", [0, 4, True, 1.0, "1", None, float("nan"), [1]])
def test_what_is_no_whole_number_within_the_bounds_is_refused(value: object) -> None:
    with pytest.raises(ArgumentError) as error:
        checks.integer("watch", "every", value, low=1, high=3, remedy=REMEDY)
    rule = "watch: expected every to be an integer from 1 to 3; got "
    assert str(error.value) == f"{rule}every={value!r}. {REMEDY}"


@each("value", [1, 0.5, np.float32(0.25), np.int8(1)])
def test_numbers_within_the_bounds_come_back_as_float(value: object) -> None:
    result = checks.number("prepare", "share", value, above=0, at_most=1, remedy=REMEDY)
    assert type(result) is float
    assert result == value


@each("value", [0, 1.5, True, "0.5", b"1", None, float("nan"), float("inf"), 10**400, torch.tensor(0.5), [0.5]])
def test_what_is_no_number_within_the_bounds_is_refused(value: object) -> None:
    with pytest.raises(ArgumentError, match="expected share to be a number above 0 and of at most 1; got share="):
        checks.number("prepare", "share", value, above=0, at_most=1, remedy=REMEDY)


def test_bounds_are_in_or_out_as_they_say() -> None:
    assert checks.number("f", "x", 2, at_least=2, at_most=2, remedy=REMEDY) == 2.0
    for bound in ("above", "below"):
        with pytest.raises(ArgumentError, match=f"a number {bound} 2"):
            checks.number("f", "x", 2, **{bound: 2}, remedy=REMEDY)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ArgumentError, match="a number that is finite"):
        checks.number("f", "x", float("inf"), remedy=REMEDY)


@each(("value", "near"), [("Reduced", "Did you mean 'reduce'"), (7, "Use 'all'"), (None, "Use 'all'")])
def test_a_choice_that_is_not_there_names_the_nearest(value: object, near: str) -> None:
    with pytest.raises(ArgumentError, match=f"expected ranks to be 'all' or 'reduce'; got ranks=.*{near}"):
        checks.one_of("watch", "ranks", value, ("all", "reduce"))


def test_a_bool_is_not_the_number_it_equals() -> None:
    with pytest.raises(ArgumentError, match=r"expected n to be 0 or 1; got n=True\. Use 0\."):
        checks.one_of("f", "n", True, (0, 1))


X = torch.zeros(2, 3)
TAKES_A_MODEL: dict[str, Callable[[Any, Path], object]] = {
    "watch": lambda model, path: pl.watch(model, run=path),
    "prepare": lambda model, path: pl.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32"),
    "locate": lambda model, path: pl.locate(lambda: model(X).sum(), model=model),
    "microscope": lambda model, path: pl.microscope(model, lambda: model(X).sum()),
    "probe": lambda model, path: pl.probe(model, [X], "fp16"),
    "receipt": lambda model, path: pl.receipt(model, X),
}


@each("operation", TAKES_A_MODEL)
def test_lazy_layers_that_no_batch_has_met_are_refused_by_name(operation: str, tmp_path: Path) -> None:
    model = nn.Sequential(nn.ReLU(), nn.LazyLinear(2))
    with pytest.raises(UnsupportedTensorError) as error:
        TAKES_A_MODEL[operation](model, tmp_path / "run")
    rule = f"{operation}: expected parameters that have a shape; got 1.weight, which is not initialized yet. "
    assert str(error.value) == f"{rule}Run the model once before."
    assert not (tmp_path / "run").exists()


def test_a_long_value_is_cut() -> None:
    with pytest.raises(ArgumentError) as raised:
        checks.number("prepare", "clip_norm", "x" * 10_000, remedy="Use 1.0.")
    assert len(str(raised.value)) < 300 and str(raised.value).endswith("xxx. Use 1.0.")
