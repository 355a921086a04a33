"""The converted model computes what the analysis says: as the graph run node by node with its changes, both ways."""

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from plimsoll.unit.conversion.convert_model import built
from tests.support.cases import each
from tests.support.unit.interpreter import analysed, captured, in_float64, run
from tests.support.unit.models import CAPTURED, MODELS

pytestmark = CAPTURED


def _tensors(nest: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(nest) if isinstance(leaf, Tensor)]


@each("name", MODELS)
def test_outputs_and_gradients_are_the_interpreters(name: str) -> None:
    case, graph, analysis = in_float64(name), captured(name), analysed(name)
    args, kwargs = case.call
    converted = built(case.model, graph, analysis, seed=3)
    converted.train()

    state: dict[str, Any] = {}
    for key, value in converted.state_dict(keep_vars=True).items():
        copied = value.detach().clone()
        state[key] = copied.requires_grad_(value.requires_grad)
    for group in graph.ties:
        state |= dict.fromkeys(group, state[group[0]])
    inputs = pytree.tree_leaves((args, kwargs))
    _, expected = run(graph, analysis.changes, state, inputs, true=False)
    got = converted(*args, **kwargs)
    torch.testing.assert_close(_tensors(got), _tensors(list(expected)), rtol=1e-9, atol=1e-9)

    _backward(_tensors(got))
    _backward(_tensors(list(expected)))
    for key, parameter in converted.named_parameters():
        torch.testing.assert_close(
            parameter.grad, state[key].grad, rtol=1e-8, atol=1e-9, msg=lambda m, k=key: f"{k}: {m}"
        )


def _backward(outputs: list[Tensor]) -> None:
    generator = torch.Generator().manual_seed(7)
    carrying = [x for x in outputs if x.requires_grad]
    torch.autograd.backward(carrying, [torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in carrying])


def test_state_has_the_originals_names() -> None:
    case = in_float64("tied")
    converted = built(case.model, captured("tied"), analysed("tied"))
    assert list(converted.state_dict()) == list(case.model.state_dict())
    assert [name for name, _ in converted.named_modules()] == [name for name, _ in case.model.named_modules()]
