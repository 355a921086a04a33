"""Experiment `amp` (A4, X2, N6): memory, time and losses of three networks.

The levels are FP32, TF32, FP16, BF16 and FP8.

- Memory is counted on "meta" at the benchmark's own sizes (`memory`): what a GPU would keep, on any machine.
- Time is that of whole steps, in turn (`timing`). On a CPU 16-bit and FP8 arithmetic is emulated, which is slower
  than FP32, so that the published savings of time are claimed with ``--device cuda`` alone.
- Losses: the feed-forward network and the UNet are trained at every level from several seeds (`training`); without
  ``--full`` they are narrower ones. BERT-base takes a timed step at each level, and is trained with ``--full`` only.
"""

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from plimsoll.diagnosis import View, diagnose, plan
from plimsoll.precision import Loop, prepare
from plimsoll.runs import Run
from plimsoll.text import percent
from plimsoll.watch import Watch, watch
from plimsoll_lab.bench import Bench, Progress
from plimsoll_lab.experiments.amp.networks import (
    UNET_PARAMETERS,
    Batch,
    Footprint,
    Network,
    count,
    feed_forward,
    footprint,
    gibibytes,
    moved,
    needed_transformers,
    published,
    spans,
    unet,
)
from plimsoll_lab.result import Claim, Measured, Training, claims as claims_of, of_rows
from plimsoll_lab.running.unwatched_run import Unwatched
from plimsoll_lab.running.workers import Task, carry_out, one_thread, workers_for
from plimsoll_lab.statistics import Ratio, columns, largest, ratio
from plimsoll_lab.study import Experiment, check_steps, settings_of

