"""What a tensor holds: the `Spectrum`, `measure`, which takes one, and `Fit`, what a format would make of it.

`Source` and `Grid` say where values come from; `BlockRecord` is what block formats need to know.
"""

from plimsoll import exports
from plimsoll.spectrum.block_record import BlockRecord as BlockRecord
from plimsoll.spectrum.error_sums import ErrorSums as ErrorSums
from plimsoll.spectrum.fit.element_fit import SHIFT_LIMIT as SHIFT_LIMIT, Fit as Fit
from plimsoll.spectrum.intervals import Interval as Interval
from plimsoll.spectrum.measurement import measure as measure
from plimsoll.spectrum.source_format import Grid as Grid, Source as Source
from plimsoll.spectrum.spectrum import Spectrum as Spectrum

exports.show_classes(__name__)
