"""Where a layer's casts count what they read: which banks, which rows."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from plimsoll.errors import ArgumentError
from plimsoll.fp8.scales import ROLES, Role


class Counting(NamedTuple):
    """Where casts count what they read: activations and weights in the one bank, gradients in the other."""

    forward: Tensor | None
    backward: Tensor | None
    rows: Mapping[Role, int]

    def row(self, role: Role) -> tuple[Tensor | None, int]:
        """Return the bank and the row of a role; None where it is not counted."""
        if role not in self.rows:
            return None, 0
        return self.backward if role == "gradients" else self.forward, self.rows[role]


def check_counting(
    forward: Tensor | None, backward: Tensor | None, rows: Mapping[Role, int], device: torch.device
) -> Counting | None:
    """Where to count, None for no rows; `ArgumentError` for rows that a bank lacks, and for one bank in both places."""
    unknown = [role for role in rows if role not in ROLES]
    if unknown:
        raise ArgumentError(
            f"count_into: expected rows of {', '.join(ROLES)}; got {unknown[0]!r}. These are what a linear layer casts."
        )
    if rows and forward is not None and forward is backward:
        raise ArgumentError("count_into: expected two banks; got one for both directions. Make another with new_bank.")
    counting = Counting(forward, backward, dict(rows))
    for role in rows:
        bank, row = counting.row(role)
        if bank is None or bank.dim() != 2 or not 0 <= row < bank.shape[0] or bank.device != device:
            came = "None" if bank is None else f"one of shape {tuple(bank.shape)} on {bank.device}"
            raise ArgumentError(
                f"count_into: expected a bank on {device} with a row {row} for {role}; got {came}. Make it with "
                "new_bank."
            )
    return counting if rows else None
