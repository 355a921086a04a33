"""Trainings of many kinds, each as a model with a closure for one step: sound ones, and hard ones to record."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import plimsoll as pl

Step = Callable[[], Any]
STEPS: dict[str, Callable[[], tuple[nn.Module, Step, Any]]] = {}  # -> model, step, what it is


def sound(declared: Any) -> Callable[[Callable[[], tuple[nn.Module, Step]]], Any]:
    """Enter a training in which there is nothing to find."""

    def enter(make: Callable[[], tuple[nn.Module, Step]]) -> Any:
        STEPS[make.__name__.replace("_", " ")] = lambda: (*make(), declared)
        return make

    return enter


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 16, generator=generator), torch.randint(4, (8,), generator=generator)


class Net(nn.Module):
    """Everything that a small network has: convolution, batch norm, dropout, attention, layer norm, embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 16)
        self.conv, self.bn = nn.Conv1d(1, 4, 3, padding=1), nn.BatchNorm1d(4)
        self.attn = nn.MultiheadAttention(16, 2, batch_first=True)
        self.norm, self.drop, self.head = nn.LayerNorm(16), nn.Dropout(0.2), nn.Linear(16, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = x + self.embed(labels)
        h = F.relu(self.bn(self.conv(x[:, None])))
        h = h + self.attn(h, h, h, need_weights=False)[0]
        return self.head(self.drop(self.norm(h)).mean(1))


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4))


@sound("fp32")
def fp32() -> tuple[nn.Module, Step]:
    model = Net()
    optimizer, (x, y) = torch.optim.AdamW(model.parameters()), data()

    def step() -> float:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x, y), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    return model, step


