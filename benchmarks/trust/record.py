"""Record the runs of the sets, one after another, and say of each whether the training was what it claims to be.

Next to the run's folder lies a file of the same name and the ending `.json`: losses, warnings of the watch, the error
that ended the training if one did, and for healthy kinds whether they learned.
"""

import json
import math
import random
import shutil
import tempfile
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.trust.registry import Case, Kind
from benchmarks.trust.training import Training

_RUNS = Path(tempfile.gettempdir()) / "plimsoll-trust"  # kept between calls: recording takes half an hour
TUNED, HELD_BACK = _RUNS / "tuned", _RUNS / "held-back"
SHARE = 10  # the first and the last tenth of the losses are compared
FACTOR, OF_FALL = 2.0, 0.1  # how far a low precision's last losses may lie above FP32's


def place(case: Case, tuned: Path = TUNED, held_back: Path = HELD_BACK) -> Path:
    """The folder of a case's run."""
    return (held_back if case.kind.held_back else tuned) / case.kind.folder / case.name


def notes_of(path: Path) -> dict[str, Any] | None:
    """What was noted of a recorded run; None where there is none."""
    notes = path.with_name(path.name + ".json")
    return json.loads(notes.read_text(encoding="utf-8")) if notes.exists() else None


def record(case: Case, path: Path) -> dict[str, Any]:
    """Train once, watched; the notes, which are written too."""
    shutil.rmtree(path, ignore_errors=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    notes_path = path.with_name(path.name + ".json")
    notes_path.unlink(missing_ok=True)
    seed = 1000 * case.seed + sum(case.kind.name.encode())
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002  (kinds draw from it as users' scripts do)
    torch.manual_seed(seed)
    run = Training(path, case.precision, case.seed, getattr(case.kind, "every", None))
    error = None
    began = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with run:
                case.kind.train(run)
        except Exception as failure:  # noqa: BLE001  (noted; a healthy kind that fails is not sound)
            error = f"{type(failure).__name__}: {failure}"
    notes = {
        "kind": case.kind.name,
        "precision": case.precision,
        "seed": case.seed,
        "seconds": round(time.perf_counter() - began, 2),
        "error": error,
        "warnings": sorted({f"{w.category.__name__}: {w.message}" for w in caught}),
        "losses": run.losses,
        "measures": run.measures,
    }
    notes_path.write_text(json.dumps(notes) + "\n", encoding="utf-8")
    return notes


def ends(notes: Mapping[str, Any]) -> tuple[float, float]:
    """The mean of the first and of the last tenth of what the training is judged by."""
    values: Sequence[float] = notes["measures"] or notes["losses"]
    tenth = max(1, len(values) // SHARE)
    return float(np.mean(values[:tenth])), float(np.mean(values[-tenth:]))


def unsound(kind: Kind, notes: Mapping[str, Any], in_fp32: Mapping[str, Any] | None) -> str | None:
    """Why a training is not a healthy one; None if it is."""
    if notes["error"] is not None:
        return f"it fails with {notes['error']}"
    first, last = ends(notes)
    if not (math.isfinite(first) and math.isfinite(last)):
        return f"it goes from {first:.4g} to {last:.4g}"
    if last > kind.learns * first if first > 0 else last > first - kind.learns * abs(first):
        return f"it goes from {first:.4g} to {last:.4g}, which is not a fall to {kind.learns:g} of the first"
    if in_fp32 is None or notes["precision"] == "fp32":
        return None
    _, full = ends(in_fp32)
    if last > FACTOR * abs(full) and last - full > OF_FALL * abs(first - full):
        return f"it ends at {last:.4g}, in FP32 at {full:.4g}"
    return None


def record_missing(chosen: Iterable[Case], places: Mapping[str, Path], *, again: bool, say: Any = print) -> None:
    """Record each case that has no notes yet; all of them with `again`."""
    torch.set_num_threads(1)
    for case in chosen:
        path = place(case, **places)
        if not again and notes_of(path) is not None:
            continue
        notes = record(case, path)
        verdict = ""
        if isinstance(case.kind, Kind):
            in_fp32 = notes_of(path.with_name(f"{case.kind.name}-fp32-{case.seed}"))
            reason = unsound(case.kind, notes, in_fp32)
            verdict = f"NOT SOUND: {reason}" if reason else "{:.4g} -> {:.4g}".format(*ends(notes))
        elif notes["error"]:
            verdict = notes["error"][:100]
        say(f"{case.kind.folder} {case.name}: {notes['seconds']:.1f} s  {verdict}")
