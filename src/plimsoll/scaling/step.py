"""One step with a scaler: its outcome, gradients, the agreement of ranks, and the optimizer."""

import inspect
import itertools
import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from plimsoll import kernels
from plimsoll.errors import ArgumentError, StateError, UnsupportedTensorError

# -- outcome, read without waiting until it is needed ------------------------------------------------------------------


class _Facts(NamedTuple):
    """Values of an outcome on the host."""

    stepped: bool
    reason: str | None
    scale: float
    grad_norm: float | None
    retries: int


class StepOutcome:
    """Outcome of a step: whether it changed the weights, and if not, the reason.

    Numbers may be one-element tensors on any device. They are copied without waiting, and brought to the host when a
    property is first read, which waits for the device. Two outcomes are equal if their values are. Comparing, hashing,
    printing and pickling read all values.

    >>> StepOutcome(stepped=False, reason="non-finite gradients", scale=65536.0)
    StepOutcome(stepped=False, reason='non-finite gradients', scale=65536.0, grad_norm=None, retries=0)
    """

    __slots__ = ("_grad_norm", "_reason", "_retries", "_scale", "_stepped")

    def __init__(
        self,
        *,
        stepped: bool | Tensor,
        scale: float | Tensor,
        reason: str | Callable[[], str] | None = None,
        grad_norm: float | Tensor | None = None,
        retries: int = 0,
    ) -> None:
        """Take the values. A function as `reason` is called when the reason is first read."""
        self._stepped = _copied(stepped)
        self._reason = reason
        self._scale = _copied(scale)
        self._grad_norm = _copied(grad_norm)
        self._retries = retries

    @property
    def stepped(self) -> bool:
        """True if the optimizer changed the weights."""
        if isinstance(self._stepped, Tensor):
            self._stepped = bool(self._stepped.item())
        return self._stepped

    @property
    def reason(self) -> str | None:
        """Reason of a skipped step, or None."""
        if self.stepped:
            self._reason = None
        elif not isinstance(self._reason, str):
            self._reason = "unknown" if self._reason is None else self._reason()
        return self._reason

    @property
    def scale(self) -> float:
        """Scale of the step's gradients."""
        if isinstance(self._scale, Tensor):
            self._scale = float(self._scale.item())
        return self._scale

    @property
    def grad_norm(self) -> float | None:
        """2-norm of the unscaled gradients, or None if nothing computed it."""
        if isinstance(self._grad_norm, Tensor):
            self._grad_norm = float(self._grad_norm.item())
        return self._grad_norm

    @property
    def retries(self) -> int:
        """Number of times that the batch was repeated before this outcome."""
        return self._retries

    def after_retries(self, retries: int) -> "StepOutcome":
        """Return the outcome with a number of repetitions. Reads nothing."""
        return self._with(retries=retries)

    def with_grad_norm(self, norm: float | Tensor) -> "StepOutcome":
        """Return the outcome with a norm from elsewhere, such as clipping. Reads nothing."""
        return self._with(grad_norm=norm)

    def _with(self, **changed: Any) -> "StepOutcome":
        same = {name: getattr(self, f"_{name}") for name in _Facts._fields}
        return StepOutcome(**{**same, **changed})

    def _facts(self) -> _Facts:
        return _Facts(self.stepped, self.reason, self.scale, self.grad_norm, self.retries)

    def __eq__(self, other: object) -> bool:
        return self._facts() == other._facts() if isinstance(other, StepOutcome) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._facts())

    def __repr__(self) -> str:
        return f"StepOutcome({', '.join(f'{name}={value!r}' for name, value in self._facts()._asdict().items())})"

    def __reduce__(self) -> tuple[Callable[..., "StepOutcome"], tuple[dict[str, object]]]:
        return _restored, (self._facts()._asdict(),)


def _restored(facts: dict[str, object]) -> StepOutcome:
    return StepOutcome(**cast("dict[str, Any]", facts))


def _copied(value: Any) -> Any:
    """Return a copy of a tensor, which the caller may write to later."""
    return value.detach().clone() if isinstance(value, Tensor) else value


# -- gradients of an optimizer, the agreement of ranks, and the reason of a skip ---------------------------------------

_STRIDED = torch.strided


@dataclass(slots=True)  # not frozen, since thousands are created in a step
class Gradient:
    """Gradient of one parameter."""

    group: int  # of the optimizer's parameter groups
    index: int  # within the group
    parameter: Tensor
    values: Tensor  # plain and strided: the stored values of a sparse gradient, the local shard of a DTensor


class Gradients(NamedTuple):
    """All gradients of an optimizer, and the ranks that share them."""

    by_device: dict[torch.device, list[Gradient]]
    groups: dict[int, Any]  # process groups of DTensors' meshes, by their id


