"""Recomputation of activation checkpoints under the contexts of their forward.

torch saves the state of its own autocast with a checkpoint, and no other state. So while any context is open, the two
functions that `torch.utils.checkpoint.checkpoint` calls are patched to run the user's function under its frame. A
checkpoint made inside recomputes correctly even if its backward runs after the context has ended and the patch is gone.
"""

import functools
import threading
from collections.abc import Callable
from typing import Any

from torch.utils import checkpoint as _torch_checkpoint

_module: Any = _torch_checkpoint
_GENERATOR = "_checkpoint_without_reentrant_generator"

Remember = Callable[[Callable[..., Any]], Callable[..., Any]]  # a function -> the same with the present frame

_lock = threading.Lock()
_open = 0
_undo: list[Callable[[], None]] = []


def patch(remember: Remember) -> None:
    """Count one more open context. The first installs the patch."""
    global _open  # noqa: PLW0603  (the count of the process's one patch)
    with _lock:
        if not _open:
            _undo.append(_replace(_module, _GENERATOR, _generator(getattr(_module, _GENERATOR), remember)))
            kind = _module.CheckpointFunction
            _undo.append(_replace(kind, "forward", staticmethod(_forward(kind.forward, remember))))
        _open += 1


def unpatch() -> None:
    """Count one open context less. The last removes the patch."""
    global _open  # noqa: PLW0603
    with _lock:
        _open -= 1
        while not _open and _undo:
            _undo.pop()()


def _generator(original: Any, remember: Remember) -> Any:
    @functools.wraps(original)
    def generator(function: Any, *args: Any, **kwargs: Any) -> Any:
        return original(remember(function), *args, **kwargs)

    return generator


def _forward(original: Any, remember: Remember) -> Any:
    @functools.wraps(original)
    def forward(ctx: Any, run_function: Any, *args: Any) -> Any:
        return original(ctx, remember(run_function), *args)

    return forward


def _replace(owner: Any, name: str, ours: Any) -> Callable[[], None]:
    original = owner.__dict__[name]
    setattr(owner, name, ours)

    def undo() -> None:
        if owner.__dict__.get(name) is ours:  # other code may have wrapped our function since
            setattr(owner, name, original)

    return undo
