"""The algebra's proof: on every model, each gradient is the true one times one positive number."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from plimsoll.unit.analysis.analyzer import Analysis, analyse
from plimsoll.unit.capture.captured_program import Captured, capture
from plimsoll.unit.changes import NodeChange
from tests.support.cases import each
from tests.support.unit.interpreter import analysed, back, captured, drawn, inputs_of, run
from tests.support.unit.models import CAPTURED, MODELS

pytestmark = CAPTURED


def gradients(
    captured: Captured, analysis: Analysis, changes: Mapping[str, NodeChange], inputs: list[Any], *, true: bool
) -> dict[str, Tensor]:
    """The gradient of every parameter and of every input, from one backward."""
    state = drawn(captured, analysis.parameters, torch.float64, seed=2)
    inputs = [x.detach().clone().requires_grad_(x.is_floating_point()) if isinstance(x, Tensor) else x for x in inputs]
    torch.manual_seed(3)
    carried, _ = run(captured, changes, state, inputs, true=true)
    back(carried, analysis.flow.outputs)
    leaves = {name: value for name, value in state.items() if isinstance(value, Tensor) and value.requires_grad}
    leaves |= {f"input {i}": x for i, x in enumerate(inputs) if isinstance(x, Tensor) and x.requires_grad}
    return {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def assert_true_but_for_scale(ours: dict[str, Tensor], truth: dict[str, Tensor], tolerance: float = 1e-7) -> None:
    assert set(ours) == set(truth) and ours
    largest = max(float(true.abs().max()) for true in truth.values())
    for leaf, gradient in ours.items():
        true = truth[leaf]
        if float(true.abs().max()) < 1e-9 * largest:  # a key's bias has no gradient: what is left of it is noise
            continue
        ratio = float((gradient * true).sum() / (true * true).sum())
        assert ratio > 0, leaf
        atol = tolerance * float(gradient.abs().max())
        torch.testing.assert_close(gradient, true * ratio, rtol=tolerance, atol=atol, msg=leaf)


@each("constraint", ["gmean", None])
@each("name", MODELS)
def test_every_gradient_is_the_true_one_times_a_positive_number(name: str, constraint: Any) -> None:
    graph, analysis = captured(name), analysed(name, constraint)
    ours, truth = (gradients(graph, analysis, analysis.changes, inputs_of(graph), true=true) for true in (False, True))
    # GPT-2 casts its logits to FP32 before the loss.
    assert_true_but_for_scale(ours, truth, 1e-4 if name == "gpt2" else 1e-7)


@each("constraint", ["hmean", "amean", "to_output_scale", "to_grad_input_scale"])
@each("name", ["gpt_by_hand", "tied", "two_losses"])
def test_so_it_is_under_other_constraints(name: str, constraint: Any) -> None:
    graph, analysis = captured(name), analysed(name, constraint)
    ours, truth = (gradients(graph, analysis, analysis.changes, inputs_of(graph), true=true) for true in (False, True))
    assert_true_but_for_scale(ours, truth)


@each("constraint", ["gmean", None])
@each("name", ["gpt", "gpt_by_hand", "tied", "encoder_layer", "multihead", "unet"])
def test_so_it_is_at_other_sizes_than_the_example_s(name: str, constraint: Any) -> None:
    graph, analysis = captured(name), analysed(name, constraint)
    inputs = inputs_of(graph)
    cut = [x.detach()[:3] if x.dim() == 4 else x.detach()[:3, :7] for x in inputs]
    ours, truth = (gradients(graph, analysis, analysis.changes, cut, true=true) for true in (False, True))
    assert_true_but_for_scale(ours, truth)


def test_a_wrong_factor_is_seen() -> None:
    """The proof can fail: one factor of its own on an edge that is no bridge."""
    from dataclasses import replace

    from plimsoll.unit.changes import Factor, Scale

    graph, analysis = captured("gpt"), analysed("gpt")
    wrong = dict(analysis.changes)
    change = next(one for one in wrong.values() if one.operation == "gelu")
    name = next(name for name, one in wrong.items() if one is change)
    wrong[name] = replace(change, inputs={0: Scale(backward=Factor(value=9.0))})
    ours, truth = (gradients(graph, analysis, wrong, inputs_of(graph), true=true) for true in (False, True))
    with pytest.raises(AssertionError, match="norm|positions|tokens"):
        assert_true_but_for_scale(ours, truth)


def test_frozen_parameters_take_part_as_others() -> None:
    case = MODELS["gpt"]()
    for parameter in case.model.get_submodule("blocks.0").parameters():
        parameter.requires_grad_(False)
    graph = capture(case.model.double(), case.example)
    frozen = analyse(graph)
    assert frozen.changes == analysed("gpt").changes
    ours, truth = (gradients(graph, frozen, frozen.changes, inputs_of(graph), true=true) for true in (False, True))
    assert not any(name.startswith("blocks.0.") for name in ours)
    assert_true_but_for_scale(ours, truth)
