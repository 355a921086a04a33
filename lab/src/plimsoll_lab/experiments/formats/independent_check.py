"""The second way: torch's and NumPy's own dtypes; for TF32, which neither has, arithmetic on FP32's bits."""

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from plimsoll.rounding import cast
from plimsoll_lab.experiments.formats.published_facts import Fact

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_CUT = 13  # bits of FP32's mantissa that TF32 lacks


def by_witness(fact: Fact, device: str) -> float:
    """The figure, by a dtype of torch or NumPy, or by bits of FP32."""
    match fact.asks:
        case "rounds":
            return float(_rounded(fact.format, np.array([fact.value]), device)[0])
        case "flushed":
            smallest = _smallest(fact.format)
            halves = np.array([smallest / 2, smallest])
            return float(halves[_rounded(fact.format, halves, device) == 0].max())
        case "swallowed":
            steps = np.ldexp(1.0, -np.arange(1, 53))
            return float(steps[_rounded(fact.format, 1 + steps, device) == 1].max())
        case "smallest":
            return _smallest(fact.format)
        case _:
            return _described(fact.format)[fact.asks]


def disagreements(values: Tensor, name: str) -> int:
    """Of FP32 values, how many `cast` and the second way round to different ones; NaN is NaN."""
    ours = cast(values, name)
    theirs = tf32_by_bits(values) if name == "tf32" else values.to(DTYPES[name]).float()
    same = (ours.view(torch.int32) == theirs.view(torch.int32)) | (ours.isnan() & theirs.isnan())
    return int((~same).sum())


def _described(name: str) -> dict[str, float]:
    """Widths and limits: of torch's `finfo`, whose fields follow from `eps` and `tiny`; of TF32 from FP32's bits."""
    if name == "tf32":
        codes = np.array(
            [0x7F7FFFFF >> _CUT << _CUT, 0x00800000, 0x3F800000, 0x3F800000 + (1 << _CUT)], dtype=np.uint32
        )
        largest, tiny, one, after = codes.view(np.float32).astype(np.float64).tolist()
        eps, bits = after - one, 32 - _CUT
    else:
        info = torch.finfo(DTYPES[name])
        largest, tiny, eps, bits = info.max, info.tiny, info.eps, info.bits
    bias = 1 - math.log2(tiny)  # the smallest normal value has exponent code 1
    return {"bits": float(bits), "max": largest, "smallest_normal": tiny, "mantissa_bits": -math.log2(eps),
            "exponent_bits": 1 + math.log2(bias + 1)}  # fmt: skip


def _smallest(name: str) -> float:
    """The value of code 1."""
    if name == "tf32":
        return float(np.array([1 << _CUT], dtype=np.uint32).view(np.float32)[0])
    if name == "bf16":
        return float(torch.tensor([1], dtype=torch.int16).view(torch.bfloat16))
    numpy: dict[str, Any] = {"fp64": np.float64, "fp32": np.float32, "fp16": np.float16}
    return float(np.nextafter(numpy[name](0), numpy[name](1)))


def _rounded(name: str, values: NDArray[np.float64], device: str) -> NDArray[np.float64]:
    if name == "tf32":
        return tf32_by_bits(torch.from_numpy(values).float()).double().numpy()
    return torch.from_numpy(values).to(device).to(DTYPES[name]).double().cpu().numpy()


def tf32_by_bits(values: Tensor) -> Tensor:
    """Nearest TF32 value, ties to even, by adding to FP32's bits and cutting them; NaN stays."""
    bits = values.contiguous().view(torch.int32)
    up = bits + ((1 << (_CUT - 1)) - 1) + ((bits >> _CUT) & 1)  # Inf has no bits that are cut: it stays
    return torch.where(values.isnan(), values, ((up >> _CUT) << _CUT).view(torch.float32))
