"""The arithmetic rates of a GPU: large products in FP32, TF32, FP16 and BF16, timed by its own clock."""

import statistics
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from plimsoll_lab.experiments.tf32.loops import settings_restored

_REPEATS = 20


def rates(size: int) -> Mapping[str, float]:
    """By format, the median rate of a product of two square matrices, in 10^12 operations a second."""
    found: dict[str, float] = {}
    for name, dtype, precision in (
        ("fp32", torch.float32, "ieee"), ("tf32", torch.float32, "tf32"),
        ("fp16", torch.float16, "ieee"), ("bf16", torch.bfloat16, "ieee"),
    ):  # fmt: skip
        a, b = (torch.randn(size, size, device="cuda").to(dtype) for _ in range(2))
        with settings_restored() as (matmul, _):
            matmul.fp32_precision = precision
            found[name] = 2 * size**3 / _seconds(lambda a=a, b=b: a @ b) / 1e12
    return found


def _seconds(product: Callable[[], Tensor]) -> float:
    for _ in range(3):
        product()
    times: list[float] = []
    for _ in range(_REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        product()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1000)
    return statistics.median(times)
