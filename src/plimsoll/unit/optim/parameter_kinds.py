"""Kinds of a model's parameters, and u-muP's factors of their learning rates.

Adam's updates have unit size for any scale of the gradients. SGD's have the gradients' scale, which is 1 at any width
too if the readout's own gradient is at unit scale (its constraint is None). Then the same factors hold. Under another
constraint every gradient shrinks with the width, which `SGD` refuses.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from torch import Tensor, nn

from plimsoll.checks import integer
from plimsoll.errors import ArgumentError

Kind = Literal["weight", "readout", "embedding", "bias", "norm"]
KINDS: tuple[str, ...] = get_args(Kind)

# Attributes of modules.
# A kind is an attribute of the module that owns the parameter, under the parameter's name, and not of the tensor.
# Sharding and `to_empty` replace the tensor, and copies and pickles drop its attributes. The same holds for two facts
# that a shape does not contain: the number of inputs that an output sums over if that is not `shape[1:]`, and the depth
# of a residual stack.
_KINDS, _FANS, _DEPTH, _DEPTHS = "unit_kinds", "unit_fans", "unit_depth", "unit_depths"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trait:
    """Facts of a parameter that decide its learning rate."""

    kind: Kind
    # Number of inputs that an output sums over, 1 for embeddings, biases and norms, which sum over none.
    fan_in: int = 1
    # Number of layers of the residual stacks around it (branches in a converted model), 1 outside of any.
    depth: int = 1


def tag(module: nn.Module, /, **kinds: Kind) -> None:
    """Tag a module's own parameters with their kinds.

    Parameters of its children are tagged on the children.

    Args:
        module: Module that owns the parameters.
        kinds: Kind of each parameter by its name: `"weight"` (a hidden matrix or kernel), `"readout"` (the last
            product), `"embedding"`, `"bias"` or `"norm"`. A name whose parameter is None is ignored.

    Raises:
        ArgumentError: A kind or a parameter does not exist.

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
    setattr(module, _KINDS, {**_tags_of(module, _KINDS), **present})


def tag_fan_in(module: nn.Module, /, **fans: int) -> None:
    """Tag parameters with the number of inputs that an output sums over.

    Needed if it is not the product of the parameter's sizes after the first: for a weight that is multiplied from the
    right (x @ w, of shape (fan_in, fan_out)), and for that of a transposed convolution.

    Args:
        module: Module that owns the parameters.
        fans: Number of inputs for each parameter by its name, at least 1.

    Raises:
        ArgumentError: A number is below 1, or a parameter does not exist.
    """
    for name, fan in fans.items():
        _check_owned(module, name)
        integer("tag_fan_in", name, fan, low=1, remedy="Count the summed inputs.")
    setattr(module, _FANS, {**_tags_of(module, _FANS), **fans})


def tag_depth(module: nn.Module, depth: int, *names: str) -> None:
    """Tag a module as a residual stack of so many layers.

    Depths of stacks within stacks multiply.

    Args:
        module: The stack.
        depth: Number of layers, at least 1.
        names: Own parameters of the module that are in the stack. Default: all parameters in the module.

    Raises:
        ArgumentError: The depth is below 1, or a parameter does not exist.
    """
    integer("tag_depth", "depth", depth, low=1, remedy="Count the stack's layers.")
    for name in names:
        _check_owned(module, name)
    if names:
        setattr(module, _DEPTHS, {**_tags_of(module, _DEPTHS), **dict.fromkeys(names, depth)})
    else:
        setattr(module, _DEPTH, depth)


def kinds_of(model: nn.Module) -> dict[str, Kind]:
    """Return the kind of each tagged parameter, by its name in the model.

    A weight shared by an embedding and a readout is an embedding, since both have the same rule.

    Raises:
        ArgumentError: A shared parameter has other kinds that differ.
    """
    return {name: trait.kind for name, trait in traits_of(model).items()}


