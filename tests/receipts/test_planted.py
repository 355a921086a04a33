"""Steps that differ from their declaration in one way: each difference is found, and nothing else."""

import pytest
import torch
from torch import nn

from plimsoll.receipts.take import receipt
from tests.support.receipts.planted import PLANTED, scaled_step


@pytest.fixture
def switches():
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)
    torch.backends.cuda.matmul.fp32_precision = "none"
    torch.backends.mkldnn.matmul.fp32_precision = "none"


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_deviation_is_found_and_no_other(name: str, switches: None):
    case = PLANTED[name]()
    if name == "tf32 allowed":
        torch.backends.cuda.matmul.fp32_precision = "tf32"
    found = receipt(case.model, step=case.step, declared=case.declared)
    kinds = {(deviation.kind, deviation.module) for deviation in found.deviations}
    assert (case.kind, case.module) in kinds
    assert {kind for kind, _ in kinds} - {case.also} == {case.kind}
    if case.has_line:
        blamed = next(deviation for deviation in found.deviations if deviation.kind == case.kind)
        texts = {row.source_text for row in found.rows if row.source_line == blamed.source_line}
        assert all(text.endswith("# planted") for text in texts), blamed


def test_partial_sums_in_fp16_where_the_cpu_may_add_them_so(monkeypatch: pytest.MonkeyPatch):
    """torch sets this switch only on processors with arithmetic in FP16."""
    monkeypatch.setattr(torch._C, "_get_cpu_allow_fp16_reduced_precision_reduction", lambda: True, raising=False)
    model = nn.Linear(8, 4)
    found = receipt(model, step=scaled_step(model), declared="amp-fp16")
    assert {(d.kind, d.actual) for d in found.deviations} == {("accumulate", "partial sums in fp16")}


def test_complex_numbers_count_as_their_parts():
    class Fourier(nn.Module):
        def __init__(self, dtype: torch.dtype) -> None:
            super().__init__()
            self.mixing = nn.Parameter(torch.ones(5, 5, dtype=dtype))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.fft.irfft(torch.fft.rfft(x).to(self.mixing.dtype) @ self.mixing)

    x = torch.ones(4, 8)
    for declared in ("fp32", "amp-bf16"):
        assert not receipt(Fourier(torch.complex64), x, declared=declared).deviations
    (found,) = receipt(Fourier(torch.complex128), x, declared="amp-bf16").deviations
    assert (found.kind, found.actual) == ("weights", "complex128")
