"""`diff`: first step and tensor where two runs diverge (see `divergence_search`)."""

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

import numpy as np

from plimsoll.diagnosis.comparison.divergence import Divergence
from plimsoll.diagnosis.comparison.divergence_search import Search
from plimsoll.diagnosis.comparison.paired_matrices import Pair
from plimsoll.diagnosis.tables.cells import Floats, Ints
from plimsoll.diagnosis.tables.scale_search import sentences
from plimsoll.diagnosis.view import View
from plimsoll.errors import ArgumentError
from plimsoll.formats import BlockFormat, get, get_element
from plimsoll.runs import Run
from plimsoll.tensor_collections import IN_STEP_ORDER


def diff(
    run_a: "Run | View | str | os.PathLike[str]",
    run_b: "Run | View | str | os.PathLike[str]",
    *,
    tolerance: float = 0.05,
    formats: Sequence[object] = (),
    until: int | None = None,
) -> Divergence:
    """Return the first step and tensor where two runs differ by more than rounding.

    For example a run in FP32 and one in FP16, before and after an upgrade, in one process and in many. Steps are
    aligned by number and series by name, so give both runs the same data in the same order.

    Args:
        run_a: The run to go by, or its folder.
        run_b: The run to compare with it.
        tolerance: Share of a tensor's values that may be zero in one run only (T6). Default: 0.05.
        formats: Further formats that were computed in and that no tensor shows: emulated ones, TF32. Default: none.
        until: The last step to compare. Default: all.

    Returns:
        The divergence. Its `first` is None if the runs do not diverge.

    Raises:
        ArgumentError: The runs have no series or no step in common.
        RunError: A folder has no run.
    """
    if not 0 <= tolerance <= 1:
        raise ArgumentError(f"diff: expected tolerance from 0 to 1; got {tolerance!r}. It is a share of values.")
    views = (_view(run_a, until), _view(run_b, until))
    owners: dict[str, int] = {}
    rounding = _rounding(views, formats)
    all_pairs = (Pair.of(name, views, owners, rounding) for name in (c.name for c in IN_STEP_ORDER))
    pairs = {pair.collection: pair for pair in all_pairs if pair is not None}
    losses = _losses(views)
    if not pairs and not len(losses[0]):
        raise ArgumentError(
            f"diff: expected runs with series and steps in common; got {views[0].run.path} and {views[1].run.path}, "
            "which have none. Watch both with the same collections and the same every=."
        )
    search = Search(views, pairs, losses, len(owners), rounding, tolerance)
    partings = search.first()
    series = sum(len(pair.names) for pair in pairs.values()) + bool(len(losses[0]))
    return Divergence(
        a=str(views[0].run.path),
        b=str(views[1].run.path),
        first=partings[0] if partings else None,
        partings=tuple(partings),
        compared=(len(search.steps), series),
        until_step=search.until_step,
        drift=tuple(search.drift),
        only_a=_only(views[0], views[1]),
        only_b=_only(views[1], views[0]),
        changed=tuple(_changed(views)),
        notes=tuple(sentences(search.searches)),
    )


def _view(run: "Run | View | str | os.PathLike[str]", until: int | None) -> View:
    if isinstance(run, View):
        return run if until is None else View(run.run, until)
    return View(run if isinstance(run, Run) else Run(run), until)


def _losses(views: tuple[View, View]) -> tuple[Ints, Floats, Floats]:
    """Return the steps at which both runs have a loss, and both losses."""
    (steps_a, a), (steps_b, b) = (view.scalar("loss") for view in views)
    steps, at_a, at_b = np.intersect1d(steps_a, steps_b, return_indices=True)
    return steps, a[at_a], b[at_b]


def _rounding(views: tuple[View, View], named: Sequence[object]) -> float:
    """Half a unit in the last place of the narrowest format in either run, or named."""
    formats = [get(fmt) for fmt in named]
    elements = [fmt.element if isinstance(fmt, BlockFormat) else fmt for fmt in formats]
    for view in views:
        for collection in view.run.tensors:
            cells = view.cells(collection)
            elements += [] if cells is None else [get_element(name, "diff") for name in cells.formats]
    return max((fmt.epsilon / 2 for fmt in elements), default=2.0**-24)


def _only(view: View, other: View) -> tuple[str, ...]:
    theirs = {(c, n) for c, names in other.run.tensors.items() for n in names}
    return tuple(f"{c} {n}" for c, names in view.run.tensors.items() for n in names if (c, n) not in theirs)


def _changed(views: tuple[View, View]) -> Iterator[tuple[str, str, str]]:
    """Yield the settings and versions in which the runs differ, nested ones with dots."""
    for title in ("versions", "settings"):
        a, b = (
            dict(_flat(cast("Mapping[str, object]", view.run.manifest.get(title) or {}), f"{title}.")) for view in views
        )
        for name in sorted({*a, *b}):
            if a.get(name) != b.get(name):
                yield name, _setting(a.get(name)), _setting(b.get(name))


def _flat(settings: Mapping[str, object], prefix: str) -> Iterator[tuple[str, object]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(cast("Mapping[str, object]", value), f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _setting(value: object) -> str:
    return "none" if value is None else str(value)
