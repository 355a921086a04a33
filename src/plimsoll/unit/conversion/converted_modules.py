"""Modules of a converted model, whose forward is generated code."""

import linecache
import math
import operator
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from plimsoll.errors import StateError
from plimsoll.results import NotebookRepr
from plimsoll.unit.changes import ParameterChange, SkippedOperation
from plimsoll.unit.conversion.codegen import forward_signature
from plimsoll.unit.conversion.codegen.forward_signature import Signature
from plimsoll.unit.conversion.codegen.steps import Recipe
from plimsoll.unit.optim.parameter_kinds import tag, tag_depth
from plimsoll.unit.scaled_multiply import multiplied


@dataclass(frozen=True, slots=True, kw_only=True)
class RemainingFactor(NotebookRepr):
    """Multiplication that remains in a folded model.

    Attributes:
        operation: Name of the operation.
        module: Path of its module, "" for the root.
        source: Line of the model's source, "file:line", or None.
        at: `"output"`, or the input's position or keyword.
        factor: The factor, or None if it follows the batch.
        why: Reason why it remains.
    """

    operation: str
    module: str
    source: str | None
    at: str
    factor: float | None
    why: str

    def __str__(self) -> str:
        by = "a run-time factor" if self.factor is None else f"{self.factor:.4g}"
        location = f" ({self.source})" if self.source else ""
        return f"{self.module or 'model'}: {self.at} of {self.operation}{location} times {by}: {self.why}"


# Name in version 0.1, kept for one release.
Kept = RemainingFactor


def size_factor(tensor: Tensor, dims: tuple[int, ...], power: float, value: float) -> float:
    """Return ``value * n ** power``, n the product of these sizes, at least 1."""
    count = 1
    for dim in dims:
        count = count * tensor.shape[dim]
    return value * max(count, 1) ** power


def sized(x: Tensor, alpha: float | None, beta: float | None) -> Tensor:
    """Return `scaled` by factors that depend on sizes, None for 1."""
    # A comparison with 1 would specialize compiled code to a size.
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
    """Code of a part."""

    name: str
    text: str  # Python source of its methods
    # Class of torch.nn that the part replaces, a base of its class, so that `isinstance` still works. None for a custom
    # module.
    like: type[nn.Module] | None = None
    # Objects that the text names and that Python cannot write.
    objects: Mapping[str, Any] = field(default_factory=dict[str, Any])


class Part(nn.Module):
    """Module of a converted model: the original's state, with generated code.

    Its inputs and outputs are the values that cross its border in the graph, in the order of their first use. The
    original may have modules and parameters with the names of its own attributes. So those are set by `vars`.
    """

    _code: Code
    _draws: dict[str, ParameterChange]
    _names: dict[str, str]
    _seed: int | None

    @property
    def code(self) -> str:
        """Python source of its forward."""
        return self._code.text

    @property
    def like(self) -> type[nn.Module] | None:
        """Class of torch.nn that it replaces."""
        return self._code.like

    def reset_parameters(self) -> None:
        """Draw its own parameters again, as after a move from the meta device."""
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
    """Model in which every operation has its factors. It is called like the original."""

    _coverage: list[SkippedOperation]
    recipe: Recipe
    signature: Signature
    _all_draws: dict[str, ParameterChange]

    def describe(
        self,
        recipe: Recipe,
        signature: Signature,
        skipped: Sequence[SkippedOperation],
        parameters: Mapping[str, ParameterChange],
        seed: int | None,
    ) -> None:
        """Set the recipe, the signature, and the draws of all parameters."""
        own = {"recipe": recipe, "signature": signature, "_coverage": list(skipped), "_all_draws": dict(parameters)}
        vars(self).update(own)
        for path, module in named_modules(self):
            _tag(module, path, parameters)
            if isinstance(module, Part):
                inside = {name: f"{path}.{name}" if path else name for name in module._parameters}  # noqa: SLF001
                draws = {name: parameters[full] for name, full in inside.items() if full in parameters}
                vars(module).update(_draws=draws, _names=inside, _seed=seed)

    @property
    def coverage(self) -> list[SkippedOperation]:
        """Operations that were not converted, and why. Empty if all were."""
        return list(self._coverage)

    def reset_parameters(self) -> None:
        """Draw all parameters again, and reset the running statistics of norms."""
        parameters = dict(self.named_parameters(remove_duplicate=False))
        for name, change in self._all_draws.items():
            draw(parameters[name], change, seed=self._seed, name=name)
        for module in self.modules():
            reset = getattr(module, "reset_running_stats", None)
            if callable(reset):
                reset()


