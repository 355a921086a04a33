"""Training without an optimizer: whether a script has changed the weights itself.

``p.data.add_(p.grad, alpha=-lr)`` leaves no trace but the values. On a CPU a few of them are kept and compared. On
another device that would mean to wait for it, so there only what needs no values is looked at: versions, and whether
gradients were dropped.
"""

import weakref
from collections.abc import Iterable

import torch
from torch import Tensor

_TENSORS, _VALUES = 8, 256  # that are compared


class Probe:
    """Weights as they are now, to see later whether they have moved.

    `wait`: values on other devices are looked at too, which waits for them.
    """

    def __init__(self, parameters: Iterable[Tensor], *, wait: bool = False) -> None:
        found = list(parameters)
        self._versions = [(weakref.ref(p), p._version) for p in found]  # noqa: SLF001  (public in all but name)
        near = [p for p in found if (wait or p.device.type == "cpu") and p.numel() and _is_there(p)]
        near = sorted(near, key=lambda p: p.numel())[:_TENSORS]
        self._values = [(weakref.ref(p), _some(p).clone()) for p in near]

    def is_moved(self, *, unknown: bool = False) -> bool:
        """Whether they are others now; `unknown` is the answer where that cannot be seen."""
        if any((p := ref()) is not None and p._version != version for ref, version in self._versions):  # noqa: SLF001
            return True
        if not self._values:
            return unknown and bool(self._versions)
        pairs = [(ref(), before) for ref, before in self._values]
        return any(p is not None and _is_there(p) and not torch.equal(_some(p), before) for p, before in pairs)


def _some(p: Tensor) -> Tensor:
    return p.detach().reshape(-1)[:_VALUES]


def _is_there(p: Tensor) -> bool:
    """Whether its values are in memory of its own: FSDP frees those that it has gathered."""
    plain = type(p.data) is Tensor and p.is_contiguous()
    return plain and p.untyped_storage().nbytes() >= (p.storage_offset() + p.numel()) * p.element_size()
