"""Exponent of each operation of a forward, and the shifts of its inputs.

- An operation that writes into a tensor works at that tensor's exponent.
- In a unit's own code, an operation on a parameter or on several tensors works at the unit's exponent.
- Elsewhere (sums, products, concatenations between modules) it works at the lowest exponent of its activations. The
  gradients do not overflow at their own exponents, so none does at the lowest. A tensor that is computed from
  parameters only can take any exponent.
- An operation on one tensor keeps its exponent.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import get_eval_frame_callback  # pyright: ignore[reportUnknownVariableType]
from torch.overrides import TorchFunctionMode

from plimsoll.errors import StateError, UnsupportedTensorError
from plimsoll.kernels.dtypes import SIXTEEN_BIT
from plimsoll.kernels.operators.checks import is_transformed
from plimsoll.scaling.layerwise.scaled_modules import Layers

# -- tag on a tensor, and the function that changes its exponent -------------------------------------------------------

# A tensor has the *exponent* k if its gradient arrives multiplied by ``scale * 2**k``. The exponent is known when the
# tensor is created, and a tag on the tensor records it. If an operation works at another exponent than its input has,
# the input passes through a `Shift`, which does nothing forward and multiplies by a power of two backward. Any
# exponents give the same gradients in exact arithmetic. They only decide which values fit into a narrow format on the
# way.

OUTSIDE = -1  # number of a unit for code that belongs to none
_MARK = "_plimsoll_exponent"


class ScaleTag(NamedTuple):
    """Exponent and origin of a tensor that requires a gradient."""

    exponent: int
    unit: int  # unit that has this exponent, or OUTSIDE
    derived: bool  # computed from parameters only, so that it can take any exponent of activations
    version: int  # of the tensor when it was tagged: a later write invalidates the tag


class ScaleChange(NamedTuple):
    """Change of a gradient between a tensor and a use of it at `exponent`."""

    exponent: int
    shift: int  # the gradient is multiplied by 2**shift
    unit: int = OUTSIDE
    widen: bool = False  # to float32, for the gradient of a parameter
    tap: Callable[[Tensor], None] | None = None  # receives the gradient as it arrives


class Shift(torch.autograd.Function):
    """Identity whose gradient is multiplied by a power of two."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, edge: ScaleChange) -> Tensor:
        """Return a view of the tensor."""
        ctx.edge = edge
        return x.view_as(x)  # a view, so that torch refuses a write that would bypass it

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        """Multiply the gradient by the edge's power of two."""
        return _pulled(ctx.edge, grad_outputs[0]), None


class OutputShift(Shift):
    """`Shift` for the output of a model, which may be written to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, edge: ScaleChange) -> Tensor:
        """Return the values without their graph."""
        ctx.edge = edge
        return x.detach()


def mark(x: Tensor, exponent: int, unit: int = OUTSIDE, *, derived: bool = False) -> None:
    """Tag a tensor with its exponent."""
    setattr(x, _MARK, (exponent, unit, derived, _version(x)))  # plain values: tensors pickle with their attributes


def marked(x: Tensor) -> ScaleTag | None:
    """Return the tag, if there is a valid one."""
    tag = getattr(x, _MARK, None)
    return ScaleTag(*tag) if tag is not None and tag[3] == _version(x) else None


def _version(x: Tensor) -> int:
    return cast("Any", x)._version  # noqa: SLF001  (torch has no public name for it)


def edge_of(node: object) -> ScaleChange | None:
    """Return the edge of an autograd node, if the node is a `Shift`."""
    edge = getattr(node, "edge", None)
    return edge if isinstance(edge, ScaleChange) else None


def _pulled(edge: ScaleChange, g: Tensor) -> Tensor:
    if torch.is_grad_enabled():
        raise StateError(
            "LayerScaler: expected a backward without create_graph=True; got one through a model with layer scales, "
            "which second derivatives would have wrong. Run the forward of a gradient penalty under `with "
            "scaler.suspended():`."
        )
    if edge.tap is not None:
        edge.tap(g)
    if edge.widen and g.dtype in SIXTEEN_BIT:
        wide = g.float()
        return wide.mul_(math.ldexp(1.0, edge.shift)) if edge.shift else wide
    # The kernel has the factor in float32 or float64 for any dtype of g, so the product is rounded once.
    return g * math.ldexp(1.0, edge.shift) if edge.shift else g


def shifted(x: Tensor, edge: ScaleChange) -> Tensor:
    """Return the tensor for a use at the edge's exponent."""
    # Not by `Function.apply`, which is patched during a forward. It also checks for torch.func transforms, which
    # `forward_mode` has done.
    base: Any = super(torch.autograd.Function, Shift)
    return cast("Tensor", base.apply(x, edge))


