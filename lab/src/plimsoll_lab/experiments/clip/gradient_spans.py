"""How many binades gradients span within single layers, from what was recorded (T7's reason).

BF16 has FP32's range and flushes nothing that FP16 could hold at any usual scale, so a training in BF16 shows what FP16
would have had to hold. A layer *spans* FP16 where no power of two brings its gradient into FP16 whole: where
`Spectrum.window` is empty, at its usual tolerance of 1 % lost.
"""

import math
from collections.abc import Sequence

from plimsoll.runs import Run
from plimsoll_lab.experiments.clip.training import Setup

_SAMPLES = 8  # that are looked at outside of hard batches, spread over the training


def spans(run: Run, setup: Setup, *, always: bool = False) -> dict[str, float]:
    """The most layers that span FP16 at a hard batch's sample and at another's; the share of those where one does."""
    recorded = _sampled(run)
    hard = [step for step in recorded if always or setup.hard_at <= step < setup.hard_end]
    others = [step for step in recorded if step not in hard]
    at_hard, at_others = _counted(run, hard), _counted(run, others[:: max(len(others) // _SAMPLES, 1)])
    return {
        "spanning_hard": at_hard[0], "spanning_hard_share": at_hard[1], "span_hard_binades": at_hard[2],
        "spanning_others": at_others[0], "span_others_binades": at_others[2],
    }  # fmt: skip


def _sampled(run: Run) -> list[int]:
    name = run.tensors["activation_gradients"][0]
    return [int(step) for step in run.series("activation_gradients", name, "count")[0]]


def _counted(run: Run, steps: Sequence[int]) -> tuple[float, float, float]:
    """Of these samples: the most layers that span FP16, the share with one, the most binades; NaN without samples."""
    if not steps:
        return math.nan, math.nan, math.nan
    layers, widest = [0] * len(steps), 0.0
    for number, step in enumerate(steps):
        for _, _, _, held in run.spectra("activation_gradients", steps=slice(step, step + 1)):
            if held.nonzero:
                layers[number] += held.window("fp16") is None
                widest = max(widest, math.log2(held.absmax / held.absmin))
    return float(max(layers)), sum(count > 0 for count in layers) / len(layers), widest
