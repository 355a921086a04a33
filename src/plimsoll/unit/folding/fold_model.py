"""`fold`: a converted model as plain weights, for inference."""

import torch
from torch import nn

from plimsoll.errors import ArgumentError, StateError
from plimsoll.unit.conversion.codegen.module_builder import Builder
from plimsoll.unit.conversion.converted_modules import Converted, Folded, named_modules
from plimsoll.unit.folding.fold_plan import plan_of


@torch.no_grad()
def fold(converted: nn.Module) -> Folded:
    """A copy of a converted model whose factors are in its weights: the same outputs to rounding, for inference.

    Forward factors move into weights, biases, tables, running statistics and the epsilon of norms, through every
    operation that is homogeneous: views, ReLU, pooling, sums whose terms agree. Backward factors are dropped. Dropout
    is left out. Modules keep their names, and one without a factor left is torch's own again. In evaluation for good:
    `train()` is refused.

    Its `kept` lists the multiplications that stay, with why: those that follow the batch's sizes, those at a function
    that is not linear, those at a value that is used at several scales. Its state has the original's names and loads
    into a model folded from the same conversion.

    Raises `ArgumentError` for anything but a converted model, and `StateError` where its modules are FP8's by now.

    >>> import plimsoll as pl
    >>> converted = pl.unit.convert(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8)), torch.randn(4, 8))
    >>> folded = fold(converted.eval())
    >>> folded.kept, type(folded.get_submodule("0"))
    ([], <class 'torch.nn.modules.linear.Linear'>)
    """
    if not isinstance(converted, Converted):
        raise ArgumentError(
            f"fold: expected a model that plimsoll.unit.convert gave; got {type(converted).__name__}. Only there is it "
            "known which factors stand where."
        )
    _check_plain(converted)
    plan = plan_of(converted.recipe)
    made = Builder(plan.recipe, converted, converted.signature, {}, base=Folded).build()
    assert isinstance(made, Folded)
    sources = plan.recipe.sources
    tensors = {
        **dict(made.named_parameters(remove_duplicate=False)),
        **dict(made.named_buffers(remove_duplicate=False)),
    }
    for name, factor in plan.tensors.items():
        tensors[sources[name].paths[0]].mul_(factor)
    made.note(plan.kept)
    return made.eval()


def _check_plain(converted: Converted) -> None:
    for name, module in named_modules(converted):
        if callable(getattr(module, "casts", None)):
            raise StateError(
                f"fold: expected a converted model in its own modules; got {type(module).__name__} at '{name}', whose "
                "scales are of FP8. Fold before fp8.convert."
            )
