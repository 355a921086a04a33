"""Choice of the layers to convert, with the reason for each that is left out."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, cast

from torch import nn

from plimsoll.errors import ArgumentError
from plimsoll.fp8.linear import Linear
from plimsoll.kernels.operators.fp8_cast import INPUTS
from plimsoll.notebook_repr import NotebookRepr
from plimsoll.unit import nn as unit_nn

_TAKEN: tuple[type, ...] = (nn.Linear, Linear, unit_nn.Linear, unit_nn.LinearReadout)


@dataclass(frozen=True, slots=True, kw_only=True)
class Left(NotebookRepr):
    """A module with a product that stays as it was, and why."""

    module: str
    why: str

    def __str__(self) -> str:
        return f"{self.module}: {self.why}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Globs:
    """Globs of the user: modules to include (None: all) and to exclude."""

    include: tuple[str, ...] | None
    exclude: tuple[str, ...]

    @classmethod
    def of(
        cls, operation: str, model: nn.Module, include: str | Sequence[str] | None, exclude: str | Sequence[str] | None
    ) -> "Globs":
        """Return the globs, or raise `ArgumentError` if one matches no module."""
        globs = cls(include=None if include is None else _listed(include), exclude=_listed(exclude or ()))
        names = [name for name, _ in modules_of(model)]
        for argument, patterns in (("include", globs.include or ()), ("exclude", globs.exclude)):
            for glob in patterns:
                if not any(fnmatchcase(name, glob) for name in names):
                    raise ArgumentError(
                        f"{operation}: expected {argument} to match modules of the model; got {glob!r}, which matches "
                        f"none. Its modules are {', '.join(names[:6])}{', ...' if len(names) > 6 else ''}."
                    )
        return globs


def modules_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return every module once, by its name. The root is "model"."""
    modules = cast("Iterable[tuple[str, nn.Module]]", model.named_modules())
    return [(name or "model", module) for name, module in modules]


def explicit(name: str, globs: Globs) -> bool:
    """Return whether the user included this very name."""
    return globs.include is not None and name in globs.include


def why_not(name: str, module: nn.Module, globs: Globs, sharded: bool) -> str | None:
    """Return the reason to leave a module with a product, or None to convert it.

    "" for a module without a product.
    """
    if not isinstance(module, nn.Linear):
        return _why_no_layer(module)
    if any(fnmatchcase(name, glob) for glob in globs.exclude):
        return "excluded"
    if globs.include is not None and not any(fnmatchcase(name, glob) for glob in globs.include):
        return "not included"
    if type(module) not in _TAKEN:
        return f"its class {type(module).__name__} may have another forward"
    if globs.include is None and _is_readout(module) and not isinstance(module, Linear):
        return "a readout, whose gradients come straight from the loss; include it by name to convert it"
    return _why_no_weight(module, sharded)


def _why_no_layer(module: nn.Module) -> str:
    """Return a reason for modules with a matrix that are no linear layer."""
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return ""
    own = [name for name, parameter in module.named_parameters(recurse=False) if parameter.dim() > 1]
    return f"its class {type(module).__name__} is no linear layer" if own else ""


def _why_no_weight(module: nn.Linear, sharded: bool) -> str | None:
    weight = dict(module.named_parameters(recurse=False)).get("weight")
    if weight is None:
        return "its weight is computed by a parametrization"
    if hasattr(weight, "placements") and (cast("Any", weight).device_mesh.ndim > 1 or not sharded):
        return "its weight is split for tensor parallelism"
    if weight.dtype not in INPUTS:
        return f"its weight is {weight.dtype}"
    return None


def is_sharded(model: nn.Module) -> bool:
    """Return whether FSDP2 shards the model, so that it gathers weights before use."""
    return any(hasattr(module, "set_modules_to_forward_prefetch") for module in model.modules())


def _is_readout(module: nn.Linear) -> bool:
    kinds = getattr(module, "unit_kinds", {})
    return isinstance(module, unit_nn.LinearReadout) or kinds.get("weight") == "readout"


def _listed(globs: str | Sequence[str]) -> tuple[str, ...]:
    return (globs,) if isinstance(globs, str) else tuple(globs)
