"""A recipe as a tree of calls: which steps ran in which call of which module, what went in and what came out.

The steps of one call follow one another, so a call is an interval of steps, and calls nest. Numbers that sizes give
belong to no call: whoever needs one computes it from a tensor at hand.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from plimsoll.unit.conversion.codegen.steps import Recipe, Ref, Sizes, Step, is_number, refs_in


@dataclass(slots=True, kw_only=True, eq=False)
class Call:
    """One call of a module.

    - `path`: the module's name; "" for the model. `items`: its own steps and the calls that it makes, in order.
    - `inputs`, `outputs`: the values that it takes and gives, in the order of their first use and of their making.
    """

    path: str
    key: str = ""
    items: "list[Step | Call]" = field(default_factory=list["Step | Call"])
    inputs: list[str] = field(default_factory=list[str])
    outputs: list[str] = field(default_factory=list[str])

    def steps(self) -> Iterator[Step]:
        """Every step in it, those of inner calls too."""
        for item in self.items:
            if isinstance(item, Step):
                yield item
            else:
                yield from item.steps()

    def own_steps(self) -> Iterator[Step]:
        """The steps that are not an inner call's."""
        return (item for item in self.items if isinstance(item, Step))

    def calls(self) -> "Iterator[Call]":
        """The calls that it makes itself."""
        return (item for item in self.items if isinstance(item, Call))

    def all_calls(self) -> "Iterator[Call]":
        """It, and every call in it."""
        yield self
        for call in self.calls():
            yield from call.all_calls()


def tree_of(recipe: Recipe) -> Call:
    """The call of the model, with all calls inside."""
    root = _grouped([step for step in recipe.steps if not is_number(step)], recipe.shared)
    borders = _Borders(recipe)
    borders.fill(root)
    root.inputs = []
    root.outputs = [one.name for one in recipe.outputs if isinstance(one, Ref)]
    return root


def _grouped(steps: Sequence[Step], shared: Mapping[str, tuple[str, ...]]) -> Call:
    root = Call(path="")
    opened = [root]
    for step in steps:
        stack = _nested(step, shared)
        depth = 0
        while depth < len(stack) and depth + 1 < len(opened) and opened[depth + 1].key == stack[depth][0]:
            depth += 1
        del opened[depth + 1 :]
        for key, path in stack[depth:]:
            call = Call(path=path, key=key)
            opened[-1].items.append(call)
            opened.append(call)
        opened[-1].items.append(step)
    return root


def _nested(step: Step, shared: Mapping[str, tuple[str, ...]]) -> list[tuple[str, str]]:
    """Its calls, each inside the one before; what a module calls outside of itself are its own steps."""
    stack: list[tuple[str, str]] = []
    for key, path in step.stack:
        inside = stack[-1][1] + "." if stack else ""
        named = next((one for one in shared.get(path, (path,)) if one.startswith(inside)), None)
        if named is not None:
            stack.append((key, named))
    return stack


class _Borders:
    """What crosses the border of each call."""

    def __init__(self, recipe: Recipe) -> None:
        self._sources = recipe.sources
        self._numbers = {step.name: step for step in recipe.steps if is_number(step)}
        self.sizes = Sizes(recipe)
        self._last_use: dict[str, int] = {}
        self._position = {step.name: i for i, step in enumerate(recipe.steps)}
        for i, step in enumerate(recipe.steps):
            for name in step.refs():
                self._last_use[name] = i
        for one in refs_in(list(recipe.outputs)):
            self._last_use[one] = len(recipe.steps)

    def fill(self, call: Call) -> tuple[int, int]:
        """Sets inputs and outputs of a call and of those in it; gives the positions of its first and last step."""
        inner = [self.fill(one) for one in call.calls()]
        own = [self._position[step.name] for step in call.own_steps()]
        first = min([*own, *(start for start, _ in inner)])
        last = max([*own, *(end for _, end in inner)])
        made = {step.name for step in call.steps()}
        call.inputs = self._inputs(call, made)
        call.outputs = [step.name for step in call.steps() if self._last_use.get(step.name, -1) > last]
        return first, last

    def _inputs(self, call: Call, made: set[str]) -> list[str]:
        needed: dict[str, None] = {}
        for item in call.items:
            for name in item.refs() if isinstance(item, Step) else item.inputs:
                if name not in made and name not in self._numbers and not self.has(call.path, name):
                    needed[name] = None
        at_hand = list(needed)
        for item in call.items:  # a number that no tensor at hand tells has to come in too
            for name in item.refs() if isinstance(item, Step) else item.inputs:
                if name in self._numbers and self.sizes.expression(name, at_hand) is None:
                    needed[name] = None
            at_hand += [item.name] if isinstance(item, Step) else item.outputs
        return list(needed)

    def has(self, path: str, name: str) -> bool:
        """Whether the module at `path` finds the value in itself, or in a module of its own."""
        source = self._sources.get(name)
        if source is None or source.kind == "input":
            return False
        return source.kind == "constant" or any(own_path(path, one) is not None for one in source.paths)


def own_path(module: str, tensor: str) -> str | None:
    """The name of a tensor as seen from a module; None where it is none of its own.

    >>> own_path("block.attention", "block.attention.out.weight"), own_path("block", "head.weight")
    ('out.weight', None)
    """
    if not module:
        return tensor
    return tensor[len(module) + 1 :] if tensor.startswith(module + ".") else None
