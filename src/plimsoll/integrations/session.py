"""One training of a trainer: watched from first to last step, then judged."""

import os
import warnings
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any, cast

from torch import Tensor, nn

from plimsoll.diagnosis import Finding, Guard
from plimsoll.errors import ArgumentError, PlimsollError
from plimsoll.report import summary
from plimsoll.runs.storage.location import folder_to_write
from plimsoll.text import printable
from plimsoll.watch import Watch, watch

_TAKEN = frozenset({"loss", "scale", "nonfinite"})  # what the watch itself records at every step
_THEIRS = frozenset({"model", "optimizer", "scaler", "start_step"})  # what the trainer knows


class Session:
    """Common part of all callbacks, which differ in when they call it.

    - `settings`: keyword arguments of `plimsoll.watch`. `guard`: those of `plimsoll.Guard`, None for no guard.
    - `verdict`: whether `diagnose` judges the run at its end, and alarms are warned of.
    """

    def __init__(
        self,
        callback: str,
        run: "str | os.PathLike[str]",
        settings: Mapping[str, Any],
        guard: Mapping[str, Any] | None,
        *,
        verdict: bool,
    ) -> None:
        theirs = sorted(_THEIRS & settings.keys())
        if theirs:
            raise ArgumentError(
                f"{callback}: expected settings of plimsoll.watch except {', '.join(sorted(_THEIRS))}; got "
                f"{', '.join(theirs)}. Leave them out: the trainer has them."
            )
        self.path = folder_to_write(callback, run)
        self._settings, self._guard_settings, self._verdict = dict(settings), guard, verdict
        self.watch: Watch | None = None
        self.guard: Guard | None = None
        self.findings: list[Finding] = []

    def begin(
        self, model: nn.Module, optimizers: Iterable[Any], scaler: Any, step: int, facts: Mapping[str, object]
    ) -> None:
        """Start watching; `step`: steps so far, not 0 after a restored checkpoint.

        From a checkpoint on, what the run has of later steps is replaced. `facts` are stored with the settings.
        """
        self.end()
        settings = dict(self._settings)
        own = settings.pop("settings", {})
        if isinstance(own, Mapping):
            own = {**facts, **cast("Mapping[str, object]", own)}
        self.watch = watch(
            model,
            list(optimizers),
            run=self.path,
            scaler=scaler,
            start_step=step or None,
            settings=own,
            **settings,
        )
        if self._guard_settings is not None:
            self.guard = Guard(self.watch, scaler=scaler, **self._guard_settings)

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Record what the trainer logs: all that is a single number."""
        if self.watch is None or self.watch.closed:
            return
        values = {_name(name): value for name, value in metrics.items() if _is_number(value)}
        if values:
            self.watch.log(**values)

    def end(self, error: BaseException | None = None, *, judges: bool = False) -> None:
        """End the watch, if one is open; an error is recorded as what ended it."""
        if self.watch is None:
            return
        if self.guard is not None:
            self.guard.close()
        self.watch.__exit__(None if error is None else type(error), error, None)
        self.watch = None
        if judges and self._verdict:
            self._judge()

    def _judge(self) -> None:
        try:
            result = summary(self.path)
        except PlimsollError as error:
            self._warn(f"{self.path} could not be judged: {error}")
            return
        self.findings = list(result.findings)
        if result.state == "alarm":
            self._warn(f"{result.verdict} plimsoll check {self.path} has the details.")

    def _warn(self, text: str) -> None:
        warnings.warn(printable(f"plimsoll: {text}", lines=False), RuntimeWarning, stacklevel=5)


def _name(name: str) -> str:
    return f"logged_{name}" if name in _TAKEN else name


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, Real)
