"""What a conversion gives: modules whose forward is generated code, in the places and under the names of the originals.

A class is made for each code, so that a block's type shows in the model's picture as it did, and twelve equal blocks
share one. A part pickles as its code and its state; loading it needs neither the original model's source nor torch.fx.
"""

import linecache
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from plimsoll.errors import StateError
from plimsoll.notebook_repr import NotebookRepr
from plimsoll.unit.changes import Left, ParameterChange
from plimsoll.unit.conversion.codegen import input_checks as inputs
from plimsoll.unit.conversion.codegen.forward_signature import Signature
from plimsoll.unit.conversion.codegen.steps import Recipe
from plimsoll.unit.conversion.parameter_draw import draw
from plimsoll.unit.optim.parameter_kinds import tag, tag_depth
from plimsoll.unit.scaled_multiply import multiplied


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept(NotebookRepr):
    """A multiplication that stays in a folded model: by what, at which operation, and why.

    - `at`: "output", or the input: its position or keyword. `factor`: None where it follows the batch.
    """

    operation: str
    module: str
    source: str | None
    at: str
    factor: float | None
    why: str

    def __str__(self) -> str:
        by = "a run-time factor" if self.factor is None else f"{self.factor:.4g}"
        place = f" ({self.source})" if self.source else ""
        return f"{self.module or 'model'}: {self.at} of {self.operation}{place} times {by}: {self.why}"


def size_factor(tensor: Tensor, dims: tuple[int, ...], power: float, value: float) -> float:
    """``value * n ** power``, n the product of those sizes of the tensor; 1 takes the place of 0."""
    count = 1
    for dim in dims:
        count = count * tensor.shape[dim]
    return value * max(count, 1) ** power


def sized(x: Tensor, alpha: float | None, beta: float | None) -> Tensor:
    """`scaled` by factors that sizes give, None for 1: a comparison would bind compiled code to a size."""
    return cast("Tensor", _Sized.apply(x, alpha, beta))


