"""``plimsoll run``: watches a training script that knows nothing of Plimsoll."""

import atexit
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from plimsoll.cli import messages, paths
from plimsoll.cli.options import AsModule, Json, Quiet, ScriptArguments
from plimsoll.cli.script import kernels_ahead, runner
from plimsoll.errors import ArgumentError
from plimsoll.tensor_collections import NAMES as COLLECTIONS
from plimsoll.text import printable

if TYPE_CHECKING:
    from plimsoll.watch.model_finder import Found


# Names that `plimsoll.watch` takes. Importing them from there would import torch, so a test compares the two.
FACTS = ("loss", "scale", "nonfinite")
BLOCKS = (16, 32)
_ALL = ",".join(COLLECTIONS)
_MOST_DIGITS = 18  # of an interval: steps are 64-bit integers
# The levels that a script can be trained at as it is, with their aliases; likewise.
PRECISIONS = ("fp32", "tf32", "amp-fp16", "amp-bf16", "fp8-unit", "fp8-tensor", "o0", "o1")


def run(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="A Python script; with -m, the name of a module.")],
    arguments: ScriptArguments = None,
    as_module: AsModule = False,
    output: Annotated[
        str | None,
        typer.Option("--output", "-o", metavar="DIR", help="The run's folder. Default: runs/SCRIPT-DATE-TIME."),
    ] = None,
    every: Annotated[int, typer.Option(metavar="N", min=1, help="Record every N optimizer steps.")] = 10,
    collect: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            show_default=False,
            help=f"Tensors to record: {', '.join(COLLECTIONS)}. NAME=N sets an interval in steps. Default: all.",
        ),
    ] = _ALL,
    include: Annotated[
        list[str] | None, typer.Option(metavar="GLOB", help="Only modules and parameters matching this glob.")
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option(metavar="GLOB", help="No modules and parameters matching this glob.")
    ] = None,
    warmup: Annotated[int, typer.Option(metavar="N", min=0, help="Record every one of the first N steps.")] = 0,
    block: Annotated[
        int | None, typer.Option(metavar="SIZE", help="Also measure in blocks of 32 (MX formats) or 16 (NVFP4) values.")
    ] = None,
    recorder: Annotated[
        str, typer.Option(metavar="NAMES", help="Values that the flight recorder keeps for every step.")
    ] = ",".join(FACTS),
    max_tensors: Annotated[
        int, typer.Option(metavar="N", min=1, help="Maximum number of tensors per sample.")
    ] = 100_000,
    max_bytes: Annotated[
        int, typer.Option(metavar="BYTES", min=1, show_default="1 GiB", help="Maximum memory per sample.")
    ] = 1 << 30,
    queue_bytes: Annotated[
        int,
        typer.Option(
            metavar="BYTES", min=1, show_default="64 MiB", help="Maximum memory of samples waiting to be written."
        ),
    ] = 64 << 20,
    precision: Annotated[
        str | None, typer.Option(metavar="LEVEL", help=f"Train at a level: {', '.join(PRECISIONS)}.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in --output even if the script restores no checkpoint.")
    ] = False,
    as_json: Json = False,
    _quiet: Quiet = False,
) -> None:
    """Run a training script and record its numbers.

    The script runs as with python SCRIPT ARGS and needs no change. All that follows SCRIPT is the script's own, and so
    is the exit code. At the end Plimsoll reports the verdict on the run. With --json it is the last line of standard
    output.
    """
    settings: dict[str, Any] = {
        "every": every,
        "collect": _collections(collect, every),
        "include": include or None,
        "exclude": exclude or None,
        "warmup": warmup,
        "block": _block(block),
        "max_tensors": max_tensors,
        "max_bytes": max_bytes,
        "queue_bytes": queue_bytes,
        "recorder": _names("--recorder", recorder, (*FACTS, *COLLECTIONS)),
        "quiet": True,  # this command reports at the end of the process
    }
    if precision is not None and precision.lower() not in PRECISIONS:
        _refuse(precision)
    if not as_module:
        runner.check(script)
    start, folder = Path.cwd(), paths.local_folder("run", output, "runs/exp1")
    stem = script.rpartition(".")[2] if as_module else Path(script).stem or start.name
    session = _Session(
        lambda: start / folder if folder else choose_folder(stem, start),
        settings,
        precision,
        as_json=as_json,
        # Workers that a launcher starts again continue their run.
        resume=resume or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0",
    )
    atexit.register(session.end)
    runner.listen(session.note, session.note_backward)
    kernels_ahead.compile_when_torch_is_there()
    raise runner.RunAfterCli(lambda: runner.execute(script, arguments or [], as_module=as_module))


