"""Outcome of a training step, read without waiting until it is needed."""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

from torch import Tensor


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
