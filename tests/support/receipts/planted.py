"""Steps that differ from what is declared of them, each in one way; the line that is to blame ends with "# planted"."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import plimsoll as pl
from plimsoll.formats import Plan
from plimsoll.precision import Policy


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, one step of it, and the deviation that must be found."""

    model: nn.Module
    step: Callable[[], Any]
    declared: Any
    kind: str
    module: str | None
    has_line: bool = True
    also: str = ""  # a kind that the same fault has too


PLANTED: dict[str, Callable[[], Case]] = {}


def planted(make: Callable[[], Case]) -> Callable[[], Case]:
    PLANTED[make.__name__.replace("_", " ")] = make
    return make


X, Y = torch.linspace(-1, 1, 32).reshape(4, 8), torch.linspace(0, 1, 16).reshape(4, 4)
LABELS = torch.tensor([0, 1, 2, 3])


class Body(nn.Module):
    """Two layers with something between them, as each case has it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.between(self.first(x)))

    def between(self, x: Tensor) -> Tensor:
        return self.norm(x).relu()


def amp(dtype: torch.dtype = torch.bfloat16, **arguments: Any) -> Any:
    return torch.autocast("cpu", dtype, **arguments)


def amp_step(model: nn.Module, x: Tensor = X, optimizer: Any = None) -> Callable[[], Any]:
    """A step under torch's autocast, with its loss in FP32."""

    def step() -> None:
        with amp():
            y = model(x)
        F.mse_loss(y.float(), Y).backward()
        if optimizer is not None:
            optimizer.step()

    return step


def scaled_step(model: nn.Module, *, amp: bool = True) -> Callable[[], Any]:
    """A step in FP16 with a scaled loss."""

    def step() -> None:
        with torch.autocast("cpu", torch.float16, enabled=amp):
            y = model(X)
        torch.amp.GradScaler("cpu").scale(F.mse_loss(y.float(), Y)).backward()

    return step


def of(model: nn.Module, kind: str, module: str | None, declared: Any = "amp-bf16", **more: Any) -> Case:
    return Case(
        model=model, step=more.pop("step", amp_step(model)), declared=declared, kind=kind, module=module, **more
    )


# -- products ----------------------------------------------------------------------------------------------------------


