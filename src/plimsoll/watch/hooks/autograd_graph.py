"""The autograd graph of a loss: leaves, loss scale and values for the backward."""

import functools
import itertools
import re
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor

# Attributes of results, and of running statistics, which come from no other operation; others have arguments.
_RESULTS = ("_saved_result", "_saved_out", "_saved_logsumexp", "_saved_running_")
_LAST = 12  # nodes behind a loss that keep what the loss function was given
_NEAREST = 64  # nodes behind a loss among which its loss scale, or a softmax of it, is looked for
# Losses that apply a softmax or a sigmoid themselves, and the operation that has made probabilities of logits before.
_OF_LOGITS = {
    "LogSoftmaxBackward0": ("SoftmaxBackward0", "softmax"),
    "BinaryCrossEntropyWithLogitsBackward0": ("SigmoidBackward0", "sigmoid"),
}
_SAME_VALUES = re.compile(
    "(View|UnsafeView|ReshapeAlias|Transpose|T|Permute|Squeeze|Unsqueeze|Select|Slice|ToCopy|Clone)"
    r"Backward\d"
)  # operations between the two that choose, order or cast values

# The number of the backward that runs on this thread, -1 for none. torch has it nowhere in public.
backward_running = cast("Any", torch)._C._current_graph_task_id  # noqa: SLF001


def leaves_of(roots: "list[Tensor]") -> dict[int, Tensor]:
    """Return the leaves that a backward reaches, by identity; none in checkpoints."""
    variables = (getattr(node, "variable", None) for node in _nodes(roots))
    return {id(leaf): leaf for leaf in variables if leaf is not None}


def operations_of(root: Tensor) -> list[Any]:
    """Return the operations behind a tensor, in the order in which they ran."""
    nodes = [cast("Any", node) for node in _nodes([root]) if getattr(node, "variable", None) is None]
    return sorted(nodes, key=position)


def position(node: Any) -> int:
    """Return a node's place among the operations recorded on its thread."""
    return node._sequence_nr()  # noqa: SLF001  (public in all but name)


def widens(node: Any) -> bool:
    """Return whether the cast's new dtype holds every value of the old one."""
    maker, output = node.next_functions[0]
    before, after = maker._input_metadata[output].dtype, node._input_metadata[0].dtype  # noqa: SLF001  (likewise)
    return torch.promote_types(before, after) == after


def kept_values(node: Any) -> Iterator[tuple[bool, Tensor]]:
    """Yield the tensors kept for a node's backward, and whether it made them.

    Each comes with True if the operation has made it. Those that were freed, or changed in place since, are left out.
    """
    for name in _kept_names(cast("type[object]", type(node))):
        try:
            value: Any = getattr(node, name)
        except RuntimeError:
            continue
        for x in cast("list[Any]", value) if isinstance(value, (list, tuple)) else [value]:
            if isinstance(x, Tensor):
                yield name.startswith(_RESULTS), x


def is_nan_before(loss: Tensor) -> bool:
    """Return whether a value kept for the loss's last operations is NaN; on a CPU."""
    nodes = itertools.islice(_nodes([loss]), _LAST)
    kept = (x.detach() for node in nodes for _, x in kept_values(node))
    return any(x.is_floating_point() and x.device.type == "cpu" and bool(torch.isnan(x).any()) for x in kept)


@functools.cache
def _kept_names(kind: type) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_saved_") or name == "saved_tensors")


def is_scaled_by(root: Tensor, scale: Tensor) -> bool:
    """Return True if the tensor was computed from a recent product with `scale`."""
    for count, node in enumerate(_nodes([root])):
        if count == _NEAREST:
            return False
        if type(node).__name__ == "MulBackward0":
            try:
                other: Any = cast("Any", node)._saved_other  # noqa: SLF001  (documented in torch's autograd notes)
            except RuntimeError:  # an earlier backward has freed it
                continue
            if isinstance(other, Tensor) and other.data_ptr() == scale.data_ptr():
                return True
    return False


def squashed_twice(roots: "list[Tensor]") -> str:
    """Return "softmax" or "sigmoid" if a loss applies it to its own result, else ""."""
    for count, node in enumerate(_nodes(roots)):
        if count == _NEAREST:
            break
        wanted, name = _OF_LOGITS.get(type(node).__name__, ("", ""))
        before = cast("Any", node).next_functions[0][0] if wanted else None
        while before is not None and _SAME_VALUES.fullmatch(type(before).__name__):
            before = before.next_functions[0][0]
        if before is not None and type(before).__name__ == wanted:
            return name
    return ""


def _nodes(roots: "list[Tensor]") -> Iterator[object]:
    """The graph's nodes, nearest first."""
    wave: list[Any] = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen = set(wave)
    while wave:
        yield from wave
        following = {node for known in wave for node, _ in known.next_functions if node is not None}
        wave = list(following - seen)
        seen |= following
