"""Casts of tensors to a format: `cast`, differentiable `fake_quantize`, `pack`."""

from plimsoll import exports
from plimsoll.rounding.casting import cast as cast
from plimsoll.rounding.fake_quantization import fake_quantize as fake_quantize
from plimsoll.rounding.packing import Packed as Packed, pack as pack, unpack as unpack

exports.show_classes(__name__)
