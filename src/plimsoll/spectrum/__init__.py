"""What a tensor holds: the `Spectrum`, `measure`, which takes one, and `Fit`, what a format would make of it.

`Source` and `Grid` say where values come from; `BlockRecord` is what block formats need to know.
"""

from plimsoll.spectrum._blocks import BlockRecord as BlockRecord
from plimsoll.spectrum._fit import SHIFT_LIMIT as SHIFT_LIMIT, Fit as Fit
from plimsoll.spectrum._measure import measure as measure
from plimsoll.spectrum._source import Grid as Grid, Source as Source
from plimsoll.spectrum._spectrum import Spectrum as Spectrum
from plimsoll.spectrum.intervals import Interval as Interval