FEWEST_STEPS = 20
FP8 = "fp8"  # the level fp8-tensor where there are linear layers; for the UNet, which has none, a plan of its FP32 run
_MARGIN = 3  # binades: scales come of every tenth step of one seed, and must hold for all steps of all
LEVELS = ("fp32", "tf32", "amp-fp16", "amp-bf16", FP8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Length and size of the experiment.

    - `steps`, `seeds`: of the trainings whose losses are compared. `rounds`: of the steps that are timed, at the
      benchmark's sizes if `full`, and otherwise at batches and pictures that a CPU can take.
    - `every`: how often the watched trainings are recorded.
    """

    steps: int = 80
    seeds: int = 3
    rounds: int = 3
    every: int = 10
    full: bool = False


def setup_for(steps: int | None, *, full: bool) -> Setup:
    """The sizes for that many steps."""
    whole = Setup(steps=500, rounds=20, every=50, full=True) if full else Setup()
    if steps is None:
        return whole
    check_steps("amp", steps, FEWEST_STEPS, whole.steps, ", so that losses can fall")
    return replace(whole, steps=steps)


def timed_networks(setup: Setup) -> tuple[Network, ...]:
    """The networks, at full width whatever the setup."""
    return published() if setup.full else (feed_forward(128), unet(2, 92), spans(1, 32))


def rounds_of(network: Network, setup: Setup) -> int:
    """Return the number of rounds that are timed; one for BERT-base on a CPU."""
    return 1 if network.name == "bert" and not setup.full else setup.rounds


def trained_networks(setup: Setup) -> tuple[Network, ...]:
    """The networks that are trained: without `full` narrower ones, and no BERT."""
    return published() if setup.full else (feed_forward(128, (250, 125)), unet(4, 92, width=8, rate=3e-3))


def trained(task: Task) -> None:
    """Train as a task of `to_task` says, from its seed's weights and batches."""
    setup, device, seed, run = Setup(**task["setup"]), task["device"], task["seed"], Path(task["run"])
    network = next(each for each in trained_networks(setup) if each.name == task["network"])
    torch.manual_seed(seed)
    model = network.make().to(device)
    optimizer = network.optimizer(model)
    seen = watch(model, optimizer, run=run, every=setup.every) if task["watched"] else Unwatched(run)
    watched = seen if isinstance(seen, Watch) else None
    with seen, prepare(model, optimizer, task["precision"], watch=watched) as loop:
        for step in range(setup.steps):
            torch.manual_seed(_mixed(seed, step))  # of dropout: the same one at every level
            with loop.forward():
                loss = network.loss(model, moved(network.draw(seed, step, network.batch), device))
            seen.log(train_loss=loss.detach())
            loop.step(loss)


def plan_for(network: Network, run: Path) -> str:
    """Return the network's FP8 level, or the file of its plan from its FP32 run.

    The plan lies beside the run.
    """
    if network.name != "unet":
        return "fp8-tensor"
    file = run.with_name(f"{run.name}-fp8.toml")
    plan(run, "fp8", margin_binades=_MARGIN).save(file)
    return str(file)


def to_task(network: str, precision: str, seed: int, run: Path, setup: Setup, device: str, *, watched: bool) -> Task:
    """A training as JSON-able data."""
    return {
        "name": run.name, "network": network, "precision": precision, "seed": seed, "run": str(run),
        "watched": watched, "setup": asdict(setup), "device": device,
    }  # fmt: skip


def described(setup: Setup, device: str) -> Mapping[str, object]:
    """Return a result's settings."""
    batches = {network.name: network.batch for network in timed_networks(setup)}
    return settings_of(setup, device, timed_batches=batches, memory="counted on meta")


def _mixed(seed: int, step: int) -> int:
    return 7_919 * seed + step


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """Steps of a level: seconds by round, and loss. `peak_bytes`: GPU's, 0 on a CPU."""

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
    """Return each level's steps, timed in rounds of changing order after a warm-up."""
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


def time_ratio(these: Timed, those: Timed) -> float:
    """Return the median over rounds of the times' ratio in the same round."""
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


_PARTS = 4  # a loss begins with the first of them, and ends with the last
Floats = NDArray[np.float64]


def losses(run: Path) -> Floats:
    """The loss of each step."""
    return Run(run).scalars("train_loss")[1]


def fell_to(loss: Floats) -> float:
    """Return the last quarter's mean loss as a part of the first quarter's."""
    part = max(1, len(loss) // _PARTS)
    return float(loss[-part:].mean() / loss[:part].mean())


def ends(runs: Sequence[Path]) -> Floats:
    """Return the mean loss over each training's last quarter; Inf for no number."""
    found = [loss[-max(1, len(loss) // _PARTS) :].mean() for loss in map(losses, runs)]
    return np.nan_to_num(np.array(found), nan=np.inf)


def against(these: Sequence[Path], fp32: Sequence[Path]) -> Ratio:
    """Return the last losses over FP32's, with Student's bounds over the seeds."""
    return ratio(ends(these), ends(fp32))


def furthest(found: Ratio) -> float:
    """Return the ratio's largest distance from 1, either way, with 95 % each."""
    return max(found.high - 1.0, 1.0 - found.low)


def judged(name: str, title: str, run: Path, found: Ratio, numbers: Mapping[str, float]) -> Training:
    """Judge a level of a network, with the run that was watched."""
    loss = losses(run)
    good = found.mean < 1.0 + _AGREES
    return Training(
        name=name, title=title, run=run, findings=tuple(diagnose(View(Run(run)))), good=good,
        numbers={"of_fp32": found.mean, "of_fp32_low": found.low, "of_fp32_high": found.high,
                 "fell_to": fell_to(loss), **numbers},
        outcome="agrees with FP32" if good else "leaves FP32", series=columns(np.arange(len(loss)), loss),
        series_of="loss",
    )  # fmt: skip


_AGREES = 0.05  # of FP32's loss
_HALF = 0.6  # of FP32's memory: half, and a tenth for what stays
_X2_TOTAL = 0.625  # of it, if activations three times the static memory are halved and the static is not: 2.5 / 4
Memory = Mapping[tuple[str, str], Footprint]
Times = Mapping[str, Mapping[str, Timed]]
Ends = Mapping[tuple[str, str], Ratio]


def of_memory(memory: Memory, batches: Mapping[str, int], parameters: int) -> tuple[Claim, ...]:
    """Return the claims on memory, at the benchmark's batches."""
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
    """Static and dynamic memory, each by itself."""
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
    """Return the claims on losses.

    They fall, they agree at the end, and one step's agree to begin with.
    """
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
    """Return the claims on GPU times, published as no gain, 5 to 30 %, 50 to 60 %."""
    took = {name: time_ratio(levels["amp-fp16"], levels["fp32"]) for name, levels in times.items()}
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
    """Yield sentences on the steps' times."""
    for name, levels in times.items():
        others = ", ".join(
            f"{level} {time_ratio(timed, levels['fp32']):.2f}" for level, timed in levels.items() if level != "fp32"
        )
        peak = max(timed.peak_bytes for timed in levels.values())
        most = f" At most {gibibytes(peak)} of the GPU." if peak else ""
        yield f"{name}: a step in FP32 takes {levels['fp32'].median:.3g} s; times of it: {others}.{most}"
    if device == "cpu":
        yield (
            "These are times of a CPU, which emulates 16-bit, TF32 and FP8 arithmetic: they say nothing of a GPU's. "
            "The published savings of time are claimed with --device cuda alone."
        )


_COUNTED = ("fp32", "amp-fp16", "amp-bf16", "fp8-tensor", "fp16-master")
_REPORTED = ("fp32", "amp-fp16", FP8)
_TRAINED = "plimsoll_lab.experiments.amp.experiment:trained"


def measure(bench: Bench) -> Measured:
    """Memory, times and losses, and what they show."""
    setup = setup_for(bench.steps, full=bench.full)
    return measure_with(
        bench, setup, counted=published(), timed=timed_networks(setup), workers=workers_for(bench.device)
    )


def measure_with(
    bench: Bench, setup: Setup, *, counted: tuple[Network, ...], timed: tuple[Network, ...], workers: int
) -> Measured:
    """Likewise, with the caller's networks to be counted and timed."""
    memory = _counted(counted, bench)
    times = {
        network.name: time_steps(
            network, levels_of(network), rounds=rounds_of(network, setup), seed=bench.seed, device=bench.device,
            progress=bench.progress,
        )
        for network in timed
    }  # fmt: skip
    with one_thread(unless=bench.full):
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
    """Return the runs of all trainings, FP32's first, for the UNet's FP8 plan."""
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
