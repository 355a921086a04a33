"""`convert`: the same model with every tensor at unit scale."""

import warnings
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from plimsoll.errors import ArgumentError
from plimsoll.unit.analysis.analyzer import Analysis, analyse
from plimsoll.unit.analysis.residuals import Tau
from plimsoll.unit.capture.captured_program import Captured, capture
from plimsoll.unit.conversion.codegen.fan_in_tags import tag_fans
from plimsoll.unit.conversion.codegen.forward_signature import signature_of
from plimsoll.unit.conversion.codegen.module_builder import Builder
from plimsoll.unit.conversion.codegen.program_recipe import recipe_of
from plimsoll.unit.conversion.converted_modules import Converted, Part, named_modules
from plimsoll.unit.factors.formulas import Constraint

_CONVERTED = ("plimsoll.unit.", "plimsoll.fp8.")


def convert(
    model: nn.Module,
    example: object,
    *,
    constraint: Constraint | None = "gmean",
    residual_tau: Tau = None,
    seed: int | None = None,
) -> Converted:
    """A copy of `model` in which every operation has the factors that bring its tensors to unit scale.

    The model's graph is captured by `torch.export`; what comes back are ordinary modules: those of the original, under
    their names, each with generated code for its part of the graph (`.code`), `nn.Linear` as `unit.nn.Linear`. So
    hooks, `plimsoll.watch`, `plimsoll.fp8.convert` and sharding by blocks find what they did in the original, and the
    state has its names and shapes. Parameters are drawn anew, with unit variance; frozen ones stay frozen, shared ones
    shared; buffers are copied. It is called as the original was, with any batch; `train()` and `eval()` switch dropout
    and norms. It compiles, pickles and copies. The original is left as it was.

    It is what the example's call did: an argument that is no tensor must be given as in the example, and so must every
    size that the model's code fixes. In evaluation it computes as in training, with dropout off and running statistics.

    Args:
        model: any module whose graph can be captured, with parameters; on the meta device too, which the result stays
            on: ``to_empty(device=...)``, then ``reset_parameters()``.
        example: how it is called in training: a tensor, a tuple of arguments, or a mapping of keyword arguments, with
            a batch of at least 2. Values do not matter. Give what the loss needs too, where the model has it inside.
        constraint: how the factors of an operation become one where its edges are no cut edges: see
            `unit.functional.linear`; None leaves each its own there too, and settles gradients where paths meet again.
            The gradient is a true one either way.
        residual_tau: the weight of a residual branch, in (0, 1); one for each kind ("attention", "mlp", "other"); None
            weights all branches of a stack alike.
        seed: of the parameters, so that two conversions are equal; None draws from torch's own generator.

    Returns:
        The model. Its `coverage` lists what was left as it was, and why.

    Raises `ArgumentError`: the model is converted already, has no parameters, returns no tensor, or its graph cannot be
    captured, with the place; or the example or an option is none.

    >>> model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
    >>> converted = convert(model, torch.randn(4, 8), seed=0)
    >>> converted(torch.randn(100, 8)).shape, converted.coverage
    (torch.Size([100, 8]), [])
    """
    _check(model)
    with warnings.catch_warnings():  # nn.LSTM sets attributes of its own while it is captured, and sets them back
        warnings.filterwarnings("ignore", message="(?s)The tensor attributes? .* assigned during export")
        captured = capture(model, _apart(model, example))
    if not any(isinstance(one, str) for one in captured.program.graph_signature.user_outputs):
        raise ArgumentError(
            f"convert: expected a model that returns a tensor; got {type(model).__name__}, which returns none. Return "
            "what training needs: the loss, or what it is computed from."
        )
    analysis = analyse(captured, constraint=constraint, residual_tau=residual_tau)
    return built(model, captured, analysis, seed=seed)


def built(model: nn.Module, captured: Captured, analysis: Analysis, *, seed: int | None = None) -> Converted:
    """The model that an analysis describes."""
    recipe = recipe_of(captured, model, analysis.changes)
    signature = signature_of(captured, model.forward)
    made = Builder(recipe, model, signature, captured.program.constants).build()
    assert isinstance(made, Converted)
    made.describe(recipe, signature, analysis.left, analysis.parameters, seed)
    tag_fans(made, captured)
    made.reset_parameters()
    return made


def _check(model: object) -> None:
    if not isinstance(model, nn.Module):
        return  # the capture says so
    for name, module in named_modules(model):
        if isinstance(module, Part) or type(module).__module__.startswith(_CONVERTED):
            where = f"{type(module).__name__} at '{name}'" if name else type(module).__name__
            raise ArgumentError(
                f"convert: expected a model that has no factors yet; got {where}, which is of plimsoll already: its "
                "factors would be multiplied once more. Convert the original, and use plimsoll.fp8 after it."
            )
    if next(model.parameters(), None) is None:
        raise ArgumentError(
            f"convert: expected a model with parameters; got {type(model).__name__}, which has none. Use "
            "plimsoll.unit.functional for operations alone."
        )


def _apart(model: nn.Module, example: object) -> Any:
    """The example with tensors in memories of their own, since export takes two that share one for one input.

    On the meta device, if the model is there.
    """
    meta = isinstance(model, nn.Module) and any(parameter.is_meta for parameter in model.parameters())  # pyright: ignore[reportUnnecessaryIsInstance]

    def own(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.layout is not torch.strided:
            return leaf
        return leaf.detach().to("meta") if meta else leaf.detach().clone().requires_grad_(leaf.requires_grad)

    if not isinstance(example, (Tensor, tuple, Mapping)):
        return example  # the capture says what it has to be
    if isinstance(example, Mapping):
        example = dict(cast("Mapping[Any, Any]", example))
    return pytree.tree_map(own, example)
