"""Modules with separate scales, their state, and the spectra of their gradients."""

import functools
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from plimsoll import kernels
from plimsoll.errors import ArgumentError, UnsupportedTensorError
from plimsoll.spectrum import Source, Spectrum

# -- spectra of the gradients of each unit and place, in sampled steps -------------------------------------------------

Place = Literal["outputs", "inputs", "weights"]
PLACES: tuple[Place, ...] = ("outputs", "inputs", "weights")


class Meter:
    """Meter of gradients, with a bank on each device. Reading it waits for them."""

    def __init__(self, units: int, fmt: str) -> None:
        self.rows, self.fmt = len(PLACES) * units, fmt
        self.measuring = False
        self._banks: dict[torch.device, Tensor] = {}
        self._lock = threading.Lock()  # the engine has a thread for each device

    def tap(self, unit: int, place: Place) -> Callable[[Tensor], None]:
        """Return a hook that measures a gradient of a unit and place in sampled steps."""
        return functools.partial(self._take, len(PLACES) * unit + PLACES.index(place))

    def _take(self, row: int, g: Tensor) -> None:
        if not self.measuring:
            return
        plain = g.detach()
        plain = plain.coalesce().values() if plain.is_sparse else plain
        plain = torch.view_as_real(plain.resolve_conj()) if plain.is_complex() else plain
        with self._lock:
            bank = self._banks.get(plain.device)
            if bank is None:
                bank = self._banks[plain.device] = kernels.new_bank(self.rows, device=plain.device)
            kernels.measure_into([plain], bank, [row])

    def read(self) -> list[dict[Place, Spectrum]]:
        """Return the spectra of each unit's scaled gradients, and empty the rows."""
        banks = [bank.cpu().numpy().copy() for bank in self._banks.values()]
        self.drop()
        source = Source(self.fmt)
        rows = ([Spectrum.from_row(bank[row], source) for bank in banks] for row in range(self.rows))
        merged = [sum(spectra, Spectrum.empty()) for spectra in rows]
        return [
            dict(zip(PLACES, merged[start : start + len(PLACES)], strict=True))
            for start in range(0, self.rows, len(PLACES))
        ]

    def drop(self) -> None:
        """Drop all measurements since the last reading."""
        for bank in self._banks.values():
            bank.zero_()


# -- modules -----------------------------------------------------------------------------------------------------------

WIDENS = hasattr(torch.Tensor, "grad_dtype")  # from torch 2.10 on a gradient may have another dtype than its tensor

Chooses = Callable[[str, nn.Module], bool]


class Layers:
    """Units of one model: their names, exponents and order of calls."""

    def __init__(self, model: nn.Module, fmt: str, units: Chooses | None) -> None:
        self.model = model
        chooses = units or is_unit
        named = cast("Iterable[tuple[str, nn.Module]]", model.named_modules())
        chosen = {name: module for name, module in named if chooses(name, module)}
        if not chosen:
            raise ArgumentError(
                f"LayerScaler: expected a model with modules to scale; got {type(model).__name__}, of which none is "
                "chosen. Choose some with units=lambda name, module: ..., or use DynamicScaler."
            )
        self.names: tuple[str, ...] = tuple(name or "model" for name in chosen)
        self.modules: tuple[nn.Module, ...] = tuple(chosen.values())
        self.number = {id(module): index for index, module in enumerate(self.modules)}
        self.exponents = [0] * len(self.names)
        self.meter = Meter(len(self.names) + 1, fmt)  # one more for the model's output
        self.on = True
        self.quiet: set[int] = set()  # modules that ran without gradients within a forward with gradients
        self._calls, self._clock = [0] * len(self.names), 0

    @property
    def loss(self) -> int:
        """Number of the unit that stands for the model's output."""
        return len(self.names)

    @property
    def plain(self) -> bool:
        """True if nothing is to be done: no layer has a scale, and no sample is due."""
        return not self.meter.measuring and not any(self.exponents)

    def called(self, unit: int) -> None:
        """Note that a unit's forward starts."""
        self._clock += 1
        self._calls[unit] = self._clock

    def from_the_loss(self) -> list[int]:
        """Return the units in the order of a backward, without those never called."""
        called = [unit for unit, when in enumerate(self._calls) if when]
        return sorted(called, key=lambda unit: -self._calls[unit])

    def set_order(self, units: list[int]) -> None:
        """Restore that order."""
        self._clock = len(units)
        self._calls = [0] * len(self.names)
        for place, unit in enumerate(units):
            self._calls[unit] = self._clock - place

    def name_of(self, unit: int) -> str:
        """Return the unit's name, for messages."""
        return self.names[unit] if 0 <= unit < len(self.names) else "outside of any module with a scale"

    def named(self, units: dict[int, int]) -> str:
        """Return scales by exponent with their units, for messages."""
        return ", ".join(f"2**{exponent} ({self.name_of(unit)})" for exponent, unit in units.items())

    def check_names(self, operation: str, names: Iterable[str]) -> None:
        """Raise `ArgumentError` for names of modules without a scale."""
        unknown = sorted(set(names) - set(self.names))
        if unknown:
            raise ArgumentError(
                f"{operation}: expected modules that have a scale; got {', '.join(unknown[:4])}. There are "
                f"{', '.join(self.names[:6])}."
            )


