"""The LSTM as separate operations, each of which is heard.

On a CPU torch runs an LSTM's layer as one kernel, in the dtypes that it has one for: no list and no rule would reach
into it. GRU and RNN are made of separate operations already.
"""

from collections.abc import Sequence
from typing import Any, cast as typed

import torch
import torch.nn.functional as F  # noqa: N812  (as everyone calls it)
from torch import Tensor

from plimsoll.emulate.dispatch import operation_kernels

State = tuple[Tensor, Tensor]


def lstm(op: Any, args: Any, kwargs: Any) -> Any:
    """Return the rule for `lstm`, over padded or over packed sequences; those with projections are separate already."""
    packed = op._overloadname == "data"  # noqa: SLF001
    weights, biased = args[3:5] if packed else args[2:4]
    layers, both_ways = args[5 if packed else 4], args[8 if packed else 7]
    each = 4 if biased else 2
    if kwargs or len(weights) != layers * (2 if both_ways else 1) * each:
        return NotImplemented
    return operation_kernels.aloud(_packed if packed else _padded, args, {})


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
    directions, each = 2 if both_ways else 1, 4 if biased else 2
    last = list[State]()
    for layer in range(layers):
        outputs = list[Tensor]()
        for index in range(layer * directions, (layer + 1) * directions):
            start = (state[0][index], state[1][index])
            way = _backwards if index % directions else _forwards
            y, end = way(x, sizes, start, *weights[index * each : (index + 1) * each])
            outputs.append(y)
            last.append(end)
        x = torch.cat(outputs, 1) if both_ways else outputs[0]
        if dropout and training and layer < layers - 1:
            x = torch.dropout(x, dropout, train=True)
    return x, torch.stack([h for h, _ in last]), torch.stack([c for _, c in last])


def _forwards(x: Tensor, sizes: list[int], start: State, w: Tensor, u: Tensor, *b: Tensor) -> tuple[Tensor, State]:
    """Over sequences sorted by falling length, `sizes` of which are left at each step."""
    steps: Sequence[Tensor] = typed("Any", F.linear(x, w, b[0] if b else None)).split(sizes)
    h, c = (one[: sizes[0]] for one in start)
    outputs, ended = list[Tensor](), list[State]()
    for gates in steps:
        if len(gates) < len(h):
            ended.append((h[len(gates) :], c[len(gates) :]))
        h, c = _cell(gates, h[: len(gates)], c[: len(gates)], u, *b[1:])
        outputs.append(h)
    ended.append((h, c))
    return torch.cat(outputs), (torch.cat([h for h, _ in ended[::-1]]), torch.cat([c for _, c in ended[::-1]]))


def _backwards(x: Tensor, sizes: list[int], start: State, w: Tensor, u: Tensor, *b: Tensor) -> tuple[Tensor, State]:
    """Likewise from the last step to the first: shorter sequences join as they begin."""
    steps: Sequence[Tensor] = typed("Any", F.linear(x, w, b[0] if b else None)).split(sizes)
    h, c = (one[: sizes[-1]] for one in start)
    outputs = list[Tensor]()
    for gates in reversed(steps):
        h, c = (torch.cat((now, one[len(now) : len(gates)])) for now, one in zip((h, c), start, strict=True))
        h, c = _cell(gates, h, c, u, *b[1:])
        outputs.append(h)
    return torch.cat(outputs[::-1]), (h, c)


def _cell(gates: Tensor, h: Tensor, c: Tensor, u: Tensor, bias: Tensor | None = None) -> State:
    i, f, g, o = (gates + F.linear(h, u, bias)).chunk(4, 1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c
