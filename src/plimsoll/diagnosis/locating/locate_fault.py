"""`locate`: a step's first operation that made NaN or Inf, or flushed values to zero.

The closure runs once, as it is, inside a dispatch mode that looks at what every operation gives. An operation whose
result is not finite though its inputs are becomes an *origin* (`tracing.nonfinite_trail`); what comes of it inherits
it. In the end the loss, the gradients and what the step leaves behind are looked at: of the origins that reached them,
the first is the fault. An Inf that reached nothing is harmless, and no fault.
"""

import contextlib
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils import _python_dispatch as dispatch

from plimsoll.checks import initialized
from plimsoll.diagnosis.finding import shown
from plimsoll.diagnosis.locating.fault import Fault, Source, number
from plimsoll.diagnosis.locating.fault_description import describe_fault, label, source_of
from plimsoll.diagnosis.locating.tracing.nonfinite_trail import (
    MemoryProvenance,
    NonfiniteResult,
    Origin,
    count_nonfinite,
    first_cause,
    readable,
)
from plimsoll.diagnosis.locating.tracing.operation_check import OperationTracer
from plimsoll.emulate.dispatch import thread_frame
from plimsoll.errors import ArgumentError
from plimsoll.tracing.state_snapshot import Before
from plimsoll.tracing.tensors import Names, memory_of, tensors_in
from plimsoll.watch.call_site import look
from plimsoll.watch.hooks import torch_hooks
from plimsoll.watch.names import unwrapped
from plimsoll.watch.session import nothing_recorded
from plimsoll.watch.shadow.replay import eagerly

# -- optimizers' rates, decays and momenta that are NaN or Inf: no operation's fault -----------------------------------

# They are numbers and not tensors, so that no operation is to blame for what comes of them.

_WORDS = {"lr": "learning rate", "weight_decay": "weight decay"}
_USUAL = frozenset({"lr", "lr_decay", "weight_decay", "momentum", "dampening", "betas", "eps", "alpha", "rho"})


@dataclass(frozen=True, slots=True, kw_only=True)
class BadSetting:
    """A number of a parameter group that is NaN or Inf when the optimizer steps."""

    optimizer: Any
    group: int
    name: str
    value: float
    index: int  # of the operations before the step
    source: Source | None
    finite: tuple[Tensor, ...]  # the group's parameters that were finite before the step

    def spoiled(self) -> Tensor | None:
        """The first parameter that the step has made non-finite."""
        return next((p for p in self.finite if _is_broken(p)), None)

    def fault(self, p: Tensor, names: Names, scale: float | None) -> Fault:
        """The fault, of which the parameter `p` was the first to suffer."""
        who, called = type(self.optimizer).__name__, names.of(p)
        reached = f"the parameter {called}" if called is not None else "a parameter"
        what = f"{_WORDS[self.name]} ({self.name})" if self.name in _WORDS else shown(self.name)
        return Fault(
            kind="nan" if math.isnan(self.value) else "inf",
            operation=f"{who}.step",
            phase="optimizer",
            sentence=f"the {what} of {who}'s parameter group {self.group} is {number(self.value)}; it reached "
            f"{shown(reached)}.",
            source=self.source,
            scalars={self.name: self.value},
            scale=scale,
            reached=reached,
        )


def bad_settings(optimizer: Any, index: int, source: Source | None) -> list[BadSetting]:
    """Return the settings of an optimizer that are NaN or Inf."""
    settings: list[BadSetting] = []
    for place, group in enumerate(cast("Iterable[Mapping[str, Any]]", optimizer.param_groups)):
        # Inf counts in the settings that torch's optimizers have. In others it may be meant: a largest norm of Inf
        # clips nothing.
        bad = {name: value for name, value in _numbers(group) if math.isnan(value) or name.split("[")[0] in _USUAL}
        if bad:
            finite = tuple(p for p in group["params"] if not _is_broken(p))
            settings += [
                BadSetting(
                    optimizer=optimizer, group=place, name=name, value=value, index=index, source=source, finite=finite
                )
                for name, value in bad.items()
            ]
    return settings


