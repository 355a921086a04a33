"""Tensors of taps that wait to be measured together, in one launch.

On a GPU the host pays for each launch, and waits for hundreds of them where every tap makes its own. So what taps see
waits in a queue, alive, until the forward or the backward ends, or too much waits. What is recorded is what the tap has
seen, or nothing:

- an operation of torch that writes over a tensor raises its version, and freeing its storage changes its address: both
  are compared at the launch, and what was changed is not recorded;
- kernels that torch does not know of, and writes through `x.data`, show nowhere. So each tap is on trial first: its
  tensors are measured at once, and once more at the launch. A tap whose counts differ never queues.

A CPU has no queue: it measures in the hook, while the values are in its cache.
"""

import contextlib
from collections.abc import Generator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from plimsoll import kernels, row_layout
from plimsoll.kernels.device_value import DeviceValue

# Most of what waits costs no memory: autograd keeps it for the backward, or has freed as much in the backward. The rest
# must never be what a training lacks.
_SHARE = 16  # a sixteenth of the device's memory may wait, and half of what no process has taken
_BYTES = 1 << 28  # may wait where a device has no such number

Tap = tuple[str, str]  # collection and name


class Trials:
    """Results of the taps' trials, of one watch."""

    def __init__(self) -> None:
        self.passed: dict[Tap, bool] = {}
        self.lost: list[Tap] = []  # what was changed before it was measured
        self.one_stream = True
        self._counted: list[tuple[list[Tap], DeviceValue]] = []

    def learn(self) -> None:
        """Read the trials that the device has counted; waits for none."""
        while self._counted and self._counted[0][1].ready():
            taps, differ = self._counted.pop(0)
            for tap, differs in zip(taps, cast("list[bool]", differ.tensor().tolist()), strict=True):
                self.judge(tap, not differs)

    def judge(self, tap: Tap, passes: bool) -> None:
        """Note a tap's trial; one that has failed never passes."""
        self.passed[tap] = passes and self.passed.get(tap, True)

    def count(self, taps: list[Tap], differ: Tensor) -> None:
        """Take the results of these taps, which a device computes."""
        self._counted.append((taps, DeviceValue(differ)))

    def take_lost(self) -> list[Tap]:
        """Return what was changed since the last call."""
        lost, self.lost = self.lost, []
        return lost


class Waiting(NamedTuple):
    """A tensor in the queue: as it was at the tap, and the row for it."""

    x: Tensor
    version: int
    address: int
    row: int
    tap: Tap
    on_trial: bool

    @property
    def is_unchanged(self) -> bool:
        """True if nothing has written over it that torch knows of."""
        return self.x._version == self.version and self.x.data_ptr() == self.address  # noqa: SLF001  (public in all but name)


class TapQueue:
    """What waits in one step, on one device."""

    def __init__(self, device: torch.device, trials: Trials) -> None:
        self._device, self.trials = device, trials
        self._waiting: list[Waiting] = []
        self._size_bytes, self._most_bytes = 0, most_bytes(device)
        self._stream: Any = None  # that was current at the taps
        trials.learn()

    def __len__(self) -> int:
        return len(self._waiting)

    def takes(self, x: Tensor, tap: Tap) -> bool:
        """Return whether a tensor of that tap may wait, or is on trial."""
        if not self.trials.passed.get(tap, True) or not self.trials.one_stream:
            return False
        return not x.is_inference() and not is_capturing(self._device)  # those of inference mode have no version

    def has_room(self, x: Tensor) -> bool:
        """Return whether one more tensor may wait. If not, those that wait are to be measured first."""
        if self._waiting and current_stream(self._device) != self._stream:
            # The new stream may have waited for the old one already, and could write over what waits here.
            self.trials.one_stream = False
            return False
        return self._size_bytes + x.nbytes <= self._most_bytes

    def add(self, x: Tensor, row: int, tap: Tap) -> bool:
        """Let a tensor wait; return False if it is on trial, and must be measured at once too."""
        if not self._waiting:
            self._stream = current_stream(self._device)
        on_trial = tap not in self.trials.passed
        # Not the tensor itself: it keeps its graph, and `x.data = ...` would put other values in it.
        alias = x.detach()
        self._waiting.append(Waiting(alias, alias._version, alias.data_ptr(), row, tap, on_trial))  # noqa: SLF001
        self._size_bytes += x.nbytes
        return not on_trial

    def release(self) -> list[Waiting]:
        """Return what waits; it does not wait any more."""
        waiting, self._waiting, self._size_bytes = self._waiting, [], 0
        return waiting

    def measure(self, waiting: Sequence[Waiting], banks: Sequence[Tensor], block: int) -> list[int]:
        """Measure what has waited into its rows of the banks, in one launch for each bank and dtype.

        Return the rows without counts, since their tensors were changed.
        """
        queued, tried, lost = list[Waiting](), list[Waiting](), list[int]()
        for each in waiting:
            if each.is_unchanged:
                (tried if each.on_trial else queued).append(each)
                if each.x.is_cuda:  # memory of another stream must not be used again before the launch has read it
                    each.x.record_stream(self._stream)
                continue
            self.trials.judge(each.tap, False)
            if not each.on_trial:
                self.trials.lost.append(each.tap)
                lost.append(each.row)
        size = len(banks[0])
        with torch.no_grad(), _on_stream(self._stream):
            for number, bank in enumerate(banks):
                here = [each for each in queued if each.row // size == number]
                if here:
                    rows = [each.row % size for each in here]
                    kernels.measure_each([each.x for each in here], bank, rows, block=block)
            self._try(tried, banks, block)
        return lost

    def _try(self, tried: list[Waiting], banks: Sequence[Tensor], block: int) -> None:
        """Measure once more what was measured at the tap, and compare the counts."""
        if not tried:
            return
        again, size = kernels.new_bank(len(tried), block, self._device), len(banks[0])
        kernels.measure_each([each.x for each in tried], again, range(len(tried)), block=block)
        differ = torch.stack([banks[each.row // size][each.row % size] for each in tried]) != again
        differ[:, row_layout.SUMS] = False  # a GPU adds up in any order
        self.trials.count([each.tap for each in tried], differ.any(1))


# torch's allocator keeps what it has had once: in steady state nothing else than this is left for a step's peak.
def most_bytes(device: torch.device) -> int:
    """Return how many bytes may wait on a device, as its memory is now."""
    if device.type != "cuda":
        return _BYTES
    free, whole = torch.cuda.mem_get_info(device)
    return min(whole // _SHARE, free // 2)


def current_stream(device: torch.device) -> Any:
    """Return the stream on which a device works now; None for a CPU."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def is_capturing(device: torch.device) -> bool:
    """Return True if the device's work is captured in a CUDA graph, and not done."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@contextlib.contextmanager
def _on_stream(stream: Any) -> Generator[None]:
    """Context in which launches go to that stream; what comes after waits for them."""
    if stream is None or stream == (after := current_stream(stream.device)):
        yield
        return
    with torch.cuda.stream(stream):
        yield
    after.wait_stream(stream)
