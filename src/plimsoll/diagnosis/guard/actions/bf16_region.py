"""Modules of a hand-written loop in BF16: hooks that enter it when a module is called, and leave it when it returns.

What comes in as FP16 is FP32 inside, and what goes out is FP32: everything in between has FP32's range, and what is
around casts as it does with any FP32 value.
"""

import contextlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from plimsoll.emulate import CUDA, Autocast, emulate
from plimsoll.emulate.dispatch import thread_frame
from plimsoll.kernels.dtypes import SIXTEEN_BIT
from plimsoll.watch.taps.compiled_taps import inlined_only


class InBF16:
    """Modules that compute in BF16 until `remove`."""

    def __init__(self, modules: Iterable[nn.Module], kind: str) -> None:
        self._handles: list[Any] = []
        for module in modules:
            region = _Region(kind)
            self._handles.append(module.register_forward_pre_hook(region.enter, prepend=True, with_kwargs=True))
            self._handles.append(module.register_forward_hook(region.leave, always_call=True))

    def remove(self) -> None:
        """The modules compute as what is around them."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


class _Region:
    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._open: list[contextlib.AbstractContextManager[Any]] = []

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:  # noqa: ARG002  (torch's to choose)
        """Before the module's forward."""
        context = _bf16(self._kind)
        context.__enter__()
        self._open.append(context)
        return _wide(args), _wide(kwargs)

    def leave(self, module: nn.Module, args: Any, output: Any) -> Any:  # noqa: ARG002  (torch's to choose)
        """After it, also where it has raised."""
        self._open.pop().__exit__(None, None, None)
        return _wide(output)


inlined_only(_Region.enter, _Region.leave)


def _bf16(kind: str) -> contextlib.AbstractContextManager[Any]:
    """BF16 in the way of what is in force around: an emulation, the lists of `Autocast`, or torch's autocast."""
    if thread_frame.current() is not None:
        return emulate("bf16") if kind == "cpu" else Autocast(CUDA, torch.bfloat16)
    # Without the cache, which is by weight alone: one that is used in FP16 too would be found in that.
    return torch.autocast(kind, torch.bfloat16, cache_enabled=False)


def _wide(value: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda x: x.float() if x.dtype in SIXTEEN_BIT else x, value)
