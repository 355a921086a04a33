"""The time of a training step at each level, in turn on one model, so that what else a machine does meets all alike.

The learning rate is 0: a step does all its work and leaves the weights, so that every level's step is of the same
weights, the same batch and the same dropout, and its loss can be held against FP32's. One round warms up.
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from plimsoll.precision import Loop, prepare
from plimsoll_lab.bench import Progress
from plimsoll_lab.experiments.amp.networks import Batch, Network, moved


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """The steps of a level: seconds of each round, and the loss. `peak_bytes`: of the GPU's memory; 0 on a CPU."""

    seconds: Sequence[float]
    loss: float
    peak_bytes: int

    @property
    def median(self) -> float:
        """Seconds."""
        return statistics.median(self.seconds)


def time_steps(
    network: Network, levels: Sequence[str], *, rounds: int, seed: int, device: str, progress: Progress
) -> Mapping[str, Timed]:
    """The steps of each level, in so many rounds after one that warms up; the order turns with each round."""
    progress.begin(f"steps of {network.title}", (rounds + 1) * len(levels))
    torch.manual_seed(seed)
    model = network.make().to(device)
    optimizer = network.optimizer(model, rate=0.0)
    batch = moved(network.draw(seed, 0, network.batch), device)
    seconds: dict[str, list[float]] = {level: [] for level in levels}
    losses: dict[str, float] = {}
    peaks: dict[str, int] = {}
    for number in range(rounds + 1):
        turn = number % len(levels)
        for level in (*levels[turn:], *levels[:turn]):
            with prepare(model, optimizer, level) as loop:
                took, losses[level], peaks[level] = _step(network, loop, batch, seed, device)
            if number:
                seconds[level].append(took)
            progress.advance()
    return {level: Timed(seconds=seconds[level], loss=losses[level], peak_bytes=peaks[level]) for level in levels}


def ratio(these: Timed, those: Timed) -> float:
    """The median, over rounds, of how many times as long the first took in the same round."""
    return statistics.median(a / b for a, b in zip(these.seconds, those.seconds, strict=True))


def _step(network: Network, loop: Loop, batch: Batch, seed: int, device: str) -> tuple[float, float, int]:
    """Seconds, loss, and the most GPU memory of one step."""
    torch.manual_seed(seed)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    _settle(device)
    began = time.perf_counter()
    with loop.forward():
        loss = network.loss(loop.model, batch)
    loop.step(loss)
    _settle(device)
    took = time.perf_counter() - began
    return took, loss.item(), torch.cuda.max_memory_allocated() if device == "cuda" else 0


def _settle(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
