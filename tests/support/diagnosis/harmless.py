"""Closures that have NaN or Inf in them on purpose, or where nobody looks: no faults."""

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.diagnosis.breakages import FP16, Closure, inside, leaf


def healthy_mask() -> Closure:
    mask = torch.ones(3, 4).triu(1).bool()
    return inside(lambda x: x.masked_fill(mask, float("-inf")).softmax(-1))


def healthy_additive_mask() -> Closure:
    mask = torch.zeros(3, 4).masked_fill(torch.ones(3, 4).triu(1).bool(), float("-inf"))
    return inside(lambda x: (x + mask).log_softmax(-1).exp())


def healthy_where() -> Closure:
    return inside(lambda x: torch.where(torch.ones(3, 4).tril().bool(), x, torch.tensor(float("-inf"))).logsumexp(-1))


def healthy_attention() -> Closure:
    torch.manual_seed(0)
    q = torch.randn(2, 2, 5, 8).requires_grad_()
    mask = torch.zeros(5, 5).masked_fill(torch.ones(5, 5).triu(1).bool(), float("-inf"))
    return lambda: F.scaled_dot_product_attention(q, q, q, attn_mask=mask).sum()


def healthy_causal_module() -> Closure:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    mask, x = nn.Transformer.generate_square_subsequent_mask(5), torch.randn(2, 5, 8)
    return lambda: layer(x, src_mask=mask, is_causal=True).square().mean()


def healthy_masked_row() -> Closure:
    mask = torch.zeros(3, 4, dtype=torch.bool)
    q = torch.randn(3, 4).requires_grad_()
    return lambda: F.scaled_dot_product_attention(q, q, q, attn_mask=mask[:, :3]).sum()


def healthy_logarithm() -> Closure:
    w = leaf(0.0, 1.0)
    return lambda: torch.where(w.detach() > 0, w.detach().log(), 0.0).sum() + w.sum()


def healthy_metric() -> Closure:
    seen: list[Tensor] = []

    def spread(x: Tensor) -> Tensor:
        seen.append((x.detach() * 1e30).exp().mean())  # looked at by nobody
        return x

    return inside(spread)


def healthy_extremes() -> Closure:
    return inside(lambda x: x * 0 + torch.minimum(torch.full((4,), float("inf")), x.amin(0)))


def healthy_nan_padding() -> Closure:
    padding = torch.zeros(3, 4).triu(1).bool()
    padding[0, 0] = True
    return inside(lambda x: x.masked_fill(padding, float("nan")).nanmean(-1))


def healthy_uninitialised() -> Closure:
    def fill(x: Tensor) -> Tensor:
        memory = torch.empty(3, 4)
        memory.untyped_storage().copy_(torch.full((12,), float("nan")).untyped_storage())
        memory.copy_(x)
        return memory.clone().detach() * x

    return inside(fill)


def healthy_largest_mask() -> Closure:
    def attend(x: Tensor) -> Tensor:
        scores = x.half() - 100
        scores = scores + torch.full((4,), torch.finfo(FP16).min, dtype=FP16) * torch.tensor([0, 0, 0, 1], dtype=FP16)
        return scores.float().softmax(-1)  # fp16's lowest - 100 is -Inf, as is meant

    return inside(attend)


def healthy_integers() -> Closure:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 3))
    tokens, target = torch.tensor([0, 2, 2]), torch.tensor([1, 0, -100])
    return lambda: F.cross_entropy(model(tokens), target)


def healthy_atan2() -> Closure:
    return inside(lambda x: torch.atan2(x * 0, x * 0))


def healthy_unused_row() -> Closure:
    model = nn.Embedding(5, 4)
    with torch.no_grad():
        model.weight[3] = float("nan")
    return lambda: model(torch.tensor([0, 1])).sum()


def healthy_checkpoint() -> Closure:
    mask = torch.ones(3, 4).triu(1).bool()
    return inside(lambda x: checkpoint(lambda y: y.masked_fill(mask, -torch.inf).softmax(-1), x, use_reentrant=False))


HEALTHY: dict[str, Callable[[], Closure]] = {
    name.removeprefix("healthy_"): make for name, make in list(globals().items()) if name.startswith("healthy_")
}
