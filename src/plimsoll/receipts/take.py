"""`receipt`: one training step, recorded by operation, against its declaration."""

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from plimsoll.checks import initialized
from plimsoll.emulate.casting import CUDA
from plimsoll.emulate.dispatch import thread_frame
from plimsoll.emulate.dispatch.thread_frame import categories_of
from plimsoll.errors import ArgumentError
from plimsoll.receipts import assembly
from plimsoll.receipts.declared.declaration import Declaration, declaration_of
from plimsoll.receipts.declared.deviations import ATTENTION, CROSS_ENTROPY, deviations_of, is_left_by_autocast
from plimsoll.receipts.recording.compiled_code import CompiledCode
from plimsoll.receipts.recording.operations import MULTIPLYING, Entry, listed_as
from plimsoll.receipts.recording.recorder import Recorder
from plimsoll.receipts.recording.training import Recording, TrainingRecorder
from plimsoll.receipts.recording.values import narrower
from plimsoll.receipts.result import Receipt
from plimsoll.receipts.rows import Row
from plimsoll.text import counted
from plimsoll.tracing.state_snapshot import Before
from plimsoll.tracing.tensors import Names, tensors_in
from plimsoll.watch.hooks import torch_hooks
from plimsoll.watch.names import class_of, unwrapped
from plimsoll.watch.session import nothing_recorded

# -- notes of a receipt: facts worth knowing that contradict no declaration --------------------------------------------


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


# -- `receipt` ---------------------------------------------------------------------------------------------------------

_C = cast("Any", torch)._C  # noqa: SLF001


def receipt(model: nn.Module, *inputs: Any, declared: object = None, step: Callable[[], Any] | None = None) -> Receipt:
    """Return what a model's training step runs in: operations, formats, causes.

    Without `step`, the model is called with the inputs, and the backward starts from its loss: a scalar output, or its
    output's ``loss``; otherwise from all outputs, with gradients of 1. With `step`, the closure is the step: forward,
    and backward and the optimizer if it calls them. If it runs no backward and returns a loss, the receipt does.

    The step computes what it would compute without the receipt, bit for bit on a CPU. Afterwards all is as it was:
    parameters, buffers, gradients, the optimizers' and scalers' state, random generators. Compiled code is compiled
    again, once for the receipt and once at the next call after it. Models on "meta" are recorded without their values.

    Args:
        model: The model. What it does in `torch.compile`, DistributedDataParallel or `fully_shard` is recorded too.
        inputs: Arguments of the model's call.
        declared: What the step is held against: a level's name, a `Level`, a `Policy`, a `Plan` or its file. Default:
            None, nothing.
        step: Closure that runs one training step. Default: None, a call of the model with the inputs.

    Raises:
        ArgumentError: Arguments contradict each other, or the declaration does not fit the model.

    >>> import torch, plimsoll as pl
    >>> model = torch.nn.Linear(4, 2)
    >>> with torch.autocast("cpu", torch.bfloat16):
    ...     r = pl.receipt(model, torch.ones(3, 4), declared="amp-bf16")
    >>> product = next(row for row in r.rows if row.kind == "product")
    >>> product.operation, product.operands, product.output, product.accumulate, r.deviations
    ('aten.addmm', ('bf16', 'bf16'), 'bf16', 'fp32', ())
    """
    root = _check(model, inputs, step)
    declaration = None if declared is None else declaration_of(declared, model)
    before = Before(root)
    recorder = Recorder(before)
    training = TrainingRecorder(recorder, before)
    compiled = CompiledCode(recorder)
    closure = step if step is not None else _forward(model, inputs)
    names = Names(step or (lambda: None), root)
    training.begin([root])
    try:
        with nothing_recorded(), torch_hooks.exclusive(training), compiled, recorder:
            _run(closure, training)
        with torch.no_grad():
            recording = training.recording([root], names, compiled)
            return finished(recording, declaration, class_of(model).__name__)
    finally:
        recorder.memory.close()
        before.put_back()


def finished(recording: Recording, declaration: Declaration | None, subject: str) -> Receipt:
    """Return the receipt of a recording."""
    rows, tensors = assembly.rows_of(recording), assembly.tensors_of(recording)
    entries = recording.entries
    return Receipt(
        subject=subject,
        did=assembly.parts_of_step(recording),
        declared=None if declaration is None else declaration.name,
        rows=tuple(rows),
        deviations=() if declaration is None else deviations_of(declaration, recording, rows, tensors),
        tensors=tuple(tensors),
        memory=assembly.memory_of(recording, tensors),
        settings=assembly.settings_of(recording),
        notes=notes_of(recording, rows),
        parameters=sum(p.numel() for model in recording.models for p in model.parameters()),
        cache_hits=sum(entry.cache_hits for entry in entries),
        cache_misses=sum(entry.calls for entry in entries if entry.weight),
    )


def _run(closure: Callable[[], Any], training: TrainingRecorder) -> None:
    result = closure()
    if training.backwards or not torch.is_grad_enabled():
        return
    starts = [x for x in _losses(result) if x.requires_grad]
    if starts:
        torch.autograd.backward(starts, [torch.ones_like(x) for x in starts])


def _forward(model: nn.Module, inputs: tuple[Any, ...]) -> Callable[[], Any]:
    return lambda: model(*inputs)


def _losses(result: Any) -> Iterator[Tensor]:
    """Yield the tensors that the backward starts from: the loss, or all outputs."""
    loss = (
        cast("Mapping[str, Any]", result).get("loss") if isinstance(result, Mapping) else getattr(result, "loss", None)
    )
    if isinstance(loss, Tensor):
        yield loss
    else:
        yield from tensors_in(result)


def _check(model: object, inputs: tuple[Any, ...], step: object) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise ArgumentError(
            f"receipt: expected model to be a torch.nn.Module; got model={type(model).__name__}. Give the model first."
        )
    initialized("receipt", model)
    if step is not None and not callable(step):
        raise ArgumentError(
            f"receipt: expected step to be a closure that runs one step; got step={type(step).__name__}. Write "
            "step=lambda: loss_of(model(x), y)."
        )
    if step is not None and inputs:
        raise ArgumentError(
            f"receipt: expected inputs or step; got step and {len(inputs)} inputs. Call the model inside the step."
        )
    if step is None and not inputs:
        raise ArgumentError(
            "receipt: expected a batch or a step; got neither. Write receipt(model, x), or step=lambda: ..."
        )
    if thread_frame.current() is not None:
        raise ArgumentError(
            "receipt: expected `with plimsoll.emulate(...)` or `loop.forward()` inside of step; got a call inside of "
            "it, where torch's own operations cannot be observed. Open the context inside the closure."
        )
    if _C._current_graph_task_id() != -1:  # noqa: SLF001
        raise ArgumentError(
            "receipt: expected a call between training steps; got one inside a backward. Call it outside."
        )
    return unwrapped(model)
