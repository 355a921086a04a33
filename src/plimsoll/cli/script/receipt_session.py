"""`plimsoll receipt SCRIPT`: the script from its start to the end of its training step, and what is reported then."""

import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from plimsoll.cli.script import runner
from plimsoll.errors import PlimsollError

if TYPE_CHECKING:
    from plimsoll.receipts import Receipt


class ReceiptSession:
    """The run of one script.

    Args:
        declared: What its step is held against.
        subject: Its name.
        show: Returns the exit code of a receipt, and prints it if its second argument is true.
        say: Prints a line to standard error.
    """

    def __init__(
        self, declared: str | None, subject: str, show: "Callable[[Receipt, bool], int]", say: Callable[[str], None]
    ) -> None:
        self._declared, self._subject, self._show, self._say = declared, subject, show, say
        self._step: Any = None
        self._output: int | None = None  # standard output, while the script's goes to standard error
        self._failure: str | None = None
        self._process = os.getpid()
        self._exit = os._exit

    def run(self, script: str, arguments: Sequence[str], *, as_module: bool) -> None:
        """Run the script, report, and end the process with the receipt's exit code."""
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
        """Return whether no more backwards are needed here: the recorder hears of them itself."""
        if os.getpid() == self._process:
            self._recorder().backward_begins(tensors)
        return True

    def _recorder(self) -> Any:
        if self._step is None:
            from plimsoll.receipts.script_step import ScriptStep

            self._step = ScriptStep(self._declared, self._subject, lambda: self._end_process(self._report()))
        return self._step

    def _exit_at_once(self, status: int) -> None:
        """Stand in for `os._exit`, which no handler sees: report first."""
        if os.getpid() != self._process:
            self._exit(status)
        self._failure = f"the script called os._exit({status})"
        self._end_process(self._report())

    # -- the report ----------------------------------------------------------------------------------------------------

    def _report(self) -> int:
        """Print the receipt, or why there is none; return the exit code."""
        self._restore_output()
        if self._step is not None:
            self._step.end()
        try:
            receipt = self._receipt()
        except PlimsollError as error:
            why = f" {self._failure[0].upper()}{self._failure[1:]}." if self._failure else ""
            self._say(" ".join(f"{error}{why}".split()))
            return 2
        rank = _rank()
        if rank and receipt.deviations:
            self._say(f"rank {rank}: {receipt.verdict}")
        elif self._failure is not None:
            self._say(f"{self._failure}, after the step that is recorded here")
        return self._show(receipt, rank == 0)

    def _receipt(self) -> "Receipt":
        if self._step is None:
            raise PlimsollError(
                "receipt: expected a script with a training step; got one that made no torch.optim.Optimizer in this "
                "process. Call pl.receipt(model, step=...) in it."
            )
        return self._step.receipt()

    def _divert_output(self) -> None:
        """Send what the script prints to standard error: standard output is the receipt's."""
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
