"""What a scaler's saved state holds: GradScaler's entries, so that it loads there, and ours under one more key."""

from dataclasses import dataclass
from typing import Any, cast

from plimsoll.errors import StateError
from plimsoll.version import __version__

SCHEMA = 1
OURS = "plimsoll"
_ENTRIES = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedState:
    """A scaler's state as plain values."""

    scale: float
    growth_factor: float
    backoff_factor: float
    growth_interval: int
    growth_tracker: int
    kind: str | None  # the class that wrote it; None for a GradScaler's
    extra: dict[str, Any]


def write_state(state: SavedState) -> dict[str, Any]:
    """A dictionary of plain values, which `torch.amp.GradScaler.load_state_dict` takes too."""
    return {
        "scale": state.scale,
        "growth_factor": state.growth_factor,
        "backoff_factor": state.backoff_factor,
        "growth_interval": state.growth_interval,
        "_growth_tracker": state.growth_tracker,
        OURS: {"schema": SCHEMA, "version": __version__, "kind": state.kind, **state.extra},
    }


def read_state(saved: dict[str, Any]) -> SavedState:
    """What such a dictionary, or a GradScaler's, holds; raises `StateError` for one that cannot be read."""
    if not saved:
        raise StateError(
            "load_state_dict: expected the state of a scaler; got an empty one, possibly because it was saved from a "
            "disabled scaler. Leave it out, or make this scaler with enabled=False."
        )
    ours = dict(cast("dict[str, Any]", saved.get(OURS, {})))
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
            f"{missing}. Nothing was changed. Give what state_dict() returned."
        )
    return SavedState(
        scale=float(saved["scale"]),
        growth_factor=float(saved["growth_factor"]),
        backoff_factor=float(saved["backoff_factor"]),
        growth_interval=int(saved["growth_interval"]),
        growth_tracker=int(saved["_growth_tracker"]),
        kind=kind,
        extra=ours,
    )
