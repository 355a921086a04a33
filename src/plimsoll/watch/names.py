"""Names of parameters and modules, and of tensors by their place in a structure.

Wrappers leave no trace: a model inside `torch.compile`, DistributedDataParallel or a checkpoint wrapper has the names
that it has without. The root module is called "model".
"""

import dataclasses
import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from torch import Tensor, nn

from plimsoll.errors import ArgumentError
from plimsoll.watch.settings import Pattern, Settings

ROOT = "model"
_ROOT_BESIDE_MODEL = "(model)"  # its name where a submodule is called "model"
_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_INSIDE = {  # by class, the name of what it wraps
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "_FabricModule": "_original_module",
}
_DEEPEST = 6  # levels of containers in a module's output: deeper ones (and cycles) are not looked into


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's own module inside what torch and trainers put around it."""
    while True:
        inside = model.__dict__.get("_modules", {})
        inner = inside.get(_INSIDE.get(type(model).__name__, "_orig_mod"))
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def class_of(model: nn.Module) -> type[nn.Module]:
    """Return the user's class inside all wrappers, FSDP's and checkpointing's too."""
    while True:
        model = unwrapped(model)
        inside = model.__dict__.get("_modules", {})
        inner = next((inside[name] for name in _WRAPPERS if isinstance(inside.get(name), nn.Module)), None)
        if inner is None:
            return type(model)
        model = inner


def module_names(root: nn.Module) -> dict[str, nn.Module]:
    """Every module by its clean name, the root first."""
    named = cast("Iterable[tuple[str, nn.Module]]", root.named_modules())
    inner = {clean(name): module for name, module in named if name}
    inner.pop("", None)  # a wrapper's own level
    return {_ROOT_BESIDE_MODEL if ROOT in inner else ROOT: root, **inner}


def clean(name: str) -> str:
    """A qualified name without the levels that wrappers add."""
    if not any(wrapper in name for wrapper in _WRAPPERS):
        return name
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def tensors_in(value: Any) -> list[tuple[str, Tensor]]:
    """Return an output's floating tensors by index or key; "" for a single one."""
    if isinstance(value, Tensor):
        return [("", value)] if value.is_floating_point() else []
    tensors: list[tuple[str, Tensor]] = []
    _gather(value, "", tensors, 0)
    return [("", tensors[0][1])] if len(tensors) == 1 else tensors


def tensors_among(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Tensor]]:
    """Return the arguments' floating tensors by index or keyword; "" for a single one."""
    if len(args) == 1 and not kwargs:
        return tensors_in(args[0])
    tensors: list[tuple[str, Tensor]] = []
    for index, value in enumerate(args):
        _gather(value, f".{index}", tensors, 1)
    for key, value in kwargs.items():
        _gather(value, f".{key}", tensors, 1)
    return [("", tensors[0][1])] if len(tensors) == 1 else tensors


def _gather(value: Any, path: str, found: list[tuple[str, Tensor]], depth: int) -> None:
    if isinstance(value, Tensor):
        if value.is_floating_point():
            found.append((path, value))
    elif value is None or isinstance(value, (str, int, float)) or depth > _DEEPEST:
        return
    elif isinstance(value, Mapping):
        for key, item in cast("Mapping[Any, Any]", value).items():
            _gather(item, f"{path}.{key}", found, depth + 1)
    elif isinstance(value, (list, tuple)):
        fields = getattr(cast("Any", value), "_fields", None)  # a named tuple's
        for index, item in enumerate(cast("Sequence[Any]", value)):
            _gather(item, f"{path}.{index if fields is None else fields[index]}", found, depth + 1)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            _gather(getattr(value, field.name), f"{path}.{field.name}", found, depth + 1)


class Selection:
    """The modules and parameters that `include` and `exclude` leave.

    A pattern names a module with all that is in it, or a parameter. One that is a name itself matches that name only.
    """

    def __init__(self, settings: Settings, modules: Mapping[str, nn.Module], parameters: Iterable[str]) -> None:
        self._modules = {name: type(module) for name, module in modules.items()}
        self._names = {*self._modules, *parameters}
        self._include, self._exclude = settings.include, settings.exclude
        for argument, patterns in (("include", settings.include or ()), ("exclude", settings.exclude)):
            for pattern in patterns:
                self._check(argument, pattern)

    def meet(self, modules: Mapping[str, nn.Module], parameters: Iterable[str]) -> None:
        """The model has these modules and parameters now."""
        self._modules |= {name: type(module) for name, module in modules.items()}
        self._names |= {*modules, *parameters}

    def takes(self, name: str) -> bool:
        """Return True if the module or parameter of that name is watched."""
        line = _line(name)
        included = self._include is None or any(self._matches(p, line) for p in self._include)
        return included and not any(self._matches(p, line) for p in self._exclude)

    def _matches(self, pattern: Pattern, line: Sequence[str]) -> bool:
        if isinstance(pattern, str):
            if pattern in self._names:
                return pattern in line
            return any(fnmatch.fnmatchcase(name, pattern) for name in line)
        return any(issubclass(self._modules[name], pattern) for name in line if name in self._modules)

    def _check(self, argument: str, pattern: Pattern) -> None:
        if not any(self._matches(pattern, [name]) for name in self._names):
            some = ", ".join(sorted(self._names)[:5])
            raise ArgumentError(
                f"watch: expected each pattern of {argument} to match a module or parameter; {pattern!r} matches none. "
                f"Names are like {some}."
            )


def _line(name: str) -> list[str]:
    """Return the name and those of the modules around it, the root last.

    A pattern for the root alone selects all.
    """
    parts = name.split(".")
    return [*(".".join(parts[:end]) for end in range(len(parts), 0, -1)), ROOT][: len(parts) + (name != ROOT)]
