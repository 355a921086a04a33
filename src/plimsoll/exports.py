"""Public names of packages: loaded on first use, shown with their package."""

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, TypeVar

Class = TypeVar("Class")


def lazy(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return a package's `__getattr__` and `__dir__` for names loaded on first use.

    See PEP 562.

    Args:
        package: The package's ``__name__``.
        homes: For each name its module, relative to the package. Names of subpackages have an empty one.
    """

    def get(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if not homes[name]:
            return importlib.import_module(f"{package}.{name}")
        value = getattr(importlib.import_module(f"{package}.{homes[name]}"), name)
        _show_in(package, value)
        vars(sys.modules[package])[name] = value
        return value

    def names() -> list[str]:
        present = vars(sys.modules[package])
        return sorted({*homes, *(name for name, value in present.items() if _is_public(name, value))})

    return get, names


def exported_by(package: str) -> Callable[[type[Class]], type[Class]]:
    """Return a decorator by which a class names a package as its module.

    `show_classes` does the same. For classes whose module the package imports later than its own use of them.
    """

    def decorate(cls: type[Class]) -> type[Class]:
        cls.__module__ = package
        return cls

    return decorate


def show_classes(package: str) -> None:
    """Let a package's classes name it as their module, in `repr` and in pickles."""
    # A pickle then does not depend on the file that a class is in.
    for value in list(vars(sys.modules[package]).values()):
        _show_in(package, value)


def make_callable(package: str, function: Callable[..., Any]) -> None:
    """Let a call of a package call its function, as ``plimsoll.watch(model)`` does."""

    # The package has the name of its main function, and an import of the package would otherwise hide the function.
    class CallablePackage(ModuleType):
        """A package that is a function too."""

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

    module: Any = sys.modules[package]
    module.__class__ = CallablePackage
    module.__signature__ = inspect.signature(function)


def _show_in(package: str, value: object) -> None:
    if not isinstance(value, type) or not value.__module__.startswith(f"{package}."):
        return
    # A class that names a package keeps it: `pl.Interval` is `plimsoll.spectrum.Interval` in every order of imports.
    if not hasattr(sys.modules.get(value.__module__), "__path__"):
        value.__module__ = package


def _is_public(name: str, value: object) -> bool:
    if name.startswith("__"):
        return True
    return not (name.startswith("_") or isinstance(value, ModuleType) or name == "TYPE_CHECKING")
