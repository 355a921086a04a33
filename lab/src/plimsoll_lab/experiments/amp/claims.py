"""What the experiment `amp` claims of memory, losses and times, and what it says of them in words."""

from collections.abc import Iterator, Mapping

from plimsoll.text import percent
from plimsoll_lab.claim import Claim, claims as claims_of, of_rows
from plimsoll_lab.experiments.amp.analysis import furthest
from plimsoll_lab.experiments.amp.memory import Footprint, gibibytes
from plimsoll_lab.experiments.amp.models import UNET_PARAMETERS
from plimsoll_lab.experiments.amp.timing import Timed, ratio
from plimsoll_lab.statistics import Ratio, largest

_AGREES = 0.05  # of FP32's loss
_HALF = 0.6  # of FP32's memory: half, and a tenth for what stays
_X2_TOTAL = 0.625  # of it, if activations three times the static memory are halved and the static is not: 2.5 / 4
Memory = Mapping[tuple[str, str], Footprint]
Times = Mapping[str, Mapping[str, Timed]]
Ends = Mapping[tuple[str, str], Ratio]


def of_memory(memory: Memory, batches: Mapping[str, int], parameters: int) -> tuple[Claim, ...]:
    """What is said of memory, at the benchmark's batches."""
    return (
        *of_rows(_of_savings(memory, batches, parameters), "A4"),
        *of_rows(_of_parts(memory, batches["bert"]), "X2"),
        *of_rows(_of_inference(memory), "N6"),
    )


def _of_savings(memory: Memory, batches: Mapping[str, int], parameters: int) -> tuple[Claim, ...]:
    saved = {name: 1.0 - share(memory, name, "amp-fp16", batch) for name, batch in batches.items()}
    return claims_of(
        f"""
        unet-parameters | parameters | at least {UNET_PARAMETERS} and at most {UNET_PARAMETERS} parameters
            | the UNet has the benchmark's number of parameters
        unet-saves-most | saved.unet - max(saved.bert, saved['feed-forward'])
            | at least 0.05 of the memory more than the next
            | amp-fp16: the UNet saves the largest part of its memory
        bert-saves | saved.bert | at least 0.1 of the memory | amp-fp16: BERT-base saves memory too
        unet-halves | 1.0 - saved.unet | at most {_HALF} of FP32's | amp-fp16: the UNet's memory about halves
        """,
        parameters=parameters,
        saved=saved,
    )


def _of_parts(memory: Memory, batch: int) -> tuple[Claim, ...]:
    """Static and dynamic memory told apart."""
    bert, masters = memory["bert", "fp32"], memory["bert", "fp16-master"]
    return claims_of(
        f"""
        masters-cost | masters_cost | at least 0.99 and at most 1.01 of FP32's
            | O2: masters cost what 16-bit weights and gradients save: static memory stays
        activations-dominate | activations_dominate | at least 3 and at most 4 times
            | BERT-base in FP32: activations take 3 to 4 times the static memory
        o2-halves | o2_halves | at most {_X2_TOTAL} of FP32's | O2: so the total about halves, as activations do
        """,
        masters_cost=masters.static / bert.static,
        activations_dominate=bert.dynamic(batch) / bert.static,
        o2_halves=share(memory, "bert", "fp16-master", batch),
    )


def _of_inference(memory: Memory) -> tuple[Claim, ...]:
    bert, masters = memory["bert", "fp32"], memory["bert", "fp16-master"]
    return claims_of(
        """
        inference-halves | inference_halves | at least 0.5 and at most 0.51 of FP32's
            | BERT-base for inference: its weights in FP16 take half the memory
        """,
        inference_halves=masters.weights / bert.weights,
    )


def share(memory: Memory, network: str, level: str, batch: int) -> float:
    """The memory at the level as a part of FP32's."""
    return memory[network, level].total(batch) / memory[network, "fp32"].total(batch)


def of_losses(ends: Ends, fell: Mapping[str, float], times: Times) -> tuple[Claim, ...]:
    """What is said of losses: they fall, they agree at the end, and one step's agree to begin with."""
    return (
        *(
            Claim(f"{name}-converges", f"{name}, FP32: the loss falls",
                  part, at_most=0.8, unit="of where it began")
            for name, part in fell.items()
        ),
        *(
            Claim(f"{name}-{level}-agrees", f"{name}, {level}: the loss ends where FP32's does",
                  furthest(found), at_most=_AGREES, unit="of it apart, at most")
            for (name, level), found in ends.items()
            if level != "fp32"
        ),
        *(
            Claim(f"{name}-step-agrees", f"{name}: one step's loss is the same at all levels",
                  largest(abs(each.loss / levels["fp32"].loss - 1.0) for each in levels.values()),
                  at_most=_AGREES, unit="of FP32's apart, at most")
            for name, levels in times.items()
        ),
    )  # fmt: skip


def of_times(times: Times) -> tuple[Claim, ...]:
    """What was published of times on GPUs: no gain, 5 to 30 %, 50 to 60 %."""
    took = {name: ratio(levels["amp-fp16"], levels["fp32"]) for name, levels in times.items()}
    return claims_of(
        """
        feed-forward-no-gain | took['feed-forward'] | at least 0.95 of FP32's time
            | amp-fp16: the feed-forward network gains no time
        unet-faster | took.unet | at most 0.95 of FP32's time
            | amp-fp16: the UNet takes 5 to 30 % less time, or saves more
        bert-faster | took.bert | at most 0.5 of FP32's time
            | amp-fp16: BERT-base takes 50 to 60 % less time, or saves more
        """,
        took=took,
    )


def said_of_memory(memory: Memory, batches: Mapping[str, int]) -> Iterator[str]:
    """Static and dynamic memory of each network, and each level's part of FP32's."""
    for name, batch in batches.items():
        fp32 = memory[name, "fp32"]
        levels = ", ".join(
            f"{level} {percent(share(memory, name, level, batch), 0)}" for network, level in memory if network == name
        )
        yield (
            f"{name}, batch {batch}: {gibibytes(fp32.static)} static and {gibibytes(fp32.dynamic(batch))} dynamic in "
            f"FP32; dynamic is 3 to 4 times static at batches {fp32.batch_at(3):.1f} to {fp32.batch_at(4):.1f}. Of "
            f"FP32's total: {levels}. Of what O2 keeps for a sample, "
            f"{percent(_wide(memory[name, 'fp16-master']), 0)} has 4 "
            "bytes a value or more."
        )


def _wide(found: Footprint) -> float:
    return found.wide / found.per_sample


def said_of_times(times: Times, device: str) -> Iterator[str]:
    """How long steps took, and what that says."""
    for name, levels in times.items():
        others = ", ".join(
            f"{level} {ratio(timed, levels['fp32']):.2f}" for level, timed in levels.items() if level != "fp32"
        )
        peak = max(timed.peak_bytes for timed in levels.values())
        most = f" At most {gibibytes(peak)} of the GPU." if peak else ""
        yield f"{name}: a step in FP32 takes {levels['fp32'].median:.3g} s; times of it: {others}.{most}"
    if device == "cpu":
        yield (
            "These are times of a CPU, which emulates 16-bit, TF32 and FP8 arithmetic: they say nothing of a GPU's. "
            "The published savings of time are claimed with --device cuda alone."
        )
