"""Values that a device still computes: handed to the host without anyone in the training step waiting for them.

On the CPU a value is there at once. On other devices it is copied to pinned memory on the current stream, with an event
behind the copy; only whoever reads the value waits for that event.
"""

from typing import Any

import torch
from torch import Tensor


class Later:
    """A tensor's contents as they are now, to be read on the host at some later time."""

    __slots__ = ("_event", "_host")

    def __init__(self, x: Tensor) -> None:
        x = x.detach()
        self._event: Any = None
        if x.device.type == "cpu":
            self._host = x.clone()
            return
        accelerator = x.device.type == "cuda"
        self._host = torch.empty(x.shape, dtype=x.dtype, pin_memory=accelerator)
        self._host.copy_(x, non_blocking=True)
        if accelerator:
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(x.device))

    def ready(self) -> bool:
        """Whether `tensor` would come back at once."""
        return self._event is None or bool(self._event.query())

    def tensor(self) -> Tensor:
        """The contents, on the host; waits for the device."""
        if self._event is not None:
            self._event.synchronize()
        return self._host

    def value(self) -> float:
        """The number, of a tensor that holds one; waits for the device."""
        return float(self.tensor().item())
