"""Modules that have a scale of their own, and the state of each."""

import sys
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from plimsoll import kernels
from plimsoll.errors import ArgumentError, UnsupportedTensorError
from plimsoll.scaling.layerwise.gradient_meter import Meter

WIDENS = hasattr(torch.Tensor, "grad_dtype")  # torch 2.10: a gradient's dtype may be another than its tensor's

Chooses = Callable[[str, nn.Module], bool]


class Layers:
    """The units of one model: their names, their exponents, and when they were last called."""

    def __init__(self, model: nn.Module, fmt: str, units: Chooses | None) -> None:
        self.model = model
        chooses = units or is_unit
        named = cast("Iterable[tuple[str, nn.Module]]", model.named_modules())
        chosen = {name: module for name, module in named if chooses(name, module)}
        if not chosen:
            raise ArgumentError(
                f"LayerScaler: expected a model with modules to scale; got {type(model).__name__}, of which none was "
                "chosen. Choose some with units=lambda name, module: ..., or use DynamicScaler."
            )
        self.names: tuple[str, ...] = tuple(name or "model" for name in chosen)
        self.modules: tuple[nn.Module, ...] = tuple(chosen.values())
        self.number = {id(module): index for index, module in enumerate(self.modules)}
        self.exponents = [0] * len(self.names)
        self.meter = Meter(len(self.names) + 1, fmt)  # and one for what the model returns
        self.on = True
        self.quiet: set[int] = set()  # modules that ran without gradients within a forward with gradients
        self._calls, self._clock = [0] * len(self.names), 0

    @property
    def loss(self) -> int:
        """The number that stands for what the model returns."""
        return len(self.names)

    @property
    def plain(self) -> bool:
        """Whether nothing needs to be done: all scales are the loss scale, and this step is not sampled."""
        return not self.meter.measuring and not any(self.exponents)

    def called(self, unit: int) -> None:
        """Notes that a unit's forward begins."""
        self._clock += 1
        self._calls[unit] = self._clock

    def from_the_loss(self) -> list[int]:
        """The units in the order in which a backward comes to them; without those never called."""
        called = [unit for unit, when in enumerate(self._calls) if when]
        return sorted(called, key=lambda unit: -self._calls[unit])

    def set_order(self, units: list[int]) -> None:
        """Restores that order."""
        self._clock = len(units)
        self._calls = [0] * len(self.names)
        for place, unit in enumerate(units):
            self._calls[unit] = self._clock - place

    def name_of(self, unit: int) -> str:
        """The unit's name, for messages."""
        return self.names[unit] if 0 <= unit < len(self.names) else "outside of any module with a scale"


def is_unit(name: str, module: nn.Module) -> bool:  # noqa: ARG001  (what a user's own choice is given)
    """Whether a module has a scale by default: it has parameters and no modules in it, or is an attention."""
    own = any(True for _ in module.parameters(recurse=False))
    inner = [child for child, _ in module.named_children() if child != "parametrizations"]
    return (own or parametrize.is_parametrized(module)) and (isinstance(module, nn.MultiheadAttention) or not inner)


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside of DistributedDataParallel, or the model itself."""
    parallel: Any = getattr(sys.modules.get("torch.nn.parallel"), "DistributedDataParallel", None)
    return cast("nn.Module", model.module) if parallel is not None and isinstance(model, parallel) else model


def refuse_unsupported(model: Any) -> None:
    """Raises for a model that cannot have layer scales."""
    for name, module in model.named_modules():
        refuse_sharded(module)
        compiled = (
            type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None
        )
        if compiled:
            raise ArgumentError(
                f"LayerScaler: expected a model that runs eagerly; got {name or 'model'}, compiled by torch.compile, "
                "which would freeze the layer scales of one step. Give the model uncompiled, or use SpectralScaler."
            )
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "device_mesh"):
            raise UnsupportedTensorError(
                f"LayerScaler: expected plain parameters; got {name}, a DTensor, as fully_shard and tensor parallelism "
                "make. Use SpectralScaler or DynamicScaler there; DistributedDataParallel is supported."
            )


def refuse_sharded(module: nn.Module) -> None:
    """Raises for a module that fully_shard has taken: it reduces gradients in the parameters' dtype."""
    if hasattr(type(module), "set_reshard_after_backward"):
        raise UnsupportedTensorError(
            f"LayerScaler: expected a model without fully_shard; got {type(module).__name__}, whose gradients are "
            "reduced before they could be float32. Use SpectralScaler or DynamicScaler there; DistributedDataParallel "
            "is supported."
        )


def keep_gradients_wide(model: nn.Module, *, wrapped: bool) -> None:
    """Allow float32 gradients of float16 parameters.

    A weight's gradient without its layer's scale may underflow in float16.

    Raises `UnsupportedTensorError` where torch cannot.
    """
    for name, parameter in model.named_parameters():
        if parameter.dtype is not torch.float16 or not parameter.is_leaf:
            continue
        if wrapped or not WIDENS:
            why = "DistributedDataParallel, whose buckets are float16" if wrapped else f"torch {torch.__version__}"
            raise UnsupportedTensorError(
                f"LayerScaler: expected float32 or bfloat16 parameters with {why}; got {name} (torch.float16), whose "
                "gradient without its layer's scale may be too small for float16. Keep the parameters in float32 and "
                "run the model under autocast"
                + ("." if wrapped else ", or use torch 2.10 or newer, where gradients may be wider.")
            )
        set_gradient_dtype(parameter, torch.float32)


def set_gradient_dtype(parameter: Tensor, dtype: torch.dtype) -> None:
    """Set the dtype of a parameter's gradients, of the current one too."""
    present, given = parameter.grad, cast("Any", parameter)
    if given.grad_dtype is not dtype:
        given.grad = None
        given.grad_dtype = dtype
        given.grad = None if present is None else present.to(dtype)


def broken_units(layers: Layers) -> set[int]:
    """The units with a non-finite gradient; reads all of their parameters', so it is for steps known to be skipped.

    A unit without gradients of its own (frozen, say) is taken to be as the next one nearer to the loss.
    """
    order = layers.from_the_loss()
    counts: dict[torch.device, Tensor] = {}
    seen: set[int] = set()
    for unit in order:
        for values in _gradients(layers.modules[unit].parameters()):
            seen.add(unit)
            if values.device not in counts:
                counts[values.device] = kernels.new_counts(len(layers.names), values.device)
            kernels.count_nonfinite_into([values], counts[values.device], unit)
    totals = [0] * len(layers.names)
    for these in counts.values():
        found = cast("list[int]", these.tolist())
        totals = [a + b for a, b in zip(totals, found, strict=True)]
    broken: set[int] = set()
    beyond = False
    for unit in order:
        beyond = totals[unit] > 0 if unit in seen else beyond
        if beyond:
            broken.add(unit)
    return broken


def _gradients(parameters: Iterable[Tensor]) -> Iterable[Tensor]:
    for parameter in parameters:
        g = parameter.grad
        if g is not None:
            plain = g.coalesce().values() if g.is_sparse else g
            plain = torch.view_as_real(plain) if plain.is_complex() else plain
            yield plain.detach()
