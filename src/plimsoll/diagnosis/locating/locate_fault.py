"""`locate`: a step's first operation that made NaN or Inf, or flushed values to zero.

The closure runs once, as it is, inside a dispatch mode that looks at what every operation gives. An operation whose
result is not finite though its inputs are becomes an *origin* (`tracing.nonfinite_trail`); what comes of it inherits
it. In the end the loss, the gradients and what the step leaves behind are looked at: of the origins that reached them,
the first is the fault. An Inf that reached nothing is harmless, and no fault.
"""

import contextlib
import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils import _python_dispatch as dispatch

from plimsoll.diagnosis.locating.fault import Fault
from plimsoll.diagnosis.locating.fault_description import describe_fault, label, source_of
from plimsoll.diagnosis.locating.optimizer_settings import BadSetting, bad_settings
from plimsoll.diagnosis.locating.tracing.end_checks import EndChecks
from plimsoll.diagnosis.locating.tracing.nonfinite_trail import NonfiniteResult, Origin, first_cause
from plimsoll.diagnosis.locating.tracing.operation_check import OperationTracer
from plimsoll.emulate.dispatch import thread_frame
from plimsoll.errors import ArgumentError
from plimsoll.tracing.call_site import look
from plimsoll.tracing.state_snapshot import Before
from plimsoll.tracing.tensors import Names
from plimsoll.watch.hooks import torch_hooks
from plimsoll.watch.names import unwrapped
from plimsoll.watch.session import nothing_recorded
from plimsoll.watch.shadow.replay import eagerly

_C = cast("Any", torch)._C  # noqa: SLF001


def locate(
    closure: Callable[[], Any],
    *,
    model: nn.Module | None = None,
    flush_share: float | None = None,
    restore: bool = True,
) -> Fault | None:
    """Return the first operation that made a NaN or Inf that mattered; None without.

    It is of the forward or the backward. The closure is run once: forward, and backward if it calls it; if it does not
    and returns a loss that requires gradients, `locate` calls it. It may step an optimizer and use a loss scaler. It
    computes what it would compute without `locate`, bit for bit; compiled models run eagerly inside.

    What matters is what reaches the loss, a gradient, or a parameter, buffer or optimizer state that the step writes:
    -Inf masks, and a log(0) that `where` leaves out, are no faults as long as nothing non-finite comes of them. If only
    the gradient of such an operation is spoiled, the forward operation is named. An optimizer whose rate, decay or
    other setting is NaN or Inf is named with it, if a parameter becomes non-finite by it.

    - `model`: whose module and parameter names to use; without it they are found from the modules that run.
    - `flush_share`: also name an operation that gave zero for more than this share of the values that a wider format
      would not have given as zero (0.5: half of them).
    - `restore`: afterwards parameters, buffers, gradients, the optimizers' and scalers' state, every other tensor that
      was there before, and the random generators are as they were. Without a `model`, gradients that the closure itself
      drops before its backward stay dropped.

    A closure that raises: its error is passed on, unless something had become non-finite by then, which is returned
    with the error in it. Raises `ArgumentError` for what cannot be run.

    >>> import torch
    >>> x = torch.tensor([1.0, 0.0, 2.0], requires_grad=True)
    >>> fault = locate(lambda: x.log().sum())
    >>> fault.operation, fault.phase, fault.first_index
    ('aten.log', 'forward', (1,))
    >>> print(fault.sentence)
    log of 0 is -Inf; it reached the loss.
    """
    _check(closure, model, flush_share)
    _check_surroundings()
    search = _Search(None if model is None else unwrapped(model), flush_share, restore=restore)
    return search.run(closure)


