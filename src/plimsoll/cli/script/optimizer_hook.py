"""Detection of the optimizers and backwards of a script. It imports torch no sooner than the script does.

torch reads some of the environment as it is imported (OMP_NUM_THREADS, TORCH_LOGS), and scripts set that in their first
lines. So `torch.optim.optimizer` is patched when the script's own import of it has just ended.
"""

import functools
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

_HOME = "torch.optim.optimizer"
_METHODS = ("__init__", "__setstate__")  # made, and unpickled or copied


def hear(tell: Callable[[Any], None], heed: Callable[[Any], bool] | None = None) -> None:
    """Call `tell` with each optimizer once its `torch.optim.Optimizer` part is made; it must not raise.

    `heed` is called with what each backward begins from, until it says that it need not hear of more.
    """

    def patch(module: ModuleType) -> None:
        _patch(module, tell)
        if heed is not None:
            _patch_backward(sys.modules["torch.autograd"], heed)

    if _HOME in sys.modules:
        patch(sys.modules[_HOME])
    else:
        sys.meta_path.insert(0, _OnImport(patch))


class _OnImport:
    """Finds one module as ever, once, and patches it when it has been loaded."""

    def __init__(self, patch: Callable[[ModuleType], None]) -> None:
        self._patch = patch

    def find_spec(
        self, name: str, _path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _HOME:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                self._patch(module)

            spec.loader.exec_module = exec_module
        return spec


def _patch(module: ModuleType, tell: Callable[[Any], None]) -> None:
    for name in _METHODS:
        setattr(module.Optimizer, name, _telling(getattr(module.Optimizer, name), tell))


def _patch_backward(autograd: Any, heed: Callable[[Any], bool]) -> None:
    original = autograd.backward

    @functools.wraps(original)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if autograd.backward is backward:
            autograd.backward = original  # so that a watch which begins now sees this backward too
            if not heed(tensors) and autograd.backward is original:
                autograd.backward = backward
                return original(tensors, *args, **kwargs)
            return autograd.backward(tensors, *args, **kwargs)
        return original(tensors, *args, **kwargs)

    autograd.backward = backward


def _telling(original: Callable[..., Any], tell: Callable[[Any], None]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        tell(self)
        return result

    return method
