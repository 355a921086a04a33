"""The exponent at which each operation of a forward works, and the shifts that bring its inputs there.

- An operation that writes into a tensor works at that tensor's exponent.
- In a unit's own code, an operation on a parameter or on several tensors works at the unit's exponent.
- Elsewhere (sums, products, concatenations between modules) at the lowest of its activations': where each of them
  overflows at its own exponent, none does at the lowest. What is made of parameters only comes along at any exponent.
- An operation on one tensor leaves it as it is.

A parameter is shifted at every use by itself, so each use's gradient is undone in float32 before uses are added up.
"""

from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import get_eval_frame_callback  # pyright: ignore[reportUnknownVariableType]
from torch.overrides import TorchFunctionMode

from plimsoll.errors import StateError, UnsupportedTensorError
from plimsoll.scaling.layerwise.edge_marks import OUTSIDE, ScaleChange, ScaleTag, behind, mark, marked, shifted
from plimsoll.scaling.layerwise.scaled_modules import Layers

# Getters that make a view; all others read a property.
_VIEWS = frozenset({"T", "mT", "H", "mH", "real", "imag"})
# Methods that speak of the tensor itself: an alias in its place would be another one.
_OF_THE_TENSOR = frozenset(
    {
        "__set__", "__delete__", "register_hook", "register_post_accumulate_grad_hook", "retain_grad", "requires_grad_",
        "detach_", "set_", "share_memory_", "__deepcopy__", "__reduce_ex__", "__reduce__", "__setstate__", "__hash__",
        "is_set_to", "rename_", "pin_memory",
    }
)  # fmt: skip
_DERIVATIVES: frozenset[Any] = frozenset({torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward})
_functorch: Any = torch._C._functorch  # noqa: SLF001  # type: ignore[attr-defined]
_LEAF = ScaleTag(0, OUTSIDE, derived=True, version=0)


