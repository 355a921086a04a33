"""One step taken apart: whole error, local errors, and their contributions."""

from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from plimsoll.kernels.dtypes import FORMATS
from plimsoll.microscope.blame.injection import Gradients, Reference
from plimsoll.microscope.blame.interception import named
from plimsoll.microscope.blame.local_errors import LocalErrors, Player, units
from plimsoll.microscope.blame.recording import CallRecord, Recorder, called_modules
from plimsoll.microscope.untouched import untouched
from plimsoll.watch.names import ROOT
from plimsoll.watch.shadow.replay import buffers_of, eagerly, in_reference
from plimsoll.watch.shadow.rng_state import RandomState
from plimsoll.watch.thread_casts import active_casts

PASSES = 4.0  # of one step: a forward to see what is called, the step, its units again, and the reference
ARITHMETIC = ""  # of a module: what is left of its errors without those of its casts


class Step:
    """A closure's step, and its reference."""

    def __init__(
        self, root: nn.Module, closure: Callable[[], Any], wide: torch.dtype, split: Collection[str] = ()
    ) -> None:
        """`split`: modules whose casts are judged one by one."""
        self._root, self._split = root, set(split)
        names, devices = named(root, ROOT), {p.device for p in root.parameters()}
        random, buffers = RandomState(devices), buffers_of(root)
        self._player = Player(names, wide)
        with untouched(root), eagerly():
            called = called_modules(names, closure)
            random.restore()
            recorder = Recorder(names, called, devices, self._make_parts if self._split else None)
            for p in root.parameters():
                p.grad = None
            recorder.record(closure).backward()
            real = {id(p): p.grad.detach().to_dense() for p in root.parameters() if p.grad is not None}
        self.calls = recorder.calls
        with untouched(root), in_reference(devices, None, wide):
            self.errors = units(self.calls, self._errors_of)
        self.by_cast: dict[str, dict[str, list[LocalErrors]]] = {}
        for call in self.calls:
            self._split_errors(call)
        with untouched(root), eagerly():
            self.reference = Reference(root, names, closure, wide, random, buffers)
        exact = self.reference.gradients
        self.total: Gradients = {
            key: _finite(g.to(exact[key].dtype) - exact[key]) for key, g in real.items() if key in exact
        }

    def contribution(self, errors: Iterable[LocalErrors], direction: str) -> Gradients:
        """Return what local errors make of the gradients, in one direction."""
        listed = list(errors)
        with untouched(self._root), eagerly():
            if direction == "forward":
                return self.reference.with_values(listed)
            return self.reference.with_gradients(listed)

    def heard(self, module: str) -> dict[str, str]:
        """Return the casts of a module, each with its format."""
        return {cast: fmt for call in self.calls if call.key[0] == module for cast, fmt in sorted(call.heard)}

    def arithmetic(self, module: str) -> str:
        """Return a name for a module's operations, by the 16-bit dtypes of their results."""
        dtypes = {
            FORMATS[y.dtype].name
            for call in self.calls
            if call.key[0] == module
            for y in (*call.outputs, *(x for child in call.children for x in child.inputs))
            if isinstance(y, Tensor) and y.dtype in FORMATS and y.dtype.itemsize < 4
        }
        return f"{'/'.join(sorted(dtypes))} arithmetic" if dtypes else "operations"

    def _errors_of(self, record: CallRecord) -> LocalErrors:
        return self._player.errors(record, self._player.again(record))

    def _make_parts(self, record: CallRecord) -> None:
        """Compute a call again without its casts, and with each cast alone."""
        if record.key[0] not in self._split or not record.heard:
            return
        before = active_casts.kept, active_casts.heard
        # A checkpoint around the call is not to keep what this saves.
        with torch.autograd.graph.saved_tensors_hooks(_same, _same):
            try:
                active_casts.heard = None
                for cast in (ARITHMETIC, *sorted({cast for cast, _ in record.heard})):
                    active_casts.kept = frozenset((cast,))
                    record.parts[cast] = self._player.again(record, wide=False)
            finally:
                active_casts.kept, active_casts.heard = before
                if record.after is not None:
                    record.after.restore()

    def _split_errors(self, record: CallRecord) -> None:
        """Tell the errors of a call's casts apart, from the parts that were computed."""
        if not record.parts:
            return
        name, none = record.key[0], record.parts.pop(ARITHMETIC)
        rest = self.errors.get(name, [LocalErrors()] * (record.key[1] + 1))[record.key[1]]
        listed = self.by_cast.setdefault(name, {})
        for cast, part in record.parts.items():
            own = self._player.between(part, none)
            rest = rest.without(own)
            listed.setdefault(cast, []).append(own)
        listed.setdefault(ARITHMETIC, []).append(rest)
        record.parts = {}


def _same(x: Tensor) -> Tensor:
    return x


def _finite(e: Tensor) -> Tensor:
    return torch.where(e.isfinite(), e, 0.0)
