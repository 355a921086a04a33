"""The steps of a folded model, and what its parameters are multiplied by.

Above 300 lines, for the two halves belong together: how scales are related, and what they then make of each step.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from plimsoll.unit.changes import ONE, Factor, NodeChange, Port, Scale
from plimsoll.unit.conversion.codegen.operation_facts import (
    EMBEDDING,
    NORMS,
    RUNNING,
    WEIGHTS,
    argument,
    factors_of,
    name_of,
    terms_of,
)
from plimsoll.unit.conversion.codegen.steps import Here, Recipe, Ref, Step, WhenTraining, mapped, refs_in
from plimsoll.unit.conversion.converted_modules import Kept
from plimsoll.unit.folding.value_scales import Scales

_TOLERANCE = 1e-7  # of a factor that is one
_RETURNED = "what is returned is also used at another scale"


@dataclass(slots=True)
class Plan:
    """What folding does: the steps with the factors that stay, and multipliers of tensors by name."""

    recipe: Recipe
    tensors: dict[str, float] = field(default_factory=dict[str, float])
    kept: list[Kept] = field(default_factory=list[Kept])


def plan_of(recipe: Recipe) -> Plan:
    """Folds every constant factor of a recipe as far as the algebra allows, for a model that does not train."""
    recipe = _inference(recipe)
    folding = _Folding(recipe)
    steps = [folding.folded(step) for step in recipe.steps]
    outputs: list[Any] = []
    kept = folding.kept
    for i, returned in enumerate(recipe.outputs):
        one, scale = returned, folding.output(returned.name) if isinstance(returned, Ref) else 1.0
        if abs(scale - 1) > _TOLERANCE:
            steps.append(Step(name=f"result_{i}", target="aten.mul.Tensor", args=(one, scale)))
            kept.append(Kept(operation="return", module="", source=None, at="output", factor=scale, why=_RETURNED))
            one = Ref(f"result_{i}")
        outputs.append(one)
    folded = replace(recipe, steps=tuple(steps), outputs=tuple(outputs))
    return Plan(recipe=folded, tensors=folding.multipliers(), kept=kept)


def _inference(recipe: Recipe) -> Recipe:
    """The steps without dropout and counts of batches; a factor of a dropout's goes on as that of a copy."""
    gone: dict[str, Any] = {}
    steps: list[Step] = []

    def settled(leaf: Any) -> Any:
        if isinstance(leaf, Ref):
            return gone.get(leaf.name, leaf)
        return False if leaf is Here.TRAINING else 0.0 if isinstance(leaf, WhenTraining) else leaf

    for given in recipe.steps:
        dropout, counts = "dropout" in name_of(given), name_of(given) == "add_" and Here.TRAINING in given.args
        step = replace(given, args=mapped(given.args, settled), kwargs=mapped(dict(given.kwargs), settled))
        if counts or (dropout and step.change is None):
            gone[step.name] = step.args[0]
        elif dropout:
            steps.append(replace(step, target="aten.alias.default", args=step.args[:1], kwargs={}))
        else:
            steps.append(step)
    outputs = tuple(settled(one) for one in recipe.outputs)
    return replace(recipe, steps=tuple(steps), outputs=outputs)


