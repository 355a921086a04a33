"""Modules and lines of the program that torch.fx graph nodes were traced from."""

import re
from collections.abc import Mapping
from typing import Any, Literal

from plimsoll.tracing.call_site import Place, owner_of

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)')
_CAST = re.compile(r"\.(to|float|half|bfloat16|double|type|type_as)\(")
_STEPS = re.compile(r"\.(?!_modules\b)(\w+)|\[(?:'(\w+)'|\"(\w+)\"|(\d+))\]")


def path_of(node: Any) -> str | None:
    """Return the module of a node, as its name below the module that was compiled."""
    stack: Mapping[str, Any] = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    entry = next(reversed(list(stack.values())), None)
    return None if entry is None else path_below(str(entry[0]))


def path_below(expression: str) -> str:
    """Return the names by which Dynamo's expression reaches a module, from its root.

    >>> path_below("L['self']._modules['blocks']._modules['0'].attn"), path_below("L['self'].blocks[3]")
    ('blocks.0.attn', 'blocks.3')
    """
    rest = re.sub(r"^(?:[LG]\[[^\]]*\]|\w+)", "", expression)
    return ".".join(next(part for part in step if part) for step in _STEPS.findall(rest) if "_modules" not in step)


def place_of(node: Any) -> Place:
    """Return the line of a node's program: the innermost of the user's."""
    frames = list(_FRAME.finditer(str(node.meta.get("stack_trace") or "")))
    users = [frame for frame in frames if owner_of(frame["file"]) == "user"] or frames
    if not users:
        return Place()
    last = users[-1]
    return Place(file=last["file"], line=int(last["line"]), function=last["function"])


def cause_of(node: Any, place: Place) -> Literal["backward", "script", "autocast"]:
    """Return the origin of a cast in a graph traced with autograd and autocast."""
    if node.meta.get("fwd_nn_module_stack") is not None or "backward" in str(node.meta.get("partitioner_tag", "")):
        return "backward"
    stack: Mapping[str, Any] = node.meta.get("nn_module_stack") or {}
    kind = next((entry[1] for entry in reversed(list(stack.values()))), None)
    name = kind if isinstance(kind, str) else f"{getattr(kind, '__module__', '')}."
    # A graph has no calls of the program any more: a cast counts as the script's where its line casts, outside of
    # torch's own modules.
    return "script" if _CAST.search(place.text) and not name.startswith("torch.") else "autocast"
