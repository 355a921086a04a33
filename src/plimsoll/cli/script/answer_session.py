"""Run of a script as far as an answer needs, and that answer.

`plimsoll receipt` and `plimsoll probe` use it.
"""

import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from plimsoll.cli import messages
from plimsoll.cli.script import runner
from plimsoll.errors import PlimsollError


class Recorder(Protocol):
    """Recorder of a script's first steps, which stops the script by an exception."""

    def note_optimizer(self, optimizer: Any) -> None:
        """Note an optimizer that the script has made."""
        ...

    def note_backward(self, tensors: Any) -> bool:
        """Note a backward; return whether no more of them need to be reported."""
        ...

    def end(self) -> None:
        """Remove everything that was put into torch."""
        ...

    def answer(self) -> Any:
        """Return the answer, or raise `PlimsollError` with the reason why there is none."""
        ...


class AnswerSession:
    """The run of one script.

    Args:
        operation: The command, for messages.
        make: Makes the recorder; its argument ends the process, for scripts that go on after they were stopped.
        show: Prints an answer, on the rank of its second argument, and returns the exit code.
    """

    def __init__(
        self,
        operation: str,
        make: Callable[[Callable[[], None]], Recorder],
        show: Callable[[Any, int], int],
    ) -> None:
        self._operation, self._make, self._show = operation, make, show
        self._made: Recorder | None = None
        self._output: int | None = None  # standard output, while the script's goes to standard error
        self._failure: str | None = None
        self._process = os.getpid()
        self._exit = os._exit

    def run(self, script: str, arguments: Sequence[str], *, as_module: bool) -> None:
        """Run the script, report, and end the process with the answer's exit code."""
        os._exit = self._exit_at_once
        runner.hear(self._note_optimizer, self._note_backward)
        self._divert_output()
        try:
            runner.execute(script, arguments, as_module=as_module)
        except SystemExit as end:
            self._failure = None if end.code in (None, 0) else f"the script exited with {end.code!r}"
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001  (the script's own; it is on standard error already)
            self._failure = f"the script failed: {type(error).__name__}"
        code = self._report()
        if threading.active_count() > 1:  # threads of a script that was stopped may wait for it for ever
            self._end_process(code)
        sys.exit(code)

    # -- the script ----------------------------------------------------------------------------------------------------

    def _note_optimizer(self, optimizer: Any) -> None:
        if os.getpid() == self._process:
            self._recorder().note_optimizer(optimizer)

    def _note_backward(self, tensors: Any) -> bool:
        return os.getpid() != self._process or self._recorder().note_backward(tensors)

    def _recorder(self) -> Recorder:
        if self._made is None:
            self._made = self._make(lambda: self._end_process(self._report()))
        return self._made

    def _exit_at_once(self, status: int) -> None:
        """Stand in for `os._exit`, which no handler sees: report first."""
        if os.getpid() != self._process:
            self._exit(status)
        self._failure = f"the script called os._exit({status})"
        self._end_process(self._report())

    # -- the report ----------------------------------------------------------------------------------------------------

    def _report(self) -> int:
        """Print the answer, or why there is none; return the exit code."""
        self._restore_output()
        if self._made is not None:
            self._made.end()
        try:
            answer = self._answer()
        except PlimsollError as error:
            messages.failure(error, f"{self._failure[0].upper()}{self._failure[1:]}." if self._failure else "")
            return 2
        if self._failure is not None:
            messages.error(f"{self._failure}, after the step that is recorded here")
        return self._show(answer, _rank())

    def _answer(self) -> Any:
        if self._made is None:
            raise PlimsollError(
                f"{self._operation}: expected a script with a training step; got one that made no "
                f"torch.optim.Optimizer in this process. Call pl.{self._operation} in it."
            )
        return self._made.answer()

    def _divert_output(self) -> None:
        """Send what the script prints to standard error: standard output is the answer's."""
        try:
            sys.stdout.flush()
            self._output = os.dup(1)
            os.dup2(2, 1)
        except OSError:  # closed
            self._output = None

    def _restore_output(self) -> None:
        if self._output is not None:
            sys.stdout.flush()
            os.dup2(self._output, 1)
            os.close(self._output)
            self._output = None

    def _end_process(self, code: int) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        self._exit(code)


def _rank() -> int:
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return int(dist.get_rank())
    return int(os.environ.get("RANK", "0"))
