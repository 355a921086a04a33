"""Experiment `amp` (A4, X2): three networks in FP32, TF32, FP16, BF16 and FP8: memory, time, and whether losses agree.

- Memory is counted on "meta" at the benchmark's own sizes (`_amp_memory`): what a GPU would keep, on any machine.
- Time is that of whole steps, in turn (`_amp_time`). On a CPU 16-bit and FP8 arithmetic is emulated, which is slower
  than FP32, so that the published savings of time are claimed with ``--device cuda`` alone.
- Losses: the feed-forward network and the UNet are trained at every level from several seeds (`_amp_train`); without
  ``--full`` they are narrower ones. BERT-base takes a few timed steps, and is trained with ``--full`` only.
"""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from plimsoll.lab._amp_judge import against, fell_to, furthest, judged, losses
from plimsoll.lab._amp_memory import Footprint, footprint, gibibytes
from plimsoll.lab._amp_models import UNET_PARAMETERS, count, needed_transformers
from plimsoll.lab._amp_networks import Network, published
from plimsoll.lab._amp_time import Timed, ratio, time_steps
from plimsoll.lab._amp_train import (
    FP8,
    LEVELS,
    Setup,
    described,
    plan_for,
    setup_for,
    timed_networks,
    to_task,
    trained_networks,
)
from plimsoll.lab._claim import Claim
from plimsoll.lab._clip import one_thread
from plimsoll.lab._experiment import Bench, Experiment
from plimsoll.lab._result import Measured, Training
from plimsoll.lab._unit_quality_judge import Ratio
from plimsoll.lab._workers import carry_out, workers_for

_COUNTED = ("fp32", "amp-fp16", "amp-bf16", "fp8-tensor", "fp16-master")
_REPORTED = ("fp32", "amp-fp16", FP8)
_AGREES = 0.05  # of FP32's loss
_HALF = 0.6  # of FP32's memory: half, and a tenth for what stays
_X2_TOTAL = 0.625  # of it, if activations three times the static memory are halved and the static is not: 2.5 / 4
_TRAINED = "plimsoll.lab._amp_train:trained"
Memory = Mapping[tuple[str, str], Footprint]
Times = Mapping[str, Mapping[str, Timed]]
Ends = Mapping[tuple[str, str], Ratio]


def measure(bench: Bench) -> Measured:
    """Memory, times and losses, and what they show."""
    setup = setup_for(bench.steps, full=bench.full)
    return measure_with(
        bench, setup, counted=published(), timed=timed_networks(setup), workers=workers_for(bench.device)
    )


def measure_with(
    bench: Bench, setup: Setup, *, counted: tuple[Network, ...], timed: tuple[Network, ...], workers: int
) -> Measured:
    """Likewise, with networks of one's own to be counted and timed."""
    memory = _counted(counted, bench)
    times = {
        network.name: time_steps(
            network, levels_of(network), rounds=setup.rounds, seed=bench.seed, device=bench.device,
            progress=bench.progress,
        )
        for network in timed
    }  # fmt: skip
    with contextlib.nullcontext() if bench.full else one_thread():
        runs = _trained(bench, setup, workers)
    ends = {key: against(paths, runs[key[0], "fp32"]) for key, paths in runs.items()}
    trainings = tuple(_judged(network, level, runs, ends, memory) for network, level in _reported(runs))
    fell = {name: fell_to(losses(paths[0])) for (name, level), paths in runs.items() if level == "fp32"}
    batches = {network.name: network.batch for network in counted}
    parameters = count(next(each for each in counted if each.name == "unet").make())
    return Measured(
        trainings=trainings,
        claims=(
            *of_memory(memory, batches, parameters),
            *of_losses(ends, fell, times),
            *(of_times(times) if bench.device == "cuda" else ()),
        ),
        said=(*_said_of_memory(memory, batches), *_said_of_times(times, bench.device)),
    )


def levels_of(network: Network) -> tuple[str, ...]:
    """The levels that a step is timed at: FP8 where there are linear layers."""
    return (*LEVELS[:-1], "fp8-tensor") if network.name != "unet" else LEVELS[:-1]


