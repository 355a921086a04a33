"""Modules that need no code of their own: `unit.nn.Linear` for `nn.Linear`, and what has no factors at all."""

from torch import nn

from plimsoll.unit import nn as unit_nn
from plimsoll.unit._build_calls import Call
from plimsoll.unit._build_steps import Ref, Step
from plimsoll.unit._changes import NodeChange, Scale
from plimsoll.unit._formulas import Factors

_NOTHING = Scale()
_ROWS = -0.5  # the power of a product's rows that its weight's gradient is multiplied by


def leaf(original: nn.Module, calls: list[Call]) -> nn.Module | None:
    """The empty module to put in the place of one that was called so; None where it needs code."""
    if any(list(call.calls()) or len(call.outputs) != 1 or len(call.inputs) != 1 for call in calls):
        return None
    if isinstance(original, nn.Linear):
        return _linear(original, calls)
    return None


def _linear(original: nn.Linear, calls: list[Call]) -> nn.Module | None:
    found = {_factors(call) for call in calls}
    factors = found.pop()
    if found or factors is None:
        return None
    made = unit_nn.Linear(
        original.in_features, original.out_features, original.bias is not None, device="meta", factors=factors
    )
    made.unit_kinds = {}
    return made


def _factors(call: Call) -> Factors | None:
    """The factors of a call that is one linear product and nothing else."""
    steps = list(call.own_steps())
    if len(steps) != 1 or steps[0].target != "aten.linear.default" or not _of_itself(steps[0], call):
        return None
    change = steps[0].change
    if change is None:
        return Factors(output=1.0, inputs=(1.0,), weight=1.0)
    scales = {port: change.inputs.get(port, _NOTHING) for port in (0, 1, 2)}
    if not change.output.backward.is_one or any(not scale.forward.is_one for scale in scales.values()):
        return None
    if change.output.forward.of is not None or scales[0].backward.of is not None:
        return None
    weight = _weight(change, steps[0], scales)
    if weight is False:
        return None
    return Factors(output=change.output.forward.value, inputs=(scales[0].backward.value,), weight=weight)


def _weight(change: NodeChange, step: Step, scales: dict[int, Scale]) -> float | None | bool:
    """The factor of the weight's gradient: a number, None for ``rows ** -1/2``, False for anything else."""
    of_weight = scales[1].backward
    if len(step.args) > 2 and step.args[2] is not None and scales[2].backward != of_weight:  # noqa: PLR2004  (the bias)
        return False
    if of_weight.of is None:
        return of_weight.value
    rows = tuple(range(len(step.sizes or ()) - 1))
    is_rows = of_weight.of in (step.args[0].name, step.name) and _positive(of_weight.dims, len(rows) + 1) == rows
    return None if is_rows and of_weight.value == 1.0 and of_weight.power == _ROWS else False


def _positive(dims: tuple[int, ...], count: int) -> tuple[int, ...]:
    return tuple(sorted(dim % count for dim in dims))


def _of_itself(step: Step, call: Call) -> bool:
    """Whether the step multiplies the call's input by the module's own weight, and that is all."""
    given = [one.name if isinstance(one, Ref) else one for one in step.args]
    return given[0] == call.inputs[0] and call.outputs == [step.name] and not step.regions
