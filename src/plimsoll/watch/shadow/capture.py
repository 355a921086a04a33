"""Record of a forward for a shadow step: what repeats it, and its tensors' values."""

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from plimsoll.watch.hooks.torch_hooks import replaced
from plimsoll.watch.names import unwrapped
from plimsoll.watch.shadow.replay import (
    Dropouts,
    RandomState,
    as_it_was,
    autocast_of,
    borrowed,
    buffers_of,
    fresh_inputs,
    tensors_of,
)


class CapturedForward:
    """A tensor of the real step: its values and gradient, until they are compared."""

    __slots__ = (
        "gradient",
        "gradient_series",
        "gradient_version",
        "names",
        "noted",
        "original",
        "original_version",
        "ref",
        "series",
        "values",
        "version",
    )

    def __init__(self, x: Tensor | None = None) -> None:
        self.ref: Callable[[], Tensor | None] = _nothing if x is None else weakref.ref(x)
        self.version = -1 if x is None else _version(x)
        self.noted = False
        self.values: Tensor | None = None  # the original, or a copy of it
        self.original: Tensor | None = None  # the same memory, and its version when it was met
        self.original_version = -1
        self.series: list[int] = []
        self.names: list[str] = []
        self.gradient: Tensor | None = None
        self.gradient_version = -1
        self.gradient_series: list[int] = []


def _nothing() -> None:
    """Return no tensor: for one that is never met a second time."""


class CapturedCall:
    """One forward of the root."""

    def __init__(self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.inputs = (args, kwargs)
        self.devices = {x.device for x in (*root.parameters(), *tensors_of(self.inputs))}
        self.random, self.buffers = RandomState(self.devices), buffers_of(root)
        self.autocast = autocast_of(self.devices)
        self.training = [module.training for module in root.modules()]
        self.ended = self.compiled = False
        self.drawn: RandomState | None = None  # of a compiled forward, after it
        self.seen: dict[tuple[str, int], CapturedForward] = {}
        self.gradients: dict[int, Tensor] = {}  # by the output's place
        self.outputs: dict[CapturedForward, tuple[int, str]] = {}  # place and name
        self._versions = [(x, _version(x)) for x in tensors_of(self.inputs)]
        self._weights = [(weakref.ref(p), _version(p)) for p in root.parameters()]
        self._times: Counter[str] = Counter()
        self._latest: dict[int, CapturedForward] = {}
        self._sites: dict[tuple[str, int], CapturedForward] = {}
        self._handles: list[Any] = []

    def sight(self, name: str, x: Tensor) -> CapturedForward:
        """Return the record of a tensor seen under this name, the earlier one if seen."""
        key = (name, self._times[name])
        self._times[name] += 1
        known = self._latest.get(id(x))
        if known is None or known.ref() is not x or known.version != _version(x):
            known = self._latest[id(x)] = self.seen[key] = CapturedForward(x)
        return known

    def sight_compiled(self, site: tuple[str, int], name: str) -> CapturedForward:
        """The record of a tensor that compiled code has come to, at a site of its own."""
        key = (name, self._times[name])
        self._times[name] += 1
        known = self._sites[site] = self.seen[key] = CapturedForward()
        return known

    def keep(self, seen: CapturedForward, values: Tensor, *, copied: bool) -> None:
        """Keep a tensor's values, in a copy if something may change them before they are compared."""
        seen.noted, values = True, values.detach()
        if not values.is_inference():  # which has no version
            seen.original, seen.original_version = values, _version(values)
        seen.values = values.clone() if copied or seen.original is None else values

    def note_output(self, seen: CapturedForward, name: str, root: str) -> None:
        """Remember which record is of an output of the root, if the name says so."""
        if name.startswith(f"{root}:output"):
            self.outputs[seen] = len(self.outputs), name

    def sighted(self, site: tuple[str, int]) -> CapturedForward | None:
        """The record of a site whose gradient is still to come."""
        known = self._sites.get(site)
        return known if known is not None and known.gradient is None else None

    def hook(self, x: Tensor, call: Callable[[Tensor], None]) -> None:
        """Report the tensor's gradient to the shadow step."""

        def arrives(g: Tensor | None) -> None:
            if g is not None:  # nothing used the tensor, one of several results of its operation
                call(g)

        handle = cast("Any", x).register_hook(arrives)
        if x.is_leaf:  # a leaf outlives the step, and would keep the hook
            self._handles.append(handle)

    def release(self) -> None:
        """Removes what would stay."""
        for handle in self._handles:
            handle.remove()

    def spoiled(self, root: nn.Module | None) -> str | None:
        """Why this forward can no longer be repeated; None where it can."""
        if root is None:
            return "the model is gone"
        if any(_version(x) != version for x, version in self._versions):
            return "an input of the model was changed in place, in its forward or after it"
        if any((p := ref()) is None or _version(p) != version for ref, version in self._weights):
            return "weights changed before the backward had ended (in the forward, or by an optimizer in the backward)"
        if self.training != [module.training for module in root.modules()]:
            return "the model went from training to evaluation, or back, before the backward had ended"
        return None

    def listen(self, root: nn.Module, closure: Callable[[], Any] | None = None) -> Dropouts:
        """Run the forward again, or a closure, and note what its dropouts draw from."""
        dropouts = Dropouts()
        with as_it_was(self.autocast), borrowed(root, {}, self.buffers), dropouts:
            self.random.restore()
            if closure is not None:
                closure()
                return dropouts
            args, kwargs = fresh_inputs(self.inputs, None)
            root(*args, **kwargs)
        return dropouts

    def send_back(self, outputs: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
        """Give the wanted leaves their gradients, from those that arrived at the outputs."""
        there = [(outputs[index], g) for index, g in self.gradients.items() if outputs[index].requires_grad]
        ends, gradients = tuple(y for y, _ in there), tuple(g.to(y.dtype) for y, g in there)
        # By the engine itself: inside `torch.autograd.backward` a checkpoint's recomputation would be outside of the
        # function mode that keeps it in FP32.
        engine = cast("Any", torch.autograd.Variable)._execution_engine  # noqa: SLF001
        engine.run_backward(ends, gradients, False, False, tuple(wanted), allow_unreachable=True, accumulate_grad=True)

    def unmatched(self) -> set[int]:
        """The series of which some part was not compared."""
        missing: set[int] = set()
        for seen in self.seen.values():
            missing.update(seen.series if seen.values is not None else ())
            missing.update(seen.gradient_series if seen.gradient is not None else ())
        return missing


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version  # noqa: SLF001  (public in all but name)


Around = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


def watch_calls(root: nn.Module, around: Around) -> Callable[[], None]:
    """Call `around` at a compiled root's calls; return the undo function.

    The root is inside a compiled module. `around` is a bound method, and is held weakly.
    """
    import torch._dynamo.eval_frame as dynamo  # (whoever has an optimizer has imported it already)

    kind = cast("Any", dynamo.OptimizedModule)
    original, listener, ours = kind.__call__, weakref.WeakMethod(cast("Any", around)), weakref.ref(root)

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or (around_call := listener()) is None or unwrapped(self) is not ours():
            return original(self, *args, **kwargs)
        return around_call(functools.partial(original, self), args, kwargs)

    return replaced(kind, "__call__", call)
