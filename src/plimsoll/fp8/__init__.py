"""FP8 training of linear layers: 8-bit products, with constant scales on unit-scaled models or scales from the data."""

from plimsoll.fp8._agree import agree as agree
from plimsoll.fp8._cached import cached_weights as cached_weights
from plimsoll.fp8._choice import Left as Left
from plimsoll.fp8._convert import convert as convert
from plimsoll.fp8._linear import Linear as Linear
from plimsoll.fp8._product import check as check