def behind(x: Tensor) -> dict[int, int]:
    """Return the exponents in a tensor's graph, each with a unit. A leaf has 0."""
    units: dict[int, int] = {}
    for edge in _nearest(x.grad_fn):
        units.setdefault(edge.exponent if edge else 0, edge.unit if edge else OUTSIDE)
    return units


def _nearest(start: Any) -> Iterator[ScaleChange | None]:
    """Yield the nearest edges behind a node, and None for each leaf before an edge."""
    pending, seen = [start], {start}
    while pending:
        node = pending.pop()
        edge = edge_of(node)
        if edge is not None or hasattr(node, "variable"):
            yield edge
            continue
        for following, _ in getattr(node, "next_functions", ()):
            if following is not None and following not in seen:
                seen.add(following)
                pending.append(following)


# -- mode --------------------------------------------------------------------------------------------------------------

# Getters that create a view. All others read a property.
_VIEWS = frozenset({"T", "mT", "H", "mH", "real", "imag"})
# Methods that act on the tensor object itself, which an alias must not replace.
_OF_THE_TENSOR = frozenset(
    """
    __set__ __delete__ register_hook register_post_accumulate_grad_hook retain_grad requires_grad_ detach_ set_
    share_memory_ __deepcopy__ __reduce_ex__ __reduce__ __setstate__ __hash__ is_set_to rename_ pin_memory
    """.split()
)
_DERIVATIVES: frozenset[Any] = frozenset({torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward})
_LEAF = ScaleTag(0, OUTSIDE, derived=True, version=0)


