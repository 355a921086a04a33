"""Unpacks with one fault each."""

import math

import torch
from torch import Tensor

from tests.support.certification.planted import Planted
from tests.support.formats.scalar_reference import CATALOGUE, decode

INF, NAN = math.inf, math.nan


def _decoded(name: str, codes: Tensor) -> Tensor:
    """The values of codes, from the table of the specification."""
    spec = CATALOGUE[name]
    table = torch.tensor([decode(spec, code) for code in range(2**spec.bits)], dtype=torch.float64)
    return table[codes.long()]


def _nibbles(codes: Tensor, *, high_first: bool = False) -> Tensor:
    pairs = (codes & 15, codes >> 4)
    return torch.stack(pairs[::-1] if high_first else pairs, -1).flatten(-2)


def _mx(
    codes: Tensor, scales: Tensor, *, power=lambda codes: torch.where(codes == 255, NAN, 2.0 ** (codes.double() - 127))
) -> Tensor:
    return _decoded("e4m3", codes) * power(scales).repeat_interleave(32, -1)


def mx_values(codes: Tensor, scales: Tensor) -> Tensor:
    """MXFP8's values, right."""
    return _mx(codes, scales).float()


def nvfp4_values(codes: Tensor, scales: Tensor, tensor_scale: Tensor) -> Tensor:
    """NVFP4's values, right."""
    spread = _decoded("e4m3", scales).repeat_interleave(16, -1)
    return (_decoded("e2m1", _nibbles(codes)) * spread * tensor_scale.double()).float()


CODES = (
    Planted(
        id="NaN scale ignored",
        function=lambda codes, scales: _mx(codes, scales, power=lambda s: 2.0 ** (s.double() - 127)).float(),
        fmt="mxfp8_e4m3",
        kind="unpack",
        rows=("nan-scale",),
    ),
    Planted(
        id="smallest scale flushed",
        function=lambda codes, scales: (_mx(codes, scales) * (scales > 0).repeat_interleave(32, -1)).float(),
        fmt="mxfp8_e4m3",
        kind="unpack",
        rows=("decoded", "decoded-subnormals"),
    ),
    Planted(
        id="subnormal products flushed",
        function=lambda scales, codes: torch.where((y := mx_values(codes, scales)).abs() < 2.0**-126, 0.0 * y, y),
        fmt="mxfp8_e4m3",
        kind="unpack",
        rows=("decoded-subnormals",),
    ),
    Planted(
        id="scale's bias off by one",
        function=lambda codes, scales: 2 * mx_values(codes, scales),
        fmt="mxfp8_e4m3",
        kind="unpack",
        rows=("decoded", "decoded-subnormals"),
    ),
    Planted(
        id="Inf is a number",
        function=lambda codes: torch.where(
            codes & 0x7F == 0x7C,
            torch.copysign(torch.tensor(65536.0), _decoded("e5m2", codes)),
            _decoded("e5m2", codes),
        ),
        fmt="e5m2",
        kind="unpack",
        rows=("decoded-nan",),
        example=(0x7C, INF, 65536.0),
    ),
    Planted(
        id="-0 is +0",
        function=lambda codes: _decoded("e4m3", codes).float() + 0.0,
        kind="unpack",
        rows=("decoded-zeros",),
        example=(0x80, -0.0, 0.0),
    ),
    Planted(
        id="tensor scale ignored",
        function=lambda codes, scales, over: nvfp4_values(codes, scales, over / over),
        fmt="nvfp4",
        kind="unpack",
        rows=("tensor-scale-applied", "decoded"),
    ),
    Planted(
        id="half bytes read in the other order",
        function=lambda codes: _decoded("e2m1", _nibbles(codes, high_first=True)).float(),
        fmt="e2m1",
        kind="unpack",
        rows=("half-order",),
    ),
    Planted(
        id="values change from call to call",
        function=lambda codes: _decoded("e4m3", codes).float() * (1 + (codes.numel() == 1024) * torch.rand(())),
        kind="unpack",
        rows=("repeatable",),
    ),
)
