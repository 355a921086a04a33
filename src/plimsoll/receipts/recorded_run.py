"""A receipt of a recorded run: formats at modules' borders, and of training state.

That is of weights, gradients and the optimizer's state. A watch records the tensors between modules and not the
operations inside. So a run's receipt has no products, no accumulators, no casts but those of FP8 layers, no collectives
and no compiled kernels, and says so.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from plimsoll.errors import NotRecordedError
from plimsoll.formats import Plan
from plimsoll.precision.levels.catalogue import Level, level_of_plan
from plimsoll.precision.levels.policy import Policy
from plimsoll.receipts.declared.declaration import parse
from plimsoll.receipts.declared.deviations import ORDER, deviation
from plimsoll.receipts.recording.values import narrower
from plimsoll.receipts.result import Receipt
from plimsoll.receipts.rows import Deviation, Role, Row, TensorRow
from plimsoll.runs import Run
from plimsoll.watch.names import ROOT

_ROLES: Mapping[str, Role] = {"weights": "weights", "gradients": "gradients", "optimizer": "optimizer"}
_LIMITS = (
    "A recorded run has the formats of modules' inputs and outputs, weights, gradients and state. It has no single "
    "operations, accumulators, collectives or compiled kernels, and no casts but those of FP8 layers: "
    "`plimsoll receipt SCRIPT` records these."
)


def receipt_of_run(run: Run, declared: object = None) -> Receipt:
    """Return the receipt that a recorded run can give.

    Args:
        run: The run.
        declared: What it is held against: a level's name, a `Level`, a `Policy`, a `Plan` or its file. Default: None.

    Raises:
        ArgumentError: `declared` is none of these.
    """
    parsed = None if declared is None else parse(declared)
    recorded = cast("Mapping[str, Mapping[str, Mapping[str, Any]]]", run.manifest.get("tensors") or {})
    formats = {
        collection: {name: str(entry.get("format") or "unknown") for name, entry in series.items()}
        for collection, series in recorded.items()
    }
    rows, tensors = [*_modules(formats), *_casts(run)], list(_tensors(formats))
    name = None if parsed is None else _name_of(parsed, declared)
    versions = cast("Mapping[str, str]", run.manifest.get("versions") or {})
    settings = {key: str(value) for key, value in versions.items()}
    trained = run.manifest.get("precision")
    return Receipt(
        subject=str(run.path.name),
        did=tuple(dict.fromkeys(row.phase for row in rows)),
        declared=name,
        rows=tuple(rows),
        deviations=() if parsed is None else _deviations(run, parsed, tensors, rows),
        tensors=tuple(tensors),
        settings=settings | ({} if trained is None else {"precision": str(trained)}),
        notes=(_LIMITS, *_notes(run)),
        parameters=int(cast("Any", run.manifest.get("parameters") or 0)),
    )


def _name_of(found: Level | Policy | Plan, declared: object) -> str:
    if isinstance(found, Level):
        return found.name
    return "a policy" if isinstance(found, Policy) else str(declared) if isinstance(declared, str) else "a plan"


def _modules(formats: Mapping[str, Mapping[str, str]]) -> Iterator[Row]:
    """Yield a row for each module's input and output formats, forward and backward."""
    for collection, phase in (("activations", "forward"), ("activation_gradients", "backward")):
        borders: dict[str, dict[str, list[str]]] = {}
        for name, fmt in formats.get(collection, {}).items():
            module, _, border = name.rpartition(":")
            borders.setdefault(module, {}).setdefault(border.partition(".")[0], []).append(fmt)
        for module, formats_of_module in borders.items():
            goes_in, comes_out = ("input", "output") if phase == "forward" else ("output", "input")
            output = formats_of_module.get(comes_out, [""])[0]
            operands = tuple(formats_of_module.get(goes_in, ()))
            yield Row(
                operation="module", kind="module", phase="forward" if phase == "forward" else "backward",
                module=module or ROOT, operands=operands, values=operands, output=output,
            )  # fmt: skip


def _casts(run: Run) -> Iterator[Row]:
    """Yield a row for each operand that an FP8 layer casts."""
    for cast_ in run.casts():
        yield Row(
            operation=f"cast of {cast_.role}", kind="cast",
            phase="backward" if cast_.role == "gradients" else "forward",
            module=cast_.module, output=cast_.format, cause="level",
        )  # fmt: skip


def _tensors(formats: Mapping[str, Mapping[str, str]]) -> Iterator[TensorRow]:
    for collection, role in _ROLES.items():
        for name, fmt in formats.get(collection, {}).items():
            if not name.endswith(":step"):
                module = name.partition(":")[0].rpartition(".")[0] or ROOT
                yield TensorRow(name=name, role=role, format=fmt, bytes=0, module=module)


def _notes(run: Run) -> Iterator[str]:
    if "weights" not in run.tensors:
        yield "Weights were not recorded (collect), so their format is unknown."
    if "optimizer" not in run.tensors:
        yield "Optimizer state was not recorded (collect), so its format is unknown."
    for event in run.events():
        if event.kind in ("emulation", "precision"):
            yield f"Step {event.step:,}: {event.message}."


def _deviations(
    run: Run, found: Level | Policy | Plan, tensors: Sequence[TensorRow], rows: Sequence[Row]
) -> tuple[Deviation, ...]:
    level = found if isinstance(found, Level) else level_of_plan(found) if isinstance(found, Plan) else None
    deviations = [] if level is None else list(_of_level(run, level, tensors))
    if isinstance(found, Plan):
        deviations += _of_plan(found, rows)
    return tuple(sorted(deviations, key=lambda one: ORDER[one.kind]))


def _of_level(run: Run, level: Level, tensors: Sequence[TensorRow]) -> Iterator[Deviation]:
    trained = run.manifest.get("precision")
    if isinstance(trained, str) and not level.name.startswith("plan") and trained != level.name:
        yield deviation("level", None, level.name, trained)
    allowed = {level.weights, level.norms}
    weights = {tensor.format for tensor in tensors if tensor.role == "weights"}
    if weights and level.weights not in weights and weights <= allowed:  # norms alone may be wider
        yield deviation("weights", None, level.weights, " and ".join(sorted(weights)))
    pure = level.casts and level.update == "plain"
    for tensor in tensors:
        if tensor.role == "weights" and tensor.format not in allowed:
            yield deviation("weights", tensor.name, " or ".join(sorted(allowed)), tensor.format)
        elif tensor.role == "optimizer" and narrower(tensor.format, level.weights if pure else "fp32"):
            yield deviation("optimizer-state", tensor.name, level.weights if pure else "fp32", tensor.format)
    if level.scaled and not _has_scale(run):
        yield deviation("loss-scale", None, "a loss scaler", "an unscaled loss")


def _has_scale(run: Run) -> bool:
    try:
        return len(run.scalars("scale")[0]) > 0
    except NotRecordedError:
        return False


def _of_plan(plan: Plan, rows: Sequence[Row]) -> Iterator[Deviation]:
    """Yield modules that a plan has in FP8 and the run multiplied in another format."""
    in_fp8 = {row.module for row in rows if row.kind == "cast"}
    for row in rows:
        planned = None if row.module is None or row.kind != "module" else plan.module(row.module)
        named = planned is not None and row.module in plan.formats and planned.forward == "e4m3"
        if named and row.phase == "forward" and row.module not in in_fp8:
            yield deviation("fp8-missing", row.module, "e4m3", row.output)