def gather(optimizer: Any, *, half: bool = True) -> Gradients:
    """Return all gradients. Without `half`, float16 ones are an error."""
    by_device: dict[torch.device, list[Gradient]] = {}
    meshes: dict[int, Any] = {}
    for number, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            values = parameter.grad
            if values is None:
                continue
            if type(values) is not Tensor or values.layout is not _STRIDED or values.is_complex():
                values = _values(parameter, meshes)
            if not half and values.dtype is torch.float16:
                raise ValueError("Attempting to unscale FP16 gradients.")  # torch's own message
            by_device.setdefault(values.device, []).append(Gradient(number, index, parameter, values))
    return Gradients(by_device, meshes)


def _values(parameter: Tensor, meshes: dict[int, Any]) -> Tensor:
    gradient: Any = parameter.grad
    sharded = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    if sharded is not None and isinstance(gradient, sharded):
        for group in gradient.device_mesh.get_all_groups():  # type: ignore[attr-defined]
            meshes[id(group)] = group
        gradient = gradient.to_local()  # type: ignore[attr-defined]
        gradient = gradient.wait() if hasattr(gradient, "wait") else gradient
    if gradient.layout is torch.sparse_coo:
        gradient = _stored(parameter, gradient)
    elif gradient.layout is not torch.strided:
        raise UnsupportedTensorError(
            f"unscale_: expected dense gradients, or sparse ones of layout torch.sparse_coo; got {gradient.layout} "
            f"({gradient.dtype}, {tuple(gradient.shape)}). Convert it with grad.to_sparse_coo()."
        )
    if gradient.is_complex():
        if gradient.is_conj():  # of a parameter that was used as its conjugate: its values are not in memory yet
            gradient = parameter.grad = gradient.resolve_conj()
        gradient = torch.view_as_real(gradient)
    return gradient if type(gradient) is Tensor else gradient.detach().as_subclass(Tensor)


def _stored(parameter: Tensor, gradient: Tensor) -> Tensor:
    """Return a sparse gradient's values, which share memory with it."""
    # In float16 the sum of several values of one index may overflow, so they are added before the check.
    if gradient.dtype is torch.float16 and not gradient.is_coalesced():
        gradient = parameter.grad = gradient.coalesce()
    return gradient._values()  # type: ignore[attr-defined]  # noqa: SLF001  (values() refuses what is not coalesced)


def agree(
    per_device: dict[torch.device, Tensor], found_inf: Tensor, meshes: dict[int, Any], process_group: Any
) -> dict[torch.device, Tensor]:
    """Write the largest flag of all ranks to each tensor of a dictionary.

    Ranks are those of `process_group` and of the meshes of sharded gradients. A rank without gradients takes part with
    `found_inf`, which is zero, on the scale's device. Without groups nothing is communicated.
    """
    groups = [group for group in (process_group, *meshes.values()) if group is not None]
    if not groups:
        return per_device
    common = combined(per_device.values(), found_inf.device) if per_device else found_inf
    for group in groups:
        all_reduce(common, "MAX", group)
    if not per_device:
        per_device[common.device] = common
    for flag in per_device.values():
        flag.copy_(common, non_blocking=flag.device.type != "cpu")
    return per_device


def combined(flags: Any, device: torch.device) -> Tensor:
    """Return the largest of several flags, as a new 0-d tensor on a device."""
    first, *others = [flag.to(device, non_blocking=device.type != "cpu").reshape(()) for flag in flags]
    if not others:
        return first.clone()
    return torch.stack([first, *others]).amax()


def all_reduce(x: Tensor, operation: str, group: Any) -> None:
    """Reduce a tensor in place over a group's ranks, by "MAX", "MIN" or "SUM"."""
    distributed = sys.modules["torch.distributed"]  # there is no group without it
    distributed.all_reduce(x, op=getattr(distributed.ReduceOp, operation), group=group)


def blame(optimizer: Any, losses: Iterable[Tensor]) -> str:
    """Return the reason of a skipped step in one sentence. Waits for the gradients."""
    gradients = itertools.chain.from_iterable(gather(optimizer).by_device.values())
    counts = [(gradient, _nonfinite(gradient.values)) for gradient in gradients]
    bad = [(gradient, count) for gradient, count in counts if count]
    name = type(optimizer).__name__
    if not bad:
        return f"non-finite gradients on another rank; those of {name} are finite here"
    (worst, count), *others = bad
    place = f"{count} of {worst.values.numel()} values of {_parameter(optimizer, worst)} of {name}"
    more = f" and in {len(others)} more of its {len(counts)} gradients" if others else ""
    return f"non-finite gradients in {place}{more}{_of_loss(losses)}"


