"""Audits of converted models: the original's rows again, each operation with its factors."""

import pytest
import torch
from torch import Tensor, nn

import plimsoll as pl
from plimsoll import unit
from plimsoll.unit import audit, convert
from tests.support.spectra import same


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 128), Block(128), Block(128), nn.Linear(128, 10))


def test_a_converted_model_has_the_same_rows_at_unit_scale() -> None:
    original, x = model(), torch.randn(64, 32)
    before = audit(original, x)
    after = audit(convert(original, x, seed=0), x)
    comparison = before.compare(after)
    assert comparison.only_before == comparison.only_after == ()
    assert [r.name for r in after.operations] == [r.name for r in before.operations]
    assert len(before.beyond(2.0)) >= 6 and after.beyond(1.5) == ()
    assert all(r.backward is not None for r in after.rows if r.kind != "input")
    # Gradients of weights and biases too: rows^-1/2 is theirs.
    assert all(reading.distance < 2.0 for reading in after.readings("backward", "parameter"))


def test_the_rows_of_a_converted_operation_are_its_scaled_results() -> None:
    original, x = nn.Sequential(nn.Linear(64, 256), nn.GELU()), torch.randn(128, 64)
    converted = convert(original, x, seed=0)
    found = audit(converted, x)
    assert same(found.operations[-1].forward, pl.measure(converted(x)))
    assert same(found.operations[0].forward, pl.measure(converted.get_submodule("0")(x)))


def test_modules_of_unit_nn_are_one_operation_each() -> None:
    torch.manual_seed(0)
    mlp = nn.Sequential(unit.nn.Linear(64, 256), unit.nn.GELU(), unit.nn.LinearReadout(256, 8))
    found = audit(mlp, torch.randn(128, 64))
    assert [r.name for r in found.operations] == ["0 linear", "1 gelu", "2 linear"]
    assert [r.spectrum.count for r in found.readings("forward")] == [128 * 256, 128 * 256, 128 * 8]


def test_fp8_modules_are_seen() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    x = torch.randn(64, 64)
    found = audit(pl.fp8.convert(convert(plain, x, seed=0), scaling="unit"), x)
    assert [r.module for r in found.operations] == ["0", "1", "2"] and found.operations[0].operation == "linear"
    assert all(reading.distance < 1.0 for reading in found.readings())


@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_a_compiled_one_is_audited_as_it_is(how: str) -> None:
    original, x = nn.Sequential(nn.Linear(16, 32), nn.ReLU()), torch.randn(8, 16)
    converted = convert(original, x, seed=0)
    wanted = audit(converted, x)
    given = torch.compile(converted, backend="eager") if how == "compiled" else converted
    assert audit(given, x).rows == wanted.rows