class ForwardMode(TorchFunctionMode):
    """Torch-function mode under which every operation respects layer scales."""

    def __init__(self, layers: Layers, units: Iterable[int] = (OUTSIDE,), last: int = 0) -> None:
        super().__init__()
        self.layers = layers
        self.units = list(units)  # whose code runs, innermost last
        self.last = last  # exponent of the latest operation on activations
        self.outer: ForwardMode | None = None  # mode that was active before it in its thread
        self.known_reruns = 0  # checkpointed functions that run without gradients now, and again in the backward
        self.busy = False  # set while an operation runs, whose inner operations are ignored

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _passes(func) or not torch.is_grad_enabled():
            return func(*args, **kwargs)
        if func in _DERIVATIVES:
            raise StateError(
                f"LayerScaler: expected a forward without torch.autograd.{func.__name__} in it; got one, whose result "
                "would contain layer scales. Run it under `with scaler.suspended():`."
            )
        return self.run(getattr(func, "__name__", ""), func, args, kwargs)

    def run(self, name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run an operation with its inputs at one exponent, and tag its results."""
        inputs: dict[int, Tensor] = {}
        _collect(args, inputs)
        if kwargs:
            _collect(kwargs.values(), inputs)
        if not inputs:
            return func(*args, **kwargs)
        refuse_compiled()
        busy, self.busy = self.busy, True
        try:
            return self._run(name, func, list(inputs.values()), args, kwargs)
        finally:
            self.busy = busy

    def exponent_of(self, x: Tensor) -> int:
        """Return the exponent of a tensor that requires a gradient."""
        return self._mark_of(x).exponent

    def bring(self, x: Tensor, exponent: int) -> Tensor:
        """Return the tensor at an exponent, for a use outside of any unit."""
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
            # An alias for each argument, so that gradients are added in the same order as without aliases. Functions in
            # Python may compare arguments by identity (attention does), so they get one alias for equal arguments.
            shared = isinstance(func, FunctionType)
            args, kwargs = replaced((args, kwargs), _aliasing(edges, shared=shared))
        active = [known for known in marks if not known.derived]
        derived = not own and not active  # results of a unit are activations, even from data without gradient
        if not derived:
            self.last = exponent
        origin = unit if own else active[0].unit if active else OUTSIDE
        return _marking(func(*args, **kwargs), written, ScaleTag(exponent, origin, derived=derived, version=0))

    def _exponent(
        self, inputs: list[Tensor], marks: list[ScaleTag], unit: int, written: Tensor | None
    ) -> tuple[int, bool]:
        """Return the exponent of an operation, and whether it is the unit's own."""
        for x, known in zip(inputs, marks, strict=True):
            if x is written:
                return known.exponent, False
        if unit != OUTSIDE:
            return self.layers.exponents[unit], True
        active = [known.exponent for known in marks if not known.derived]
        return (min(active) if active else self.last), False

    def _edge(self, x: Tensor, known: ScaleTag, exponent: int, unit: int) -> ScaleChange | None:
        """Return the change of scale between a tensor and its use, or None."""
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
            units = behind(x) or {0: OUTSIDE}
            if len(units) > 1:
                raise self._several_scales(x, units)
            ((exponent, unit),) = units.items()
            mark(x, exponent, unit)
            known = ScaleTag(exponent, unit, derived=False, version=0)
        return known

    def _several_scales(self, x: Tensor, units: dict[int, int]) -> StateError:
        node = type(x.grad_fn).__name__
        return StateError(
            f"LayerScaler: expected every operation on tensors of several scales to call a TorchFunctionMode; got a "
            f"tensor of shape {tuple(x.shape)} made by {node}, behind which gradients of the scales "
            f"{self.layers.named(units)} meet. Give a custom autograd function the output of one module, or let these "
            "modules share one scale: LayerScaler(units=...)."
        )


def tensors_in(value: Any) -> Iterable[Tensor]:
    """Yield the tensors in arguments, also in lists, tuples and dictionaries."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in cast("Iterable[Any]", value):
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in cast("dict[Any, Any]", value).values():
            yield from tensors_in(item)


def _collect(values: Iterable[Any], tensors: dict[int, Tensor]) -> None:
    """Collect the tensors that require a gradient."""
    # Not by `tensors_in`: this takes a fraction of its time, and runs at every operation.
    for value in values:
        if isinstance(value, Tensor):
            if value.requires_grad:
                tensors[id(value)] = value
        elif isinstance(value, (list, tuple)):
            _collect(cast("Iterable[Any]", value), tensors)
        elif isinstance(value, dict):
            _collect(cast("dict[Any, Any]", value).values(), tensors)


def replaced(value: Any, alias_of: Callable[[Tensor], Tensor]) -> Any:
    """Return the arguments with aliases in place of their tensors."""
    if isinstance(value, Tensor):
        return alias_of(value)
    if isinstance(value, (list, tuple)):
        items = [replaced(item, alias_of) for item in cast("Iterable[Any]", value)]
        kind = cast("Any", type(cast("Any", value)))
        return kind(*items) if hasattr(kind, "_fields") else kind(items)
    if isinstance(value, dict):
        return {key: replaced(item, alias_of) for key, item in cast("dict[Any, Any]", value).items()}
    return value


# A parameter is shifted at each use, so that the scale of each use's gradient is removed in float32 before the sum.
def _aliasing(edges: dict[int, ScaleChange], *, shared: bool) -> Callable[[Tensor], Tensor]:
    aliases: dict[int, Tensor] = {}

    def alias_of(x: Tensor) -> Tensor:
        if id(x) not in edges:
            return x
        if not shared or id(x) not in aliases:
            aliases[id(x)] = shifted(x, edges[id(x)])
        return aliases[id(x)]

    return alias_of


def refuse_compiled() -> None:
    """Raise under torch's compiler: exponents are host numbers that change."""
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
    """Return the tensor that an operation writes into: its first argument, or None."""
    # Torch's names of operations in place end with an underscore.
    in_place = (name.endswith("_") and not name.endswith("__")) or name == "__setitem__"
    in_place = in_place or (name.startswith("__i") and name not in {"__invert__", "__int__", "__index__", "__iter__"})
    return args[0] if in_place and args and isinstance(args[0], Tensor) else None


def _marking(result: Any, written: Tensor | None, tag: ScaleTag) -> Any:
    changed = (result,) if isinstance(result, Tensor) and written is None else tensors_in((result, written))
    for x in changed:
        if x.requires_grad and not x.is_leaf:
            mark(x, tag.exponent, tag.unit, derived=tag.derived)
    return result


def _check_kind(x: Tensor) -> None:
    if is_transformed():
        raise StateError(
            "LayerScaler: expected a forward without torch.func transforms (vmap, grad, vjp) around its modules; got "
            "one. Run it under `with scaler.suspended():`, which uses the loss scale alone."
        )
    if hasattr(x, "device_mesh"):
        raise UnsupportedTensorError(
            f"LayerScaler: expected plain tensors; got a DTensor ({x.dtype}, {tuple(x.shape)}) of fully_shard or "
            "tensor parallelism. Use SpectralScaler or DynamicScaler there; DistributedDataParallel is supported."
        )
