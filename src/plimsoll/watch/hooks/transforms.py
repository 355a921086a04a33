"""`torch.func` transforms: whether one runs on this thread, and plain code in the midst of one.

Inside `vmap`, `grad`, `vjp`, `jvp` and what is made of them every tensor is a wrapper of the transform, without data of
its own, and so is every new one, also one that no code of the transform ever sees. Such a tensor is of no use once the
transform has returned: a bank of rows that was made there spoiled the whole sample.
"""

import contextlib
import importlib
from collections.abc import Generator
from typing import Any, cast

import torch

# torch has neither of these in public; all versions from 2.9 on have both, in these places.
_innermost: Any = cast("Any", torch)._C._functorch.peek_interpreter_stack  # noqa: SLF001


def is_transformed() -> bool:
    """Return True if the calling code runs inside a `torch.func` transform."""
    return _innermost() is not None


@contextlib.contextmanager
def outside_transforms() -> Generator[None]:
    """Context in which operations run as if no transform was around them."""
    inner: Any = importlib.import_module("torch._functorch.pyfunctorch")
    with inner.temporarily_clear_interpreter_stack():
        yield
