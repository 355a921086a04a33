"""A step as it is: inputs and outputs of module calls, and their gradients."""

import contextlib
import functools
import threading
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from plimsoll.errors import StateError
from plimsoll.kernels.operators.checks import is_transformed
from plimsoll.watch.hooks.autograd_graph import backward_running
from plimsoll.watch.shadow.replay import RandomState
from plimsoll.watch.thread_casts import active_casts

# -- calls of modules, each handed to a function that makes the call ---------------------------------------------------

Call = Callable[..., Any]


class Around(Protocol):
    """Wrapper around a module's call, its hooks included."""

    def __call__(
        self, name: str, module: nn.Module, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], /
    ) -> Any:
        """Return the call's result."""
        ...


def named(root: nn.Module, top: str) -> dict[int, str]:
    """Return the name of each module, by identity. Of several names the first counts."""
    found: dict[int, str] = {}
    for name, module in cast("Iterable[tuple[str, nn.Module]]", root.named_modules()):
        found.setdefault(id(module), name or top)
    return found


def in_backward() -> bool:
    """Return True if a backward runs on this thread.

    A forward that is called then is a checkpoint's recomputation.
    """
    return backward_running() != -1


@contextlib.contextmanager
def intercepted(names: Mapping[int, str], around: Around) -> Generator[None]:
    """Context in which this thread's calls of these modules go through `around`."""
    kind, thread = cast("Any", nn.Module), threading.get_ident()
    original = kind.__call__

    @functools.wraps(original)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        name = names.get(id(self))
        if name is None or threading.get_ident() != thread:
            return original(self, *args, **kwargs)
        return around(name, self, functools.partial(original, self), args, kwargs)

    kind.__call__ = call
    try:
        yield
    finally:
        kind.__call__ = original


def is_float(x: object) -> bool:
    """Return True for a floating tensor of values."""
    return isinstance(x, Tensor) and x.is_floating_point() and not x.is_meta


# -- recording ---------------------------------------------------------------------------------------------------------

LOSS = "loss"  # name of the unit that is the closure itself, around the model
Key = tuple[str, int]  # a module's name, and how many times it had been called


def calls_so_far() -> Counter[str]:
    """Return the numbers of calls by name at a step's start, where the closure itself was called.

    A module may have the closure's name.
    """
    return Counter({LOSS: 1})


@dataclass(slots=True, eq=False)
class CallRecord:
    """One call of a module, or of the closure."""

    key: Key  # the module's name, and the number of the call
    module: nn.Module | None  # None for the closure
    run: Callable[[list[Any]], Any]  # makes the call again, from the leaves of a structure
    inputs: list[Any]  # leaves of the arguments, copied before the call
    before: RandomState
    # Of the leaves that are floating tensors and require one, what the call handed on.
    input_gradients: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    wants_gradient: set[int] = field(default_factory=set[int])
    outputs: list[Any] = field(default_factory=list[Any])  # leaves of the result, copied after the call
    output_spec: Any = None
    output_gradients: dict[int, Tensor] = field(default_factory=dict[int, Tensor])  # what came back to it
    given_gradient: set[int] = field(default_factory=set[int])
    # Own parameters by owner and name: the parameter, and the gradient of this call's use.
    parameters: dict[tuple[int, str], tuple[Tensor, list[Tensor]]] = field(
        default_factory=dict[tuple[int, str], "tuple[Tensor, list[Tensor]]"]
    )
    owners: list[nn.Module] = field(default_factory=list[nn.Module])
    # Own buffers by owner and name, copied before the call.
    buffers: dict[tuple[int, str], Tensor] = field(default_factory=dict[tuple[int, str], Tensor])
    after: RandomState | None = None
    children: "list[CallRecord]" = field(default_factory=list["CallRecord"])  # calls within it, in order
    # Casts that acted within it, apart from those in its children, each with its format.
    acted: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])
    parts: dict[str, Any] = field(default_factory=dict[str, Any])  # by cast: the call again, with this cast alone


