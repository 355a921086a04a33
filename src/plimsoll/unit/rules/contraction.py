"""Products as sums over named dimensions: one formula for linear, matmul, bmm, addmm and einsum.

A product sums over the dimensions that its result lacks: n^-1/2 for so many terms. The gradient of an operand sums over
the dimensions that the operand lacks and the other tensors have. What an operand is broadcast along it lacks.
"""

import math
import string
from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from plimsoll.unit.capture.gradient_graph import is_open, shape_of
from plimsoll.unit.changes import Factor
from plimsoll.unit.factors.formulas import root
from plimsoll.unit.rules.operation import following

Place = tuple[fx.Node, int]


@dataclass(frozen=True, slots=True)
class Contraction:
    """The operands with a letter for each of their dimensions, and the letters of the result."""

    operands: tuple[tuple[fx.Node, str], ...]
    result: str

    @property
    def forward(self) -> Factor:
        """The factor of the result."""
        return self._summed(self._letters() - set(self.result))

    def backward(self, operand: int) -> Factor:
        """The factor of an operand's gradient."""
        return self._summed(self._letters() - self._of(operand))

    def _of(self, operand: int) -> set[str]:
        node, letters = self.operands[operand]
        return {letter for letter, size in zip(letters, shape_of(node), strict=True) if size != 1}

    def _letters(self) -> set[str]:
        return set[str]().union(*(self._of(operand) for operand in range(len(self.operands))))

    def _summed(self, letters: set[str]) -> Factor:
        """n^-1/2 over some letters: as they come if one tensor has all the open ones, else at the example's sizes."""
        places = {letter: self._place(letter) for letter in letters}
        opened = {letter for letter, (node, dim) in places.items() if is_open(node, dim)}
        fixed = math.prod(shape_of(node)[dim] for letter, (node, dim) in places.items() if letter not in opened)
        for node, own in self.operands:
            if opened <= set(own):
                return following(node, [own.index(letter) for letter in sorted(opened)], -0.5, root(fixed))
        return Factor(value=root(fixed * math.prod(shape_of(places[one][0])[places[one][1]] for one in opened)))

    def _place(self, letter: str) -> Place:
        found = [
            (node, letters.index(letter)) for operand, (node, letters) in enumerate(self.operands)
            if letter in self._of(operand)
        ]  # fmt: skip
        return next((place for place in found if is_open(*place)), found[0])


def of_matmul(left: fx.Node, right: fx.Node) -> Contraction:
    """``left @ right``, whatever their dimensions."""
    rows, columns = len(shape_of(left)), len(shape_of(right))
    batch = string.ascii_lowercase[: max(rows, columns, 2) - 2]
    first = "K" if rows == 1 else batch[len(batch) - rows + 2 :] + "MK"
    second = "K" if columns == 1 else batch[len(batch) - columns + 2 :] + "KN"
    result = batch + ("M" if rows > 1 else "") + ("N" if columns > 1 else "")
    return Contraction(((left, first), (right, second)), result)


def of_linear(x: fx.Node, weight: fx.Node) -> Contraction:
    """``x @ weight.T``."""
    batch = string.ascii_lowercase[: len(shape_of(x)) - 1]
    return Contraction(((x, batch + "K"), (weight, "NK" if len(shape_of(weight)) == 2 else "K")), batch + "N")


def of_einsum(equation: str, operands: Sequence[fx.Node]) -> Contraction | None:
    """An einsum; None where a letter stands twice in one operand (a diagonal)."""
    given, _, result = equation.replace(" ", "").partition("->")
    terms = given.split(",")
    extra = max(len(shape_of(node)) - len(term.replace("...", "")) for node, term in zip(operands, terms, strict=True))
    dots = "".join(chr(0x3B1 + i) for i in range(extra))
    spelled = [
        term.replace("...", dots[len(dots) - (len(shape_of(node)) - len(term) + 3) :] if "..." in term else "")
        for node, term in zip(operands, terms, strict=True)
    ]
    if "->" not in equation:
        letters = "".join(terms).replace("...", "")
        result = ("..." if "..." in given else "") + "".join(
            sorted({one for one in letters if letters.count(one) == 1})
        )
    if any(len(set(term)) != len(term) for term in spelled):
        return None
    return Contraction(tuple(zip(operands, spelled, strict=True)), result.replace("...", dots))
