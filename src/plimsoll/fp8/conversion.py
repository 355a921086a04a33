"""`convert`: the linear layers of a model become FP8 ones, in place."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, cast

from torch import nn

from plimsoll import checks
from plimsoll.errors import ArgumentError, StateError
from plimsoll.fp8.linear import Linear
from plimsoll.fp8.recipe import NO_FACTORS, Recipe, Scaling, checked
from plimsoll.kernels.operators.fp8_cast import INPUTS
from plimsoll.results import NotebookRepr
from plimsoll.unit import formulas, nn as unit_nn
from plimsoll.unit.functional.ideal_factors import resolve_factors

# -- choice of the layers, with the reason for each that is left out ---------------------------------------------------

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
        globs = cls(
            include=None if include is None else _listed(operation, "include", include),
            exclude=_listed(operation, "exclude", exclude or ()),
        )
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
    """Return why a module with a product stays, None to convert it, "" without one."""
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


def _listed(operation: str, name: str, globs: str | Sequence[str]) -> tuple[str, ...]:
    listed = [globs] if isinstance(globs, str) else checks.items(operation, name, globs)
    if not all(isinstance(glob, str) for glob in listed):
        raise ArgumentError(f"{operation}: expected {name} to be names of modules or globs; got {name}={globs!r}.")
    return tuple(listed)


# -- conversion --------------------------------------------------------------------------------------------------------


def convert(
    model: nn.Module,
    scaling: Scaling,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    *,
    history: int = 0,
    margin: int = 0,
) -> nn.Module:
    """Replace the linear layers of a model by `fp8.Linear`.

    Layers are changed in place: the module objects, their names, hooks and parameters stay. So an existing optimizer
    keeps working, and shared weights stay shared. The factors of `unit.nn.Linear` are kept. A root that is a linear
    layer is converted too. A converted layer stays as it is if the result would be the same.

    Not converted are modules that `include` and `exclude` leave out, the readouts of unit-scaled models (their
    gradients come directly from the loss; a glob of `include` converts them), subclasses with a forward of their own,
    weights of float64, split for tensor parallelism or computed by a parametrization, and products outside linear
    layers. Each is in `model.fp8_left` with its reason.

    Args:
        model: Any module.
        scaling: "unit" for unit-scaled layers, "tensor" for any. See `fp8.Linear`.
        include: Globs over module names; the root is "model". Default: all.
        exclude: Globs of modules to leave out, also where `include` matches.
        history: See `fp8.Linear`.
        margin: See `fp8.Linear`.

    Returns:
        The model itself.

    Raises:
        ArgumentError: An argument is invalid, or "unit" meets a plain `torch.nn.Linear`, since constants do not fit
            tensors of any scale. Its full name in `include` converts it all the same. Nothing is changed.
        StateError: A layer was converted with other settings. Nothing is changed.

    >>> model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    >>> [str(left) for left in convert(model, "tensor", exclude="2").fp8_left]
    ['2: excluded']
    """
    operation = "fp8.convert"
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ArgumentError(f"{operation}: expected a torch.nn.Module; got {type(model).__name__}. Give the model.")
    checked(operation, scaling, history, margin)
    sharded = is_sharded(model)
    globs = Globs.of(operation, model, include, exclude)
    chosen: list[tuple[Any, Recipe]] = []
    left: list[Left] = []
    plain: list[str] = []
    for name, module in modules_of(model):
        why = why_not(name, module, globs, sharded)
        if why:
            left.append(Left(module=name, why=why))
        elif isinstance(module, nn.Linear) and why is None:
            unit_scaled = isinstance(module, (Linear, unit_nn.Linear))
            if scaling == "unit" and not unit_scaled and not explicit(name, globs):
                plain.append(name)
            chosen.append((module, _recipe(name, module, scaling, history, margin)))
    _refuse_plain(plain)
    for module, recipe in chosen:
        if not isinstance(module, Linear):
            module.__class__ = Linear
            module.take_recipe(recipe)
    cast("Any", model).fp8_left = left
    return model


def _recipe(name: str, module: nn.Linear, scaling: Scaling, history: int, margin: int) -> Recipe:
    """Return the recipe of a layer, or raise `StateError` if it has another already."""
    if isinstance(module, Linear):
        recipe = Recipe(scaling=scaling, history=history, margin=margin, factors=module.fp8_recipe.factors)
        if recipe != module.fp8_recipe:
            raise StateError(
                f"fp8.convert: expected a layer that is not in FP8, or was converted alike; got {name} with "
                f"{module.extra_repr()}. Exclude it, or convert a fresh model."
            )
        return recipe
    factors = NO_FACTORS
    if isinstance(module, unit_nn.Linear):
        formula = formulas.readout if isinstance(module, unit_nn.LinearReadout) else formulas.linear
        ideal = formula(module.in_features, module.out_features)
        factors = resolve_factors("fp8.convert", module.constraint, module.factors, ideal)
    return Recipe(scaling=scaling, history=history, margin=margin, factors=factors)


def _refuse_plain(names: Sequence[str]) -> None:
    if not names:
        return
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    raise ArgumentError(
        f"fp8.convert: expected unit-scaled linear layers with scaling='unit'; got torch.nn.Linear as {shown}, whose "
        "tensors may have any scale. Convert the model with plimsoll.unit.convert first, use scaling='tensor', or "
        "exclude them."
    )
