"""Faults of data, and of processes: inputs, labels, ranks, ends."""

import os

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from benchmarks.trust.faults.breaks import SIDE, begins
from benchmarks.trust.registry import fault
from benchmarks.trust.toys import batches, clusters, mlp
from benchmarks.trust.training import Training

INPUT = begins(r"\binput(s|\b)")


def _spoiled(run: Training, spoil: object, steps: int = 140) -> None:
    model, batch = mlp(16, 64, 64, 10), batches(*clusters())

    def loss(step: int) -> Tensor:
        x, y = spoil(step, *batch(step))  # type: ignore[operator]
        return F.cross_entropy(model(x), y, ignore_index=-100)

    run.train(model, torch.optim.SGD(model.parameters(), lr=0.05), loss, steps)


@fault("nan-in-the-input", named=INPUT, misleading=SIDE)
def nan_input(run: Training) -> None:
    """One NaN in the batch of step 70, which is sampled."""

    def spoil(step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if step == 70:
            x[4, 4] = float("nan")
        return x, y

    _spoiled(run, spoil)


@fault("nan-in-the-input-between-samples", named=INPUT, misleading=SIDE)
def nan_input_between(run: Training) -> None:
    """One NaN in the batch of step 73, which is not sampled."""

    def spoil(step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if step == 73:
            x[4, 4] = float("nan")
        return x, y

    _spoiled(run, spoil)


@fault("infinity-in-the-input", named=INPUT, misleading=SIDE)
def inf_input(run: Training) -> None:
    """An infinite feature in a sampled batch."""

    def spoil(step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if step == 70:
            x[0, 0] = float("inf")
        return x, y

    _spoiled(run, spoil)


@fault("no-targets", named=begins(r"\bloss\b"), misleading=SIDE)
def no_targets(run: Training) -> None:
    """A batch whose labels are all ignored: the mean over nothing is NaN."""

    def spoil(step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x, torch.full_like(y, -100) if step == 73 else y

    _spoiled(run, spoil)


@fault("bad-label", named=r"loss-spike", held_back=True)
def bad_label(run: Training) -> None:
    """A target of 10^6 in a regression on values of size 1: one batch, and the weights are thrown away."""
    model = mlp(8, 64, 1)
    x = torch.randn(512, 8)
    batch = batches(x, x.sum(dim=1, keepdim=True))

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        if step == 105:
            y = y.clone()
            y[0] = 1e6
        return F.mse_loss(model(x), y)

    run.train(model, torch.optim.SGD(model.parameters(), lr=0.02), loss, 200)


@fault("unnormalised-feature", named=r"(model|\b0):input")
def unnormalised(run: Training) -> None:
    """From step 100 on one feature is in other units, ten thousand times as large; the loss does not come back."""

    def spoil(step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if step >= 100:
            x = x.clone()
            x[:, 3] *= 1e4
        return x, y

    _spoiled(run, spoil, 200)


@fault("script-fails", named=r"crash|fail|ended (early|by|with)|exception|error|RuntimeError|interrupted")
def script_fails(run: Training) -> None:
    """The script raises at step 88."""

    def spoil(step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if step == 88:
            raise RuntimeError("the disk of the data set is gone")
        return x, y

    _spoiled(run, spoil)


@fault(
    "script-is-killed",
    named=r"killed|not closed|never closed|still open|ended without|crash|interrupted|unfinished",
    held_back=True,
)
def script_killed(run: Training) -> None:
    """The process is killed at step 88, as by a machine out of memory."""
    child = os.fork()
    if child == 0:

        def spoil(step: int, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            if step == 60:
                run.watches[0].flush()
            if step == 88:
                os.kill(os.getpid(), 9)
            return x, y

        try:
            _spoiled(run, spoil)
        finally:
            os._exit(1)
    os.waitpid(child, 0)