def traits_of(model: nn.Module) -> dict[str, Trait]:
    """Return kind, fan-in and depth of tagged parameters, by name in the model."""
    uses: dict[int, list[tuple[str, Trait]]] = {}
    for name, parameter, trait in _tagged(model, "", 1):
        uses.setdefault(id(parameter), []).append((name, trait))
    return {name: _agreed(uses[id(p)]) for name, p in model.named_parameters() if id(p) in uses}


def _tagged(module: nn.Module, prefix: str, depth: int) -> Iterator[tuple[str, Tensor, Trait]]:
    """Yield each use of a tagged parameter with its depth, shared ones per owner."""
    depth *= getattr(module, _DEPTH, 1)
    fans = cast("dict[str, int]", _tags_of(module, _FANS))
    for name, kind in _tags_of(module, _KINDS).items():
        parameter = getattr(module, name, None)
        if isinstance(parameter, Tensor):
            own = depth * cast("int", _tags_of(module, _DEPTHS).get(name, 1))
            yield prefix + name, parameter, trait_of(kind, parameter, fan_in=fans.get(name), depth=own)
    for name, child in module.named_children():
        yield from _tagged(child, f"{prefix}{name}.", depth)


def trait_of(kind: Kind, parameter: Tensor, *, fan_in: int | None = None, depth: int = 1) -> Trait:
    """Return a parameter's trait. The default fan-in is that of the shape."""
    if kind in ("embedding", "bias", "norm"):
        return Trait(kind=kind, depth=depth)
    return Trait(kind=kind, fan_in=fan_in or max(1, math.prod(parameter.shape[1:])), depth=depth)


def _agreed(uses: list[tuple[str, Trait]]) -> Trait:
    traits = {trait.kind: trait for _, trait in uses}
    if len(traits) == 1:
        return uses[0][1]
    if set(traits) == {"embedding", "readout"}:
        return traits["embedding"]
    listed = ", ".join(f"{name} ({trait.kind})" for name, trait in uses)
    raise ArgumentError(
        f"kinds_of: expected one kind for a shared parameter; got {listed}. Tag its owners with the same kind, using "
        "plimsoll.unit.tag."
    )


def _tags_of(module: nn.Module, attribute: str) -> Mapping[str, Any]:
    return getattr(module, attribute, {})


def _owned(module: nn.Module) -> Mapping[str, Tensor | None]:
    """Return the module's own parameters, with those that are None."""
    return module._parameters  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]


def _check_owned(module: nn.Module, name: str) -> None:
    if name not in _owned(module):
        owned = ", ".join(_owned(module)) or "none"
        raise ArgumentError(
            f"tag: expected a parameter of {type(module).__name__} itself; got {name!r}. It has {owned}; tag a child's "
            "parameters on the child."
        )


# With unit-scaled weights and gradients, a step changes the result of a hidden product by lr * fan_in^1/2 times the
# factor, since the updates of its inputs' weights point the same way. So the factor fan_in^-1/2 makes the change lr at
# any width. A readout has its fan_in^-1 in the forward factor already. A residual stack adds up the steps of its
# layers, hence depth^-1/2.
#
# An embedding's rows are not summed, and muP has no factor for them. u-muP uses width^-1/2, for better losses in its
# sweeps of large models (arXiv 2407.17465). Here a step of a table is lr at any width, which is muP's rule. On a small
# character model both carry over width equally well, and without the factor losses are lower by a tenth and more
# (docs/how-to/unit-scaled-model.md). u-muP's rule is that of a table tagged as a "weight" whose fan-in is the width.
def lr_factor(trait: Trait) -> float:
    """Return a learning rate's factor: fan_in^-1/2 for weights, times depth^-1/2.

    >>> lr_factor(Trait(kind="weight", fan_in=256, depth=4)), lr_factor(Trait(kind="readout", fan_in=256))
    (0.03125, 1.0)
    """
    terms = trait.fan_in if trait.kind == "weight" else 1
    return float(terms * trait.depth) ** -0.5