def _nonfinite(values: Tensor) -> int:
    counts = kernels.new_counts(1, values.device)
    kernels.count_nonfinite_into([values.detach()], counts, 0)
    return int(counts.item())


def _parameter(optimizer: Any, gradient: Gradient) -> str:
    names = optimizer.param_groups[gradient.group].get("param_names")
    named = f" ({names[gradient.index]})" if names else ""
    return f"parameter {gradient.index}{named} in group {gradient.group}"


def _of_loss(losses: Iterable[Tensor]) -> str:
    """Return a remark if a loss itself was not finite, since no scale helps then."""
    values = [float(loss.item()) for loss in losses]
    bad = [value for value in values if not math.isfinite(value)]
    return f"; the loss itself was {bad[0]:g}, before scaling" if bad else ""


# -- step of an optimizer, and the checks before it --------------------------------------------------------------------


def check_step(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, sync_free: bool) -> None:
    """Raise for a step with a closure, or one that cannot skip in sync-free mode."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise StateError(
            "step: expected an optimizer that steps once for each backward; got LBFGS, which evaluates the loss "
            "several times within one step, so that no gradient can be unscaled and checked before it is used. Train "
            "with LBFGS in float32, without a scaler."
        )
    if kwargs.get("closure") is not None or (args and callable(args[0])):
        raise StateError(
            f"step: expected no closure; got one for {type(optimizer).__name__}, whose gradients would be used before "
            "they are unscaled and checked. Call backward first, then step(optimizer) without a closure."
        )
    if sync_free and not steps_on_device(optimizer):
        raise ArgumentError(
            "step: expected an optimizer that skips a step on the device with sync_free=True; got "
            f"{type(optimizer).__name__}, which steps at every call, so that the host has to wait for the check. "
            "Create it with fused=True (Adam, AdamW, SGD, and Adagrad of a newer torch than 2.9), or leave sync_free "
            "out."
        )


def steps_on_device(optimizer: Any) -> bool:
    """Return whether the optimizer's step reads `found_inf`, as torch's fused ones do."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def takes_scaler(optimizer: Any) -> bool:
    """Return whether the optimizer's step has torch's older argument `grad_scaler`."""
    return steps_on_device(optimizer) and "grad_scaler" in inspect.signature(optimizer.step).parameters


def step_fused(
    optimizer: Any, found_inf: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], *, skipped: bool | None
) -> float | None:
    """Run the step with `found_inf` and `grad_scale` set on a fused optimizer."""
    # Gradients are unscaled and checked before, because a fused kernel's own division is not checked. So `grad_scale`
    # is the user's, or else None for optimizers of torch and Plimsoll, which saves a pass, and 1 for others, which may
    # expect a tensor. `skipped` is None if only the device knows.
    grad_scale = getattr(optimizer, "grad_scale", None)
    if grad_scale is None and not _takes_none(optimizer):
        grad_scale = _unit_scale(found_inf)
    optimizer.grad_scale, optimizer.found_inf = grad_scale, found_inf
    fresh = _without_momentum(optimizer)
    try:
        result = optimizer.step(*args, **kwargs)
    finally:
        del optimizer.grad_scale, optimizer.found_inf
    _drop_if_skipped(optimizer, fresh, found_inf, skipped)
    return cast("float | None", result)


def _takes_none(optimizer: Any) -> bool:
    return type(optimizer).__module__.startswith(("torch.", "plimsoll."))


def _unit_scale(found_inf: Tensor) -> Tensor:
    scale: Any = torch.ones_like(found_inf)
    scale.plimsoll_unscaled = True  # read by a watch: these gradients are unscaled
    return scale


def _without_momentum(optimizer: Any) -> list[Tensor]:
    """Return the parameters whose momentum a fused SGD will create in this step."""
    if not isinstance(optimizer, torch.optim.SGD):
        return []
    moving = (group for group in optimizer.param_groups if group["momentum"])
    return [
        parameter
        for group in moving
        for parameter in group["params"]
        if parameter.grad is not None and optimizer.state[parameter].get("momentum_buffer") is None
    ]


def _drop_if_skipped(optimizer: Any, parameters: list[Tensor], found_inf: Tensor, skipped: bool | None) -> None:
    """Drop the momentum that a skipped step created, which has no values."""
    for parameter in parameters:
        state = optimizer.state[parameter]
        if skipped:
            state.pop("momentum_buffer", None)
        # If only the device knows about the skip, it is set to zero there. The next step's momentum is then its
        # gradient times `1 - dampening`, as in a first step.
        elif skipped is None and (buffer := state.get("momentum_buffer")) is not None:
            buffer.copy_(torch.where(found_inf.to(buffer.device, non_blocking=True) > 0, 0.0, buffer))
