"""Random numbers in a repetition: the same that the real step had."""

import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_backward_running: Any = torch._C._current_graph_task_id  # type: ignore[attr-defined]  # noqa: SLF001  (see _taps)
ALIKE = frozenset({"cpu", "meta"})  # devices whose dropout does not depend on the dtype


class RandomState:
    """Present state of Python's, NumPy's and torch's generators. Waits for no device."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._python, self._numpy = random.getstate(), np.random.get_state()  # noqa: NPY002  (the one that models use)
        places = {torch.device("cpu"), *(device for device in devices if device.type != "meta")}
        self.states = {device: state_of(device) for device in places}

    def matches(self, other: "RandomState") -> bool:
        """Return True if torch's generators are in the same state."""
        return all(torch.equal(state, other.states[device]) for device, state in self.states.items())

    def restore(self) -> None:
        """Puts them back."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)  # noqa: NPY002
        for device, state in self.states.items():
            put(device, state)


def state_of(device: torch.device) -> Tensor:
    """The state of a device's generator."""
    if device.type == "cpu":
        return torch.get_rng_state()
    generator: Any = torch.get_device_module(device)
    return generator.get_rng_state() if device.type == "mps" else generator.get_rng_state(device)


def put(device: torch.device, state: Tensor) -> None:
    """Sets the state of a device's generator."""
    if device.type == "cpu":
        torch.set_rng_state(state)
        return
    generator: Any = torch.get_device_module(device)
    _ = generator.set_rng_state(state) if device.type == "mps" else generator.set_rng_state(state, device)


# Setting the generators back is enough on a CPU, whose draws do not depend on the dtype. On a GPU dropout's do: it
# takes as many numbers at a time as values fit into its widest load, and FP16 gets another mask than FP32. So the
# forward is run once more as it was, without gradients, only to note each dropout's dtype and generator state; in FP32
# the mask is then drawn in that dtype from that state. A checkpoint's recomputation, which comes out of order, finds
# its dtype by the state that the checkpoint has set.
class Dropouts(TorchFunctionMode):
    """Random states of a forward's dropouts: recorded inside, used again by `again`."""

    def __init__(self) -> None:
        super().__init__()
        self._noted: list[tuple[torch.dtype, Tensor]] = []
        self._by_state: dict[bytes, torch.dtype] = {}
        self._next = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_dropout(func, kwargs):
            state = state_of(args[0].device)
            self._noted.append((args[0].dtype, state))
            self._by_state[state.numpy().tobytes()] = args[0].dtype
        return func(*args, **kwargs)

    def again(self, func: Any, x: Tensor, p: float, *, inplace: bool) -> Tensor:
        """The dropout of x with the mask that the real step has drawn there."""
        if _backward_running() != -1:
            dtype = self._by_state.get(state_of(x.device).numpy().tobytes(), x.dtype)
        elif self._next < len(self._noted):
            dtype, state = self._noted[self._next]
            self._next += 1
            put(x.device, state)
        else:
            dtype = x.dtype
        drawn = func(torch.ones_like(x, dtype=dtype, requires_grad=False), p=p, training=True)
        factor = (drawn != 0).to(x.dtype) * (1 / (1 - p) if p < 1 else 0.0)
        return x.mul_(factor) if inplace else x * factor


def is_dropout(func: Any, kwargs: Any) -> bool:
    """Return True if a call drops anything."""
    return func is functional.dropout and bool(kwargs.get("training", True))
