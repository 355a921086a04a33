"""`LayerScaler`: a power-of-two scale for each layer besides the loss scale."""

import contextlib
import math
from collections.abc import Callable, Generator, Iterable, Mapping
from numbers import Real
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from plimsoll import checks
from plimsoll.errors import ArgumentError, StateError
from plimsoll.scaling import arguments
from plimsoll.scaling.base import FLOOR, LossScaler
from plimsoll.scaling.layerwise.exponents import LayerExponents, RuleName, clamped
from plimsoll.scaling.layerwise.forward_mode import OUTSIDE, OutputShift, ScaleChange, behind, mark, tensors_in
from plimsoll.scaling.layerwise.scaled_forward import After, Before
from plimsoll.scaling.layerwise.scaled_modules import (
    WIDENS,
    Layers,
    broken_units,
    keep_gradients_wide,
    refuse_unsupported,
    set_gradient_dtype,
    unwrapped,
)
from plimsoll.spectrum import Spectrum

_RULES = ("spectra", "zhao")


class LayerScaler(LossScaler, name="layer"):
    """Loss scaler with an additional power of two for each layer's backward.

    One loss scale moves all gradients alike. If the gradients of all layers together span more binades than the format
    has, no single scale fits them, and `SpectralScaler` warns. Here the gradients inside each module have the module's
    own scale. Between modules they are multiplied by the ratio, before they underflow. Where branches meet, they get
    one scale. In a weight's gradient the scale is removed in float32, at each use, so that tied weights are right.
    Gradients outside of the model have the loss scale alone.

    Numerics. Factors are powers of two. If no value underflows or overflows, gradients are the same bit for bit with
    any factors (`tests/scaling/test_layers_exact.py`), except that several uses of a tensor in one operation may be
    added before its other uses. A float16 parameter gets float32 gradients, because its true gradient may be too small
    for float16. `unscale_` rounds them to float16 unless the optimizer is a `MasterWeights`.

    The factors are host numbers, chosen in `update`. Both it and `unscale_` wait for the device. With the rule
    ``"spectra"`` the largest gradient of each module over the last samples is `margin_binades` below the format's end.
    An overflow lowers the modules with non-finite gradients; if these are all or none, it lowers the loss scale too.
    With ``"zhao"`` they follow the published rule (`docs/design/layer-scaling.md`), and an overflow lowers the loss
    scale.

    Torch does not support these here, and they are refused: torch.compile, fully_shard, tensor parallelism, torch.func
    transforms, second derivatives (run such a forward under `suspended`). `scale` refuses a tensor that leaves the
    model otherwise than as its output, for example as an attribute: `release` it inside of forward.

    Args:
        model: Model whose modules are scaled, by default those with parameters and without inner modules. Under
            DistributedDataParallel, the wrapped model or the inner one.
        rule: ``"spectra"`` or ``"zhao"``. Default: ``"spectra"``.
        fmt: Element format of the gradients in the backward. Default: ``"fp16"``.
        init_scale: Loss scale. After an overflow it returns to it. Default: 2**16.
        device: Type of the device of the loss. Default: that of the model's first parameter.
        every: Number of steps from one measurement of the gradients to the next. The step after an overflow, or after a
            factor changed by more than 2 binades, is measured too. Default: 10.
        margin_binades: Binades above the largest gradient. Default: 2.
        slack_binades: Binades by which a factor may be lower than possible, so that neighbours share one. Default: 4.
        history: Number of samples over which the largest gradient is taken. Default: 8.
        growth_factor: Factor by which the loss scale returns to `init_scale`. Default: 2.
        backoff_factor: Factor by which an overflow lowers the loss scale. Default: 0.5.
        growth_interval: Number of clean steps before the loss scale grows. Default: 10.
        min_scale: Smallest loss scale. Default: 2**-14.
        units: Choice of the modules with a scale, as ``units(name, module)``. Default: leaf modules with parameters.
        enabled: Whether anything is scaled. Default: yes.
        process_group: Ranks that skip together.

    Raises:
        ArgumentError: An argument is out of range, or the model cannot have layer scales.
        UnsupportedTensorError: Parameters are sharded, or torch cannot widen their gradients.

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
        if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ArgumentError(f"LayerScaler: expected a torch.nn.Module; got {type(model).__name__}. Give the model.")
        checks.one_of("LayerScaler", "rule", rule, _RULES)
        first = next(model.parameters(), None)
        device = device or ("cpu" if first is None else first.device.type)
        arguments.check_measures("LayerScaler", device)
        super().__init__(
            device, init_scale, enabled=enabled, min_scale=min_scale, max_scale=init_scale, process_group=process_group
        )
        self.set_growth_factor(growth_factor)
        self.set_backoff_factor(backoff_factor)
        self.set_growth_interval(growth_interval)
        self._every = arguments.check_interval("LayerScaler", "every", every)
        element = arguments.check_format("LayerScaler", "fmt", fmt)
        if units is not None and not callable(units):  # pyright: ignore[reportUnnecessaryComparison]
            raise ArgumentError(f"LayerScaler: expected units as a function of a name and a module; got {units!r}.")
        inner = unwrapped(model)
        self._layers = Layers(inner, element.name, units)
        self._now = self._init_scale  # the loss scale, on the host
        self._choice = LayerExponents(
            self._layers,
            rule=rule,
            fmt=element,
            margin=_binades("margin_binades", margin_binades),
            slack=_binades("slack_binades", slack_binades),
            history=arguments.check_interval("LayerScaler", "history", history),
            start=self._exponent,
        )
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
        """Factor of each module. Its gradients have this factor and the loss scale."""
        return {name: math.ldexp(1.0, e) for name, e in zip(self._layers.names, self._layers.exponents, strict=True)}

    @property
    def layers_lowered(self) -> bool:
        """True if the last step's overflow lowered modules' scales.

        The batch may succeed if it is repeated.
        """
        return self._lowered

    @property
    def spectra(self) -> dict[str, Spectrum]:
        """Spectra of the modules' true gradients in the latest sample."""
        return {name: s for name, s in zip(self._layers.names, self._choice.latest, strict=True) if s is not None}

    def release(self, x: Tensor) -> Tensor:
        """Return a tensor at the loss scale alone, to leave the model on another way.

        Call it where the tensor is stored: ``self.auxiliary_loss = scaler.release(loss)``.

        Raises:
            StateError: Gradients of several scales meet behind the tensor.
        """
        if not self._enabled or not x.requires_grad or x.is_leaf:
            return x
        units = behind(x)
        if len(units) > 1:
            raise StateError(
                f"release: expected a tensor of one scaled forward; got one behind which the scales "
                f"{self._layers.named(units)} meet. Release the tensors that it was computed from."
            )
        alias = cast("Tensor", OutputShift.apply(x, ScaleChange(0, next(iter(units), 0), OUTSIDE)))
        mark(alias, 0)
        return alias

    def look_again(self, names: Iterable[str] | None = None) -> None:
        """Drop the samples of these modules, and measure in the next step.

        Their scales then follow from the next sample and not from the largest of the last ones. Use it if gradients of
        a layer have shrunk at once. Call it between two steps.

        Args:
            names: Names of modules. Default: all.

        Raises:
            ArgumentError: A module has no scale.
        """
        self._choice.forget(self._layers.names if names is None else names)
        self._layers.meter.drop()
        self._layers.meter.measuring = self._enabled

    def begin_with(self, scales: Mapping[str, float]) -> None:
        """Set initial scales of modules, for example those of a recorded run.

        They follow the gradients from the first step on.

        Args:
            scales: Powers of two by module, with the loss scale included.

        Raises:
            ArgumentError: A module has no scale, or a scale is no power of two.
        """
        self._layers.check_names("LayerScaler.begin_with", scales)
        for name, scale in scales.items():
            if not isinstance(scale, Real) or not 0 < scale < math.inf or math.frexp(scale)[0] != 0.5:  # pyright: ignore[reportUnnecessaryIsInstance]
                raise ArgumentError(
                    f"LayerScaler.begin_with: expected powers of two; got {scale!r} for {name}. Use 2.0**16, say."
                )
        for name, scale in scales.items():
            self._choice.whole[self._layers.names.index(name)] = clamped(math.frexp(scale)[1] - 1)
        self._end(due=True)

    @contextlib.contextmanager
    def suspended(self) -> Generator[None]:
        """Let forwards use the loss scale alone, for second derivatives and the like."""
        before, self._layers.on = self._layers.on, False
        try:
            yield
        finally:
            self._layers.on = before

    def close(self) -> None:
        """Remove the hooks, and give float16 parameters float16 gradients again."""
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
        # A loss that is not finite itself says nothing of the layers' scales.
        if found_inf.item() and all(bool(loss.isfinite().all()) for loss in self._losses):
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
            # If all units or none are affected, the overflow is between the loss and the model's output, where only the
            # loss scale applies.
            all_or_none = not self._broken or len(self._broken) == len(self._layers.from_the_loss())
            lowers = self._choice.rule == "zhao" or all_or_none
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
        attached = bool(self._handles)  # not if disabled or closed
        self._layers.meter.measuring = due and attached
        self._broken = set()
        for parameter in self._halves() if attached else ():
            set_gradient_dtype(parameter, torch.float32)

    def _save(self) -> dict[str, Any]:
        due = self._layers.meter.measuring
        return {"layers": {**self._choice.save(), "steps": self._steps, "clean": self._clean, "due": due}}

    def _load(self, extra: dict[str, Any]) -> None:
        saved, self._now = extra.get("layers"), self.get_scale()
        if saved is not None:
            self._choice.check(saved)
            self._choice.load(saved)
            self._steps, self._clean = int(saved["steps"]), int(saved["clean"])
        self._end(due=saved is None or bool(saved["due"]))

    def __getstate__(self) -> dict[str, Any]:
        raise StateError(
            "LayerScaler: expected state_dict() to be saved; got a request to copy or pickle the scaler, which has "
            "hooks on its model. Create a LayerScaler of the other model, and load the state into it."
        )

    # -- private -------------------------------------------------------------------------------------------------------

    @property
    def _exponent(self) -> int:
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
        units = {exponent: unit for exponent, unit in behind(x).items() if exponent}
        if units:
            raise StateError(
                f"scale: expected a loss computed from the model's output; got one with a tensor that left the model "
                f"otherwise, whose gradient would need the scale {self._layers.named(units)} too. Return it from "
                "forward, or store scaler.release(tensor) in its place."
            )


def _binades(name: str, value: object) -> int:
    return checks.integer("LayerScaler", name, value, low=0, remedy="Use 2, for example.")
