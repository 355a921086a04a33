"""`LayerScaler`: a power-of-two scale for each layer's backward, beside the loss scale."""

import contextlib
import math
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from plimsoll import checks
from plimsoll.errors import ArgumentError, StateError
from plimsoll.formats import get_element
from plimsoll.scaling import arguments
from plimsoll.scaling.base import FLOOR, LossScaler
from plimsoll.scaling.layerwise.edge_marks import OUTSIDE, OutputShift, ScaleChange, behind, mark
from plimsoll.scaling.layerwise.exponents import LayerExponents, RuleName, clamped
from plimsoll.scaling.layerwise.forward_mode import tensors_in
from plimsoll.scaling.layerwise.module_hooks import After, Before
from plimsoll.scaling.layerwise.scaled_modules import (
    WIDENS,
    Layers,
    broken_units,
    keep_gradients_wide,
    refuse_unsupported,
    set_gradient_dtype,
    unwrapped,
)
from plimsoll.scaling.state.persistence import read_state
from plimsoll.spectrum import Spectrum

_RULES = ("spectra", "zhao")


class LayerScaler(LossScaler, name="layer"):
    """A loss scaler that also gives each layer's backward a power of two of its own.

    One loss scale moves all gradients alike. Where they span more binades than the format has, from layer to layer, no
    single scale serves: `SpectralScaler` says so. Here the gradient inside each module is carried at that module's own
    scale; from module to module it is multiplied by the ratio, before anything is lost; where branches meet, they are
    brought to one scale; and in a weight's gradient the scale is undone in float32, at each use, so that a tied weight
    is right. What leaves the model carries the loss scale alone.

    Numerics. Factors are powers of two. Where nothing is rounded to zero or overflows, gradients are the same to the
    bit, whatever the factors are (`tests/scaling/test_layers_exact.py`; several uses of a tensor within one operation
    may be added up before its others). A float16 parameter gets float32 gradients, as its true gradient may be too
    small for float16; where the optimizer is not a `MasterWeights`, `unscale_` rounds them to float16 in the end.

    The factors are host numbers, chosen in `update`, which waits for the device. With the rule ``"spectra"`` the
    largest gradient of each module, over the last samples, lies `margin_binades` below the format's end; an overflow
    lowers the modules whose gradients broke, not the others. With ``"zhao"`` they follow the published rule
    (`docs/design/layer-scaling.md`), and an overflow lowers the loss scale.

    What torch does not support here is refused: torch.compile, fully_shard, tensor parallelism, torch.func transforms,
    second derivatives (run such a forward under `suspended`). A tensor that leaves the model other than as its output
    (stored on a module, say) is refused by `scale`; `release` it inside of forward.

    Args:
        model: whose modules are scaled: those with parameters of their own and no modules in them. In
            DistributedDataParallel, give it the wrapped model or the inner one.
        rule: ``"spectra"`` or ``"zhao"``.
        fmt: the element format that gradients pass through in the backward.
        init_scale: the loss scale, to which it also returns after it was lowered, by `growth_factor` each
            `growth_interval` clean steps.
        device: of the loss; by default the device of the model's first parameter.
        every: after how many steps the gradients are measured again. While factors move, they are in every step.
        margin_binades: how many powers of two are left above the largest gradient.
        slack_binades: by how much a factor may be lower than it could be, so that neighbours share one.
        history: over how many samples the largest gradient is taken.
        units: which modules have a scale, as ``units(name, module)``.

    >>> model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    >>> scaler = LayerScaler(model)
    >>> scaler.scale(model(torch.ones(2, 4)).sum()).backward()
    >>> optimizer = torch.optim.SGD(model.parameters())
    >>> scaler.step(optimizer); scaler.update()
    >>> scaler.outcome.stepped, sorted(scaler.scales)
    (True, ['0', '2'])
    """

    scales_layers = True
    set_scale_refusal = "a LayerScaler's layers keep their scales when the loss scale changes"

    def __init__(
        self,
        model: nn.Module,
        *,
        rule: RuleName = "spectra",
        fmt: object = "fp16",
        init_scale: float = 2.0**16,
        device: str | None = None,
        every: int = 10,
        margin_binades: int = 2,
        slack_binades: int = 4,
        history: int = 8,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 10,
        min_scale: float = FLOOR,
        units: Callable[[str, nn.Module], bool] | None = None,
        enabled: bool = True,
        process_group: Any = None,
    ) -> None:
        checks.one_of("LayerScaler", "rule", rule, _RULES)
        first = next(model.parameters(), None)
        device = device or ("cpu" if first is None else first.device.type)
        super().__init__(
            device, init_scale, enabled=enabled, min_scale=min_scale, max_scale=init_scale, process_group=process_group
        )
        self.set_growth_factor(growth_factor)
        self.set_backoff_factor(backoff_factor)
        self.set_growth_interval(growth_interval)
        self._every = arguments.check_interval("LayerScaler", "every", every)
        found = get_element(fmt, "LayerScaler")
        inner = unwrapped(model)
        self._layers = Layers(inner, found.name, units)
        self._now = init_scale  # the loss scale, on the host
        self._choice = LayerExponents(
            self._layers, rule=rule, fmt=found, margin=_binades("margin_binades", margin_binades),
            slack=_binades("slack_binades", slack_binades),
            history=arguments.check_interval("LayerScaler", "history", history), start=self._exponent,
        )  # fmt: skip
        self._steps = self._clean = 0
        self._broken: set[int] = set()
        self._lowered = False
        self._handles: list[Any] = []
        if self._enabled:
            self._attach(inner, wrapped=inner is not model)

    @classmethod
    def for_model(cls, model: nn.Module) -> Self:
        """Create a scaler of the model with its defaults."""
        return cls(model)

    # -- for users -----------------------------------------------------------------------------------------------------

    @property
    def scales(self) -> dict[str, float]:
        """The factor of each module, beside the loss scale: its gradients carry both."""
        return {name: math.ldexp(1.0, e) for name, e in zip(self._layers.names, self._layers.exponents, strict=True)}

    @property
    def layers_lowered(self) -> bool:
        """Whether the last step overflowed and modules' scales were lowered for it: the batch may do at these."""
        return self._lowered

    @property
    def spectra(self) -> dict[str, Spectrum]:
        """Spectra of each module's true gradients in the latest sample, without modules that did not run yet."""
        return {name: s for name, s in zip(self._layers.names, self._choice.seen, strict=True) if s is not None}

    def release(self, x: Tensor) -> Tensor:
        """The same tensor with the loss scale alone, for one that leaves the model other than as its output.

        Call it where the tensor is stored: ``self.auxiliary_loss = scaler.release(loss)``.
        """
        if not self._enabled or not x.requires_grad or x.is_leaf:
            return x
        found = behind(x)
        if len(found) > 1:
            raise StateError(
                f"release: expected a tensor made within one scaled forward; got one behind which the scales "
                f"{self._named(found)} meet. Release the tensors that it was made of."
            )
        alias = cast("Tensor", OutputShift.apply(x, ScaleChange(0, next(iter(found), 0), OUTSIDE)))
        mark(alias, 0)
        return alias

    def look_again(self, names: Iterable[str] | None = None) -> None:
        """Forgets what the gradients of these modules were (None: of all), and measures in the next step.

        Their scales follow then from what they are now, and not from the largest of the last samples: for a layer whose
        gradients have shrunk at once. Call it between two steps.
        """
        self._choice.forget(self._layers.names if names is None else names)
        self._layers.meter.drop()
        self._layers.meter.measuring = self._enabled

    def begin_with(self, scales: Mapping[str, float]) -> None:
        """Gives modules scales to begin with, powers of two, the loss scale included: what a recorded run has shown.

        They follow the gradients from the first step on. Raises `ArgumentError` for a module that has no scale here.
        """
        strange = sorted(set(scales) - set(self._layers.names))
        if strange:
            raise ArgumentError(
                f"LayerScaler.begin_with: expected modules that have a scale; got {', '.join(strange[:4])}. There are "
                f"{', '.join(self._layers.names[:6])}."
            )
        for name, scale in scales.items():
            self._choice.whole[self._layers.names.index(name)] = clamped(math.frexp(scale)[1] - 1)
        self._end(due=True)

    @contextlib.contextmanager
    def suspended(self) -> Generator[None]:
        """While it is open, forwards use the loss scale alone: for second derivatives, and for what else is refused."""
        before, self._layers.on = self._layers.on, False
        try:
            yield
        finally:
            self._layers.on = before

    def close(self) -> None:
        """Takes the hooks off the model, and lets float16 parameters have float16 gradients again."""
        while self._handles:
            self._handles.pop().remove()
        for parameter in self._halves():
            set_gradient_dtype(parameter, parameter.dtype)

    # -- hooks of the base ---------------------------------------------------------------------------------------------

    def _scaled(self, outputs: Any, copies: dict[torch.device, Tensor]) -> Any:
        if not self._layers.plain:
            for x in tensors_in(outputs):
                self._refuse_leaked(x)
        return super()._scaled(outputs, copies)

    def _start(self, device: torch.device) -> None:  # noqa: ARG002
        self._now = self._init_scale

    def _observe(self, optimizer: Any, found_inf: Tensor) -> None:
        if found_inf.item() and all(bool(loss.isfinite().all()) for loss in self._losses):  # else no scale is to blame
            self._broken |= broken_units(self._layers)
        if not hasattr(optimizer, "collect_gradients"):
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                if parameter.dtype is torch.float16 and parameter.grad is not None:
                    set_gradient_dtype(parameter, torch.float16)

    def _next_scale(self, found_inf: Tensor) -> float:
        overflowed = bool(found_inf.item())
        spectra = self._layers.meter.read() if self._layers.meter.measuring else None
        if overflowed and self._choice.rule == "spectra":
            self._choice.overflowed(self._broken)
        elif spectra is not None and not overflowed:
            self._choice.sample(spectra)
        self._now = self._next_loss_scale(overflowed)
        self._steps += 1
        before = list(self._choice.whole)
        moved = self._choice.choose(self._exponent) if overflowed or spectra is not None else False
        pairs = zip(before, self._choice.whole, strict=True)
        self._lowered = overflowed and any(after < earlier for earlier, after in pairs)
        self._end(due=overflowed or moved or self._steps % self._every == 0)
        return self._now

    def _next_loss_scale(self, overflowed: bool) -> float:
        self._clean = 0 if overflowed else self._clean + 1
        if overflowed:
            # All broken, or none: it happened between the loss and the model's output, where the loss scale is alone.
            lowers = self._choice.rule == "zhao" or len(self._broken) in (0, len(self._layers.from_the_loss()))
            return max(self._now * self._backoff_factor, self._min_scale) if lowers else self._now
        if self._clean % self._growth_interval == 0:
            return min(self._now * self._growth_factor, self._max_scale)
        return self._now

    def _scale_set(self) -> None:
        self._now = self.get_scale()
        self._layers.meter.drop()
        self._end(due=True)

    def _end(self, *, due: bool) -> None:
        self._layers.exponents = [whole - self._exponent for whole in self._choice.whole]
        self._layers.meter.measuring = due
        self._broken = set()
        for parameter in self._halves():
            set_gradient_dtype(parameter, torch.float32)

    def _save(self) -> dict[str, Any]:
        return {
            "layers": {
                **self._choice.save(), "steps": self._steps, "clean": self._clean, "due": self._layers.meter.measuring,
            }
        }  # fmt: skip

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes what `state_dict` gave, or another scaler's, which has no layers; raises before anything is changed."""
        if self._enabled and state_dict:
            self._choice.check(read_state(state_dict).extra.get("layers"))
        super().load_state_dict(state_dict)

    def _load(self, extra: dict[str, Any]) -> None:
        saved, self._now = extra.get("layers"), self.get_scale()
        if saved is not None:
            self._choice.load(saved)
            self._steps, self._clean = int(saved["steps"]), int(saved["clean"])
        self._end(due=saved is None or bool(saved["due"]))

    def __getstate__(self) -> dict[str, Any]:
        raise StateError(
            "LayerScaler: expected state_dict() to be saved; got a request to copy or pickle the scaler, which is tied "
            "to its model by hooks. Make a LayerScaler of the other model, and load the state into it."
        )

    # -- private -------------------------------------------------------------------------------------------------------

    @property
    def _exponent(self) -> int:
        """The loss scale's binade."""
        return math.frexp(self._now)[1] - 1

    def _halves(self) -> list[nn.Parameter]:
        return [p for p in self._layers.model.parameters() if WIDENS and p.dtype is torch.float16 and p.is_leaf]

    def _attach(self, model: nn.Module, *, wrapped: bool) -> None:
        for module in model.modules():
            hooks: Iterable[object] = cast("Any", module)._forward_pre_hooks.values()  # noqa: SLF001
            if any(isinstance(hook, Before) for hook in hooks):
                raise ArgumentError(
                    f"LayerScaler: expected a model without layer scales; got one with a {type(module).__name__} that "
                    "another LayerScaler scales. Close that one first, or give both parts to one scaler."
                )
        refuse_unsupported(model)
        keep_gradients_wide(model, wrapped=wrapped)
        for module in model.modules():
            before = module.register_forward_pre_hook(Before(self._layers), with_kwargs=True)
            after = module.register_forward_hook(After(self._layers), with_kwargs=True, always_call=True)
            self._handles += [before, after]
        self._layers.meter.measuring = True

    def _refuse_leaked(self, x: Tensor) -> None:
        if not x.requires_grad or x.is_leaf:
            return
        found = {exponent: unit for exponent, unit in behind(x).items() if exponent}
        if found:
            raise StateError(
                f"scale: expected a loss made of what the model returns; got one with a tensor that left it otherwise, "
                f"whose gradient would have to carry {self._named(found)} too. Return it from forward, or store "
                "scaler.release(tensor) in its place."
            )

    def _named(self, found: dict[int, int]) -> str:
        return ", ".join(f"2**{exponent} ({self._layers.name_of(unit)})" for exponent, unit in found.items())


def _binades(name: str, value: object) -> int:
    return checks.integer("LayerScaler", name, value, low=0, remedy="Use 2, for example.")
