"""Objects that version 0.1 pickled load and work. The files were written with its last commit, by torch.save."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import plimsoll as pl
from plimsoll.unit.changes import SkippedOperation
from plimsoll.unit.conversion.converted_modules import RemainingFactor
from tests.support.cases import each

FOLDER = Path(__file__).parent / "support" / "version_01"


def load(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch announces changes of its own format
        return torch.load(FOLDER / f"{name}.pt", weights_only=False)


def test_a_converted_model_runs_is_drawn_again_and_folds() -> None:
    converted = load("converted")
    x = torch.randn(3, 8)
    converted.train()(x).sum().backward()
    assert all(p.grad is not None for p in converted.parameters())
    assert converted.coverage == []
    converted.reset_parameters()
    expected = converted.eval()(x)
    torch.testing.assert_close(pl.unit.fold(converted)(x), expected, rtol=1e-4, atol=1e-4)


def test_a_folded_model_runs() -> None:
    folded = load("folded")
    assert folded(torch.randn(3, 8)).shape == (3, 8)
    assert folded.kept == []


def test_what_conversion_and_folding_left_is_read() -> None:
    (skipped,) = load("skipped")
    assert isinstance(skipped, SkippedOperation)
    assert skipped.operation == "div"
    assert "quotient" in str(skipped)
    remaining = load("remaining")
    assert [type(factor) for factor in remaining] == [RemainingFactor, RemainingFactor]
    assert [factor.operation for factor in remaining] == ["layer_norm", "return"]


def test_an_audit_and_a_comparison_print_and_rank() -> None:
    audit = load("audit")
    assert [row.operation for row in audit.operations] == ["linear", "gelu", "linear"]
    assert len(audit.worst) == 6
    assert "linear" in str(audit)
    assert len(load("comparison").pairs) == len(audit.rows)


@each(("name", "scale"), [("dynamic", 2.0**16), ("static", 4.0), ("spectral", 2.0**14)])
def test_a_scaler_goes_on(name: str, scale: float) -> None:
    scaler = load(name)
    assert scaler.get_scale() == scale
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scaler.scale((parameter * parameter).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    torch.testing.assert_close(parameter.detach(), torch.full((3,), 0.8))


@pytest.mark.parametrize("name", ["fp8_tensor", "fp8_unit"])
def test_a_model_in_fp8_trains(name: str) -> None:
    model = load(name)
    model(torch.randn(4, 16)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_modules_of_unit_run() -> None:
    assert load("unit_modules")(torch.randn(2, 4, 8)).shape == (2, 4, 4)


def test_formats_spectra_packed_tensors_and_policies_are_equal() -> None:
    assert load("formats")[:5] == [pl.formats.get(n) for n in ("fp16", "e4m3", "e5m2fnuz", "mxfp8_e4m3", "nvfp4")]
    assert load("policy") == pl.Policy()
    assert load("fit").lost.high == 0
    assert load("spectrum").fit("mxfp8_e4m3").format == "mxfp8_e4m3"
    assert pl.unpack(load("packed")).shape == (64,)
