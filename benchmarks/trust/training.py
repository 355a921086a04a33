"""`Training`: what a kind trains through, in the precision that is asked for, watched as a user would watch it.

Seed 0 is a loop by hand (`pl.emulate` and `torch.amp.GradScaler` for FP16, `torch.autocast` for BF16), sampled every
ten steps, which is the default. Seed 1 is `pl.prepare` where a kind's loop is a plain one, sampled every four.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

import plimsoll as pl

Precision = Literal["fp32", "bf16", "fp16"]
LEVELS = {"fp32": "fp32", "bf16": "amp-bf16", "fp16": "amp-fp16"}


class Training:
    """One run: its precision, seed and folder, and the losses that it had."""

    def __init__(self, path: Path, precision: Precision, seed: int, every: int | None = None) -> None:
        self.path, self.precision, self.seed = path, precision, seed
        self.every = every if every is not None else (10, 4)[seed % 2]
        self.losses: list[float] = []
        self.measures: list[float] = []
        self.watches: list[pl.watch.Watch] = []
        self._open = ExitStack()
        self._scalers: dict[int, torch.amp.GradScaler] = {}

    def watch(
        self,
        model: nn.Module,
        optimizer: "torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None",
        part: str | None = None,
        **arguments: Any,
    ) -> pl.watch.Watch:
        """Watch a model until the run ends; `part` names the model where a run has several."""
        run = self.path if part is None else self.path / part
        arguments = {"every": self.every, **arguments}
        self.watches.append(self._open.enter_context(pl.watch(model, optimizer, run=run, **arguments)))
        return self.watches[-1]

    def forward(self) -> AbstractContextManager[object]:
        """The context of a forward in the run's precision."""
        if self.precision == "bf16":
            return torch.autocast("cpu", dtype=torch.bfloat16)
        return pl.emulate("fp16") if self.precision == "fp16" else nullcontext()

    def scaler(self, optimizer: torch.optim.Optimizer, **arguments: Any) -> torch.amp.GradScaler:
        """The loss scaler of an optimizer, which does nothing but in FP16."""
        if id(optimizer) not in self._scalers:
            self._scalers[id(optimizer)] = torch.amp.GradScaler("cpu", enabled=self.precision == "fp16", **arguments)
        return self._scalers[id(optimizer)]

    def step(
        self, loss: Tensor, optimizer: torch.optim.Optimizer, *, clip: float | None = None, log: bool = True
    ) -> None:
        """One step by hand: gradients cleared, backward, unscaled and clipped where asked for, stepped."""
        scaler = self.scaler(optimizer)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if clip is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], clip)
        scaler.step(optimizer)
        scaler.update()
        if log:
            self.losses.append(float(loss.detach()))

    def train(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Callable[[int], Tensor],
        steps: int = 200,
        *,
        scheduler: Any = None,
        clip: float | None = None,
        accumulate: int = 1,
        after: Callable[[int], object] | None = None,
    ) -> None:
        """A plain loop; `loss` is of a step, and of a micro-batch where gradients are accumulated."""
        if self.seed % 2:
            self._prepared(model, optimizer, loss, steps, scheduler, clip, accumulate, after)
            return
        scaler = self.scaler(optimizer)
        self.watch(model, optimizer)
        for step in range(steps):
            optimizer.zero_grad()
            total = 0.0
            for micro in range(accumulate):
                with self.forward():
                    value = loss(step * accumulate + micro) / accumulate
                scaler.scale(value).backward()
                total += float(value.detach())
            if clip is not None:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            scaler.step(optimizer)
            scaler.update()
            if scheduler is not None:
                scheduler.step()
            if after is not None:
                after(step)
            self.losses.append(total)

    def _prepared(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Callable[[int], Tensor],
        steps: int,
        scheduler: Any,
        clip: float | None,
        accumulate: int,
        after: Callable[[int], object] | None,
    ) -> None:
        watch = self.watch(model, optimizer)
        loop = pl.prepare(
            model,
            optimizer,
            LEVELS[self.precision],
            clip_norm=clip,
            accumulate=accumulate,
            schedulers=[] if scheduler is None else [scheduler],
            watch=watch,
        )
        with loop:
            for step in range(steps):
                total = 0.0
                for micro in range(accumulate):
                    with loop.forward():
                        value = loss(step * accumulate + micro)
                    loop.step(value)
                    total += float(value.detach()) / accumulate
                if after is not None:
                    after(step)
                self.losses.append(total)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the recording; the watches see the error that ends it, as in a script."""
        self._open.__exit__(kind, error, trace)