def _numbers(group: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The settings that are not finite, those of a tuple as ``betas[0]``."""
    for name, value in group.items():
        if name in ("params", "param_names", "initial_lr"):  # a schedule's own note steps nothing
            continue
        listed = list(cast("Iterable[object]", value)) if isinstance(value, list | tuple) else [cast("object", value)]
        for place, item in enumerate(listed):
            single = isinstance(item, Tensor) and item.numel() == 1 and not item.is_meta
            plain = float(cast("Tensor", item).detach()) if single else item
            if isinstance(plain, int | float) and not math.isfinite(plain):
                yield (f"{name}[{place}]" if isinstance(value, list | tuple) else name), float(plain)


def _is_broken(p: Tensor) -> bool:
    plain = readable(p.detach())
    return plain is not None and bool(count_nonfinite(plain))


# -- checks at the end: the loss, the gradients and the lasting state are finite ---------------------------------------

_LOSS, _RESULT, _GRADIENT, _LEFT = range(4)


class EndChecks:
    """Looks at them, and keeps those that are not finite."""

    def __init__(self, trail: MemoryProvenance, leaves: Sequence[Tensor]) -> None:
        self._trail = trail
        self._leaves = {id(leaf): leaf for leaf in leaves}
        self.reached: list[NonfiniteResult] = []

    @property
    def leaves(self) -> list[Tensor]:
        """The leaves that gradients come to."""
        return list(self._leaves.values())

    def backward(self, tensors: Any) -> list[Tensor]:
        """Note a backward of these tensors; return the leaves that gradients come to."""
        roots = list(tensors_in(tensors))
        for root in roots:
            self._look("the loss", _LOSS, root.detach(), deliberate=True)
        leaves = _leaves(roots)
        self._leaves.update((id(leaf), leaf) for leaf in leaves)
        return leaves

    def loss(self, result: Any) -> None:
        """The closure has returned."""
        for x in tensors_in(result):
            alone = x.numel() == 1
            what = "the loss" if alone else "what the closure returned"
            self._look(what, _LOSS if alone else _RESULT, x.detach(), deliberate=alone)

    def gradients(self) -> None:
        """Gradients are there."""
        for leaf in self._leaves.values():
            if leaf.grad is not None:
                self._look("gradient", _GRADIENT, leaf.grad, owner=leaf, deliberate=True)

    def left(self, names: Names, written: Mapping[int, Any]) -> None:
        """The step is over: of what has a name, and was written, what is not finite."""
        for what, tensor in names.lasting():
            if any(memory in written for memory in memory_of(tensor)):
                self._look(what, _LEFT, tensor.detach(), deliberate=False)

    def _look(self, what: str, rank: int, x: Tensor, *, deliberate: bool, owner: Tensor | None = None) -> None:
        plain = readable(x)
        if plain is None or not count_nonfinite(plain):
            return
        origins = self._trail.of(x)
        blame = origins if deliberate else frozenset(o for o in origins if not o.deliberate)
        if blame or not origins:
            was_there = not origins and rank in {_RESULT, _LEFT}
            if not was_there:
                self.reached.append(NonfiniteResult(what=what, rank=rank, origins=blame, tensor=x, owner=owner))


def _leaves(roots: Iterable[Tensor]) -> list[Tensor]:
    """The tensors that gradients of the roots come to."""
    stack: list[Any] = [root.grad_fn for root in roots if root.grad_fn is not None]
    leaves: dict[int, Tensor] = {id(root): root for root in roots if root.grad_fn is None and root.requires_grad}
    seen: set[Any] = set(stack)
    while stack:
        node = stack.pop()
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor):
            leaves[id(variable)] = variable
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)
    return list(leaves.values())


# -- `locate` ----------------------------------------------------------------------------------------------------------

_C = cast("Any", torch)._C  # noqa: SLF001


def locate(
    closure: Callable[[], Any],
    *,
    model: nn.Module | None = None,
    flush_share: float | None = None,
    restore: bool = True,
) -> Fault | None:
    """Return the first operation that made a NaN or Inf that mattered; None without.

    It is of the forward or the backward. The closure is run once: forward, and backward if it calls it. If it does not,
    `locate` calls it for the loss: the number that is returned, alone, as ``loss``, or among other tensors. It may step
    an optimizer and use a loss scaler. It computes what it would compute without `locate`, bit for bit; compiled models
    run eagerly inside.

    What matters is what reaches the loss, a gradient, or a parameter, buffer or optimizer state that the step writes:
    -Inf masks, and a log(0) that `where` leaves out, are no faults as long as nothing non-finite comes of them. If only
    the gradient of such an operation is spoiled, the forward operation is named. An optimizer whose rate, decay or
    other setting is NaN or Inf is named with it, if a parameter becomes non-finite by it.

    - `model`: whose module and parameter names to use; without it they are found from the modules that run.
    - `flush_share`: also name an operation that gave zero for more than this share of the values that a wider format
      would not have given as zero (0.5: half of them).
    - `restore`: afterwards parameters, buffers, gradients, the optimizers' and scalers' state, every other tensor that
      was there before, and the random generators are as they were. Without a `model`, gradients that the closure itself
      drops before its backward stay dropped.

    A closure that raises: its error is passed on, unless something had become non-finite by then, which is returned
    with the error in it. Raises `ArgumentError` for what cannot be run.

    >>> import torch
    >>> x = torch.tensor([1.0, 0.0, 2.0], requires_grad=True)
    >>> fault = locate(lambda: x.log().sum())
    >>> fault.operation, fault.phase, fault.first_index
    ('aten.log', 'forward', (1,))
    >>> print(fault.sentence)
    log of 0 is -Inf; it reached the loss.
    """
    _check(closure, model, flush_share)
    _check_surroundings()
    search = _Search(None if model is None else unwrapped(model), flush_share, restore=restore)
    return search.run(closure)


class _Search(torch_hooks.TrainingEvents):
    """One run of a closure, a listener to its backwards, optimizers and scalers."""

    def __init__(self, model: nn.Module | None, flush_share: float | None, *, restore: bool) -> None:
        self._model = model
        self._before = Before(model) if restore else None
        self._witness = OperationTracer(flush_share, None if self._before is None else self._before.about_to_write)
        self._ends = EndChecks(self._witness.trail, [] if model is None else list(model.parameters()))
        self._optimizers: list[Any] = []
        self._scale: float | None = None
        self._settings: list[BadSetting] = []  # of the optimizers that step
        self._spoiled: tuple[BadSetting, Any] | None = None
        self._without_loss = ""  # shapes of what the closure returned, where nothing shows the loss in it

    def run(self, closure: Callable[[], Any]) -> Fault | None:
        """Runs the closure, and says what is found."""
        error: Exception | None = None
        names = Names(closure, self._model)
        try:
            # Compiled code calls no operation that could be checked.
            with nothing_recorded(), torch_hooks.exclusive(self), eagerly(), self._witness:
                self._run(closure)
        except Exception as raised:  # noqa: BLE001  (passed on below, or named in the fault)
            error = raised
        finally:
            try:
                with torch.no_grad():
                    self._last_looks(names)
                    fault = None if error is not None and not self._witness.trail.origins else self._found(names, error)
            finally:
                if self._before is not None:
                    self._before.put_back()
        if error is not None and fault is None:
            raise error
        if fault is None and self._without_loss:
            warnings.warn(
                f"locate: expected the closure to call backward or to return the loss; got shapes "
                f"{self._without_loss}. Only the forward was looked at. Return one number that requires gradients.",
                RuntimeWarning,
                stacklevel=3,
            )
        return fault

    def _run(self, closure: Callable[[], Any]) -> None:
        result = closure()
        self._ends.loss(result)
        if self._witness.backwards:
            return
        loss = _loss_of(result)
        if loss is not None:
            loss.backward()
        elif any(x.requires_grad for x in tensors_in(result)):
            self._without_loss = ", ".join(str(list(x.shape)) for x in tensors_in(result))

    def _last_looks(self, names: Names) -> None:
        names.learn(self._witness.roots.values(), self._optimizers)
        names.learn_gradients(self._ends.leaves)
        self._ends.gradients()
        self._ends.left(names, self._witness.trail.written)

    def _found(self, names: Names, error: Exception | None) -> Fault | None:
        origin, reached = self._first(error is not None)
        flushed = self._witness.flushed
        if flushed is not None and (origin is None or flushed.index < origin.index):
            origin, reached = flushed, None
        if self._spoiled is not None:
            setting, p = self._spoiled
            if origin is None or (origin.what != "held" and origin.index > setting.index):
                return setting.fault(p, names, self._scale)
        if origin is None:
            return self._unseen(names)
        spoiled = None
        if origin.phase == "backward" and origin.forward is not None and origin.forward.origin is not None:
            origin, spoiled = origin.forward.origin, origin  # harmless itself, but not to its gradient
        return describe_fault(origin, reached, names, scale=self._scale, error=error, spoiled=spoiled)

    def _first(self, raised: bool) -> tuple[Origin | None, NonfiniteResult | None]:
        """The origin that is to blame, and what it reached."""
        reached = self._ends.reached
        # A loss that nothing but such constants broke was not meant to be lost: they are no masks.
        losses = [end.origins for end in reached if end.rank == _LOSS]
        meant = {origin for origins in losses if all(o.deliberate for o in origins) for origin in origins}
        origin = first_cause({origin for end in reached for origin in end.origins}, to_blame=meant)
        if origin is None and raised:
            origin = first_cause(o for o in self._witness.trail.origins if not o.deliberate)
        if origin is None:
            return None, None
        first_end = min((end for end in reached if origin in end.origins), key=lambda end: end.rank, default=None)
        return origin, first_end

    def _unseen(self, names: Names) -> Fault | None:
        """Something is not finite, and no operation that was seen made it so."""
        end = min(self._ends.reached, key=lambda end: end.rank, default=None)
        if end is None:
            return None
        what = label(end, names)
        return Fault(
            kind="nan" if bool(torch.isnan(end.tensor.float()).any()) else "inf",
            operation="unknown", phase="forward", reached=what, scale=self._scale,
            sentence=f"{what} is not finite, by an operation that torch's dispatcher does not show here: code that "
            "writes memory itself, a captured CUDA graph, or another rank.",
        )  # fmt: skip

    # -- what training does --------------------------------------------------------------------------------------------

    def backward_begins(self, tensors: Any) -> None:
        with _no_modes():
            leaves = self._ends.backward(tensors)
            if self._before is not None:
                self._before.gradients_of(leaves)

    def backward_ends(self) -> None:
        with _no_modes(), torch.no_grad():
            self._witness.backwards += 1
            self._ends.gradients()

    def optimizer_begins(self, optimizer: Any) -> None:
        self._optimizers.append(optimizer)
        if self._before is not None:
            self._before.optimizer(optimizer)
        with _no_modes(), torch.no_grad():
            self._settings = bad_settings(optimizer, self._witness.operations, source_of(look()))

    def loss_scaled(self, scaler: Any, loss: Any, scaled: Any) -> None:  # noqa: ARG002
        with _no_modes(), torch.no_grad():
            if hasattr(scaler, "get_scale"):
                self._scale = float(scaler.get_scale())
            if self._before is not None:
                self._before.scaler(scaler)

    def optimizer_ends(self, optimizer: Any) -> None:
        with _no_modes(), torch.no_grad():
            for setting in self._settings if self._spoiled is None else ():
                p = setting.spoiled() if setting.optimizer is optimizer else None
                if p is not None and self._spoiled is None:
                    self._spoiled = setting, p


def _check_surroundings() -> None:
    if thread_frame.current() is not None:
        raise ArgumentError(
            "locate: expected `with plimsoll.emulate(...)` inside the closure; got a call inside of it, where torch's "
            "own operations cannot be observed. Open the context inside the closure."
        )
    if _C._current_graph_task_id() != -1 or _C._len_torch_dispatch_stack():  # noqa: SLF001
        raise ArgumentError(
            "locate: expected a call between training steps; got one inside a backward or another TorchDispatchMode "
            "(locate itself, a FLOP counter). Call it outside."
        )


def _no_modes() -> contextlib.AbstractContextManager[Any]:
    """Inside, no dispatch mode sees what we do ourselves."""
    return cast("Any", dispatch)._disable_current_modes()  # noqa: SLF001


def _loss_of(result: Any) -> Tensor | None:
    """Return what the closure gave as its loss: a number alone, under the name ``loss``, or the only one."""
    is_mapping = isinstance(result, Mapping)
    named = cast("Mapping[str, Any]", result).get("loss") if is_mapping else getattr(result, "loss", None)
    several = [x for x in tensors_in(result if named is None else named) if x.numel() == 1 and x.requires_grad]
    return several[0] if len(several) == 1 else None


def _check(closure: object, model: object, flush_share: object) -> None:
    if not callable(closure):
        raise ArgumentError(
            f"locate: expected a closure that runs forward; got {type(closure).__name__}. Write "
            "locate(lambda: loss_of(model(x), y))."
        )
    if model is not None and not isinstance(model, nn.Module):
        raise ArgumentError(
            f"locate: expected model to be a torch.nn.Module; got {type(model).__name__}. Leave it out, or give the "
            "module that the closure calls."
        )
    if model is not None:
        initialized("locate", model)
    check_flush_share("locate", flush_share)


def check_flush_share(operation: str, flush_share: object) -> None:
    """Raise `ArgumentError` unless it is None or a fraction below 1."""
    if flush_share is None:
        return
    if isinstance(flush_share, bool) or not isinstance(flush_share, int | float) or not 0 <= flush_share < 1:
        raise ArgumentError(
            f"{operation}: expected flush_share to be None or a fraction from 0 to below 1; got "
            f"flush_share={flush_share!r}. Give 0.5 for half of the values."
        )
