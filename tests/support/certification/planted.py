"""A planted deviation: a function with one fault, the rows that must name it, and what must be inferred."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Planted:
    """A function with a fault.

    `rows` are all rows that deviate, the first of which names the fault. `inferred` are facts that must be found.
    `example` is the counterexample of the first row as (input, expected, got), where it is worth writing down; None
    stands for anything.
    """

    id: str
    function: Callable[..., Any]
    fmt: str = "e4m3"
    kind: str = "cast"
    rows: tuple[str, ...]
    inferred: Mapping[str, object] = field(default_factory=dict)
    example: tuple[object, object, object] | None = None
    refused: tuple[str, ...] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)
