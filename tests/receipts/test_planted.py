"""Steps that differ from their declaration in one way: each difference is found, and nothing else."""

import pytest
import torch

from plimsoll.receipts.take import receipt
from tests.support.receipts.planted import PLANTED


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
