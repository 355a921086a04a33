"""The LSTM as separate operations, which can be intercepted."""

from collections.abc import Sequence
from typing import Any, cast as typed

import torch
import torch.nn.functional as F  # noqa: N812  (as everyone calls it)
from torch import Tensor

from plimsoll.emulate.dispatch import operation_kernels

State = tuple[Tensor, Tensor]


# On a CPU torch runs a layer of an LSTM as one kernel, so lists and rules cannot affect the operations inside. GRU and
# RNN consist of separate operations already.
def lstm(op: Any, args: Any, kwargs: Any) -> Any:
    """Run `lstm` as separate operations, for padded or packed sequences."""
    # An LSTM with projections has another number of weights: torch itself runs it as separate operations.
    packed = op._overloadname == "data"  # noqa: SLF001
    weights, biased = args[3:5] if packed else args[2:4]
    layers, both_ways = args[5 if packed else 4], args[8 if packed else 7]
    per_direction = 4 if biased else 2
    if kwargs or len(weights) != layers * (2 if both_ways else 1) * per_direction:
        return NotImplemented
    return operation_kernels.run_intercepted(_packed if packed else _padded, args, {})


def _padded(
    x: Tensor,
    state: Sequence[Tensor],
    weights: Sequence[Tensor],
    biased: bool,
    layers: int,
    dropout: float,
    training: bool,
    both_ways: bool,
    batch_first: bool,
) -> Any:
    x = x.transpose(0, 1) if batch_first else x
    sizes = [x.shape[1]] * x.shape[0]
    rest = (weights, biased, layers, dropout, training, both_ways)
    y, h, c = _layers(x.flatten(0, 1), sizes, state, *rest)
    y = typed("Any", y).unflatten(0, x.shape[:2])
    return y.transpose(0, 1) if batch_first else y, h, c


def _packed(data: Tensor, sizes: Tensor, *rest: Any) -> Any:
    return _layers(data, typed("Any", sizes).tolist(), *rest)


def _layers(
    x: Tensor,
    sizes: list[int],
    state: Sequence[Tensor],
    weights: Sequence[Tensor],
    biased: bool,
    layers: int,
    dropout: float,
    training: bool,
    both_ways: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    directions, count = 2 if both_ways else 1, 4 if biased else 2
    last = list[State]()
    for layer in range(layers):
        outputs = list[Tensor]()
        for index in range(layer * directions, (layer + 1) * directions):
            start = (state[0][index], state[1][index])
            way = _backwards if index % directions else _forwards
            y, end = way(x, sizes, start, *weights[index * count : (index + 1) * count])
            outputs.append(y)
            last.append(end)
        x = torch.cat(outputs, 1) if both_ways else outputs[0]
        if dropout and training and layer < layers - 1:
            x = torch.dropout(x, dropout, train=True)
    return x, torch.stack([h for h, _ in last]), torch.stack([c for _, c in last])


def _forwards(x: Tensor, sizes: list[int], start: State, w: Tensor, u: Tensor, *b: Tensor) -> tuple[Tensor, State]:
    """Run forwards over sequences sorted by falling length.

    `sizes` has the number of sequences that are left at each step.
    """
    steps: Sequence[Tensor] = typed("Any", F.linear(x, w, b[0] if b else None)).split(sizes)
    h, c = (state[: sizes[0]] for state in start)
    outputs, ended = list[Tensor](), list[State]()
    for gates in steps:
        if len(gates) < len(h):
            ended.append((h[len(gates) :], c[len(gates) :]))
        h, c = _cell(gates, h[: len(gates)], c[: len(gates)], u, *b[1:])
        outputs.append(h)
    ended.append((h, c))
    return torch.cat(outputs), (torch.cat([h for h, _ in ended[::-1]]), torch.cat([c for _, c in ended[::-1]]))


def _backwards(x: Tensor, sizes: list[int], start: State, w: Tensor, u: Tensor, *b: Tensor) -> tuple[Tensor, State]:
    """Run from the last step to the first. A shorter sequence joins at its end."""
    steps: Sequence[Tensor] = typed("Any", F.linear(x, w, b[0] if b else None)).split(sizes)
    h, c = (state[: sizes[-1]] for state in start)
    outputs = list[Tensor]()
    for gates in reversed(steps):
        h, c = (torch.cat((now, first[len(now) : len(gates)])) for now, first in zip((h, c), start, strict=True))
        h, c = _cell(gates, h, c, u, *b[1:])
        outputs.append(h)
    return torch.cat(outputs[::-1]), (h, c)


def _cell(gates: Tensor, h: Tensor, c: Tensor, u: Tensor, bias: Tensor | None = None) -> State:
    i, f, g, o = (gates + F.linear(h, u, bias)).chunk(4, 1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c
