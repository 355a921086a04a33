"""Spectra from live training: `watch` starts it, `Watch` is its handle.

The package can be called as its function: ``plimsoll.watch(...)``.
"""

from plimsoll import exports
from plimsoll.watch.handle import Watch as Watch, watch as watch
from plimsoll.watch.taps.cast_counts import Casting as Casting

exports.show_classes(__name__)
exports.make_callable(__name__, watch)
