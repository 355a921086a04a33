"""Shadow of a closure: its step once as it is, and once as its reference.

A run repeats the model on the arguments it was called with, since nothing tells it what the loss is. A closure tells:
both passes run it whole, the loss included. It is expected to use the same batch each time.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from plimsoll.errors import ArgumentError, StateError
from plimsoll.kernels.operators.checks import is_transformed
from plimsoll.watch.names import clean
from plimsoll.watch.session import WatchSession, begin_repetition, end_repetition
from plimsoll.watch.shadow import replay
from plimsoll.watch.shadow.capture import CapturedCall
from plimsoll.watch.shadow.comparisons import Comparisons, compared
from plimsoll.watch.shadow.decisions import Decisions
from plimsoll.watch.shadow.replay import (
    RandomState,
    as_wide,
    borrowed,
    draws_by_dtype,
    in_reference,
    leaf,
    tensors_of,
)
from plimsoll.watch.shadow.shadow_step import OTHER_DRAWS, Shadow

_OPERATION = "microscope"
_FAR = 0.5  # relative: a float input that differs by more is another batch, and not the same one rounded

Observer = Callable[[str, list[str], Tensor, Tensor, Tensor], None]


class _Observed(Comparisons):
    """Comparisons for an observer: collection, names, values, reference, errors."""

    def __init__(self, session: WatchSession, observer: Observer) -> None:
        super().__init__()
        self._session, self._observer = session, observer

    def add(self, series: Iterable[int], values: Tensor, reference: Tensor, **_: Any) -> bool:
        """Hand a pair to the observer; return whether the two can be compared."""
        if values.shape != reference.shape or values.device != reference.device:
            return False
        numbers = list(series)
        if numbers:
            names = [self._session.names[number] for number in numbers]
            self._observer(self._session.collections[numbers[0]], names, values, reference, compared(values, reference))
        return True


class ClosureShadow(Shadow):
    """Shadow steps whose repetition is the closure itself."""

    def __init__(
        self, session: WatchSession, root: nn.Module, begin: Callable[[], None], wide: torch.dtype, observer: Observer
    ) -> None:
        self.wide, self._observer = wide, observer
        self._inputs: list[list[Tensor]] = []  # of the root, at each of its calls in the real step
        self._forwards = 0  # of the repetition
        super().__init__(session, root, begin)
        self.evaluates = True  # a model in evaluation mode is looked at too

    def _start(self) -> None:
        super()._start()
        self._comparisons = _Observed(self.session, self._observer)

    def run(self, closure: Callable[[], Any]) -> Tensor:
        """Make a step and its repetition; return the loss. Gradients are the real step's."""
        root = self.session.model()
        assert root is not None
        call = CapturedCall(root, (), {})
        self._calls, self._inputs = [call], []
        loss = _loss(closure())
        if call.compiled:
            call.drawn = RandomState(call.devices)
        loss.backward()
        why = replay.missing_memory(root.parameters(), self.wide)
        if why is not None:
            raise StateError(f"{_OPERATION}: expected room for the reference of the model; {why}.")
        self._repeat_closure(root, call, closure)
        call.release()
        self._calls = []
        return loss.detach()

    def forward_begins(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A forward of the root begins."""
        del model
        if not WatchSession.repeating:
            self._inputs.append([x.detach().clone() for x in tensors_of((args, kwargs))])

    def forward_ends(self, output: Any) -> None:
        """A forward of the root has returned: the loss tells all that is needed of it."""

    def backward_begins(self) -> None:
        """A backward begins."""

    def backward_ends(self) -> None:
        """A backward has ended: `run` goes on by itself."""

    def compare_gradients(self, grads: Mapping[str, Tensor], narrowed: Mapping[str, torch.dtype]) -> None:
        """The parameters' gradients are being read."""

    def end_step(self) -> None:
        """The step has ended."""

    def _repeat_closure(self, root: nn.Module, call: CapturedCall, closure: Callable[[], Any]) -> None:
        leaves = {id(p): leaf(p, self.wide) for p in root.parameters()}
        real = {clean(name): (p.grad, leaves[id(p)]) for name, p in root.named_parameters()}
        after, self._forwards = RandomState(call.devices), 0
        begin_repetition()
        try:
            dropouts = call.listen(root, closure) if draws_by_dtype(call.devices) else None
            self._running = (call, Counter(), [], Decisions())
            with in_reference(call.devices, dropouts, self.wide), borrowed(root, leaves, call.buffers, self.wide):
                handle = root.register_forward_pre_hook(self._widened, with_kwargs=True, prepend=True)
                try:
                    call.random.restore()
                    loss = _loss(closure())
                finally:
                    handle.remove()
                if call.drawn is not None and not call.drawn.matches(RandomState(call.devices)):
                    raise StateError(f"{_OPERATION}: expected a step that can be repeated eagerly; {OTHER_DRAWS}.")
                call.gradients = {0: torch.ones_like(loss)}
                call.send_back([loss], [x for x in leaves.values() if x.requires_grad])
        finally:
            self._running = None
            end_repetition()
            after.restore()
        if self.session.due.gradients:
            for name, (g, reference) in real.items():
                if g is not None and reference.grad is not None:
                    self._see_gradient(name, g, reference.grad)

    def _widened(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """The reference's batch is wide too."""
        del module
        given = tensors_of((args, kwargs))
        if not is_transformed():  # whose inputs nobody has noted: they have no values
            self._check_batch(given)
        wide = {id(x): as_wide(x, self.wide) for x in given}
        return pytree.tree_map_only(Tensor, lambda x: wide[id(x)], (args, kwargs))

    def _see_gradient(self, name: str, g: Tensor, reference: Tensor) -> None:
        values, expected = (x.detach().to_dense() for x in (g, reference))
        plain = self.session.readable(values, "gradients", name)
        if plain is not None and plain.shape == expected.shape:
            self._observer("gradients", [name], plain, expected, compared(plain, expected))

    def _check_batch(self, given: list[Tensor]) -> None:
        """Raise if the closure has drawn another batch than in the real step."""
        place, self._forwards = self._forwards, self._forwards + 1
        before = self._inputs[place] if place < len(self._inputs) else None
        if before is None or len(before) != len(given) or not all(map(_is_same, before, given)):
            raise ArgumentError(
                f"{_OPERATION}: expected step to use the same batch whenever it is called; got one that calls the "
                "model with other inputs the second time. Fetch the batch outside of it, and give one closure for "
                "each batch."
            )


def _is_same(real: Tensor, given: Tensor) -> bool:
    if real.shape != given.shape:
        return False
    if not real.is_floating_point():
        return torch.equal(real, given.to(real.dtype))
    x = given.detach().double()
    error = (real.double() - x).nan_to_num()
    return bool(error.square().sum() <= _FAR**2 * x.nan_to_num().square().sum())


def _loss(found: Any) -> Tensor:
    if not isinstance(found, Tensor) or found.numel() != 1 or not found.requires_grad:
        got = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        if isinstance(found, Tensor) and found.numel() == 1:
            got = "a loss that requires no gradient"
        raise ArgumentError(
            f"{_OPERATION}: expected step to return the loss, a tensor of one number that requires a gradient; got "
            f"{got}. Return it before its backward is called."
        )
    return found
