"""Builder of the converted model: the original's modules, with generated code."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from plimsoll.unit import nn as unit_nn
from plimsoll.unit.changes import Factor, Scale
from plimsoll.unit.conversion.codegen.code_writer import Call, Writer, constant_name, tree_of
from plimsoll.unit.conversion.codegen.forward_signature import Signature, head_of, output_text
from plimsoll.unit.conversion.codegen.steps import NORMS, Recipe, Ref, Step, name_of
from plimsoll.unit.conversion.converted_modules import Code, Converted, Folded, Part, make, named_modules
from plimsoll.unit.formulas import Factors

_INDENT = "    "

_NOTHING = Scale()
_ROWS = -0.5  # power of a product's rows in the factor of its weight's gradient

# Modules of torch that stay if their only operation has no factors.
_PLAIN: dict[type[nn.Module], str] = {
    nn.Linear: "linear",
    nn.Embedding: "embedding",
    nn.LayerNorm: "layer_norm",
    nn.RMSNorm: "rms_norm",
    nn.GroupNorm: "group_norm",
    nn.BatchNorm1d: "batch_norm",
    nn.BatchNorm2d: "batch_norm",
    nn.BatchNorm3d: "batch_norm",
    nn.Conv1d: "conv1d",
    nn.Conv2d: "conv2d",
    nn.Conv3d: "conv3d",
    nn.ConvTranspose2d: "conv_transpose2d",
    nn.GELU: "gelu",
    nn.ReLU: "relu",
    nn.SiLU: "silu",
    nn.Tanh: "tanh",
    nn.Sigmoid: "sigmoid",
    nn.Dropout: "dropout",
    nn.MaxPool2d: "max_pool2d",
    nn.AvgPool2d: "avg_pool2d",
    nn.AdaptiveAvgPool2d: "adaptive_avg_pool2d",
    nn.Flatten: "flatten",
}


class Builder:
    """Builder of a model from a recipe, with the modules of `source`, its original."""

    def __init__(
        self,
        recipe: Recipe,
        source: nn.Module,
        signature: Signature,
        constants: Mapping[str, Any],
        base: type[Part] = Converted,
    ) -> None:
        self._recipe, self._source, self._signature = recipe, source, signature
        self._constants, self._base = constants, base
        self._originals = dict(named_modules(source))
        self._versions: dict[Call, int] = {}  # index of the code that a call runs among those of its module
        self._made: dict[int, nn.Module] = {}  # by the original module, so that shared ones stay shared
        self._tensors: dict[int, Tensor] = {}

    def build(self) -> Part:
        """Return the model, with copies of the source's parameters and buffers."""
        tree = tree_of(self._recipe)
        calls: dict[str, list[Call]] = {}
        for call in _inner_first(tree):
            calls.setdefault(self._canonical(call.path), []).append(call)
        replaced: dict[str, nn.Module] = {}
        for path, group in calls.items():
            if path:
                original = self._originals[path]
                replaced[path] = leaf(original, group, folded=self._base is Folded) or self._part(original, path, group)
        root = make(self._root_code(tree), self._base)
        self._assemble(root, self._source, "", replaced)
        self._register_constants(root, calls)
        return root

    def _part(self, original: nn.Module, path: str, group: list[Call]) -> Part:
        part = make(self._code(path, group))
        if part.like is not None:
            _adopt(part, original)
        return part

    def _canonical(self, path: str) -> str:
        return self._recipe.shared.get(path, (path,))[0]

    def _code(self, path: str, group: list[Call]) -> Code:
        """Return one forward, or one for each of the calls that differ."""
        texts: list[str] = []
        for call in group:
            text = self._call_text(call)
            if text not in texts:
                texts.append(text)
            self._versions[call] = texts.index(text)
        original = self._originals[path]
        name = _class_name(original)
        if len(texts) == 1:
            return Code(name=name, text=f"def forward{texts[0]}", like=like(original))
        methods = "\n\n".join(f"def _call_{i}{text}" for i, text in enumerate(texts))
        chosen = ", ".join(f"self._call_{i}" for i in range(len(texts)))
        head = f"def forward(self, *args, call=0):\n{_INDENT}return ({chosen})[call](*args)\n"
        return Code(name=name, text=f"{head}\n{methods}")

    def _call_text(self, call: Call) -> str:
        writer = Writer(self._recipe, call, self._versions)
        parameters = [writer.named(name, "x") for name in call.inputs]
        lines = writer.body(call.outputs)
        returned = ", ".join(writer.local[name] for name in call.outputs)
        lines = [*lines, f"return {returned}".rstrip()]
        return f"({', '.join(['self', *parameters])}):\n" + "".join(f"{_INDENT}{line}\n" for line in lines)

    def _root_code(self, tree: Call) -> Code:
        writer = Writer(self._recipe, tree, self._versions)
        writer.reserve(argument.parameter.name for argument in self._signature.arguments)
        head = head_of(self._signature, writer.named)
        lines = writer.body(tree.outputs)
        used: set[str] = set()
        outputs = self._recipe.outputs
        values = [writer.value(value, used) if isinstance(value, Ref) else repr(value) for value in outputs]
        returned = output_text(self._signature.output, values, head.objects)
        body = "".join(f"{_INDENT}{line}\n" for line in [*head.lines, *lines, f"return {returned}"])
        text = f"def forward({', '.join(['self', *head.parameters])}):\n{body}"
        return Code(name=_class_name(self._source), text=text, objects=head.objects)

    def _assemble(self, made: Any, original: Any, path: str, replaced: Mapping[str, nn.Module]) -> None:
        """Fill a module with the original's tensors and modules, recursively."""
        self._made[id(original)] = made
        for name, parameter in original._parameters.items():  # noqa: SLF001
            made._parameters[name] = self._tensor(parameter)  # noqa: SLF001
        for name, buffer in original._buffers.items():  # noqa: SLF001
            made._buffers[name] = self._tensor(buffer)  # noqa: SLF001
        made._non_persistent_buffers_set = set(original._non_persistent_buffers_set)  # noqa: SLF001
        made.training = original.training
        for name, child in original._modules.items():  # noqa: SLF001
            inner = f"{path}.{name}" if path else name
            made._modules[name] = None if child is None else self._child(child, inner, replaced)  # noqa: SLF001

    def _child(self, child: nn.Module, path: str, replaced: Mapping[str, nn.Module]) -> nn.Module:
        if id(child) in self._made:
            return self._made[id(child)]
        made = replaced.get(self._canonical(path)) or shell(child)
        self._assemble(made, child, path, replaced)
        return made

    def _tensor(self, original: Any) -> Any:
        """Return the copy of a tensor. Shared tensors have one copy."""
        if original is None:
            return None
        if id(original) not in self._tensors:
            with torch.no_grad():
                copied = original.detach().clone()
            self._tensors[id(original)] = (
                nn.Parameter(copied, requires_grad=original.requires_grad)
                if isinstance(original, nn.Parameter)
                else copied
            )
        return self._tensors[id(original)]

    def _register_constants(self, root: nn.Module, calls: Mapping[str, list[Call]]) -> None:
        """Register tensors that the model's code makes of numbers as transient buffers."""
        sources = self._recipe.sources
        constants = {name: source.paths[0] for name, source in sources.items() if source.kind == "constant"}
        modules = dict(named_modules(root))
        for path, group in calls.items():
            for call in group:
                for step in call.own_steps():
                    for name in step.refs():
                        if constants.get(name) in self._constants:
                            value = self._constants[constants[name]]
                            own = constant_name(constants[name])
                            modules[path].register_buffer(own, value.detach().clone(), persistent=False)


