"""Models of every kind of graph, for the tests of layer scales: each is made with the same weights every time."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (as everyone writes it)
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from plimsoll.scaling.layerwise.scaled_modules import WIDENS

D = 8
needs_wide_gradients = pytest.mark.skipif(
    not WIDENS, reason="float16 parameters with layer scales need torch 2.10 or newer"
)


class Written(nn.Module):
    """A model whose forward is a function of itself and x."""

    def __init__(self, forward: Callable[[Any, Tensor], Any], **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self._forward_function = forward

    def forward(self, x: Tensor) -> Any:
        return self._forward_function(self, x)


def linears(n: int) -> dict[str, nn.Linear]:
    return {name: nn.Linear(D, D) for name in "abcdefgh"[:n]}


class Gated(torch.autograd.Function):
    """A custom function of an activation and of a weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return g * w, (g * x).sum(0)


def residual(m: Any, x: Tensor) -> Tensor:
    for f in (m.a, m.b, m.c):
        x = x + torch.tanh(f(x))
    return x


def residual_in_place(m: Any, x: Tensor) -> Tensor:
    x = m.a(x)
    x += m.b(x.clone()).tanh()
    x.mul_(0.5).add_(m.c(x.clone()))
    y = F.dropout(m.d(F.relu(x, inplace=True)), 0.25, inplace=True)
    y[:, 1:3] *= m.b(y.clone())[:, 2:4]
    return y


