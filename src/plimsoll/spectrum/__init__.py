"""`Spectrum`: exact counts of a tensor's values, and their fit to a format.

`measure` returns one, and `Fit` is its result for a format. `Source` and `Grid` describe the origin of values.
`BlockRecord` has the counts for block formats.
"""

from typing import TYPE_CHECKING

from plimsoll import exports
from plimsoll.intervals import Interval as Interval
from plimsoll.spectrum.error_sums import ErrorSums as ErrorSums
from plimsoll.spectrum.fit.element_fit import SHIFT_LIMIT as SHIFT_LIMIT, Fit as Fit
from plimsoll.spectrum.record import BlockRecord as BlockRecord
from plimsoll.spectrum.source_format import Grid as Grid, Source as Source
from plimsoll.spectrum.spectrum import Spectrum as Spectrum

if TYPE_CHECKING:
    from plimsoll.spectrum.measurement import measure as measure

exports.show_classes(__name__)
# `measure` imports torch. Reading a recorded run does not, and takes a fifth of the time without it.
__getattr__, __dir__ = exports.lazy(__name__, {"measure": "measurement"})
