"""Modules of unit scaling: those of `torch.nn`, with parameters of unit variance.

Each is a subclass of torch's module of the same name, takes torch's arguments in torch's order, and keeps the names and
shapes of its state. `constraint`, `mult` and `factors` follow by keyword if they apply. A module tags the kinds of its
parameters for `unit.optim`. `MLP`, `Residual` and `Stack` do not exist in torch.
"""

from plimsoll import exports
from plimsoll.unit.nn.blocks import MLP as MLP, Residual as Residual, Stack as Stack, residual_tau as residual_tau
from plimsoll.unit.nn.convolutions import (
    AdaptiveAvgPool2d as AdaptiveAvgPool2d,
    AvgPool2d as AvgPool2d,
    Conv1d as Conv1d,
    Conv2d as Conv2d,
    ConvTranspose2d as ConvTranspose2d,
    MaxPool2d as MaxPool2d,
)
from plimsoll.unit.nn.functions import (
    GELU as GELU,
    CrossEntropyLoss as CrossEntropyLoss,
    Dropout as Dropout,
    MSELoss as MSELoss,
    ReLU as ReLU,
    Sigmoid as Sigmoid,
    SiLU as SiLU,
    Softmax as Softmax,
    Tanh as Tanh,
)
from plimsoll.unit.nn.layers import (
    BatchNorm2d as BatchNorm2d,
    Embedding as Embedding,
    GroupNorm as GroupNorm,
    LayerNorm as LayerNorm,
    Linear as Linear,
    LinearReadout as LinearReadout,
    RMSNorm as RMSNorm,
)
from plimsoll.unit.nn.transformer import (
    MultiheadAttention as MultiheadAttention,
    TransformerDecoder as TransformerDecoder,
    TransformerDecoderLayer as TransformerDecoderLayer,
    TransformerEncoder as TransformerEncoder,
    TransformerEncoderLayer as TransformerEncoderLayer,
)

exports.show_classes(__name__)