class Folded(Part):
    """Converted model as plain weights, for inference. See `unit.fold`."""

    _kept: list[RemainingFactor]

    @property
    def kept(self) -> list[RemainingFactor]:
        """Multiplications that remain, with reasons. Empty if weights took all."""
        return list(self._kept)

    def note(self, remaining: Sequence[RemainingFactor]) -> None:
        """Set the multiplications that remain."""
        vars(self).update(_kept=list(remaining))

    def train(self, mode: bool = True) -> Self:
        """Raise an error for training mode: the gradients' factors are gone.

        Raises:
            StateError: `mode` is True.
        """
        if mode:
            raise StateError(
                "fold: expected a folded model to stay in evaluation; got train(). Train the converted model, and fold "
                "it again."
            )
        return super().train(False)


def named_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return every module under each of its names."""
    return list(cast("Iterator[tuple[str, nn.Module]]", model.named_modules(remove_duplicate=False)))


def _tag(module: nn.Module, path: str, parameters: Mapping[str, ParameterChange]) -> None:
    """Tag the module's own parameters with their kinds and depths, for the optimizers."""
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
    """Return an empty module with this code."""
    part = _empty(code, base)
    nn.Module.__init__(part)
    part._draws, part._seed = {}, None  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    return part


_classes: dict[tuple[Any, ...], type[Part]] = {}


# Each code gets a class, so that a block's type appears in the model's text as before, and twelve equal blocks share
# one. A part is pickled as its code and its state. Loading it needs neither the original model's source nor torch.fx.
def _class_of(code: Code, base: type[Part]) -> type[Part]:
    key = (code.name, code.text, code.like, base)
    if code.objects or key not in _classes:
        compiled = _compiled(code, base)
        if code.objects:
            return compiled
        _classes[key] = compiled
    return _classes[key]


def _compiled(code: Code, base: type[Part]) -> type[Part]:
    file = f"<plimsoll.unit.convert {code.name} {abs(hash(code.text)):x}>"
    linecache.cache[file] = (len(code.text), None, code.text.splitlines(keepends=True), file)  # for tracebacks
    space: dict[str, Any] = {**_SPACE, **code.objects}
    exec(compile(code.text, file, "exec"), space)  # noqa: S102  (text of codegen.code_writer)
    methods = {name: method for name, method in space.items() if name == "forward" or name.startswith("_call_")}
    return cast(
        "type[Part]",
        type(
            code.name, (base, code.like) if code.like else (base,), {**methods, "_code": code, "__module__": __name__}
        ),
    )


_SPACE: dict[str, Callable[..., Any] | Any] = {
    "torch": torch,
    "operator": operator,
    "math": math,
    "scaled": multiplied,
    "sized": sized,
    "size_factor": size_factor,
    "_inputs": forward_signature,
}


def _empty(code: Code, base: type[Part]) -> Part:
    part_class = _class_of(code, base)
    return part_class.__new__(part_class)


@torch.no_grad()
def draw(parameter: Tensor, change: ParameterChange, *, seed: int | None, name: str) -> None:
    """Draw a parameter again, unless it is on the meta device or is kept unchanged."""
    # With a seed each parameter has its own stream of the seed and its name, drawn on the CPU. So its values depend on
    # neither the device, nor the order, nor other parameters. Without a seed, torch's own generator draws. Torch always
    # draws distributed tensors, so that their shards agree.
    if parameter.is_meta or change.draw == "keep":
        return
    if change.draw != "normal":
        parameter.fill_(0.0 if change.draw == "zeros" else 1.0)
    elif seed is None or type(parameter.data) is not Tensor:
        parameter.normal_(std=change.std)
    else:
        stream = torch.Generator().manual_seed(seed ^ zlib.crc32(name.encode()) << 16)
        parameter.copy_(torch.empty(parameter.shape, device="cpu").normal_(std=change.std, generator=stream))