def _inner_first(call: Call) -> Iterator[Call]:
    for inner in call.calls():
        yield from _inner_first(inner)
    yield call


def _class_name(module: nn.Module) -> str:
    name = type(module).__name__
    return name if name.isidentifier() else "Part"


def like(module: nn.Module) -> type[nn.Module] | None:
    """Return the class of torch.nn that a generated part keeps, or None."""
    # The class is for `isinstance` and the module's text. Never `nn.Linear`: a tool that replaces linear layers, as for
    # FP8, would lose the factors in the generated code.
    return None if isinstance(module, nn.Linear) else torch_class(module)


def shell(module: nn.Module) -> nn.Module:
    """Return a copy of a module without its tensors, its modules and its hooks."""
    kind = (torch_class(module) or Part) if isinstance(module, Part) else type(module)
    copied = object.__new__(kind)
    nn.Module.__init__(copied)
    _adopt(copied, module)
    return copied


def _adopt(made: nn.Module, module: nn.Module) -> None:
    """Copy attributes that only this module has, such as sizes and flags."""
    vars(made).update({name: value for name, value in vars(module).items() if name not in vars(made)})
    not_in_place(made)


def leaf(original: nn.Module, calls: list[Call], *, folded: bool) -> nn.Module | None:
    """Return an empty module without generated code for these calls, or None.

    That is `unit.nn.Linear` for `nn.Linear`, and torch's own module if its operation has no factors.
    """
    if any(list(call.calls()) or len(call.outputs) != 1 or len(call.inputs) != 1 for call in calls):
        return None
    if isinstance(original, nn.Linear) and not folded:
        return _linear(original, calls)
    kind = torch_class(original)
    if kind is None or not all(_is_plain(call, _PLAIN.get(kind)) for call in calls):
        return None
    return _plain(kind, original, calls)


