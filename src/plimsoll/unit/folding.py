"""`fold`, which makes plain weights of a converted model, and its plan.

The plan is steps, multipliers and scales. A value V of the converted model is s V' in the folded one. A homogeneous
operation ties s of its result to s of its input, so values form classes whose members follow from one number. An
operation that cannot absorb a factor wants a value at its own number: a non-linear function wants its input unchanged,
and so does an output. Each class takes the number that most of its members want. For the others a multiplication
remains. The choice never changes the result, only how many multiplications remain.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from plimsoll.errors import ArgumentError, StateError
from plimsoll.unit.changes import ONE, Factor, NodeChange, Port, Scale
from plimsoll.unit.conversion.codegen.module_builder import Builder
from plimsoll.unit.conversion.codegen.steps import (
    EMBEDDING,
    NORMS,
    RUNNING,
    WEIGHTS,
    Here,
    Recipe,
    Ref,
    Step,
    WhenTraining,
    argument,
    factors_of,
    mapped,
    name_of,
    refs_in,
    terms_of,
)
from plimsoll.unit.conversion.converted_modules import Converted, Folded, RemainingFactor, named_modules

_TOLERANCE = 1e-7  # of a factor that is one
_DIGITS = 9  # of logarithms that are equal: factors come from roots of small numbers
_RETURNED = "another use needs the returned value at another scale"


@dataclass(slots=True)
class Plan:
    """Result of folding: steps with remaining factors, multipliers of tensors."""

    recipe: Recipe
    tensors: dict[str, float] = field(default_factory=dict[str, float])
    remaining: list[RemainingFactor] = field(default_factory=list[RemainingFactor])


def plan_of(recipe: Recipe) -> Plan:
    """Fold the constant factors of a recipe as far as the algebra allows."""
    recipe = _inference(recipe)
    folding = _Folding(recipe)
    steps = [folding.folded(step) for step in recipe.steps]
    outputs: list[Any] = []
    remaining = folding.remaining
    for i, returned in enumerate(recipe.outputs):
        output, scale = returned, folding.output(returned.name) if isinstance(returned, Ref) else 1.0
        if abs(scale - 1) > _TOLERANCE:
            steps.append(Step(name=f"result_{i}", target="aten.mul.Tensor", args=(output, scale)))
            remaining.append(
                RemainingFactor(operation="return", module="", source=None, at="output", factor=scale, why=_RETURNED)
            )
            output = Ref(f"result_{i}")
        outputs.append(output)
    folded = replace(recipe, steps=tuple(steps), outputs=tuple(outputs))
    return Plan(recipe=folded, tensors=folding.multipliers(), remaining=remaining)


def _inference(recipe: Recipe) -> Recipe:
    """Return the steps without dropout and counts of batches.

    A dropout with a factor becomes a copy with it.
    """
    removed: dict[str, Any] = {}
    steps: list[Step] = []

    def settled(leaf: Any) -> Any:
        if isinstance(leaf, Ref):
            return removed.get(leaf.name, leaf)
        return False if leaf is Here.TRAINING else 0.0 if isinstance(leaf, WhenTraining) else leaf

    for trained in recipe.steps:
        dropout, counts = "dropout" in name_of(trained), name_of(trained) == "add_" and Here.TRAINING in trained.args
        step = replace(trained, args=mapped(trained.args, settled), kwargs=mapped(dict(trained.kwargs), settled))
        if counts or (dropout and step.change is None):
            removed[step.name] = step.args[0]
        elif dropout:
            steps.append(replace(step, target="aten.alias.default", args=step.args[:1], kwargs={}))
        else:
            steps.append(step)
    outputs = tuple(settled(output) for output in recipe.outputs)
    return replace(recipe, steps=tuple(steps), outputs=outputs)


class _Folding:
    """Scales of all values, and the folded steps that follow from them.

    A step of the converted model computes V = a f(a1 X1, a2 X2, ...). With V = s V' and X = s X' the folded one
    computes V' = (a / s) f(k1 X1', k2 X2', ...), k = a s of an input. `_relate` chooses scales so that few of (a / s)
    and k differ from 1. `folded` moves those into parameters as far as possible. The rest remains.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._uses = Counter(name for step in recipe.steps for name in refs_in((step.args, dict(step.kwargs))))
        self._uses.update(refs_in(list(recipe.outputs)))
        self._fixed = {step.name for step in recipe.steps if not step.floating}
        self._fixed |= {name for name, source in recipe.sources.items() if source.kind != "parameter"}
        self._scales = Scales()
        self._absorbed: dict[str, float] = {}
        self.remaining: list[RemainingFactor] = []
        for step in recipe.steps:
            self._relate(step)
        for name in refs_in(list(recipe.outputs)):
            self._want(name, 1.0)
        self._scales.choose()

    def multipliers(self) -> dict[str, float]:
        """Return the multiplier of each tensor of the model, after all steps are folded."""
        multipliers = {
            name: 1 / self._s(name) for name, source in self._recipe.sources.items() if source.kind == "parameter"
        }
        multipliers |= self._absorbed
        return {name: factor for name, factor in multipliers.items() if abs(factor - 1) > _TOLERANCE}

    def output(self, name: str) -> float:
        """Return the multiplier of a result before it is returned."""
        return self._s(name)

    def _s(self, name: str) -> float:
        return 1.0 if name in self._fixed else self._scales.of(name)

    def _want(self, name: str, scale: float) -> None:
        if name not in self._fixed:
            self._scales.want(name, scale)

    def _tie(self, step: Step, name: str, ratio: float) -> None:
        if step.name in self._fixed:
            self._want(name, 1 / ratio)
        elif name in self._fixed:
            self._want(step.name, ratio)
        else:
            self._scales.tie(step.name, name, ratio)

    def _free(self, nest: Any) -> str | None:
        """Return the parameter that only this argument uses, which absorbs any factor."""
        if isinstance(nest, Ref) and self._uses[nest.name] == 1:
            source = self._recipe.sources.get(nest.name)
            return nest.name if source is not None and source.kind == "parameter" else None
        return None

    def _relate(self, step: Step) -> None:
        name = name_of(step)
        if self._weight_is_free(step):
            return
        if name in NORMS and self._norm_is_free(step):
            return
        if name == EMBEDDING and self._free(step.args[0]):
            return
        terms = terms_of(step)
        if terms is not None:
            for port, term in terms:
                self._tie(step, term, _out(step) * _in(step, port))
            return
        self._relate_product(step, self._product(step))

    def _product(self, step: Step) -> list[tuple[Port, str]] | None:
        """Return the ports in which the step is homogeneous."""
        name = name_of(step)
        if name in WEIGHTS:
            return [(port, step.args[port].name) for port in WEIGHTS[name][:2] if isinstance(step.args[port], Ref)]
        return [(0, step.args[0].name)] if name == EMBEDDING else factors_of(step)

    def _weight_is_free(self, step: Step) -> bool:
        at = WEIGHTS.get(name_of(step))
        return at is not None and self._free(argument(step, at[1])) is not None

    def _bias(self, step: Step) -> int | None:
        """Return the port of a bias, if the step has one."""
        at = WEIGHTS.get(name_of(step), (0, 0, None))[2]
        return at if at is not None and isinstance(argument(step, at), Ref) else None

    def _relate_product(self, step: Step, product: list[tuple[Port, str]] | None) -> None:
        """Tie the first movable operand to the result, and want the others unchanged."""
        homogeneous = dict(product or ())
        free = next((name for name in homogeneous.values() if self._free(Ref(name))), None)
        tied = next((port for port, name in homogeneous.items() if self._moves(name)), None)
        tied = tied if tied is not None else next(iter(homogeneous), None)
        for port, name in _ports(step):
            if name == free or port == self._bias(step):
                continue
            if port == tied and free is None:
                self._tie(step, name, _out(step) * _in(step, port))
            elif port not in homogeneous or port != tied:
                self._want(name, 1 / _in(step, port))
        if product is None:
            self._want(step.name, _out(step))

    def _moves(self, name: str) -> bool:
        return name not in self._fixed and name not in self._recipe.sources

    def _norm_is_free(self, step: Step) -> bool:
        weight, bias, epsilon = NORMS[name_of(step)]
        own = [argument(step, at) for at in (weight, bias) if at is not None]
        running = [argument(step, at) for at in RUNNING.get(name_of(step), ())]
        alone = all(tensor is None or self._uses[tensor.name] == 1 for tensor in running)
        return (
            self._free(own[0]) is not None
            and all(tensor is None or self._free(tensor) for tensor in own)
            and isinstance(argument(step, epsilon), float)
            and alone
        )

    def folded(self, step: Step) -> Step:
        """Return the step with the factors that remain."""
        name = name_of(step)
        if self._weight_is_free(step):
            return self._linear(step)
        if name in NORMS and self._norm_is_free(step):
            return self._norm(step)
        if name == EMBEDDING and self._free(step.args[0]):
            self._absorb(step, 0, 1.0)
            return self._keeping(step, {}, 1.0, "")
        terms = terms_of(step)
        if terms is not None:
            factors = {port: _out(step) * self._k(step, port, term) / self._s(step.name) for port, term in terms}
            return self._keeping(step, factors, 1.0, "the terms of the sum have different scales")
        return self._rest(step, self._product(step))

    def _k(self, step: Step, port: Port, name: str) -> float:
        return _in(step, port) * self._s(name)

    def _linear(self, step: Step) -> Step:
        at, weight, _ = WEIGHTS[name_of(step)]
        self._absorb(step, weight, self._k(step, at, step.args[at].name) if isinstance(step.args[at], Ref) else 1.0)
        return self._keeping(step, self._of_bias(step), 1.0, "other operations use the bias too")

    def _of_bias(self, step: Step) -> dict[Port, float]:
        """Return a bias's remaining factors: none if it absorbs them, all if shared."""
        at = self._bias(step)
        if at is None:
            return {}
        if self._free(step.args[at]):
            self._absorb(step, at, 1.0)
            return {}
        return {at: _out(step) * self._k(step, at, step.args[at].name) / self._s(step.name)}

    def _absorb(self, step: Step, port: int, others: float) -> None:
        """Move the factors of a result into one of its tensors: a / s times `others`."""
        self._absorbed[step.args[port].name] = _out(step) * _in(step, port) * others / self._s(step.name)

    def _norm(self, step: Step) -> Step:
        weight, bias, epsilon = NORMS[name_of(step)]
        k = self._k(step, 0, step.args[0].name)
        for at in (weight, bias):
            own = None if at is None else argument(step, at)
            if isinstance(own, Ref) and at is not None:
                self._absorb(step, at, 1.0)
        for at, power in zip(RUNNING.get(name_of(step), ()), (1, 2), strict=False):
            if isinstance(own := argument(step, at), Ref):
                self._absorbed[own.name] = k**-power
        if abs(k - 1) > _TOLERANCE:
            eps = step.args[epsilon] / k**2
            step = replace(step, args=(*step.args[:epsilon], eps, *step.args[epsilon + 1 :]))
        return self._keeping(step, {}, 1.0, "")

    def _rest(self, step: Step, product: list[tuple[Port, str]] | None) -> Step:
        """Keep one factor of a homogeneous step, or each input's of another step."""
        homogeneous = dict(product or ())
        others = {port: self._k(step, port, name) for port, name in _ports(step) if port not in homogeneous}
        others |= self._of_bias(step)
        total = _out(step) / self._s(step.name)
        for port, name in homogeneous.items():
            total *= self._k(step, port, name)
        free = next(((port, name) for port, name in homogeneous.items() if self._free(Ref(name))), None)
        if free is not None:
            self._absorbed[free[1]] = total / self._s(free[1])
            return self._keeping(step, others, 1.0, "another use needs the input at its own scale")
        if not homogeneous:
            return self._keeping(step, others, total, f"{name_of(step)} is not linear and cannot absorb it")
        port = next(iter(homogeneous))  # at an input, since the result may be several tensors
        return self._keeping(step, {**others, port: total}, 1.0, "another use needs its value at another scale")

    def _keeping(self, step: Step, inputs: Mapping[Port, float], output: float, why: str) -> Step:
        """Return the step with these multiplications and those that follow the batch."""
        change = step.change
        scales: dict[Port, Scale] = {}
        for port in {**inputs, **(change.inputs if change else {})}:
            before = change.inputs.get(port, Scale()).forward if change else ONE
            scale = self._note(step, f"input {port}", before, inputs.get(port, 1.0), why)
            if scale is not None:
                scales[port] = scale
        out = self._note(step, "output", change.output.forward if change else ONE, output, why)
        if not scales and out is None:
            return replace(step, change=None)
        folded = NodeChange(operation=name_of(step), why=why, output=out or Scale(), inputs=scales)
        return replace(step, change=folded)

    def _note(self, step: Step, at: str, before: Factor, factor: float, why: str) -> Scale | None:
        follows = before.of is not None
        if abs(factor - 1) < _TOLERANCE and not follows:
            return None
        remaining = replace(before, value=before.value * factor) if follows else Factor(value=factor)
        module = step.stack[-1][1] if step.stack else ""
        self.remaining.append(
            RemainingFactor(
                operation=name_of(step),
                module=module,
                source=step.place,
                at=at,
                factor=None if follows else factor,
                why="it follows the sizes of the batch" if follows else why,
            )
        )
        return Scale(forward=remaining, backward=remaining)


