"""`CheckpointStore`: checkpoints that a guard may restore, and their contents.

By default that is the loop, or in a hand-written loop the model, the watch's optimizers and the
scaler; always the random generators of Python, NumPy, the CPU and the model's device. Where the data loader stands is
not in it: training goes on with the next batch. Copies lie in the host's memory.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

from torch import Tensor

from plimsoll.errors import ArgumentError
from plimsoll.watch.companion import WatchAccess


class Stateful(Protocol):
    """An object whose state can be saved and restored."""

    def state_dict(self) -> Any:
        """Return the state to save."""
        ...

    def load_state_dict(self, state_dict: Any) -> Any:
        """Takes over what was saved."""
        ...


Restore = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Saved:
    """One checkpoint: what all steps before `step` have made."""

    step: int
    states: Mapping[str, Any] | Restore
    random: Mapping[str, Any]


class CheckpointStore:
    """The last checkpoints of one guard."""

    def __init__(
        self,
        access: WatchAccess,
        loop: Callable[[], Any],
        scaler: Callable[[], Any],
        given: Mapping[str, Stateful] | None,
        kept: int,
    ) -> None:
        self._access, self._loop, self._scaler = access, loop, scaler
        self._given = None if given is None else dict(given)
        self._saved: deque[Saved] = deque(maxlen=kept)

    @property
    def steps(self) -> list[int]:
        """The steps that there are checkpoints of."""
        return [saved.step for saved in self._saved]

    def parts(self) -> dict[str, Stateful]:
        """Return the parts that are saved, by name."""
        if self._given is not None:
            return self._given
        loop = self._loop()
        if loop is not None:
            return {"loop": loop}
        model, scaler = self._access.model, self._scaler()
        by_name: dict[str, Any] = {} if model is None else {"model": model}
        by_name |= {f"optimizer {i}": optimizer for i, optimizer in enumerate(self._access.optimizers)}
        return by_name | ({} if scaler is None else {"scaler": scaler})

    def refusal(self) -> str | None:
        """Why what would be saved by itself is not all that there is; None if it is."""
        model = self._access.model
        if self._given is not None or self._loop() is not None or model is None:
            return None
        if not self._access.optimizers:
            return "the watch was given no optimizer; name it in pl.watch, or what to save with checkpoint={...}"
        own = {id(p) for p in model.parameters()}
        for optimizer in self._access.optimizers:
            if any(id(p) not in own for group in optimizer.param_groups for p in group["params"]):
                return (
                    f"{type(optimizer).__name__} steps tensors other than the model's parameters (master weights?); "
                    "say what to save with checkpoint={...}"
                )
        return None

    def save(self, state: Mapping[str, Any] | Restore | None) -> str | None:
        """Save a checkpoint of now; return why not, if the weights are not fit for it."""
        broken = self._broken()
        if broken is None:
            states = state if callable(state) else copied(self._states(state))
            random = copied(_random().random_state(self._access.model))
            self._saved.append(Saved(step=self._access.next_step, states=states, random=random))
        return broken

    def good(self, since: int) -> Saved | None:
        """Return the last one saved before step `since`, not that of its beginning."""
        return max((s for s in self._saved if s.step < since), key=lambda saved: saved.step, default=None)

    def restore(self, step: int) -> None:
        """Restore the checkpoint of that step, and drop later ones: training differs now."""
        saved = next(s for s in self._saved if s.step == step)
        while self._saved and self._saved[-1].step > step:
            self._saved.pop()
        if callable(saved.states):
            saved.states()
        else:
            parts = self.parts()
            for name, state in saved.states.items():
                parts[name].load_state_dict(copied(state))  # an optimizer goes on writing into what it was given
        for optimizer in self._access.optimizers:
            optimizer.zero_grad()
        _random().restore_random(saved.random, self._access.model)

    def _states(self, given: Mapping[str, Any] | None) -> Mapping[str, Any]:
        parts = self.parts()
        if given is None:
            return {name: part.state_dict() for name, part in parts.items()}
        if list(parts) == ["loop"]:
            given = {"loop": given}
        if set(given) != set(parts):
            raise ArgumentError(
                f"Guard.checkpoint: expected the states of {', '.join(parts)}, by these names; got "
                f"{', '.join(map(str, given)) or 'none'}. Leave it out to have the guard save them itself."
            )
        return given

    def _broken(self) -> str | None:
        """Return the weight that is not finite, in words; waits for the device."""
        model: Any = self._access.model
        for name, parameter in () if model is None else model.named_parameters():
            # torch cannot ask this of 8 bits
            known = parameter.is_complex() or (parameter.is_floating_point() and parameter.element_size() > 1)
            if known and not bool(parameter.detach().isfinite().all()):
                return f"{name} holds values that are not finite"
        return None


def copied(value: Any) -> Any:
    """Return a state with copied tensors on the host, and other values as they are."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        mapping: Any = cast("Mapping[Any, Any]", value)
        copies: Any = OrderedDict((key, copied(item)) for key, item in mapping.items())
        if hasattr(mapping, "_metadata"):  # a module's state: the versions of its parts
            copies._metadata = mapping._metadata  # noqa: SLF001  (torch's own place for them)
        return copies
    if isinstance(value, (list, tuple)):
        sequence = cast("list[Any]", value)
        return type(sequence)(copied(item) for item in sequence) if type(sequence) in (list, tuple) else sequence
    return value


def _random() -> Any:
    """The room of precision's reading of generators, loaded when it is first needed."""
    from plimsoll.precision.training import checkpoint

    return checkpoint


def check_parts(given: object) -> None:
    """Raises for something that is not a mapping of names to what can be saved."""
    if given is None:
        return
    parts = cast("Mapping[str, Any]", given) if isinstance(given, Mapping) else {"it": given}
    for name, part in parts.items():
        if not isinstance(given, Mapping) or not all(hasattr(part, m) for m in ("state_dict", "load_state_dict")):
            raise ArgumentError(
                "Guard: expected checkpoint to map names to objects with state_dict and load_state_dict; got "
                f"{type(part).__name__} for {name}. Write checkpoint={{'model': model, 'optimizer': optimizer}}."
            )
