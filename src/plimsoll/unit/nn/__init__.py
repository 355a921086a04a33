"""The modules of unit scaling: as `torch.nn`'s, their parameters drawn with unit variance.

Each is a subclass of torch's module of its name, takes torch's arguments in torch's order, and keeps the names and
shapes of its state; by keyword come `constraint`, `mult` and `factors` where they apply. A module says of which
kind its parameters are, which `unit.optim` reads. `MLP`, `Residual` and `Stack` have no model in torch.
"""

from plimsoll.unit.nn._activations import (
    GELU as GELU,
    ReLU as ReLU,
    Sigmoid as Sigmoid,
    SiLU as SiLU,
    Tanh as Tanh,
)
from plimsoll.unit.nn._attention import MultiheadAttention as MultiheadAttention
from plimsoll.unit.nn._convolutions import (
    Conv1d as Conv1d,
    Conv2d as Conv2d,
    ConvTranspose2d as ConvTranspose2d,
)
from plimsoll.unit.nn._dropout import Dropout as Dropout, Softmax as Softmax
from plimsoll.unit.nn._embedding import Embedding as Embedding
from plimsoll.unit.nn._linear import Linear as Linear, LinearReadout as LinearReadout
from plimsoll.unit.nn._losses import CrossEntropyLoss as CrossEntropyLoss, MSELoss as MSELoss
from plimsoll.unit.nn._mlp import MLP as MLP
from plimsoll.unit.nn._norms import (
    BatchNorm2d as BatchNorm2d,
    GroupNorm as GroupNorm,
    LayerNorm as LayerNorm,
    RMSNorm as RMSNorm,
)
from plimsoll.unit.nn._pools import (
    AdaptiveAvgPool2d as AdaptiveAvgPool2d,
    AvgPool2d as AvgPool2d,
    MaxPool2d as MaxPool2d,
)
from plimsoll.unit.nn._residual import Residual as Residual, Stack as Stack, residual_tau as residual_tau
from plimsoll.unit.nn._transformer import (
    TransformerDecoder as TransformerDecoder,
    TransformerDecoderLayer as TransformerDecoderLayer,
    TransformerEncoder as TransformerEncoder,
    TransformerEncoderLayer as TransformerEncoderLayer,
)
