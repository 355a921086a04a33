"""The operations of unit scaling: as `torch.nn.functional`'s, with a constant factor each way.

Every function takes the arguments of torch's function of its name, in its order, then by keyword `constraint`, `mult`
and `factors` where they apply.
"""

from plimsoll.unit._constraints import Constraint as Constraint
from plimsoll.unit._formulas import Factors as Factors
from plimsoll.unit._scaled import scaled as scaled
from plimsoll.unit.functional._activations import (
    gelu as gelu,
    relu as relu,
    sigmoid as sigmoid,
    silu as silu,
    silu_glu as silu_glu,
    tanh as tanh,
)
from plimsoll.unit.functional._convolutions import (
    conv1d as conv1d,
    conv2d as conv2d,
    conv_transpose2d as conv_transpose2d,
)
from plimsoll.unit.functional._dropout import dropout as dropout
from plimsoll.unit.functional._embedding import embedding as embedding
from plimsoll.unit.functional._losses import (
    binary_cross_entropy_with_logits as binary_cross_entropy_with_logits,
    cross_entropy as cross_entropy,
    mse_loss as mse_loss,
    nll_loss as nll_loss,
)
from plimsoll.unit.functional._norms import (
    batch_norm as batch_norm,
    group_norm as group_norm,
    layer_norm as layer_norm,
    rms_norm as rms_norm,
)
from plimsoll.unit.functional._pools import (
    adaptive_avg_pool2d as adaptive_avg_pool2d,
    avg_pool1d as avg_pool1d,
    avg_pool2d as avg_pool2d,
    max_pool1d as max_pool1d,
    max_pool2d as max_pool2d,
)
from plimsoll.unit.functional._products import linear as linear, linear_readout as linear_readout, matmul as matmul
from plimsoll.unit.functional._softmax import (
    log_softmax as log_softmax,
    scaled_dot_product_attention as scaled_dot_product_attention,
    softmax as softmax,
)
from plimsoll.unit.functional._sums import (
    add as add,
    residual_add as residual_add,
    residual_split as residual_split,
)