class _Search(torch_hooks.TrainingEvents):
    """One run of a closure, a listener to its backwards, optimizers and scalers."""

    def __init__(self, model: nn.Module | None, flush_share: float | None, *, restore: bool) -> None:
        self._model = model
        self._before = Before(model) if restore else None
        self._witness = OperationTracer(flush_share, None if self._before is None else self._before.about_to_write)
        self._ends = EndChecks(self._witness.trail, [] if model is None else list(model.parameters()))
        self._optimizers: list[Any] = []
        self._scale: float | None = None
        self._settings: list[BadSetting] = []  # of the optimizers that step
        self._spoiled: tuple[BadSetting, Any] | None = None

    def run(self, closure: Callable[[], Any]) -> Fault | None:
        """Runs the closure, and says what is found."""
        error: Exception | None = None
        names = Names(closure, self._model)
        try:
            # Compiled code calls no operation that could be checked.
            with nothing_recorded(), torch_hooks.exclusive(self), eagerly(), self._witness:
                self._run(closure)
        except Exception as raised:  # noqa: BLE001  (passed on below, or named in the fault)
            error = raised
        finally:
            with torch.no_grad():
                self._last_looks(names)
                fault = None if error is not None and not self._witness.trail.origins else self._found(names, error)
            if self._before is not None:
                self._before.put_back()
        if error is not None and fault is None:
            raise error
        return fault

    def _run(self, closure: Callable[[], Any]) -> None:
        result = closure()
        self._ends.loss(result)
        if not self._witness.backwards and _is_loss(result):
            result.backward()

    def _last_looks(self, names: Names) -> None:
        names.learn(self._witness.roots.values(), self._optimizers)
        names.learn_gradients(self._ends.leaves)
        self._ends.gradients()
        self._ends.left(names, self._witness.trail.written)

    def _found(self, names: Names, error: Exception | None) -> Fault | None:
        origin, reached = self._first(error is not None)
        flushed = self._witness.flushed
        if flushed is not None and (origin is None or flushed.index < origin.index):
            origin, reached = flushed, None
        if self._spoiled is not None:
            setting, p = self._spoiled
            if origin is None or (origin.what != "held" and origin.index > setting.index):
                return setting.fault(p, names, self._scale)
        if origin is None:
            return self._unseen(names)
        spoiled = None
        if origin.phase == "backward" and origin.forward is not None and origin.forward.origin is not None:
            origin, spoiled = origin.forward.origin, origin  # harmless itself, but not to its gradient
        return describe_fault(origin, reached, names, scale=self._scale, error=error, spoiled=spoiled)

    def _first(self, raised: bool) -> tuple[Origin | None, NonfiniteResult | None]:
        """The origin that is to blame, and what it reached."""
        reached = self._ends.reached
        origin = first_cause({origin for end in reached for origin in end.origins})
        if origin is None and raised:
            origin = first_cause(o for o in self._witness.trail.origins if not o.deliberate)
        if origin is None:
            return None, None
        first_end = min((end for end in reached if origin in end.origins), key=lambda end: end.rank, default=None)
        return origin, first_end

    def _unseen(self, names: Names) -> Fault | None:
        """Something is not finite, and no operation that was seen made it so."""
        end = min(self._ends.reached, key=lambda end: end.rank, default=None)
        if end is None:
            return None
        what = label(end, names)
        return Fault(
            kind="nan" if bool(torch.isnan(end.tensor.float()).any()) else "inf",
            operation="unknown", phase="forward", reached=what, scale=self._scale,
            sentence=f"{what} is not finite, by an operation that torch's dispatcher does not show here: code that "
            "writes memory itself, a captured CUDA graph, or another rank.",
        )  # fmt: skip

    # -- what training does --------------------------------------------------------------------------------------------

    def backward_begins(self, tensors: Any) -> None:
        with _no_modes():
            leaves = self._ends.backward(tensors)
            if self._before is not None:
                self._before.gradients_of(leaves)

    def backward_ends(self) -> None:
        with _no_modes(), torch.no_grad():
            self._witness.backwards += 1
            self._ends.gradients()

    def optimizer_begins(self, optimizer: Any) -> None:
        self._optimizers.append(optimizer)
        if self._before is not None:
            self._before.optimizer(optimizer)
        with _no_modes(), torch.no_grad():
            self._settings = bad_settings(optimizer, self._witness.operations, source_of(look()))

    def loss_scaled(self, scaler: Any, loss: Any, scaled: Any) -> None:  # noqa: ARG002
        with _no_modes(), torch.no_grad():
            if hasattr(scaler, "get_scale"):
                self._scale = float(scaler.get_scale())
            if self._before is not None:
                self._before.scaler(scaler)

    def optimizer_ends(self, optimizer: Any) -> None:
        with _no_modes(), torch.no_grad():
            for setting in self._settings if self._spoiled is None else ():
                p = setting.spoiled() if setting.optimizer is optimizer else None
                if p is not None and self._spoiled is None:
                    self._spoiled = setting, p


def _check_surroundings() -> None:
    if thread_frame.current() is not None:
        raise ArgumentError(
            "locate: expected `with plimsoll.emulate(...)` inside the closure; got a call inside of it, where torch's "
            "own operations cannot be observed. Open the context inside the closure."
        )
    if _C._current_graph_task_id() != -1 or _C._len_torch_dispatch_stack():  # noqa: SLF001
        raise ArgumentError(
            "locate: expected a call between training steps; got one inside a backward or another TorchDispatchMode "
            "(locate itself, a FLOP counter). Call it outside."
        )


def _no_modes() -> contextlib.AbstractContextManager[Any]:
    """Inside, no dispatch mode sees what we do ourselves."""
    return cast("Any", dispatch)._disable_current_modes()  # noqa: SLF001


def _is_loss(result: Any) -> bool:
    return isinstance(result, Tensor) and result.numel() == 1 and result.requires_grad


def _check(closure: object, model: object, flush_share: object) -> None:
    if not callable(closure):
        raise ArgumentError(
            f"locate: expected a closure that runs forward; got {type(closure).__name__}. Write "
            "locate(lambda: loss_of(model(x), y))."
        )
    if model is not None and not isinstance(model, nn.Module):
        raise ArgumentError(
            f"locate: expected model to be a torch.nn.Module; got {type(model).__name__}. Leave it out, or give the "
            "module that the closure calls."
        )
    if flush_share is None:
        return
    if isinstance(flush_share, bool) or not isinstance(flush_share, int | float) or not 0 <= flush_share < 1:
        raise ArgumentError(
            f"locate: expected flush_share to be None or a fraction from 0 to below 1; got flush_share={flush_share!r}."
            " Give 0.5 for half of the values."
        )
    if math.isnan(flush_share):
        raise ArgumentError("locate: expected flush_share to be a fraction; got nan. Give 0.5 for half of the values.")
