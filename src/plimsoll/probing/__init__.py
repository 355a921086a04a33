"""Whether a model fits a number format, from a handful of batches: `probe`."""

from plimsoll import exports
from plimsoll.probing.entry import probe as probe
from plimsoll.probing.result import Probe as Probe

exports.show_classes(__name__)
