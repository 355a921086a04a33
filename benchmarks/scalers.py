"""Loss scalers side by side on recorded gradients: how many steps they skip, and how much of the gradients they lose.

    python benchmarks/scalers.py                          the committed traces; a minute
    python benchmarks/scalers.py --traces FOLDER          others, that record_traces.py has written
    python benchmarks/scalers.py --quick                  the first 200 steps of each, nothing written

A trace is replayed under each scaler: at every step the recorded gradients, of parameters and of activations, are
multiplied by its scale and held against FP16. The step overflows if the largest of them would; of the others, those
that are less than half of FP16's smallest number are lost. The scaler is given what it would see in training: whether a
gradient overflowed, and, in the case of the spectral scaler, what is left of the *parameters'* gradients in FP16.
Gradients are the same under every scaler: what a training would have become after a skipped step is not in a trace.

- skipped: steps with an overflow;
- lost: the fraction of nonzero values that FP16 loses at the scaler's scale, mean over all steps;
- lost, skips whole: the same, and a skipped step loses everything.
"""

import argparse
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from _harness import Results
from _rival_scalers import ApexRule, DeepSpeedRule, FromTorch, MegatronRule
from _traces import FOLDER, Population, Trace, recorded

from plimsoll.formats import FP16
from plimsoll.scaling import SCALERS, LossScaler, SpectralScaler
from plimsoll.scaling.spectral.rule import MeasuredStep, Memory

BURST = 20
LIMIT = 41_000  # steps after which a recovery is no longer waited for


class Spectral:
    """The spectral scaler's rule with its memory, as the scaler itself runs it on a CPU."""

    def __init__(self, scaler: SpectralScaler) -> None:
        self.scale = scaler.get_scale()
        self._rule, self._memory = scaler._rule(), Memory()  # noqa: SLF001

    def update(self, look: MeasuredStep) -> None:
        """The scale after a step that looked so."""
        self.scale = 2.0 ** self._rule.next_exponent(self._memory, look, self.scale)


Contender = Spectral | FromTorch | DeepSpeedRule | MegatronRule | ApexRule


def contenders(start: float | None = None) -> dict[str, Callable[[], Contender]]:
    """All scalers, with their own initial scale or all with the same."""
    given = {} if start is None else {"scale": start}
    torch_given = {} if start is None else {"init_scale": start}
    return {
        "torch GradScaler": lambda: FromTorch(torch.amp.GradScaler("cpu", **torch_given)),
        "DeepSpeed": lambda: DeepSpeedRule(**given),
        "Megatron-LM": lambda: MegatronRule(**given),
        "Apex": lambda: ApexRule(**given),
        **{
            f"ours, {name}": functools.partial(_ours, kind, torch_given)
            for name, kind in SCALERS.items()
            if kind.lowers_scale and not kind.scales_layers  # a trace has nothing of the layers of a model
        },
    }


def _ours(kind: type[LossScaler], given: dict[str, float]) -> Contender:
    scaler = kind("cpu", **given)
    return Spectral(scaler) if isinstance(scaler, SpectralScaler) else FromTorch(scaler)


class Replay:
    """A trace made ready: how much is below any exponent, by step."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._below = {kind: _cumulative(getattr(trace, kind)) for kind in ("weights", "hidden")}
        self._nonzero = trace.weights.counts.sum(axis=1) + trace.hidden.counts.sum(axis=1)
        self._largest = np.maximum(trace.weights.absmax, trace.hidden.absmax)

    def below(self, kind: str, step: int, exponent: int) -> int:
        """How many of the step's gradients are smaller than that power of two."""
        population: Population = getattr(self.trace, kind)
        table = self._below[kind]
        return int(table[step, min(max(exponent - population.lowest, 0), table.shape[1] - 1)])

    def overflows(self, step: int, scale: float) -> bool:
        """Whether a gradient of the step would round beyond FP16's largest number."""
        return bool(self._largest[step] * scale >= FP16.overflow_threshold)

    def lost(self, step: int, scale: float) -> float:
        """The fraction of the step's nonzero gradients that round to zero."""
        half = FP16.quantum_exponent - 1 - _exponent(scale)
        return sum(self.below(kind, step, half) for kind in self._below) / int(self._nonzero[step])

    def look(self, step: int, scale: float) -> MeasuredStep:
        """What the scaler sees of the step: parameters' gradients, as FP16 held them."""
        if self.overflows(step, scale):
            return MeasuredStep(overflowed=True)
        bottom = FP16.quantum_exponent - _exponent(scale)
        lost = self.below("weights", step, bottom - 1)
        nonzero = int(self.trace.weights.counts[step].sum()) - lost
        faint = self.below("weights", step, bottom + 1) - lost
        absmax = float(self.trace.weights.absmax[step]) * scale
        return MeasuredStep(overflowed=False, absmax=absmax, nonzero=nonzero, faint=faint)


