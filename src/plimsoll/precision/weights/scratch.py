"""Memory that float32 values and gradients are opened in, one step after another."""

import torch
from torch import Tensor

_FLOAT32_BYTES = 4


class Scratch:
    """Memory on the CPU for what is open, kept from step to step: fresh memory costs more than the step itself.

    On other devices torch keeps freed memory at hand itself.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0)
        self._used = 0

    @property
    def nbytes(self) -> int:
        """How much there is."""
        return self._memory.nbytes

    def start(self, size_bytes: int) -> None:
        """All is free again, and there is so much; what was taken before must be out of use."""
        if self._memory.nbytes < size_bytes:
            self._memory = torch.empty(size_bytes // _FLOAT32_BYTES)
        self._used = 0

    def take(self, like: Tensor) -> Tensor | None:
        """Float32 memory for a tensor of that shape, or None where it has to be other memory."""
        end = self._used + like.numel()
        if not like.is_cpu or like.is_sparse or not like.is_contiguous() or end > self._memory.numel():
            return None
        taken = self._memory[self._used : end].view(like.shape)
        self._used = end
        return taken
