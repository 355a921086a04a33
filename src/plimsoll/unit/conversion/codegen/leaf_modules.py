"""Modules that need no code of their own: `unit.nn.Linear` for `nn.Linear`, and what has no factors at all."""

from typing import Any

from torch import nn

from plimsoll.unit import nn as unit_nn
from plimsoll.unit.changes import Factor, Scale
from plimsoll.unit.conversion.codegen.call_tree import Call
from plimsoll.unit.conversion.codegen.operation_facts import NORMS, name_of
from plimsoll.unit.conversion.codegen.steps import Ref, Step
from plimsoll.unit.factors.formulas import Factors

_NOTHING = Scale()
_ROWS = -0.5  # the power of a product's rows that its weight's gradient is multiplied by


# The one operation that torch's module is, where it has no factors.
_PLAIN: dict[type[nn.Module], str] = {
    nn.Linear: "linear", nn.Embedding: "embedding", nn.LayerNorm: "layer_norm", nn.RMSNorm: "rms_norm",
    nn.GroupNorm: "group_norm", nn.BatchNorm1d: "batch_norm", nn.BatchNorm2d: "batch_norm",
    nn.BatchNorm3d: "batch_norm",
    nn.Conv1d: "conv1d", nn.Conv2d: "conv2d", nn.Conv3d: "conv3d", nn.ConvTranspose2d: "conv_transpose2d",
    nn.GELU: "gelu", nn.ReLU: "relu", nn.SiLU: "silu", nn.Tanh: "tanh", nn.Sigmoid: "sigmoid", nn.Dropout: "dropout",
    nn.MaxPool2d: "max_pool2d", nn.AvgPool2d: "avg_pool2d", nn.AdaptiveAvgPool2d: "adaptive_avg_pool2d",
    nn.Flatten: "flatten",
}  # fmt: skip


def leaf(original: nn.Module, calls: list[Call], *, folded: bool) -> nn.Module | None:
    """The empty module to put in the place of one that was called so; None where it needs code."""
    if any(list(call.calls()) or len(call.outputs) != 1 or len(call.inputs) != 1 for call in calls):
        return None
    if isinstance(original, nn.Linear) and not folded:
        return _linear(original, calls)
    kind = torch_class(original)
    if kind is None or not all(_is_plain(call, _PLAIN.get(kind)) for call in calls):
        return None
    return _plain(kind, original, calls)


def torch_class(module: nn.Module) -> type[nn.Module] | None:
    """The class of torch.nn that a module without modules of its own is, or stands for; None for a user's class."""
    own = type(module).__module__.startswith(("torch.nn.modules.", "plimsoll.unit."))
    if not own or list(module.children()):
        return None
    kinds = (kind for kind in type(module).__mro__ if kind.__module__.startswith("torch.nn.modules."))
    return next((kind for kind in kinds if kind is not nn.Module), None)


def not_in_place(made: Any) -> None:
    """Keeps a module from writing over its input, which may be a scaled one that others use."""
    if getattr(made, "inplace", False):
        made.inplace = False


def _is_plain(call: Call, operation: str | None) -> bool:
    steps = [step for step in call.own_steps() if name_of(step) != "add_"]  # a norm's count of batches
    if len(steps) != 1 or name_of(steps[0]) != operation or steps[0].change is not None:
        return False
    given = steps[0].args[1 if operation == "embedding" else 0]
    return given == Ref(call.inputs[0]) and call.outputs == [steps[0].name] and not steps[0].regions


def _plain(kind: type[nn.Module], original: nn.Module, calls: list[Call]) -> nn.Module | None:
    made: Any = object.__new__(kind)
    nn.Module.__init__(made)
    own = {name: value for name, value in vars(original).items() if name not in vars(made) and not name.startswith("_")}
    vars(made).update(own)
    not_in_place(made)
    if _PLAIN[kind] in NORMS:
        at = NORMS[_PLAIN[kind]][2]
        found = {step.args[at] for call in calls for step in call.own_steps() if name_of(step) == _PLAIN[kind]}
        made.eps = found.pop()  # folding may have changed it
        if found:
            return None
    return made


def _linear(original: nn.Linear, calls: list[Call]) -> nn.Module | None:
    found = {_factors(call) for call in calls}
    factors = found.pop()
    if found or factors is None:
        return None
    own: Any = original._parameters  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    sizes = original.in_features, original.out_features
    return unit_nn.Linear(*sizes, own["bias"] is not None, device="meta", constraint=None, factors=factors)


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
    tensors = _of_tensors(steps[0], scales)
    if tensors is None:
        return None
    weight, moment = tensors
    output, inputs = change.output.forward.value, (scales[0].backward.value,)
    return Factors(output=output, inputs=inputs, weight=weight, moment=moment)


def _of_tensors(step: Step, scales: dict[int, Scale]) -> tuple[float | None, float] | None:
    """The factor of weight and bias, None for ``rows ** -1/2``, and the weight's moment; None for anything else."""
    biased = len(step.args) > 2 and step.args[2] is not None
    of_weight, of_bias = scales[1].backward, scales[2].backward
    if _is_rows(of_weight, step):
        if biased and not (_is_rows(of_bias, step) and of_bias.value == 1.0):
            return None
        return None, 1 / of_weight.value
    if of_weight.of is not None or of_bias.of is not None:
        return None
    shared = of_bias.value if biased else of_weight.value
    return shared, shared / of_weight.value


def _is_rows(factor: Factor, step: Step) -> bool:
    """Whether it is a multiple of ``rows ** -1/2``."""
    dims = tuple(sorted(dim % len(step.sizes or (0,)) for dim in factor.dims))
    return (
        factor.of in (step.args[0].name, step.name)
        and dims == tuple(range(len(step.sizes or ()) - 1))
        and factor.power == _ROWS
    )


def _of_itself(step: Step, call: Call) -> bool:
    """Whether the step multiplies the call's input by the module's own weight, and that is all."""
    given = [one.name if isinstance(one, Ref) else one for one in step.args]
    return given[0] == call.inputs[0] and call.outputs == [step.name] and not step.regions