class _Session:
    """The watch of one script, from its first optimizer to the end of the process."""

    def __init__(
        self,
        folder: Callable[[], Path],
        settings: Mapping[str, Any],
        precision: str | None,
        *,
        as_json: bool,
        resume: bool,
    ) -> None:
        self._as_json, self._resume = as_json, resume
        self._folder, self._settings, self._precision = folder, settings, precision
        self._finder: Any = None
        self._arithmetic: Any = None
        self._broken = False
        self._made = False  # an optimizer
        self._process = os.getpid()

    def note(self, optimizer: Any) -> None:
        """The script has made an optimizer."""
        self._made = True
        self._contain(lambda: self._note(optimizer))

    def _note(self, optimizer: Any) -> None:
        self._found().note(optimizer)
        if self._arithmetic is not None:
            self._arithmetic.note(optimizer)

    def note_backward(self, tensors: Any) -> bool:
        """Note the start of a backward; return whether no more are needed.

        They only find scripts without optimizer.
        """
        if self._made or self._broken:
            return True
        roots = [tensors] if hasattr(tensors, "grad_fn") else list(tensors)
        return self._contain(lambda: self._found().note_backward(roots)) is not False

    def _contain(self, work: Callable[[], Any]) -> Any:
        if self._broken or os.getpid() != self._process:  # a forked child's training is its own
            return None
        try:
            return work()
        except Exception as error:  # noqa: BLE001  (whatever fails in Plimsoll must not stop the script)
            self._broken = True
            _report_error(f"nothing can be watched; the script continues unwatched ({type(error).__name__}: {error})")
            return None

    def _found(self) -> Any:
        if self._finder is None:
            from plimsoll.watch.model_finder import Finder

            if self._precision is not None:
                from plimsoll.precision.scripts.script_precision import ScriptPrecision

                self._arithmetic = ScriptPrecision(self._precision, _report_once)
            self._finder = Finder(
                self._folder, self._settings, on_found=self._on_found, say=_report, arithmetic=self._arithmetic,
                free=self._free, resume=self._resume,
            )  # fmt: skip
        return self._finder

    def _on_found(self, found: "Found") -> None:
        """A model is watched from now on."""
        often = self._settings["collect"]
        if isinstance(often, list):
            often = {"": self._settings["every"]}
        schedule = ", ".join(f"{name} every {_steps(every)}".lstrip() for name, every in often.items())
        path = _from_here(found.path)
        what = f"{found.model} ({found.parameters:,} parameters, {', '.join(found.optimizers) or 'no optimizer'})"
        late = f"; its first {_steps(found.missed_steps)} passed before it was found" if found.missed_steps else ""
        again = "; what was compiled before is compiled again" if found.recompiled else ""
        if runner.rank() == 0:
            at = f" in {found.precision}" if found.precision else ""
            _report(f"watching {what}{at}, {schedule}, into {path}{late}{again}")

    def _free(self, folder: Path, taken: bool) -> Path:
        """Return the folder to record into, which another training's run may hold."""
        found = free_folder(folder, taken)
        if found != folder:
            here, instead = _from_here(folder), _from_here(found)
            _report_once(
                f"{here} holds the run of another training: this one is recorded into {instead} (--resume continues it)"
            )
        return found

    def end(self) -> None:
        """Report the verdict, or why nothing was recorded, at the end of the process."""
        if self._broken or os.getpid() != self._process or runner.rank() != 0:
            return
        if self._finder is not None and (self._made or self._finder.has_found):
            reason = self._finder.verdict()
        elif "torch" in sys.modules:
            reason = "no torch.optim.Optimizer was made in this process (those that a script starts are not watched)"
        else:
            reason = "the script has not imported torch"
        if reason is not None:
            _report_error(f"no training step was seen: {reason}")
        elif self._finder is not None and (place := self._finder.place) is not None:
            self._contain(lambda: self._report_verdict(place))
        if self._precision is not None and (self._arithmetic is None or not self._arithmetic.decided):
            _report_error(f"--precision {self._precision} was not applied: no model was found")

    def _report_verdict(self, place: Path) -> None:
        from plimsoll.watch.lifecycle import verdict_lines, verdicts

        if self._as_json:
            print(json.dumps({"run": str(_from_here(place)), "runs": verdicts(place)}), flush=True)  # noqa: T201
        elif os.environ.get("PLIMSOLL_QUIET") != "1":
            for line in verdict_lines(place):
                _report(line)


