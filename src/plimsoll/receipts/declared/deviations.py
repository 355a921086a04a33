"""Deviations: their kinds, and where a step differs from its declaration."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from plimsoll.precision.levels.fp8_layers import FP8
from plimsoll.receipts.assembly import module_of
from plimsoll.receipts.declared.declaration import Declaration
from plimsoll.receipts.recording.operations import MULTIPLYING, Entry, Switches, listed_as
from plimsoll.receipts.recording.training import Recording
from plimsoll.receipts.recording.values import SIXTEEN_BIT, is_code, narrower, part_format
from plimsoll.receipts.rows import Deviation, Row, TensorRow

# -- the kinds, each with its meaning and a remedy; the worst first ----------------------------------------------------


@dataclass(frozen=True, slots=True)
class DeviationKind:
    """A kind of deviation."""

    name: str
    meaning: str
    advice: str


_ALL = (
    DeviationKind("level", "the run was trained at another level",
                  "Declare the level that it was trained at, or train it again."),
    DeviationKind("accumulate", "products or sums are added up in fewer bits than FP32",
                  "Leave accumulation in FP32: switch reduced-precision accumulation off."),
    DeviationKind("masters", "16-bit weights are updated without wider masters",
                  "Wrap the optimizer in plimsoll.MasterWeights, or train with plimsoll.prepare."),
    DeviationKind("update", "16-bit weights are updated plainly, and not as the level says",
                  "Train with plimsoll.prepare, which makes the optimizer of the level."),
    DeviationKind("optimizer-state", "an optimizer's state has another format",
                  "Make the optimizer from FP32 parameters, or give its state the declared dtype."),
    DeviationKind("loss", "the loss is computed in 16 bits",
                  "Cast the model's output with .float() before the loss."),
    DeviationKind("loss-scale", "the loss is not scaled, so that small gradients become zero",
                  "Use a loss scaler: plimsoll.scaling.DynamicScaler, or plimsoll.prepare."),
    DeviationKind("gradient-reduction", "gradients are added up across ranks in another format",
                  "Remove the compressing hook, or set reduce_dtype=torch.float32 in MixedPrecisionPolicy."),
    DeviationKind("product-narrow", "a product's operands have fewer bits than declared",
                  "Remove the cast of its operands, or of its weight."),
    DeviationKind("product-format", "a product's operands have another 16-bit format than declared",
                  "Use one 16-bit dtype: that of autocast, of casts in the script and of the weights."),
    DeviationKind("tf32", "FP32 operands are rounded to TF32 or BF16 by the device",
                  'Set fp32_precision = "ieee" (torch.backends.cuda.matmul, torch.backends.cudnn.conv).'),
    DeviationKind("softmax", "a softmax runs in 16 bits",
                  "Cast its input with .float(), or leave it to autocast: remove the cast before it."),
    DeviationKind("normalization", "a normalization runs in 16 bits",
                  "Keep the module in FP32, and give it FP32 values."),
    DeviationKind("reduction", "a sum or mean runs in 16 bits",
                  "Reduce with dtype=torch.float32, or remove the cast before it."),
    DeviationKind("operation", "an operation runs in 16 bits that is declared to run in FP32",
                  "Remove the cast of its input, or put the operation on the policy's low list."),
    DeviationKind("weights", "parameters have another format than declared",
                  "Cast the module's parameters before the optimizer is made."),
    DeviationKind("buffers", "a buffer has another format than declared",
                  "Keep the buffer in its module's format; module.to(dtype) casts buffers too."),
    DeviationKind("double-rounding", "values are rounded to one 16-bit format and then to another",
                  "Cast once, from the wider format."),
    DeviationKind("round-trip", "values are rounded to 16 bits and then computed with in FP32",
                  "Remove the cast down, or compute in 16 bits behind it."),
    DeviationKind("compiled-cast", "compiled code has removed a cast down and up again, so that nothing is rounded",
                  "Set torch._inductor.config.emulate_precision_casts = True. torch 2.9 removes the casts even then."),
    DeviationKind("fp8-missing", "a layer that is declared to multiply in FP8 does not",
                  "Convert the layer with plimsoll.fp8.convert, or use plimsoll.prepare."),
    DeviationKind("autocast-disabled", "a region switches autocast off, and products in it run in FP32",
                  "Remove autocast(enabled=False), or declare the module in a policy."),
    DeviationKind("custom-function", "the backward of an autograd.Function runs outside of autocast",
                  "Decorate its forward with torch.amp.custom_fwd and its backward with torch.amp.custom_bwd."),
    DeviationKind("upcast", "a product's 16-bit operands are cast up, so that it runs in FP32",
                  "Remove the cast up of its operands."),
    DeviationKind("product-wide", "a product runs in more bits than declared",
                  "Run it under autocast, or cast its operands; or declare the module in a policy or plan."),
    DeviationKind("operation-wide", "an operation that a policy has on its low list runs in FP32",
                  "Run it under Plimsoll's lists: plimsoll.prepare(policy=...)."),
    DeviationKind("promotion", "16-bit values are promoted to FP32 by an operand that is FP32",
                  "Cast the FP32 operand (a buffer, a mask, a constant) to the dtype of the others."),
    DeviationKind("fp64", "an operation runs in FP64",
                  "Cast its FP64 operand to FP32; NumPy's numbers are FP64."),
    DeviationKind("fallback", "code runs eagerly, since its compilation failed",
                  "Repair what the compiler refuses; torch._dynamo.config.suppress_errors hides it."),
)  # fmt: skip
KINDS: Mapping[str, DeviationKind] = {kind.name: kind for kind in _ALL}
ORDER = {kind.name: place for place, kind in enumerate(_ALL)}


def deviation(kind: str, module: str | None, expected: str, actual: str) -> Deviation:
    """Return a deviation of a kind that no operation is to blame for."""
    return Deviation(
        kind=kind, module=module, source_line=None, operation="", expected=expected, actual=actual,
        advice=KINDS[kind].advice,
    )  # fmt: skip


# -- checks of a step --------------------------------------------------------------------------------------------------

# Each check looks at one thing, an operation or a tensor that lasts, and yields what deviates. What is seen at one
# place in several phases is one deviation.

_WIDE = frozenset(("upcast", "autocast-disabled", "product-wide"))
ATTENTION, CROSS_ENTROPY = "scaled_dot_product_attention", "cross_entropy_loss"
_CASTS_DOWN = re.compile(r"\.(?:half|bfloat16)\(|\.to\([^)]*(?:float16|half)\b")
# pytorch issue 190626
_TENSOR_PARALLEL = (
    "fully_shard reduces over the tensor-parallel mesh in the gradient's own dtype, whatever reduce_dtype says: shard "
    "these modules with param_dtype=torch.float32."
)
_OWN_SUMS = "torch keeps these sums in the tensor's own dtype: give the operation FP32, or keep its weight in FP32."
_HIGH_KINDS = {"softmax": "softmax", "normalization": "normalization", "loss": "loss", "reduction": "reduction"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """An operation in all that is known of it."""

    entry: Entry
    row: Row


def deviations_of(
    declaration: Declaration, recording: Recording, rows: Sequence[Row], tensors: Sequence[TensorRow]
) -> tuple[Deviation, ...]:
    """Return a recording's deviations, the worst kind first, then in step order."""
    seen = [_Seen(entry=entry, row=row) for entry, row in zip(recording.entries, rows, strict=True)]
    deviations: list[Deviation] = []
    for one in seen:
        if one.row.phase != "optimizer":
            deviations += _of_operation(declaration, one)
        deviations += _of_collective(declaration, one)
    deviations += _of_loss(declaration, recording)
    deviations += _of_tensors(declaration, recording, tensors)
    deviations += _of_switches(declaration, seen)
    for backend, error in recording.compiled.errors.items():
        deviations.append(deviation("fallback", None, f"code compiled by {backend}", f"eager code, since {error}"))
    return tuple(sorted(_merged(deviations), key=lambda one: ORDER[one.kind]))


