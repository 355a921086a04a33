"""Errors of a step in low precision, by tensor, and their sources: `microscope`.

The package can be called as its function: ``plimsoll.microscope(...)``.
"""

from plimsoll import exports
from plimsoll.microscope.blame.result import Blame as Blame, BlameRow as BlameRow
from plimsoll.microscope.entry import microscope as microscope
from plimsoll.microscope.report import ErrorReport as ErrorReport, ErrorRow as ErrorRow

exports.show_classes(__name__)
exports.make_callable(__name__, microscope)
