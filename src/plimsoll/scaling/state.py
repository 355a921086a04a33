"""State of a scaler: accessors, `state_dict` and pickling, as in GradScaler."""

import math
import warnings
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from plimsoll.errors import ArgumentError, StateError
from plimsoll.scaling import arguments
from plimsoll.scaling.step import StepOutcome
from plimsoll.version import __version__

SCHEMA = 1
OURS = "plimsoll"
_ENTRIES = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedState:
    """State of a scaler as plain values."""

    scale: float
    growth_factor: float
    backoff_factor: float
    growth_interval: int
    growth_tracker: int
    kind: str | None  # class that wrote it, None for a GradScaler
    extra: dict[str, Any]


def write_state(state: SavedState) -> dict[str, Any]:
    """Return a dictionary of plain values, which GradScaler loads too."""
    return {
        "scale": state.scale,
        "growth_factor": state.growth_factor,
        "backoff_factor": state.backoff_factor,
        "growth_interval": state.growth_interval,
        "_growth_tracker": state.growth_tracker,
        OURS: {"schema": SCHEMA, "version": __version__, "kind": state.kind, **state.extra},
    }


def read_state(saved: Mapping[str, Any]) -> SavedState:
    """Return the content of a saved state of a scaler or of a GradScaler.

    Raises:
        StateError: The state is empty, incomplete or of a newer schema, or a number is one that no scaler has.
    """
    if not isinstance(saved, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise StateError(f"load_state_dict: expected the result of state_dict(); got {type(saved).__name__}.")
    if not saved:
        raise StateError(
            "load_state_dict: expected the state of a scaler; got an empty one, possibly because it was saved from a "
            "disabled scaler. Leave it out, or make this scaler with enabled=False."
        )
    own = saved.get(OURS, {})
    if not isinstance(own, Mapping):
        raise StateError(
            f"load_state_dict: expected a mapping as entry {OURS!r}; got {own!r:.200}. Nothing was changed. Give a "
            "result of state_dict()."
        )
    ours = dict(cast("Mapping[str, Any]", own))
    schema, version, kind = ours.pop("schema", SCHEMA), ours.pop("version", None), ours.pop("kind", None)
    if not isinstance(schema, int) or schema > SCHEMA:
        raise StateError(
            f"load_state_dict: expected a state of schema {SCHEMA} or older; got schema {schema!r}, written by "
            f"plimsoll {version}. Nothing was changed. Load it with that version or a newer one; this is {__version__}."
        )
    missing = [name for name in _ENTRIES if name not in saved]
    if missing:
        raise StateError(
            f"load_state_dict: expected the entries of a scaler's state; got {sorted(map(str, saved))}, without "
            f"{missing}. Nothing was changed. Give a result of state_dict()."
        )
    state: SavedState | None = None
    try:
        state = SavedState(
            scale=float(saved["scale"]),
            growth_factor=float(saved["growth_factor"]),
            backoff_factor=float(saved["backoff_factor"]),
            growth_interval=int(saved["growth_interval"]),
            growth_tracker=int(saved["_growth_tracker"]),
            kind=kind,
            extra=ours,
        )
        # A constant scale has factors of 1. The tracker is an int32 on the device.
        rules = 1 <= state.growth_factor < math.inf and 0 < state.backoff_factor <= 1
        is_known = rules and state.growth_interval >= 1 and 0 <= state.growth_tracker < 2**31
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last: of tensors of several values
        is_known = False
    if state is None or not is_known:
        entries = {name: saved[name] for name in _ENTRIES}
        raise StateError(
            f"load_state_dict: expected numbers in a scaler's state; got {entries}. Nothing was changed. A growth "
            "factor is at least 1, a back-off factor above 0 and at most 1, an interval at least 1. Give a result of "
            "state_dict()."
        )
    return state


def _bound(value: object) -> float:
    """Return a bound of the scale, or raise `StateError`."""
    try:
        return arguments.check_scale("load_state_dict", "min_scale and max_scale", value)
    except ArgumentError as error:
        raise StateError(str(error)) from error


LOSSES = 16  # number of an iteration's losses that are checked when its step is skipped


def fresh_state() -> dict[str, Any]:
    """Return the state of an optimizer at the start of a step, in torch's own terms."""
    return {"stage": OptState.READY, "found_inf_per_device": {}}


class SavedScaler(torch.amp.GradScaler):
    """Settings and state of a scaler, the part of `LossScaler` that is saved."""

    _device: str
    _enabled: bool
    _growth_factor: float
    _backoff_factor: float
    _growth_interval: int
    _init_scale: float
    _init_growth_tracker: int
    _scale: Tensor | None
    _growth_tracker: Tensor | None
    _per_optimizer_states: dict[int, dict[str, Any]]
    _min_scale: float
    _max_scale: float
    _process_group: Any
    _outcome: StepOutcome | None
    _outcomes: dict[int, StepOutcome]
    _losses: deque[Tensor]

    # -- hooks ---------------------------------------------------------------------------------------------------------

    def _save(self) -> dict[str, Any]:
        """Return plain values to be saved with the bounds and the entries of GradScaler."""
        return {}

    def _load(self, extra: dict[str, Any]) -> None:
        """Load the result of `_save`, empty from another kind. The scale is set before."""

    # -- settings ------------------------------------------------------------------------------------------------------

    def get_scale(self) -> float:
        """Return the scale; 1 if nothing is scaled. Waits for the device."""
        if not self._enabled:
            return 1.0
        return self._init_scale if self._scale is None else float(self._scale.item())

    def get_growth_factor(self) -> float:
        """Return the factor by which the scale grows."""
        return self._growth_factor

    def set_growth_factor(self, new_factor: float) -> None:
        """Set the factor by which the scale grows.

        Raises:
            ArgumentError: The factor is not above 1.
        """
        self._growth_factor = arguments.check_growth("set_growth_factor", new_factor)

    def get_backoff_factor(self) -> float:
        """Return the factor by which the scale is lowered."""
        return self._backoff_factor

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set the factor by which the scale is lowered.

        Raises:
            ArgumentError: The factor is not between 0 and 1.
        """
        self._backoff_factor = arguments.check_backoff("set_backoff_factor", new_factor)

    def get_growth_interval(self) -> int:
        """Return the number of clean steps before the scale grows."""
        return self._growth_interval

    def set_growth_interval(self, new_interval: int) -> None:
        """Set the number of clean steps before the scale grows.

        Raises:
            ArgumentError: The number is below 1.
        """
        self._growth_interval = arguments.check_interval("set_growth_interval", "new_interval", new_interval)

    # -- saving --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain values.

        `torch.load` reads them with ``weights_only``. It has the entries of a GradScaler's state, which GradScaler
        loads, and ``"plimsoll"`` with the bounds and the position within a burst. It is empty if nothing is scaled.
        Call it after `update`. Waits for the device.
        """
        if not self._enabled:
            return {}
        return write_state(
            SavedState(
                scale=self.get_scale(),
                growth_factor=self._growth_factor,
                backoff_factor=self._backoff_factor,
                growth_interval=self._growth_interval,
                growth_tracker=self._get_growth_tracker(),
                kind=type(self).__name__,
                extra={"min_scale": self._min_scale, "max_scale": self._max_scale, **self._save()},
            )
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of any scaler of Plimsoll, or of a GradScaler, with its settings.

        A scale outside of the bounds is clamped with a warning: 0 (to which GradScaler's may fall) and NaN become
        `min_scale`, Inf becomes `max_scale`. From a state of another kind of scaler only the common part is loaded,
        with a warning, and from that of a `StaticScaler` the scale alone. If nothing is scaled, the call does nothing.

        Args:
            state_dict: The result of `state_dict`.

        Raises:
            StateError: The state is empty, incomplete, damaged or of a newer schema. Nothing is changed.
        """
        if not self._enabled:
            return
        saved, before = read_state(state_dict), self.state_dict()
        extra = dict(saved.extra)
        least, most = self._bounds_for_states
        low, high = (_bound(extra.pop(name, own)) for name, own in (("min_scale", least), ("max_scale", most)))
        foreign = saved.kind not in (None, type(self).__name__)
        if foreign and saved.growth_factor == 1:  # a constant scale's settings, with which no rule could move it
            own = {"growth_factor": self._growth_factor, "backoff_factor": self._backoff_factor}
            saved = replace(saved, growth_interval=self._growth_interval, growth_tracker=0, **own)
            low, high = least, most
        if foreign:
            extra = {}
        scale = min(max(low, saved.scale), high)  # in this order NaN becomes the lower bound
        try:
            arguments.check_bounds("load_state_dict", low, scale, high)
            self._take(saved, scale, low, high)
            self._load(extra)
        except Exception as error:
            self._restore(before)
            if isinstance(error, StateError):
                raise
            raise StateError(
                f"load_state_dict: expected the entries that {type(self).__name__} saves under {OURS!r}; got others "
                f"({type(error).__name__}: {error}). Nothing was changed. Give a result of state_dict()."
            ) from error
        if scale != saved.scale:
            self._warn(f"a scale of {saved.scale:g} is outside of {low:g} to {high:g}; it is now {scale:g}")
        if foreign:
            self._warn(f"a {saved.kind} wrote the state; only the common part of all scalers is loaded")

    def _restore(self, before: dict[str, Any]) -> None:
        """Take this scaler's own state again, after another one proved to be damaged."""
        saved = read_state(before)
        extra = dict(saved.extra)
        self._take(saved, saved.scale, extra.pop("min_scale"), extra.pop("max_scale"))
        self._load(extra)

    @property
    def _bounds_for_states(self) -> tuple[float, float]:
        """Bounds of a state that has none."""
        return self._min_scale, self._max_scale

    def _warn(self, message: str) -> None:
        warnings.warn(f"load_state_dict of {type(self).__name__}: {message}.", stacklevel=3)

    def _take(self, saved: SavedState, scale: float, low: float, high: float) -> None:
        self._min_scale, self._max_scale = low, high
        self._growth_factor, self._backoff_factor = saved.growth_factor, saved.backoff_factor
        self._growth_interval = saved.growth_interval
        self._init_scale, self._init_growth_tracker = scale, saved.growth_tracker
        if self._scale is not None and self._growth_tracker is not None:
            self._scale.fill_(scale)
            self._growth_tracker.fill_(saved.growth_tracker)

    # -- pickling ------------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        if self._process_group is not None:
            raise StateError(
                f"pickle: expected a scaler without process group; got a {type(self).__name__} with one, which belongs "
                "to this process. Save state_dict()."
            )
        # Tensors are created again from plain values at their first use.
        state = {name: None if isinstance(value, Tensor) else value for name, value in self.__dict__.items()}
        state |= {"_outcomes": {}, "_losses": deque(maxlen=LOSSES)}
        if self._enabled:
            if self._per_optimizer_states:
                raise StateError(
                    "pickle: expected a scaler between two iterations; got one in the middle of one. Pickle it after "
                    "update()."
                )
            state |= {"_init_scale": self.get_scale(), "_init_growth_tracker": self._get_growth_tracker()}
            state |= {"_per_optimizer_states": defaultdict(fresh_state), "_kept": self._save()}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        extra = cast("dict[str, Any] | None", self.__dict__.pop("_kept", None))
        if extra is not None:
            self._load(extra)
