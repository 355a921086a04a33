"""The scales of values: by how much each one is kept smaller or larger in a folded model than in the converted one.

A value V of the converted model is s V' in the folded one. An operation that is homogeneous ties s of its result to
s of its input, so values fall into classes whose members follow from one number. What cannot absorb a factor asks for a
value of that number: a non-linear function wants its input as it is, an output is given as it is. Each class takes the
number that most ask for; where others ask for another, a multiplication has to stay. Whatever the choice, the result is
the same: it only decides how many stay.
"""

import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field

_DIGITS = 9  # logarithms that agree so far are equal: factors come from roots of small numbers


@dataclass(slots=True)
class Scales:
    """Classes of values, as a union-find whose links carry the logarithm of a ratio."""

    _parent: dict[str, str] = field(default_factory=dict[str, str])
    _ratio: dict[str, float] = field(default_factory=dict[str, float])  # log of s(value) / s(parent)
    _wanted: list[tuple[str, float]] = field(default_factory=list[tuple[str, float]])
    _chosen: dict[str, float] = field(default_factory=dict[str, float])

    def tie(self, value: str, other: str, ratio: float) -> None:
        """Says that s(value) = ratio * s(other), unless what was said before already decides it."""
        (root, up), (other_root, other_up) = self._find(value), self._find(other)
        if root != other_root:
            self._parent[root] = other_root
            self._ratio[root] = math.log(ratio) + other_up - up

    def want(self, value: str, scale: float) -> None:
        """Asks that s(value) be `scale`."""
        self._wanted.append((value, math.log(scale)))

    def choose(self) -> None:
        """Gives every class the number that most ask for, the first of them where several are asked for as often."""
        asked: defaultdict[str, Counter[float]] = defaultdict(Counter)
        exact: dict[tuple[str, float], float] = {}
        for value, scale in self._wanted:
            root, up = self._find(value)
            rounded = round(scale - up, _DIGITS)
            asked[root][rounded] += 1
            exact.setdefault((root, rounded), scale - up)
        self._chosen = {root: exact[root, counts.most_common(1)[0][0]] for root, counts in asked.items()}

    def of(self, value: str) -> float:
        """The value's own s."""
        root, up = self._find(value)
        return math.exp(self._chosen.get(root, 0.0) + up)

    def _find(self, value: str) -> tuple[str, float]:
        """The class's root, and the logarithm of s(value) / s(root)."""
        up = 0.0
        while value in self._parent:
            up += self._ratio[value]
            value = self._parent[value]
        return value, up
