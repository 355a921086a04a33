"""The modules of unit scaling: as `torch.nn`'s, their parameters drawn with unit variance.

Each is a subclass of torch's module of its name, takes torch's arguments in torch's order, and keeps the names and
shapes of its state; by keyword come `constraint`, `mult` and `factors` where they apply. A module says of which
kind its parameters are, which `unit.optim` reads.
"""

from plimsoll.unit.nn._activations import (
    GELU as GELU,
    ReLU as ReLU,
    Sigmoid as Sigmoid,
    SiLU as SiLU,
    Tanh as Tanh,
)
from plimsoll.unit.nn._embedding import Embedding as Embedding
from plimsoll.unit.nn._linear import Linear as Linear, LinearReadout as LinearReadout
from plimsoll.unit.nn._losses import CrossEntropyLoss as CrossEntropyLoss
from plimsoll.unit.nn._norms import LayerNorm as LayerNorm