def _cumulative(population: Population) -> np.ndarray:
    return np.concatenate([np.zeros((len(population.counts), 1), dtype=np.int64), population.counts.cumsum(axis=1)], 1)


def _exponent(scale: float) -> int:
    fraction, exponent = math.frexp(scale)
    if fraction != 0.5:
        raise ValueError(f"a replay needs scales that are powers of two; this one is {scale}")
    return exponent - 1


def tell(contender: Contender, look: MeasuredStep) -> None:
    """Ends a step of the contender, each in its own way."""
    if isinstance(contender, Spectral):
        contender.update(look)
    else:
        contender.update(look.overflowed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a trace under one scaler: by step, the scale, the lost fraction, and whether it was skipped."""

    scales: np.ndarray
    lost: np.ndarray
    skipped: np.ndarray

    def row(self) -> dict[str, object]:
        """The figures of one line of the table."""
        return {
            "skipped": int(self.skipped.sum()),
            "lost": float(self.lost.mean()),
            "lost, skips whole": float(np.where(self.skipped, 1.0, self.lost).mean()),
            "mean scale": f"2^{np.log2(self.scales).mean():.1f}",
        }


def run(replay: Replay, contender: Contender, steps: int) -> Outcome:
    """Replays so many steps of a trace."""
    scales, lost, skipped = [], [], []
    for step in range(steps):
        scale = contender.scale
        look = replay.look(step, scale)
        scales.append(scale)
        lost.append(replay.lost(step, scale))
        skipped.append(look.overflowed)
        tell(contender, look)
    return Outcome(scales=np.array(scales), lost=np.array(lost), skipped=np.array(skipped))


def recovery(contender: Contender) -> int:
    """Clean steps after a burst until the scale is where it was, on gradients for which that is the right place."""
    for _ in range(300):
        tell(contender, MeasuredStep(overflowed=False, absmax=contender.scale * 2.0**-8, nonzero=1))
    before = contender.scale
    for _ in range(BURST):
        tell(contender, MeasuredStep(overflowed=True))
    for step in range(LIMIT):
        if contender.scale >= before:
            return step
        tell(contender, MeasuredStep(overflowed=False, absmax=contender.scale * 2.0**-8, nonzero=1))
    return LIMIT


def trace_table(results: Results, traces: Sequence[Trace], start: float | None, steps: int | None) -> None:
    """One table for each trace, every scaler a line."""
    for trace in traces:
        replay, number = Replay(trace), min(len(trace), steps or len(trace))
        rows = [{"scaler": name, **run(replay, make(), number).row()} for name, make in contenders(start).items()]
        began = "each from its own initial scale" if start is None else f"all from 2^{_exponent(start)}"
        results.add(f"Trace: {trace.name}", f"{trace.about}; {number:,} steps, {began}.", rows)


def recovery_table(results: Results) -> None:
    """How long each takes to come back from a burst."""
    rows = [{"scaler": name, "clean steps": recovery(make())} for name, make in contenders().items()]
    note = (
        f"Clean steps after {BURST} overflows in a row until the scale is where it was; gradients as before the burst."
    )
    results.add("Recovery", note, rows)


def main() -> None:
    """Replays all traces, and writes the tables unless it is a smoke run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, default=FOLDER, help="folder of the traces")
    parser.add_argument("--quick", action="store_true", help="200 steps of each, one table")
    parser.add_argument("--out", type=Path, help="folder of the result files; default benchmarks/results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    traces = list(recorded(options.traces))
    results = Results("scalers", "cpu")
    for start in (None,) if options.quick else (None, 2.0**16):
        trace_table(results, traces, start, 200 if options.quick else None)
    if not options.quick:
        recovery_table(results)
    if options.out or not options.quick:
        results.write("scalers", *([options.out] if options.out else []))


if __name__ == "__main__":
    main()
