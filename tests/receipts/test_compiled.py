"""Compiled code: its operations with modules and lines, casts that fusion removes, backends that show nothing."""

import operator

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch._dynamo.output_graph import OutputGraph
from torch._inductor.output_code import CompiledFxGraph

from plimsoll.receipts.take import receipt
from tests.support.receipts.planted import X, Y
from tests.support.versions import is_older


class Trip(nn.Module):
    """A layer, a cast down and up again, a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).sin()
        h = h.to(torch.bfloat16).float() * 1.5  # the trip
        return self.second(h)


@pytest.fixture
def inductor():
    from torch._inductor import config

    with config.patch(emulate_precision_casts=False, fx_graph_cache=False):
        yield config


def _step(model: nn.Module):
    return lambda: F.mse_loss(model(X), Y).backward()


def test_a_round_trip_that_inductor_removes(inductor):
    eager = Trip()
    model, outputs = torch.compile(eager), []
    owners = (CompiledFxGraph, OutputGraph)
    before = [dict(vars(owner)) for owner in owners]

    def step() -> None:
        outputs.append(model(X))
        F.mse_loss(outputs[0], Y).backward()

    found = receipt(model, step=step, declared="fp32")
    assert [dict(vars(owner)) for owner in owners] == before
    fused = "Fused kernels compute 16-bit operations in FP32"
    assert any(note.startswith(fused) for note in found.notes)
    removed = [d for d in found.deviations if d.kind == "compiled-cast"]
    assert len(removed) == 1
    assert {row.source_text for row in found.rows if row.source_line == removed[0].source_line} == {
        "h = h.to(torch.bfloat16).float() * 1.5  # the trip"
    }
    assert not torch.equal(outputs[0], eager(X))  # compiled code really computes something else
    products = [row for row in found.rows if row.kind == "product"]
    assert {(row.module, row.where) for row in products} == {("first", "compiled"), ("second", "compiled")}
    assert {row.source_text for row in products} == {"h = self.first(x).sin()", "return self.second(h)"}
    assert {row.phase for row in products} == {"forward", "backward"}
    assert {row.accumulate for row in products} == {"fp32"}
    with inductor.patch(emulate_precision_casts=True), torch.no_grad():
        kept = receipt(model, X, declared="fp32")
    assert not any(note.startswith(fused) for note in kept.notes)
    removes = is_older("2.10")  # whatever the switch says
    assert all(row.rounded for row in kept.rows) is not removes
    assert ("compiled-cast" in {d.kind for d in kept.deviations}) is removes


class Normed(nn.Module):
    """A layer and a normalization, which torch's autocast for CPUs leaves in 16 bits."""

    def __init__(self, *, autocast: bool) -> None:
        super().__init__()
        self.layer, self.norm, self.autocast = nn.Linear(8, 8), nn.LayerNorm(8), autocast
        self.register_buffer("signs", torch.ones(8, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.signs.float()
        if not self.autocast:
            return self.norm(self.layer(x))
        with torch.autocast("cpu", torch.bfloat16):
            return self.norm(self.layer(x))


def test_autocast_around_compiled_code_and_within_it_deviates_in_nothing(inductor):
    for within in (False, True):
        model = torch.compile(Normed(autocast=within))
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=not within):
            found = receipt(model, X, declared="amp-bf16")
        norm = next(row for row in found.rows if row.kind == "normalization")
        assert (norm.where, norm.operands[0]) == ("compiled", "bf16")
        assert not found.deviations
        assert ("int64",) in {row.operands for row in found.rows if row.kind == "cast"}
        assert any("leaves layer_norm in 16 bits" in note for note in found.notes)


def test_code_that_runs_as_a_graph_in_python_keeps_modules_and_lines():
    for backend in ("eager", "aot_eager"):
        model = torch.compile(Trip(), backend=backend)
        found = receipt(model, step=_step(model), declared="fp32")
        products = [row for row in found.rows if row.kind == "product"]
        assert {row.module for row in products} == {"first", "second"}
        assert {row.source_text for row in products} == {"h = self.first(x).sin()", "return self.second(h)"}
        assert any(note.startswith(f"1 region compiled by {backend}") for note in found.notes)


def test_a_backend_that_shows_nothing_is_known_by_its_name():
    def hidden(graph: torch.fx.GraphModule, _: object):
        def run(*args: Tensor):
            with torch.utils._python_dispatch._disable_current_modes():
                return graph(*args)

        return run

    model = torch.compile(nn.Sequential(nn.Linear(8, 4), nn.ReLU()), backend=hidden)
    found = receipt(model, X)
    row = next(row for row in found.rows if row.kind == "custom")
    assert (row.operation, row.operands, row.output) == ("compiled by hidden", ("fp32",), "fp32")
    assert any("Known by name only: compiled by hidden" in note for note in found.notes)


def test_code_whose_compilation_fails_is_recorded_as_it_runs():
    def broken(graph: torch.fx.GraphModule, _: object):
        raise RuntimeError("no such kernel")

    model = torch.compile(Trip(), backend=broken)
    with torch._dynamo.config.patch(suppress_errors=True):
        found = receipt(model, step=_step(model), declared="fp32")
    failed = next(d for d in found.deviations if d.kind == "fallback")
    assert "broken" in failed.expected
    assert "no such kernel" in failed.actual
    assert {row.module for row in found.rows if row.kind == "product"} == {"first", "second"}
    assert {row.where for row in found.rows} == {"eager"}


def test_a_model_that_cannot_be_exported():
    class Model(Trip):
        def forward(self, x: Tensor) -> Tensor:
            if operator.gt(float(self.first(x).sum().detach()), 0):
                torch._dynamo.graph_break()
            return super().forward(x)

    model = torch.compile(Model(), backend="eager")
    found = receipt(model, step=_step(model), declared="fp32")
    assert any("graph break" in note for note in found.notes)
    assert {row.module for row in found.rows if row.kind == "product"} == {"first", "second"}


def test_code_that_was_compiled_before_is_recorded_and_goes_on():
    calls: list[int] = []

    def counting(graph: torch.fx.GraphModule, _: object):
        calls.append(1)
        return graph

    model = torch.compile(nn.Linear(8, 4), backend=counting)
    before = model(X)
    found = receipt(model, X)
    assert [row.operation for row in found.rows if row.phase == "forward" and row.kind == "product"] == ["aten.addmm"]
    assert torch.equal(model(X), before)
    assert len(calls) == 3  # before, for the receipt, and after it
