"""Compiled without graph breaks, layers do the same: outputs, gradients, scales, histories and counts.

Most run with all of the compiler but its code generator, which takes long: what could go wrong is the graph.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plimsoll import fp8, kernels, row_layout

GRAPHS = "aot_eager_decomp_partition"
KINDS: list[dict[str, Any]] = [
    {"scaling": "unit"},
    {"scaling": "tensor", "history": 2},
]


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


def train(kind: dict[str, Any], compiled: bool, counted: bool = False) -> tuple[list[Tensor], Tensor | None]:
    torch.manual_seed(0)
    model = nn.Sequential(fp8.Linear(64, 40, bias=False, **kind), nn.ReLU(), fp8.Linear(40, 32, bias=False, **kind))
    forward, backward = kernels.new_bank(4), kernels.new_bank(2)
    for index, layer in enumerate((model[0], model[2])) if counted else ():
        layer.count_into(forward, backward, {"activations": 2 * index, "weights": 2 * index + 1, "gradients": index})
    call = torch.compile(model, fullgraph=True, backend=GRAPHS) if compiled else model
    found: list[Tensor] = []
    for step, batch in enumerate((16, 16, 16, 7)):
        x = torch.randn(batch, 64, generator=torch.Generator().manual_seed(step)) * 2.0**step
        y = call(x.requires_grad_())
        y.backward(torch.ones_like(y) / (1 + step))
        found += [y.detach(), x.grad.clone(), *(p.grad.clone() for p in model.parameters())]
        found += [buffer.clone() for buffer in model.buffers()]
    counts = torch.cat((forward, backward)) if counted else None
    return found, counts


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_training(kind: dict[str, Any]) -> None:
    expected, _ = train(kind, compiled=False)
    found, _ = train(kind, compiled=True)
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_counting() -> None:
    expected, counts = train({"scaling": "tensor", "margin": 1}, compiled=False, counted=True)
    found, compiled_counts = train({"scaling": "tensor", "margin": 1}, compiled=True, counted=True)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert counts is not None and compiled_counts is not None
    assert torch.equal(counts[:, : row_layout.SUM], compiled_counts[:, : row_layout.SUM])
    assert (
        torch.equal(counts[:, row_layout.HISTOGRAM :], compiled_counts[:, row_layout.HISTOGRAM :])
        and counts[:, 0].all()
    )


def test_cached_weights() -> None:
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        layer = fp8.Linear(64, 48, bias=False)
        call = torch.compile(layer, fullgraph=True, backend=GRAPHS) if compiled else layer
        with fp8.cached_weights(layer):
            for x in torch.randn(3, 16, 64):
                call(x).sum().backward()
            assert layer.fp8_cached is not None
        results.append(layer.weight.grad)
    assert torch.equal(*results)


def test_generated_code_keeps_histories() -> None:
    """It alone computes small tensors again in the backward: from buffers that the forward has changed since."""
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        layer = fp8.Linear(64, 48, bias=False, scaling="tensor", history=2)
        call = torch.compile(layer, fullgraph=True) if compiled else layer
        for step in range(4):
            call(torch.full((16, 64), 2.0**step)).sum().backward()
        results.append([layer.weight.grad, *layer.buffers()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert int(layer.get_buffer("fp8_step")) == int(layer.get_buffer("fp8_gradient_step")) == 3
