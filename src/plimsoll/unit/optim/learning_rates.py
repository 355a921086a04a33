"""What a parameter's learning rate is multiplied by, so that one found on a narrow model serves a wide one (u-muP).

With unit-scaled weights and gradients a step changes what a hidden product gives by lr * fan_in^1/2 times the factor,
since the updates of its inputs' weights point the same way; so fan_in^-1/2 makes it lr at any width. A readout has that
in its forward factor already, fan_in^-1. A residual stack adds up the steps of its layers: depth^-1/2.

An embedding's rows are added up with nothing, and muP asks for no factor. u-muP takes width^-1/2 there, for better
losses in its sweeps of large models (arXiv 2407.17465). Here a step of a table is lr at any width, which is muP's rule:
on a small character model both carry over width alike, and without the factor losses are lower by a tenth and more
(docs/how-to/unit-scaled-model.md). Who wants the other: ``tag(table, weight="weight")`` and
``tag_fan_in(table, weight=width)``.

Adam's updates have unit size whatever the gradients' scale. SGD's have the gradients' scale, and that is one as well,
at any width, as long as the readout's own gradient is (its constraint is None): then the same factors hold. Under
another constraint every gradient shrinks with the width, which `SGD` refuses.
"""

from typing import Literal

from plimsoll.unit.optim.parameter_kinds import Trait

Plain = Literal["plain"]  # a parameter of no kind, which takes the learning rate as it is


def lr_factor(trait: Trait) -> float:
    """fan_in^-1/2 for weights, 1 for readouts, embeddings, biases and norms; times depth^-1/2.

    >>> lr_factor(Trait(kind="weight", fan_in=256, depth=4)), lr_factor(Trait(kind="readout", fan_in=256))
    (0.03125, 1.0)
    """
    terms = trait.fan_in if trait.kind == "weight" else 1
    return float(terms * trait.depth) ** -0.5
