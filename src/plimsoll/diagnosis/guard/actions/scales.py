"""The actions on scales: raising and lowering the loss scale, and a layer's own."""

import inspect
import math
from typing import Any

import torch

from plimsoll.diagnosis.finding import Finding
from plimsoll.diagnosis.guard.actions.base import GuardAction
from plimsoll.diagnosis.guard.records import Look, Order
from plimsoll.tensor_collections import WITHOUT_LOSS_SCALE

_MARGIN = 1  # binades that are left above the largest gradient
_BLIND = 4  # binades by which the scale is raised where no gradient is left to see
_LOWEST, _HIGHEST = 2.0**-14, 2.0**64  # for scalers without bounds of their own


class LossScale(GuardAction):
    """Base of the actions that raise and lower the loss scale."""

    def refusal(self) -> str | None:
        """Return why the scaler's scale cannot be set to last; None if it can."""
        scaler, loop = self.training.scaler, self.training.loop
        if scaler is None:
            source = f"the loop does not scale losses at {loop.precision}" if loop is not None else "no scaler is given"
            return f"{source}; give scaler=, the scaler that the training uses"
        if not isinstance(scaler, torch.amp.GradScaler):
            return f"a {type(scaler).__name__} is not a torch.amp.GradScaler"
        if not scaler.is_enabled():
            return f"the {type(scaler).__name__} is disabled"
        # `LossScaler` declares these attributes. torch's scaler has none of them: its scale can be set.
        why: str | None = getattr(scaler, "set_scale_refusal", None)
        return f"{why}; allow layer_scale" if why and getattr(scaler, "scales_layers", False) else why

    # A scale that a guard sets is a power of two within the scaler's bounds; from there the scaler goes on by its own
    # rule. Raising leaves one binade above the largest recent gradient; where nothing of the gradients is left to see,
    # it goes up by four binades at a time.
    def change(self, finding: Finding, since: int, exponent: int, reason: str) -> Order | str:
        """Return an order for a scale of that power of two, within the scaler's bounds."""
        scaler: Any = self.training.scaler
        if scaler is None:
            return "the loss is no longer scaled"
        low, high = getattr(scaler, "scale_bounds", (_LOWEST, _HIGHEST))
        bounded = min(max(exponent, math.ceil(math.log2(low))), math.floor(math.log2(high)))
        now = float(scaler.get_scale())
        if now > 0 and bounded == math.log2(now):
            return f"the scale is at its bound, {now:g}"
        return self.order(
            finding, since, reason, before=now, after=math.ldexp(1.0, bounded), targets=["the loss scale"]
        )

    def carry_out(self, order: Order) -> None:
        """Set the scale. Watches do not record it: the scaler's update ended the step."""
        scaler, scale = self.training.scaler, float(order.after or 0)
        if hasattr(scaler, "set_scale"):
            scaler.set_scale(scale)
        else:
            # The original of torch's update, below the wrapper by which watches record the end of a step.
            inspect.unwrap(scaler.update.__func__)(scaler, scale)

    def exponent(self) -> int:
        """The present scale's binade; that of the lowest one for a scale of 0."""
        scaler = self.training.scaler
        return math.frexp(max(float(scaler.get_scale()), _LOWEST))[1] - 1 if scaler is not None else 0


class RaiseScale(LossScale):
    """The loss scale to where the largest gradient leaves room."""

    action = "raise_scale"

    def propose(self, finding: Finding, since: int, tries: int, look: Look) -> Order | str:  # noqa: ARG002
        """A higher scale, if the gradients leave room for one."""
        if finding.collection in WITHOUT_LOSS_SCALE:
            return f"the loss scale does not move {finding.collection}"
        now = self.exponent()
        if look.room is None:
            return self.change(
                finding, since, now + _BLIND, ("no nonzero gradient is left, so the scale is raised by 2^4")
            )
        target = look.room - _MARGIN
        if target <= now:
            return f"the largest gradient overflows above 2^{look.room}, and the scale is 2^{now}"
        return self.change(finding, since, target, f"no recent gradient overflows at scales up to 2^{look.room}")


class LowerScale(LossScale):
    """The loss scale to the lowest that it swings to, or by half."""

    action = "lower_scale"

    def propose(self, finding: Finding, since: int, tries: int, look: Look) -> Order | str:  # noqa: ARG002
        """A lower scale."""
        if finding.collection in WITHOUT_LOSS_SCALE:
            return f"the loss scale does not move {finding.collection}"
        now, lowest = self.exponent(), finding.evidence.get("lowest")
        if isinstance(lowest, float) and 0 < lowest < math.ldexp(1.0, now):
            target = math.floor(math.log2(lowest))
            return self.change(finding, since, target, f"{lowest:g} is the lowest of the scales that it swings between")
        return self.change(finding, since, now - 1, "half of the present scale")


class LayerScale(GuardAction):
    """Layers of a `LayerScaler` get their scales from their gradients of now."""

    action = "layer_scale"

    def refusal(self) -> str | None:
        """Return why there are no scales of layers to choose; None if there are."""
        scaler: Any = self.training.scaler
        if getattr(scaler, "scales_layers", False) and scaler.is_enabled():
            return None
        why = "no scaler is given" if scaler is None else f"a {type(scaler).__name__} has one scale for all"
        return f"{why}; use plimsoll.scaling.LayerScaler(model)"

    def propose(self, finding: Finding, since: int, tries: int, look: Look) -> Order | str:  # noqa: ARG002
        """The layers that the finding names, as far as they have a scale."""
        scaler: Any = self.training.scaler
        if finding.collection in WITHOUT_LOSS_SCALE:
            return f"layer scales do not move {finding.collection}"
        names = {self.training.in_model(name) or "model": name for name in self.training.modules_of(finding)}
        chosen = [name for own, name in names.items() if own in scaler.scales]
        if not chosen:
            return "none of these layers has its own scale"
        scales = [scaler.scales[own] for own, name in names.items() if name in chosen]
        before = ", ".join(f"2^{math.frexp(scale)[1] - 1}" for scale in scales[:4])
        reason = "the scales of layers are chosen again from the gradients of the next step"
        return self.order(finding, since, reason, before=before, after="measured again", where=chosen, targets=chosen)

    def carry_out(self, order: Order) -> None:  # noqa: ARG002  (all layers, not only those that are named)
        """Have the scaler examine all layers: one's loss may come from the one before."""
        scaler: Any = self.training.scaler
        scaler.look_again()