def _of_operation(declaration: Declaration, seen: _Seen) -> Iterator[Deviation]:
    entry = seen.entry
    if entry.kind in MULTIPLYING:
        yield from _of_product(declaration, seen)
    elif entry.kind == "cast":
        yield from _of_cast(declaration, seen)
    else:
        yield from _of_other(declaration, seen)
    if entry.accumulate is not None and entry.kind != "collective" and narrower(entry.accumulate, "fp32"):
        deviation_of_sums = _deviation_at("accumulate", seen, "fp32", f"sums in {entry.accumulate}")
        yield deviation_of_sums if entry.kind in MULTIPLYING else replace(deviation_of_sums, advice=_OWN_SUMS)
    elif entry.partial is not None and entry.device == "cpu":
        yield _deviation_at("accumulate", seen, "fp32", f"partial sums in {entry.partial}")
    if entry.output == "fp64" and "fp64" in entry.operands and entry.where != "emulated" and entry.kind != "exact":
        yield _deviation_at("fp64", seen, "fp32 at most", "fp64")


# -- products ----------------------------------------------------------------------------------------------------------


def _of_product(declaration: Declaration, seen: _Seen) -> Iterator[Deviation]:
    entry, row = seen.entry, seen.row
    allowed = declaration.factors(row.module, backward=row.phase == "backward")
    if allowed is None:
        return
    actual = _factors(entry)
    parts = tuple(map(part_format, actual))
    strange = [fmt for fmt in parts if fmt not in allowed]
    # Attention computes in FP32 where it is made of products, and rounds once. No autocast casts complex numbers.
    if entry.part_of == ATTENTION or parts != actual:
        strange = [fmt for fmt in strange if any(narrower(fmt, other) for other in allowed)]
    if not strange:
        return
    expected, formats = _listed(allowed), " x ".join(actual)
    if allowed & {FP8.forward, FP8.backward} and not any(is_code(fmt) for fmt in actual):
        yield _deviation_at("fp8-missing", seen, expected, formats)
        return
    kind = _kind_of_product(entry, strange, allowed)
    yield _deviation_at(kind, seen, expected, formats)