class Recorder:
    """Records the calls of one step."""

    def __init__(
        self,
        names: Mapping[int, str],
        called: Collection[int],
        devices: Collection[torch.device],
        at_exit: Callable[[CallRecord], None] | None = None,
    ) -> None:
        """`called`: modules that are called; others belong to the module around them."""
        self._names, self._called, self._devices, self._at_exit = names, set(called), devices, at_exit
        self._times = calls_so_far()
        self._stack: list[CallRecord] = []
        self.calls: list[CallRecord] = []

    def record(self, closure: Callable[[], Any]) -> Tensor:
        """Run the closure; return the loss, whose backward is still to come."""
        top = CallRecord(
            key=(LOSS, 0), module=None, run=lambda _: closure(), inputs=[], before=RandomState(self._devices)
        )
        self._stack.append(top)
        self.calls.append(top)
        with _collecting_casts(top), intercepted(self._names, self):
            loss = closure()
        top.outputs, top.output_spec = pytree.tree_flatten(loss.detach().clone())
        top.given_gradient, top.output_gradients = {0}, {0: torch.ones_like(loss.detach())}
        return loss

    def __call__(self, name: str, module: nn.Module, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call, and record it."""
        if in_backward():
            return call(*args, **kwargs)
        if is_transformed():  # tensors have no values here that could be kept for another run of the call
            raise StateError(
                "blame: expected a step whose modules run outside of torch.func transforms (vmap, grad); got one "
                f"that calls {name} inside one. Leave that part out of the step; the report itself has it."
            )
        leaves, spec = pytree.tree_flatten((args, kwargs))
        record = CallRecord(
            key=(name, self._times[name]),
            module=module,
            run=functools.partial(_again, call, spec),
            inputs=[_copied(x) for x in leaves],
            before=RandomState(self._devices),
        )
        self._times[name] += 1
        self._stack[-1].children.append(record)
        self.calls.append(record)
        given = [self._tapped(x, i, record) for i, x in enumerate(leaves)]
        self._stack.append(record)
        try:
            with self._own_tapped(module, record), _collecting_casts(record):
                args, kwargs = pytree.tree_unflatten(given, spec)
                found = call(*args, **kwargs)
        finally:
            self._stack.pop()
        record.after = RandomState(self._devices)
        outputs, record.output_spec = pytree.tree_flatten(found)
        record.outputs = [_copied(x) for x in outputs]
        for i, y in enumerate(outputs):
            if is_float(y) and y.requires_grad:
                record.given_gradient.add(i)
                y.register_hook(functools.partial(_store, record.output_gradients, i))
        if self._at_exit is not None:
            self._at_exit(record)
        return found

    def _tapped(self, x: Any, place: int, record: CallRecord) -> Any:
        """An argument by an alias of its own, whose gradient is what this call hands on."""
        if not is_float(x) or not x.requires_grad or not torch.is_grad_enabled():
            return x
        record.wants_gradient.add(place)
        alias = x.view_as(x)
        alias.register_hook(functools.partial(_store, record.input_gradients, place))
        return alias

    @contextmanager
    def _own_tapped(self, module: nn.Module, record: CallRecord) -> Generator[None]:
        """The module's own parameters by aliases of this call."""
        record.owners = list(_with_parts(module, self._called))
        lent: list[tuple[dict[str, Any], str, Tensor]] = []
        for number, owner in enumerate(record.owners):
            for name, b in owner.named_buffers(recurse=False):
                record.buffers[number, name] = b.detach().clone()
            held: dict[str, Any] = vars(owner)["_parameters"]
            for name, p in list(held.items()):
                if p is None:
                    continue
                gradients: list[Tensor] = []
                record.parameters[number, name] = p, gradients
                if p.requires_grad and torch.is_grad_enabled():
                    lent.append((held, name, p))
                    alias: Tensor = torch.ops.aten.alias(p)  # as a view it would refuse sparse gradients
                    alias.register_hook(functools.partial(_add, gradients))
                    held[name] = alias
        try:
            yield
        finally:
            for held, name, p in lent:
                held[name] = p


def called_modules(names: Mapping[int, str], closure: Callable[[], Any]) -> set[int]:
    """Return the modules that a step calls."""
    found: set[int] = set()

    def note(name: str, module: nn.Module, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        del name
        found.add(id(module))
        return call(*args, **kwargs)

    with torch.no_grad(), intercepted(names, note):
        closure()
    return found


def _with_parts(module: nn.Module, called: Collection[int]) -> Generator[nn.Module]:
    """Yield a module and those below that are never called, to the next called one."""
    yield module
    for child in module.children():
        if id(child) not in called:
            yield from _with_parts(child, called)


@contextmanager
def _collecting_casts(record: CallRecord) -> Generator[None]:
    before, active_casts.acted = active_casts.acted, record.acted
    try:
        yield
    finally:
        active_casts.acted = before


def _again(call: Call, spec: Any, leaves: list[Any]) -> Any:
    args, kwargs = pytree.tree_unflatten(leaves, spec)
    return call(*args, **kwargs)


def _copied(x: Any) -> Any:
    return x.detach().clone() if isinstance(x, Tensor) else x


# A gradient is None if nothing used a result, one of several of its operation.
def _add(found: list[Tensor], g: Tensor | None) -> None:
    if g is not None:
        found.append(g.to_dense())


def _store(found: dict[int, Tensor], place: int, g: Tensor | None) -> None:
    if g is not None:
        found[place] = g.detach()
