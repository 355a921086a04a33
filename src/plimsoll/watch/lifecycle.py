"""Start and end of a watch: the check of the run's folder, and the closing.

A run is one training. If another training were appended to it, its first steps would look like a spike, and its tensors
would be listed among those of another model. So a run is continued if that was asked for, if this process has watched
the same model into the folder before, or if model and optimizer fit: tensors of the same names and shapes, and an
optimizer with about as many steps as the run. Otherwise `watch` refuses. In a notebook, where cells run again, the
earlier run is kept under a numbered name.
"""

import atexit
import contextlib
import functools
import hashlib
import os
import shlex
import sys
import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn

from plimsoll import display
from plimsoll.errors import ArgumentError, RunError
from plimsoll.runs.storage import location, manifest as _manifest, parts as _parts
from plimsoll.runs.storage.location import Folder, folder_to_write
from plimsoll.runs.writing import signal_deferral
from plimsoll.text import printable
from plimsoll.watch.hooks import torch_hooks
from plimsoll.watch.names import clean, unwrapped
from plimsoll.watch.session import WatchSession
from plimsoll.watch.steps.step_boundary import Steps

_AHEAD = 1000  # steps that a killed run may have lost, at least; or as many as it has

_open: "dict[tuple[Path, int], weakref.finalize[Any, Any]]" = {}  # what closes the watch on a folder, by rank
_watched: "weakref.WeakKeyDictionary[nn.Module, set[Path]]" = weakref.WeakKeyDictionary()


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierRun:
    """Run of one rank that is in the folder. `why`: reason not to continue it, or ""."""

    path: Path
    steps: int  # the number after its last step
    start: int | None  # the step to continue from; None for the one after its last
    why: str

    @property
    def fits(self) -> bool:
        """True if the same training continues."""
        return not self.why


def fingerprint(root: nn.Module) -> str:
    """Return a digest of the names and shapes of a model's parameters."""
    shapes = sorted((clean(name), tuple(p.shape)) for name, p in root.named_parameters())
    return hashlib.blake2s(repr(shapes).encode(), digest_size=12).hexdigest()


def earlier_run(folder: Path, rank: int, model: nn.Module, optimizers: Iterable[Any]) -> EarlierRun | None:
    """Return the run of this rank in the folder; None without a run that has a step."""
    path, root = folder.absolute(), unwrapped(model)
    parts = _parts.listed(Folder(path), rank)[0]
    last = max((part.max_step for part in parts if part.kind != "events"), default=None)
    if last is None:
        return None
    steps = last + 1
    if path in _watched.get(root, ()):
        return EarlierRun(path=path, steps=steps, start=None, why="")
    try:
        manifest = _manifest.read(path / _manifest.file_name(rank))
    except (OSError, ValueError):  # a damaged manifest costs the comparison of models
        manifest = dict[str, Any]()
    kind = f"{type(root).__module__}.{type(root).__qualname__}"
    known = manifest.get("fingerprint")
    if known is not None and known != fingerprint(root):
        other = manifest.get("model")
        named = f"of another model, {other}" if other != kind else "of a model with other parameters"
        return EarlierRun(path=path, steps=steps, start=None, why=named)
    made = _steps_made(optimizers)
    if not made:
        return EarlierRun(path=path, steps=steps, start=None, why="while this optimizer has not stepped yet")
    if made > steps + max(_AHEAD, steps):
        why = f"while this optimizer has made {made:,}"
        return EarlierRun(path=path, steps=steps, start=None, why=why)
    return EarlierRun(path=path, steps=steps, start=made, why="")


def is_taken(folder: Path, found: EarlierRun | None, rank: int) -> bool:
    """Return True if a script's folder holds runs of models of another training.

    Those are `found` or others.
    """
    if found is not None:
        return not found.fits
    if any(part.kind != "events" for part in _parts.listed(Folder(folder), rank)[0]):
        return True
    return rank == 0 and bool(location.names_of_runs(Folder(folder.absolute())))  # the first rank writes the list


def begins(model: nn.Module, run: Path, rank: int, end: "weakref.finalize[Any, Any]") -> None:
    """Register a watch of the model into the folder; `end` closes the watch."""
    path = run.absolute()
    _register_end()
    _watched.setdefault(unwrapped(model), set()).add(path)
    _open[path, rank] = end