def _counted(networks: tuple[Network, ...], bench: Bench) -> dict[tuple[str, str], Footprint]:
    pairs = [
        (network, level) for network in networks for level in _COUNTED if level in ("fp16-master", *levels_of(network))
    ]
    bench.progress.begin("memory", len(pairs))
    found: dict[tuple[str, str], Footprint] = {}
    for network, level in pairs:
        found[network.name, level] = footprint(network, level)
        bench.progress.advance()
    return found


def _trained(bench: Bench, setup: Setup, workers: int) -> dict[tuple[str, str], list[Path]]:
    """The runs of all trainings. FP32's come first: the UNet's plan for FP8 is made of one of them."""
    networks = trained_networks(setup)
    runs = {(network.name, level): _folders(bench, setup, network, level) for network in networks for level in LEVELS}
    for levels in (LEVELS[:1], LEVELS[1:]):
        tasks = [
            to_task(network.name, _precision(network, level, runs), bench.seed + number, run, setup, bench.device,
                    watched=number == 0 and level in _REPORTED)
            for network in networks
            for level in levels
            for number, run in enumerate(runs[network.name, level])
        ]  # fmt: skip
        carry_out(_TRAINED, tasks, workers=workers, progress=bench.progress)
    return runs


def _folders(bench: Bench, setup: Setup, network: Network, level: str) -> list[Path]:
    name = f"{network.name}-{level}"
    return [bench.runs / (name if number == 0 else f"{name}-seed-{number}") for number in range(setup.seeds)]


def _precision(network: Network, level: str, runs: Mapping[tuple[str, str], list[Path]]) -> str:
    return plan_for(network, runs[network.name, "fp32"][0]) if level == FP8 else level


def _reported(runs: Mapping[tuple[str, str], list[Path]]) -> Iterator[tuple[str, str]]:
    return ((network, level) for network, level in runs if level in _REPORTED)


def _judged(
    network: str, level: str, runs: Mapping[tuple[str, str], list[Path]], ends: Ends, memory: Memory
) -> Training:
    counted = memory.get((network, "fp8-tensor" if level == FP8 else level))
    numbers = {} if counted is None else {"static_bytes": counted.static, "bytes_per_sample": counted.per_sample}
    return judged(
        f"{network}-{level}", f"{network}, {level}", runs[network, level][0], ends[network, level], numbers
    )  # fmt: skip


# -- claims ------------------------------------------------------------------------------------------------------------


def of_memory(memory: Memory, batches: Mapping[str, int], parameters: int) -> tuple[Claim, ...]:
    """What is said of memory, at the benchmark's batches."""
    saved = {name: 1.0 - share(memory, name, "amp-fp16", batch) for name, batch in batches.items()}
    bert, masters = memory["bert", "fp32"], memory["bert", "fp16-master"]
    return (
        Claim(
            id="unet-parameters", says="the UNet has the benchmark's number of parameters", measured=parameters,
            at_least=UNET_PARAMETERS, at_most=UNET_PARAMETERS, unit="parameters",
        ),
        Claim(
            id="unet-saves-most", says="amp-fp16: the UNet saves the largest part of its memory",
            measured=saved["unet"] - max(saved["bert"], saved["feed-forward"]), at_least=0.05,
            unit="of the memory more than the next",
        ),
        Claim(
            id="bert-saves", says="amp-fp16: BERT-base saves memory too",
            measured=saved["bert"], at_least=0.1, unit="of the memory",
        ),
        Claim(
            id="unet-halves", says="amp-fp16: the UNet's memory about halves",
            measured=1.0 - saved["unet"], at_most=_HALF, unit="of FP32's",
        ),
        Claim(
            id="masters-cost", says="O2: masters cost what 16-bit weights and gradients save: static memory stays",
            measured=masters.static / bert.static, at_least=0.99, at_most=1.01, unit="of FP32's",
        ),
        Claim(
            id="activations-dominate", says="BERT-base in FP32: activations take 3 to 4 times the static memory",
            measured=bert.dynamic(batches["bert"]) / bert.static, at_least=3, at_most=4, unit="times",
        ),
        Claim(
            id="o2-halves", says="O2: so the total about halves, as activations do",
            measured=share(memory, "bert", "fp16-master", batches["bert"]), at_most=_X2_TOTAL, unit="of FP32's",
        ),
    )  # fmt: skip