@sound("amp-bf16")
def autocast_in_bf16() -> tuple[nn.Module, Step]:
    model = Net()
    optimizer, (x, y) = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), data()

    def step() -> float:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x, y)
        loss = F.cross_entropy(out.float(), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    return model, step


@sound("amp-fp16")
def autocast_in_fp16_with_a_scaler() -> tuple[nn.Module, Step]:
    model = Net()
    optimizer, scaler, (x, y) = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler("cpu", 2.0**8), data()

    def step() -> float:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            out = model(x, y)
            loss = F.cross_entropy(out.float(), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    return model, step


def _prepared(level: str, *, model: Callable[[], nn.Module] = Net, **arguments: Any) -> tuple[nn.Module, Step]:
    made = model()
    loop, (x, y) = pl.prepare(made, torch.optim.AdamW(made.parameters(), eps=1e-4), level, **arguments), data()

    def step() -> float:
        with loop.forward():
            loss = F.cross_entropy(loop.model(x, y) if isinstance(made, Net) else loop.model(x), y)
        loop.step(loss)
        return loss.item()

    return made, step


for _level in ("tf32", "amp-fp16", "amp-bf16", "fp16-master", "fp16-pure", "bf16-master", "bf16-stochastic",
               "bf16-kahan", "fp8-tensor"):  # fmt: skip
    STEPS[f"prepare {_level}"] = lambda level=_level: (*_prepared(level), level)


@sound("fp8-unit")
def prepare_fp8_unit() -> tuple[nn.Module, Step]:
    unit = pl.unit.nn
    model = nn.Sequential(unit.Linear(16, 32), unit.GELU(), unit.Linear(32, 32), unit.GELU(), unit.LinearReadout(32, 4))
    optimizer, (x, y) = pl.unit.optim.AdamW(model, lr=2**-6), data()
    loop = pl.prepare(model, optimizer, "fp8-unit")

    def step() -> float:
        with loop.forward():
            loss = F.cross_entropy(model(x), y)
        loop.step(loss)
        return loss.item()

    return model, step


@sound("amp-bf16")
def checkpointed() -> tuple[nn.Module, Step]:
    model = mlp()
    optimizer, (x, y) = torch.optim.AdamW(model.parameters()), data()

    def step() -> float:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            hidden = checkpoint(model[:3], x, use_reentrant=False)
            out = checkpoint(model[3], hidden, use_reentrant=True)
        loss = F.cross_entropy(out.float(), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    return model, step


@sound("amp-bf16")
def several_optimizers() -> tuple[nn.Module, Step]:
    model = nn.ModuleDict({"maker": nn.Linear(16, 16), "judge": nn.Linear(16, 1)})
    (x, _), judge = data(), torch.optim.SGD(model["judge"].parameters(), lr=0.1)
    maker = torch.optim.AdamW(model["maker"].parameters())

    def step() -> float:
        for optimizer, sign in ((judge, 1.0), (maker, -1.0)):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                verdict = model["judge"](model["maker"](x))
            loss = sign * verdict.float().mean()
            loss.backward()
            optimizer.step()
        return loss.item()

    return model, step


@sound("amp-bf16")
def attention_with_dropout_which_torch_makes_of_products_in_fp32() -> tuple[nn.Module, Step]:
    class Attention(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            h = super().forward(x).view(2, 4, 2, 8).transpose(1, 2)
            return F.scaled_dot_product_attention(h, h, h, dropout_p=0.1)

    model, (x, _) = Attention(16, 16), data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> float:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x)
        loss = out.float().square().mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    return model, step


@sound("fp16-pure")
def a_norm_that_computes_in_fp32_between_layers_in_fp16() -> tuple[nn.Module, Step]:
    return _prepared(
        "fp16-pure", model=lambda: nn.Sequential(nn.Linear(16, 32), nn.RMSNorm(32), nn.GELU(), nn.Linear(32, 4))
    )


@sound("fp32")
def lbfgs_with_its_closure() -> tuple[nn.Module, Step]:
    model = mlp()
    optimizer, (x, y) = torch.optim.LBFGS(model.parameters(), max_iter=3), data()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    return model, lambda: optimizer.step(closure).item()


@sound("amp-bf16")
def accumulated_with_in_place_operations_and_a_module_called_twice() -> tuple[nn.Module, Step]:
    model = mlp()
    optimizer, (x, y) = torch.optim.AdamW(model.parameters()), data()

    def step() -> float:
        optimizer.zero_grad()
        for part, labels in zip(x.clone().split(4), y.split(4), strict=True):
            part.add_(1).mul_(0.5)
            part[:, ::2] *= 2
            with torch.autocast("cpu", torch.bfloat16):
                hidden = model[0](part)
                hidden = hidden.view(4, 2, 16).transpose(0, 1).reshape(8, 16)
                out = model[3](model[1](model[0](hidden).relu_())).view(4, 2, 4)[:, 0]
            loss = F.cross_entropy(out.float(), labels) / 2
            loss.backward()
        optimizer.step()
        return loss.item()

    return model, step


@sound("fp32")
def scalars_of_every_type() -> tuple[nn.Module, Step]:
    model = mlp()
    optimizer, (x, y) = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1)), data()

    def step() -> float:
        optimizer.zero_grad()
        scaled = model(x * 2 + torch.tensor(1.0, dtype=torch.float64) + torch.tensor(3))
        loss = F.cross_entropy(scaled / torch.arange(1, 5), y) * 0.5
        loss.backward()
        optimizer.step()
        return loss.item()

    return model, step


@sound("fp32")
def a_step_that_catches_an_error() -> tuple[nn.Module, Step]:
    model = mlp()
    optimizer, (x, y) = torch.optim.SGD(model.parameters(), lr=0.1), data()

    def step() -> float:
        optimizer.zero_grad()
        try:
            model(x[:, :3])
        except RuntimeError:
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    return model, step


class Tagged(Tensor):
    """A subclass of Tensor that keeps its class, by torch_function alone."""


@sound("fp32")
def a_subclass_of_tensor() -> tuple[nn.Module, Step]:
    model = mlp()
    optimizer, (x, y) = torch.optim.SGD(model.parameters(), lr=0.1), data()

    def step() -> float:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x.as_subclass(Tagged)), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    return model, step
