"""SGD, Adam and AdamW: torch's own, in whichever way they run (foreach, fused, capturable), by the rules of u-muP."""

from collections.abc import Iterator, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from plimsoll.errors import ArgumentError
from plimsoll.unit.optim.base import UnitOptimizer, unhooked
from plimsoll.unit.optim.groups import Parameters

_ADAM, _ADAMW, _SGD = unhooked(torch.optim.Adam), unhooked(torch.optim.AdamW), unhooked(torch.optim.SGD)


class AdamW(UnitOptimizer, torch.optim.AdamW):
    """`torch.optim.AdamW` for unit-scaled models: a learning rate found on a narrow model serves a wide one.

    Each group's step is `lr` times its factor: fan_in^-1/2 for weights, 1 for readouts, embeddings, biases and norms,
    all times depth^-1/2 in residual stacks. `group["lr"]` is the plain learning rate, for any
    scheduler to write; the factor stands in `group["lr_factor"]`, the kind in `group["kind"]`.

    Weight decay is independent: a step multiplies every weight by ``1 - weight_decay * lr / lr_0``, lr_0 being the
    learning rate given here. So it follows the schedule, but neither the learning rate's choice nor the factors;
    with a scheduler of absolute rates give its highest as lr. The default is none, where torch's is 0.01: that is meant
    for a product with a learning rate near 0.001.

    Args:
        params: the model; or parameters, (name, parameter) pairs, groups of either, with `model` to tell their kinds. A
            group may state a kind itself: "kind", with "fan_in" and "depth" where the shape does not tell.
        lr: the learning rate, a number or a tensor. Best ones lie between 0.1 and 4, far from the usual 0.001.
        betas: as torch's.
        eps: as torch's.
        weight_decay: the share that a step takes from every weight.
        amsgrad: as torch's.
        maximize: as torch's.
        foreach: as torch's.
        capturable: as torch's.
        differentiable: as torch's.
        fused: as torch's.
        independent_weight_decay: False: torch's rule, ``1 - weight_decay * lr * factor``.
        model: whose modules say the kinds, where `params` is not the model.
        plain: True: parameters without a kind take the learning rate as it is; or globs of names that do, whatever
            their kind. Otherwise a parameter without a kind is an error.

    Raises `ArgumentError`.

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
            groups, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, foreach=foreach, capturable=capturable,
            differentiable=differentiable, fused=fused,
        )  # fmt: skip
        self.defaults["independent_weight_decay"] = independent_weight_decay

    def _torch_step(self) -> None:
        _ADAMW(self)


class Adam(UnitOptimizer, torch.optim.Adam):
    """`torch.optim.Adam` for unit-scaled models, with the factors of `AdamW`.

    `weight_decay` is torch's penalty, added to the gradient before Adam normalises it: it has no scale to be
    independent of. Other arguments are those of `AdamW`.
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
            groups, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, foreach=foreach, capturable=capturable,
            differentiable=differentiable, fused=fused,
        )  # fmt: skip

    def _torch_step(self) -> None:
        _ADAM(self)


class SGD(UnitOptimizer, torch.optim.SGD):
    """`torch.optim.SGD` for unit-scaled models, with the factors of `AdamW`.

    They hold as long as gradients have the same scale at any width, and so the readout must have no constraint: one
    that has is refused. Weight decay is independent as in `AdamW`; where there is momentum it gathers decay as it
    gathers gradients. Other arguments are torch's and those of `AdamW`.
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
            groups, lr, momentum, dampening, weight_decay, nesterov, maximize=maximize, foreach=foreach,
            differentiable=differentiable, fused=fused,
        )  # fmt: skip
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
                f"got {name}.constraint={constraint!r}. Make it None, or take Adam, which normalises gradients."
            )