def share(memory: Memory, network: str, level: str, batch: int) -> float:
    """The memory at the level as a part of FP32's."""
    return memory[network, level].total(batch) / memory[network, "fp32"].total(batch)


def of_losses(ends: Ends, fell: Mapping[str, float], times: Times) -> tuple[Claim, ...]:
    """What is said of losses: they fall, they agree at the end, and one step's agree to begin with."""
    return (
        *(
            Claim(
                id=f"{name}-converges", says=f"{name}, FP32: the loss falls",
                measured=part, at_most=0.8, unit="of where it began",
            )
            for name, part in fell.items()
        ),
        *(
            Claim(
                id=f"{name}-{level}-agrees", says=f"{name}, {level}: the loss ends where FP32's does",
                measured=furthest(found), at_most=_AGREES, unit="of it apart, at most",
            )
            for (name, level), found in ends.items()
            if level != "fp32"
        ),
        *(
            Claim(
                id=f"{name}-step-agrees", says=f"{name}: one step's loss is the same at all levels",
                measured=max(abs(each.loss / levels["fp32"].loss - 1.0) for each in levels.values()), at_most=_AGREES,
                unit="of FP32's apart, at most",
            )
            for name, levels in times.items()
        ),
    )  # fmt: skip


def of_times(times: Times) -> tuple[Claim, ...]:
    """What was published of times on GPUs: no gain, 5 to 30 %, 50 to 60 %."""
    took = {name: ratio(levels["amp-fp16"], levels["fp32"]) for name, levels in times.items()}
    return (
        Claim(
            id="feed-forward-no-gain", says="amp-fp16: the feed-forward network gains no time",
            measured=took["feed-forward"], at_least=0.95, unit="of FP32's time",
        ),
        Claim(
            id="unet-faster", says="amp-fp16: the UNet takes 5 to 30 % less time, or saves more",
            measured=took["unet"], at_most=0.95, unit="of FP32's time",
        ),
        Claim(
            id="bert-faster", says="amp-fp16: BERT-base takes 50 to 60 % less time, or saves more",
            measured=took["bert"], at_most=0.5, unit="of FP32's time",
        ),
    )  # fmt: skip


# -- in words ----------------------------------------------------------------------------------------------------------


def _said_of_memory(memory: Memory, batches: Mapping[str, int]) -> Iterator[str]:
    for name, batch in batches.items():
        fp32 = memory[name, "fp32"]
        levels = ", ".join(
            f"{level} {share(memory, name, level, batch):.0%}" for network, level in memory if network == name
        )
        yield (
            f"{name}, batch {batch}: {gibibytes(fp32.static)} static and {gibibytes(fp32.dynamic(batch))} dynamic in "
            f"FP32; dynamic is 3 to 4 times static at batches {fp32.batch_at(3):.1f} to {fp32.batch_at(4):.1f}. Of "
            f"FP32's total: {levels}. Of what O2 keeps for a sample, {_wide(memory[name, 'fp16-master']):.0%} has 4 "
            "bytes a value or more."
        )


def _wide(found: Footprint) -> float:
    return found.wide / found.per_sample


def _said_of_times(times: Times, device: str) -> Iterator[str]:
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


def _settings(bench: Bench) -> Mapping[str, object]:
    needed_transformers()
    return described(setup_for(bench.steps, full=bench.full), bench.device)


AMP = Experiment(
    name="amp",
    claim="Automatic mixed precision saves memory, most of it in a UNet, and losses end where FP32's do.",
    source="A4, X2",
    settings=_settings,
    measure=measure,
)
