"""What a converted model checks of its inputs: that they are as the example was, but for what was open.

These run under torch.compile, so they only compare; a size that was open in the capture is None here.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from plimsoll.errors import ArgumentError, UnsupportedTensorError


def tensor(name: str, value: Any, sizes: tuple[int | None, ...], kind: str, most: tuple[int | None, ...] = ()) -> Any:
    """The value, if it is a tensor of these sizes and of the example's kind: "floating", "integer", "boolean".

    `most`: the largest size of each dimension that the model's code allows; None: any.
    """
    if not isinstance(value, Tensor):
        raise UnsupportedTensorError(
            f"converted model: expected {name} to be a tensor, as in the example; got {type(value).__name__}. Convert "
            "the model with an example that is called as this."
        )
    if value.dim() != len(sizes) or any(size is not None and size != value.shape[i] for i, size in enumerate(sizes)):
        wanted = ", ".join("any" if size is None else str(size) for size in sizes)
        raise ArgumentError(
            f"converted model: expected {name} of sizes ({wanted}); got {tuple(value.shape)}. The model's own code "
            "fixes these sizes: give such a tensor, or convert it with an example of other sizes."
        )
    for i, size in enumerate(most):
        if size is not None and value.shape[i] > size:
            raise ArgumentError(
                f"converted model: expected {name} with at most {size} in dimension {i}; got {tuple(value.shape)}. The "
                "model has no more room there: give a shorter one."
            )
    if kind_of(value.dtype) != kind:
        raise UnsupportedTensorError(
            f"converted model: expected {name} to be {kind}, as in the example; got {value.dtype}. Give such a tensor."
        )
    return value


def constant(name: str, value: Any, wanted: Any) -> Any:
    """The value, if it is the one that the capture had: what is no tensor decided what was captured."""
    if isinstance(value, Tensor) or (value is not wanted and value != wanted):
        got = f"a tensor of sizes {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise ArgumentError(
            f"converted model: expected {name}={wanted!r}, as in the example; got {got}. Convert the model with an "
            f"example that gives {name} so."
        )
    return value


class Structure:
    """How values are nested: torch's tree specification, in a form that pickles as an example of itself."""

    def __init__(self, example: Any) -> None:
        self.example = example
        self.spec = pytree.tree_structure(example)

    @classmethod
    def of(cls, spec: pytree.TreeSpec) -> "Structure":
        """The structure that a specification says."""
        return cls(pytree.tree_unflatten([0] * spec.num_leaves, spec))

    def __reduce__(self) -> tuple[Any, ...]:
        return Structure, (self.example,)


def leaves(name: str, value: Any, structure: Structure) -> list[Any]:
    """The values in a structure, if it is the example's."""
    found, came = pytree.tree_flatten(value)
    if came != structure.spec:
        raise ArgumentError(
            f"converted model: expected {name} of the example's structure, {structure.spec}; got {came}. Convert the "
            "model with an example of this one."
        )
    return found


def kind_of(dtype: torch.dtype) -> str:
    """What values of the dtype are."""
    if dtype.is_floating_point:
        return "floating"
    if dtype.is_complex:
        return "complex"
    return "boolean" if dtype is torch.bool else "integer"


def built(values: list[Any], structure: Structure) -> Any:
    """The values in the structure of an output."""
    return pytree.tree_unflatten(values, structure.spec)