def _factors(entry: Entry) -> tuple[str, ...]:
    """Return the formats that a product's operands are multiplied in."""
    pairs = zip(entry.operands, entry.values, strict=True)
    return tuple(
        values if entry.where == "emulated" or is_code(values) or (values == "tf32" and dtype == "fp32") else dtype
        for dtype, values in pairs
    )


def _kind_of_product(entry: Entry, strange: Sequence[str], allowed: frozenset[str]) -> str:
    if any(fmt in SIXTEEN_BIT for fmt in strange) and allowed <= SIXTEEN_BIT:
        return "product-format"
    if "tf32" in strange and "fp32" in allowed:
        return "tf32"
    if any(all(narrower(fmt, other) for other in allowed) for fmt in strange):
        return "product-narrow"
    if entry.phase == "backward" and entry.node is not None and _is_custom(entry.node):
        return "custom-function"
    if entry.autocast and entry.device != "meta":  # where autocast is on, no product that it casts can be in FP32
        return "autocast-disabled"
    cast_up = any(value in SIXTEEN_BIT for value in entry.values)
    return "upcast" if cast_up and entry.where != "emulated" else "product-wide"


def _is_custom(node: str) -> bool:
    """Return whether an autograd node is a Python class's: torch's end with numbers."""
    return node.endswith("Backward") and "::" not in node and not node.startswith(("Compiled", "Checkpoint"))


# -- casts -------------------------------------------------------------------------------------------------------------


def _of_cast(declaration: Declaration, seen: _Seen) -> Iterator[Deviation]:
    entry, row = seen.entry, seen.row
    if not entry.rounded:
        yield _deviation_at(
            "compiled-cast", seen, f"values rounded to {entry.output}", f"kept in {entry.operands[0]} by the compiler"
        )
    if entry.cause != "script" or not entry.operands or row.phase not in ("forward", "recomputation"):
        return
    before, values, after = entry.operands[0], entry.values[0], entry.output
    if values in SIXTEEN_BIT and after in SIXTEEN_BIT and values != after:
        yield _deviation_at("double-rounding", seen, "one rounding", f"{values}, then {after}")
    elif entry.after_cast and before in SIXTEEN_BIT and after == "fp32" and declaration.inside(row.module) is None:
        yield _deviation_at("round-trip", seen, "fp32", f"fp32 -> {values} -> fp32")