def branching(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    u, v, w = m.b(h), m.c(h), m.d(h)
    several = torch.addcmul(u, h, h) + torch.cat([h, v, h], dim=-1)[:, 4:12]
    return torch.cat([u * v, h, several, torch.stack([w, u]).sum(0), torch.where(v > 0, w, u)], dim=-1)


def recurrent(m: Any, x: Tensor) -> Tensor:
    h = torch.zeros_like(x)
    outputs = []
    for _ in range(4):
        h = torch.tanh(m.a(x) + m.b(h))
        outputs.append(h)
    return torch.stack(outputs)


def tied(m: Any, x: Tensor) -> Tensor:
    h = m.embedding((x > 0).long().argmax(-1))
    h = m.b(torch.tanh(m.a(h)))
    return F.linear(h, m.embedding.weight) + h @ m.a.weight.T + m.a(h)


def attention(m: Any, x: Tensor) -> Tensor:
    q, k, v = m.a(x), m.b(x), m.c(x)
    scores = (q @ k.transpose(-1, -2) / D**0.5).softmax(-1)
    return m.d(scores @ v) + F.scaled_dot_product_attention(q[None], k[None], v[None])[0]


def dictionary(m: Any, x: Tensor) -> Any:
    h = m.a(x)
    return {"main": m.b(h), "more": (m.c(h), [h, None, 3])}


def glue(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    left, right = h.chunk(2, dim=-1)
    h = torch.cat([left * right.sigmoid(), right], -1)
    h = h / h.norm(dim=-1, keepdim=True).clamp_min(1e-3)
    h = torch.einsum("bi,ji->bj", h, m.b.weight) * m.scale + m.bias.expand_as(h)
    return F.layer_norm(h.T.contiguous().T, (D,), m.scale, m.bias) + m.c(h)[:, [0, 2, 1, 3, 4, 5, 6, 7]]


def stopped(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    with torch.no_grad():
        target = m.b(h)
    return m.b(h) * m.c(h.detach()) + target * m.c(h)


def buffered(m: Any, x: Tensor) -> Tensor:
    h, g = m.a(x), m.b(x)
    out = torch.zeros(4, *h.shape)
    out[0] = h
    out[1].copy_(g)
    out[2] = m.c(h) + out[0]
    view = out[3]
    view.add_(m.d(g)).mul_(0.5)
    out[0, :, 1] = 0.0
    return out + view


def captured(m: Any, x: Tensor) -> Tensor:
    m.memory.append(m.a(x))
    h = m.reader(m.b(x))
    m.memory.clear()
    return h


def reader(m: Any, x: Tensor) -> Tensor:
    return m.c(x + m.memory[0]) * m.memory[0]


def checkpointed(reentrant: bool) -> Callable[[Any, Tensor], Tensor]:
    def block(m: Any) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda x, y: x + torch.tanh(m.b(x)) * m.c(y)

    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.a(x)
        h = checkpoint(block(m), h, h * 2, use_reentrant=reentrant)
        nested = checkpoint(
            lambda x: x + checkpoint(m.d, torch.sin(x), use_reentrant=reentrant), h, use_reentrant=reentrant
        )
        return checkpoint(m.e, nested, use_reentrant=reentrant) + h

    return forward


def custom(m: Any, x: Tensor) -> Tensor:
    h = Gated.apply(m.a(x), m.scale)
    return Gated.apply(m.b(h), m.scale) + m.c(h)


def frozen(m: Any, x: Tensor) -> Tensor:
    m.b.requires_grad_(False)
    m.d.weight.requires_grad_(False)
    return m.d(torch.tanh(m.c(torch.tanh(m.b(torch.tanh(m.a(x)))))))


def twice(m: Any, x: Tensor) -> Tensor:
    return m.block(m.block(m.block(x)))


def derived(m: Any, x: Tensor) -> Tensor:
    w = F.normalize(m.a.weight, dim=0) + m.b.weight.detach() * m.scale
    return m.b(F.linear(x, w) @ w) + m.c(x @ w.T)


def parts(**extra: Any) -> dict[str, Any]:
    return {**linears(5), "scale": nn.Parameter(torch.rand(D) + 0.5), "bias": nn.Parameter(torch.randn(D)), **extra}


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(D, 2, 16, dropout=0.0, batch_first=True)
    return Written(lambda m, x: m.encoder(x[None]), encoder=nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))


def _captured() -> nn.Module:
    model = Written(captured, **linears(3))
    model.memory = memory = []
    inner = Written(reader, c=model.c)
    inner.memory = memory
    model.reader = inner
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "sequential": lambda: nn.Sequential(nn.Linear(D, D), nn.ReLU(inplace=True), nn.Linear(D, D), nn.LayerNorm(D)),
    "residual": lambda: Written(residual, **linears(3)),
    "residual in place": lambda: Written(residual_in_place, **linears(4)),
    "branching": lambda: Written(branching, **linears(4)),
    "recurrent": lambda: Written(recurrent, **linears(2)),
    "tied": lambda: Written(tied, **linears(2), embedding=nn.Embedding(D, D)),
    "attention": lambda: Written(attention, **linears(4)),
    "dictionary": lambda: Written(dictionary, **linears(3)),
    "glue": lambda: Written(glue, **parts()),
    "stopped": lambda: Written(stopped, **linears(3)),
    "buffered": lambda: Written(buffered, **linears(4)),
    "captured": _captured,
    "checkpointed": lambda: Written(checkpointed(False), **linears(5)),
    "checkpointed, reentrant": lambda: Written(checkpointed(True), **linears(5)),
    "custom function": lambda: Written(custom, **parts()),
    "frozen": lambda: Written(frozen, **linears(4)),
    "shared block": lambda: Written(twice, block=Written(residual, **linears(3))),
    "derived weights": lambda: Written(derived, **parts()),
    "weight norm": lambda: nn.Sequential(nn.Linear(D, D), parametrizations.weight_norm(nn.Linear(D, D))),
    "transformer": transformer,
    "lstm": lambda: Written(lambda m, x: m.a(m.lstm(x[None])[0]), lstm=nn.LSTM(D, D, 2), **linears(1)),
    "gru cell": lambda: Written(lambda m, x: m.cell(x, m.cell(m.a(x), m.b(x))), cell=nn.GRUCell(D, D), **linears(2)),
    "convolutions": lambda: nn.Sequential(
        nn.Unflatten(1, (1, D)), nn.Conv1d(1, 4, 3, padding=1), nn.BatchNorm1d(4), nn.ReLU(), nn.Conv1d(4, 2, 3)
    ),
    "bilinear": lambda: Written(lambda m, x: m.f(m.a(x), m.b(x)), f=nn.Bilinear(D, D, D), **linears(2)),
}


def made(name: str, seed: int = 0) -> nn.Module:
    """The model of that name, with the same weights every time."""
    torch.manual_seed(seed)
    return MODELS[name]()
