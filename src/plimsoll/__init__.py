"""How low in precision a PyTorch training run may go: measure it, be warned early, get there safely.

Names are loaded when they are first used (PEP 562), so that importing `plimsoll` alone costs next to nothing and loads
neither torch nor a kernel backend.

>>> import plimsoll as pl
>>> pl.formats.get("fp16").max
65504.0
"""

import importlib
import sys
from typing import TYPE_CHECKING

from plimsoll.moved import Finder
from plimsoll.version import __version__

if TYPE_CHECKING:
    from plimsoll import (
        diagnosis,
        emulate,
        errors,
        formats,
        fp8,
        lab,
        precision,
        report,
        rounding,
        runs,
        scaling,
        spectrum,
        unit,
        watch,
    )
    from plimsoll.diagnosis import Finding, Guard, check_plan, diagnose, diff, locate, plan, whatif
    from plimsoll.errors import (
        ArgumentError,
        BackendError,
        FormatError,
        GuardStop,
        MissingExtraError,
        NotRecordedError,
        PlimsollError,
        RunError,
        StateError,
        UnsupportedTensorError,
    )
    from plimsoll.formats import BlockFormat, Format, Plan
    from plimsoll.precision import MasterWeights, Policy, prepare
    from plimsoll.rounding import Packed, cast, fake_quantize, pack, unpack
    from plimsoll.runs import Run, RunWriter
    from plimsoll.scaling import StepOutcome
    from plimsoll.spectrum import Fit, Interval, Source, Spectrum, measure
    from plimsoll.watch import Watch

__all__ = [
    "ArgumentError",
    "BackendError",
    "BlockFormat",
    "Finding",
    "Fit",
    "Format",
    "FormatError",
    "Guard",
    "GuardStop",
    "Interval",
    "MasterWeights",
    "MissingExtraError",
    "NotRecordedError",
    "Packed",
    "Plan",
    "PlimsollError",
    "Policy",
    "Run",
    "RunError",
    "RunWriter",
    "Source",
    "Spectrum",
    "StateError",
    "StepOutcome",
    "UnsupportedTensorError",
    "Watch",
    "__version__",
    "cast",
    "check_plan",
    "diagnose",
    "diagnosis",
    "diff",
    "emulate",
    "errors",
    "fake_quantize",
    "formats",
    "fp8",
    "lab",
    "locate",
    "measure",
    "pack",
    "plan",
    "precision",
    "prepare",
    "report",
    "rounding",
    "runs",
    "scaling",
    "spectrum",
    "unit",
    "unpack",
    "watch",
    "whatif",
]

# Where each lazy name lives: the same as the block for type checkers above (a test compares them).
_ROOMS = (
    "diagnosis", "emulate", "errors", "formats", "fp8", "lab", "precision", "report", "rounding", "runs", "scaling",
    "spectrum", "unit", "watch",
)  # fmt: skip
_HOMES = {
    "diagnosis": ("Finding", "Guard", "check_plan", "diagnose", "diff", "locate", "plan", "whatif"),
    "errors": (
        "ArgumentError", "BackendError", "FormatError", "GuardStop", "MissingExtraError", "NotRecordedError",
        "PlimsollError", "RunError", "StateError", "UnsupportedTensorError",
    ),
    "formats": ("BlockFormat", "Format", "Plan"),
    "precision": ("MasterWeights", "Policy", "prepare"),
    "rounding": ("Packed", "cast", "fake_quantize", "pack", "unpack"),
    "runs": ("Run", "RunWriter"),
    "scaling": ("StepOutcome",),
    "spectrum": ("Fit", "Interval", "Source", "Spectrum", "measure"),
    "watch": ("Watch",),
}  # fmt: skip
_HOME_OF = {name: room for room, names in _HOMES.items() for name in names}


sys.meta_path.append(Finder())  # last: only what no other finds is looked up in it


def __getattr__(name: str) -> object:
    if name in _ROOMS:
        return importlib.import_module(f"plimsoll.{name}")
    if name in _HOME_OF:
        value = getattr(importlib.import_module(f"plimsoll.{_HOME_OF[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'plimsoll' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