class _Sized(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, alpha: float | None, _beta: float | None) -> Tensor:
        return x.view_as(x) if alpha is None else x * alpha

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG004  (torch's names)
        ctx.beta = inputs[2]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient if ctx.beta is None else gradient * ctx.beta, None, None


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """The code of a part: its text, its class's name, and the objects that the text names and Python cannot write.

    - `like`: the class of torch.nn that the part takes the place of, None for a model's own: so isinstance still tells.
    """

    name: str
    text: str
    like: type[nn.Module] | None = None
    objects: Mapping[str, Any] = field(default_factory=dict[str, Any])


class Part(nn.Module):
    """A module of a converted model: the original's parameters and modules, and its part of the graph as code.

    Its inputs and outputs are the values that cross its border in the graph, in the order of their first use.
    """

    _code: Code
    _draws: dict[str, ParameterChange]
    _names: dict[str, str]
    _seed: int | None

    @property
    def code(self) -> str:
        """The Python source of its forward."""
        return self._code.text

    @property
    def like(self) -> type[nn.Module] | None:
        """The class of torch.nn that it takes the place of."""
        return self._code.like

    def reset_parameters(self) -> None:
        """Draws its own parameters anew, as the conversion did: for a model that came from the meta device."""
        for name, change in self._draws.items():
            parameter = self._parameters[name]
            if parameter is not None:
                draw(parameter, change, seed=self._seed, name=self._names[name])

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        return _empty, (self._code, self._base()), self.__getstate__()

    def _base(self) -> "type[Part]":
        return next((kind for kind in (Converted, Folded) if isinstance(self, kind)), Part)

    def __getstate__(self) -> dict[str, Any]:
        return dict(self.__dict__)


class Converted(Part):
    """A model in which every operation has its factors; called as the original was."""

    _coverage: list[Left]
    recipe: Recipe
    signature: Signature
    _all_draws: dict[str, ParameterChange]

    def describe(
        self,
        recipe: Recipe,
        signature: Signature,
        left: Sequence[Left],
        parameters: Mapping[str, ParameterChange],
        seed: int | None,
    ) -> None:
        """Notes what the model was built from, and how its parameters and those of each part are drawn."""
        self.recipe, self.signature, self._coverage = recipe, signature, list(left)
        self._all_draws, self._seed = dict(parameters), seed
        for path, module in named_modules(self):
            _tag(module, path, parameters)
            if isinstance(module, Part):
                inside = {name: f"{path}.{name}" if path else name for name in module._parameters}  # noqa: SLF001
                module._draws = {name: parameters[full] for name, full in inside.items() if full in parameters}  # noqa: SLF001
                module._names, module._seed = inside, seed  # noqa: SLF001

    @property
    def coverage(self) -> list[Left]:
        """The operations that were not converted, and why; empty where everything was."""
        return list(self._coverage)

    def reset_parameters(self) -> None:
        """Draws all parameters anew, as the conversion did, and resets the running statistics of norms."""
        parameters = dict(self.named_parameters(remove_duplicate=False))
        for name, change in self._all_draws.items():
            draw(parameters[name], change, seed=self._seed, name=name)
        for module in self.modules():
            reset = getattr(module, "reset_running_stats", None)
            if callable(reset):
                reset()


class Folded(Part):
    """A converted model as plain weights, for inference; see `unit.fold`."""

    _kept: list[Kept]

    @property
    def kept(self) -> list[Kept]:
        """The multiplications that stay, each with why; empty where every factor is in a weight."""
        return list(self._kept)

    def note(self, kept: Sequence[Kept]) -> None:
        """Notes the multiplications that stay."""
        self._kept = list(kept)

    def train(self, mode: bool = True) -> Self:
        """Refuses to train: the gradients' factors are gone."""
        if mode:
            raise StateError(
                "fold: expected a folded model to stay in evaluation; got train(). Train the converted model, and fold "
                "it again."
            )
        return super().train(False)


def named_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Every module by each of its names."""
    return list(cast("Iterator[tuple[str, nn.Module]]", model.named_modules(remove_duplicate=False)))


def _tag(module: nn.Module, path: str, parameters: Mapping[str, ParameterChange]) -> None:
    """Notes the kinds of the module's own parameters, and how deep they are, for the optimizers."""
    kinds: dict[str, Any] = {}
    for name in module._parameters:  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
        change = parameters.get(f"{path}.{name}" if path else name)
        if change is not None:
            kinds[name] = change.kind
            if change.depth > 1:
                tag_depth(module, change.depth, name)
    if kinds:
        tag(module, **kinds)


def make(code: Code, base: type[Part] = Part) -> Part:
    """An empty module with this code."""
    part = _empty(code, base)
    nn.Module.__init__(part)
    part._draws, part._seed = {}, None  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    return part


_classes: dict[tuple[Any, ...], type[Part]] = {}


def _class_of(code: Code, base: type[Part]) -> type[Part]:
    key = (code.name, code.text, code.like, base)
    if code.objects or key not in _classes:
        made = _compiled(code, base)
        if code.objects:
            return made
        _classes[key] = made
    return _classes[key]


def _compiled(code: Code, base: type[Part]) -> type[Part]:
    file = f"<plimsoll.unit.convert {code.name} {abs(hash(code.text)):x}>"
    linecache.cache[file] = (len(code.text), None, code.text.splitlines(keepends=True), file)  # for tracebacks
    space: dict[str, Any] = {**_SPACE, **code.objects}
    exec(compile(code.text, file, "exec"), space)  # noqa: S102  (our own text: see _build_code)
    methods = {name: one for name, one in space.items() if name == "forward" or name.startswith("_call_")}
    return cast(
        "type[Part]",
        type(
            code.name, (base, code.like) if code.like else (base,), {**methods, "_code": code, "__module__": __name__}
        ),
    )


_SPACE: dict[str, Callable[..., Any] | Any] = {
    "torch": torch, "operator": operator, "math": math, "scaled": multiplied, "sized": sized,
    "size_factor": size_factor, "_inputs": inputs,
}  # fmt: skip


def _empty(code: Code, base: type[Part]) -> Part:
    made = _class_of(code, base)
    return made.__new__(made)
