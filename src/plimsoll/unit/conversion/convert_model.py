"""`convert` returns the same model with every tensor at unit scale."""

import warnings

from torch import nn

from plimsoll.checks import integer
from plimsoll.errors import ArgumentError
from plimsoll.unit.analysis.analyzer import Analysis, analyse
from plimsoll.unit.analysis.parameters import tag_fan_ins
from plimsoll.unit.analysis.residuals import Tau
from plimsoll.unit.capture.captured_program import Captured, capture
from plimsoll.unit.conversion.codegen.forward_signature import signature_of
from plimsoll.unit.conversion.codegen.module_builder import Builder
from plimsoll.unit.conversion.codegen.program_recipe import recipe_of
from plimsoll.unit.conversion.converted_modules import Converted, Part, named_modules
from plimsoll.unit.formulas import Constraint

_CONVERTED = ("plimsoll.unit.", "plimsoll.fp8.")


def convert(
    model: nn.Module,
    example: object,
    *,
    constraint: Constraint | None = "gmean",
    residual_tau: Tau = None,
    seed: int | None = None,
) -> Converted:
    """Return a copy of `model` with factors that bring its tensors to unit scale.

    `torch.export` captures the model's graph. The result consists of ordinary modules with the original's names, each
    with generated code for its part of the graph (`.code`). `nn.Linear` becomes `unit.nn.Linear`. So hooks,
    `plimsoll.watch`, `plimsoll.fp8.convert` and sharding by blocks work as on the original, and the state has its names
    and shapes. Parameters are drawn again with unit variance. Frozen parameters stay frozen, shared ones stay shared,
    and buffers are copied. The result is called like the original, with any batch. `train()` and `eval()` switch
    dropout and norms. It can be compiled, pickled and copied. The original is not changed.

    The result repeats the example's call. Arguments that are no tensors must be those of the example, and so must all
    sizes that the model's code fixes. In evaluation it computes as in training, without dropout and with running
    statistics.

    Args:
        model: Any module with parameters whose graph can be captured. On the meta device the result stays there: call
            ``to_empty(device=...)``, then ``reset_parameters()``.
        example: Arguments of a call in training: a tensor, a tuple of arguments, or a mapping of keyword arguments,
            with a batch of at least 2. Values do not matter. Include what the loss needs if the model computes it.
        constraint: How the factors of an operation become one if its edges are no cut edges. See
            `unit.functional.linear`. None keeps separate factors there too, and corrects gradients where paths meet
            again. The gradient is a true one in both cases. Default: `"gmean"`.
        residual_tau: Weight of a residual branch, between 0 and 1, or one for each kind ("attention", "mlp", "other").
            Default: all branches of a stack have equal weight.
        seed: Seed of the parameters, which makes two conversions equal. Default: torch's own generator.

    Returns:
        The converted model. Its `coverage` lists what was not converted, and why.

    Raises:
        ArgumentError: The model is converted already, has no parameters or returns no tensor, its graph cannot be
            captured (the message has the line), or the example or an option is not allowed.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
    >>> converted = convert(model, torch.randn(4, 8), seed=0)
    >>> converted(torch.randn(100, 8)).shape, converted.coverage
    (torch.Size([100, 8]), [])
    """
    _check(model)
    if seed is not None:  # as torch's generators take them
        seed = integer("convert", "seed", seed, low=-(2**63), high=2**64 - 1, remedy="Use 0, for example.")
    with warnings.catch_warnings():  # nn.LSTM sets its own attributes during a capture, and restores them
        warnings.filterwarnings("ignore", message="(?s)The tensor attributes? .* assigned during export")
        captured = capture(model, example)
    if not any(isinstance(output, str) for output in captured.program.graph_signature.user_outputs):
        raise ArgumentError(
            f"convert: expected a model that returns a tensor; got {type(model).__name__}, which returns none. Return "
            "what training needs: the loss, or what it is computed from."
        )
    analysis = analyse(captured, constraint=constraint, residual_tau=residual_tau)
    return built(model, captured, analysis, seed=seed)


def built(model: nn.Module, captured: Captured, analysis: Analysis, *, seed: int | None = None) -> Converted:
    """Return the model that an analysis describes."""
    recipe = recipe_of(captured, model, analysis.changes)
    signature = signature_of(captured, model.forward)
    converted = Builder(recipe, model, signature, captured.program.constants).build()
    assert isinstance(converted, Converted)
    converted.describe(recipe, signature, analysis.skipped, analysis.parameters, seed)
    tag_fan_ins(converted, captured)
    converted.reset_parameters()
    return converted


def _check(model: object) -> None:
    if not isinstance(model, nn.Module):
        return  # the capture raises the error
    for name, module in named_modules(model):
        if isinstance(module, Part) or type(module).__module__.startswith(_CONVERTED):
            location = f"{type(module).__name__} at '{name}'" if name else type(module).__name__
            raise ArgumentError(
                f"convert: expected a model that has no factors yet; got {location}, which is a module of plimsoll: "
                "its factors would be multiplied again. Convert the original, and use plimsoll.fp8 after it."
            )
    if next(model.parameters(), None) is None:
        raise ArgumentError(
            f"convert: expected a model with parameters; got {type(model).__name__}, which has none. Use "
            "plimsoll.unit.functional for operations alone."
        )
