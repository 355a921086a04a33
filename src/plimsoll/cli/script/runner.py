"""Run a script as python SCRIPT or python -m MODULE, in this process."""

import builtins
import functools
import importlib.machinery
import io
import os
import pkgutil
import runpy
import stat
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any, Protocol, cast

from plimsoll.cli import messages
from plimsoll.errors import ArgumentError, PlimsollError
from plimsoll.tracing.late_patches import when_imported

_HOME = "torch.optim.optimizer"
_METHODS = ("__init__", "__setstate__")  # made, and unpickled or copied


def listen(on_optimizer: Callable[[Any], None], on_backward: Callable[[Any], bool] | None = None) -> None:
    """Call `on_optimizer` with each optimizer once `torch.optim.Optimizer` is initialized.

    It must not raise. `on_backward` is called with what each backward begins from, until it returns True: it needs no
    more.
    """

    def patch(module: ModuleType) -> None:
        for name in _METHODS:
            setattr(module.Optimizer, name, _reporting(getattr(module.Optimizer, name), on_optimizer))
        if on_backward is not None:
            _patch_backward(sys.modules["torch.autograd"], on_backward)

    when_imported(_HOME, patch)


def _patch_backward(autograd: Any, on_backward: Callable[[Any], bool]) -> None:
    original = autograd.backward

    @functools.wraps(original)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if autograd.backward is backward:
            autograd.backward = original  # so that a watch which begins now sees this backward too
            if not on_backward(tensors) and autograd.backward is original:
                autograd.backward = backward
                return original(tensors, *args, **kwargs)
            return autograd.backward(tensors, *args, **kwargs)
        return original(tensors, *args, **kwargs)

    autograd.backward = backward


