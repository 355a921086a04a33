"""From a recording to a receipt: names, lines, lasting tensors, settings, notes."""

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from plimsoll.precision.weights.base import SixteenBitOptimizer
from plimsoll.receipts.recording.operations import Entry, Switches
from plimsoll.receipts.recording.training import Recording
from plimsoll.receipts.recording.values import dtype_name, size_bytes
from plimsoll.receipts.rows import MemoryUse, Role, Row, TensorRow
from plimsoll.tracing.tensors import Names, parts_of
from plimsoll.watch.names import ROOT, clean

# Names under which optimizers of others keep a wider copy of a weight.
MASTER_KEYS = frozenset(("master", "master_param", "master_params", "master_weight", "master_weights", "fp32_param"))


def rows_of(recording: Recording) -> list[Row]:
    """Return the recording's operations as rows, in the order in which they first ran."""
    return [row_of(entry, recording.names) for entry in recording.entries]


def parts_of_step(recording: Recording) -> tuple[str, ...]:
    """Return the step's parts: "forward", "backward", and stepped optimizers."""
    ran = {entry.phase for entry in recording.entries}
    phases = [phase for phase in ("forward", "backward") if phase in ran]
    return (*phases, *(type(optimizer).__name__ for optimizer in recording.optimizers))


def row_of(entry: Entry, names: Names) -> Row:
    """Return an entry as a row."""
    values = entry.values
    return Row(
        operation=entry.operation, kind=entry.kind, phase=entry.phase, module=module_of(entry, names),
        source_line=entry.place.shown, source_text=entry.place.text,
        operands=values if entry.where == "emulated" else entry.operands, values=values, output=entry.output,
        accumulate=entry.accumulate, partial=entry.partial, cause=entry.cause, where=entry.where,
        rounded=entry.rounded, calls=entry.calls, bytes=entry.bytes, note=_note(entry),
    )  # fmt: skip


def module_of(entry: Entry, names: Names) -> str | None:
    """Return the name of the module that an operation ran in."""
    base = names.module(entry.module)
    if entry.path is None:
        return base
    if base in (None, ROOT):
        return entry.path or base
    return f"{base}.{entry.path}" if entry.path else base


def _note(entry: Entry) -> str:
    if not entry.rounded:
        return f"stays in {entry.operands[0]} within a fused kernel" if entry.operands else ""
    if entry.where == "emulated" and entry.kind in ("product", "attention"):
        return f"computed in {entry.operands[0]}" if entry.operands else ""
    return "weight" if entry.weight else ""


# -- tensors -----------------------------------------------------------------------------------------------------------


def tensors_of(recording: Recording) -> list[TensorRow]:
    """Return parameters, buffers, gradients, the optimizers' state, and masters."""
    rows: list[TensorRow] = []
    weights: dict[int, str] = {}
    for model in recording.models:
        for raw, p in model.named_parameters():
            name = recording.names.of(p) or clean(raw)
            weights[id(p)] = name
            rows.append(_tensor(name, "weights", p))
            if id(p) in recording.gradients:
                fmt, size = recording.gradients[id(p)]
                rows.append(TensorRow(name=name, role="gradients", format=fmt, bytes=size, module=_module(name)))
        for raw, buffer in model.named_buffers():
            if buffer.is_floating_point():
                rows.append(_tensor(clean(raw), "buffers", buffer))
    for optimizer in recording.optimizers:
        rows += _state_of(optimizer, weights)
    return rows


def _state_of(optimizer: Any, weights: Mapping[int, str]) -> Iterator[TensorRow]:
    pairs = {id(pair.master): pair for pair in optimizer.pairs} if isinstance(optimizer, SixteenBitOptimizer) else {}
    for number, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        pair = pairs.get(id(p))
        owner = weights.get(id(p) if pair is None else id(pair.weight))
        name = owner or f"parameter {number} of {type(optimizer).__name__}"
        if pair is not None:
            size = sum(size_bytes(x) for x in pair.store.kept)
            yield TensorRow(name=f"{name}:{optimizer.update}", role="masters", format="fp32", bytes=size,
                            module=_module(name))  # fmt: skip
        elif owner is None:
            yield _tensor(name, "masters", p)
        for key, x in cast("dict[str, Any]", optimizer.state.get(p, {})).items():
            if isinstance(x, Tensor) and x.is_floating_point() and key != "step":
                role: Role = "masters" if key in MASTER_KEYS else "optimizer"
                yield _tensor(f"{name}:{key}", role, x)


def _module(name: str) -> str:
    return name.partition(":")[0].rpartition(".")[0] or ROOT


def _tensor(name: str, role: Role, x: Tensor) -> TensorRow:
    size = sum(map(size_bytes, parts_of(x)))
    return TensorRow(name=name, role=role, format=dtype_name(x.dtype), bytes=size, module=_module(name))


def memory_of(recording: Recording, tensors: Iterable[TensorRow]) -> MemoryUse:
    """Return the bytes of a step."""
    listed = list(tensors)
    by_role = {role: sum(t.bytes for t in listed if t.role == role) for role in ("weights", "buffers", "gradients")}
    state = sum(t.bytes for t in listed if t.role in ("optimizer", "masters"))
    memory = recording.recorder.memory
    return MemoryUse(
        **by_role, optimizer=state, activations=recording.activations, peak=memory.peak,
        moved=sum(entry.bytes for entry in recording.entries),
    )  # fmt: skip


# -- settings ----------------------------------------------------------------------------------------------------------


def settings_of(recording: Recording) -> dict[str, str]:
    """Return torch's switches and versions, by names that a reader can set them by."""
    switches = Switches.now()
    devices = {entry.device for entry in recording.entries}
    settings = {"torch": str(torch.__version__), "devices": ", ".join(sorted(devices))}
    if "cuda" in devices:
        settings |= {
            "torch.backends.cuda.matmul.fp32_precision": switches.cuda_matmul,
            "torch.backends.cudnn.conv.fp32_precision": switches.cuda_convolution,
            "torch.backends.cuda.matmul.allow_fp16_accumulation": str(switches.fp16_accumulation),
            "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction": str(switches.fp16_reduction),
            "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction": str(switches.bf16_reduction),
        }
    if "cpu" in devices:
        settings |= {
            "torch.backends.mkldnn.matmul.fp32_precision": switches.cpu_matmul,
            "torch.backends.mkldnn.conv.fp32_precision": switches.cpu_convolution,
            "cpu": torch.backends.cpu.get_cpu_capability(),
        }
    override = os.environ.get("NVIDIA_TF32_OVERRIDE")
    return settings | ({} if override is None else {"NVIDIA_TF32_OVERRIDE": override})
