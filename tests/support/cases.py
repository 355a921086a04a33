"""Families of cases in one test: as many checks as with `pytest.mark.parametrize`, without a test for each."""

import functools
import inspect
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch

_SHOWN = 60  # characters of a value in the name of a case
_MOST_SHOWN = 20  # failures of one test that are raised; more of them say no more


def seed() -> None:
    """Set all global generators to the same state."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002  (the legacy global generator is what libraries under test would use)
    torch.manual_seed(0)


def each(
    names: str | Sequence[str], values: Iterable[Any], ids: Callable[[Any], object] | Sequence[str] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test with every value in turn. Takes the arguments of `pytest.mark.parametrize`.

    Every case runs with the same seeds, whatever failed before. Each failure is raised with the name of its case. A
    test is skipped if all of its cases are. Several `each` above one test make all combinations. Use `parametrize`
    where cases take long, so that workers share them, or where a fixture must be new for each.
    """
    listed = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    alone = isinstance(names, str) and "," not in names
    values = list(values)
    cases = [_values_of(value, alone=alone) for value in values]
    labels = [_label(value, case, n, listed, ids) for n, (value, case) in enumerate(zip(values, cases, strict=True))]

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        body: Callable[..., None] = getattr(test, "body_of_cases", test)
        inner: list[tuple[str, Mapping[str, Any]]] = getattr(test, "cases", [("", {})])
        combined = [
            (", ".join(filter(None, (label, below))), {**dict(zip(listed, case, strict=True)), **others})
            for label, case in zip(labels, cases, strict=True)
            for below, others in inner
        ]
        assert combined, f"{body.__name__}: no cases"

        @functools.wraps(body)
        def all_cases(**fixtures: Any) -> None:
            _run(body, combined, fixtures)

        all_cases.body_of_cases, all_cases.cases = body, combined  # type: ignore[attr-defined]
        given = {name for _, arguments in combined for name in arguments}
        kept = [p for p in inspect.signature(body).parameters.values() if p.name not in given]
        all_cases.__signature__ = inspect.Signature(kept)  # type: ignore[attr-defined]
        # Marks that stand between two `each` are on the wrapper below.
        all_cases.pytestmark = list(getattr(test, "pytestmark", []))  # type: ignore[attr-defined]
        return all_cases

    return decorate


def _run(
    body: Callable[..., None], cases: Sequence[tuple[str, Mapping[str, Any]]], fixtures: Mapping[str, Any]
) -> None:
    failures: list[Exception] = []
    skipped: list[str] = []
    for label, arguments in cases:
        seed()
        try:
            body(**fixtures, **arguments)
        except pytest.skip.Exception as reason:
            skipped.append(str(reason.msg))
        except Exception as error:  # noqa: BLE001  (raised at the end, when all cases have run)
            error.add_note(f"case: {label}")
            failures.append(error)
    if len(failures) == 1:
        raise failures[0]
    if failures:
        raise ExceptionGroup(f"{len(failures)} of {len(cases)} cases failed", failures[:_MOST_SHOWN])
    if len(skipped) == len(cases):
        pytest.skip(skipped[0])


def _values_of(value: Any, *, alone: bool) -> tuple[Any, ...]:
    if hasattr(value, "marks"):
        assert not value.marks, f"expected values without marks; got {value}. Use parametrize."
        return tuple(value.values)
    return (value,) if alone else tuple(value)


def _label(
    value: Any,
    case: Sequence[Any],
    number: int,
    names: Sequence[str],
    ids: Callable[[Any], object] | Sequence[str] | None,
) -> str:
    if ids is not None and not callable(ids):
        return ids[number]
    if isinstance(named := getattr(value, "id", None), str):
        return named
    return ", ".join(f"{n}={_shown(v if ids is None else ids(v) or v)}" for n, v in zip(names, case, strict=True))


def _shown(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"
