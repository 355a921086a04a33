"""Actions on scales of the loss and of layers, and on modules' precision and outputs."""

import contextlib
import inspect
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from plimsoll.diagnosis.finding import Finding
from plimsoll.diagnosis.guard.actions.base import GuardAction
from plimsoll.diagnosis.guard.records import Look, Order
from plimsoll.diagnosis.rules.loss_scale import NoSingleScale
from plimsoll.diagnosis.rules.overflow import ActivationGrowth, OverflowAhead
from plimsoll.emulate import CUDA, Autocast, emulate
from plimsoll.emulate.dispatch import thread_frame
from plimsoll.kernels.dtypes import SIXTEEN_BIT
from plimsoll.tensor_collections import WITHOUT_LOSS_SCALE
from plimsoll.watch.hooks import torch_hooks
from plimsoll.watch.taps.compiled_taps import inlined_only

# -- the loss scale, raised or lowered, and layers' own scales ---------------------------------------------------------

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
        now, after = float(scaler.get_scale()), math.ldexp(1.0, bounded)
        wanted = math.ldexp(1.0, exponent)
        if after == now or (after > now) != (wanted > now):  # bounds need not be powers of two, and a scale may be 0
            return f"the scale is at its bound, {now:g}"
        return self.order(finding, since, reason, before=now, after=after, targets=["the loss scale"])

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


# -- modules: BF16 in place of their precision, and clamped outputs ----------------------------------------------------

# The level that the whole run goes over to, from the level that it is at; from any other to amp-bf16.
_IN_BF16 = {"fp16-master": "bf16-master", "fp16-pure": "bf16-master"}
_HALF = torch.float16


class ToBF16(GuardAction):
    """Modules, or the whole run, in BF16 from the next step on."""

    action = "to_bf16"

    def __init__(self, training: Any) -> None:
        super().__init__(training)
        self._done: set[str] = set()
        self._regions: list[Any] = []

    # The whole run is meant where the finding names no modules or more than half of those with parameters, and where
    # the modules alone have not helped. With a `Loop` its policy or its level changes, and stays changed when the guard
    # ends. In a hand-written loop the modules run under BF16 autocast, or emulation where that is what the training
    # runs in, and return FP32; that goes with the guard.
    def propose(self, finding: Finding, since: int, tries: int, look: Look) -> Order | str:  # noqa: ARG002
        """The modules that are not in BF16 yet, or the run."""
        named = self.training.modules_of(finding)
        left = [name for name in named if not self._is_done(name)]
        access, loop = self.training.access, self.training.loop
        owners = [
            name
            for name, module in access.modules().items()
            if next(module.parameters(recurse=False), None) is not None
        ]
        whole = not named or tries > 0 or access.root in named or 2 * len(set(named) & set(owners)) > len(owners)
        if access.root in self._done or (not whole and not left):
            return "it runs in BF16 already"
        if loop is not None and whole:
            return self._run_of_loop(finding, since, loop)
        where = [access.root] if whole else left
        half = next((n for n in where if any(p.dtype is _HALF for p in self.training.module(n).parameters())), None)
        if half is not None and loop is None:
            return f"the weights of {half} are torch.float16, which autocast does not change"
        reason = (
            "BF16 has FP32's range"
            if whole
            else ("only these modules leave their format's range, and BF16 has the range of FP32")
        )
        return self.order(finding, since, reason, before=self._present(), after="bf16", where=where, targets=where)

    def _run_of_loop(self, finding: Finding, since: int, loop: Any) -> Order | str:
        before = loop.precision
        after = _IN_BF16.get(before, "amp-bf16")
        if "bf16" in before:
            return f"the run is at {before} already"
        return self.order(finding, since, "BF16 has FP32's range", before=before, after=after)

    def carry_out(self, order: Order) -> None:
        """Changes the level, the policy, or puts the modules under autocast."""
        loop = self.training.loop
        if loop is not None and not order.where:
            loop.change(str(order.after))
            self._done.add(self.training.access.root)
            return
        if loop is not None:
            policy = loop.policy
            for name in order.where:
                policy = policy.with_module(self.training.in_model(name) or "model", "bf16")
            loop.change(policy=policy)
        else:
            self._enter_by_hooks(order)
        self._done |= set(order.where)

    def handled(self, finding: Finding) -> bool:
        """Of two layers that no single scale fits, one that is in BF16 needs none."""
        return finding.rule == NoSingleScale.id and any(map(self._is_done, self.training.modules_of(finding)))

    def undo(self) -> None:
        """In a hand-written loop: the modules run as before."""
        while self._regions:  # dropped once it is gone: an interrupted close is taken up again
            self._regions[-1].remove()
            self._regions.pop()

    def _enter_by_hooks(self, order: Order) -> None:

        modules = [self.training.module(name) for name in order.where]
        first = next((p for module in modules for p in module.parameters()), None)
        self._regions.append(InBF16(modules, "cpu" if first is None else first.device.type))

    def _present(self) -> str:
        loop = self.training.loop
        return "what is around" if loop is None else str(loop.precision)

    def _is_done(self, name: str) -> bool:
        parts = name.split(".")
        return any(".".join(parts[:n]) in self._done for n in range(1, len(parts) + 1))


