"""The part of a checkpoint that float32 values are made of."""

from collections.abc import Mapping
from typing import Any

from plimsoll.errors import ArgumentError
from plimsoll.precision.weights.pair import Pair
from plimsoll.precision.weights.stores import Entry


def entries_of(pairs: Mapping[int, Pair]) -> dict[int, Entry]:
    """What each parameter's store keeps, by the parameter's index."""
    return {number: pair.store.entry(pair.weight) for number, pair in pairs.items()}


def checked_entries(operation: str, state_dict: Mapping[str, Any], pairs: Mapping[int, Pair]) -> dict[int, Entry]:
    """The entries of a state dict, if they are for these parameters."""
    entries: dict[int, Entry] | None = state_dict.get("masters")
    if entries is None:
        raise ArgumentError(
            f"{operation}: expected a state dict with masters; got the keys {', '.join(map(str, state_dict))}. It is "
            "an inner optimizer's: load it with .optimizer.load_state_dict(), and call take_model_weights()."
        )
    mine = {number: tuple(pair.weight.shape) for number, pair in pairs.items()}
    theirs = {number: tuple(next(iter(entry.values())).shape) for number, entry in entries.items()}
    wrong = sorted(number for number in {*mine, *theirs} if mine.get(number) != theirs.get(number))
    if wrong:
        raise ArgumentError(
            f"{operation}: expected masters of the shapes of this optimizer's 16-bit parameters; got others for the "
            f"parameters {wrong[:5]}, the first of shape {theirs.get(wrong[0])} where this one has "
            f"{mine.get(wrong[0])}. Make the optimizer of the same parameters, in the same groups and order."
        )
    return entries
