"""Putting a tensor into a format: `cast`, its differentiable form `fake_quantize`, and `pack` to real codes."""

from plimsoll.rounding._cast import cast as cast
from plimsoll.rounding._fake_quantize import fake_quantize as fake_quantize
from plimsoll.rounding._pack import Packed as Packed, pack as pack, unpack as unpack
