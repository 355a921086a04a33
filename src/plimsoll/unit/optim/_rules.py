"""What a parameter's learning rate is multiplied by, so that one found on a narrow model serves a wide one (u-muP).

With unit-scaled weights and gradients a step changes what a hidden product gives by lr * fan_in^1/2 times the factor,
since the updates of its inputs' weights point the same way; so fan_in^-1/2 makes it lr at any width. A readout has that
in its forward factor already, fan_in^-1. A residual stack adds up the steps of its layers: depth^-1/2.

An embedding's rows are added to nothing, and muP's limit asks for no factor. u-muP takes fan_out^-1/2 (fan_out: the
width) because large sweeps did better with it (arXiv 2407.17465, section 4 and its table of rules); so do we.

Adam's updates have unit size whatever the gradients' scale. SGD's have the gradients' scale, and that is one as well,
at any width, as long as the readout's own gradient is (its constraint is None): then the same factors hold. Under
another constraint every gradient shrinks with the width, which `SGD` refuses.
"""

from typing import Literal

from plimsoll.unit._kinds import Trait

Plain = Literal["plain"]  # a parameter of no kind, which takes the learning rate as it is


def lr_factor(trait: Trait) -> float:
    """fan_in^-1/2 for weights, fan_out^-1/2 for embeddings, 1 for readouts, biases and norms; times depth^-1/2.

    >>> lr_factor(Trait(kind="weight", fan_in=256, depth=4)), lr_factor(Trait(kind="readout", fan_in=256))
    (0.03125, 1.0)
    """
    width = {"weight": trait.fan_in, "embedding": trait.fan_out}.get(trait.kind, 1)
    return float(width * trait.depth) ** -0.5
