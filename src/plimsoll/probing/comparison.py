"""Forwards in FP32 and in a format: flipped decisions, and broken values."""

import contextlib
import functools
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from plimsoll.watch.names import module_names, tensors_in
from plimsoll.watch.shadow.decisions import Decisions, Tally, class_axis, class_choice
from plimsoll.watch.shadow.replay import widened

Context = contextlib.AbstractContextManager[Any]


class Calls:
    """A model's first `most` calls with gradients: arguments, and classifying outputs."""

    def __init__(self, root: nn.Module, most: int) -> None:
        self._most = most
        self.kept: list[tuple[Any, Any]] = []
        self.class_axes: dict[str, int] = {}  # by the path of an output
        self._handles = [
            root.register_forward_pre_hook(self._begins, with_kwargs=True),
            root.register_forward_hook(self._ends),
        ]

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _begins(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        del module
        if len(self.kept) < self._most and torch.is_grad_enabled():
            self.kept.append(pytree.tree_map_only(Tensor, widened, (args, kwargs)))

    def _ends(self, module: nn.Module, args: Any, output: Any) -> None:
        del module, args
        for path, x in tensors_in(output):
            if x.requires_grad and path not in self.class_axes:
                x.register_hook(functools.partial(self._arrives, path))

    def _arrives(self, path: str, gradient: Tensor | None) -> None:
        # It is None if nothing used the output, one of several of its operation.
        axis = None if gradient is None else class_axis(gradient)
        if axis is not None:
            self.class_axes[path] = axis


@dataclass(slots=True)
class Comparison:
    """Results of the forwards."""

    # Shares of flipped and tied decisions and their margins, as a run has them.
    scalars: Mapping[str, float] = field(default_factory=dict[str, float])
    # Modules whose outputs have NaN or infinities in the format alone, in the order of the forward.
    broken: list[str] = field(default_factory=list[str])


@dataclass(slots=True)
class _Forward:
    decisions: Decisions = field(default_factory=Decisions)
    nonfinite: dict[str, None] = field(default_factory=dict[str, None])
    outputs: list[tuple[str, Tensor, bool]] = field(default_factory=list[tuple[str, Tensor, bool]])


def compare(root: nn.Module, calls: Calls, enter: Callable[[], Context]) -> Comparison:
    """Return how the kept calls differ in the format that `enter` opens; leaves the model in evaluation mode.

    The model's parameters are FP32 or wider, as the kept arguments are.
    """
    root.eval()
    tally, broken = Tally(), dict[str, None]()
    for args, kwargs in calls.kept:
        wide = _forward(root, args, kwargs, contextlib.nullcontext())
        low = _forward(root, args, kwargs, enter())
        tally.add_all(low.decisions, wide.decisions)
        for (path, x, are_logits), (_, expected, _) in zip(low.outputs, wide.outputs, strict=True):
            axis = calls.class_axes.get(path, -1 if are_logits and x.dim() > 1 else None)
            if axis is not None:
                tally.add(f"output{path}", class_choice(x, axis), class_choice(expected, axis))
        broken |= {name: None for name in low.nonfinite if name not in wide.nonfinite}
    return Comparison(scalars=tally.scalars(), broken=list(broken))


def _forward(root: nn.Module, args: Any, kwargs: Any, context: Context) -> _Forward:
    found = _Forward()
    torch.manual_seed(0)
    with torch.no_grad(), _recorded(root, found), context, found.decisions:
        output = root(*args, **kwargs)
    logits = getattr(output, "logits", None)  # of transformers
    found.outputs = [(path, x, x is logits) for path, x in tensors_in(output)]
    return found


@contextlib.contextmanager
def _recorded(root: nn.Module, found: _Forward) -> Generator[None]:
    """Context in which a forward notes its decisions and its broken values."""

    def begins(name: str, module: nn.Module, args: Any) -> None:
        del module, args
        found.decisions.enter(name)

    def ends(name: str, module: nn.Module, args: Any, output: Any) -> None:
        del module, args
        found.decisions.leave(name)
        if not all(bool(x.isfinite().all()) for _, x in tensors_in(output)):
            found.nonfinite[name] = None

    handles: list[Any] = []
    for name, module in module_names(root).items():
        handles.append(module.register_forward_pre_hook(functools.partial(begins, name)))
        handles.append(module.register_forward_hook(functools.partial(ends, name)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