class ForwardMode(TorchFunctionMode):
    """While it is active, every operation is one of a model with layer scales."""

    def __init__(self, layers: Layers, units: Iterable[int] = (OUTSIDE,), last: int = 0) -> None:
        super().__init__()
        self.layers = layers
        self.units = list(units)  # whose code runs, innermost last
        self.last = last  # the exponent of the latest operation on activations
        self.outer: ForwardMode | None = None  # what was active before it in its thread
        self.known_reruns = 0  # checkpointed functions that run without gradients now, and again in the backward
        self.busy = False  # while an operation runs: what it is made of is none of ours

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _passes(func) or not torch.is_grad_enabled():
            return func(*args, **kwargs)
        if func in _DERIVATIVES:
            raise StateError(
                f"LayerScaler: expected a forward without torch.autograd.{func.__name__} in it; got one, whose result "
                "would carry layer scales. Run it under `with scaler.suspended():`."
            )
        return self.run(getattr(func, "__name__", ""), func, args, kwargs)

    def run(self, name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs one operation, its inputs brought to one exponent, and marks what it makes."""
        found: dict[int, Tensor] = {}
        _collect(args, found)
        if kwargs:
            _collect(kwargs.values(), found)
        if not found:
            return func(*args, **kwargs)
        refuse_compiled()
        busy, self.busy = self.busy, True
        try:
            return self._run(name, func, list(found.values()), args, kwargs)
        finally:
            self.busy = busy

    def exponent_of(self, x: Tensor) -> int:
        """The exponent of a tensor that requires a gradient."""
        return self._mark_of(x).exponent

    def bring(self, x: Tensor, exponent: int) -> Tensor:
        """The tensor at that exponent, for a use outside of any unit."""
        edge = self._edge(x, self._mark_of(x), exponent, OUTSIDE)
        return x if edge is None else shifted(x, edge)

    def _run(self, name: str, func: Callable[..., Any], inputs: list[Tensor], args: Any, kwargs: Any) -> Any:
        marks, written = [self._mark_of(x) for x in inputs], _written(name, args)
        if len(inputs) == 1 and not inputs[0].is_leaf:
            return _marking(func(*args, **kwargs), written, marks[0])
        unit = self.units[-1]
        exponent, own = self._exponent(inputs, marks, unit, written)
        edges = {
            id(x): edge
            for x, known in zip(inputs, marks, strict=True)
            if x is not written and (edge := self._edge(x, known, exponent, unit if own else OUTSIDE)) is not None
        }
        if edges:
            # An alias for each place, so that gradients are added up in the order that they would be without. Functions
            # in Python may ask whether two arguments are the same tensor (attention does), and get the same alias.
            one_each = not isinstance(func, FunctionType)
            args, kwargs = replaced((args, kwargs), _aliasing(edges, one_each=one_each))
        active = [known for known in marks if not known.derived]
        derived = not own and not active  # a unit makes activations, also of data that requires no gradient
        if not derived:
            self.last = exponent
        origin = unit if own else active[0].unit if active else OUTSIDE
        return _marking(func(*args, **kwargs), written, ScaleTag(exponent, origin, derived=derived, version=0))

    def _exponent(
        self, inputs: list[Tensor], marks: list[ScaleTag], unit: int, written: Tensor | None
    ) -> tuple[int, bool]:
        """The exponent at which an operation works, and whether it is the unit's own."""
        for x, known in zip(inputs, marks, strict=True):
            if x is written:
                return known.exponent, False
        if unit != OUTSIDE:
            return self.layers.exponents[unit], True
        active = [known.exponent for known in marks if not known.derived]
        return (min(active) if active else self.last), False

    def _edge(self, x: Tensor, known: ScaleTag, exponent: int, unit: int) -> ScaleChange | None:
        """Return the change of scale between a tensor and its use; None without one."""
        shift, meter = known.exponent - exponent, self.layers.meter
        tap = None
        if meter.measuring and unit != OUTSIDE and (x.is_leaf or not (known.derived or known.unit == unit)):
            tap = meter.tap(unit, "weights" if x.is_leaf else "inputs")
        if shift == 0 and tap is None:
            return None
        _check_kind(x)
        return ScaleChange(exponent, shift, unit, widen=x.is_leaf, tap=tap)

    def _mark_of(self, x: Tensor) -> ScaleTag:
        if x.is_leaf:
            return _LEAF
        known = marked(x)
        if known is None:
            found = behind(x) or {0: OUTSIDE}
            if len(found) > 1:
                raise self._torn(x, found)
            ((exponent, unit),) = found.items()
            mark(x, exponent, unit)
            known = ScaleTag(exponent, unit, derived=False, version=0)
        return known

    def _torn(self, x: Tensor, found: dict[int, int]) -> StateError:
        places = ", ".join(f"2**{exponent} ({self.layers.name_of(unit)})" for exponent, unit in found.items())
        node = type(x.grad_fn).__name__
        return StateError(
            f"LayerScaler: expected every operation on tensors of several scales to be one that torch shows to a "
            f"TorchFunctionMode; got a tensor of shape {tuple(x.shape)} made by {node}, behind which gradients of the "
            f"scales {places} meet. Give a custom autograd function the output of one module, or let these modules "
            "share one scale: LayerScaler(units=...)."
        )


def tensors_in(value: Any) -> Iterable[Tensor]:
    """The tensors in arguments: themselves, or in lists, tuples and dictionaries."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in cast("Iterable[Any]", value):
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in cast("dict[Any, Any]", value).values():
            yield from tensors_in(item)


def _collect(values: Iterable[Any], found: dict[int, Tensor]) -> None:
    """As `tensors_in`, of those that require a gradient; several times as fast, as it runs at every operation."""
    for value in values:
        if isinstance(value, Tensor):
            if value.requires_grad:
                found[id(value)] = value
        elif isinstance(value, (list, tuple)):
            _collect(cast("Iterable[Any]", value), found)
        elif isinstance(value, dict):
            _collect(cast("dict[Any, Any]", value).values(), found)


def replaced(value: Any, alias_of: Callable[[Tensor], Tensor]) -> Any:
    """The same arguments with aliases in the place of their tensors."""
    if isinstance(value, Tensor):
        return alias_of(value)
    if isinstance(value, (list, tuple)):
        items = [replaced(item, alias_of) for item in cast("Iterable[Any]", value)]
        kind = cast("Any", type(cast("Any", value)))
        return kind(*items) if hasattr(kind, "_fields") else kind(items)
    if isinstance(value, dict):
        return {key: replaced(item, alias_of) for key, item in cast("dict[Any, Any]", value).items()}
    return value


def _aliasing(edges: dict[int, ScaleChange], *, one_each: bool) -> Callable[[Tensor], Tensor]:
    made: dict[int, Tensor] = {}

    def alias_of(x: Tensor) -> Tensor:
        if id(x) not in edges:
            return x
        if one_each or id(x) not in made:
            made[id(x)] = shifted(x, edges[id(x)])
        return made[id(x)]

    return alias_of


def refuse_compiled() -> None:
    """Raises while torch's compiler has the code: exponents are host numbers that change between steps."""
    if torch.compiler.is_compiling() or get_eval_frame_callback() not in (None, False):
        raise StateError(
            "LayerScaler: expected a model that runs eagerly; got one under torch.compile, which would freeze the "
            "layer scales of one step. Leave the model uncompiled, or use SpectralScaler, whose one scale is a tensor."
        )


def _passes(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return getattr(func.__self__, "__name__", "") not in _VIEWS
    return name in _OF_THE_TENSOR


def _written(name: str, args: Any) -> Tensor | None:
    """The tensor that the operation writes into: by torch's naming, its first argument or none."""
    in_place = (name.endswith("_") and not name.endswith("__")) or name == "__setitem__"
    in_place = in_place or (name.startswith("__i") and name not in {"__invert__", "__int__", "__index__", "__iter__"})
    return args[0] if in_place and args and isinstance(args[0], Tensor) else None


def _marking(result: Any, written: Tensor | None, made: ScaleTag) -> Any:
    made_or_written = (result,) if isinstance(result, Tensor) and written is None else tensors_in((result, written))
    for x in made_or_written:
        if x.requires_grad and not x.is_leaf:
            mark(x, made.exponent, made.unit, derived=made.derived)
    return result


def _check_kind(x: Tensor) -> None:
    if _functorch.peek_interpreter_stack() is not None:
        raise StateError(
            "LayerScaler: expected a forward without torch.func transforms (vmap, grad, vjp) around its modules; got "
            "one. Run it under `with scaler.suspended():`, which uses the loss scale alone."
        )
    if hasattr(x, "device_mesh"):
        raise UnsupportedTensorError(
            f"LayerScaler: expected plain tensors; got a DTensor ({x.dtype}, {tuple(x.shape)}), as fully_shard and "
            "tensor parallelism make. Use SpectralScaler or DynamicScaler there; DistributedDataParallel is supported."
        )
