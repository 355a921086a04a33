"""One training of the benchmark: a network at a level, from one seed, watched into a run or as numbers alone.

Nothing here judges: a training leaves a run, and what became of it is read from there (`analysis`).
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from plimsoll.diagnosis import plan
from plimsoll.errors import ArgumentError
from plimsoll.precision import prepare
from plimsoll.watch import Watch, watch
from plimsoll_lab.experiments.amp.networks import Network, feed_forward, moved, published, spans, unet
from plimsoll_lab.running.unwatched_run import Unwatched
from plimsoll_lab.running.workers import Task

FEWEST_STEPS = 20
FP8 = "fp8"  # the level fp8-tensor where there are linear layers; for the UNet, which has none, a plan of its FP32 run
_MARGIN = 3  # binades: scales come of every tenth step of one seed, and must hold for all steps of all
LEVELS = ("fp32", "tf32", "amp-fp16", "amp-bf16", FP8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """How long, and how large.

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
    if steps < FEWEST_STEPS:
        raise ArgumentError(
            f"lab amp: expected {FEWEST_STEPS} steps or more, so that losses can fall; got {steps}. Use {whole.steps}."
        )
    return replace(whole, steps=steps)


def timed_networks(setup: Setup) -> tuple[Network, ...]:
    """The networks, at full width whatever the setup."""
    return published() if setup.full else (feed_forward(128), unet(2, 92), spans(1, 32))


def rounds_of(network: Network, setup: Setup) -> int:
    """How often the network's steps are timed: BERT-base once, where a CPU has to take them."""
    return 1 if network.name == "bert" and not setup.full else setup.rounds


def trained_networks(setup: Setup) -> tuple[Network, ...]:
    """The networks that are trained: without `full` narrower ones, and no BERT."""
    return published() if setup.full else (feed_forward(128, (250, 125)), unet(4, 92, width=8, rate=3e-3))


def trained(task: Task) -> None:
    """Trains what a task of `to_task` says: from the weights and on the batches of its seed, whatever the level."""
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
    """How the network runs in FP8: a level, or the plan that its own FP32 run gives, which lies beside that."""
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
    """What a result says of how it was made."""
    told: dict[str, object] = asdict(setup)
    batches = {network.name: network.batch for network in timed_networks(setup)}
    emulated = "emulated" if device == "cpu" else "the device's own"
    return {**told, "timed_batches": batches, "device": device, "fp16": emulated, "memory": "counted on meta"}


def _mixed(seed: int, step: int) -> int:
    return 7_919 * seed + step