@functools.cache
def _register_end() -> None:
    """Close all watches when the process ends."""
    # After the first finalizer was created: atexit runs what was registered last first.
    atexit.register(_close_all)


def _close_all() -> None:
    """Close all watches before a signal takes effect, and then report on their runs."""
    closings: list[Any] = [watched[1] for end in _open.values() if (watched := end.peek()) is not None]
    # Finalizers by themselves would stop at a KeyboardInterrupt.
    with signal_deferral.deferred():
        for end in list(_open.values()):
            finish(end)
    for closing in closings:
        closing.report()


def close_earlier(model: nn.Module, run: Any, rank: int) -> None:
    """Close this process's watch on the folder if it is of the same model.

    In a notebook it is closed for any model. Raises `ArgumentError` where a script watches another model into it.
    """
    path = folder_to_write("watch", run).absolute()
    end = _open.get((path, rank))
    watched = None if end is None else end.peek()
    if end is None or watched is None:
        return
    if watched[0] is unwrapped(model) or _in_notebook():
        finish(end)
        return
    raise ArgumentError(
        f"watch: expected a folder that no other watch writes to; got run={path}, into which this process watches a "
        f"{type(watched[0]).__name__} already. Close that watch first, w.close(), or give this model a folder of its "
        "own."
    )