def _ports(step: Step) -> list[tuple[Port, str]]:
    """Return every tensor argument of the step, without numbers that depend on sizes."""
    ports: list[tuple[Port, str]] = []
    for port, nest in [*enumerate(step.args), *step.kwargs.items()]:
        if isinstance(nest, Ref):
            ports.append((port, nest.name))
        elif isinstance(nest, (list, tuple)) and isinstance(port, int):
            ports += [((port, i), leaf.name) for i, leaf in enumerate(nest) if isinstance(leaf, Ref)]  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    return ports


def _constant(factor: Factor) -> float:
    return factor.value if factor.of is None else 1.0


def _out(step: Step) -> float:
    return 1.0 if step.change is None else _constant(step.change.output.forward)


def _in(step: Step, port: Port) -> float:
    scale = None if step.change is None else step.change.inputs.get(port)
    return 1.0 if scale is None else _constant(scale.forward)


@dataclass(slots=True)
class Scales:
    """Classes of values, as a union-find whose links have the logarithm of a ratio."""

    _parent: dict[str, str] = field(default_factory=dict[str, str])
    _ratio: dict[str, float] = field(default_factory=dict[str, float])  # log of s(value) / s(parent)
    _wanted: list[tuple[str, float]] = field(default_factory=list[tuple[str, float]])
    _chosen: dict[str, float] = field(default_factory=dict[str, float])

    def tie(self, value: str, other: str, ratio: float) -> None:
        """Set s(value) = ratio * s(other), unless earlier ties already decide it."""
        (root, up), (other_root, other_up) = self._find(value), self._find(other)
        if root != other_root:
            self._parent[root] = other_root
            self._ratio[root] = math.log(ratio) + other_up - up

    def want(self, value: str, scale: float) -> None:
        """Ask for s(value) = `scale`."""
        self._wanted.append((value, math.log(scale)))

    def choose(self) -> None:
        """Give every class the number that most members want, the first of them in a tie."""
        wanted: defaultdict[str, Counter[float]] = defaultdict(Counter)
        exact: dict[tuple[str, float], float] = {}
        for value, scale in self._wanted:
            root, up = self._find(value)
            rounded = round(scale - up, _DIGITS)
            wanted[root][rounded] += 1
            exact.setdefault((root, rounded), scale - up)
        self._chosen = {root: exact[root, counts.most_common(1)[0][0]] for root, counts in wanted.items()}

    def of(self, value: str) -> float:
        """Return s of a value."""
        root, up = self._find(value)
        return math.exp(self._chosen.get(root, 0.0) + up)

    def _find(self, value: str) -> tuple[str, float]:
        """Return the class's root, and the logarithm of s(value) / s(root)."""
        up = 0.0
        while value in self._parent:
            up += self._ratio[value]
            value = self._parent[value]
        return value, up


