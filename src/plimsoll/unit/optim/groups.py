"""Parameter groups of an optimizer, one per kind and learning-rate factor."""

import fnmatch
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn

from plimsoll.errors import ArgumentError
from plimsoll.unit.optim.parameter_kinds import KINDS, Trait, lr_factor, trait_of, traits_of

Parameters = nn.Module | Iterable[Any]  # a model, or torch's: parameters, (name, parameter) pairs, groups of either
Group = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterKinds:
    """Names and traits of parameters by their ids, and the plain ones."""

    operation: str
    names: dict[int, str]
    traits: dict[int, Trait]
    plain: bool | frozenset[int]

    def of(self, parameter: Tensor, name: str | None) -> tuple[str, float]:
        """Return the kind, or "plain", and the learning rate's factor."""
        trait = self.traits.get(id(parameter))
        if isinstance(self.plain, frozenset) and id(parameter) in self.plain:
            return "plain", 1.0
        if trait is not None:
            return trait.kind, lr_factor(trait)
        if self.plain is True:
            return "plain", 1.0
        name = self.names.get(id(parameter), name)
        described = "a parameter" if name is None else f"{name!r}"
        raise ArgumentError(
            f"{self.operation}: expected every parameter to have a kind; got {described} of shape "
            f"{tuple(parameter.shape)} without one. Give model= if its modules have tagged it, tag it with "
            "plimsoll.unit.tag, name it in plain= to use the unchanged learning rate, or put kind= into its group."
        )


def kinds_from(operation: str, model: nn.Module | None, plain: bool | Sequence[str]) -> ParameterKinds:
    """Return the kinds of a model's parameters.

    `plain` is for those without one, or whose names match a glob.
    """
    if model is None:
        if plain is not False and plain is not True:
            raise ArgumentError(
                f"{operation}: expected a model where plain names parameters; got plain={plain!r} without one. Give "
                "model=."
            )
        return ParameterKinds(operation=operation, names={}, traits={}, plain=plain)
    named = dict(model.named_parameters())
    traits = {id(named[name]): trait for name, trait in traits_of(model).items()}
    chosen = plain if isinstance(plain, bool) else _matching(operation, named, plain)
    return ParameterKinds(operation=operation, names={id(p): n for n, p in named.items()}, traits=traits, plain=chosen)


def split(kinds: ParameterKinds, group: Group) -> list[Group]:
    """Split a group by kind and factor, with the entries `kind` and `lr_factor`."""
    own = group.get("kind")
    parts: dict[tuple[str, float], list[Any]] = {}
    for item in _listed(group["params"]):
        name, parameter = cast("tuple[str | None, Tensor]", item if isinstance(item, tuple) else (None, item))
        key = kinds.of(parameter, name) if own is None else _stated(kinds.operation, own, parameter, group)
        parts.setdefault(key, []).append(item)
    rest = {key: value for key, value in group.items() if key not in ("params", "fan_in", "depth")}
    return [{**rest, "params": items, "kind": kind, "lr_factor": factor} for (kind, factor), items in parts.items()]


def groups_from(operation: str, params: Parameters) -> list[Group]:
    """Return the argument of an optimizer as groups."""
    if isinstance(params, nn.Module):
        return [{"params": list(params.named_parameters())}]
    if isinstance(params, Tensor):
        raise ArgumentError(
            f"{operation}: expected a model, or an iterable of parameters or groups; got one tensor of shape "
            f"{tuple(params.shape)}. Put it into a list."
        )
    items = list(params)
    if all(isinstance(item, dict) for item in items):
        return [dict(cast("Group", item)) for item in items]
    return [{"params": items}]


def _stated(operation: str, kind: object, parameter: Tensor, group: Group) -> tuple[str, float]:
    """Return the kind in a group's own entries, and its factor."""
    if kind == "plain":
        return "plain", 1.0
    if kind not in KINDS:
        raise ArgumentError(
            f"{operation}: expected a group's kind to be 'plain' or one of {', '.join(KINDS)}; got {kind!r}. Leave it "
            "out if the model's modules tag it."
        )
    trait = trait_of(cast("Any", kind), parameter, fan_in=group.get("fan_in"), depth=group.get("depth", 1))
    return trait.kind, lr_factor(trait)


def _listed(params: object) -> list[Any]:
    return [params] if isinstance(params, Tensor) else list(cast("Iterable[Any]", params))


def _matching(operation: str, named: dict[str, nn.Parameter], globs: Sequence[str]) -> frozenset[int]:
    globs = [globs] if isinstance(globs, str) else globs
    for glob in globs:
        if not fnmatch.filter(named, glob):
            raise ArgumentError(
                f"{operation}: expected plain to name parameters of the model; got {glob!r}, which matches none. Names "
                f"are as in named_parameters(), such as {next(iter(named), 'none')!r}."
            )
    return frozenset(id(p) for n, p in named.items() if any(fnmatch.fnmatchcase(n, glob) for glob in globs))