def start_of(
    run: Any, rank: int, model: nn.Module, optimizers: Iterable[Any], resume: bool | None, start_step: int | None
) -> int | None:
    """Return the step to start from; None for the one after the run's last.

    Makes way, or refuses, where a run is in the way. Raises `ArgumentError` where another training's run is in the
    folder.
    """
    if resume is not None and not isinstance(resume, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ArgumentError(f"watch: expected resume to be True, False or None; got resume={resume!r}. Leave it out.")
    if resume is False and start_step is not None:
        raise ArgumentError(
            f"watch: expected no start_step with resume=False, which starts a run; got start_step={start_step}. "
            "Leave out one of the two."
        )
    if start_step is not None:
        return start_step
    earlier = earlier_run(folder_to_write("watch", run), rank, model, optimizers)
    if earlier is None:
        return None
    restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"  # by its launcher, after a failure
    if resume or (resume is None and (earlier.fits or restarted)):
        return earlier.start
    if resume is None and _in_notebook():
        _set_aside(earlier)
        return None
    raise _refused(earlier)


def _refused(found: EarlierRun) -> ArgumentError:
    why = f", {found.why}" if found.why else ""
    return ArgumentError(
        f"watch: expected a folder without a run, or the run that this training continues; got run={found.path}, which "
        f"holds a run of {found.steps:,} steps{why}. Give this training a folder of its own, or continue that run with "
        "resume=True (or start_step=, the step of the checkpoint)."
    )


def _steps_made(optimizers: Iterable[Any]) -> int:
    """Return the number of steps that the optimizers have counted; 0 if none counts."""
    counted = 0
    for optimizer in optimizers:
        for state in cast("dict[Any, Any]", optimizer.state).values():
            step = cast("dict[str, Any]", state).get("step") if isinstance(state, dict) else None
            if (isinstance(step, Tensor) and step.numel() == 1) or isinstance(step, int | float):
                counted = max(counted, int(step))
    return counted


def _in_notebook() -> bool:
    """Return True if IPython runs this code, in a notebook or in its terminal."""
    shell = sys.modules.get("IPython")
    return shell is not None and shell.get_ipython() is not None


def _set_aside(found: EarlierRun) -> None:
    """Rename an earlier run's folder, to the first free of first-1, first-2, ..."""
    number = 1
    while (aside := found.path.with_name(f"{found.path.name}-{number}")).exists():
        number += 1
    try:
        found.path.rename(aside)
    except OSError as error:
        raise RunError(
            f"watch: expected to keep the earlier run in {found.path} as {aside.name}; that fails: {error}. Give this "
            "training a folder of its own."
        ) from error
    said = f"plimsoll: {found.path} held an earlier training, which is kept as {aside.name}"
    print(printable(said, lines=False))  # noqa: T201


def verdicts(place: Path) -> list[dict[str, str | None]]:
    """Return the verdicts on a folder's runs: one, or one for each of its models.

    Args:
        place: The folder of a run, or of a script that trains several models.

    Returns:
        For each run its folder, state and verdict. The last two are None where judging would take too long or fails.
    """
    answers: list[dict[str, str | None]] = []
    for name in location.names_of_runs(Folder(place)) or (location.ITSELF,):
        folder = place if name == location.ITSELF else place / name
        try:
            # The packages that judge lie above this one.
            judged = display.function("verdict")(folder)
        except Exception:  # noqa: BLE001  (a training that has ended well must not fail by its last line)
            judged = None
        state, verdict = judged or (None, None)
        answers.append({"run": _from_here(folder), "state": state, "verdict": verdict})
    return answers


def verdict_lines(place: Path) -> list[str]:
    """Return a training's last lines: its verdicts, and the command for details."""
    answers, label = verdicts(place), _from_here(place)
    if all(answer["state"] == "empty" for answer in answers):
        return [f"nothing could be written into {label}: the warnings above have the reason"]
    several = len(answers) > 1
    lines = [f"{a['run']}: {a['verdict']}" if several else str(a["verdict"]) for a in answers if a["verdict"]]
    # A run of several ranks is not judged while others may still be writing.
    what = "several ranks: ask" if any(_has_several_ranks(Path(str(a["run"]))) for a in answers) else "for details:"
    return [*lines, f"recorded into {label}; {what} plimsoll check {shlex.quote(label)}"]


def _has_several_ranks(folder: Path) -> bool:
    try:
        return int(_manifest.read(folder / _manifest.file_name(0)).get("world_size", 1)) > 1
    except (OSError, ValueError, TypeError):  # a damaged manifest, of which reading the run says more
        return False


def _from_here(path: Path) -> str:
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


# The end of a watch first removes all hooks, then writes what is left. It may be interrupted anywhere, and requested
# twice, by two threads, or by a function that it calls itself. Each part can be repeated and is dropped only when it is
# done, so that the next call continues where an interrupted one stopped.
class Closing:
    """End of one watch.

    Attributes:
        handles: Handles of the hooks on the root module.

    Args:
        quiet: Whether `report` prints nothing.
    """

    def __init__(self, session: WatchSession, steps: Steps, *, quiet: bool) -> None:
        self._session, self._steps = session, steps
        self._first_step, self._reported = session.step, quiet
        self.handles: list[Any] = []
        self._lock = threading.RLock()
        self._busy = self._done = False

    def __call__(self) -> None:
        """End the watch, or wait for the thread that does."""
        if self._session.left:
            return
        with signal_deferral.deferred(), self._lock:
            if self._busy or self._done:  # busy: something that is called at the end closes the watch
                return
            try:
                self._busy = True
                self._end()
                self._done = True
            finally:
                self._busy = False

    def report(self) -> None:
        """Print the verdict and the next command to stderr, once, on the first rank."""
        session = self._session
        if (
            self._reported
            or not self._done
            or session.left
            or session.ranks.rank != 0
            or session.step == self._first_step
        ):
            return
        self._reported = True
        with contextlib.suppress(OSError, ValueError, AttributeError):  # stderr is closed, or there is none
            for line in verdict_lines(Path(session.writer.path)):
                print(printable(f"plimsoll: {line}", lines=False), file=sys.stderr)  # noqa: T201

    def _end(self) -> None:
        session, steps = self._session, self._steps
        while session.at_close:
            call = session.at_close[-1]
            try:
                call()
            except Exception as error:  # noqa: BLE001  (P2: a guard's mistake must not keep the hooks in)
                session.failed("close", error)
            if call in session.at_close:  # it may have taken itself back
                session.at_close.remove(call)
        for handle in self.handles:
            handle.remove()
        if steps.taps is not None:
            steps.taps.detach()
        for listener in (steps, steps.wiring, steps.origin):
            if listener is not None:
                torch_hooks.unsubscribe(listener)
        if session.open:
            steps.settle_if_ended(closing=True)
            steps.recorder.send_facts()
        if session.shadow is not None:  # it has counted until here
            session.shadow.detach()
        session.shut()
        session.writer.close()


def finish(end: "weakref.finalize[Any, Any]") -> None:
    """Call a finalizer's function, then detach it; an interruption keeps it callable."""
    watched = end.peek()
    if watched is not None:
        _, call, arguments, named = watched
        call(*arguments, **named)
        end.detach()
