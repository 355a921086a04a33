"""`convert`: the linear layers of a model become FP8 ones, in place."""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import cast

from torch import nn

from plimsoll.errors import ArgumentError
from plimsoll.fp8._linear import Linear
from plimsoll.fp8._recipe import NO_FACTORS, Recipe, Scaling, checked


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """A linear layer that stays as it was, and why."""

    module: str
    why: str

    def __str__(self) -> str:
        return f"{self.module}: {self.why}"


def convert(
    model: nn.Module,
    scaling: Scaling,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    *,
    history: int = 0,
    margin: int = 0,
) -> nn.Module:
    """`model` itself, its linear layers now `fp8.Linear`; `model.fp8_left` lists those that stay, and why."""
    checked("fp8.convert", scaling, history, margin)
    left: list[Left] = []
    for name, module in list(model.named_modules()):
        if not isinstance(module, nn.Linear) or isinstance(module, Linear):
            continue
        place = name or "model"
        if not _chosen(place, include, exclude):
            left.append(Left(module=place, why="not chosen by include and exclude"))
            continue
        if scaling == "unit":
            raise ArgumentError(f"fp8.convert: expected unit-scaled layers; got {place}.")
        module.__class__ = Linear
        cast("Linear", module).take_recipe(Recipe(scaling=scaling, history=history, margin=margin, factors=NO_FACTORS))
    model.fp8_left = left  # type: ignore[assignment]
    return model


def _chosen(name: str, include: str | Sequence[str] | None, exclude: str | Sequence[str] | None) -> bool:
    def matches(globs: str | Sequence[str]) -> bool:
        return any(fnmatchcase(name, glob) for glob in ([globs] if isinstance(globs, str) else globs))

    return (include is None or matches(include)) and not (exclude is not None and matches(exclude))
