"""What a watch has noted of a training's wiring, and its optimizers' settings, as rules read them."""

from collections.abc import Mapping
from typing import Any, cast

import numpy as np

from plimsoll.diagnosis.view import View
from plimsoll.runs import Event

# Facts that several rules read.
ROUNDED_GRADIENTS = "gradients rounded"  # something casts gradients before the step
FROZEN = "frozen stepped"  # parameters that do not require gradients any more and have some
ONE_VALUE_NORM = "norm of one value"  # norms over a single value, whose output is their bias


def facts(view: View, fact: str) -> list[Event]:
    """Return the events of a fact by step."""
    events = [e for e in view.events if e.kind == "wiring" and e.details.get("fact") == fact]
    return sorted(events, key=lambda event: event.step)


def first_fact(view: View, fact: str) -> Event | None:
    """Return the first event of a fact."""
    return next(iter(facts(view, fact)), None)


def listed_in(event: Event, key: str) -> list[str]:
    """Return the names that an event lists."""
    listed = event.details.get(key)
    return [str(item) for item in cast("list[object]", listed)] if isinstance(listed, list) else []


# What is trained lies behind such layers: it comes later in the forward, takes as many features as they put out, and is
# no pupil of theirs, which would put out as many as they do.
def random_trunk(view: View) -> Event | None:
    """Return the event on frozen layers that are as torch draws them and come before all that is trained."""
    event, outputs = first_fact(view, "frozen as drawn"), view.run.tensors.get("activations", ())
    if event is None or first_fact(view, "thawed") is not None:
        return None
    order = {name.rpartition(":")[0]: place for place, name in reversed(list(enumerate(outputs))) if ":output" in name}
    sides: list[list[tuple[int, int, int]]] = []  # by place: features in and out
    for names, sizes in (("modules", "sizes"), ("trained", "trained_sizes")):
        listed = cast("list[list[int]]", event.details.get(sizes) or [])
        pairs = zip(listed_in(event, names), listed, strict=False)
        sides.append(sorted((order[name], *size) for name, size in pairs if name in order))  # type: ignore[misc]
    if not all(sides):
        return None
    last, first, head = sides[0][-1], sides[1][0], sides[1][-1]
    return event if last[0] < first[0] and first[1] % last[2] == 0 and head[2] != last[2] else None


def names_of(view: View, fact: str) -> set[str]:
    """Return the parameters that all events of a fact list."""
    return {name for event in facts(view, fact) for name in listed_in(event, "parameters")}


def without_gradient(view: View) -> set[str]:
    """Return the parameters that have never had a gradient, not even one of zeros."""
    return names_of(view, "without gradient") - names_of(view, "gradient came")


def groups_of(event: Event) -> list[dict[str, Any]]:
    """Return what an event says of parameter groups."""
    listed = event.details.get("groups")
    return cast("list[dict[str, Any]]", listed) if isinstance(listed, list) else []


def optimizer_settings(view: View) -> list[Mapping[str, Any]]:
    """Return the recorded settings of each optimizer."""
    recorded = view.run.settings.items()
    return [
        cast("Mapping[str, Any]", each)
        for name, each in recorded
        if name.startswith("optimizer") and isinstance(each, dict)
    ]


def group_states(view: View) -> list[tuple[Event, int]]:
    """Return the events on parameter groups, each with its last step."""
    events = facts(view, "groups")
    states: list[tuple[Event, int]] = []
    for place, event in enumerate(events):
        later = [e.step for e in events[place + 1 :] if e.details.get("optimizer") == event.details.get("optimizer")]
        states.append((event, later[0] - 1 if later else max(view.last_step, event.step)))
    return states


def with_rate_of_zero(view: View) -> list[tuple[set[str], int, int]]:
    """Return the parameters whose rate is 0, with the first and the last step of it."""
    return [
        (
            {name for group in groups_of(event) if group.get("rate") == "zero" for name in group["parameters"]},
            event.step,
            last,
        )
        for event, last in group_states(view)
    ]


def with_epsilon_of_zero(view: View) -> list[Event]:
    """Return the events on epsilons that are zero in their second moments' format."""
    return facts(view, "epsilon lost")


def weights_stay(view: View) -> bool | None:
    """Return whether all weights are the same at all samples; None with fewer than 2."""
    cells = view.cells("weights")
    if cells is None or len(cells.steps) < 2:
        return None
    for column in ("sumsq", "abssum", "sum"):
        values = cells.total_of(column)
        if not bool((np.nanmax(values, axis=1) == np.nanmin(values, axis=1)).all()):
            return False
    return True


def frozen_weights(view: View, *, moving: bool = False) -> list[str]:
    """Return frozen parameters that had gradients still; if `moving`, those whose values changed since."""
    event = first_fact(view, FROZEN)
    names = [] if event is None else listed_in(event, "parameters")
    cells = view.cells("weights") if moving else None
    if event is None or cells is None:
        return [] if moving else names
    sizes = dict(zip(cells.names, cells.total_of("sumsq")[:, cells.steps > event.step], strict=True))
    return [name for name in names if name in sizes and len(set(sizes[name][~np.isnan(sizes[name])].tolist())) > 1]


def largest_input(view: View, before: int | None = None) -> float:
    """Return the largest magnitude that came into the model before a step. Infinity: none was recorded."""
    cells, whole = view.cells("activations"), f"{view.run.manifest.get('root', 'model')}:input"
    inputs = [] if cells is None else [i for i, name in enumerate(cells.names) if name.startswith(whole)]
    if cells is None or not inputs:
        return np.inf
    largest = cells.true_absmax[inputs][:, slice(None) if before is None else cells.steps < before]
    return float(np.nanmax(largest)) if np.isfinite(largest).any() else np.inf
