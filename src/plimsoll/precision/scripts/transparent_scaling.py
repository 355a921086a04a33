"""Transparent loss scaling: the training script sees only unscaled gradients.

Every `torch.autograd.backward` starts from its gradients times the scale. Each leaf of its graph (parameters and all
other tensors that collect gradients) divides the incoming gradient before it is accumulated, before the script's own
hooks run and before DistributedDataParallel averages. The scale is a power of two, so both steps are exact in FP32,
and clipping, accumulation, several backwards and several optimizers need no special care. The leaves come from the
graph itself, so parameters outside of any module are included.

The optimizer's `step` goes through a scaler. It checks the unscaled gradients, skips the step if they are not finite,
and takes its next scale. A watch sees it as any scaler. The end of an iteration is detected at the start of the next
one, and the scale is updated then.
"""

import contextlib
import functools
import types
import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from plimsoll.errors import PlimsollError
from plimsoll.scaling.dynamic import DynamicScaler
from plimsoll.scaling.step import Gradient, Gradients
from plimsoll.watch.hooks.autograd_graph import backward_running, leaves_of
from plimsoll.watch.parameters.optimizer_tensors import has_gradients

_WIDE = (torch.float32, torch.float64)  # dtypes of losses with enough range for the scale


def backward_roots(tensors: Any, kwargs: Any) -> list[Tensor] | None:
    """Return the roots of a backward, or None if it must not be scaled."""
    inputs = kwargs.get("inputs")
    if not isinstance(tensors, Tensor | list | tuple) or not isinstance(inputs, Tensor | list | tuple | None):
        return None
    listed: list[Any] = [tensors] if isinstance(tensors, Tensor) else [*tensors]
    asked: list[Any] = [inputs] if isinstance(inputs, Tensor) else [*(inputs or ())]
    plain = all(isinstance(x, Tensor) and x.is_leaf for x in asked)  # gradients of inner tensors are scaled
    if kwargs.get("grad_variables") is not None or not listed or not plain:
        return None
    fit = all(isinstance(x, Tensor) and x.requires_grad for x in listed)
    return cast("list[Tensor]", listed) if fit else None


def scaled_seeds(roots: Sequence[Tensor], gradients: Any, factor: float) -> list[Tensor] | None:
    """Return the scaled initial gradients, or None if they cannot be scaled.

    That is if torch will raise an error, or if the dtype lacks the range.
    """
    grads: list[Any] = [gradients] if gradients is None or isinstance(gradients, Tensor) else list(gradients)
    if len(grads) == 1 and grads[0] is None:
        grads *= len(roots)
    if len(grads) != len(roots) or any(root.dtype not in _WIDE for root in roots):
        return None
    if any(grad is None and root.numel() != 1 for root, grad in zip(roots, grads, strict=True)):
        return None
    return [
        torch.full_like(root, factor) if grad is None else grad * factor
        for root, grad in zip(roots, grads, strict=True)
    ]


@contextlib.contextmanager
def true_at_leaves(roots: Sequence[Tensor], inverse: float, *, nested: bool = False) -> Generator[list[Tensor]]:
    """Multiply the leaves' gradients of one backward by `inverse`."""
    task = [-1]

    def see(_: Tensor) -> None:
        task[0] = backward_running()

    def divide(g: Tensor | None) -> Tensor | None:
        return None if g is None or backward_running() != task[0] else g * inverse

    # A backward nested in this one does not run the hooks. In a backward that a re-entrant checkpoint runs, only
    # parameters are such leaves. The others stand for the checkpoint's inputs, and their gradients continue through the
    # outer graph.
    reached = {id(root): root for root in roots if root.grad_fn is None} | leaves_of(list(roots))
    leaves = [leaf for leaf in reached.values() if not nested or isinstance(leaf, torch.nn.Parameter)]
    handles = [_hook_first(leaf, divide) for leaf in leaves]
    handles += [_hook_first(root, see) for root in roots]
    try:
        yield leaves
    finally:
        for handle in handles:
            handle.remove()


def _hook_first(x: Any, hook: Callable[..., Any]) -> Any:
    """Register a hook that runs before the existing ones."""
    handle, hooks = x.register_hook(hook), x._backward_hooks  # noqa: SLF001  (torch calls them in its order)
    if len(hooks) > 1:
        others = list(hooks.items())[:-1]
        for key, _ in others:  # torch reads the underlying dict, where move_to_end of an OrderedDict has no effect
            del hooks[key]
        hooks.update(others)
    return handle


