"""What two ranks train, each on its half of every batch, and what one process trains on the whole."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import plimsoll as pl
from plimsoll import fp8
from plimsoll.precision import prepare
from plimsoll.scaling.dynamic import DynamicScaler
from tests.support.precision.training import batches, loss_of

STEPS = 4
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
FP16 = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)


class Net(nn.Module):
    """No batch norm: a half has other statistics than the whole."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one = nn.Linear(8, 16)
        self.two = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.relu(self.one(x)))


def halves(accumulate: int = 1) -> list[tuple[Tensor, Tensor]]:
    """This rank's part of every batch; the whole where there is one process."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    data = batches(STEPS * accumulate)
    return [(x.chunk(world)[rank], y.chunk(world)[rank]) for x, y in data]


def trained(
    model: nn.Module,
    name: str,
    wrap: Callable[[nn.Module], nn.Module] | None = None,
    *,
    late: bool = False,
    **kwargs: Any,
) -> dict[str, Any]:
    """The weights in FP32 and the norms after training; `late`: wrapped after it is prepared."""
    wrapped = wrap(model) if wrap is not None and not late else model
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2)
    scaler = DynamicScaler("cpu", init_scale=1024.0) if "fp16" in name else None
    loop = prepare(wrapped, optimizer, name, clip_norm=1.0, scaler=scaler, **kwargs)
    if wrap is not None and late:
        loop.model = wrap(loop.model)
    outcomes = [loop.step(lambda b=b: loss_of(loop.model, b)) for b in halves(kwargs.get("accumulate", 1))]
    norms = [o.grad_norm for o in outcomes if o.grad_norm is not None]
    loop.close()
    return {"weights": weights(model), "norms": norms, "stepped": [o.stepped for o in outcomes]}


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(p).float() for name, p in model.named_parameters()}


def whole(p: Any) -> Tensor:
    return (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()


def sharded(policy: MixedPrecisionPolicy | None = None) -> Callable[[nn.Module], nn.Module]:
    def shard(model: nn.Module) -> nn.Module:
        kwargs = {} if policy is None else {"mp_policy": policy}
        for part in (model.one, model.two, model):
            fully_shard(part, **kwargs)
        return model

    return shard


def ddp_fp32() -> Any:
    return trained(Net(), "fp32", DistributedDataParallel)


def ddp_amp() -> Any:
    return trained(Net(), "amp-fp16", DistributedDataParallel)


def ddp_accumulates() -> Any:
    return trained(Net(), "fp32", DistributedDataParallel, accumulate=3)


def ddp_masters() -> Any:
    return trained(Net(), "fp16-master", DistributedDataParallel, late=True)


def ddp_compact() -> Any:
    return trained(Net(), "bf16-master", DistributedDataParallel, late=True)


def fsdp_fp32() -> Any:
    return trained(Net(), "fp32", sharded())


def fsdp_amp() -> Any:
    return trained(Net(), "amp-bf16", sharded())


def fsdp_accumulates() -> Any:
    return trained(Net(), "fp32", sharded(), accumulate=3)


def fsdp_bf16() -> Any:
    return trained(Net(), "bf16-master", sharded(BF16))


def fsdp_fp16() -> Any:
    return trained(Net(), "fp16-master", sharded(FP16))


def ddp_fp8() -> Any:
    return trained(Net(), "fp8-tensor", DistributedDataParallel, accumulate=2)


def ddp_fp8_late() -> Any:
    return trained(Net(), "fp8-tensor", DistributedDataParallel, late=True)


def fsdp_fp8() -> Any:
    """Layers that were FP8 ones before each was sharded."""
    return trained(fp8.convert(Net(), "tensor"), "fp8-tensor", sharded())


def fsdp_fp8_whole() -> Any:
    """Plain layers in a model that was sharded as a whole."""
    return trained(Net(), "fp8-tensor", fully_shard, accumulate=2)


def no_gradient_is_sent_before_the_last_micro_batch() -> Any:
    """Gradients of the first micro-batch differ between ranks: nothing has averaged them yet."""
    model = Net()
    loop = prepare(DistributedDataParallel(model), torch.optim.SGD(model.parameters(), lr=0.1), "fp32", accumulate=2)
    first, second = halves()[:2]
    loop.step(lambda: loss_of(loop.model, first))
    gradient = model.two.weight.grad.clone()
    others = [torch.empty_like(gradient) for _ in range(dist.get_world_size())]
    dist.all_gather(others, gradient)
    loop.step(lambda: loss_of(loop.model, second))
    return {"same": others[0].equal(others[1]), "weights": weights(model)}


def one_rank_overflows(wrap: Callable[[nn.Module], nn.Module], name: str, late: bool = False) -> Any:
    """Rank 1's second batch overflows at the scale there is; all repeat it, and all end the same."""
    model = Net()
    wrapped = model if late else wrap(model)
    calls: list[int] = []
    loop = prepare(wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.01), name, max_retries=12)
    if late:
        loop.model = wrap(loop.model)

    def closure(batch: Any, factor: float) -> Tensor:
        calls.append(1)
        return loss_of(loop.model, batch) * factor

    factors = [1e-3, 1.0 if dist.get_rank() == 0 else 30.0, 1e-3]
    outcomes = [loop.step(lambda b=b, f=f: closure(b, f)) for b, f in zip(halves(), factors, strict=False)]
    scale = loop.scaler.get_scale()
    loop.close()
    return {
        "stepped": [o.stepped for o in outcomes],
        "retries": [o.retries for o in outcomes],
        "scale": scale,
        "calls": len(calls),
        "weights": weights(model),
    }


