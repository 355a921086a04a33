"""FP8 training of linear layers, with constant scales or scales from the data."""

from plimsoll import exports
from plimsoll.fp8.conversion import convert as convert
from plimsoll.fp8.layer_choice import Left as Left
from plimsoll.fp8.linear import Linear as Linear, cached_weights as cached_weights
from plimsoll.fp8.products import check as check
from plimsoll.fp8.scales import agree as agree

exports.show_classes(__name__)
