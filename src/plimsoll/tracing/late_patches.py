"""Patches of modules not imported yet: torch's compiler takes seconds to load."""

import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType


class _OnImport:
    """Finder of one module, which patches it when it has been loaded."""

    def __init__(self, name: str, patch: Callable[[ModuleType], None]) -> None:
        self._name, self._patch = name, patch

    def find_spec(
        self, name: str, _path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self._name:
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


def when_imported(name: str, patch: Callable[[ModuleType], None]) -> Callable[[], None]:
    """Call `patch` with a module, now or on import; return the function to cancel."""
    if name in sys.modules:
        patch(sys.modules[name])
        return lambda: None
    finder = _OnImport(name, patch)
    sys.meta_path.insert(0, finder)

    def stop() -> None:
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)

    return stop
