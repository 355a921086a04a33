"""Reference of a step with some errors added where they arose."""

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from plimsoll.microscope.blame.interception import Around, Call, in_backward, intercepted, is_float
from plimsoll.microscope.blame.local_errors import LocalErrors, Point
from plimsoll.watch.shadow.replay import as_wide, borrowed, in_reference, leaf
from plimsoll.watch.shadow.rng_state import RandomState

Gradients = dict[int, Tensor]  # by the parameter's identity


class Reference:
    """The reference of one closure, which can be run again and again."""

    def __init__(
        self,
        root: nn.Module,
        names: Mapping[int, str],
        closure: Callable[[], Any],
        wide: torch.dtype,
        random: RandomState,
        buffers: list[dict[str, Tensor]],
    ) -> None:
        self._root, self._names, self._closure, self._wide = root, names, closure, wide
        self._random, self._buffers = random, buffers
        self._devices = {p.device for p in root.parameters()}
        self._leaves = {id(p): leaf(p, wide) for p in root.parameters()}
        self._points: dict[Point, Tensor] = {}
        self.gradients = self._run({}, keep=True)

    def with_values(self, errors: Iterable[LocalErrors]) -> Gradients:
        """Return by how much the gradients change if these errors of values are added."""
        found = self._run(_summed(e.values for e in errors), keep=False)
        return {key: g - self.gradients[key] for key, g in found.items() if key in self.gradients}

    def with_gradients(self, errors: Iterable[LocalErrors]) -> Gradients:
        """Return the change of the gradients by these errors, added on the way back."""
        listed = list(errors)
        added = _summed(e.gradients for e in listed)
        ends = {point: self._points[point] for point in added if point in self._points}
        ends = {point: y for point, y in ends.items() if y.requires_grad}
        found: Gradients = {}
        if ends:
            with self._as_reference(), intercepted(self._names, self._around({}, {})):
                found = self._backward(ends.values(), [added[point] for point in ends], keep=True)
        for key, e in _summed(one.parameters for one in listed).items():
            if key in self.gradients:
                found[key] = found[key] + e if key in found else e.to(self._wide)
        return found

    def _run(self, added: Mapping[Point, Tensor], *, keep: bool) -> Gradients:
        points: dict[Point, Tensor] = {}
        after = RandomState(self._devices)
        try:
            with self._as_reference(), intercepted(self._names, self._around(added, points)):
                self._random.restore()
                loss = self._closure()
                if keep:
                    self._points = points
                return self._backward([loss], [torch.ones_like(loss)], keep=keep)
        finally:
            after.restore()

    def _around(self, added: Mapping[Point, Tensor], points: dict[Point, Tensor]) -> Around:
        """Return what adds errors where modules are called, and notes the points."""
        times: Counter[str] = Counter()
        again: Counter[str] = Counter()

        def tap(x: Any, point: Point) -> Any:
            if not is_float(x):
                return x
            x = as_wide(x, self._wide)
            y = x + added[point].to(x.dtype) if point in added else x.view_as(x)
            if not in_backward():
                points[point] = y
            return y

        def around(name: str, module: nn.Module, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            del module
            counts = again if in_backward() else times  # a checkpoint's second forward has the same errors
            key = name, counts[name]
            counts[name] += 1
            leaves, spec = pytree.tree_flatten((args, kwargs))
            args, kwargs = pytree.tree_unflatten([tap(x, (key, "input", i)) for i, x in enumerate(leaves)], spec)
            found, spec = pytree.tree_flatten(call(*args, **kwargs))
            return pytree.tree_unflatten([tap(y, (key, "output", i)) for i, y in enumerate(found)], spec)

        return around

    @contextmanager
    def _as_reference(self) -> Generator[None]:
        with (
            in_reference(self._devices, None, self._wide),
            borrowed(self._root, self._leaves, self._buffers, self._wide),
        ):
            yield

    def _backward(self, ends: Iterable[Tensor], given: Iterable[Tensor], *, keep: bool) -> Gradients:
        wanted = {key: x for key, x in self._leaves.items() if x.requires_grad}
        listed = tuple(ends)
        seeds = tuple(g.to(y.dtype) for g, y in zip(given, listed, strict=True))
        engine = cast("Any", torch.autograd.Variable)._execution_engine  # noqa: SLF001  (see `CapturedCall.send_back`)
        found = engine.run_backward(
            listed, seeds, keep, False, tuple(wanted.values()), allow_unreachable=True, accumulate_grad=False
        )
        return {key: g.detach().to_dense() for key, g in zip(wanted, found, strict=True) if g is not None}


def _summed(found: Iterable[Mapping[Any, Tensor]]) -> dict[Any, Tensor]:
    total: dict[Any, Tensor] = {}
    for one in found:
        for key, e in one.items():
            total[key] = total[key] + e if key in total else e
    return total
