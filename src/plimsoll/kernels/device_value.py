"""Device values that are copied to the host asynchronously."""

from typing import Any

import torch
from torch import Tensor


class DeviceValue:
    """Snapshot of a tensor's contents, to be read on the host later."""

    __slots__ = ("_event", "_host")

    # On the CPU a value is ready at once. On other devices it is copied to pinned memory on the current stream, and an
    # event is recorded after the copy. Only a reader of the value waits for that event, never the training step.
    def __init__(self, x: Tensor) -> None:
        x = x.detach()
        self._event: Any = None
        if x.device.type == "cpu":
            self._host = x.clone()
            return
        accelerator = x.device.type == "cuda"
        self._host = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=accelerator)
        self._host.copy_(x, non_blocking=True)
        if accelerator:
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(x.device))

    def ready(self) -> bool:
        """Return whether `tensor` returns without waiting."""
        return self._event is None or bool(self._event.query())

    def tensor(self) -> Tensor:
        """Return the contents on the host. Waits for the device."""
        if self._event is not None:
            self._event.synchronize()
        return self._host

    def value(self) -> float:
        """Return the number in a one-element tensor. Waits for the device."""
        return float(self.tensor().item())


def number(value: object) -> "float | DeviceValue":
    """Return a number as a float, or a device's one-element tensor as `DeviceValue`."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"one number is needed; this tensor has the shape {tuple(value.shape)}")
        if value.device.type == "cpu":
            return float(value.detach().item())
        return DeviceValue(value.reshape(()).double())
    return float(value)  # type: ignore[arg-type]


def ready(value: "float | DeviceValue | None") -> bool:
    """Return whether `resolved` returns without waiting."""
    return not isinstance(value, DeviceValue) or value.ready()


def resolved(value: "float | DeviceValue | None") -> float | None:
    """Return the number. Waits for the device that computes it."""
    return value.value() if isinstance(value, DeviceValue) else value
