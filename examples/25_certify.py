"""Does this kernel do what its format says? Certificates of three kernels, each with one fault."""

import torch
from torch import Tensor

import plimsoll as pl


def half_up(x: Tensor) -> Tensor:
    """Round to BF16 by adding half of the last place, as many kernels do: ties go away from zero, and NaN is lost."""
    bits = x.float().view(torch.int32)
    return ((bits + (1 << 15)) & -(1 << 16)).view(torch.float32)


def through_fp16(x: Tensor) -> Tensor:
    """Round to E5M2 by way of FP16: two roundings, which differ from one just off a tie."""
    return x.to(torch.float16).to(torch.float8_e5m2)


def short_sums(a: Tensor, b: Tensor) -> Tensor:
    """Multiply in slices of 64, and add the slices up in FP16."""
    total = torch.zeros(a.shape[0], b.shape[1], dtype=a.dtype)
    for k in range(0, a.shape[1], 64):
        total += (a[:, k : k + 64].float() @ b[k : k + 64].float()).to(a.dtype)
    return total


cast = pl.certify(half_up, "bf16")
print(cast, "\n")
assert {row.requirement for row in cast.deviations} >= {"ties", "nan"}
assert cast.inferred.rounding == "nearest_away"

twice = pl.certify(through_fp16, "e5m2")
print(twice.verdict)
print(f"  {twice.row('rounded-once').counterexample}\n")
assert "rounded-once" in {row.requirement for row in twice.deviations}

product = pl.certify(short_sums, "fp16", kind="matmul")
print(product.verdict)
print(f"  order: {product.inferred.order}; accumulator: {product.inferred.accumulate}")
print(f"  {product.row('accumulator').counterexample}\n")
assert product.row("accumulator").status == "deviates"

assert pl.certify(torch.float8_e5m2, "e5m2").conforms
print("torch's own cast to E5M2 conforms.")
