"""Training loops that differ by one argument or two lines, run and compared.

The functions from `fp32_loop` to `plimsoll_loop` are the experiment's material. Their bodies are read from this file,
token by token, so what is counted is what is run.
"""

import contextlib
import difflib
import inspect
import io
import tokenize
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from plimsoll.precision import prepare

Batches = Sequence[tuple[Tensor, Tensor]]
LoopOf = Callable[[nn.Module, torch.optim.Optimizer, Batches], list[float]]
_LAYOUT = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.COMMENT, tokenize.ENDMARKER)


def fp32_loop(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Batches) -> list[float]:
    losses: list[float] = []
    for x, y in batches:
        loss = functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def tf32_loop(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Batches) -> list[float]:
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    torch.backends.cudnn.conv.fp32_precision = "tf32"  # pyright: ignore[reportAttributeAccessIssue]
    losses: list[float] = []
    for x, y in batches:
        loss = functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def fp16_loop(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Batches) -> list[float]:
    losses: list[float] = []
    for x, y in batches:
        with torch.autocast(x.device.type, dtype=torch.float16):
            loss = functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def bf16_loop(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Batches) -> list[float]:
    losses: list[float] = []
    for x, y in batches:
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            loss = functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def amp_loop(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Batches) -> list[float]:
    scaler = torch.amp.GradScaler(batches[0][0].device.type)
    losses: list[float] = []
    for x, y in batches:
        with torch.autocast(x.device.type, dtype=torch.float16):
            loss = functional.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def plimsoll_loop(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Batches, precision: str = "tf32"
) -> list[float]:
    losses: list[float] = []
    with prepare(model, optimizer, precision) as loop:
        for x, y in batches:
            with loop.forward():
                loss = functional.mse_loss(model(x), y)
            loop.step(loss)
            losses.append(loss.item())
    return losses


def changed_tokens(one: LoopOf, other: LoopOf) -> int:
    """Return how many tokens of one body another changes; a replaced one counts once."""
    matcher = difflib.SequenceMatcher(None, _tokens(one), _tokens(other), autojunk=False)
    return sum(max(b - a, d - c) for tag, a, b, c, d in matcher.get_opcodes() if tag != "equal")


def changed_lines(one: LoopOf, other: LoopOf, *, indents: bool = True) -> tuple[int, int]:
    """Return how many lines a body adds and lacks; `indents`: those count too."""
    here, there = ([line if indents else line.strip() for line in _body(loop)] for loop in (one, other))
    told = list(difflib.ndiff(here, there))
    return sum(line.startswith("+ ") for line in told), sum(line.startswith("- ") for line in told)


@contextlib.contextmanager
def settings_restored() -> Generator[list[Any]]:
    """Yield the places of torch's settings that the two lines write, and restore them."""
    backends: Any = torch.backends
    places = [backends.cuda.matmul, backends.cudnn.conv]
    before = [place.fp32_precision for place in places]
    try:
        yield places
    finally:
        for place, precision in zip(places, before, strict=True):
            place.fp32_precision = precision


def _body(loop: LoopOf) -> list[str]:
    lines = inspect.getsource(loop).splitlines()
    return lines[next(n for n, line in enumerate(lines) if line.endswith("-> list[float]:")) + 1 :]


def _tokens(loop: LoopOf) -> list[str]:
    text = inspect.cleandoc("\n".join(_body(loop)))
    read = tokenize.generate_tokens(io.StringIO(text + "\n").readline)
    return [token.string for token in read if token.type not in _LAYOUT]
