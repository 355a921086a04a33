"""The rules of four well-known loss scalers, from what their public sources say, without their libraries or a GPU.

Each is called after every step with whether gradients overflowed, and has a `scale`. Defaults are what a user gets.

- torch: `torch.amp.GradScaler` itself.
- DeepSpeed: ``deepspeed/runtime/fp16/loss_scaler.py``, class DynamicLossScaler, with the configuration's defaults
  (initial_scale_power 16, loss_scale_window 1000, hysteresis 2, consecutive_hysteresis off, min_loss_scale 1). Where
  the scale would have to fall below its floor DeepSpeed ends the run; here it goes on at the floor.
- Megatron-LM: ``megatron/core/optimizer/grad_scaler.py``, class DynamicGradScaler, with the command line's defaults
  (initial-loss-scale 2^32, loss-scale-window 1000, hysteresis 2, min-loss-scale 1).
- Apex: ``apex/amp/scaler.py``, class LossScaler, with its defaults (2^16, a window of 2000 steps, at most 2^24).
"""

from typing import Protocol

import torch


class Rival(Protocol):
    """A scale, and what overflow does to it."""

    @property
    def scale(self) -> float: ...
    def update(self, overflowed: bool) -> None: ...


class FromTorch:
    """Any scaler with torch's interface, driven with one parameter whose gradient is finite or not."""

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self._scaler = scaler
        self._weight = torch.nn.Parameter(torch.zeros(1))
        self._optimizer = torch.optim.SGD([self._weight], lr=0.0)
        scaler.scale(torch.zeros(1))

    @property
    def scale(self) -> float:
        return self._scaler.get_scale()

    def update(self, overflowed: bool) -> None:
        self._weight.grad = torch.full((1,), torch.inf if overflowed else 1.0)
        self._scaler.step(self._optimizer)
        self._scaler.update()


class DeepSpeedRule:
    """Halves once its allowance of overflows is used up, which a doubling renews; doubles after whole windows."""

    def __init__(self, scale: float = 2.0**16, window: int = 1000, allowance: int = 2, floor: float = 1.0) -> None:
        self.scale, self._window, self._floor = scale, window, floor
        self._allowance = self._left = allowance
        self._step, self._last = 0, -1

    def update(self, overflowed: bool) -> None:
        if overflowed:
            if self._left > 1:
                self._left -= 1
            else:
                self.scale = max(self.scale / 2, self._floor)
            self._last = self._step
        else:
            clean = self._step - self._last - 1  # steps before this one
            if clean > 0 and clean % self._window == 0:
                self._left = self._allowance
                self.scale *= 2
        self._step += 1


class MegatronRule:
    """Halves once its allowance of overflows is used up, which a doubling renews; doubles after a clean interval."""

    def __init__(self, scale: float = 2.0**32, interval: int = 1000, allowance: int = 2, floor: float = 1.0) -> None:
        self.scale, self._interval, self._floor = scale, interval, floor
        self._allowance = self._left = allowance
        self._clean = 0

    def update(self, overflowed: bool) -> None:
        if overflowed:
            self._clean = 0
            self._left -= 1
            if self._left <= 0:
                self.scale = max(self.scale / 2, self._floor)
            return
        self._clean += 1
        if self._clean == self._interval:
            self._clean, self._left = 0, self._allowance
            self.scale *= 2


class ApexRule:
    """Halves at every overflow, without a floor; doubles after a clean window, up to its ceiling."""

    def __init__(self, scale: float = 2.0**16, window: int = 2000, ceiling: float = 2.0**24) -> None:
        self.scale, self._window, self._ceiling = scale, window, ceiling
        self._clean = 0

    def update(self, overflowed: bool) -> None:
        if overflowed:
            self.scale, self._clean = self.scale / 2, 0
            return
        self._clean += 1
        if self._clean == self._window:
            self.scale, self._clean = min(2 * self.scale, self._ceiling), 0
