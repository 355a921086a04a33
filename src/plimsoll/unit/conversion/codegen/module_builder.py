"""The converted model's modules: the tree of the original, each with the code of its part of the graph."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from plimsoll.unit.conversion.codegen.call_tree import Call, tree_of
from plimsoll.unit.conversion.codegen.code_writer import Writer
from plimsoll.unit.conversion.codegen.forward_signature import Signature, head_of, output_text
from plimsoll.unit.conversion.codegen.leaf_modules import leaf, not_in_place, torch_class
from plimsoll.unit.conversion.codegen.steps import Recipe, Ref
from plimsoll.unit.conversion.converted_modules import Code, Converted, Folded, Part, make

_INDENT = "    "


class Builder:
    """Builds a model from a recipe, in the places of `source`, the model that the recipe was read from."""

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
        self._versions: dict[Call, int] = {}  # which of its module's codes a call runs
        self._made: dict[int, nn.Module] = {}  # by the original module, so that shared ones stay shared
        self._tensors: dict[int, Tensor] = {}

    def build(self) -> Part:
        """The model, its parameters and buffers copies of the source's."""
        tree = tree_of(self._recipe)
        calls: dict[str, list[Call]] = {}
        for call in _inner_first(tree):
            calls.setdefault(self._canonical(call.path), []).append(call)
        replaced: dict[str, nn.Module] = {}
        for path, group in calls.items():
            if path:
                original = self._source.get_submodule(path)
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
        """One forward, or one for each of the calls that differ."""
        texts: list[str] = []
        for call in group:
            text = self._call_text(call)
            if text not in texts:
                texts.append(text)
            self._versions[call] = texts.index(text)
        original = self._source.get_submodule(path)
        name = _class_name(original)
        if len(texts) == 1:
            return Code(name=name, text=f"def forward{texts[0]}", like=like(original))
        methods = "\n\n".join(f"def _call_{i}{text}" for i, text in enumerate(texts))
        chosen = ", ".join(f"self._call_{i}" for i in range(len(texts)))
        head = f"def forward(self, *args, call=0):\n{_INDENT}return ({chosen})[call](*args)\n"
        return Code(name=name, text=f"{head}\n{methods}")

    def _call_text(self, call: Call) -> str:
        writer = Writer(self._recipe, call, self._versions)
        given = [writer.named(name, "x") for name in call.inputs]
        lines = writer.body(kept=call.outputs)
        returned = ", ".join(writer.local[name] for name in call.outputs)
        lines = [*lines, f"return {returned}".rstrip()]
        return f"({', '.join(['self', *given])}):\n" + "".join(f"{_INDENT}{line}\n" for line in lines)

    def _root_code(self, tree: Call) -> Code:
        writer = Writer(self._recipe, tree, self._versions)
        writer.reserve(one.parameter.name for one in self._signature.arguments)
        head = head_of(self._signature, writer.named)
        lines = writer.body(kept=tree.outputs)
        used: set[str] = set()
        values = [writer.value(one, used) if isinstance(one, Ref) else repr(one) for one in self._recipe.outputs]
        returned = output_text(self._signature.output, values, head.objects)
        body = "".join(f"{_INDENT}{line}\n" for line in [*head.lines, *lines, f"return {returned}"])
        text = f"def forward({', '.join(['self', *head.parameters])}):\n{body}"
        return Code(name=_class_name(self._source), text=text, objects=head.objects)

    def _assemble(self, made: Any, original: Any, path: str, replaced: Mapping[str, nn.Module]) -> None:
        """Fills a module with the original's tensors and modules, and those likewise."""
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
        """The copy of a tensor: one and the same for what is shared."""
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
        """Tensors that the model's code made out of numbers, beside the code that uses them; they are not state."""
        constants = {name: one.paths[0] for name, one in self._recipe.sources.items() if one.kind == "constant"}
        for path, group in calls.items():
            owner = root.get_submodule(path)
            for call in group:
                for step in call.own_steps():
                    for name in step.refs():
                        if constants.get(name) in self._constants:
                            value = self._constants[constants[name]]
                            owner.register_buffer(constants[name], value.detach().clone(), persistent=False)


def _inner_first(call: Call) -> Iterator[Call]:
    for inner in call.calls():
        yield from _inner_first(inner)
    yield call


def _class_name(module: nn.Module) -> str:
    name = type(module).__name__
    return name if name.isidentifier() else "Part"


def like(module: nn.Module) -> type[nn.Module] | None:
    """The class of torch.nn that a generated part keeps, so that isinstance and its picture are as they were.

    Not `nn.Linear`, for one with code of its own has factors in it that whoever replaces linears would lose.
    """
    return None if isinstance(module, nn.Linear) else torch_class(module)


def shell(module: nn.Module) -> nn.Module:
    """A copy of a module without its tensors, its modules and its hooks."""
    kind = (torch_class(module) or Part) if isinstance(module, Part) else type(module)
    copied = object.__new__(kind)
    nn.Module.__init__(copied)
    _adopt(copied, module)
    return copied


def _adopt(made: nn.Module, module: nn.Module) -> None:
    """Gives a module the other's own attributes, as sizes and flags; what torch keeps in every module stays."""
    vars(made).update({name: value for name, value in vars(module).items() if name not in vars(made)})
    not_in_place(made)
