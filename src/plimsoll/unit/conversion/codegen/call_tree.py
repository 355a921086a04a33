"""Tree of the calls in a recipe, each with its steps, its inputs and its outputs."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from plimsoll.unit.conversion.codegen.steps import Recipe, Ref, Sizes, Step, is_number, refs_in


@dataclass(slots=True, kw_only=True, eq=False)
class Call:
    """Call of a module.

    Attributes:
        path: Name of the module, "" for the model.
        key: Key of the call in the captured graph.
        items: Its own steps and the inner calls, in order.
        inputs: Values that it takes, in the order of their first use.
        outputs: Values that it returns, in the order of their computation.
    """

    path: str
    key: str = ""
    items: "list[Step | Call]" = field(default_factory=list["Step | Call"])
    inputs: list[str] = field(default_factory=list[str])
    outputs: list[str] = field(default_factory=list[str])

    def steps(self) -> Iterator[Step]:
        """Yield every step, with those of inner calls."""
        for item in self.items:
            if isinstance(item, Step):
                yield item
            else:
                yield from item.steps()

    def own_steps(self) -> Iterator[Step]:
        """Yield the steps without those of inner calls."""
        return (item for item in self.items if isinstance(item, Step))

    def calls(self) -> "Iterator[Call]":
        """Yield the direct inner calls."""
        return (item for item in self.items if isinstance(item, Call))


def tree_of(recipe: Recipe) -> Call:
    """Return the call of the model, with all calls inside."""
    root = _grouped([step for step in recipe.steps if not is_number(step)], recipe.shared)
    _Borders(recipe).fill(root)
    root.inputs = []
    root.outputs = [output.name for output in recipe.outputs if isinstance(output, Ref)]
    return root


# The steps of one call are consecutive, so a call is an interval of steps, and calls nest. Numbers that are computed
# from sizes belong to no call. Each call computes the numbers that it needs from its own tensors.
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
    """Return the calls around a step, each within the one before."""
    stack: list[tuple[str, str]] = []
    for key, path in step.stack:
        inside = stack[-1][1] + "." if stack else ""
        # A module that is called from outside of its parent has no call of its own: its steps are the caller's.
        named = next((name for name in shared.get(path, (path,)) if name.startswith(inside)), None)
        if named is not None:
            stack.append((key, named))
    return stack


class _Borders:
    """Inputs and outputs of each call."""

    def __init__(self, recipe: Recipe) -> None:
        self._sources = recipe.sources
        self._numbers = {step.name: step for step in recipe.steps if is_number(step)}
        self.sizes = Sizes(recipe)
        self._last_use: dict[str, int] = {}
        self._position = {step.name: i for i, step in enumerate(recipe.steps)}
        for i, step in enumerate(recipe.steps):
            for name in step.refs():
                self._last_use[name] = i
        for name in refs_in(list(recipe.outputs)):
            self._last_use[name] = len(recipe.steps)

    def fill(self, call: Call) -> tuple[int, int]:
        """Set inputs and outputs of a call and inner ones. Return its first and last step."""
        inner = [self.fill(inner_call) for inner_call in call.calls()]
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
        for item in call.items:  # a number that follows from no tensor at hand is an input too
            for name in item.refs() if isinstance(item, Step) else item.inputs:
                if name in self._numbers and self.sizes.expression(name, at_hand) is None:
                    needed[name] = None
            at_hand += [item.name] if isinstance(item, Step) else item.outputs
        return list(needed)

    def has(self, path: str, name: str) -> bool:
        """Return whether a value is a tensor of a module, or of one inside it."""
        source = self._sources.get(name)
        if source is None or source.kind == "input":
            return False
        return source.kind == "constant" or any(own_path(path, tensor) is not None for tensor in source.paths)


def own_path(module: str, tensor: str) -> str | None:
    """Return the name of a tensor as seen from a module, or None for another module's.

    >>> own_path("block.attention", "block.attention.out.weight"), own_path("block", "head.weight")
    ('out.weight', None)
    """
    if not module:
        return tensor
    return tensor[len(module) + 1 :] if tensor.startswith(module + ".") else None
