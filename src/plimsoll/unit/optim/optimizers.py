"""SGD, Adam and AdamW of torch, in all their forms, by the rules of u-muP."""

import fnmatch
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from plimsoll.checks import integer
from plimsoll.errors import ArgumentError, StateError
from plimsoll.unit.optim.parameter_kinds import KINDS, Trait, lr_factor, trait_of, traits_of

# -- parameter groups, one per kind and learning-rate factor -----------------------------------------------------------

Parameters = nn.Module | Iterable[Any]  # a model, or torch's: parameters, (name, parameter) pairs, groups of either
Group = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterKinds:
    """Names and traits of parameters by their ids, and the plain ones."""

    operation: str
    names: dict[int, str]
    traits: dict[int, Trait]
    plain: bool | frozenset[int]

    def of(self, parameter: Tensor, name: str | None) -> tuple[str, float]:
        """Return the kind, or "plain", and the learning rate's factor."""
        trait = self.traits.get(id(parameter))
        if isinstance(self.plain, frozenset) and id(parameter) in self.plain:
            return "plain", 1.0
        if trait is not None:
            return trait.kind, lr_factor(trait)
        if self.plain is True:
            return "plain", 1.0
        name = self.names.get(id(parameter), name)
        described = "a parameter" if name is None else f"{name!r}"
        raise ArgumentError(
            f"{self.operation}: expected every parameter to have a kind; got {described} of shape "
            f"{tuple(parameter.shape)} without one. Give model= if its modules have tagged it, tag it with "
            "plimsoll.unit.tag, name it in plain= to use the unchanged learning rate, or put kind= into its group."
        )


def kinds_from(operation: str, model: nn.Module | None, plain: bool | Sequence[str]) -> ParameterKinds:
    """Return the kinds of a model's parameters.

    `plain` is for those without one, or whose names match a glob.
    """
    if model is None:
        if plain is not False and plain is not True:
            raise ArgumentError(
                f"{operation}: expected a model where plain names parameters; got plain={plain!r} without one. Give "
                "model=."
            )
        return ParameterKinds(operation=operation, names={}, traits={}, plain=plain)
    named = dict(model.named_parameters())
    traits = {id(named[name]): trait for name, trait in traits_of(model).items()}
    chosen = plain if isinstance(plain, bool) else _matching(operation, named, plain)
    return ParameterKinds(operation=operation, names={id(p): n for n, p in named.items()}, traits=traits, plain=chosen)


def split(kinds: ParameterKinds, group: Group) -> list[Group]:
    """Split a group by kind and factor, with the entries `kind` and `lr_factor`."""
    own = group.get("kind")
    if "params" not in group or (own is None and not group.keys().isdisjoint(("fan_in", "depth"))):
        raise ArgumentError(
            f"{kinds.operation}: expected a group to have 'params', and 'kind' where it has 'fan_in' or 'depth'; got "
            f"{', '.join(map(repr, group))}. Without a kind, plimsoll.unit.tag_fan_in and tag_depth hold."
        )
    parts: dict[tuple[str, float], list[Any]] = {}
    for item in _listed(group["params"]):
        name, parameter = cast("tuple[str | None, Tensor]", item if isinstance(item, tuple) else (None, item))
        key = kinds.of(parameter, name) if own is None else _stated(kinds.operation, own, parameter, group)
        parts.setdefault(key, []).append(item)
    rest = {key: value for key, value in group.items() if key not in ("params", "fan_in", "depth")}
    return [{**rest, "params": items, "kind": kind, "lr_factor": factor} for (kind, factor), items in parts.items()]


def groups_from(operation: str, params: Parameters) -> list[Group]:
    """Return the argument of an optimizer as groups."""
    if isinstance(params, nn.Module):
        return [{"params": list(params.named_parameters())}]
    if isinstance(params, Tensor):
        raise ArgumentError(
            f"{operation}: expected a model, or an iterable of parameters or groups; got one tensor of shape "
            f"{tuple(params.shape)}. Put it into a list."
        )
    items = list(params)
    groups = [dict(cast("Group", item)) for item in items if isinstance(item, dict)]
    if groups and len(groups) < len(items):
        raise ArgumentError(
            f"{operation}: expected parameters or groups of them; got {len(groups)} groups among {len(items)} items. "
            "Put the others into a group."
        )
    return groups or [{"params": items}]


def _stated(operation: str, kind: object, parameter: Tensor, group: Group) -> tuple[str, float]:
    """Return the kind in a group's own entries, and its factor."""
    if kind == "plain":
        return "plain", 1.0
    if kind not in KINDS:
        raise ArgumentError(
            f"{operation}: expected a group's kind to be 'plain' or one of {', '.join(KINDS)}; got {kind!r}. Leave it "
            "out if the model's modules tag it."
        )
    fan_in, depth = group.get("fan_in"), group.get("depth", 1)
    integer(operation, "depth", depth, low=1, remedy="Count the stack's layers.")
    if fan_in is not None:
        integer(operation, "fan_in", fan_in, low=1, remedy="Count the summed inputs.")
    trait = trait_of(cast("Any", kind), parameter, fan_in=fan_in, depth=depth)
    return trait.kind, lr_factor(trait)


def _listed(params: object) -> list[Any]:
    return [params] if isinstance(params, Tensor) else list(cast("Iterable[Any]", params))


