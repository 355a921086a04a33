"""A conversion carried out as plainly as can be: the captured graph, run node by node with its changes.

What `NodeChange` means is written here a second time, independently of the converted model.
"""

import functools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from plimsoll.unit.analysis.analyzer import Analysis, analyse
from plimsoll.unit.capture.captured_program import Captured, capture
from plimsoll.unit.capture.gradient_graph import base_name, operation_of
from plimsoll.unit.changes import Factor, NodeChange, ParameterChange, Scale
from plimsoll.unit.formulas import Constraint
from tests.support.unit.models import MODELS, Case


class _Multiplied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.backward_factor = backward
        return x * forward

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * ctx.backward_factor, None, None


class Carried(fx.Interpreter):
    """Runs a captured graph; with `true`, every backward factor is 1 beyond what belongs to the forward value."""

    def __init__(self, captured: Captured, changes: Mapping[str, NodeChange], *, true: bool = False) -> None:
        super().__init__(captured.program.graph_module)
        self.changes, self.true = changes, true
        self.sizes: dict[str, torch.Size] = {}
        self.kept: dict[str, Tensor] = {}

    def run_node(self, n: fx.Node) -> Any:
        change = self.changes.get(n.name)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        if change is not None:
            args, kwargs = self._scaled_inputs(change, list(args), dict(kwargs))
        if n.op == "call_function" and base_name(n) != operation_of(
            n
        ):  # in place: what was written to stays for others
            args = (args[0].clone(), *args[1:])
        result = getattr(self, n.op)(n.target, tuple(args), kwargs)
        if change is not None:
            result = self._scaled(result, change.output)
        if isinstance(result, Tensor):
            self.sizes[n.name] = result.shape
            if result.requires_grad and n.op == "call_function":
                result.retain_grad()
                self.kept[n.name] = result
        return result

    def _scaled_inputs(self, change: NodeChange, args: list[Any], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        for port, scale in change.inputs.items():
            if isinstance(port, tuple):
                members = list(args[port[0]])
                members[port[1]] = self._scaled(members[port[1]], scale)
                args[port[0]] = members
            elif isinstance(port, int):
                args[port] = self._scaled(args[port], scale)
            else:
                kwargs[port] = self._scaled(kwargs[port], scale)
        return args, kwargs

    def _scaled(self, x: Any, scale: Scale) -> Any:
        if isinstance(x, list | tuple):
            return type(x)(self._scaled(one, scale) for one in x)
        forward, backward = self._number(scale.forward), self._number(scale.backward)
        if forward == 1 and (self.true or backward == 1):
            return x
        return _Multiplied.apply(x, forward, forward if self.true else backward)

    def _number(self, factor: Factor) -> float:
        if factor.of is None:
            return factor.value
        n = math.prod(self.sizes[factor.of][dim] for dim in factor.dims)
        return factor.value * float(n) ** factor.power


def drawn(
    captured: Captured, changes: Mapping[str, ParameterChange], dtype: torch.dtype, seed: int
) -> dict[str, Tensor]:
    """Every tensor of the model's state by name, parameters drawn again; names of one parameter share one tensor."""
    generator = torch.Generator().manual_seed(seed)
    state: dict[str, Tensor] = {}
    first = {name: group[0] for group in captured.ties for name in group}
    for name, value in captured.program.state_dict.items():
        if first.get(name, name) in state:
            state[name] = state[first[name]]
            continue
        new = value.detach().clone()
        if new.is_floating_point():
            new = new.to(dtype)
        if name in changes:
            new = _draw(new, changes[name], generator).requires_grad_(value.requires_grad)
        state[first.get(name, name)] = state[name] = new
    return state


def _draw(x: Tensor, change: ParameterChange, generator: torch.Generator) -> Tensor:
    if change.draw == "normal":
        return torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) * change.std
    return {"zeros": torch.zeros_like, "ones": torch.ones_like, "keep": torch.clone}[change.draw](x)


def run(
    captured: Captured, changes: Mapping[str, NodeChange], state: Mapping[str, Tensor], inputs: list[Any], *, true: bool
) -> tuple[Carried, Any]:
    """Runs the graph on a state and on inputs in the order of the model's own."""
    given = iter(inputs)
    signature = captured.program.graph_signature
    arguments: list[Any] = []
    for spec in signature.input_specs:
        if spec.kind.name in ("PARAMETER", "BUFFER") and spec.target in state:
            arguments.append(state[spec.target])
        elif spec.kind.name == "USER_INPUT":
            arguments.append(next(given))
        else:
            constant = captured.program.constants[spec.target]
            arguments.append(constant.clone())
    carried = Carried(captured, changes, true=true)
    return carried, carried.run(*arguments, enable_io_processing=False)


@functools.cache
def in_float64(name: str) -> Case:
    """A case of `MODELS` in float64, whose graph `captured` has; whoever changes the model copies it."""
    case = MODELS[name]()
    return Case(model=case.model.double(), example=pytree.tree_map(_double, case.example))


@functools.cache
def captured(name: str) -> Captured:
    """A model of `MODELS`, captured in float64: once for all tests of a process."""
    case = in_float64(name)
    return capture(case.model, case.example)


def _double(x: Any) -> Any:
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x


@functools.cache
def analysed(name: str, constraint: Constraint | None = "gmean") -> Analysis:
    return analyse(captured(name), constraint=constraint)


def inputs_of(captured: Captured) -> list[Any]:
    """The example's inputs, those of floating point with a gradient."""
    leaves = pytree.tree_leaves((captured.args, dict(captured.kwargs)))
    return [x.clone().requires_grad_(x.is_floating_point()) if isinstance(x, Tensor) else x for x in leaves]


def back(carried: Carried, outputs: tuple[str, ...]) -> None:
    """One backward: of 1 from a loss, of independent normal values from other outputs."""
    ends = [carried.kept[name] for name in outputs]
    generator = torch.Generator().manual_seed(4)
    seeds = [torch.randn(end.shape, generator=generator, dtype=end.dtype) if end.dim() else None for end in ends]
    torch.autograd.backward(ends, seeds)
