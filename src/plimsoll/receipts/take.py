"""`receipt`: one training step, recorded by operation, against its declaration."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from plimsoll.emulate.dispatch import thread_frame
from plimsoll.errors import ArgumentError
from plimsoll.receipts import assembly
from plimsoll.receipts.declared.declaration import Declaration, declaration_of
from plimsoll.receipts.declared.deviations import deviations_of
from plimsoll.receipts.notes import notes_of
from plimsoll.receipts.recording.compiled_code import CompiledCode
from plimsoll.receipts.recording.recorder import Recorder
from plimsoll.receipts.recording.training import Recording, TrainingRecorder
from plimsoll.receipts.result import Receipt
from plimsoll.tracing.state_snapshot import Before
from plimsoll.tracing.tensors import Names, tensors_in
from plimsoll.watch.hooks import torch_hooks
from plimsoll.watch.names import class_of, unwrapped
from plimsoll.watch.session import nothing_recorded

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