def _reporting(original: Callable[..., Any], on_optimizer: Callable[[Any], None]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        on_optimizer(self)
        return result

    return method


class RunAfterCli(BaseException):
    """Leaves the command line, and asks for `script` to be called then."""

    def __init__(self, script: Callable[[], None]) -> None:
        self.script = script


def check(script: str, command: str = "run") -> None:
    """Raise `ArgumentError` in the command's words if there is no such script."""
    try:
        if stat.S_ISREG(Path(script).stat().st_mode):  # what a pipe holds can be read once only
            Path(script).open("rb").close()
    except OSError as error:
        raise ArgumentError(
            f"{command}: expected a Python script; got {script!r}, which cannot be read ({error.strerror}). "
            "Give its path, or -m and the name of a module."
        ) from error


# The script gets a `__main__` of its own, for good: classes pickle by it, worker processes find it by its file, and
# exit handlers still see its variables. It is run when the command line's own work is done and off the stack
# (`RunAfterCli`), so that what leaves it goes on to the interpreter, which ends as it always does: 1, the script's own
# status, or SIGINT. An uncaught exception is shown here, by whatever `sys.excepthook` is then, without the frames of
# Plimsoll.
def execute(script: str, arguments: Sequence[str], *, as_module: bool) -> None:
    """Run the script to its end; raises what it raises, which is on stderr already."""
    main = ModuleType("__main__")
    vars(main).update(__builtins__=builtins, __annotations__={})
    sys.modules["__main__"] = main
    sys.excepthook = sys.__excepthook__  # the command line's own is none of the script's
    sys.argv = [script, *arguments]
    try:
        if as_module:
            _run_module(script)
        else:
            _run_file(script, main)
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001  (raised again below)
        failure = error
    else:
        return
    _show(failure)  # outside of the handler: what a hook raises has no other error behind it
    sys.excepthook = _show_nothing
    raise failure


def _run_module(name: str) -> None:
    sys.argv[0] = "-m"
    _lead_path(str(Path.cwd()))
    _run_as_main(name, True)


def _run_file(script: str, main: ModuleType) -> None:
    path = os.path.join(os.getcwd(), script)  # noqa: PTH109, PTH118  (`./train.py` keeps its dot, as in Python)
    if pkgutil.get_importer(path) is not None:  # a folder or an archive with a __main__.py
        _lead_path(path)
        _run_as_main("__main__", False)
        return
    _lead_path(os.path.dirname(os.path.realpath(path)))  # noqa: PTH120
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    vars(main).update(__file__=path, __cached__=None, __loader__=loader, __spec__=None, __package__=None)
    exec(_code(path), vars(main))  # noqa: S102  (what the command is for)


def _run_as_main(name: str, alter_argv: bool) -> None:
    """Run ``-m``, a folder or an archive as the interpreter itself does."""
    cast("Any", runpy)._run_module_as_main(name, alter_argv)  # noqa: SLF001


def _lead_path(folder: str) -> None:
    """Put the folder where the interpreter has put the one that it started from."""
    if not sys.flags.safe_path:
        sys.path[0] = folder


def _code(path: str) -> CodeType:
    with io.open_code(path) as file:
        content = file.read()
    compiled = pkgutil.read_code(io.BytesIO(content))
    return compile(content, path, "exec", dont_inherit=True) if compiled is None else compiled


# -- how it ends


def _show(error: BaseException) -> None:
    """Show the error as the interpreter does: by the hook, or else both errors."""
    for shown in _chain(error):
        shown.__traceback__ = _without_ours(shown.__traceback__)
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except SystemExit:
        raise
    except BaseException as another:  # noqa: BLE001
        another.__traceback__ = _without_ours(another.__traceback__)
        print("Error in sys.excepthook:", file=sys.stderr)  # noqa: T201
        sys.__excepthook__(type(another), another, another.__traceback__)
        print("\nOriginal exception was:", file=sys.stderr)  # noqa: T201
        sys.__excepthook__(type(error), error, error.__traceback__)


def _show_nothing(*_: object) -> None:
    """The interpreter's own turn to show what has been shown."""


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    todo: list[BaseException | None] = [error]
    while todo:
        error_in_chain = todo.pop()
        if error_in_chain is not None and id(error_in_chain) not in seen:
            seen.add(id(error_in_chain))
            todo += [error_in_chain.__cause__, error_in_chain.__context__]
            yield error_in_chain


def _without_ours(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback without Plimsoll's frames, unless Plimsoll has failed."""
    frames: list[TracebackType] = []
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    failed_here = bool(frames) and _is_ours(frames[-1], "plimsoll.") and not _is_ours(frames[-1], __name__)
    hidden = (__name__,) if failed_here else ("plimsoll.cli.", "plimsoll.watch.")
    users = [frame for frame in frames if not _is_ours(frame, *hidden)]
    following: TracebackType | None = None
    for frame in reversed(users):
        frame.tb_next = following
        following = frame
    return following


def _is_ours(frame: TracebackType, *names: str) -> bool:
    return str(frame.tb_frame.f_globals.get("__name__", "")).startswith(names)


# -- a run of a script as far as an answer needs, and that answer ------------------------------------------------------


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

    `make` makes the recorder from a function that ends the process, for scripts that go on after they were stopped.
    `show` prints an answer, on the rank of its second argument, and returns the exit code.
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
        listen(self._note_optimizer, self._note_backward)
        self._divert_output()
        try:
            execute(script, arguments, as_module=as_module)
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
        except Exception:  # noqa: BLE001  (Python's own exit code would be 1, which is an answer)
            return messages.defect()
        if self._failure is not None:
            messages.error(f"{self._failure}, after the step that is recorded here")
        try:
            return self._show(answer, rank())
        except PlimsollError as error:  # the file cannot be written: the script has removed its folder
            messages.failure(error)
            return 2

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


# -- ranks -------------------------------------------------------------------------------------------------------------


def process_group() -> Any:
    """`torch.distributed` where the script has set up its process group, else None."""
    dist = sys.modules.get("torch.distributed")
    return dist if dist is not None and dist.is_available() and dist.is_initialized() else None


def rank() -> int:
    """Return this process's rank among those of the script."""
    dist = process_group()
    return int(os.environ.get("RANK", "0") if dist is None else dist.get_rank())
