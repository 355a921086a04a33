"""Constant loss scale."""

from typing import Any, NoReturn

from torch import Tensor, nn

from plimsoll.errors import ArgumentError
from plimsoll.scaling import arguments
from plimsoll.scaling.base import LossScaler
from plimsoll.scaling.state import SavedState


class StaticScaler(LossScaler, name="static"):
    """Constant loss scale. Steps with non-finite gradients are skipped.

    The scale does not follow the gradients, so a scale that is too large skips every step. `update` accepts no other
    scale. The saved state is that of a GradScaler with factors of 1. Loading a state takes its scale.

    Args:
        scale: The scale.
        device: Type of the device of the loss. Without a GPU give ``"cpu"``: with the default nothing is scaled then,
            and a warning reports it. Default: ``"cuda"``.
        enabled: Whether anything is scaled. Default: yes.
        process_group: Ranks that skip together.
        sync_free: Whether the host never waits for the device. Default: no.

    Raises:
        ArgumentError: `scale` is no positive finite number.

    >>> import plimsoll as pl
    >>> pl.scaling.StaticScaler(1024.0, device="cpu").get_scale()
    1024.0
    """

    lowers_scale = False
    set_scale_refusal = "a StaticScaler's scale is constant; use DynamicScaler"

    def __init__(
        self,
        scale: float,
        *,
        device: str = "cuda",
        enabled: bool = True,
        process_group: Any = None,
        sync_free: bool = False,
    ) -> None:
        scale = arguments.check_scale("StaticScaler", "scale", scale)
        bounds = {"min_scale": scale, "max_scale": scale}
        super().__init__(device, scale, enabled=enabled, process_group=process_group, sync_free=sync_free, **bounds)
        self._growth_factor = self._backoff_factor = 1.0
        self._growth_interval = 1

    @classmethod
    def for_model(cls, model: nn.Module) -> NoReturn:  # noqa: ARG003
        """Raise `ArgumentError`: a constant scale has no default that suits every model."""
        raise ArgumentError(
            "StaticScaler: expected a scale; got only the scaler's name. Give plimsoll.scaling.StaticScaler(2.0**10), "
            "for example, or use DynamicScaler."
        )

    def _next_scale(self, found_inf: Tensor) -> float:  # noqa: ARG002
        return self._min_scale

    @property
    def _bounds_for_states(self) -> tuple[float, float]:
        return arguments.SMALLEST, arguments.LARGEST  # its own are its scale, which a state replaces

    def _take(self, saved: SavedState, scale: float, low: float, high: float) -> None:  # noqa: ARG002
        super()._take(saved, scale, scale, scale)
        self._growth_factor = self._backoff_factor = 1.0
        self._growth_interval, self._init_growth_tracker = 1, 0
