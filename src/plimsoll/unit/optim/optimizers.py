"""SGD, Adam and AdamW of torch, in all their forms, by the rules of u-muP."""

from collections.abc import Iterator, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from plimsoll.errors import ArgumentError
from plimsoll.unit.optim.base import UnitOptimizer, unhooked
from plimsoll.unit.optim.groups import Parameters

_ADAM, _ADAMW, _SGD = unhooked(torch.optim.Adam), unhooked(torch.optim.AdamW), unhooked(torch.optim.SGD)


class AdamW(UnitOptimizer, torch.optim.AdamW):
    """`torch.optim.AdamW` for unit-scaled models.

    The best learning rate of a narrow model works for a wide one. Each group's step is `lr` times its factor:
    fan_in^-1/2 for weights, 1 for readouts, embeddings, biases and norms, all times depth^-1/2 in residual stacks.
    `group["lr"]` is the plain learning rate, which any scheduler can set. The factor is `group["lr_factor"]`, the kind
    `group["kind"]`.

    Weight decay is independent: a step multiplies every weight by ``1 - weight_decay * lr / lr_0``, lr_0 being the `lr`
    of the constructor. So decay follows the schedule, but neither the learning rate itself nor the factors. With a
    scheduler of absolute rates pass its highest as `lr`. The default is no decay. Torch's 0.01 is meant for a product
    with a learning rate near 0.001.

    Args:
        params: The model, or parameters, (name, parameter) pairs, or groups of either together with `model`. A group
            may have its own "kind", with "fan_in" and "depth" if the shape does not contain them.
        lr: Learning rate, a number or a tensor. The best ones are between 0.1 and 4, far from the usual 0.001.
        betas: As in torch.
        eps: As in torch.
        weight_decay: Share of every weight that a step removes. Default: 0.
        amsgrad: As in torch.
        maximize: As in torch.
        foreach: As in torch.
        capturable: As in torch.
        differentiable: As in torch.
        fused: As in torch.
        independent_weight_decay: Whether decay is independent, or else by torch's rule
            ``1 - weight_decay * lr * factor``. Default: True.
        model: Model whose modules have the kinds, if `params` is not the model.
        plain: Whether parameters without a kind use the unchanged learning rate, or globs of names that do for any
            kind. Default: False, so that a parameter without a kind is an error.

    Raises:
        ArgumentError: A parameter has no kind, or an argument is not allowed.

    >>> from plimsoll.unit import nn as unn
    >>> model = nn.Sequential(unn.Linear(256, 64), unn.LinearReadout(64, 8))
    >>> optimizer = AdamW(model, lr=1.0)
    >>> [(group["kind"], group["lr_factor"]) for group in optimizer.param_groups]
    [('weight', 0.0625), ('bias', 1.0), ('readout', 1.0)]
    """

    def __init__(
        self,
        params: Parameters,
        lr: float | Tensor,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        independent_weight_decay: bool = True,
        model: nn.Module | None = None,
        plain: bool | Sequence[str] = False,
    ) -> None:
        groups = self._prepared(params, lr, weight_decay, model, plain, independent_weight_decay)
        super().__init__(
            groups,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
        )
        self.defaults["independent_weight_decay"] = independent_weight_decay

    def _torch_step(self) -> None:
        _ADAMW(self)


class Adam(UnitOptimizer, torch.optim.Adam):
    """`torch.optim.Adam` for unit-scaled models, with the factors of `AdamW`.

    `weight_decay` is torch's penalty, which is added to the gradient before Adam normalizes it. So it has no scale to
    be independent of. Other arguments are those of `AdamW`.
    """

    def __init__(
        self,
        params: Parameters,
        lr: float | Tensor,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        model: nn.Module | None = None,
        plain: bool | Sequence[str] = False,
    ) -> None:
        groups = self._prepared(params, lr, weight_decay, model, plain, independent=False)
        super().__init__(
            groups,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
        )

    def _torch_step(self) -> None:
        _ADAM(self)


class SGD(UnitOptimizer, torch.optim.SGD):
    """`torch.optim.SGD` for unit-scaled models, with the factors of `AdamW`.

    The factors require gradients with the same scale at any width. So a readout with a constraint is refused. Weight
    decay is independent as in `AdamW`. Momentum accumulates decay like gradients. Other arguments are torch's and those
    of `AdamW`.
    """

    def __init__(
        self,
        params: Parameters,
        lr: float | Tensor,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        independent_weight_decay: bool = True,
        model: nn.Module | None = None,
        plain: bool | Sequence[str] = False,
    ) -> None:
        _check_readouts(params if isinstance(params, nn.Module) else model)
        groups = self._prepared(params, lr, weight_decay, model, plain, independent_weight_decay)
        super().__init__(
            groups,
            lr,
            momentum,
            dampening,
            weight_decay,
            nesterov,
            maximize=maximize,
            foreach=foreach,
            differentiable=differentiable,
            fused=fused,
        )
        self.defaults["independent_weight_decay"] = independent_weight_decay

    def _torch_step(self) -> None:
        _SGD(self)


def _check_readouts(model: nn.Module | None) -> None:
    if model is None:
        return
    modules = cast("Iterator[tuple[str, nn.Module]]", model.named_modules())
    for name, module in modules:
        constraint = getattr(module, "constraint", None)
        if constraint is not None and "readout" in getattr(module, "unit_kinds", {}).values():
            raise ArgumentError(
                f"SGD: expected a readout without constraint, under which gradients have the same scale at any width; "
                f"got {name}.constraint={constraint!r}. Set it to None, or use Adam, which normalizes gradients."
            )