# -- other operations --------------------------------------------------------------------------------------------------


def _of_other(declaration: Declaration, seen: _Seen) -> Iterator[Deviation]:
    entry, row = seen.entry, seen.row
    if row.phase not in ("forward", "recomputation") or not entry.operands:
        return
    narrow = [fmt for fmt in entry.operands if narrower(fmt, "fp32")]
    name = listed_as(entry.base.removesuffix("_"))
    category = declaration.category(name, row.module)
    must_be_wide = category == "high" or (declaration.narrowest == "fp32" and entry.kind not in ("exact", "custom"))
    if entry.kind == "loss" and narrow and entry.where != "emulated":
        must_be_wide = True
    if must_be_wide and narrow and entry.where != "emulated" and not is_left_by_autocast(entry):
        kind = _HIGH_KINDS.get(entry.kind, "operation")
        yield _deviation_at(kind, seen, "fp32", " + ".join(dict.fromkeys(entry.operands)))
    elif category == "low" and entry.operands and not any(fmt in SIXTEEN_BIT for fmt in _factors(entry)):
        yield _deviation_at("operation-wide", seen, _listed(SIXTEEN_BIT), " + ".join(dict.fromkeys(entry.operands)))
    inside = None if "norm" in entry.part_of else declaration.inside(row.module)  # norms compute in FP32
    if inside is not None and entry.mixed and entry.output == "fp32" and entry.kind in ("pointwise", "exact"):
        yield _deviation_at("promotion", seen, inside, " + ".join(dict.fromkeys(entry.operands)) + " -> fp32")
    computes = None if row.module is None else declaration.computes.get(row.module)
    if entry.kind == "normalization" and computes == "fp32" and set(entry.operands) <= SIXTEEN_BIT:
        yield _deviation_at("normalization", seen, "fp32", " + ".join(dict.fromkeys(entry.operands)))


def is_left_by_autocast(entry: Entry) -> bool:
    """Return whether autocast leaves an operation of its FP32 list in 16 bits."""
    # torch's autocast for CPUs has fewer operations on that list. And no autocast touches an operation whose dtype is
    # asked for, as cross_entropy asks for that of its logits.
    if entry.kind == "softmax" and entry.part_of == CROSS_ENTROPY:
        return True
    scripted = entry.scripted or _CASTS_DOWN.search(entry.place.text) is not None  # one without effect is no operation
    return entry.autocast and entry.device == "cpu" and not scripted and entry.kind != "loss"


def _of_collective(declaration: Declaration, seen: _Seen) -> Iterator[Deviation]:
    entry, wanted = seen.entry, declaration.reduction
    if not entry.of_parameters or wanted is None or not entry.operands:
        return
    if narrower(entry.output, wanted):
        reduction = _deviation_at("gradient-reduction", seen, wanted, entry.output)
        yield (
            replace(reduction, advice=_TENSOR_PARALLEL) if entry.operation.startswith("_c10d_functional") else reduction
        )


def _of_loss(declaration: Declaration, recording: Recording) -> Iterator[Deviation]:
    loss = recording.loss
    if loss is None or not narrower(loss.format, "fp32"):
        if declaration.level is not None and declaration.level.scaled and recording.backwards and not recording.scaled:
            yield deviation("loss-scale", None, "a loss scaler", "an unscaled loss")
        return
    made = loss.producer
    unscaled = deviation("loss", None, "fp32", loss.format)
    if made is not None:
        unscaled = replace(
            unscaled, module=module_of(made, recording.names), source_line=made.place.shown, operation=made.operation
        )
    yield replace(unscaled, phases=("forward",))


# -- tensors -----------------------------------------------------------------------------------------------------------