@torch.no_grad()
def fold(converted: nn.Module) -> Folded:
    """Return a converted model with its factors in the weights, for inference.

    Outputs are the same up to rounding. Forward factors move into weights, biases, tables, running statistics and the
    epsilon of norms, through every operation that is homogeneous: views, ReLU, pooling, sums whose terms agree.
    Backward factors and dropout are dropped. Modules keep their names. A module without remaining factors is torch's
    own again. The result stays in evaluation mode and refuses `train()`.

    Its `kept` lists the multiplications that remain, with reasons: those that follow the batch's sizes, those at a
    function that is not linear, and those at a value that is used at several scales. Its state has the original's names
    and loads into a model folded from the same conversion.

    Args:
        converted: Result of `unit.convert`.

    Returns:
        The folded model.

    Raises:
        ArgumentError: The model is not a converted one.
        StateError: Its modules were replaced by those of FP8.

    >>> import plimsoll as pl
    >>> converted = pl.unit.convert(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8)), torch.randn(4, 8))
    >>> folded = fold(converted.eval())
    >>> folded.kept, type(folded.get_submodule("0"))
    ([], <class 'torch.nn.modules.linear.Linear'>)
    """
    if not isinstance(converted, Converted):
        raise ArgumentError(
            f"fold: expected a result of plimsoll.unit.convert; got {type(converted).__name__}. Only it contains a "
            "record of its factors."
        )
    _check_plain(converted)
    plan = plan_of(converted.recipe)
    folded = Builder(plan.recipe, converted, converted.signature, {}, base=Folded).build()
    assert isinstance(folded, Folded)
    sources = plan.recipe.sources
    tensors = {
        **dict(folded.named_parameters(remove_duplicate=False)),
        **dict(folded.named_buffers(remove_duplicate=False)),
    }
    for name, factor in plan.tensors.items():
        tensors[sources[name].paths[0]].mul_(factor)
    folded.note(plan.remaining)
    return folded.eval()


def _check_plain(converted: Converted) -> None:
    for name, module in named_modules(converted):
        if callable(getattr(module, "casts", None)):
            raise StateError(
                f"fold: expected a converted model in its own modules; got {type(module).__name__} at '{name}', whose "
                "scales are of FP8. Fold before fp8.convert."
            )
