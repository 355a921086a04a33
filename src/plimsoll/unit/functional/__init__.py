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
    tanh as tanh,
)
from plimsoll.unit.functional._embedding import embedding as embedding
from plimsoll.unit.functional._losses import cross_entropy as cross_entropy
from plimsoll.unit.functional._norms import layer_norm as layer_norm
from plimsoll.unit.functional._products import linear as linear, linear_readout as linear_readout, matmul as matmul
from plimsoll.unit.functional._sums import (
    add as add,
    residual_add as residual_add,
    residual_split as residual_split,
)
