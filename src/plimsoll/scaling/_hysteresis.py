"""How many overflows a scale may have before it is lowered."""

from dataclasses import dataclass
from typing import Literal, get_args

from plimsoll.errors import ArgumentError

Kind = Literal["consecutive", "windowed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hysteresis:
    """The scale is lowered by the overflow that brings their count to `overflows`, and by each one after it.

    - ``consecutive``: the count starts anew with every clean step, so that single hard batches cost themselves only.
      DeepSpeed's rule with ``consecutive_hysteresis``.
    - ``windowed``: the count starts anew when the scale grows, so that overflows add up over a whole growth interval.
      The rule of Megatron-LM, and DeepSpeed's without ``consecutive_hysteresis``.

    A step with an overflow is skipped whether or not the scale is lowered.
    """

    overflows: int = 1
    kind: Kind = "consecutive"

    def __post_init__(self) -> None:
        if type(self.overflows) is not int or self.overflows < 1:
            raise ArgumentError(
                f"Hysteresis: expected overflows of 1 or more, an int; got {self.overflows!r}. Use 1 to lower the "
                "scale at every overflow."
            )
        if self.kind not in get_args(Kind):
            raise ArgumentError(
                f"Hysteresis: expected kind 'consecutive' or 'windowed'; got {self.kind!r}. See the two described "
                "under Hysteresis."
            )
