"""`SpectralScaler`: a loss scale that follows the spectra of the gradients."""

import math
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, NoReturn, cast

import torch
from torch import Tensor

from plimsoll import checks, row_layout
from plimsoll.errors import ArgumentError, NotRecordedError
from plimsoll.formats import FP16, Format
from plimsoll.kernels.device_value import DeviceValue
from plimsoll.scaling import arguments
from plimsoll.scaling.base import FLOOR, LossScaler
from plimsoll.scaling.spectral.rule import Memory, SpectralRule
from plimsoll.scaling.spectral.scale_windows import (
    OptimizerBanks,
    ScaleReport,
    StepNumbers,
    WindowChecks,
    join,
    join_ranks,
    least,
    measured_step,
    no_summary,
    numbers_of,
)
from plimsoll.scaling.step import Gradient

MOST_MARGIN = 16.0  # binades


class SpectralScaler(LossScaler, name="spectral"):
    """Loss scale from the spectra of the gradients: lowered before they overflow.

    The pass that unscales the gradients also measures them: the largest magnitude, and the number of values that are
    about to underflow. The scale is the highest power of two that keeps the largest expected gradient `margin` binades
    below the format's overflow. The expectation is a robust trend over steps, which covers the usual jumps. An overflow
    lowers the scale at once and leaves no trace in the statistics. After ten clean steps the scale climbs back, a
    binade a step (`plimsoll.scaling.spectral.rule` has the whole rule).

    On a CPU the scale follows from the step before. On other devices an overflow lowers it for the very next step, and
    spectra act one step later, so that the host waits only for the step before. In sync-free mode the host never
    waits, and spectra act when the device is done. An `update(new_scale)` holds for one step.

    Args:
        device: Type of the device of the loss. Default: ``"cuda"``.
        init_scale: A power of two. It starts low, since the first clean step shows the right scale. Default: 2**10.
        format: Format of the backward pass: ``"fp16"`` under autocast, whatever the dtype of the parameters is.
            Gradients of activations may overflow too. They are not measured: the rule learns how far they lie above
            those of the parameters. Gradients in float16 always count as ``"fp16"``. Default: ``"fp16"``.
        margin: Binades between the largest expected gradient and overflow. Default: 0.5.
        inspect_every: Number of steps from one check of each tensor's usable range to the next. If no scale fits all
            tensors at two checks in a row, a warning names those that span too far, once. `report` has the details.
            Default: 100.
        enabled: Whether anything is scaled. Default: yes.
        min_scale: Smallest scale, a power of two. Default: 2**-14.
        max_scale: Largest scale, a power of two. Default: 2**32.
        process_group: As for `DynamicScaler`. The rule uses the gradients of all ranks, and ranks have one scale.
            Reports and warnings are of each rank's own gradients and shards.
        sync_free: As for `DynamicScaler`.

    Raises:
        ArgumentError: An argument is out of range.

    >>> import torch, plimsoll as pl
    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> optimizer = torch.optim.SGD([weight], lr=0.5)
    >>> scaler = pl.scaling.SpectralScaler("cpu")
    >>> scaler.scale((weight * torch.tensor([1.0, 0.5])).sum()).backward()
    >>> scaler.step(optimizer); scaler.update()
    >>> scaler.get_scale(), scaler.window
    (16384.0, (-23, 15))
    """

    set_scale_refusal = "a SpectralScaler sets its scale from the gradients at every step"

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**10,
        *,
        format: object = "fp16",  # noqa: A002  (the name in other functions)
        margin: float = 0.5,
        inspect_every: int = 100,
        enabled: bool = True,
        min_scale: float = FLOOR,
        max_scale: float = 2.0**32,
        process_group: Any = None,
        sync_free: bool = False,
    ) -> None:
        name = type(self).__name__
        arguments.check_measures(name, device)
        super().__init__(
            device,
            init_scale,
            enabled=enabled,
            min_scale=min_scale,
            max_scale=max_scale,
            process_group=process_group,
            sync_free=sync_free,
        )
        for word, value in (("init_scale", init_scale), ("min_scale", min_scale), ("max_scale", max_scale)):
            _check_power(name, word, value)
        self._format = arguments.check_format(name, "format", format)
        self._margin = _margin(name, margin)
        self._memory = Memory()
        self._checks = WindowChecks(arguments.check_interval(name, "inspect_every", inspect_every))
        self._banks: weakref.WeakKeyDictionary[Any, OptimizerBanks] = weakref.WeakKeyDictionary()
        self._summaries: list[Tensor] = []
        self._groups: dict[int, Any] = {}  # of the ranks that have joined their summaries of this iteration
        self._halves = False  # whether a gradient was float16, here or on another rank
        self._late = self._device != "cpu"
        self._waiting: deque[StepNumbers] = deque()
        self._plan: float | None = None  # scale after the latest of these that was read
        self._overflows: Tensor | None = None  # number of all overflows, on the scale's device
        self._known_overflows = 0  # number of those that are in the memory

    # -- reports -------------------------------------------------------------------------------------------------------

    def report(self) -> ScaleReport:
        """Return each tensor's usable range of scales at the latest check.

        Waits for the device. Each rank reports its own gradients, and its shards of those that are sharded.

        Raises:
            NotRecordedError: There was no step with finite gradients yet.
        """
        report = self._checks.latest(self._narrowest())
        if report is not None:
            return report
        raise NotRecordedError(
            f"report: expected a step with finite gradients before; got none that was checked. {type(self).__name__} "
            f"checks the first step and every {self._checks.every}th: train for longer."
        )

    @property
    def window(self) -> tuple[int, int] | None:
        """Lowest and highest exponent of the scales that fit all tensors, or None. Raises as `report` does."""
        return self.report().window

    # -- measurements of the unscale pass ------------------------------------------------------------------------------

    def _bank(self, optimizer: Any, gradients: Sequence[Gradient]) -> tuple[Tensor | None, Sequence[int]]:
        self._halves |= any(gradient.values.dtype is torch.float16 for gradient in gradients)
        return self._banks_of(optimizer).prepare(gradients), range(len(gradients))

    def _observe(self, optimizer: Any, found_inf: Tensor) -> None:
        faint_rows = max(self._narrowest().quantum_exponent + 1 - row_layout.LOWEST_BINADE, 0)
        banks = self._banks_of(optimizer)
        summary = banks.summary(faint_rows, self._flags(), found_inf.device)
        self._checks.offer(optimizer, banks)
        groups = dict(banks.groups) if self._process_group is None else {0: self._process_group, **banks.groups}
        self._groups.update(groups)
        self._summaries.append(join_ranks(summary, groups.values()))

    def _flags(self) -> tuple[bool, bool]:
        """Return whether any gradient so far was float16, and whether a loss of this iteration is."""
        return self._halves, any(loss.dtype is torch.float16 for loss in self._losses)

    def _banks_of(self, optimizer: Any) -> OptimizerBanks:
        return self._banks.setdefault(optimizer, OptimizerBanks())

    def _grad_norm(self, optimizer: Any) -> Tensor | None:
        banks = self._banks.get(optimizer)
        if banks is None or not banks.places or banks.groups or self._process_group is not None:
            return None
        return banks.norm(cast("Tensor", self._scale))

    # -- next scale ----------------------------------------------------------------------------------------------------

    def _start(self, device: torch.device) -> None:
        self._overflows = torch.full((), self._all_overflows(), dtype=torch.float64, device=device)

    def _all_overflows(self) -> float:
        """Return the number of overflows up to the latest step. Waits for that step."""
        return self._waiting[-1].numbers()[1] if self._waiting else self._known_overflows

    def _next_scale(self, found_inf: Tensor) -> float | Tensor:
        scale = cast("Tensor", self._scale)
        self._checks.step(scale, self._narrowest())
        numbers = numbers_of(join(self._summaries) if self._summaries else no_summary(scale.device, self._flags()))
        groups = list(self._groups.values())
        self._summaries.clear()
        self._groups.clear()
        if not self._late:
            return self._advance(cast("list[float]", numbers.tolist()), scale.item(), overflowed=found_inf.item() > 0)
        following = self._next_scale_late(numbers, scale, found_inf)
        # Without waiting, ranks may have read different steps by now. None goes higher than all of them would.
        return least(following, groups) if self._sync_free else following

    def _next_scale_late(self, numbers: Tensor, scale: Tensor, found_inf: Tensor) -> Tensor:
        """Return a lower scale if this step overflowed, or else the plan of earlier steps."""
        overflows = cast("Tensor", self._overflows)
        self._catch_up()
        # A plan without the latest overflow would undo its back-off, and is dropped.
        planned = scale if self._plan is None else torch.where(overflows == self._known_overflows, self._plan, scale)
        lowered = scale * 2.0 ** -self._rule().drop(self._memory)
        overflows += found_inf > 0
        parts = [scale.reshape(1), overflows.reshape(1), found_inf.reshape(1), numbers]
        self._waiting.append(StepNumbers(DeviceValue(torch.cat([part.double() for part in parts]))))
        return torch.where(found_inf > 0, lowered, planned)

    def _catch_up(self) -> None:
        """Read the numbers of earlier steps that have arrived, and plan the next scale."""
        while self._waiting and (not self._sync_free or self._waiting[0].ready()):
            scale, overflows, found_inf, *numbers = self._waiting.popleft().numbers()
            self._plan, self._known_overflows = self._advance(numbers, scale, overflowed=found_inf > 0), int(overflows)

    def _advance(self, numbers: list[float], scale: float, *, overflowed: bool) -> float:
        step, half_gradient, half_loss = measured_step(numbers, overflowed=overflowed)
        self._halves |= half_gradient
        return 2.0 ** self._rule(half_loss=half_loss).next_exponent(self._memory, step, scale)

    def _rule(self, *, half_loss: bool = False) -> SpectralRule:
        # The first gradient of the backward pass is the scale itself, in the loss's dtype.
        highest = min(self._max_scale, 2.0**FP16.max_exponent) if half_loss else self._max_scale
        return SpectralRule(
            line=math.log2(self._narrowest().overflow_threshold),
            margin=self._margin,
            lowest=math.ceil(math.log2(self._min_scale)),
            highest=math.floor(math.log2(max(highest, self._min_scale))),
        )

    def _narrowest(self) -> Format:
        return FP16 if self._halves and self._format.max > FP16.max else self._format

    def _scale_set(self) -> None:
        self._summaries.clear()  # the next step's gradients have another scale than these
        self._groups.clear()
        self._checks.drop()
        self._plan = None
        self._memory.cap, self._memory.overflows = None, 0

    # -- saving --------------------------------------------------------------------------------------------------------

    def _save(self) -> dict[str, Any]:
        return {
            "format": self._format.name,
            "margin": self._margin,
            "inspect_every": self._checks.every,
            "halves": self._halves,
            "memory": self._memory.to_dict(),
            "looks": self._checks.to_dict(),
            "waiting": [step.numbers() for step in self._waiting],
            "known_overflows": self._known_overflows,
        }

    def _load(self, extra: dict[str, Any]) -> None:
        self._memory, self._waiting, self._plan, self._known_overflows = Memory(), deque(), None, 0
        if "memory" in extra:
            name, every = "load_state_dict", extra["inspect_every"]
            self._format, self._margin = (
                arguments.check_format(name, "format", extra["format"]),
                _margin(name, extra["margin"]),
            )
            self._halves, self._memory = bool(extra["halves"]), Memory.from_dict(extra["memory"])
            self._checks = WindowChecks.from_dict(
                arguments.check_interval(name, "inspect_every", every), extra["looks"]
            )
            self._waiting.extend(StepNumbers(list(numbers)) for numbers in extra["waiting"])
            self._known_overflows = int(extra["known_overflows"])
        if self._overflows is not None:
            self._overflows.fill_(self._all_overflows())

    def __getstate__(self) -> dict[str, Any]:
        omitted = dict.fromkeys(("_banks", "_summaries", "_waiting", "_checks"))  # tensors, or saved as plain numbers
        return super().__getstate__() | omitted | {"_inspect_every": self._checks.every}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._banks, self._summaries, self._waiting = weakref.WeakKeyDictionary(), [], deque()
        self._checks = WindowChecks(state["_inspect_every"])
        super().__setstate__({name: value for name, value in state.items() if name not in self.__dict__})

    # -- settings of other scalers -------------------------------------------------------------------------------------

    def set_growth_factor(self, new_factor: float) -> NoReturn:
        """Raise `ArgumentError`: the scale follows the gradients and has no factor."""
        _refuse("set_growth_factor", new_factor)

    def set_backoff_factor(self, new_factor: float) -> NoReturn:
        """Raise `ArgumentError`: an overflow lowers the scale by the rule's binades."""
        _refuse("set_backoff_factor", new_factor)

    def set_growth_interval(self, new_interval: int) -> NoReturn:
        """Raise `ArgumentError`: the scale waits for no interval to grow."""
        _refuse("set_growth_interval", new_interval)


def _margin(operation: str, margin: object) -> float:
    remedy = "Use 0.5, or 2 if overflows are costly."
    return checks.number(operation, "margin", margin, at_least=0, at_most=MOST_MARGIN, remedy=remedy)


def _refuse(operation: str, value: object) -> NoReturn:
    raise ArgumentError(
        f"{operation}: expected a scaler with a growth rule; got {value!r} for a SpectralScaler, which sets its scale "
        "from the gradients. Use DynamicScaler, or the argument `margin`."
    )


def _check_power(name: str, word: str, value: float) -> None:
    if math.frexp(value)[0] != 0.5:
        raise ArgumentError(
            f"{name}: expected {word} as a power of two, which multiplies exactly; got {value!r}. Use "
            f"2.0**{round(math.log2(value))}."
        )
