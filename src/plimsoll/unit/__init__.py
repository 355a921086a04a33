"""Unit scaling: every tensor starts at unit scale, so that FP16 and FP8 train with no loss scale.

Each operation multiplies by a constant forward and by another one backward, which its shapes give. `functional` has the
operations, `nn` the modules, `optim` the optimizers whose learning rate carries over width; `convert` rewrites a model
that was written without any of them.
"""

from plimsoll.unit import functional as functional, nn as nn, optim as optim
from plimsoll.unit._audit import audit as audit
from plimsoll.unit._audit_compare import Comparison as Comparison, Pair as Pair
from plimsoll.unit._audit_result import Audit as Audit
from plimsoll.unit._audit_rows import Reading as Reading, Row as Row
