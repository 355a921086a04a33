"""Closures that break at a known operation, line and module.

The line that is to blame ends in the comment "the fault"; its own text is what a test compares.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import plimsoll as pl

Closure = Callable[[], Any]
FP16 = torch.float16


@dataclass(frozen=True, kw_only=True)
class Case:
    """What breaks, and what must be said of it."""

    make: Callable[[], Closure]
    operation: str
    phase: str = "forward"
    module: str | None = None
    forward: str | None = None
    kind: str = "nan"
    says: str = ""


class Part(nn.Module):
    """A module whose forward is a function, inside of a model, where it is called `part`."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Model(nn.Module):
    """A linear layer, then the part."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.part = Part(function)

    def forward(self, x: Tensor) -> Tensor:
        return self.part(self.first(x))


def inside(function: Callable[[Tensor], Tensor]) -> Closure:
    """A model with the function in it, on made-up data."""
    torch.manual_seed(0)
    model, x = Model(function), torch.randn(3, 4)
    return lambda: model(x).float().sum()


def leaf(*values: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """A parameter of these values."""
    return torch.tensor(values, dtype=dtype).requires_grad_()


def log_of_zero() -> Closure:
    return inside(lambda x: x.relu().mul(0).log())  # the fault


def division_by_zero() -> Closure:
    return inside(lambda x: x / (x - x))  # the fault


def sqrt_of_negative() -> Closure:
    return inside(lambda x: (-x.abs() - 1).sqrt())  # the fault


def exp_overflow() -> Closure:
    return inside(lambda x: (x * 0 + 89.4).exp())  # the fault


def fp16_product_overflow() -> Closure:
    a, b = torch.full((2, 64), 256.0, dtype=FP16), torch.full((64, 2), 128.0, dtype=FP16).requires_grad_()
    return lambda: (a @ b).float().sum()  # the fault


def fp16_linear_overflow() -> Closure:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).half()
    with torch.no_grad():
        model[1].weight.fill_(3e4)
    x = torch.randn(2, 8, dtype=FP16)
    return lambda: model(x * 8).float().sum()  # the fault


def softmax_of_masked_row() -> Closure:
    mask = torch.zeros(3, 4, dtype=torch.bool)
    mask[1] = True
    return inside(lambda x: x.masked_fill(mask, float("-inf")).softmax(-1))  # the fault


def softmax_with_additive_mask() -> Closure:
    mask = torch.zeros(3, 4)
    mask[2] = float("-inf")
    return inside(lambda x: torch.softmax(x + mask, dim=-1))  # the fault


def norm_of_zero_backward() -> Closure:
    return inside(lambda x: (x * 0).pow(2).sum(-1).sqrt())  # the fault


def layer_norm_of_constant() -> Closure:
    return inside(lambda x: F.layer_norm(x * 0 + 1, (4,), eps=0.0))  # the fault


def embedding_row() -> Closure:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 2))
    with torch.no_grad():
        model[0].weight[2] = float("nan")
    tokens = torch.tensor([0, 2, 4])
    return lambda: model(tokens).sum()  # the fault


def weight_with_nan() -> Closure:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 2)))
    with torch.no_grad():
        model[1][1].weight[0, 0] = float("nan")
    x = torch.ones(3, 4)
    return lambda: model(x).sum()  # the fault


def attention_overflow() -> Closure:
    def attend(x: Tensor) -> Tensor:
        q = (x * 0 + 300).half()
        return (q @ q.T).softmax(-1) @ q  # the fault

    return inside(attend)


def cast_overflow() -> Closure:
    return inside(lambda x: (x * 0 + 7e4).to(FP16))  # the fault


def autocast_overflow() -> Closure:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), torch.full((2, 4), 9e4)

    def closure() -> Tensor:
        with torch.autocast("cpu", dtype=FP16):
            return model(x).float().sum()  # the fault

    return closure


def emulated_overflow() -> Closure:
    weight = torch.full((64, 4), 40.0).requires_grad_()

    def closure() -> Tensor:
        with pl.emulate("fp16"):
            return (torch.full((2, 64), 30.0) @ weight).float().sum()  # the fault

    return closure


def all_targets_ignored() -> Closure:
    target = torch.full((3,), -100)
    return inside(lambda x: F.cross_entropy(x, target))  # the fault


def negative_power() -> Closure:
    return inside(lambda x: (x.detach() * 0).pow(-0.5) * x)  # the fault


def fractional_power_backward() -> Closure:
    return inside(lambda x: (x - x).pow(0.5))  # the fault


def hypot_of_zeros_backward() -> Closure:
    return inside(lambda x: torch.hypot(x * 0, x * 0))  # the fault


def std_of_one() -> Closure:
    return inside(lambda x: x[:1].std(0))  # the fault


def asin_of_one_backward() -> Closure:
    return inside(lambda x: (x * 0 + 1).asin())  # the fault


def data_with_nan() -> Closure:
    batch = {"x": torch.tensor([[1.0, float("nan"), 2.0, 3.0]]), "y": torch.zeros(1)}
    model = nn.Linear(4, 1)
    return lambda: (model(batch["x"]) - batch["y"]).square().mean()  # the fault


def mean_of_nothing() -> Closure:
    return inside(lambda x: x[:0].mean())  # the fault


def logarithm_left_out() -> Closure:
    return inside(lambda x: torch.where(x.abs() >= 0, x, (x * 0).log()))  # the fault


class Square(torch.autograd.Function):
    """x squared, whose backward divides by zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad / torch.zeros_like(grad)  # the fault


