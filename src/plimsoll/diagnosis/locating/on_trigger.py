"""`locate` by itself, when something breaks in a training that is watched."""

import contextlib
import inspect
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, ParamSpec, TypeVar, cast

import torch
from torch import Tensor, nn

from plimsoll.diagnosis.locating.fault import Fault
from plimsoll.diagnosis.locating.locate_fault import check_flush_share, locate
from plimsoll.diagnosis.locating.tracing.nonfinite_trail import count_nonfinite, readable
from plimsoll.errors import ArgumentError
from plimsoll.runs import Event
from plimsoll.tracing.tensors import tensors_in
from plimsoll.watch import Watch
from plimsoll.watch.hooks import torch_hooks
from plimsoll.watch.parameters.optimizer_tensors import innermost
from plimsoll.watch.session import WatchSession, contained
from plimsoll.watch.shadow.replay import RandomState, autocast_of

P = ParamSpec("P")
R = TypeVar("R")
_MOST_CALLS = 64  # micro-batches of one step that are kept
_MOST_SKIPS = 4  # times that gradients are located where a scaler skips


def locate_on_trigger(
    watch: Watch,
    compute: Callable[P, R],
    *,
    around: Callable[[], contextlib.AbstractContextManager[Any]] | None = None,
    flush_share: float | None = None,
) -> "OnTrigger[P, R]":
    """Return `compute` as a function that calls `locate` if the step breaks.

    `compute` returns the loss. Train with what is returned in its place: ``loss = step_loss(x, y)``, then backward and
    the optimizer's step as ever. Whenever the loss or a gradient is not finite as the optimizer is about to step, or a
    scaler has skipped for it, the same call is repeated inside `locate`, with the random generators as they were and
    the loss scaled as it was. What is found becomes an event of the kind "fault" in the run, with `Fault.to_dict` in
    its details; training goes on as it would have, bit for bit.

    It does so once a run for a non-finite loss and once for non-finite gradients (the recorder's reasons "loss" and
    "nonfinite"), and never raises. Steps that a scaler has skipped are over once a step is finite: gradients that break
    after that are located again, up to four times in all. It waits for the device once a step, and keeps the arguments
    of a step's calls till the step is over.

    - `around`: the context that calls are in, if they are in one other than `torch.autocast`: ``around=loop.forward``.
    - `flush_share`: as for `locate`.

    Raises `ArgumentError` if the watch is closed, or is one of several processes: those must `locate` together; and for
    arguments that `locate` could not use.
    """
    if not isinstance(watch, Watch):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ArgumentError(
            f"locate_on_trigger: expected a watch; got {type(watch).__name__}. Give what pl.watch(...) returned."
        )
    session: WatchSession = watch._session  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    if watch.closed or session.ranks.world > 1:
        problem = "one that is closed" if watch.closed else f"one of {session.ranks.world} processes"
        raise ArgumentError(
            f"locate_on_trigger: expected an open watch of a single process; got {problem}. In several processes, call "
            "plimsoll.locate on all of them together."
        )
    if not callable(compute):
        raise ArgumentError(
            f"locate_on_trigger: expected a function that returns the loss; got {type(compute).__name__}. Write "
            "locate_on_trigger(watch, lambda x, y: loss_of(model(x), y))."
        )
    if around is not None and not callable(around):
        raise ArgumentError(
            f"locate_on_trigger: expected around as a function that returns a context; got {type(around).__name__}. "
            "Write around=loop.forward, without a call."
        )
    check_flush_share("locate_on_trigger", flush_share)
    return OnTrigger(session, compute, around, flush_share)


