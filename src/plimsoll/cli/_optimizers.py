"""Hears of every optimizer that a script makes, and imports torch no sooner than the script does.

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


def hear(tell: Callable[[Any], None]) -> None:
    """Calls `tell`, which must not raise, with each optimizer once its `torch.optim.Optimizer` part is made."""
    if _HOME in sys.modules:
        _patch(sys.modules[_HOME], tell)
    else:
        sys.meta_path.insert(0, _OnImport(tell))


class _OnImport:
    """Finds one module as ever, once, and patches it when it has been loaded."""

    def __init__(self, tell: Callable[[Any], None]) -> None:
        self._tell = tell

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
                _patch(module, self._tell)

            spec.loader.exec_module = exec_module
        return spec


def _patch(module: ModuleType, tell: Callable[[Any], None]) -> None:
    for name in _METHODS:
        setattr(module.Optimizer, name, _telling(getattr(module.Optimizer, name), tell))


def _telling(original: Callable[..., Any], tell: Callable[[Any], None]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        tell(self)
        return result

    return method