def _matching(operation: str, named: dict[str, nn.Parameter], plain: object) -> frozenset[int]:
    # An iterator gives its globs once.
    several = isinstance(plain, Iterable) and not isinstance(plain, str)
    listed: list[Any] = list(cast("Iterable[Any]", plain)) if several else [plain]
    if not all(isinstance(glob, str) for glob in listed):
        raise ArgumentError(
            f"{operation}: expected plain to be True, False or names of parameters; got plain={plain!r}. Write "
            "plain=['head.*'], for example."
        )
    globs: list[str] = listed
    for glob in globs:
        if not fnmatch.filter(named, glob):
            raise ArgumentError(
                f"{operation}: expected plain to name parameters of the model; got {glob!r}, which matches none. Names "
                f"are as in named_parameters(), such as {next(iter(named), 'none')!r}."
            )
    return frozenset(id(p) for n, p in named.items() if any(fnmatch.fnmatchcase(n, glob) for glob in globs))


# -- factors of learning rates in torch's own optimizers ---------------------------------------------------------------


class UnitOptimizer(torch.optim.Optimizer):
    """Base of `SGD`, `Adam` and `AdamW`, placed before torch's optimizer."""

    _torch_step: ClassVar[Callable[..., Any]]  # the step of torch's class, without its hooks

    def _prepared(
        self,
        params: Parameters,
        lr: Any,
        weight_decay: float,
        model: nn.Module | None,
        plain: bool | Sequence[str],
        independent: bool,
    ) -> list[Group]:
        """Return the groups for torch's constructor."""
        operation = type(self).__name__
        if isinstance(params, nn.Module):
            model = params if model is None else model
        kinds = kinds_from(operation, model, plain)
        groups = [part for group in groups_from(operation, params) for part in split(kinds, group)]
        for group in groups:
            _note(operation, group, {"lr": lr, "weight_decay": weight_decay}, independent)
        return groups

    def add_param_group(self, param_group: Group) -> None:
        """Add a group with the parameters' kind in "kind", or "plain" for none."""
        if "lr_factor" in param_group:
            super().add_param_group(param_group)
            return
        operation = type(self).__name__
        kinds = ParameterKinds(operation=operation, names={}, traits={}, plain=False)
        independent = bool(self.defaults.get("independent_weight_decay", False))
        for group in split(kinds, param_group):
            _note(operation, group, self.defaults, independent)
            super().add_param_group(group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run torch's step with each learning rate multiplied by its factor."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        saved = [(group["lr"], group["weight_decay"]) for group in self.param_groups]
        try:
            for group in self.param_groups:
                _scale(group)
            self._torch_step()
        finally:
            for group, (lr, decay) in zip(self.param_groups, saved, strict=True):
                group["lr"], group["weight_decay"] = lr, decay
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of an optimizer of the same model.

        Raises:
            StateError: The factors of the two optimizers differ.
        """
        own = [group["lr_factor"] for group in self.param_groups]
        saved = [group.get("lr_factor") for group in cast("list[Group]", state_dict["param_groups"])]
        if saved != own:
            raise StateError(
                f"{type(self).__name__}.load_state_dict: expected the factors of this model's groups, {own}; got "
                f"{saved}. Load the state of an optimizer of plimsoll.unit for a model of the same width and depth."
            )
        super().load_state_dict(state_dict)


def unhooked(optimizer: type[torch.optim.Optimizer]) -> Callable[..., Any]:
    """Return the class's step without its hooks."""
    # Torch wraps it in them when the first of its optimizers is made. They run around the outer step already.
    step: Any = optimizer.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step


# A group's `lr` stays as the user or a scheduler wrote it. So any scheduler works, also one that writes absolute values
# (OneCycleLR, `group["lr"] = ...`) or has a floor. The factor is a separate entry, and the two are multiplied only
# while torch's own step runs.
def _scale(group: Group) -> None:
    """Set the values for torch's step, without torch's own factor of the decay."""
    factor = group["lr_factor"]
    group["lr"] = group["lr"] * factor
    if group["independent_weight_decay"] and group["weight_decay"]:
        group["weight_decay"] = group["weight_decay"] / (factor * group["reference_lr"])


def _note(operation: str, group: Group, defaults: Group, independent: bool) -> None:
    """Set the learning rate that independent decay is relative to."""
    lr, decay = (group.get(name, defaults[name]) for name in ("lr", "weight_decay"))
    group["reference_lr"], group["independent_weight_decay"] = float(lr), independent
    if independent and decay and not group["reference_lr"] > 0:
        raise ArgumentError(
            f"{operation}: expected lr above 0, which independent weight decay is relative to; got lr={lr}. Give the "
            "highest learning rate of the schedule, and let a scheduler begin lower."
        )


# -- optimizers --------------------------------------------------------------------------------------------------------


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

    _torch_step = unhooked(torch.optim.AdamW)

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


class Adam(UnitOptimizer, torch.optim.Adam):
    """`torch.optim.Adam` for unit-scaled models, with the factors of `AdamW`.

    `weight_decay` is torch's penalty, which is added to the gradient before Adam normalizes it. So it has no scale to
    be independent of. Other arguments are those of `AdamW`.
    """

    _torch_step = unhooked(torch.optim.Adam)

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


class SGD(UnitOptimizer, torch.optim.SGD):
    """`torch.optim.SGD` for unit-scaled models, with the factors of `AdamW`.

    The factors require gradients with the same scale at any width. So a readout with a constraint is refused. Weight
    decay is independent as in `AdamW`. Momentum accumulates decay like gradients. Other arguments are torch's and those
    of `AdamW`.
    """

    _torch_step = unhooked(torch.optim.SGD)

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
