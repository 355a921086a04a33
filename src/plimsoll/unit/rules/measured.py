"""Rules by measurement, for operations and clusters without a formula."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from plimsoll.unit.capture.gradient_graph import (
    Cluster,
    Flow,
    NoValueError,
    Values,
    base_name,
    is_open,
    operation_of,
    shape_of,
)
from plimsoll.unit.changes import Factor, Port
from plimsoll.unit.rules.operation import Ideal, Rule, Site, following, skipped

# -- scales and factors of an operation --------------------------------------------------------------------------------

_VALUES = 1 << 15
_RUNS = 16
_SEED = 0x5CA1E


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Mean and deviation of the output, root second moments of the gradients."""

    mean: float
    std: float
    gradients: dict[str, float]

    @property
    def centre(self) -> float:
        """Return the mean divided by the standard deviation, or 0 if it may be chance."""
        centre = self.mean / self.std
        # 4 standard errors of 2^15 values: chance exceeds them once in 16,000 measurements.
        return centre if abs(centre) > 4 * _VALUES**-0.5 else 0.0


# The operation runs on independent normal inputs, with an independent normal gradient. Forward, its scale is the
# standard deviation of all output values. Backward, it is the root of the second moment of each input's gradient. It
# runs in float64 on tensors of the example's shapes, until 2^15 values of each have been used, in at most 16 runs with
# fixed seeds. The means of the tensors are those that the operations before them leave. Tensors without gradients
# (masks, positions) are as in the example. Values that are not finite are left out, as for rows that a mask leaves
# empty.
def measure_factors(
    function: Callable[[Mapping[str, Tensor]], Any], shapes: Mapping[str, tuple[int, ...]], means: Mapping[str, float]
) -> Measured | None:
    """Return the scales of a function of normal inputs, or None if one is not > 0."""
    smallest = min((math.prod(shape) for shape in shapes.values()), default=0)
    if smallest == 0:
        return None
    runs = min(_RUNS, -(-_VALUES // smallest))
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(_SEED)
        sums = [_run(function, shapes, means) for _ in range(runs)]
    complete = [run for run in sums if run is not None]
    return _pooled(complete) if len(complete) == runs else None


def _run(
    function: Callable[[Mapping[str, Tensor]], Any], shapes: Mapping[str, tuple[int, ...]], means: Mapping[str, float]
) -> dict[str, tuple[float, ...]] | None:
    drawn = {
        name: torch.randn(shape, dtype=torch.float64, device="cpu") + means[name] for name, shape in shapes.items()
    }
    inputs = {name: x.requires_grad_() for name, x in drawn.items()}
    output = function(inputs)
    if not isinstance(output, Tensor) or not output.requires_grad:
        return None
    seed = torch.randn(output.shape, dtype=output.dtype, device=output.device)
    gradients = cast(
        "tuple[Tensor | None, ...]", torch.autograd.grad(output, list(inputs.values()), seed, allow_unused=True)
    )
    sums = {"": _sums(output.detach())}
    for name, gradient in zip(inputs, gradients, strict=True):
        if gradient is not None:
            sums[name] = _sums(gradient)
    return sums


def _sums(x: Tensor) -> tuple[float, ...]:
    finite = x[x.isfinite()].double()
    return float(finite.numel()), float(finite.sum()), float((finite * finite).sum())


def _pooled(runs: list[dict[str, tuple[float, ...]]]) -> Measured | None:
    roots: dict[str, float] = {}
    std = mean = 0.0
    for name in runs[0]:
        n, total, squares = (math.fsum(run[name][i] for run in runs) for i in range(3))
        if n == 0 or not math.isfinite(squares) or squares <= 0:
            return None
        roots[name] = (squares / n) ** 0.5
        if not name:
            mean = total / n
            std = max(squares / n - mean**2, 0.0) ** 0.5
    if std < 1e-9 * roots.pop(""):
        return None
    return Measured(mean=mean, std=std, gradients=roots)


# -- rules -------------------------------------------------------------------------------------------------------------

ENTRY: Port = "entry"  # the port of a cluster


def by_measurement(site: Site) -> Ideal:
    """Return the factors of a single measured operation."""
    scales = _measured([site.node], {node.name: node for node in site.ports.values()}, site.values, site.means)
    if scales is None:
        return skipped("no formula, and its scale cannot be measured")
    gradients: dict[Port, Factor] = {}
    for port, source in site.ports.items():
        if source.name in scales.gradients:
            gradients[port] = Factor(value=1 / scales.gradients[source.name])
    output = Factor(value=1 / scales.std)
    return Ideal(why="by measurement", output=output, gradients=gradients, mean=scales.centre)


def of_cluster(cluster: Cluster, flow: Flow, values: Values, means: Mapping[str, float]) -> Ideal:
    """Return a cluster's factors. Without a measurement it stays unchanged."""
    inside = [node for name, node in flow.nodes.items() if name in cluster.nodes]
    last = flow.nodes[cluster.exit]
    scales = _measured(inside, {cluster.entry: flow.nodes[cluster.entry]}, values, means)
    if scales is None or cluster.entry not in scales.gradients:
        return skipped("written in several operations, and their scale cannot be measured")
    output, back = Factor(value=1 / scales.std), Factor(value=1 / scales.gradients[cluster.entry])
    if base_name(last) in ("softmax", "_softmax"):
        output, back = (_by_length(last, flow.nodes[cluster.entry], factor) for factor in (output, back))
    why = f"{len(inside)} operations as one, by measurement"
    return Ideal(why=why, output=output, gradients={ENTRY: back}, mean=scales.centre)


def _measured(
    nodes: Sequence[fx.Node], sources: Mapping[str, fx.Node], values: Values, means: Mapping[str, float]
) -> Measured | None:
    """Return the scales of a chain of operations. Equal chains are measured once."""

    def run(inputs: Mapping[str, Tensor]) -> Any:
        known: dict[str, Any] = dict(inputs)
        for node in nodes:
            known[node.name] = _call(node, known, values)
        return known[nodes[-1].name]

    def measure() -> Measured | None:
        try:
            scales = measure_factors(run, {name: shape_of(node) for name, node in sources.items()}, centres)
        except (NoValueError, RuntimeError, NotImplementedError):  # an operation without float64, or without backward
            return None
        return scales and replace(scales, gradients={order[name]: std for name, std in scales.gradients.items()})

    centres = {name: means.get(name, 0.0) for name in sources}
    order = {name: str(position) for position, name in enumerate(sources)}
    # Gradients are remembered by position, since the sources of an equal chain have other names.
    scales = values.remembered(_signature(nodes, sources) + repr(list(centres.values())), measure)
    names = list(sources)
    return scales and replace(scales, gradients={names[int(key)]: std for key, std in scales.gradients.items()})


def _signature(nodes: Sequence[fx.Node], sources: Mapping[str, fx.Node]) -> str:
    """Return a key for equal chains, which does not depend on nodes' names.

    Tensors without gradients go by their names.
    """
    called = {name: f"in{position}" for position, name in enumerate(sources)}
    called |= {node.name: f"at{position}" for position, node in enumerate(nodes)}
    shapes = [shape_of(node) for node in sources.values()]
    return repr(
        (shapes, [(str(node.target), _named(node.args, called), _named(node.kwargs, called)) for node in nodes])
    )


def _named(arguments: Any, called: Mapping[str, str]) -> str:
    def name(node: fx.Node) -> str:
        return called.get(node.name, f"given {node.name}")

    return repr(cast("object", map_arg(arguments, name)))


def _call(node: fx.Node, known: Mapping[str, Any], values: Values) -> Any:
    """Run an operation in float64 on known values, on a copy if it writes in place."""

    def value(source: fx.Node) -> Any:
        if source.name in known:
            return known[source.name]
        fixed = values.of(source)
        return fixed.double() if isinstance(fixed, Tensor) and fixed.is_floating_point() else fixed

    args = cast("tuple[Any, ...]", map_arg(node.args, value))
    kwargs = cast("dict[str, Any]", map_arg(node.kwargs, value))
    name = operation_of(node)
    if name in ("to", "_to_copy", "float", "type_as"):
        return args[0]
    if name != base_name(node):
        args = (args[0].clone(), *args[1:])
    return cast("Callable[..., Any]", node.target)(*args, **kwargs)


def _by_length(softmax: fx.Node, source: fx.Node, factor: Factor) -> Factor:
    """Let a softmax's factor, measured at the example's length, follow the length."""
    axis = softmax.args[1] if len(softmax.args) > 1 else softmax.kwargs.get("dim", -1)
    shape = shape_of(source)
    if not isinstance(axis, int) or shape != shape_of(softmax) or not is_open(source, axis % len(shape)):
        return factor
    return following(source, (axis,), 1.0, factor.value / shape[axis])


def _softmax(site: Site) -> Ideal:
    ideal = by_measurement(site)
    if ideal.skipped or site.operation == "log_softmax":
        return ideal
    source = site.ports[0]
    gradients = {port: _by_length(site.node, source, factor) for port, factor in ideal.gradients.items()}
    output = _by_length(site.node, source, ideal.output)
    return replace(ideal, why="by measurement, times the length", output=output, gradients=gradients)


def _attention(site: Site) -> Ideal:
    """Return attention's factors, which grow as the root of the length."""
    ideal = by_measurement(site)
    if ideal.skipped:
        return ideal
    key = site.node.args[1]
    if not isinstance(key, fx.Node) or not is_open(key, len(shape_of(key)) - 2):
        return ideal
    length = shape_of(key)[-2]
    output, *backs = (
        following(key, (-2,), 0.5, factor.value * length**-0.5) for factor in (ideal.output, *ideal.gradients.values())
    )
    gradients = dict(zip(ideal.gradients, backs, strict=True))
    return replace(ideal, why="by measurement, times the root of the length", output=output, gradients=gradients)


_POINTWISE = tuple(
    """
    elu selu celu leaky_relu hardtanh relu6 hardswish hardsigmoid softplus mish logsigmoid log_sigmoid exp expm1 sin
    cos abs pow square clamp clamp_min clamp_max softsign hardshrink softshrink tanhshrink threshold erf atan asinh
    maximum minimum prelu logcumsumexp logaddexp glu cumsum
    """.split()
)
_POOLING = tuple(
    """
    max_pool1d max_pool2d max_pool3d adaptive_max_pool1d adaptive_max_pool2d upsample_bilinear2d upsample_bicubic2d
    upsample_linear1d upsample_trilinear3d amax amin logsumexp lp_pool2d
    """.split()
)

MEASURED: dict[str, Rule] = {
    **dict.fromkeys((*_POINTWISE, *_POOLING), by_measurement),
    **dict.fromkeys(("softmax", "_softmax", "log_softmax"), _softmax),
    "scaled_dot_product_attention": _attention,
}
