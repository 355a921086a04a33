"""State of a thread: which emulated casts and FP8 layers act in what runs now, and how to compute aside of them."""

import contextlib
import threading
from collections.abc import Generator
from typing import Any, cast

import torch
from torch.utils import _python_dispatch as dispatch

_C = cast("Any", torch)._C  # noqa: SLF001  (it has DisableTorchFunction, which torch offers nowhere else)


class ActiveCasts(threading.local):
    """State of a thread: which casts act in what runs now.

    Attributes:
        reference: The dtype of the reference that runs, None where none does. In a reference nothing is rounded.
        kept: The casts that act: "weights", "activations" and "gradients" (operands of products), "sums" (a product's
            accumulator) and "results" (of operations). None: all.
        acted: Takes each cast that would act, and its format. None: nobody asks.
    """

    reference: torch.dtype | None = None
    kept: frozenset[str] | None = None
    acted: set[tuple[str, str]] | None = None

    def acts(self, cast: str, fmt: str) -> bool:
        """Return True if a cast to a format acts now."""
        if self.acted is not None:
            self.acted.add((cast, fmt))
        return self.kept is None or cast in self.kept


active_casts = ActiveCasts()


@contextlib.contextmanager
def without_rounding(dtype: torch.dtype = torch.float32) -> Generator[None]:
    """Inside, nothing is rounded to a narrower format by an emulation or an FP8 layer."""
    before, active_casts.reference = active_casts.reference, dtype
    try:
        yield
    finally:
        active_casts.reference = before


@contextlib.contextmanager
def as_written(kind: str) -> Generator[None]:
    """Compute in the dtypes of the operands, hidden from every mode."""
    # Under autocast, or an emulation of it, the product would be rounded to 16 bits. In FP16 it overflows where the
    # attention does not: the kernel adds up in FP32, and scales before it rounds.
    with contextlib.ExitStack() as stack:
        if torch.amp.is_autocast_available(kind):
            stack.enter_context(torch.autocast(kind, enabled=False))
        stack.enter_context(without_rounding())
        stack.enter_context(_C.DisableTorchFunction())
        stack.enter_context(cast("Any", dispatch)._disable_current_modes())  # noqa: SLF001
        yield
