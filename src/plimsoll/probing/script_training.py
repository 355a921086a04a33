"""First training steps of a script: recorded, and the script stopped after them."""

import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from plimsoll.errors import ArgumentError, PlimsollError
from plimsoll.microscope.draws import untouched
from plimsoll.probing.comparison import Calls
from plimsoll.probing.entry import COLLECT, examine
from plimsoll.probing.result import Probe, Question
from plimsoll.text import clause
from plimsoll.watch import lifecycle
from plimsoll.watch.hooks import torch_hooks
from plimsoll.watch.model_finder import Finder, Found
from plimsoll.watch.names import unwrapped
from plimsoll.watch.steps.step_boundary import Steps

_MOST_STOPS = 200  # of a script that goes on after each


class ProbeComplete(SystemExit):
    """Enough steps are recorded: ends the script as `sys.exit` would."""


class ScriptTraining:
    """Recorder of the first steps of a script's first model.

    `give_up` is called when a script goes on and on after it was stopped; it must end the process.
    """

    def __init__(self, question: Question, subject: str, steps: int, give_up: Callable[[], None]) -> None:
        self._question, self._subject, self._steps, self._give_up = question, subject, steps, give_up
        self._folder = Path(tempfile.mkdtemp(prefix="plimsoll-"))
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self._remarks: list[str] = []
        settings = {
            "every": 1, "collect": COLLECT, "recorder": (), "block": question.block, "quiet": True,
            "max_bytes": 1 << 62,
        }  # fmt: skip
        self._finder = Finder(lambda: self._folder / "run", settings, on_found=self._begin, say=self._remarks.append)
        self._root: nn.Module | None = None  # kept when the script's own variables are gone
        self._watch: Steps | None = None
        self._calls: Calls | None = None
        self._handle: Any = None
        self._path = self._folder
        self._stops, self._process = 0, os.getpid()

    def note_optimizer(self, optimizer: Any) -> None:
        """Note an optimizer: its model is looked for."""
        self._finder.note(optimizer)

    def note_backward(self, tensors: Any) -> bool:
        """Note a backward of a script without optimizers; return whether it is enough."""
        listed = cast("Sequence[Any]", tensors if isinstance(tensors, list | tuple) else [tensors])
        roots = [x for x in listed if isinstance(x, torch.Tensor)]
        return self._root is not None or self._finder.note_backward(roots)

    def _begin(self, found: Found) -> None:
        """A model is watched from now on. The first one is probed."""
        if self._root is not None:
            self._remarks.append(f"Not judged: {found.model}, a further model of the script.")
            return
        listeners = [each for each in torch_hooks.listeners() if isinstance(each, Steps)]
        self._watch = next(each for each in listeners if Path(each.session.writer.path) == found.path)
        self._root, self._path = self._watch.session.model(), found.path
        assert self._root is not None
        self._calls = Calls(self._root, self._steps)
        self._handle = self._root.register_forward_pre_hook(self._forward_begins)

    def _forward_begins(self, module: nn.Module, args: Any) -> None:
        """Stop the script at the forward after the last step."""
        del module, args
        if self._watch is None or self._watch.session.step < self._steps or os.getpid() != self._process:
            return
        self._stops += 1
        if self._stops > _MOST_STOPS and threading.current_thread() is threading.main_thread():
            self._give_up()
        raise ProbeComplete(0)

    def end(self) -> None:
        """Remove everything that was put into torch, and close the run."""
        if self._root is None or self._calls is None or os.getpid() != self._process:
            return
        self._handle.remove()
        self._calls.close()
        lifecycle.close_earlier(self._root, self._path, 0)

    def answer(self) -> Probe:
        """Return the answer for the script's model; PlimsollError without a step, or with several ranks."""
        why = self._finder.verdict()
        if self._root is None or self._calls is None or why is not None:
            why = why or " ".join(self._remarks) or "no model was seen"
            raise PlimsollError(f"probe: expected a script with a training step; got one without: {clause(why)}.")
        if self._watch is not None and self._watch.session.ranks.world > 1:
            raise ArgumentError(
                f"probe: expected a script in one process; got world_size={self._watch.session.ranks.world}. Run it "
                "without torchrun."
            )
        root = unwrapped(self._root)
        with untouched(root):
            return examine(
                root, self._path, self._calls, self._question, subject=self._subject, remarks=tuple(self._remarks)
            )