@planted
def a_region_without_autocast() -> Case:
    class Model(Body):
        def between(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                return x.float() @ self.norm.weight.diag()  # planted

    return of(Model(), "autocast-disabled", "model")


@planted
def einsum_of_operands_that_are_cast_up() -> Case:
    class Model(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = F.linear(x, self.weight)
            return y + torch.einsum("ij,kj->ik", y.float(), y.float()).to(y.dtype)  # planted

    model = Model(8, 4).bfloat16()
    return of(
        model, "upcast", "model", "bf16-kahan", step=lambda: F.mse_loss(model(X.bfloat16()).float(), Y).backward()
    )


class Doubled(torch.autograd.Function):
    """A product without custom_fwd and custom_bwd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        g = gradients[0].float()
        return g @ weight, g.t() @ x.float()  # planted


@planted
def an_autograd_function_outside_of_autocast_in_its_backward() -> Case:
    class Model(Body):
        def between(self, x: Tensor) -> Tensor:
            return Doubled.apply(x, self.norm.weight.diag())

    return of(Model(), "custom-function", "model")


@planted
def a_linear_layer_left_in_fp32_under_a_plan() -> Case:
    model = Body()
    plan = Plan(target="bf16", formats={"first": "bf16", "second": "bf16"})

    def step() -> None:
        with amp():
            hidden = model.first(X)
        y = model.second(model.between(hidden.float()))
        F.mse_loss(y, Y).backward()

    class Head(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight, self.bias)  # planted

    model.second = Head(8, 4)
    return of(model, "product-wide", "second", plan, step=step)


@planted
def a_product_in_bf16_where_fp32_is_declared() -> Case:
    class Model(Body):
        def between(self, x: Tensor) -> Tensor:
            return (x.bfloat16() @ torch.eye(8, dtype=torch.bfloat16)).float()  # planted

    model = Model()
    return of(model, "product-narrow", "model", "fp32", step=lambda: F.mse_loss(model(X), Y).backward())


@planted
def fp16_operands_under_bf16() -> Case:
    class Model(Body):
        def between(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.float16):
                return x.float() @ torch.eye(8)  # planted

    return of(Model(), "product-format", "model")


@planted
def a_step_without_autocast() -> Case:
    class Model(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight, self.bias)  # planted

    model = Model(8, 4)
    return of(model, "product-wide", "model", step=lambda: F.mse_loss(model(X), Y).backward())


@planted
def accumulation_in_fp16() -> Case:
    class Model(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with pl.emulate("fp16", accumulate="fp16"):
                return x @ self.weight.t()  # planted

    model = Model(8, 4)
    return of(model, "accumulate", "model", "amp-fp16", step=scaled_step(model, amp=False))


@planted
def the_gradient_of_an_embedding_added_up_in_bf16() -> Case:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(4, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(F.embedding(x, self.embed.weight))  # planted

    model = Model().bfloat16()
    return of(model, "accumulate", "model", "bf16-kahan", step=lambda: F.mse_loss(model(LABELS).float(), Y).backward())


@planted
def tf32_allowed() -> Case:
    model = nn.Linear(8, 4)

    def step() -> None:
        F.mse_loss(model(X), Y).backward()

    return of(model, "tf32", None, "fp32", step=step, has_line=False)


@planted
def an_fp8_layer_that_multiplies_in_bf16() -> Case:
    return of(Body(), "fp8-missing", "first", "fp8-tensor", has_line=False)


@planted
def a_plan_in_e4m3_that_runs_in_bf16() -> Case:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    plan = Plan(target="fp8", formats={"0": "e4m3"}, scales={"0": {"gradients": 1024.0}})
    return of(model, "fp8-missing", "0", plan, has_line=False)


# -- operations that belong in FP32 ------------------------------------------------------------------------------------


@planted
def softmax_in_fp16() -> Case:
    class Model(Body):
        def between(self, x: Tensor) -> Tensor:
            return x.half().softmax(-1)  # planted

    model = Model()

    return of(model, "softmax", "model", "amp-fp16", step=scaled_step(model))


@planted
def softmax_of_scores_that_were_cast_three_operations_before() -> Case:
    class Model(Body):
        def between(self, x: Tensor) -> Tensor:
            scores = self.norm(x.float()).to(torch.bfloat16)
            scores = scores.masked_fill(scores > 2, 0).view(4, 8) * 2
            return torch.softmax(scores, -1)  # planted

    return of(Model(), "softmax", "model")


@planted
def a_norm_in_fp16() -> Case:
    class Model(Body):
        def between(self, x: Tensor) -> Tensor:
            return F.layer_norm(x.half(), (8,))  # planted

    model = Model()

    return of(model, "normalization", "model", "amp-fp16", step=scaled_step(model))


@planted
def a_loss_in_bf16() -> Case:
    model = nn.Linear(8, 4)

    def step() -> None:
        with amp():
            loss = model(X).square().mean()  # planted
        loss.backward()

    return of(model, "loss", None, step=step)


@planted
def a_forgotten_float_before_the_loss() -> Case:
    model = nn.Linear(8, 4)

    def step() -> None:
        with amp():
            y = model(X)
        F.cross_entropy(y, LABELS).backward()  # planted

    return of(model, "loss", None, step=step)


@planted
def a_sum_in_bf16() -> Case:
    class Model(Body):
        def between(self, x: Tensor) -> Tensor:
            return x + x.bfloat16().sum(-1, keepdim=True)  # planted

    return of(Model(), "reduction", "model")


@planted
def exp_in_bf16() -> Case:
    class Model(Body):
        def between(self, x: Tensor) -> Tensor:
            return x.bfloat16().exp()  # planted

    return of(Model(), "operation", "model")


@planted
def a_pointwise_operation_in_bf16_where_fp32_is_declared() -> Case:
    class Model(Body):
        def between(self, x: Tensor) -> Tensor:
            return (x.bfloat16() * 2).float()  # planted

    model = Model()
    return of(model, "operation", "model", "fp32", step=lambda: F.mse_loss(model(X), Y).backward())


@planted
def an_operation_of_the_policys_low_list_in_fp32() -> Case:
    class Model(Body):
        def between(self, x: Tensor) -> Tensor:
            return F.gelu(x.float())  # planted

    return of(Model(), "operation-wide", "model", Policy().with_operation("gelu", "low"))


@planted
def a_module_that_the_policy_has_in_fp32() -> Case:
    return of(Body(), "product-narrow", "second", Policy().with_module("second", "fp32"), has_line=False)


# -- casts -------------------------------------------------------------------------------------------------------------


@planted
def a_cast_to_fp16_and_then_to_bf16() -> Case:
    class Model(Body):
        def between(self, x: Tensor) -> Tensor:
            return self.norm(x.float()).half().bfloat16()  # planted

    return of(Model(), "double-rounding", "model")


@planted
def a_cast_down_and_up_again() -> Case:
    class Model(Body):
        def between(self, x: Tensor) -> Tensor:
            return self.norm(x.float()).bfloat16().float()  # planted

    return of(Model(), "round-trip", "model")


@planted
def a_mask_in_fp32_that_promotes_everything_behind_it() -> Case:
    class Model(Body):
        def between(self, x: Tensor) -> Tensor:
            return (x + torch.zeros(8)).to(x.dtype)  # planted

    model = Model()
    loop = pl.prepare(model, torch.optim.AdamW(model.parameters()), "bf16-master")

    def step() -> None:
        with loop.forward():
            loss = F.mse_loss(model(X), Y)
        loop.step(loss)

    return of(model, "promotion", "model", "bf16-master", step=step)


@planted
def a_constant_in_fp64() -> Case:
    class Model(Body):
        def between(self, x: Tensor) -> Tensor:
            return (x.double() * torch.ones(8, dtype=torch.float64)).float()  # planted

    return of(Model(), "fp64", "model")


# -- tensors that last -------------------------------------------------------------------------------------------------


@planted
def an_embedding_left_in_fp32() -> Case:
    model = nn.Sequential(nn.Embedding(4, 8), nn.Linear(8, 4).bfloat16())
    step = lambda: F.mse_loss(model[1](model[0](LABELS).bfloat16()).float(), Y).backward()  # noqa: E731
    return of(model, "weights", "0.weight", "bf16-kahan", step=step, has_line=False)


@planted
def the_weights_of_a_norm_in_bf16() -> Case:
    model = Body().bfloat16()
    step = lambda: F.mse_loss(model(X.bfloat16()).float(), Y).backward()  # noqa: E731
    return of(model, "weights", "norm.weight", "bf16-kahan", step=step, has_line=False, also="normalization")


@planted
def running_statistics_in_bf16() -> Case:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    model[1].running_mean = model[1].running_mean.bfloat16()
    model.eval()

    def step() -> None:
        with amp():
            y = model[2](model[0](X))
        F.mse_loss(y.float(), Y).backward()

    return of(model, "buffers", "1.running_mean", step=step, has_line=False)


class NarrowMoments(torch.optim.SGD):
    """Momentum in BF16."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for state in self.state.values():
            state["momentum_buffer"] = state["momentum_buffer"].bfloat16().float().bfloat16()
        return result


@planted
def optimizer_state_in_bf16() -> Case:
    model = nn.Linear(8, 4)
    optimizer = NarrowMoments(model.parameters(), lr=0.1, momentum=0.9)
    return of(
        model, "optimizer-state", "weight:momentum_buffer", step=amp_step(model, optimizer=optimizer), has_line=False
    )


@planted
def masters_that_are_missing() -> Case:
    model = nn.Linear(8, 4).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        F.mse_loss(model(X.bfloat16()).float(), Y).backward()
        optimizer.step()

    return of(model, "masters", "weight", "bf16-master", step=step, has_line=False)


@planted
def plain_updates_where_compensated_ones_are_declared() -> Case:
    model = nn.Linear(8, 4).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        F.mse_loss(model(X.bfloat16()).float(), Y).backward()
        optimizer.step()

    return of(model, "update", None, "bf16-kahan", step=step, has_line=False)


@planted
def an_fp16_loss_that_nothing_scales() -> Case:
    model = nn.Linear(8, 4)

    def step() -> None:
        with amp(torch.float16):
            y = model(X)
        F.mse_loss(y.float(), Y).backward()

    return of(model, "loss-scale", None, "amp-fp16", step=step, has_line=False)
