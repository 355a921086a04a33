"""Level applied to a model and its optimizers, and its exact removal."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from plimsoll.emulate.plan_context import rules_of
from plimsoll.errors import ArgumentError
from plimsoll.formats import ModulePlan
from plimsoll.kernels.dtypes import SIXTEEN_BIT
from plimsoll.precision.levels.arithmetic import Arithmetic, check_policy
from plimsoll.precision.levels.catalogue import DTYPES, Level, Stage, Update
from plimsoll.precision.levels.distributed import is_fully_sharded, level_on
from plimsoll.precision.levels.fp8_layers import (
    InPlace,
    Layers,
    PlannedLayers,
    are_multiplied,
    chosen_layers,
    other_rules,
    planned_layers,
)
from plimsoll.precision.levels.placement import CastOutputs, Placement, module_formats
from plimsoll.precision.levels.policy import Policy
from plimsoll.precision.weights.base import SixteenBitOptimizer
from plimsoll.precision.weights.bfloat16 import KahanWeights, StochasticWeights
from plimsoll.precision.weights.master_weights import MasterWeights
from plimsoll.watch.names import unwrapped

_SMALLEST_FP16 = 2.0**-24
Optimizer = torch.optim.Optimizer


class ActiveLevel:
    """Stage that a loop trains at: its optimizers, and its forward and backward."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer], stage: Stage, policy: Policy) -> None:
        root = unwrapped(model)
        self.user_optimizers = tuple(optimizers)
        self.stage, self.level = stage, level_on(model, stage.level)
        rules = _rules(root, stage, policy)
        self.fp8, rules = _in_fp8(root, self.level, policy, rules)
        try:
            self.computing = Arithmetic(root, self.level, policy, rules)
            self.optimizers = self._cast(root, optimizers, rules)
        except Exception:
            if self.fp8 is not None:
                self.fp8.take_back()
            raise
        if self.fp8 is not None and not self.computing.native:
            dtypes = {"outputs": torch.bfloat16} if isinstance(self.fp8, Layers) else {"inputs": torch.float32}
            self.fp8.keep_lists_out(root, self.computing.switch, **dtypes)
        self._handles: list[Any] = []
        if stage.level.casts and is_fully_sharded(root):  # then outputs are FP32, as levels return them elsewhere
            self._handles.append(root.register_forward_hook(CastOutputs(DTYPES["fp32"])))

    # Removal makes the model FP32: each weight becomes its master (or the compensated value), and the user's own
    # optimizers come back with FP32 state. A change of level removes one level and applies another, so values that both
    # levels keep in FP32 pass exactly.
    def take_back(self) -> None:
        """Restore an FP32 model and the user's own optimizers."""
        self._remove()
        values: dict[nn.Parameter, Tensor] = {}
        for optimizer in self.optimizers:
            if isinstance(optimizer, SixteenBitOptimizer):
                values |= {cast("nn.Parameter", p.weight): optimizer.master_of(p.weight) for p in optimizer.pairs}
                optimizer.unwrap()
        self.placement.widen(values)
        if self.level.casts:
            for optimizer in self.user_optimizers:
                put_state_in_the_weights_dtype(optimizer)

    def _remove(self) -> None:
        self.computing.remove()
        if self.fp8 is not None:
            self.fp8.take_back()
        for handle in self._handles:
            handle.remove()

    def _cast(
        self, root: nn.Module, optimizers: Sequence[Optimizer], rules: Mapping[str, ModulePlan]
    ) -> tuple[Optimizer, ...]:
        level = self.level
        own = {name: plan.forward for name, plan in rules.items() if level.casts}
        originals: dict[Tensor, Tensor] = {p: p.data for p in root.parameters() if level.casts}
        try:
            self.placement = Placement(root, module_formats(root, level.weights, level.norms, own))
        except Exception:
            self.computing.remove()
            raise
        try:
            return wrapped(optimizers, level.update, originals)
        except Exception:
            self.computing.remove()
            self.placement.widen(cast("dict[nn.Parameter, Tensor]", originals))
            raise


