"""Matrix products whose inputs are rounded to a format, against the same products in FP64."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from plimsoll.emulate import emulate
from plimsoll.rounding import cast
from plimsoll_lab.experiments.formats.independent_check import tf32_by_bits

FORMATS = ("fp32", "tf32", "fp16", "bf16")
SCALES = (0, 100, -50)  # powers of two that both inputs are multiplied by: within FP16, and beyond it at both ends


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """What was measured of products, root mean squares over all of them.

    - `error`: by format and scale, the error of the product as a share of its norm; Inf where it is not finite.
    - `inputs`: by format, the error that rounding makes in the two inputs together.
    - `differing`: values in which the emulated TF32 product is another than that of inputs rounded by bits.
    - `device`: the error of the device's own TF32 product, None where it has none.
    """

    error: Mapping[tuple[str, int], float]
    inputs: Mapping[str, float]
    differing: int
    device: float | None


def errors(products: int, size: int, seed: int, device: str) -> Errors:
    """Measures so many products of normal matrices."""
    generator = torch.Generator().manual_seed(seed)
    squares = {(name, scale): 0.0 for name in FORMATS for scale in SCALES}
    inputs, differing, own = dict.fromkeys(FORMATS, 0.0), 0, 0.0
    for _ in range(products):
        a, b = (torch.randn(size, size, generator=generator).to(device) for _ in range(2))
        exact = a.double() @ b.double()
        for name, scale in squares:
            squares[name, scale] += _off(_product(a, b, name, scale), exact) ** 2
        for name in FORMATS:
            inputs[name] += sum(_off(cast(each, name), each.double()) ** 2 for each in (a, b))
        differing += int((_product(a, b, "tf32", 0) != (tf32_by_bits(a) @ tf32_by_bits(b)).double()).sum())
        if device == "cuda":
            own += _off(_own(a, b), exact) ** 2
    return Errors(
        error={key: math.sqrt(square / products) for key, square in squares.items()},
        inputs={name: math.sqrt(square / products) for name, square in inputs.items()},
        differing=differing,
        device=math.sqrt(own / products) if device == "cuda" else None,
    )


def _product(a: Tensor, b: Tensor, name: str, scale: int) -> Tensor:
    """The product of both times 2^scale, with the scale undone; exact but for the format and FP32's accumulation.

    One input is brought back before the product where its result would leave FP32: what is rounded is the scaled one.
    """
    factor = 2.0**scale
    if name == "fp32" or scale:
        rounded = [cast(each * factor, name).double() / factor for each in (a, b)]
        return (rounded[0].float() @ rounded[1].float()).double()
    with emulate(forward=name):
        return (a @ b).double()


def _own(a: Tensor, b: Tensor) -> Tensor:
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = "tf32"
        return (a @ b).double()
    finally:
        matmul.fp32_precision = before


def _off(found: Tensor, exact: Tensor) -> float:
    share = float((found.double() - exact).square().sum().sqrt() / exact.square().sum().sqrt())
    return share if math.isfinite(share) else math.inf