def custom_backward() -> Closure:
    return inside(Square.apply)


class Reciprocal(torch.autograd.Function):
    """1 / x, forward of zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (x - x).reciprocal()  # the fault

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def custom_forward() -> Closure:
    return inside(Reciprocal.apply)


def in_place() -> Closure:
    def spoil(x: Tensor) -> Tensor:
        y = x.detach().clone()
        y[0].mul_(0).reciprocal_()  # the fault
        return x * y

    return inside(spoil)


def checkpointed_backward() -> Closure:
    def block(x: Tensor) -> Tensor:
        return (x - x).sqrt()  # the fault

    return inside(lambda x: checkpoint(block, x, use_reentrant=False))


def recomputed() -> Closure:
    calls: list[int] = []

    def block(x: Tensor) -> Tensor:
        calls.append(1)
        return x.sin() / (1.0 if len(calls) % 2 else 0.0) * x.cos()  # the fault

    return inside(lambda x: checkpoint(block, x, use_reentrant=False))


def sum_of_gradients() -> Closure:
    w = leaf(1.0, 2.0, dtype=FP16)
    return lambda: ((w * 1.0).float() * 6e4).sum() + ((w * 1.0).float() * 6e4).sum()  # the fault


def scaled_gradient() -> Closure:
    torch.manual_seed(0)
    model, scaler = nn.Linear(4, 4), torch.amp.GradScaler("cpu", init_scale=2.0**14)
    x = torch.full((2, 4), 100.0)

    def closure() -> None:
        with torch.autocast("cpu", dtype=FP16):
            loss = model(x).float().sum()  # the fault
        scaler.scale(loss).backward()

    return closure


def scaled_loss() -> Closure:
    scaler, w = torch.amp.GradScaler("cpu", init_scale=2.0**16), leaf(3.0, dtype=FP16)

    def closure() -> None:
        loss = w.sum()
        scaler.scale(loss).backward()  # the fault

    return closure


def optimizer_overflow() -> Closure:
    w = leaf(1.0)
    optimizer = torch.optim.SGD([w], lr=1e38, foreach=False)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (w * 1e2).sum()
        loss.backward()
        optimizer.step()  # the fault
        return loss

    return closure


def clipping() -> Closure:
    w = leaf(0.0, 1.0)

    def closure() -> Tensor:
        w.grad = None
        loss = (w * 0.0).sum()
        loss.backward()
        w.grad.div_(w.grad.norm())  # the fault
        return loss

    return closure


def uninitialised() -> Closure:
    def read(x: Tensor) -> Tensor:
        memory = torch.empty(4)
        memory.untyped_storage().copy_(torch.full((4,), float("nan")).untyped_storage())  # what may be found there
        return x + memory  # the fault

    return inside(read)


def target_masked() -> Closure:
    masked = torch.zeros(3, 4, dtype=torch.bool)
    masked[:, 1] = True
    return inside(
        lambda x: F.nll_loss(x.masked_fill(masked, -torch.inf).log_softmax(-1), torch.ones(3).long())  # the fault
    )


def multi_output() -> Closure:
    return inside(lambda x: torch.frexp((x.abs() + 1) * 3e38 * 10)[0])  # the fault


FAULTS: dict[str, Case] = {
    "log of 0": Case(
        make=log_of_zero, operation="aten.log", module="part", kind="inf", says="log of 0 is -Inf in part"
    ),
    "division by 0": Case(make=division_by_zero, operation="aten.div", module="part", kind="inf"),
    "square root": Case(make=sqrt_of_negative, operation="aten.sqrt", module="part", says="sqrt of -1"),
    "exp": Case(
        make=exp_overflow, operation="aten.exp", module="part", kind="inf", says="exp of 89.4 exceeds fp32's 3.4"
    ),
    "fp16 product": Case(
        make=fp16_product_overflow, operation="aten.mm", kind="inf", says="gives 2,097,152, which exceeds fp16's 65,504"
    ),
    "fp16 linear": Case(make=fp16_linear_overflow, operation="aten.addmm", module="1", kind="inf", says="exceeds fp16"),
    "softmax of a masked row": Case(
        make=softmax_of_masked_row, operation="aten._softmax", module="part", says="all -Inf"
    ),
    "softmax with additive mask": Case(make=softmax_with_additive_mask, operation="aten._softmax", module="part"),
    "norm of zeros": Case(
        make=norm_of_zero_backward, operation="aten.div", phase="backward", module="part", forward="aten.sqrt",
        kind="inf"
    ),
    "layer norm": Case(make=layer_norm_of_constant, operation="aten.native_layer_norm", module="part"),
    "embedding row": Case(
        make=embedding_row, operation="aten.embedding", phase="before", module="0", says="0.weight held 4 NaN before"
    ),
    "weight": Case(
        make=weight_with_nan, operation="aten.addmm", phase="before", module="1.1", says="1.1.weight held 1 NaN before"
    ),
    "attention": Case(make=attention_overflow, operation="aten.mm", module="part", kind="inf", says="360,000"),
    "cast": Case(
        make=cast_overflow, operation="aten._to_copy", module="part", kind="inf", says="the cast of 70,000 to fp16"
    ),
    "autocast": Case(
        make=autocast_overflow, operation="aten._to_copy", module="0", kind="inf", says="the cast of 90,000 to fp16"
    ),
    "emulate": Case(make=emulated_overflow, operation="aten._to_copy", kind="inf", says="the cast of 76,800 to fp16"),
    "no targets": Case(
        make=all_targets_ignored, operation="aten.nll_loss_forward", module="part", says="mean over no target"
    ),
    "power": Case(
        make=negative_power, operation="aten.pow", module="part", kind="inf", says="pow of 0 and -0.5 is Inf"
    ),
    "power's gradient": Case(
        make=fractional_power_backward, operation="aten.pow", phase="backward", module="part", forward="aten.pow",
        kind="inf",
    ),
    "hypot's gradient": Case(
        make=hypot_of_zeros_backward, operation="aten.div", phase="backward", module="part", forward="aten.hypot",
        says="div of 0 and 0 is NaN",
    ),
    "std of one": Case(make=std_of_one, operation="aten.std", module="part", says="one value, which has no spread"),
    "asin's gradient": Case(
        make=asin_of_one_backward, operation="aten.rsqrt", phase="backward", module="part", forward="aten.asin",
        kind="inf",
    ),
    "data": Case(
        make=data_with_nan, operation="aten.addmm", phase="before", module="model",
        says="the input batch['x'] held 1 NaN before any operation",
    ),
    "mean of nothing": Case(make=mean_of_nothing, operation="aten.mean", module="part", says="mean of no values"),
    "log left out by where": Case(
        make=logarithm_left_out, operation="aten.log", module="part", kind="inf", says="but not its gradient"
    ),
    "custom backward": Case(
        make=custom_backward, operation="aten.div", phase="backward", module="part", kind="inf", says="div of 1 and 0"
    ),
    "custom forward": Case(make=custom_forward, operation="aten.reciprocal", module="part", kind="inf"),
    "in place": Case(
        make=in_place, operation="aten.reciprocal_", module="part", kind="inf", says="reciprocal of"
    ),
    "checkpointed": Case(
        make=checkpointed_backward, operation="aten.div", phase="backward", module="part", forward="aten.sqrt",
        kind="inf"
    ),
    "recomputed": Case(make=recomputed, operation="aten.div", phase="recomputation", module="part", kind="inf"),
    "sum of gradients": Case(
        make=sum_of_gradients, operation="aten.add", phase="backward", kind="inf", says="exceeds fp16's 65,504"
    ),
    "scaled gradient": Case(
        make=scaled_gradient, operation="aten.mm", phase="backward", module="model", kind="inf",
        says="the loss scale was 16,384",
    ),
    "scaled loss": Case(
        make=scaled_loss, operation="aten._to_copy", phase="backward", kind="inf", says="the loss scale was 65,536"
    ),
    "optimizer": Case(make=optimizer_overflow, operation="aten.add_", phase="optimizer", kind="inf"),
    "clipping": Case(make=clipping, operation="aten.div_", phase="optimizer"),
    "uninitialised": Case(make=uninitialised, operation="aten.add", module="part", says="never written"),
    "masked target": Case(
        make=target_masked, operation="aten.masked_fill", module="part", kind="inf", says="it reached the loss"
    ),
    "several outputs": Case(make=multi_output, operation="aten.mul", module="part", kind="inf"),
}  # fmt: skip
