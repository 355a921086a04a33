"""`emulate`: training with the arithmetic of other hardware."""

import os
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from plimsoll.emulate.casting import CUDA, OperationLists, check_lists, operation_name, several
from plimsoll.emulate.context import Emulation
from plimsoll.emulate.module_regions import is_native
from plimsoll.emulate.plan_context import PlannedEmulation, check_alone, plan_of
from plimsoll.emulate.recipe import Recipe, recipe
from plimsoll.errors import ArgumentError
from plimsoll.formats import ModulePlan, Plan, get
from plimsoll.kernels.dtypes import TRAINING


def emulate(
    precision: str | torch.dtype | Plan | os.PathLike[str] | None = None,
    *,
    model: nn.Module | None = None,
    forward: object | None = None,
    backward: object | None = None,
    operations: str | Iterable[object] = "matmul",
    accumulate: object = "fp32",
    chunk: int = 1,
    lists: OperationLists | None = CUDA,
    **cast_arguments: Any,
) -> "Emulation":
    """Return a context in which operations compute as on other hardware.

    ``emulate("fp16")`` and ``emulate("bf16")``: the 16-bit numerics of a GPU on torch's own 16-bit tensors. Operations
    are cast as by `torch.autocast("cuda")`. Matrix products and convolutions compute in FP32 and round once to the
    16-bit dtype, as tensor cores do, at close to the speed of FP32. ``emulate("fp32")`` is a region without emulation
    inside another.

    ``emulate(forward="e4m3", backward="e5m2")``: the operands of products are rounded to formats that the machine
    lacks, weights and activations to `forward`, gradients to `backward`. The tensors stay in their dtype. With a
    precision too, everything else is as there: ``emulate("bf16", forward="e4m3", backward="e5m2")``.

    ``emulate("plan.toml", model=model)``: each module that the plan names computes in its formats, at its scales. All
    other modules compute as outside. The loss scale of a plan is not applied: the training loop needs it
    (`Plan.scale`).

    The backward of a graph recorded inside is emulated too, even after the context has ended. The context holds for the
    thread that opened it, and changes nothing permanently. Compiled code of torch.compile runs eagerly inside.

    Args:
        precision: "fp16", "bf16" or "fp32", or a `Plan`, or its file. Default: no change of dtypes.
        model: The model of a plan.
        forward: Any format, including block formats, whose blocks run along the axis that a product sums over.
            Default: the forward stays unrounded.
        backward: The same for gradients.
        operations: The operations that round. "matmul" (default): operands of all products, convolutions and
            attention. A name or several: operands of those products only, and, for other operations, their results
            and the gradients that return to them. "all": the operands of products, and the result of every operation.
        accumulate: The format of the sums of products. Any other than "fp32" (default) is slow.
        chunk: Number of neighbouring products that are added exactly before their sum is added to the accumulator and
            rounded, in order from first to last. At least 1, and only with an accumulator other than FP32. Default: 1.
        lists: The casts of a 16-bit precision. None: no casts, for a model that is 16-bit itself. Default: `CUDA`.
        cast_arguments: rounding, saturate, scale, scale_rule and generator of `plimsoll.cast`. `scale` may also be a
            mapping by "weights", "activations" and "gradients". A parameter among the operands is a weight.

    Raises:
        ArgumentError: Two arguments contradict each other, or one is out of range.
        FormatError: A format does not exist.

    >>> import plimsoll as pl
    >>> x = torch.full((1, 4096), 0.1)
    >>> with pl.emulate("fp16") as e:
    ...     y = x @ x.T
    >>> y.item(), y.dtype, e.operations.emulated
    (40.9375, torch.float16, {'matmul': 1})
    >>> with pl.emulate("fp16", accumulate="fp16"):  # from 32 on, FP16 loses an added 0.01
    ...     (x @ x.T).item()
    32.0
    """
    if isinstance(precision, Plan | os.PathLike) or (isinstance(precision, str) and precision.endswith(".toml")):
        others = {
            "forward": forward,
            "backward": backward,
            "operations": operations,
            "accumulate": accumulate,
            "chunk": chunk,
            "lists": lists,
            **cast_arguments,
        }
        return _of_plan(plan_of("emulate", precision), model, others)
    if model is not None:
        raise ArgumentError(
            f"emulate: expected a model with a plan only; got {type(model).__name__} with precision={precision!r}. "
            "Leave it out: the context holds for whatever runs inside."
        )
    check_lists("emulate", lists)
    low = _dtype(precision)
    rounding = recipe(forward, backward, accumulate, chunk, cast_arguments)
    if low is None and rounding is None:
        raise ArgumentError(
            "emulate: expected a precision, a format or an accumulator; got none. Write emulate('fp16'), or "
            "emulate(forward='e4m3', backward='e5m2')."
        )
    if lists is not CUDA and low in (None, torch.float32):
        raise ArgumentError(
            "emulate: expected lists with precision 'fp16' or 'bf16', which they cast to; got "
            f"precision={precision!r}. Name one, or leave lists out."
        )
    names = _selection(operations, rounding)
    if rounding is not None and rounding.scales and names != "matmul":
        raise ArgumentError(
            f"emulate: expected scales by role where only products are rounded; got operations={operations!r}. Give "
            "one scale, or leave operations out."
        )
    return Emulation(low=low, recipe=rounding, operations=names, lists=lists)


def _selection(operations: str | Iterable[object], recipe: Recipe | None) -> "str | frozenset[str]":
    if isinstance(operations, str) and operations in ("matmul", "all"):
        selected: str | frozenset[str] = operations
    else:
        named = [operation_name(operation, "emulate") for operation in several("emulate", "operations", operations)]
        if not named:
            raise ArgumentError(
                f"emulate: expected operations that round; got operations={operations!r}. Name some, or leave it out."
            )
        selected = frozenset(named)
    if selected != "matmul" and (recipe is None or (recipe.forward is None and recipe.backward is None)):
        raise ArgumentError(
            f"emulate: expected operations with a forward or a backward format; got operations={operations!r} and "
            "neither. Name a format, or leave operations out."
        )
    return selected


def _dtype(precision: object) -> torch.dtype | None:
    if precision is None:
        return None
    name = get(precision).name
    if name not in TRAINING:
        raise ArgumentError(
            f"emulate: expected precision to be one of {', '.join(TRAINING)}; got {precision!r}. Pass a format that "
            f"torch has no arithmetic for as forward= and backward=: emulate(forward={name!r}, ...)."
        )
    return TRAINING[name]


_ALONE: dict[str, object] = {"operations": "matmul", "accumulate": "fp32", "chunk": 1, "lists": CUDA}


def _of_plan(plan: Plan, model: object, others: dict[str, object]) -> Emulation:
    check_alone(others, _ALONE)
    if not isinstance(model, nn.Module):
        raise ArgumentError(
            f"emulate: expected the model of the plan; got {type(model).__name__}. Write emulate(plan, model=model)."
        )
    return PlannedEmulation(plan, model, of_module)


def of_module(plan: ModulePlan) -> Emulation:
    """Return the context of one module of a plan."""
    if is_native(plan):
        return emulate(plan.forward)
    return emulate("fp32", forward=plan.forward, backward=plan.backward, scale=plan.scales or None)