def _in_fp8(
    root: nn.Module, level: Level, policy: Policy, rules: dict[str, ModulePlan]
) -> tuple[InPlace | None, dict[str, ModulePlan]]:
    """Return the FP8 layers by level or plan, and the rules left for regions."""
    if level.fp8 is not None:
        return Layers(root, level.fp8, policy, rules), other_rules(rules)
    if level.casts or not are_multiplied(root, policy) or not planned_layers(root, rules):
        return None, rules
    planned = PlannedLayers(root, rules)
    return planned, {name: plan for name, plan in rules.items() if name not in planned.names}


def check_stage(model: nn.Module, optimizers: Sequence[Optimizer], stage: Stage, policy: Policy) -> None:
    """Raise for a stage that cannot be applied; change nothing."""
    level = level_on(model, stage.level)
    root = unwrapped(model)
    rules = _rules(root, stage, policy)
    if level.fp8 is not None:
        chosen_layers(root, level.fp8, rules)
        rules = other_rules(rules)
    check_policy(level, policy, rules)
    _check_epsilon(level, optimizers)


def _rules(root: nn.Module, stage: Stage, policy: Policy) -> dict[str, ModulePlan]:
    """Return the format of each named module; the policy overrules the plan."""
    planned = {} if stage.plan is None else rules_of(stage.plan, root, "prepare")
    return planned | {name: ModulePlan.of(fmt) for name, fmt in policy.formats_of(root).items()}


def _check_epsilon(level: Level, optimizers: Sequence[Optimizer]) -> None:
    """Raise for an epsilon that is zero in FP16: a zero gradient would give 0/0."""
    if not (level.weights == "fp16" and level.update == "plain"):
        return
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        epsilon = group.get("eps")
        if isinstance(epsilon, float) and 0 < epsilon <= _SMALLEST_FP16 / 2:
            raise ArgumentError(
                f"prepare: expected an eps that FP16 can hold at fp16-pure, where the optimizer's state is FP16; got "
                f"eps={epsilon}, which is 0 in FP16. Use eps=1e-4, or fp16-master, whose state is FP32."
            )


def wrapped(
    optimizers: Sequence[Optimizer], update: Update, originals: Mapping[Tensor, Tensor]
) -> tuple[Optimizer, ...]:
    """Wrap optimizers for the level's kind of update, from the FP32 values."""
    return tuple(_wrapped(optimizer, number, update, originals) for number, optimizer in enumerate(optimizers))


def put_state_in_the_weights_dtype(optimizer: Optimizer) -> None:
    """Cast existing state to the dtypes that the optimizer would create."""
    for p, state in optimizer.state.items():
        for name, value in state.items():
            if name != "step" and isinstance(value, Tensor) and value.is_floating_point() and value.shape == p.shape:
                state[name] = value.to(p.dtype)


def _wrapped(optimizer: Optimizer, number: int, update: Update, originals: Mapping[Tensor, Tensor]) -> Optimizer:
    parameters: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
    if not any(p.dtype in SIXTEEN_BIT for p in parameters):
        return optimizer
    if update == "plain":
        put_state_in_the_weights_dtype(optimizer)
        return optimizer
    optimizer_over_weights = _KINDS[update](optimizer, number)
    for pair in optimizer_over_weights.pairs:
        original = originals.get(pair.weight)
        if original is not None and original.dtype == torch.float32:
            pair.store.load(pair.weight.detach(), {"master": original})
            pair.settle()
    return optimizer_over_weights


_KINDS: dict[str, Callable[[Optimizer, int], SixteenBitOptimizer]] = {
    "masters": lambda optimizer, _: MasterWeights(optimizer),
    "stochastic": lambda optimizer, number: StochasticWeights(optimizer, seed=number),  # no two draw alike
    "kahan": lambda optimizer, _: KahanWeights(optimizer),
}