def torch_class(module: nn.Module) -> type[nn.Module] | None:
    """Return the class of torch.nn of a module without children, or None."""
    own = type(module).__module__.startswith(("torch.nn.modules.", "plimsoll.unit."))
    if not own or list(module.children()):
        return None
    kinds = (kind for kind in type(module).__mro__ if kind.__module__.startswith("torch.nn.modules."))
    return next((kind for kind in kinds if kind is not nn.Module), None)


def not_in_place(made: Any) -> None:
    """Stop a module from writing over its input, which may be used scaled."""
    if getattr(made, "inplace", False):
        made.inplace = False


def _is_plain(call: Call, operation: str | None) -> bool:
    steps = [step for step in call.own_steps() if name_of(step) != "add_"]  # a norm's count of batches
    if len(steps) != 1 or name_of(steps[0]) != operation or steps[0].change is not None:
        return False
    passed = steps[0].args[1 if operation == "embedding" else 0]
    return passed == Ref(call.inputs[0]) and call.outputs == [steps[0].name] and not steps[0].regions


def _plain(kind: type[nn.Module], original: nn.Module, calls: list[Call]) -> nn.Module | None:
    made: Any = object.__new__(kind)
    nn.Module.__init__(made)
    own = {name: value for name, value in vars(original).items() if name not in vars(made) and not name.startswith("_")}
    vars(made).update(own)
    not_in_place(made)
    if _PLAIN[kind] in NORMS:
        at = NORMS[_PLAIN[kind]][2]
        epsilons = {step.args[at] for call in calls for step in call.own_steps() if name_of(step) == _PLAIN[kind]}
        made.eps = epsilons.pop()  # folding may have changed it
        if epsilons:
            return None
    return made


def _linear(original: nn.Linear, calls: list[Call]) -> nn.Module | None:
    all_factors = {_factors(call) for call in calls}
    factors = all_factors.pop()
    if all_factors or factors is None:
        return None
    own: Any = original._parameters  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    sizes = original.in_features, original.out_features
    return unit_nn.Linear(*sizes, own["bias"] is not None, device="meta", constraint=None, factors=factors)


def _factors(call: Call) -> Factors | None:
    """Return the factors of a call that is a single linear product, or None."""
    steps = list(call.own_steps())
    if len(steps) != 1 or steps[0].target != "aten.linear.default" or not _of_itself(steps[0], call):
        return None
    change = steps[0].change
    if change is None:
        return Factors(output=1.0, inputs=(1.0,), weight=1.0)
    scales = {port: change.inputs.get(port, _NOTHING) for port in (0, 1, 2)}
    if not change.output.backward.is_one or any(not scale.forward.is_one for scale in scales.values()):
        return None
    if change.output.forward.of is not None or scales[0].backward.of is not None:
        return None
    tensors = _of_tensors(steps[0], scales)
    if tensors is None:
        return None
    weight, moment = tensors
    output, inputs = change.output.forward.value, (scales[0].backward.value,)
    return Factors(output=output, inputs=inputs, weight=weight, moment=moment)


def _of_tensors(step: Step, scales: dict[int, Scale]) -> tuple[float | None, float] | None:
    """Return the weight's and bias's factor (None for rows**-1/2) and moment, or None."""
    biased = len(step.args) > 2 and step.args[2] is not None
    of_weight, of_bias = scales[1].backward, scales[2].backward
    if _is_rows(of_weight, step):
        if biased and not (_is_rows(of_bias, step) and of_bias.value == 1.0):
            return None
        return None, 1 / of_weight.value
    if of_weight.of is not None or of_bias.of is not None:
        return None
    shared = of_bias.value if biased else of_weight.value
    return shared, shared / of_weight.value


def _is_rows(factor: Factor, step: Step) -> bool:
    """Return whether the factor is a multiple of ``rows ** -1/2``."""
    dims = tuple(sorted(dim % len(step.sizes or (0,)) for dim in factor.dims))
    return (
        factor.of in (step.args[0].name, step.name)
        and dims == tuple(range(len(step.sizes or ()) - 1))
        and factor.power == _ROWS
    )


def _of_itself(step: Step, call: Call) -> bool:
    """Return whether the call is only this product with the module's weight."""
    return step.args[0] == Ref(call.inputs[0]) and call.outputs == [step.name] and not step.regions