def is_unit(name: str, module: nn.Module) -> bool:  # noqa: ARG001  (a custom choice gets the name too)
    """Return whether a module has a scale by default: leaves, and attention."""
    own = any(True for _ in module.parameters(recurse=False))
    inner = [child for child, _ in module.named_children() if child != "parametrizations"]
    return (own or parametrize.is_parametrized(module)) and (isinstance(module, nn.MultiheadAttention) or not inner)


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside of DistributedDataParallel, or the model itself."""
    parallel: Any = getattr(sys.modules.get("torch.nn.parallel"), "DistributedDataParallel", None)
    return cast("nn.Module", model.module) if parallel is not None and isinstance(model, parallel) else model


def refuse_unsupported(model: Any) -> None:
    """Raise for a model that cannot have layer scales."""
    for name, module in model.named_modules():
        refuse_sharded(module)
        own_compile = getattr(module, "_compiled_call_impl", None)
        if type(module).__name__ == "OptimizedModule" or own_compile is not None:
            raise ArgumentError(
                f"LayerScaler: expected a model that runs eagerly; got {name or 'model'}, compiled by torch.compile, "
                "which would freeze the layer scales of one step. Give the model uncompiled, or use SpectralScaler."
            )
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "device_mesh"):
            raise UnsupportedTensorError(
                f"LayerScaler: expected plain parameters; got {name}, a DTensor of fully_shard or tensor parallelism. "
                "Use SpectralScaler or DynamicScaler there; DistributedDataParallel is supported."
            )


def refuse_sharded(module: nn.Module) -> None:
    """Raise for a module under fully_shard, which reduces gradients in 16 bits."""
    if hasattr(type(module), "set_reshard_after_backward"):
        raise UnsupportedTensorError(
            f"LayerScaler: expected a model without fully_shard; got {type(module).__name__}, whose gradients are "
            "reduced before they could be float32. Use SpectralScaler or DynamicScaler there; DistributedDataParallel "
            "is supported."
        )


def keep_gradients_wide(model: nn.Module, *, wrapped: bool) -> None:
    """Allow float32 gradients of float16 parameters, if torch supports it."""
    # A weight's gradient without its layer's scale may underflow in float16.
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
    """Set the dtype of a parameter's gradients, with that of the current one."""
    present, untyped = parameter.grad, cast("Any", parameter)
    if untyped.grad_dtype is not dtype:
        untyped.grad = None
        untyped.grad_dtype = dtype
        untyped.grad = None if present is None else present.to(dtype)


def broken_units(layers: Layers) -> set[int]:
    """Return the units with a non-finite gradient. Waits for the device."""
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
    for on_device in counts.values():
        totals = [a + b for a, b in zip(totals, cast("list[int]", on_device.tolist()), strict=True)]
    broken: set[int] = set()
    beyond = False
    for unit in order:
        # A unit without gradients (a frozen one, for example) counts like the next one towards the loss.
        beyond = totals[unit] > 0 if unit in seen else beyond
        if beyond:
            broken.add(unit)
    return broken


def _gradients(parameters: Iterable[Tensor]) -> Iterable[Tensor]:
    for parameter in parameters:
        g = parameter.grad
        if g is not None:
            plain = g.coalesce().values() if g.is_sparse else g
            plain = torch.view_as_real(plain.resolve_conj()) if plain.is_complex() else plain
            yield plain.detach()
