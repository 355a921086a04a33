"""What the tests of the scalers share: models, a loop, and steps whose gradients are made up."""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from plimsoll.scaling import LossScaler, StepOutcome


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))


def weight(*values: float, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values or (1.0, 1.0), dtype=dtype))


def take(scaler: Any, optimizer: torch.optim.Optimizer, *, overflows: bool) -> None:
    """One iteration with gradients of 0.25, or of Inf."""
    optimizer.zero_grad()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    scaler.scale(sum((p * 0.25).sum() for p in parameters)).backward()
    if overflows:
        parameters[0].grad.view(-1)[0] = math.inf
    scaler.step(optimizer)
    scaler.update()


def scales(scaler: Any, trace: Iterable[bool], optimizer: torch.optim.Optimizer | None = None) -> list[float]:
    """The scale after each step of a trace of overflows."""
    optimizer = optimizer or torch.optim.SGD([weight()], lr=0.0)
    found = []
    for overflows in trace:
        take(scaler, optimizer, overflows=overflows)
        found.append(scaler.get_scale())
    return found


def outcomes(scaler: LossScaler, optimizer: torch.optim.Optimizer, trace: Iterable[bool]) -> list[StepOutcome]:
    found = []
    for overflows in trace:
        take(scaler, optimizer, overflows=overflows)
        found.append(scaler.outcome)
    return found


class _NeverReads(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if "_local_scalar_dense" in name or "nonzero" in name or "is_nonzero" in name:
            raise AssertionError(f"the host reads a tensor's value: {name}")
        return func(*args, **(kwargs or {}))


@contextmanager
def host_reads_nothing() -> Iterator[None]:
    """Fails where any tensor's value is brought to the host."""
    with _NeverReads():
        yield


def same_tensors(found: Iterable[Tensor], expected: Iterable[Tensor]) -> bool:
    """Bit for bit, NaN and all."""
    return all(
        torch.equal(a.detach().view(torch.int32), b.detach().view(torch.int32))
        for a, b in zip(found, expected, strict=True)
    )
