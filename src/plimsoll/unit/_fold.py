"""`fold`: a converted model as plain weights, for inference."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from plimsoll.errors import ArgumentError, StateError
from plimsoll.unit._build_modules import Builder
from plimsoll.unit._converted import Converted, Folded
from plimsoll.unit._fold_plan import plan_of


@torch.no_grad()
def fold(converted: nn.Module) -> Folded:
    """A copy of a converted model whose factors are in its weights: the same outputs, for inference."""
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
    for name, module in converted.named_modules():
        if callable(getattr(module, "casts", None)):
            raise StateError(
                f"fold: expected a converted model in its own modules; got {type(module).__name__} at '{name}', whose "
                "scales are of FP8. Fold before fp8.convert."
            )
