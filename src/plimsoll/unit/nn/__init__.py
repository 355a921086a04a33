"""The modules of unit scaling: as `torch.nn`'s, their parameters drawn with unit variance.

Each is a subclass of torch's module of its name, takes torch's arguments in torch's order, and keeps the names and
shapes of its state; by keyword come `constraint`, `mult` and `factors` where they apply. A module says of which
kind its parameters are, which `unit.optim` reads. `MLP`, `Residual` and `Stack` have no model in torch.
"""

from plimsoll.unit.nn.activations import (
    GELU as GELU,
    ReLU as ReLU,
    Sigmoid as Sigmoid,
    SiLU as SiLU,
    Tanh as Tanh,
)
from plimsoll.unit.nn.attention import MultiheadAttention as MultiheadAttention
from plimsoll.unit.nn.convolutions import (
    Conv1d as Conv1d,
    Conv2d as Conv2d,
    ConvTranspose2d as ConvTranspose2d,
)
from plimsoll.unit.nn.dropout import Dropout as Dropout, Softmax as Softmax
from plimsoll.unit.nn.embedding import Embedding as Embedding
from plimsoll.unit.nn.linear import Linear as Linear, LinearReadout as LinearReadout
from plimsoll.unit.nn.losses import CrossEntropyLoss as CrossEntropyLoss, MSELoss as MSELoss
from plimsoll.unit.nn.mlp import MLP as MLP
from plimsoll.unit.nn.normalization import (
    BatchNorm2d as BatchNorm2d,
    GroupNorm as GroupNorm,
    LayerNorm as LayerNorm,
    RMSNorm as RMSNorm,
)
from plimsoll.unit.nn.pooling import (
    AdaptiveAvgPool2d as AdaptiveAvgPool2d,
    AvgPool2d as AvgPool2d,
    MaxPool2d as MaxPool2d,
)
from plimsoll.unit.nn.residual import Residual as Residual, Stack as Stack, residual_tau as residual_tau
from plimsoll.unit.nn.transformer import (
    TransformerDecoder as TransformerDecoder,
    TransformerDecoderLayer as TransformerDecoderLayer,
    TransformerEncoder as TransformerEncoder,
    TransformerEncoderLayer as TransformerEncoderLayer,
)
