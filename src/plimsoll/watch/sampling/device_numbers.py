"""Numbers that a device still computes: read by the background thread, which alone waits for them."""

from torch import Tensor

from plimsoll.kernels.device_value import Later as Later


def number(value: object) -> "float | Later":
    """A Python number as it is, or a tensor of one value for later."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"one number is needed; this tensor has the shape {tuple(value.shape)}")
        if value.device.type == "cpu":
            return float(value.detach().item())
        return Later(value.reshape(()).double())
    return float(value)  # type: ignore[arg-type]


def ready(value: "float | Later | None") -> bool:
    """Whether the value can be read without waiting."""
    return not isinstance(value, Later) or value.ready()


def resolved(value: "float | Later | None") -> float | None:
    """The number itself; waits for the device."""
    return value.value() if isinstance(value, Later) else value
