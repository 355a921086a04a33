"""At initialisation every tensor of a converted model is near unit scale, forward and backward."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plimsoll.unit.changes import ParameterChange
from tests.support.cases import each
from tests.support.unit.interpreter import analysed, back, captured, drawn, inputs_of, run
from tests.support.unit.models import CAPTURED, MODELS

pytestmark = CAPTURED


@dataclass(frozen=True)
class Scales:
    """Standard deviations of operations' results and root mean squares of their gradients, as powers of two."""

    forward: dict[str, float]
    backward: dict[str, float]
    parameters: dict[str, float]

    def outside(self, binades: float) -> float:
        """The share of tensors beyond so many binades, forward and backward."""
        all_ = [*self.forward.values(), *self.backward.values()]
        return sum(abs(one) > binades for one in all_) / len(all_)


def root(x: Tensor) -> float:
    return float(x.detach().double().square().mean().sqrt())


def measure(name: str, constraint: Any, *, plain: bool = False) -> Scales:
    """The scales of a model as converted, or plain: as it was made, drawn as torch drew it."""
    graph, analysis = captured(name), analysed(name, constraint)
    kept = {key: ParameterChange(draw="keep", kind="") for key in analysis.parameters}
    parameters = kept if plain else analysis.parameters
    state = drawn(graph, parameters, torch.float64, seed=2)
    torch.manual_seed(3)
    carried, _ = run(graph, {} if plain else analysis.changes, state, inputs_of(graph), true=False)
    back(carried, analysis.flow.outputs)
    inside = {key for key, change in _whys(name, constraint).items() if change.startswith("part of")}
    kept = {key: x for key, x in carried.kept.items() if key in analysis.flow.nodes and x.dim() and key not in inside}
    finite = {key: x.detach()[x.isfinite()] for key, x in kept.items()}
    leaves = {key: x.grad for key, x in state.items() if x.requires_grad and x.grad is not None}
    return Scales(
        {key: math.log2(float(x.std())) for key, x in finite.items() if x.numel() > 1 and x.std() > 0},
        {key: math.log2(root(x.grad)) for key, x in kept.items() if x.grad is not None and x.grad.any()},
        {key: math.log2(root(gradient)) for key, gradient in leaves.items() if root(gradient) > 1e-9},
    )


def _whys(name: str, constraint: Any) -> dict[str, str]:
    return dict(analysed(name, constraint).reasons)


# Where more than 2 binades off are expected, and why; as a share of all tensors.
# - A statistic inside a norm by hand, or a mask in front of a softmax, is part of an operation and not looked at.
# - Attention without a mask: all queries see the same keys, so its results are alike from row to row, and the gradients
#   of queries and keys, which differences between rows make, are smaller than for independent rows.
# - Under a shared factor, queries and keys have the geometric mean of what values and they would have.
# - A loss that counts half beside another has half its gradient: the first is at unit scale.
# - Cells of an LSTM: gates are far from independent normal values.
OUTSIDE = {
    "gmean": {"pre_norm": 0.06, "post_norm": 0.06, "gpt": 0.06, "gpt_by_hand": 0.12, "lstm": 0.08, "bert": 0.14,
              "unet": 0.03, "gpt2": 0.02},
    None: {"bert": 0.25, "lstm": 0.03, "unet": 0.06, "resnet": 0.05, "two_losses": 0.09},
}  # fmt: skip


@each("constraint", ["gmean", None])
@each("name", MODELS)
def test_every_tensor_starts_near_unit_scale(name: str, constraint: Any) -> None:
    scales = measure(name, constraint)
    assert scales.outside(2.0) <= OUTSIDE[constraint].get(name, 0.0), scales
    assert scales.outside(4.0) == 0.0, scales
    assert max(abs(one) for one in scales.parameters.values()) < 4, scales


@each("name", ["gpt", "gpt_by_hand", "encoder_layer", "resnet", "unet", "bert", "gpt2", "two_losses"])
def test_as_it_was_most_tensors_are_orders_of_magnitude_off(name: str) -> None:
    """What conversion changes: so that the test above is not one that any model passes."""
    plain, converted = measure(name, "gmean", plain=True), measure(name, "gmean")
    assert plain.outside(2.0) > 5 * converted.outside(2.0)
    assert min(plain.backward.values()) < min(converted.backward.values()) - 2
