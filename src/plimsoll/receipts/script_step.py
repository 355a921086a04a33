"""One training step of a script: found, recorded, and the script stopped after it.

Recording begins with the script's first optimizer, or with its first backward if it makes none. A step goes from one
step of the first optimizer that steps to its next one, so that all other optimizers have their part in it; one that a
loss scaler skips is no step. The first step makes state and compiles: the receipt is of a later one, if there is any.
"""

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from plimsoll.errors import PlimsollError
from plimsoll.receipts.declared.declaration import declaration_of
from plimsoll.receipts.recording.compiled_code import CompiledCode
from plimsoll.receipts.recording.recorder import Recorder
from plimsoll.receipts.recording.training import TrainingRecorder, models_of
from plimsoll.receipts.result import Receipt
from plimsoll.receipts.take import finished
from plimsoll.tracing.tensors import Names
from plimsoll.watch.hooks import torch_hooks
from plimsoll.watch.names import class_of

_MOST_SKIPPED = 50  # steps that a loss scaler skips, or in which an optimizer of the script has no part
_MOST_STOPS = 200  # of a script that goes on after each


class ScriptStopped(SystemExit):
    """The receipt is complete: ends the script as `sys.exit` would."""


class ScriptStep(torch_hooks.TrainingEvents):
    """Recorder of one step of a script.

    `give_up` is called when a script goes on and on after it was stopped; it must end the process.
    """

    def __init__(self, declared: object, subject: str, give_up: Callable[[], None]) -> None:
        self._declared, self._subject, self._give_up = declared, subject, give_up
        self._recorder = Recorder()
        self._recorder.recording = False
        self._training = TrainingRecorder(self._recorder)
        self._compiled = CompiledCode(self._recorder)
        self._first: Any = None  # the optimizer by which steps are counted
        self._made: list[str] = []  # kinds of optimizers
        self._steps, self._skipped, self._stops = 0, 0, 0
        self._optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._moved: list[Any] = []  # optimizers that have stepped since the last boundary
        self._receipt: Receipt | None = None
        self._error: str | None = None
        self._process, self._open = os.getpid(), False
        self.complete = False

    # -- what the script does ------------------------------------------------------------------------------------------

    def note_optimizer(self, optimizer: object) -> None:
        """The script has made an optimizer: recording begins with the first."""
        if os.getpid() == self._process:
            self._made.append(type(optimizer).__name__)
            self._optimizers.add(optimizer)
            self._begin()

    def _begin(self) -> None:
        if self._open or self.complete:
            return
        if torch._C._len_torch_dispatch_stack():  # pyright: ignore  # noqa: PGH003, SLF001  (a mode of the script's)
            return
        self._open = True
        torch_hooks.subscribe(self)
        self._compiled.__enter__()
        self._recorder.__enter__()  # left in place until the end: the script has no block that it could belong to
        self._recorder.recording = True

    def backward_begins(self, tensors: Any) -> None:
        """Note a backward; it begins the recording where there is no optimizer."""
        self._stop_again()
        self._begin()
        self._training.backward_begins(tensors)

    def note_backward(self, tensors: Any) -> bool:
        """Note the first backward; later ones call torch's own hooks."""
        self.backward_begins(tensors)
        return True

    def backward_ends(self) -> None:
        """Note the gradients."""
        self._training.take_models(models_of([], self._recorder))
        self._training.backward_ends()

    def loss_scaled(self, scaler: Any, loss: Any, scaled: Any) -> None:
        """Note the loss before it is scaled."""
        self._training.loss_scaled(scaler, loss, scaled)

    def optimizer_begins(self, optimizer: Any) -> None:
        """Note an optimizer that steps."""
        self._stop_again()
        self._training.optimizer_begins(optimizer)

    def optimizer_ends(self, optimizer: Any) -> None:
        """Note a step; the second one of the first optimizer ends the script."""
        self._training.optimizer_ends(optimizer)
        if self._recorder.stepping or self.complete:
            return  # within the step of another one
        if self._first is None:
            self._first = optimizer
        self._moved.append(optimizer)
        if optimizer is not self._first:
            return
        if not self._steps or self._all_moved() or self._skip():
            self._step_ends()
        else:
            self._restart()

    def _all_moved(self) -> bool:
        """Return True if every optimizer, or one around it, has stepped since the last boundary."""
        inner = {id(getattr(moved, "optimizer", None)) for moved in self._moved}
        return all(
            id(optimizer) in inner or any(optimizer is moved for moved in self._moved) for optimizer in self._optimizers
        )

    def scaler_update_ends(self, scaler: Any) -> None:  # noqa: ARG002
        """Note a step that the scaler has skipped."""
        if self.complete or self._moved:
            return
        if self._first is None and self._skip():
            self._step_ends(last=True)
        else:
            self._restart()

    def _skip(self) -> bool:
        """Count a skipped step; return whether there were too many."""
        self._skipped += 1
        return self._skipped >= _MOST_SKIPPED

    def _step_ends(self, *, last: bool = False) -> None:
        self._steps += 1
        self._take()
        if last or self._steps > 1 or self._error is not None:
            self.complete = True
            self._recorder.recording = False
            self._stop()
        self._restart()

    def _restart(self) -> None:
        self._recorder.restart()
        self._training.restart()
        self._moved.clear()

    def _take(self) -> None:
        """Make the receipt of the step that has just ended."""
        before, self._recorder.recording = self._recorder.recording, False
        try:
            with torch.no_grad():
                self._receipt = self._made_receipt()
        except PlimsollError as error:
            self._error = str(error)
        finally:
            self._recorder.recording = before

    def _made_receipt(self) -> Receipt:
        models = models_of([], self._recorder)
        names = Names(lambda: None, models[0] if models else None)
        recording = self._training.recording(models, names, self._compiled)
        root: nn.Module = models[0] if models else nn.Module()
        declaration = None if self._declared is None else declaration_of(self._declared, root)
        title = f"{self._subject} ({class_of(models[0]).__name__})" if models else self._subject
        return finished(recording, declaration, title)

    # -- the end -------------------------------------------------------------------------------------------------------

    def _stop(self) -> None:
        raise ScriptStopped(0)

    def _stop_again(self) -> None:
        """Stop a script that caught the end: its later training is not in the receipt."""
        if not self.complete:
            return
        self._stops += 1
        if self._stops > _MOST_STOPS and threading.current_thread() is threading.main_thread():
            self._give_up()
        self._stop()

    def end(self) -> None:
        """Take everything away that was put into torch."""
        if self._open and os.getpid() == self._process:
            self._open, self._recorder.recording = False, False
            torch_hooks.unsubscribe(self)
            self._compiled.__exit__()
            self._recorder.memory.close()

    def answer(self) -> Receipt:
        """Return the receipt of the script's step; PlimsollError, which says why, if no step was complete."""
        if self._receipt is not None and self._error is None:
            return self._receipt
        raise PlimsollError(f"receipt: expected a script with a training step; got {self._why_not()}")

    def _why_not(self) -> str:
        if self._error is not None:
            return f"one that cannot be held against the declaration. {self._error.removeprefix('receipt: ')}"
        if not self._made:
            return "one that made no torch.optim.Optimizer in this process. Call pl.receipt(model, step=...) in it."
        made = ", ".join(dict.fromkeys(self._made))
        if self._training.backwards:
            return f"one whose {made} never stepped. Let the script run until optimizer.step() was called once."
        return f"one that made {made} and ran no backward. Let the script run until a step is done."
