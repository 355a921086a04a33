"""The kinds of a model's parameters, which say how an optimizer's learning rate follows width and depth.

A kind is kept by the module that owns the parameter, under the parameter's name, and not by the tensor: sharding and
`to_empty` put other tensors in its place, copies and pickles drop what hangs on one. So do the two things that a shape
does not tell: how many inputs an output sums over where that is not ``shape[1:]``, and the depth of a residual stack.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from torch import Tensor, nn

from plimsoll.errors import ArgumentError

Kind = Literal["weight", "readout", "embedding", "bias", "norm"]
KINDS: tuple[str, ...] = get_args(Kind)

# Attributes of modules.
_KINDS, _FANS, _DEPTH, _DEPTHS = "unit_kinds", "unit_fans", "unit_depth", "unit_depths"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trait:
    """What a learning rate's rule needs to know of a parameter.

    - `fan_in`: how many inputs an output sums over; 1 for embeddings, biases and norms, which sum over none.
    - `depth`: how many layers the residual stacks around it have, 1 outside of any; of a converted model, how many
      branches.
    """

    kind: Kind
    fan_in: int = 1
    depth: int = 1


def tag(module: nn.Module, /, **kinds: Kind) -> None:
    """Says of which kind the module's own parameters are, by their names; those of its children are theirs to tag.

    The kinds: "weight" (a hidden matrix or kernel), "readout" (the last product), "embedding", "bias", "norm".

    Raises `ArgumentError` for a kind or a parameter that does not exist. A name whose parameter is None is passed over.

    >>> module = nn.Linear(8, 4)
    >>> tag(module, weight="readout", bias="bias")
    >>> kinds_of(module)
    {'weight': 'readout', 'bias': 'bias'}
    """
    for name, kind in kinds.items():
        if kind not in KINDS:
            raise ArgumentError(
                f"tag: expected a kind of {', '.join(KINDS)}; got {name}={kind!r}. A hidden matrix is a 'weight'."
            )
        _check_owned(module, name)
    present = {name: kind for name, kind in kinds.items() if _owned(module)[name] is not None}
    setattr(module, _KINDS, {**_noted(module, _KINDS), **present})


def tag_fan_in(module: nn.Module, /, **fans: int) -> None:
    """Says how many inputs an output sums over, where it is not the product of the parameter's sizes after the first.

    So for a weight that is multiplied from the right (x @ w, of (fan_in, fan_out)), and a transposed convolution's.

    Raises `ArgumentError` for a number below 1, or a parameter that does not exist.
    """
    for name, fan in fans.items():
        _check_owned(module, name)
        if isinstance(fan, bool) or not isinstance(fan, int) or fan < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ArgumentError(
                f"tag_fan_in: expected a whole number from 1; got {name}={fan!r}. Count the summed inputs."
            )
    setattr(module, _FANS, {**_noted(module, _FANS), **fans})


def tag_depth(module: nn.Module, depth: int, *names: str) -> None:
    """Says that the module is a residual stack of so many layers; depths of stacks within stacks multiply.

    With names, only these parameters of its own are said to be in one.

    Raises `ArgumentError` for a depth below 1, or a parameter that does not exist.
    """
    if isinstance(depth, bool) or not isinstance(depth, int) or depth < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ArgumentError(
            f"tag_depth: expected a whole number from 1; got depth={depth!r}. Count the stack's layers."
        )
    for name in names:
        _check_owned(module, name)
    if names:
        setattr(module, _DEPTHS, {**_noted(module, _DEPTHS), **dict.fromkeys(names, depth)})
    else:
        setattr(module, _DEPTH, depth)


def kinds_of(model: nn.Module) -> dict[str, Kind]:
    """The kind of each parameter that has one, by its name in `model.named_parameters()`.

    A weight shared by an embedding and a readout is an embedding; the rules of the two are one. Other uses that
    disagree raise `ArgumentError`.
    """
    return {name: trait.kind for name, trait in traits_of(model).items()}


def traits_of(model: nn.Module) -> dict[str, Trait]:
    """Kind, fans and depth of each parameter that has a kind, by its name in `model.named_parameters()`."""
    uses: dict[int, list[tuple[str, Trait]]] = {}
    for name, parameter, trait in _tagged(model, "", 1):
        uses.setdefault(id(parameter), []).append((name, trait))
    return {name: _agreed(uses[id(p)]) for name, p in model.named_parameters() if id(p) in uses}


def _tagged(module: nn.Module, prefix: str, depth: int) -> Iterator[tuple[str, Tensor, Trait]]:
    """Every use of a tagged parameter, with its depth; shared ones come once for each owner."""
    depth *= getattr(module, _DEPTH, 1)
    fans = cast("dict[str, int]", _noted(module, _FANS))
    for name, kind in _noted(module, _KINDS).items():
        parameter = getattr(module, name, None)
        if isinstance(parameter, Tensor):
            own = depth * cast("int", _noted(module, _DEPTHS).get(name, 1))
            yield prefix + name, parameter, trait_of(kind, parameter, fan_in=fans.get(name), depth=own)
    for name, child in module.named_children():
        yield from _tagged(child, f"{prefix}{name}.", depth)


def trait_of(kind: Kind, parameter: Tensor, *, fan_in: int | None = None, depth: int = 1) -> Trait:
    """The trait of a parameter of that kind, by its shape where `fan_in` is not told."""
    if kind in ("embedding", "bias", "norm"):
        return Trait(kind=kind, depth=depth)
    return Trait(kind=kind, fan_in=fan_in or max(1, math.prod(parameter.shape[1:])), depth=depth)


def _agreed(uses: list[tuple[str, Trait]]) -> Trait:
    traits = {trait.kind: trait for _, trait in uses}
    if len(traits) == 1:
        return uses[0][1]
    if set(traits) == {"embedding", "readout"}:
        return traits["embedding"]
    said = ", ".join(f"{name} ({trait.kind})" for name, trait in uses)
    raise ArgumentError(
        f"kinds_of: expected one kind for a shared parameter; got {said}. Tag its owners alike with plimsoll.unit.tag."
    )


def _noted(module: nn.Module, attribute: str) -> Mapping[str, Any]:
    return getattr(module, attribute, {})


def _owned(module: nn.Module) -> Mapping[str, Tensor | None]:
    """The module's own parameters, those that are None too."""
    return module._parameters  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]


def _check_owned(module: nn.Module, name: str) -> None:
    if name not in _owned(module):
        owned = ", ".join(_owned(module)) or "none"
        raise ArgumentError(
            f"tag: expected a parameter of {type(module).__name__} itself; got {name!r}. It has {owned}; tag a child's "
            "parameters on the child."
        )
