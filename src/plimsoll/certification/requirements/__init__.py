"""The rows of a certificate: every requirement, declared with its source next to the check behind it.

Importing this package fills `plimsoll.certification.registry.REQUIREMENTS`, in the order of a certificate's rows.
"""

from plimsoll.certification.registry import REQUIREMENTS as REQUIREMENTS
from plimsoll.certification.requirements import (
    blocks as blocks,
    codes as codes,
    elements as elements,
    reductions as reductions,
    stochastic as stochastic,
    tensors as tensors,
)