def _from_here(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _steps(count: int) -> str:
    return "step" if count == 1 else f"{count} steps"


def _report(line: str) -> None:
    """Print one line to stderr, unless the command is quiet."""
    if not messages.is_quiet():
        _report_error(line)


def _report_error(line: str) -> None:
    """Print one line to stderr. Where that is closed, do nothing."""
    try:
        who = f"plimsoll (rank {runner.rank()})" if runner.rank() else "plimsoll"
        print(printable(f"{who}: {' '.join(line.split())}"), file=sys.stderr, flush=True)  # noqa: T201
    except (OSError, ValueError, AttributeError):
        return


def _report_once(line: str) -> None:
    """Report on the first rank alone what all ranks find."""
    if runner.rank() == 0:
        _report(line)


def _refuse(precision: str) -> None:
    """Raise for a level that scripts cannot use. It imports torch before the script."""
    from plimsoll.precision.scripts.script_precision import level_for_scripts

    level_for_scripts(precision)


def _collections(given: str, every: int) -> list[str] | dict[str, int]:
    """Return the collections; as a mapping where one has an interval of its own."""
    pairs = [entry.partition("=") for entry in given.split(",")]
    names = _names("--collect", ",".join(name for name, _, _ in pairs), COLLECTIONS)
    if not any(sign for _, sign, _ in pairs):
        return names
    if twice := [name for name in names if names.count(name) > 1]:
        raise ArgumentError(f"run: expected --collect to name each collection once; got {twice[0]} twice. Drop one.")
    return {name: _interval(name, text) if sign else every for name, (_, sign, text) in zip(names, pairs, strict=True)}


def _interval(name: str, text: str) -> int:
    if not text.isdecimal() or len(text) > _MOST_DIGITS or int(text) < 1:
        raise ArgumentError(
            f"run: expected --collect {name}=N with N a number of steps, 1 or more; got {name}={text}. Correct it."
        )
    return int(text)


def _block(given: int | None) -> int | None:
    if given not in (None, *BLOCKS):
        raise ArgumentError(
            f"run: expected --block 32 (MX formats) or 16 (NVFP4); got {given}. Give one, or leave it out."
        )
    return given


def _names(option: str, given: str, known: Sequence[str]) -> list[str]:
    names = [name.strip() for name in given.split(",")]
    for name in names:
        if name not in known:
            raise ArgumentError(
                f"run: expected {option} to name some of {', '.join(known)}, with commas between; got {name!r}. "
                "Correct or drop it."
            )
    return names


# -- the default folder: runs/SCRIPT-DATE-TIME, on every rank ----------------------------------------------------------

_KEY, _FREE_KEY = "plimsoll/run", "plimsoll/free"


# Ranks agree through the store of their process group, where the first to come writes its choice: nobody waits.
# Without a process group, the workers of one torchrun share its process, and take the time at which that began.
def choose_folder(stem: str, start: Path) -> Path:
    """Return a folder of `start`, for the script of that name."""
    parent = start / "runs"
    dist = runner.process_group()
    if dist is not None and dist.get_world_size() > 1:
        store = dist.distributed_c10d._get_default_store()  # noqa: SLF001
        return parent / store.compare_set(_KEY, "", _dated(stem, datetime.now().astimezone())).decode()
    if dist is None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return parent / _dated(stem, _launched())
    return _unused(parent / _dated(stem, datetime.now().astimezone()))


def free_folder(folder: Path, taken: bool) -> Path:
    """Return the folder, or a numbered one if it is taken; the same on every rank."""
    dist = runner.process_group()
    if dist is not None and dist.get_world_size() > 1:
        store = dist.distributed_c10d._get_default_store()  # noqa: SLF001
        return Path(store.compare_set(_FREE_KEY, "", str(_unused(folder) if taken else folder)).decode())
    if taken and dist is None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ArgumentError(
            "run: expected a folder without a run for several ranks that have no process group; got "
            f"--output {folder}. Name a new folder, or continue that run with --resume."
        )
    return _unused(folder) if taken else folder


def _dated(stem: str, when: datetime) -> str:
    return f"{stem}-{when:%Y%m%d-%H%M%S}"


def _unused(path: Path) -> Path:
    number = 1
    candidate = path
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.name}-{number}")
    return candidate


def _launched() -> datetime:
    """Return when the launcher of the ranks was started; all ranks find the same."""
    from plimsoll.runs.reading.run_folder import process_start

    one_machine = os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]
    started = process_start(os.getppid()) if one_machine and "TORCHELASTIC_RUN_ID" in os.environ else None
    if started is None:
        raise ArgumentError(
            "run: expected --output, or ranks that can agree on a folder; got several ranks, without a process group "
            "when training began, that are not of one torchrun on one machine. Give --output DIR."
        )
    return datetime.fromtimestamp(started).astimezone()
