"""The algebra's proof: on every model, each gradient is the true one times one positive number."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from plimsoll.unit._analysis import Analysis, analyse
from plimsoll.unit._capture import Captured, capture
from tests.unit.analysis.interpreter import drawn, run
from tests.unit.models import MODELS


def double(example: Any) -> Any:
    return pytree.tree_map(lambda x: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x, example)


def gradients(captured: Captured, analysis: Analysis, *, true: bool) -> dict[str, Tensor]:
    """The gradient of every parameter and of every input, from one backward of unit scale."""
    state = drawn(captured, analysis.parameters, torch.float64, seed=2)
    inputs = [leaf for leaf in pytree.tree_leaves((captured.args, dict(captured.kwargs)))]
    inputs = [x.clone().requires_grad_(x.is_floating_point()) if isinstance(x, Tensor) else x for x in inputs]
    torch.manual_seed(3)
    carried, outputs = run(captured, analysis.changes, state, inputs, true=true)
    ends = [carried.kept[name] for name in analysis.flow.outputs]
    generator = torch.Generator().manual_seed(4)
    seeds = [torch.randn(end.shape, generator=generator, dtype=end.dtype) if end.dim() else torch.ones_like(end) for end in ends]  # fmt: skip
    leaves = {name: value for name, value in state.items() if isinstance(value, Tensor) and value.requires_grad}
    leaves |= {f"input {i}": x for i, x in enumerate(inputs) if isinstance(x, Tensor) and x.requires_grad}
    found = torch.autograd.grad(ends, list(leaves.values()), seeds, allow_unused=True)
    return {name: g for name, g in zip(leaves, found, strict=True) if g is not None}


@pytest.mark.parametrize("name", MODELS)
def test_every_gradient_is_the_true_one_times_a_positive_number(name: str) -> None:
    case = MODELS[name]()
    captured = capture(case.model.double(), double(case.example))
    analysis = analyse(captured)
    ours, truth = (gradients(captured, analysis, true=true) for true in (False, True))
    assert set(ours) == set(truth) and ours
    largest = max(float(true.abs().max()) for true in truth.values())
    # GPT-2 casts its logits to FP32 before the loss. A key's bias has no gradient at all: what is left of it is noise.
    tolerance = 1e-4 if name == "gpt2" else 1e-7
    for leaf, gradient in ours.items():
        true = truth[leaf]
        if float(true.abs().max()) < 1e-9 * largest:
            continue
        ratio = float((gradient * true).sum() / (true * true).sum())
        assert ratio > 0, leaf
        atol = tolerance * float(gradient.abs().max())
        torch.testing.assert_close(gradient, true * ratio, rtol=tolerance, atol=atol, msg=leaf)
