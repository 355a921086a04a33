"""How many overflows a scale may have before it is lowered."""

from dataclasses import dataclass
from typing import Literal, get_args

from plimsoll.errors import ArgumentError

Kind = Literal["consecutive", "windowed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hysteresis:
    """The scale is lowered by the overflow that brings their count to `overflows`, and by each one after it.

    - ``consecutive``: the count starts again with every clean step, so that single hard batches cost themselves only.
      DeepSpeed counts like this with ``consecutive_hysteresis``.
    - ``windowed``: the count starts again when the scale grows, so that overflows add up over a whole growth interval.
      This is Megatron-LM's rule. DeepSpeed counts like this without ``consecutive_hysteresis``.

    A step with an overflow is skipped whether or not the scale is lowered. DeepSpeed lets its scale grow one clean step
    later: it does not count the first clean step after an overflow, nor that of the training.
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
