"""Operations of `torch.nn.functional`, with a constant factor each way.

Every function takes the arguments of torch's function of the same name, in the same order. `constraint`, `mult` and
`factors` follow by keyword if they apply.
"""

from plimsoll.unit.formulas import Constraint as Constraint, Factors as Factors
from plimsoll.unit.functional.activations import (
    batch_norm as batch_norm,
    dropout as dropout,
    gelu as gelu,
    group_norm as group_norm,
    layer_norm as layer_norm,
    relu as relu,
    rms_norm as rms_norm,
    sigmoid as sigmoid,
    silu as silu,
    silu_glu as silu_glu,
    tanh as tanh,
)
from plimsoll.unit.functional.attention import (
    log_softmax as log_softmax,
    scaled_dot_product_attention as scaled_dot_product_attention,
    softmax as softmax,
)
from plimsoll.unit.functional.convolutions import (
    adaptive_avg_pool2d as adaptive_avg_pool2d,
    avg_pool1d as avg_pool1d,
    avg_pool2d as avg_pool2d,
    conv1d as conv1d,
    conv2d as conv2d,
    conv_transpose2d as conv_transpose2d,
    max_pool1d as max_pool1d,
    max_pool2d as max_pool2d,
)
from plimsoll.unit.functional.losses import (
    binary_cross_entropy_with_logits as binary_cross_entropy_with_logits,
    cross_entropy as cross_entropy,
    mse_loss as mse_loss,
    nll_loss as nll_loss,
)
from plimsoll.unit.functional.products import (
    add as add,
    embedding as embedding,
    linear as linear,
    linear_readout as linear_readout,
    matmul as matmul,
    residual_add as residual_add,
    residual_split as residual_split,
)
from plimsoll.unit.scaled_multiply import scaled as scaled