class OnTrigger(torch_hooks.TrainingEvents, Generic[P, R]):
    """The return value of `locate_on_trigger`, called in the function's place.

    `faults` has those found so far.
    """

    def __init__(
        self,
        session: WatchSession,
        compute: Callable[P, R],
        around: Callable[[], contextlib.AbstractContextManager[Any]] | None,
        flush_share: float | None,
    ) -> None:
        self.session = session
        self.faults: list[Fault] = []
        self._compute, self._around, self._flush_share = compute, around, flush_share
        self._calls: deque[_Call] = deque(maxlen=_MOST_CALLS)
        self._looked: set[str] = set()
        self._again_at_most = _MOST_SKIPS
        self._scaler: Any = None
        self._began = self._busy = False
        torch_hooks.subscribe(self)
        ours = weakref.ref(
            cast("OnTrigger[Any, Any]", self)
        )  # the watch must not keep the model alive, which the function most likely has
        session.at_close.append(lambda: _close(ours))

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Calls the function, and keeps what it was called with until the step is over."""
        if not self.session.open or not torch.is_grad_enabled() or self._busy:
            return self._compute(*args, **kwargs)
        call = self._kept(args, kwargs)
        result = self._compute(*args, **kwargs)
        if call is not None:
            call.losses = [x.detach() for x in tensors_in(result) if x.numel() == 1]
            self._calls.append(call)
        return result

    def close(self) -> None:
        """Ends it: calls are plain calls from now on. The watch's end does so too."""
        self._calls.clear()
        torch_hooks.unsubscribe(self)

    @contained
    def _kept(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "_Call":
        return _Call(self.session.model(), args, kwargs)

    # -- what training does --------------------------------------------------------------------------------------------

    def loss_scaled(self, scaler: Any, loss: Any, scaled: Any) -> None:  # noqa: ARG002
        """A scaler has scaled a loss."""
        self._scaler = scaler

    # The recorder's triggers come when a step's numbers are there, which may be after the optimizer has written NaN
    # into the weights: too late to find out. So the same question, whether a loss or a gradient is not finite, is asked
    # here right before the optimizer steps, and after a scaler has skipped: the weights are then those of the batch
    # that broke. It waits for the device once a step.
    @contained
    def optimizer_begins(self, optimizer: Any) -> None:
        """The weights are still those of the batch."""
        self._began = True
        self._look(optimizer)

    def optimizer_ends(self, optimizer: Any) -> None:  # noqa: ARG002
        """The step is over."""
        self._calls.clear()

    @contained
    def scaler_step_ends(self, scaler: Any, optimizer: Any) -> None:  # noqa: ARG002
        """A scaler has had the optimizer step, or has skipped."""
        if not self._began:
            self._look(innermost(optimizer))
        self._began = False
        self._calls.clear()

    # -- looking -------------------------------------------------------------------------------------------------------

    def _look(self, optimizer: Any) -> None:
        """Locates, if the step has broken and its reason is new."""
        if not self._calls or not self.session.open or {"loss", "nonfinite"} <= self._looked:
            return
        reason = self._reason(optimizer)
        if reason is None and self._scaler is not None and self._again_at_most:
            self._looked.discard("nonfinite")
        if reason is None or reason in self._looked:
            return
        self._again_at_most -= reason == "nonfinite"
        self._looked.add(reason)
        self._busy = True
        try:
            fault = self._located()
        finally:
            self._busy = False
        self._tell(reason, fault)

    def _reason(self, optimizer: Any) -> str | None:
        losses = [loss for call in self._calls for loss in call.losses]
        if _any_bad(losses):
            return "loss"
        # Of all of the model's parameters: with several optimizers, weights have moved once a later one steps.
        model = self.session.model()
        stepped = (p for group in optimizer.param_groups for p in group["params"])
        parameters = {id(p): p for p in (*stepped, *(() if model is None else model.parameters()))}.values()
        return "nonfinite" if _any_bad(p.grad for p in parameters if p.grad is not None) else None

    def _located(self) -> Fault | None:
        """Return the fault of the first micro-batch with one, or of all, added up."""
        calls = list(self._calls)
        for some in [*([call] for call in calls), *([calls] if len(calls) > 1 else [])]:
            closure = self._repeating(some, some[0].inputs(self._compute))
            fault = locate(closure, model=self.session.model(), flush_share=self._flush_share)
            if fault is not None:
                return fault
        return None

    def _repeating(self, calls: "list[_Call]", inputs: dict[str, Any]) -> Callable[[], None]:
        def again() -> None:
            assert inputs is not None  # read here, so that a fault can call them by their names
            model = self.session.model()
            for p in () if model is None else model.parameters():
                p.grad = None  # the broken one; locate puts it back
            for call in calls:
                self._again(call)

        return again

    def _again(self, call: "_Call") -> None:
        """Forward and backward of a call, as they were."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            for kind, (enabled, dtype) in call.autocast.items():
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            if self._around is not None:
                stack.enter_context(self._around())
            call.random.restore()
            compute: Callable[..., Any] = self._compute
            result = compute(*call.args, **call.kwargs)
        loss = next((x for x in tensors_in(result) if x.numel() == 1 and x.requires_grad), None)
        if loss is not None:
            (loss if self._scaler is None else self._scaler.scale(loss)).backward()

    def _tell(self, reason: str, fault: Fault | None) -> None:
        if fault is None:
            message = "locate found no fault when the batch was repeated: it broke outside of the located function"
            details: dict[str, object] = {"reason": reason, "found": False}
        else:
            self.faults.append(fault)
            message, details = fault.sentence, {"reason": reason, "found": True, **fault.to_dict()}
        self.session.writer.write(Event(step=self.session.step, kind="fault", message=message, details=details))


class _Call:
    """The arguments of a call, and what it ran from."""

    def __init__(self, model: nn.Module | None, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self.args, self.kwargs = args, kwargs
        tensors: list[Tensor] = [*tensors_in(args), *([] if model is None else model.parameters())]
        devices = {x.device for x in tensors}
        self.random, self.autocast = RandomState(devices), autocast_of(devices)
        self.losses: list[Tensor] = []

    def inputs(self, compute: Callable[..., Any]) -> dict[str, Any]:
        """The arguments by the function's names for them."""
        try:
            return dict(inspect.signature(compute).bind(*self.args, **self.kwargs).arguments)
        except (TypeError, ValueError):  # one without a signature
            return {str(index): value for index, value in enumerate(self.args)} | self.kwargs


def _close(ours: "weakref.ref[OnTrigger[Any, Any]]") -> None:
    trigger = ours()
    if trigger is not None:
        trigger.close()


def _any_bad(tensors: Iterable[Tensor]) -> bool:
    return any(count_nonfinite(seen) for x in tensors if (seen := readable(x)) is not None)
