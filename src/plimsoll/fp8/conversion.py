"""`convert`: the linear layers of a model become FP8 ones, in place."""

from collections.abc import Sequence
from typing import Any, cast

from torch import nn

from plimsoll.errors import ArgumentError, StateError
from plimsoll.fp8.layer_choice import Globs, Left, explicit, is_sharded, modules_of, why_not
from plimsoll.fp8.linear import Linear
from plimsoll.fp8.recipe import NO_FACTORS, Recipe, Scaling, checked
from plimsoll.unit import nn as unit_nn
from plimsoll.unit.factors import formulas
from plimsoll.unit.functional.ideal_factors import resolve_factors


def convert(
    model: nn.Module,
    scaling: Scaling,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    *,
    history: int = 0,
    margin: int = 0,
) -> nn.Module:
    """Return the model itself, whose linear layers are `fp8.Linear` from now on; `model.fp8_left` lists those that are not.

    Layers are changed in place: the module objects, their names, hooks and parameters stay, so that an optimizer made
    before goes on working, and shared weights stay shared. The factors of `unit.nn.Linear` are kept. A root that is a
    linear layer is converted too.

    Left as they are: what `include` and `exclude` (globs over module names, the root is "model") do not choose; the
    readouts of unit-scaled models, whose gradients come straight from the loss, unless a glob of `include` matches
    them; subclasses with a forward of their own; weights of float64, split for tensor parallelism, or computed by a
    parametrization; and products of modules that are no linear layer. Each is in `fp8_left` with its reason.

    A layer converted before stays as it is if it would become the same, and is refused otherwise.

    Args:
        model: any module.
        scaling: "unit" takes unit-scaled layers; "tensor" takes any; see `fp8.Linear`.
        include: globs; None chooses all.
        exclude: globs, which win over `include`.
        history: see `fp8.Linear`.
        margin: see `fp8.Linear`.

    Raises `ArgumentError`, also for a plain `torch.nn.Linear` with "unit": constants do not fit tensors of any scale,
    unless its full name is in `include`, which takes it at the user's word; and `StateError` for a layer that was
    converted otherwise. Nothing is changed then.

    >>> model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    >>> [str(left) for left in convert(model, "tensor", exclude="2").fp8_left]
    ['2: excluded']
    """
    operation = "fp8.convert"
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
            if scaling == "unit" and _is_plain(module) and not explicit(name, globs):
                plain.append(name)
            chosen.append((module, _recipe(name, module, scaling, history, margin)))
    _refuse_plain(plain)
    for module, recipe in chosen:
        if not isinstance(module, Linear):
            module.__class__ = Linear
            module.take_recipe(recipe)
    cast("Any", model).fp8_left = left
    return model


def _is_plain(module: nn.Linear) -> bool:
    """Return whether the layer is not unit-scaled."""
    if isinstance(module, Linear):
        return False
    return not isinstance(module, unit_nn.Linear)


def _recipe(name: str, module: nn.Linear, scaling: Scaling, history: int, margin: int) -> Recipe:
    """What the layer is to follow; `StateError` where it follows another recipe already."""
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
        "tensors may have any scale. Convert the model with plimsoll.unit.convert first, take scaling='tensor', or "
        "exclude them."
    )