def _of_tensors(declaration: Declaration, recording: Recording, tensors: Sequence[TensorRow]) -> Iterator[Deviation]:
    if declaration.level is None:
        return
    for t in tensors:
        wanted = declaration.weights.get(t.module or "")
        if t.role == "weights" and wanted is not None and part_format(t.format) != wanted:
            yield deviation("weights", t.name, wanted, t.format)
        elif t.role == "buffers" and wanted is not None and narrower(t.format, wanted):
            yield deviation("buffers", t.name, wanted, t.format)
        elif t.role == "optimizer":
            yield from _of_state(declaration, t)
    if recording.optimizers:
        yield from _of_update(declaration, recording, tensors)


def _of_update(declaration: Declaration, recording: Recording, tensors: Sequence[TensorRow]) -> Iterator[Deviation]:
    """Yield 16-bit weights that are not updated as the level says."""
    narrow = [t for t in tensors if t.role == "weights" and t.format in SIXTEEN_BIT]
    updates = {getattr(optimizer, "update", None) for optimizer in recording.optimizers}
    if declaration.update == "masters":
        mastered = {t.name.partition(":")[0] for t in tensors if t.role == "masters"}
        by_hand = _has_outside_masters(tensors)
        yield from (deviation("masters", t.name, "an fp32 master", "none")
                    for t in narrow if not by_hand and t.name not in mastered)  # fmt: skip
    elif declaration.update != "plain" and narrow and declaration.update not in updates:
        yield deviation("update", None, declaration.update, "plain updates of 16-bit weights")


def _of_state(declaration: Declaration, t: TensorRow) -> Iterator[Deviation]:
    level = declaration.level
    assert level is not None
    pure = level.casts and level.update == "plain"
    wanted = declaration.weights.get(t.module or "", level.weights) if pure else "fp32"
    if narrower(t.format, wanted) and not is_code(t.format):
        yield deviation("optimizer-state", t.name, wanted, t.format)


def _has_outside_masters(tensors: Iterable[TensorRow]) -> bool:
    """Return whether an optimizer steps FP32 masters outside the model, made by hand."""
    return any(t.role == "masters" and " of " in t.name and t.format == "fp32" for t in tensors)


def _of_switches(declaration: Declaration, seen: Sequence[_Seen]) -> Iterator[Deviation]:
    """Yield TF32 that the script allows on CUDA, where the step has not run there."""
    if declaration.products != frozenset(("fp32",)) or any(operation.entry.device == "cuda" for operation in seen):
        return
    if Switches.now().cuda_matmul == "tf32" and any(operation.entry.kind in MULTIPLYING for operation in seen):
        yield deviation("tf32", None, "fp32", "tf32, allowed by torch.backends.cuda.matmul on CUDA")


# -- deviations --------------------------------------------------------------------------------------------------------


def _deviation_at(kind: str, seen: _Seen, expected: str, actual: str) -> Deviation:
    row = seen.row
    return replace(
        deviation(kind, row.module, expected, actual), source_line=row.source_line, operation=row.operation,
        phases=(row.phase,), calls=row.calls,
    )  # fmt: skip


def _listed(formats: Iterable[str]) -> str:
    return " or ".join(sorted(formats))


def _merged(found: Iterable[Deviation]) -> list[Deviation]:
    """Return deviations of a kind and place as one: a backward follows its forward."""
    merged: dict[tuple[str, str | None, str | None, str], Deviation] = {}
    listed = list(found)
    forward = {(d.module, d.source_line): d.kind for d in listed if d.kind in _WIDE and "forward" in d.phases}
    for entry in listed:
        if entry.kind in _WIDE and "backward" in entry.phases:  # it has the forward's reason
            kind = forward.get((entry.module, entry.source_line), entry.kind)
            entry = replace(entry, kind=kind, advice=KINDS[kind].advice)  # noqa: PLW2901
        key = (entry.kind, entry.module, entry.source_line, "" if entry.operation else entry.actual)
        known = merged.get(key)
        if known is None:
            merged[key] = entry
        else:
            phases = tuple(dict.fromkeys((*known.phases, *entry.phases)))
            merged[key] = replace(known, phases=phases, calls=known.calls + entry.calls)
    return list(merged.values())