_foreach_norm: Callable[..., tuple[Tensor, ...]] = cast("Any", torch)._foreach_norm  # noqa: SLF001  (no public name)


class _Checking(DynamicScaler):
    """`DynamicScaler` for unscaled gradients, which only checks them."""

    def __init__(self, device: str) -> None:
        super().__init__(device)
        self.largest: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}  # largest gradient magnitude by leaf

    # Values are also checked at the end of the backward, because clipping by value turns Inf into a finite number.
    def _unscale(
        self, optimizer: Any, gradients: Gradients, inverse: Tensor, found_inf: Tensor
    ) -> dict[torch.device, Tensor]:
        per_device = super()._unscale(optimizer, gradients, torch.ones_like(inverse), found_inf)
        for device, these in gradients.by_device.items():
            seen = [largest for largest in map(self._seen, these) if largest is not None]
            if seen:
                per_device[device].logical_or_(torch.stack(seen).isfinite().all().logical_not())
        return per_device

    def forget(self, optimizer: Any) -> None:
        """Drop the magnitudes of the finished step."""
        for group in optimizer.param_groups:
            for p in group["params"]:
                self.largest.pop(id(p), None)

    def _seen(self, gradient: Gradient) -> Tensor | None:
        ref, largest = self.largest.get(id(gradient.parameter), (None, None))
        return largest if ref is not None and ref() is gradient.parameter else None


