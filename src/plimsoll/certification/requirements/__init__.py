"""The rows of a certificate: every requirement, with its source and its check.

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
