from collections.abc import Callable

import torch
from torch import Tensor, nn

from plimsoll.precision.weights.master_weights import MasterWeights
from tests.support.cases import each

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05),
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "SGD, fused": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "Adam, one by one": lambda p: torch.optim.Adam(p, lr=0.01, foreach=False),
    "Adam, foreach": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
    "Adam, fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "AdamW, tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01)),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, initial_accumulator_value=0.1),
    "Adadelta": torch.optim.Adadelta,
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.05),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
}
FORMATS = {"fp16": (torch.float16, False), "bf16": (torch.bfloat16, False), "bf16, compact": (torch.bfloat16, True)}


def network(dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 4)).to(dtype)


def batch(step: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(16, 8, generator=torch.Generator().manual_seed(step)).to(dtype)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    dtype = next(model.parameters()).dtype
    for step in steps:
        optimizer.zero_grad()
        model(batch(step, dtype)).float().pow(2).mean().backward()
        optimizer.step()


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """To nearest: in bfloat16 with ties away from zero, by arithmetic of its own (float64, no bits)."""
    if dtype is torch.float16:
        return x.to(dtype)
    x = x.double()
    spacing = torch.exp2(torch.floor(torch.log2(x.abs())) - 7)
    steps = torch.floor(x.abs() / spacing + 0.5)
    return torch.where(x == 0, x, torch.sign(x) * steps * spacing).to(dtype)


def train_by_definition(
    dtype: torch.dtype, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], steps: range
) -> tuple[nn.Module, list[nn.Parameter]]:
    """Masters as the textbook has them: a float32 copy, its gradients the model's, the model its rounded copy."""
    model = network(dtype)
    masters = [nn.Parameter(p.detach().float()) for p in model.parameters()]
    optimizer = make(masters)
    for step in steps:
        model.zero_grad()
        model(batch(step, dtype)).float().pow(2).mean().backward()
        for p, master in zip(model.parameters(), masters, strict=True):
            master.grad = None if p.grad is None else p.grad.float()
        optimizer.step()
        with torch.no_grad():
            for p, master in zip(model.parameters(), masters, strict=True):
                p.copy_(rounded(master, dtype))
    return model, masters


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a, b) and a.dtype == b.dtype


@each("fmt", FORMATS)
@each("name", OPTIMIZERS)
def test_training_is_bit_for_bit_that_of_float32_masters(name: str, fmt: str) -> None:
    dtype, compact = FORMATS[fmt]
    expected, expected_masters = train_by_definition(dtype, OPTIMIZERS[name], range(8))
    model = network(dtype)
    inner = OPTIMIZERS[name](list(model.parameters()))
    # Chunks of a parameter or two.
    masters = MasterWeights(inner, compact=compact, chunk_bytes=1500)
    train(model, masters, range(8))
    for p, e, m in zip(model.parameters(), expected.parameters(), expected_masters, strict=True):
        assert same(p, e)
        assert same(masters.master_of(p), m.detach())
    assert any(not torch.equal(a, b) for a, b in zip(model.parameters(), network(dtype).parameters(), strict=True))


@each("fmt", FORMATS)
def test_many_updates_each_too_small_for_16_bits_add_up(fmt: str) -> None:
    dtype, compact = FORMATS[fmt]
    weight = nn.Parameter(torch.ones(4, dtype=dtype))
    masters = MasterWeights(torch.optim.SGD([weight], lr=1e-4), compact=compact)
    for _ in range(100):
        weight.grad = torch.ones_like(weight)
        masters.step()
    assert masters.master_of(weight).sub(0.99).abs().max() < 1e-5
    assert (weight < 1).all()
