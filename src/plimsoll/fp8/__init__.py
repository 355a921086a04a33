"""FP8 training of linear layers, with constant scales or scales from the data."""

from plimsoll import exports
from plimsoll.fp8.casting import agree as agree
from plimsoll.fp8.conversion import Left as Left, convert as convert
from plimsoll.fp8.linear import Linear as Linear, cached_weights as cached_weights
from plimsoll.fp8.products import check as check

exports.show_classes(__name__)