def ddp_overflow() -> Any:
    return one_rank_overflows(DistributedDataParallel, "fp16-master", late=True)


def fsdp_overflow() -> Any:
    return one_rank_overflows(sharded(FP16), "fp16-master")


def one_ranks_loss_is_nan() -> Any:
    model = Net()
    loop = prepare(
        DistributedDataParallel(model), torch.optim.SGD(model.parameters(), lr=0.1), "amp-fp16", max_retries=3
    )
    factor = math.nan if dist.get_rank() == 1 else 1e-3
    outcome = loop.step(lambda: loss_of(loop.model, halves()[0]) * factor)
    return {"stepped": outcome.stepped, "retries": outcome.retries, "scale": loop.scaler.get_scale()}


def refusals() -> Any:
    """What a level says of a wrapper that contradicts it."""
    found: dict[str, str] = {}
    cases: dict[str, Any] = {
        "cast_under_ddp": (DistributedDataParallel(Net()), "bf16-master"),
        "schedule_under_ddp": (DistributedDataParallel(Net()), [(0, "fp32"), (5, "amp-bf16"), (9, "bf16-kahan")]),
        "amp_over_policy": (sharded(BF16)(Net()), "amp-bf16"),
        "other_dtype": (sharded(BF16)(Net()), "fp16-master"),
        "no_policy": (sharded()(Net()), "bf16-master"),
        "pure": (sharded(FP16)(Net()), "fp16-pure"),
        "fp8_on_shards": (sharded()(Net()), "fp8-tensor"),
    }
    for name, (model, precision) in cases.items():
        try:
            prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), precision)
        except pl.ArgumentError as error:
            found[name] = str(error)
    return found


def fsdp_resumes() -> Any:
    """A state of shards, loaded by the same ranks, goes on bit for bit."""

    def begin() -> tuple[Any, nn.Module]:
        model = sharded(BF16)(Net())
        return prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), "bf16-master"), model

    loop, model = begin()
    data = halves()
    for b in data[:2]:
        loop.step(lambda b=b: loss_of(loop.model, b))
    state = loop.state_dict()
    assert state["random"] is None
    copied = torch.utils._pytree.tree_map_only(Tensor, torch.clone, state)
    for b in data[2:]:
        loop.step(lambda b=b: loss_of(loop.model, b))
    other, twin = begin()
    other.load_state_dict(copied)
    for b in data[2:]:
        other.step(lambda b=b: loss_of(other.model, b))
    first, second = weights(model), weights(twin)
    return {"same": all(first[name].equal(second[name]) for name in first)}
