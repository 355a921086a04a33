"""Declared formats of a level, a policy or a plan, by module and operation."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

from torch import nn

from plimsoll import fp8
from plimsoll.emulate.casting import CUDA, OperationLists
from plimsoll.emulate.dispatch.thread_frame import categories_of
from plimsoll.emulate.module_regions import named_modules
from plimsoll.emulate.plan_context import plan_of, rules_of
from plimsoll.errors import ArgumentError
from plimsoll.formats import ModulePlan, Plan
from plimsoll.precision.levels.catalogue import Level, Update, level_named, level_of_plan
from plimsoll.precision.levels.distributed import is_fully_sharded, sharding_policies
from plimsoll.precision.levels.fp8_layers import FP8, chosen_layers
from plimsoll.precision.levels.placement import module_formats
from plimsoll.precision.levels.policy import Policy
from plimsoll.receipts.recording.values import SIXTEEN_BIT, dtype_name
from plimsoll.watch.names import ROOT, clean, unwrapped


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """The formats that were declared."""

    name: str  # how messages call it
    # The level, for what concerns weights and optimizers; None of a policy, which says nothing of them.
    level: Level | None = None
    # Formats of products' operands outside of the modules in `modules`; None: anything.
    products: frozenset[str] | None = None
    # Formats of products in single modules, and in those inside them.
    modules: Mapping[str, ModulePlan] = field(default_factory=dict[str, ModulePlan], hash=False)
    lists: OperationLists | None = None  # operation lists; None where operations are not cast
    narrowest: str | None = None  # format below which no operation may compute, whatever it is; None: any may
    # Format that each module computes in, by its name, where a level casts the weights.
    computes: Mapping[str, str] = field(default_factory=dict[str, str], hash=False)
    # Format of each module's parameters, by the module's name; empty: not declared.
    weights: Mapping[str, str] = field(default_factory=dict[str, str], hash=False)
    update: Update = "plain"  # how 16-bit weights are updated ("masters", ...); "plain" where they are not 16-bit
    # Format in which gradients of parameters are added up across ranks; None: not declared.
    reduction: str | None = None

    def factors(self, module: str | None, *, backward: bool) -> frozenset[str] | None:
        """Return the formats of a module's product operands; None if not declared."""
        plan = self._plan_of(module)
        if plan is not None:
            return frozenset((plan.forward, plan.backward) if backward else (plan.forward,))
        if self.computes:
            fmt = self.computes.get(module or "")
            return None if fmt is None else frozenset((fmt,))
        return self.products

    def inside(self, module: str | None) -> str | None:
        """Return the 16-bit format that all of a module computes in; None if not declared."""
        fmt = None if module is None else self.computes.get(module)
        return fmt if fmt in SIXTEEN_BIT else None

    def category(self, name: str, module: str | None) -> str | None:
        """Return the list that an operation is on in a module."""
        plan = self._plan_of(module)
        if self.lists is None or (self.products is None and plan is None):
            return None
        return categories_of(self.lists).get(name)

    def _plan_of(self, module: str | None) -> ModulePlan | None:
        while module:
            if module in self.modules:
                return self.modules[module]
            module = module.rpartition(".")[0]
        return self.modules.get(ROOT)


def declaration_of(declared: object, model: nn.Module) -> Declaration:
    """Return the declaration for a model that is without its wrappers."""
    parsed = parse(declared)
    if isinstance(parsed, Policy):
        return _of_policy(parsed, model)
    if isinstance(parsed, Plan):
        return _of_plan(parsed, None if isinstance(declared, Plan) else str(declared), model)
    return _of_level(parsed, model)


def parse(declared: object) -> Level | Policy | Plan:
    """Return a declaration as a record; raise `ArgumentError` if it has no formats."""
    if isinstance(declared, Level | Policy | Plan):
        return declared
    try:
        if isinstance(declared, os.PathLike) or (isinstance(declared, str) and declared.endswith(".toml")):
            return plan_of("receipt", cast("str", declared))
        if isinstance(declared, str):
            return level_named(declared)
    except ArgumentError as error:
        message = str(error).replace("prepare:", "receipt:", 1).replace("precision=", "declared=")
        message = message.replace(", a plan file (.toml) or a schedule of (step, level)", " or a plan file (.toml)")
        raise ArgumentError(message) from None
    raise ArgumentError(
        "receipt: expected declared to be a level, a policy, a plan or a plan file; got "
        f'declared={type(declared).__name__}. Write declared="amp-bf16", or the path of a .toml file.'
    )


def _of_level(level: Level, model: nn.Module) -> Declaration:
    root, sharded = unwrapped(model), is_fully_sharded(model)
    products = level.operations or level.matmuls or (None if level.casts else "fp32")
    # `fully_shard` keeps FP32 shards, which are masters already, and casts norms as it casts everything else.
    norms = level.weights if sharded else level.norms
    return Declaration(
        name=level.name,
        level=level,
        products=None if products is None else frozenset((products,)),
        modules=_in_fp8(root, level),
        lists=CUDA if level.operations is not None else None,
        narrowest="fp32" if level.operations is None and not level.casts else None,
        computes=_formats(root, level.weights, norms) if level.casts else {},
        weights=_formats(root, "fp32", "fp32") if sharded else _formats(root, level.weights, level.norms),
        update="plain" if sharded else level.update,
        reduction=_reduction(model, level),
    )


def _formats(root: nn.Module, weights: str, norms: str) -> dict[str, str]:
    return {clean(name) or ROOT: fmt for name, fmt in module_formats(root, weights, norms, {}).items()}


def _of_plan(plan: Plan, file: str | None, model: nn.Module) -> Declaration:
    root = unwrapped(model)
    rules = {clean(name) or ROOT: rule for name, rule in rules_of(plan, root, "receipt").items()}
    level = level_of_plan(plan)
    return Declaration(
        name=file or level.name, level=level, modules=rules, lists=CUDA, weights=_formats(root, "fp32", "fp32"),
        reduction=_reduction(model, level),
    )  # fmt: skip


def _of_policy(policy: Policy, model: nn.Module) -> Declaration:
    formats = policy.formats_of(unwrapped(model))
    return Declaration(
        name="a policy",
        products=SIXTEEN_BIT,
        modules={clean(name) or ROOT: ModulePlan.of(fmt) for name, fmt in formats.items()},
        lists=policy.operations,
    )


def _in_fp8(root: nn.Module, level: Level) -> dict[str, ModulePlan]:
    """Return the plan of the linear layers that a level runs in FP8."""
    if level.fp8 is None:
        return {}
    try:
        chosen, _ = chosen_layers(root, level.fp8, {})
    except ArgumentError as error:
        raise ArgumentError(str(error).replace("prepare:", "receipt:", 1)) from None
    own = [name for name, module in named_modules(root) if isinstance(module, fp8.Linear)]
    return {clean(name) or ROOT: FP8 for name in (*chosen, *own)}


def _reduction(model: nn.Module, level: Level) -> str | None:
    """Return the format in which gradients are reduced: that of `fully_shard`, else the weights'."""
    for policy in sharding_policies(model):
        dtype = policy.reduce_dtype or policy.param_dtype
        if dtype is not None:
            return dtype_name(dtype)
    return level.weights
