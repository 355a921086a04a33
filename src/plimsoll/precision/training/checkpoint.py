"""State of a loop as tensors and plain values.

``torch.load(weights_only=True)`` reads it.
"""

import random
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from plimsoll.errors import ArgumentError, StateError
from plimsoll.precision.levels.arithmetic import device_of
from plimsoll.watch.shadow.replay import generator_state, set_generator_state

SCHEMA = 1
PARTS = ("schema", "precision", "step", "model", "optimizers", "scaler", "schedulers", "random")


def checked(state: Mapping[str, Any], *, optimizers: int, schedulers: int) -> None:
    """Raise for a state that does not fit the loop, before anything is loaded."""
    if not isinstance(state, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise StateError(f"load_state_dict: expected a result of loop.state_dict(); got {type(state).__name__}.")
    schema = state.get("schema")
    if type(schema) is int and schema > SCHEMA:
        raise StateError(
            f"load_state_dict: expected a loop's state of schema {SCHEMA}; got schema {schema}, written by a newer "
            "Plimsoll. Use that version; nothing has been changed."
        )
    missing = [part for part in PARTS if part not in state]
    if missing:
        raise StateError(
            f"load_state_dict: expected a result of loop.state_dict(); got a mapping without {', '.join(missing)}. "
            "Load a model's own state into the model, before prepare."
        )
    for name, count in (("optimizers", optimizers), ("schedulers", schedulers)):
        if len(state[name]) != count:
            raise StateError(
                f"load_state_dict: expected the state of a loop with {count} {name}; got one with {len(state[name])}. "
                "Prepare with the same ones."
            )


def random_state(root: nn.Module) -> dict[str, Any]:
    """Return the state of all random generators that a model uses here."""
    version, words, gauss = random.getstate()
    kind, numbers, position, has_gauss, cached = cast("Any", np.random.get_state())  # noqa: NPY002  (the one models use)
    devices = {torch.device("cpu"), device_of(root)} - {torch.device("meta")}
    return {
        "rank": _rank(),
        "python": [version, list(words), gauss],
        "numpy": [kind, torch.from_numpy(numbers.astype(np.int64)), position, has_gauss, cached],
        "torch": {device.type: generator_state(device) for device in devices},
    }


def restore_random(state: Mapping[str, Any], root: nn.Module) -> None:
    """Restore the generators; a state of another rank is refused."""
    if state["rank"] != _rank():
        raise ArgumentError(
            f"load_state_dict: expected random generators of rank {_rank()}; got those of rank {state['rank']}, which "
            "would make ranks draw the same. Save one state per rank, or use state_dict(random=False)."
        )
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, numbers, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, numbers.numpy().astype(np.uint32), position, has_gauss, cached))  # noqa: NPY002
    for device in {torch.device("cpu"), device_of(root)}:
        if device.type in state["torch"]:
            set_generator_state(device, state["torch"][device.type].cpu())


def world_size() -> int:
    """Return the number of processes."""
    dist = torch.distributed
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _rank() -> int:
    dist = torch.distributed
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
