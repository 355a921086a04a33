"""Limits of a sound run: ranges of its numbers, file sizes, depth of its JSON.

Names of parts, manifests, columns and events are checked against this table when they are read. A value outside it is
damage (`DamageError`), so code behind the readers never receives a number that it cannot use.
"""

import json
from collections.abc import Mapping
from typing import Any, cast


class DamageError(ValueError):
    """Content that no writer of a run has written."""


_INT64 = 1 << 63
# Whole numbers, from the first and up to and with the second.
# A world size of 10**12 in a manifest took gigabytes of memory.
RANGES: Mapping[str, tuple[int, int]] = {
    "schema": (1, 1 << 31),
    "rank": (0, (1 << 20) - 1),
    "world_size": (1, 1 << 20),
    "step": (-_INT64, _INT64 - 1),
    "flush": (0, 1 << 62),
    "generation": (0, 1 << 31),
    "session": (1, 1 << 53),
    "seconds": (-(1 << 40), 1 << 40),
    "pid": (0, (1 << 31) - 1),
    "count": (0, (1 << 62) - 1),
}
MANIFEST_BYTES = 32 << 20  # of a hundred thousand series it has some 8 MB
MOST_NAMES = 100_000  # series of a collection, and scalars, that are read: a run of more is no training's
WORD_BYTES = 1 << 16  # of a name, or of the kind of an event
EVENT_BYTES = 4 << 20  # of the details of one event
DEPTH = 64  # of lists and objects in each other; what is written here has six


def whole(value: object, what: str, kind: str) -> int:
    """Return the value if it is an integer in the range of its kind."""
    low, high = RANGES[kind]
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise DamageError(f"{what}: expected a whole number from {low} to {high}, got {shown(value)}")
    return value


# A part with one word that readers refuse would be lost as a whole.
def stored_word(word: object) -> str:
    """Return a name as parts can hold it: half characters are question marks, and a very long one is cut."""
    text = str(word)
    if text.isascii() and len(text) <= WORD_BYTES:
        return text
    return text.encode("utf-8", "replace")[:WORD_BYTES].decode("utf-8", "ignore")


def stored_details(details: object) -> str:
    """Return the JSON of an event's details, or of how long they are where readers would refuse them."""
    text = json.dumps(details)
    try:
        check_depth(details, "details")
    except DamageError as error:
        return json.dumps({"left_out": str(error)})
    return text if len(text) <= EVENT_BYTES else json.dumps({"left_out": f"details of {len(text):,} bytes"})


def shown(value: object) -> str:
    """Return the text of a value, cut so that a message stays one line."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a number of thousands of digits
        text = type(value).__name__
    return text if len(text) <= 60 else f"{text[:57]}..."


def from_json(text: str | bytes, limit_bytes: int) -> Any:
    """Return the value of a JSON text, which is not too long nor too deep."""
    if len(text) > limit_bytes:
        raise DamageError(f"{len(text):,} bytes of JSON, of at most {limit_bytes:,} that are read")
    try:
        return json.loads(text)
    except RecursionError as error:
        raise DamageError(f"JSON that is nested deeper than {DEPTH}") from error
    except ValueError as error:  # no UTF-8 and numbers of too many digits, too
        raise DamageError(f"no JSON: {error}".splitlines()[0]) from error


def check_depth(value: object, what: str) -> None:
    """Check that lists and objects are not nested deeper than `DEPTH`."""
    level = [value]
    for _ in range(DEPTH):
        level = [inner for outer in level for inner in _inside(outer)]
        if not level:
            return
    raise DamageError(f"{what}: JSON that is nested deeper than {DEPTH}")


def details_fit(kind: str, details: Mapping[str, Any]) -> bool:
    """Return whether the details of an event have the form that rules rely on."""
    # Only events that a watch writes for rules are checked. Events of other kinds may have any details.
    if kind not in ("update", "wiring"):
        return True
    groups = details.get("groups", [])
    return (
        _are_names(details.get("parameters", []))
        and isinstance(details.get("epsilon", 0.0), int | float)
        and isinstance(groups, list)
        and all(_is_group(group) for group in cast("list[object]", groups))
    )


def _is_group(group: object) -> bool:
    """Return whether it is a group of parameters with a learning rate and a decay."""
    if not isinstance(group, dict):
        return False
    entries = cast("dict[str, object]", group)
    return _are_names(entries.get("parameters")) and isinstance(entries.get("decay") or 0.0, int | float)


def _are_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in cast("list[object]", value))


def _inside(value: object) -> list[object]:
    if isinstance(value, dict):
        return [*cast("dict[str, object]", value).values()]
    return cast("list[object]", value) if isinstance(value, list) else []