class _Folding:
    """The scales of all values, and what they make of each step.

    A step of the converted model gives V = a f(a1 X1, a2 X2, ...). With V = s V' and X = s X' the folded one gives
    V' = (a / s) f(k1 X1', k2 X2', ...), k = a s of an input. `_relate` ties and asks so that little is left of (a / s)
    and k; `folded` moves what is left into parameters, and keeps the rest.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._uses = Counter(name for step in recipe.steps for name in refs_in((step.args, dict(step.kwargs))))
        self._uses.update(refs_in(list(recipe.outputs)))
        self._fixed = {step.name for step in recipe.steps if not step.floating}
        self._fixed |= {name for name, one in recipe.sources.items() if one.kind != "parameter"}
        self._scales = Scales()
        self._absorbed: dict[str, float] = {}
        self.kept: list[Kept] = []
        for step in recipe.steps:
            self._relate(step)
        for name in refs_in(list(recipe.outputs)):
            self._want(name, 1.0)
        self._scales.choose()

    def multipliers(self) -> dict[str, float]:
        """What each tensor of the model is multiplied by, after all steps are folded."""
        found = {name: 1 / self._s(name) for name, one in self._recipe.sources.items() if one.kind == "parameter"}
        found |= self._absorbed
        return {name: factor for name, factor in found.items() if abs(factor - 1) > _TOLERANCE}

    def output(self, name: str) -> float:
        """What a result has to be multiplied by before it is returned."""
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
        """The name of a parameter that this one argument alone uses: it takes any factor."""
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
            for port, one in terms:
                self._tie(step, one, _out(step) * _in(step, port))
            return
        self._relate_product(step, self._product(step))

    def _product(self, step: Step) -> list[tuple[Port, str]] | None:
        """The ports in which the step is homogeneous."""
        name = name_of(step)
        if name in WEIGHTS:
            return [(port, step.args[port].name) for port in WEIGHTS[name][:2] if isinstance(step.args[port], Ref)]
        return [(0, step.args[0].name)] if name == EMBEDDING else factors_of(step)

    def _weight_is_free(self, step: Step) -> bool:
        at = WEIGHTS.get(name_of(step))
        return at is not None and self._free(argument(step, at[1])) is not None

    def _bias(self, step: Step) -> int | None:
        """The port of a bias, where the step has one."""
        at = WEIGHTS.get(name_of(step), (0, 0, None))[2]
        return at if at is not None and isinstance(argument(step, at), Ref) else None

    def _relate_product(self, step: Step, product: list[tuple[Port, str]] | None) -> None:
        """Ties the first factor that is no parameter and not fixed to the result, and wants the others as they are."""
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
        alone = all(one is None or self._uses[one.name] == 1 for one in running)
        return (
            self._free(own[0]) is not None
            and all(one is None or self._free(one) for one in own)
            and isinstance(argument(step, epsilon), float)
            and alone
        )

    def folded(self, step: Step) -> Step:
        """The step with the factors that stay."""
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
            left = {port: _out(step) * self._k(step, port, one) / self._s(step.name) for port, one in terms}
            return self._keeping(step, left, 1.0, "a sum of terms that have other scales")
        return self._rest(step, self._product(step))

    def _k(self, step: Step, port: Port, name: str) -> float:
        return _in(step, port) * self._s(name)

    def _linear(self, step: Step) -> Step:
        at, weight, _ = WEIGHTS[name_of(step)]
        self._absorb(step, weight, self._k(step, at, step.args[at].name) if isinstance(step.args[at], Ref) else 1.0)
        return self._keeping(step, self._of_bias(step), 1.0, "a bias that other operations use too")

    def _of_bias(self, step: Step) -> dict[Port, float]:
        """What is left of a bias's factors after they are moved into it: all where it is shared."""
        at = self._bias(step)
        if at is None:
            return {}
        if self._free(step.args[at]):
            self._absorb(step, at, 1.0)
            return {}
        return {at: _out(step) * self._k(step, at, step.args[at].name) / self._s(step.name)}

    def _absorb(self, step: Step, port: int, others: float) -> None:
        """Moves everything that multiplies a result into one of its tensors: a / s times the factors of all inputs."""
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
        """What is homogeneous in some of its inputs keeps one factor; what is not keeps those of every input."""
        homogeneous = dict(product or ())
        others = {port: self._k(step, port, name) for port, name in _ports(step) if port not in homogeneous}
        others |= self._of_bias(step)
        total = _out(step) / self._s(step.name)
        for port, name in homogeneous.items():
            total *= self._k(step, port, name)
        free = next(((port, name) for port, name in homogeneous.items() if self._free(Ref(name))), None)
        if free is not None:
            self._absorbed[free[1]] = total / self._s(free[1])
            return self._keeping(step, others, 1.0, "an input that is wanted at its own scale")
        if not homogeneous:
            return self._keeping(step, others, total, f"{name_of(step)} is not linear, and cannot take it")
        port = next(iter(homogeneous))  # at an input, for the result may be several tensors
        return self._keeping(step, {**others, port: total}, 1.0, "what could take it is used at another scale too")

    def _keeping(self, step: Step, inputs: Mapping[Port, float], output: float, why: str) -> Step:
        """The step with these multiplications and those that follow the batch."""
        change = step.change
        scales: dict[Port, Scale] = {}
        for port in {**inputs, **(change.inputs if change else {})}:
            given = change.inputs.get(port, Scale()).forward if change else ONE
            scale = self._noted(step, f"input {port}", given, inputs.get(port, 1.0), why)
            if scale is not None:
                scales[port] = scale
        out = self._noted(step, "output", change.output.forward if change else ONE, output, why)
        if not scales and out is None:
            return replace(step, change=None)
        kept = NodeChange(operation=name_of(step), why=why, output=out or Scale(), inputs=scales)
        return replace(step, change=kept)

    def _noted(self, step: Step, at: str, given: Factor, left: float, why: str) -> Scale | None:
        follows = given.of is not None
        if abs(left - 1) < _TOLERANCE and not follows:
            return None
        factor = replace(given, value=given.value * left) if follows else Factor(value=left)
        module = step.stack[-1][1] if step.stack else ""
        self.kept.append(
            Kept(
                operation=name_of(step), module=module, source=step.place, at=at, factor=None if follows else left,
                why="it follows the sizes of what comes" if follows else why,
            )
        )  # fmt: skip
        return Scale(forward=factor, backward=factor)


def _ports(step: Step) -> list[tuple[Port, str]]:
    """Every tensor that the step takes, but numbers that sizes give."""
    found: list[tuple[Port, str]] = []
    for port, nest in [*enumerate(step.args), *step.kwargs.items()]:
        if isinstance(nest, Ref):
            found.append((port, nest.name))
        elif isinstance(nest, (list, tuple)) and isinstance(port, int):
            found += [((port, i), one.name) for i, one in enumerate(nest) if isinstance(one, Ref)]  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    return found


def _constant(factor: Factor) -> float:
    return factor.value if factor.of is None else 1.0


def _out(step: Step) -> float:
    return 1.0 if step.change is None else _constant(step.change.output.forward)


def _in(step: Step, port: Port) -> float:
    scale = None if step.change is None else step.change.inputs.get(port)
    return 1.0 if scale is None else _constant(scale.forward)
