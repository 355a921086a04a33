"""Find and fix numerical problems in low-precision PyTorch training.

Names are loaded when they are first used (PEP 562), so that importing `plimsoll` alone costs next to nothing and loads
neither torch nor a kernel backend.

>>> import plimsoll as pl
>>> pl.formats.get("fp16").max
65504.0
"""

import sys
from typing import TYPE_CHECKING

from plimsoll import exports, moved
from plimsoll.version import __version__

if TYPE_CHECKING:
    from plimsoll import (
        certification,
        diagnosis,
        emulate,
        errors,
        formats,
        fp8,
        integrations,
        lab,
        microscope,
        precision,
        probing,
        receipts,
        report,
        rounding,
        runs,
        scaling,
        spectrum,
        unit,
        watch,
    )
    from plimsoll.certification import Certificate, certify
    from plimsoll.diagnosis import Finding, Guard, Parity, check_plan, diagnose, diff, locate, parity, plan, whatif
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
    from plimsoll.probing import Probe, probe
    from plimsoll.receipts import Receipt, receipt
    from plimsoll.report import serve
    from plimsoll.rounding import Packed, cast, fake_quantize, pack, unpack
    from plimsoll.runs import Run, RunWriter
    from plimsoll.scaling import StepOutcome
    from plimsoll.spectrum import Fit, Interval, Source, Spectrum, measure
    from plimsoll.watch import Watch

__all__ = [
    "ArgumentError",
    "BackendError",
    "BlockFormat",
    "Certificate",
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
    "Parity",
    "Plan",
    "PlimsollError",
    "Policy",
    "Probe",
    "Receipt",
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
    "certification",
    "certify",
    "check_plan",
    "diagnose",
    "diagnosis",
    "diff",
    "emulate",
    "errors",
    "fake_quantize",
    "formats",
    "fp8",
    "integrations",
    "lab",
    "locate",
    "measure",
    "microscope",
    "pack",
    "parity",
    "plan",
    "precision",
    "prepare",
    "probe",
    "probing",
    "receipt",
    "receipts",
    "report",
    "rounding",
    "runs",
    "scaling",
    "serve",
    "spectrum",
    "unit",
    "unpack",
    "watch",
    "whatif",
]

# The module of each name: the same as the block for type checkers above (a test compares them).
_HOMES = {
    **dict.fromkeys(
        (
            "certification", "diagnosis", "emulate", "errors", "formats", "fp8", "integrations", "lab", "microscope",
            "precision", "probing", "receipts", "report", "rounding", "runs", "scaling", "spectrum", "unit", "watch",
        ),
        "",
    ),
    **dict.fromkeys(("Certificate", "certify"), "certification"),
    **dict.fromkeys(
        ("Finding", "Guard", "Parity", "check_plan", "diagnose", "diff", "locate", "parity", "plan", "whatif"),
        "diagnosis",
    ),
    **dict.fromkeys(
        (
            "ArgumentError", "BackendError", "FormatError", "GuardStop", "MissingExtraError", "NotRecordedError",
            "PlimsollError", "RunError", "StateError", "UnsupportedTensorError",
        ),
        "errors",
    ),
    **dict.fromkeys(("BlockFormat", "Format", "Plan"), "formats"),
    **dict.fromkeys(("MasterWeights", "Policy", "prepare"), "precision"),
    **dict.fromkeys(("Probe", "probe"), "probing"),
    **dict.fromkeys(("Receipt", "receipt"), "receipts"),
    "serve": "report",
    **dict.fromkeys(("Packed", "cast", "fake_quantize", "pack", "unpack"), "rounding"),
    **dict.fromkeys(("Run", "RunWriter"), "runs"),
    "StepOutcome": "scaling",
    **dict.fromkeys(("Fit", "Interval", "Source", "Spectrum", "measure"), "spectrum"),
    "Watch": "watch",
}  # fmt: skip

__getattr__, __dir__ = exports.lazy(__name__, _HOMES)
sys.meta_path.append(moved.Finder())  # last: only what no other finder knows is looked up in it
