"""Notes of a receipt: facts worth knowing that contradict no declaration."""

import sys
from collections import Counter
from collections.abc import Iterator, Sequence

from plimsoll.emulate.casting import CUDA
from plimsoll.emulate.dispatch.thread_frame import categories_of
from plimsoll.receipts.declared.deviations import ATTENTION, CROSS_ENTROPY, is_left_by_autocast
from plimsoll.receipts.recording.operations import MULTIPLYING, Entry, listed_as
from plimsoll.receipts.recording.training import Recording
from plimsoll.receipts.recording.values import narrower
from plimsoll.receipts.rows import Row
from plimsoll.text import counted


def notes_of(recording: Recording, rows: Sequence[Row]) -> tuple[str, ...]:
    """Return the notes of a recording."""
    return tuple(_notes(recording, rows))


def _notes(recording: Recording, rows: Sequence[Row]) -> Iterator[str]:
    entries = recording.entries
    if not recording.backwards:
        yield "No backward ran: nothing of the output requires a gradient, or gradients are off."
    elif not recording.optimizers:
        yield "No optimizer stepped: give a whole step as step=... to have its arithmetic and state in the receipt."
    yield from _of_autocast(entries)
    yield from _of_compiled(recording, entries)
    yield from _of_devices(entries)
    partial = Counter(entry.partial for entry in entries if entry.partial is not None and entry.device == "cuda")
    for fmt in partial:
        yield (
            f"Partial sums of products may be added in {fmt} (torch's default): "
            f"torch.backends.cuda.matmul.allow_{fmt}_reduced_precision_reduction = False forbids it."
        )
    sharded = (  # by fully_shard itself, and not over a tensor-parallel mesh
        entry.output
        for entry in entries
        if entry.of_parameters and entry.place.sharding and not entry.operation.startswith("_c10d_functional")
    )
    for fmt in dict.fromkeys(fmt for fmt in sharded if narrower(fmt, "fp32")):
        yield (
            f"fully_shard adds up gradients across ranks in {fmt}: "
            "MixedPrecisionPolicy(reduce_dtype=torch.float32) adds them up in FP32."
        )
    emulated = sum(entry.calls for entry in entries if entry.where == "emulated" and entry.kind in MULTIPLYING)
    if emulated:
        yield f"{counted(emulated, 'product')} emulated: other formats compute, the rounding is that of the row."
    unknown = sum(row.calls for row in rows if row.kind in MULTIPLYING and row.accumulate is None)
    if unknown:
        yield f"The accumulator of {counted(unknown, 'product')} is unknown on this device."
    custom = dict.fromkeys(row.operation for row in rows if row.kind == "custom")
    if custom:
        yield f"Known by name only: {', '.join(custom)}."


def _of_autocast(entries: Sequence[Entry]) -> Iterator[str]:
    """Yield notes on operations that autocast left in 16 bits, and on repeated casts."""
    high = categories_of(CUDA)
    left, in_cross_entropy = Counter[str](), False
    for entry in entries:
        name = listed_as(entry.base)
        low = any(narrower(fmt, "fp32") for fmt in entry.operands)
        if not low or entry.phase != "forward" or entry.where == "emulated" or high.get(name) != "high":
            continue
        if entry.kind == "softmax" and entry.part_of == CROSS_ENTROPY:
            in_cross_entropy = True
        elif is_left_by_autocast(entry):
            left[name] += entry.calls
    if left:
        yield (
            f"torch's autocast for CPUs leaves {', '.join(sorted(left))} in 16 bits. On CUDA, and everywhere under "
            "plimsoll.prepare, such operations run in FP32."
        )
    if in_cross_entropy:
        yield (
            "cross_entropy took the logarithm of its softmax in 16 bits: it asks for the dtype of its logits, which no "
            "autocast overrules. Give it logits.float()."
        )
    fallen = sum(e.calls for e in entries if e.cause == "autocast" and e.output == "fp32" and e.kind == "cast")
    if fallen:
        yield f"autocast cast {counted(fallen, 'tensor')} up to FP32 for operations on its FP32 list."


def _of_devices(entries: Sequence[Entry]) -> Iterator[str]:
    """Yield notes on operations that ran on a CPU, and on the device "meta"."""
    computing = [e for e in entries if e.kind not in ("exact", "cast", "collective") and e.phase != "optimizer"]
    devices = {entry.device for entry in computing}
    if len(devices) > 1 and "cpu" in devices and "meta" not in devices:
        names = dict.fromkeys(entry.operation for entry in computing if entry.device == "cpu")
        others = ", ".join(sorted(devices - {"cpu"}))
        yield f"Computed on the CPU, while others ran on {others}: {', '.join(names)}."
    if any(entry.device == "meta" and entry.part_of == ATTENTION for entry in computing):
        yield (
            "On meta scaled_dot_product_attention is made of products that keep all scores; a GPU's fused attention "
            "keeps none, and needs less memory than said here."
        )
    if any(entry.device == "meta" and entry.autocast and entry.kind in MULTIPLYING for entry in computing):
        yield (
            "torch's autocast does not reach tensors on meta. Make the model under FakeTensorMode "
            "(torch._subclasses.fake_tensor), or train it with plimsoll.prepare."
        )


def _of_compiled(recording: Recording, entries: Sequence[Entry]) -> Iterator[str]:
    for name, regions in recording.compiled.backends.items():
        yield f"{counted(regions, 'region')} compiled by {name}."
    for reason, breaks in recording.compiled.breaks().items():
        first = reason.strip().split("\n", 1)[0]
        yield f"{counted(breaks, 'graph break')}, where compiled code returns to Python: {first}."
    for failure in dict.fromkeys(recording.compiled.failures):
        yield f"A compiled graph could not be read, and is recorded by name: {failure}."
    if any(entry.where == "compiled" for entry in entries):
        config = sys.modules.get("torch._inductor.config")
        if config is not None and not getattr(config, "emulate_precision_casts", False):
            yield (
                "Fused kernels compute 16-bit operations in FP32 and round once at their end; eager code rounds after "
                "each operation (torch._inductor.config.emulate_precision_casts)."
            )
