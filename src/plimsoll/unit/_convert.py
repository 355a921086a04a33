"""`convert`: the same model with every tensor at unit scale."""

from torch import nn

from plimsoll.errors import ArgumentError
from plimsoll.unit._analysis import Analysis, analyse
from plimsoll.unit._build_modules import Builder
from plimsoll.unit._build_program import recipe_of
from plimsoll.unit._build_signature import signature_of
from plimsoll.unit._capture import Captured, capture
from plimsoll.unit._constraints import Constraint
from plimsoll.unit._converted import Converted
from plimsoll.unit._residuals import Tau


def convert(
    model: nn.Module,
    example: object,
    *,
    constraint: Constraint = "gmean",
    residual_tau: Tau = None,
    seed: int | None = None,
) -> Converted:
    """A copy of `model` in which every operation has the factors that bring its tensors to unit scale."""
    if isinstance(model, Converted):
        raise ArgumentError(
            "convert: expected a model that is not converted yet; got one that is: its factors would be multiplied once "
            "more. Convert the original again where another example or constraint is meant."
        )
    captured = capture(model, example)
    analysis = analyse(captured, constraint=constraint, residual_tau=residual_tau)
    return built(model, captured, analysis, seed=seed)


def built(model: nn.Module, captured: Captured, analysis: Analysis, *, seed: int | None = None) -> Converted:
    """The model that an analysis describes."""
    recipe = recipe_of(captured, model, analysis.changes)
    signature = signature_of(captured, model.forward)
    constants = captured.program.constants
    made = Builder(recipe, model, signature, constants).build()
    assert isinstance(made, Converted)
    made.describe(recipe, signature, analysis.left, analysis.parameters, seed)
    made.reset_parameters()
    return made
