"""Accelerate: `watch` for prepared models, and `use_scaler` for loss scalers."""

import os
from typing import Any, cast

from torch import nn

from plimsoll.errors import ArgumentError, MissingExtraError, StateError
from plimsoll.watch import Watch, watch as watch_model

try:
    from accelerate import Accelerator  # pyright: ignore[reportMissingTypeStubs]
    from accelerate.optimizer import AcceleratedOptimizer  # pyright: ignore[reportMissingTypeStubs]
except ImportError as error:
    raise MissingExtraError(
        "plimsoll.integrations.accelerate: expected the package accelerate; got none. "
        "Install it: pip install accelerate"
    ) from error


def use_scaler(accelerator: Accelerator, scaler: Any) -> None:
    """Make an accelerator scale its losses with this scaler, before `prepare`.

    The scaler is saved and restored with the accelerator's state, and skipped steps are reported like those of its own.
    Raises `ArgumentError` for what is no loss scaler, and where the accelerator trains without one (only at fp16 it has
    one); `StateError` where an optimizer is prepared already, since that keeps the scaler it was given.
    """
    if not callable(getattr(scaler, "unscale_", None)):
        raise ArgumentError(
            f"use_scaler: expected a loss scaler of plimsoll.scaling; got {type(scaler).__name__}. Give "
            "plimsoll.scaling.SpectralScaler(), for example."
        )
    if accelerator.mixed_precision != "fp16":
        raise ArgumentError(
            f"use_scaler: expected an Accelerator(mixed_precision='fp16'), which scales its losses; got "
            f"mixed_precision={accelerator.mixed_precision!r}. Leave the scaler out, or train in fp16."
        )
    if any(isinstance(optimizer, AcceleratedOptimizer) for optimizer in _optimizers(accelerator)):
        raise StateError(
            "use_scaler: expected an accelerator that has prepared no optimizer yet; got one that has. "
            "Call use_scaler before accelerator.prepare."
        )
    accelerator.scaler = scaler


def watch(accelerator: Accelerator, model: nn.Module, *, run: "str | os.PathLike[str]", **settings: Any) -> Watch:
    """Watch a prepared model, with the accelerator's optimizers and scaler.

    - `settings`: whatever else `plimsoll.watch` takes. Raises what that raises.
    """
    optimizers = settings.pop("optimizer", None) or _optimizers(accelerator)
    return watch_model(model, optimizers, run=run, scaler=settings.pop("scaler", accelerator.scaler), **settings)


def _optimizers(accelerator: Accelerator) -> list[Any]:
    return list(cast("Any", accelerator)._optimizers)  # noqa: SLF001  (listed nowhere else)
