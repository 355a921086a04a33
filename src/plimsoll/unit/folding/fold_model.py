"""`fold` turns a converted model into plain weights, for inference."""

import torch
from torch import nn

from plimsoll.errors import ArgumentError, StateError
from plimsoll.unit.conversion.codegen.module_builder import Builder
from plimsoll.unit.conversion.converted_modules import Converted, Folded, named_modules
from plimsoll.unit.folding.fold_plan import plan_of


@torch.no_grad()
def fold(converted: nn.Module) -> Folded:
    """Return a converted model with its factors in the weights, for inference.

    Outputs are the same up to rounding. Forward factors move into weights, biases, tables, running statistics and the
    epsilon of norms, through every operation that is homogeneous: views, ReLU, pooling, sums whose terms agree.
    Backward factors and dropout are dropped. Modules keep their names. A module without remaining factors is torch's
    own again. The result stays in evaluation mode and refuses `train()`.

    Its `kept` lists the multiplications that remain, with reasons: those that follow the batch's sizes, those at a
    function that is not linear, and those at a value that is used at several scales. Its state has the original's names
    and loads into a model folded from the same conversion.

    Args:
        converted: Result of `unit.convert`.

    Returns:
        The folded model.

    Raises:
        ArgumentError: The model is not a converted one.
        StateError: Its modules were replaced by those of FP8.

    >>> import plimsoll as pl
    >>> converted = pl.unit.convert(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8)), torch.randn(4, 8))
    >>> folded = fold(converted.eval())
    >>> folded.kept, type(folded.get_submodule("0"))
    ([], <class 'torch.nn.modules.linear.Linear'>)
    """
    if not isinstance(converted, Converted):
        raise ArgumentError(
            f"fold: expected a result of plimsoll.unit.convert; got {type(converted).__name__}. Only it contains a "
            "record of its factors."
        )
    _check_plain(converted)
    plan = plan_of(converted.recipe)
    folded = Builder(plan.recipe, converted, converted.signature, {}, base=Folded).build()
    assert isinstance(folded, Folded)
    sources = plan.recipe.sources
    tensors = {
        **dict(folded.named_parameters(remove_duplicate=False)),
        **dict(folded.named_buffers(remove_duplicate=False)),
    }
    for name, factor in plan.tensors.items():
        tensors[sources[name].paths[0]].mul_(factor)
    folded.note(plan.remaining)
    return folded.eval()


def _check_plain(converted: Converted) -> None:
    for name, module in named_modules(converted):
        if callable(getattr(module, "casts", None)):
            raise StateError(
                f"fold: expected a converted model in its own modules; got {type(module).__name__} at '{name}', whose "
                "scales are of FP8. Fold before fp8.convert."
            )
