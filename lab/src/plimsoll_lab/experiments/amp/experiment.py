"""Experiment `amp` (A4, X2, N6): three networks in FP32, TF32, FP16, BF16 and FP8: memory, time, losses that agree.

- Memory is counted on "meta" at the benchmark's own sizes (`memory`): what a GPU would keep, on any machine.
- Time is that of whole steps, in turn (`timing`). On a CPU 16-bit and FP8 arithmetic is emulated, which is slower
  than FP32, so that the published savings of time are claimed with ``--device cuda`` alone.
- Losses: the feed-forward network and the UNet are trained at every level from several seeds (`training`); without
  ``--full`` they are narrower ones. BERT-base takes a timed step at each level, and is trained with ``--full`` only.
"""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from plimsoll_lab.bench import Bench
from plimsoll_lab.claim import of_rows
from plimsoll_lab.experiments.amp.analysis import against, fell_to, judged, losses
from plimsoll_lab.experiments.amp.claims import (
    Ends,
    Memory,
    of_losses,
    of_memory,
    of_times,
    said_of_memory,
    said_of_times,
)
from plimsoll_lab.experiments.amp.memory import Footprint, footprint
from plimsoll_lab.experiments.amp.models import count, needed_transformers
from plimsoll_lab.experiments.amp.networks import Network, published
from plimsoll_lab.experiments.amp.timing import time_steps
from plimsoll_lab.experiments.amp.training import (
    FP8,
    LEVELS,
    Setup,
    described,
    plan_for,
    rounds_of,
    setup_for,
    timed_networks,
    to_task,
    trained_networks,
)
from plimsoll_lab.result import Measured, Training
from plimsoll_lab.running.workers import carry_out, one_thread, workers_for
from plimsoll_lab.study import Experiment

_COUNTED = ("fp32", "amp-fp16", "amp-bf16", "fp8-tensor", "fp16-master")
_REPORTED = ("fp32", "amp-fp16", FP8)
_TRAINED = "plimsoll_lab.experiments.amp.training:trained"


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
            network, levels_of(network), rounds=rounds_of(network, setup), seed=bench.seed, device=bench.device,
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
            *of_rows(of_losses(ends, fell, times), "A4"),
            *of_rows(of_times(times) if bench.device == "cuda" else (), "A4"),
        ),
        said=(*said_of_memory(memory, batches), *said_of_times(times, bench.device)),
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


def _settings(bench: Bench) -> Mapping[str, object]:
    needed_transformers()
    return described(setup_for(bench.steps, full=bench.full), bench.device)


AMP = Experiment(
    name="amp",
    claim="Automatic mixed precision saves memory, most of it in a UNet, and losses end where FP32's do.",
    source="A4, X2, N6",
    settings=_settings,
    measure=measure,
)