class Clamp(GuardAction):
    """Clamps modules' outputs to FP16's largest value. Gradients pass, so that training can bring them down."""

    action = "clamp"

    def __init__(self, training: Any) -> None:
        super().__init__(training)
        self._clamps: list[Any] = []
        self._done: set[str] = set()

    def propose(self, finding: Finding, since: int, tries: int, look: Look) -> Order | str:  # noqa: ARG002
        """The modules whose outputs the finding names."""
        if finding.collection != "activations":
            return "only what modules return is clamped"
        named = [name for name in finding.where if ":output" in name]
        modules = dict.fromkeys(name.partition(":")[0] for name in named)
        known = self.training.access.modules()
        left = [name for name in modules if name in known and name not in self._done]
        if not left:
            return "these modules are clamped already" if modules else "the finding is about inputs of modules"
        reason = "a value clamped to the format's largest does little harm, and an infinite one spreads"
        return self.order(finding, since, reason, before="free", after="at most 65504", where=left, targets=left)

    def handled(self, finding: Finding) -> bool:
        """Values that are held at the top stay near it: no reason for more."""
        if finding.rule not in (OverflowAhead.id, ActivationGrowth.id) or finding.collection != "activations":
            return False
        return all(name.partition(":")[0] in self._done for name in finding.where)

    def carry_out(self, order: Order) -> None:
        """Clamps them, before the watch's own hooks see what they return."""
        from plimsoll.precision import clamp_residuals

        model: Any = self.training.access.model
        modules = [self.training.in_model(name) or "model" for name in order.where]
        self._clamps.append(clamp_residuals(model, modules, "fp16", gradient="pass", first=True))
        self._done |= set(order.where)

    def undo(self) -> None:
        """The modules return what they return."""
        while self._clamps:
            self._clamps[-1].remove()
            self._clamps.pop()


class InBF16:
    """Modules of a hand-written loop that compute in BF16 until `remove`."""

    # FP16 inputs are FP32 inside, and outputs are FP32. So all of it has FP32's range, and the code around casts as
    # with any FP32 value.
    def __init__(self, modules: Iterable[nn.Module], kind: str) -> None:
        self._handles: list[Any] = []
        for module in modules:
            region = _Region(kind)
            self._handles.append(module.register_forward_pre_hook(region.enter, prepend=True, with_kwargs=True))
            torch_hooks.in_front.add(self._handles[-1].id)
            self._handles.append(module.register_forward_hook(region.leave, always_call=True))

    def remove(self) -> None:
        """The modules compute as what is around them."""
        for handle in self._handles:
            handle.remove()
            torch_hooks.in_front.discard(handle.id)
        self._handles.clear()


class _Region:
    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._open: list[contextlib.AbstractContextManager[Any]] = []

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:  # noqa: ARG002  (torch's to choose)
        """Before the module's forward."""
        context = _bf16(self._kind)
        context.__enter__()
        self._open.append(context)
        return _wide(args), _wide(kwargs)

    def leave(self, module: nn.Module, args: Any, output: Any) -> Any:  # noqa: ARG002  (torch's to choose)
        """After it, also where it has raised."""
        self._open.pop().__exit__(None, None, None)
        return _wide(output)


inlined_only(_Region.enter, _Region.leave)


def _bf16(kind: str) -> contextlib.AbstractContextManager[Any]:
    """Return a context of BF16 by the active means: emulation, `Autocast`, or torch's."""
    if thread_frame.current() is not None:
        return emulate("bf16") if kind == "cpu" else Autocast(CUDA, torch.bfloat16)
    # Without the cache, which is by weight alone: one that is used in FP16 too would be found in that.
    return torch.autocast(kind, torch.bfloat16, cache_enabled=False)


def _wide(value: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda x: x.float() if x.dtype in SIXTEEN_BIT else x, value)