class TransparentScaler:
    """Loss scale of one process, and its effect on backwards and optimizers.

    `stop` is called with the reason if scaling cannot go on. It calls `end`, after which nothing is scaled or skipped.
    """

    def __init__(self, stop: Callable[[str], None]) -> None:
        self._stop = stop
        self.scaler: DynamicScaler | None = None  # set once a model is at the level
        self._factor = 1.0
        self._scaled = False  # whether a backward has run
        self._running: tuple[float, float] | None = None  # scale and its inverse, while a backward runs
        self._stepped: set[int] = set()  # optimizers of this iteration
        self._stepping: set[int] = set()  # optimizers that the scaler steps at this moment
        self._gates: list[weakref.ref[_Gate]] = []

    def begin(self, device: torch.device) -> None:
        """Scale from the next backward on."""
        if self.scaler is None:
            self.scaler = _Checking(device.type)
            self._factor = self.scaler.get_scale()

    def end(self) -> None:
        """Stop scaling. A backward that is running ends with the scale that it began with."""
        self.scaler = None
        for gate in filter(None, (ref() for ref in self._gates)):
            gate.remove()
        self._gates.clear()

    def settle(self) -> None:
        """Start a new iteration: update the scale from the gradients of the one before."""
        if self._stepped and self.scaler is not None:
            self._stepped.clear()
            self.scaler.update()
            self._factor = self.scaler.get_scale()

    # -- backward ------------------------------------------------------------------------------------------------------

    def backward(self, original: Callable[..., None], tensors: Any, args: tuple[Any, ...], kwargs: Any) -> None:
        """Run a backward that gives all leaves their true gradients."""
        roots = backward_roots(tensors, kwargs)
        if roots is None or self.scaler is None:
            original(tensors, *args, **kwargs)
        elif backward_running() == -1:
            self.settle()
            self._outermost(original, roots, tensors, args, dict(kwargs))
        elif self._running is not None:  # a re-entrant checkpoint, whose gradients are scaled already
            with true_at_leaves(roots, self._running[1], nested=True):
                original(tensors, *args, **kwargs)
        else:
            original(tensors, *args, **kwargs)

    def _outermost(
        self, original: Callable[..., None], roots: list[Tensor], tensors: Any, args: tuple[Any, ...], kwargs: Any
    ) -> None:
        gradients: Any = kwargs.pop("grad_tensors", None) if not args else args[0]
        gradients = gradients if gradients is None or isinstance(gradients, Tensor) else [*gradients]
        scaler, seeds = cast("_Checking", self.scaler), scaled_seeds(roots, gradients, self._factor)
        if seeds is None:
            original(tensors, gradients, *args[1:], **kwargs)
            return
        losses = [root.detach() for root in roots if root.numel() == 1]
        scaler.scale(losses or roots[0].new_zeros(()))  # creates the scale at first use, and keeps losses for reports
        self._running = self._factor, 1.0 / self._factor
        try:
            with true_at_leaves(roots, self._running[1]) as leaves:
                original(roots, seeds, *args[1:], **kwargs)
        finally:
            self._running = None
        self._scaled = True
        _note_largest(leaves, scaler.largest)

    # -- optimizers ----------------------------------------------------------------------------------------------------

    def gate(self, optimizer: torch.optim.Optimizer) -> None:
        """Route the optimizer's steps through the scaler from now on."""
        if not isinstance(optimizer.__dict__.get("step"), _Gate):
            self._gates = [ref for ref in self._gates if ref() is not None]
            gate = _Gate(optimizer, self._step)
            self._gates.append(weakref.ref(gate))

    def _step(self, original: Callable[..., Any], optimizer: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        if self.scaler is None or id(optimizer) in self._stepping:
            return original(optimizer, *args, **kwargs)
        args, kwargs, closure = _without_closure(args, dict(kwargs))
        if closure is None:
            return self._checked(original, optimizer, args, kwargs)
        if isinstance(optimizer, torch.optim.LBFGS) or not type(optimizer).__module__.startswith("torch.optim"):
            self._stop(f"{type(optimizer).__name__} evaluates the loss within its step")
            return original(optimizer, *args, closure=closure, **kwargs)
        with torch.enable_grad():  # torch's own optimizers, except LBFGS, call it once, before anything else
            loss = closure()
        self._checked(original, optimizer, args, kwargs)
        return loss

    def _checked(self, original: Callable[..., Any], optimizer: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        scaler = self.scaler
        if scaler is None or not self._scaled or not has_gradients(optimizer):
            return original(optimizer, *args, **kwargs)
        if id(optimizer) in self._stepped:
            self.settle()
        try:
            scaler.unscale_(optimizer)
        except PlimsollError as error:
            self._stop(str(error))
            return original(optimizer, *args, **kwargs)
        self._stepped.add(id(optimizer))
        self._stepping.add(id(optimizer))
        try:
            return scaler.step(optimizer, *args, **kwargs)
        finally:
            self._stepping.discard(id(optimizer))
            cast("_Checking", scaler).forget(optimizer)


class _Gate:
    """Replacement of an optimizer's `step`, which schedulers can wrap."""

    def __init__(self, optimizer: torch.optim.Optimizer, step: Callable[..., Any]) -> None:
        self._optimizer = weakref.ref(optimizer)
        inner = cast("Any", optimizer.step).__func__

        @functools.wraps(inner)
        def gated(stepped: Any, *args: Any, **kwargs: Any) -> Any:
            return step(inner, stepped, args, kwargs)

        self.__func__ = gated
        functools.update_wrapper(self, gated)
        optimizer.__dict__["step"] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__func__(self._optimizer(), *args, **kwargs)

    def remove(self) -> None:
        """Restore the optimizer's own step, unless a scheduler has wrapped this one."""
        optimizer = self._optimizer()
        if optimizer is not None and optimizer.__dict__.get("step") is self:
            del optimizer.__dict__["step"]


def _without_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    if args and (args[0] is None or callable(args[0])):
        return args[1:], kwargs, args[0]
    return args, kwargs, kwargs.pop("closure", None)


def _note_largest(leaves: Iterable[Tensor], largest: dict[int, tuple[weakref.ref[Tensor], Tensor]]) -> None:
    """Record the largest magnitude of each gradient, in one sweep per device."""
    for key in [key for key, (ref, _) in largest.items() if ref() is None]:
        del largest[key]
    by_device: dict[torch.device, list[Tensor]] = {}
    for leaf in leaves:
        largest.pop(id(leaf), None)
        g = leaf.grad
        if g is not None and type(g) is Tensor and g.layout is torch.strided and g.numel():
            by_device.setdefault(g.device, []).append(leaf)
    for these in by_device.values():
        norms = _foreach_norm([cast("Tensor", leaf.grad).detach() for leaf in these], float("inf"))
        largest.update((id(leaf), (weakref.ref(leaf), norm)) for leaf, norm in zip(these, norms, strict=True))


def patched_backward(run: Callable[..., None]) -> Callable[[], None]:
    """Replace `torch.autograd.backward` by `run`. Return the undo function."""
    original = torch.autograd.backward

    @functools.wraps(original)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        run(original, tensors, args, kwargs)

    torch.autograd.backward = backward

    def restore() -> None:
        if cast("types.ModuleType", torch.autograd).__dict__["backward"] is backward:
            torch.autograd.backward = original

    return restore
