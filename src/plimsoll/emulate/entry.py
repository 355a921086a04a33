"""`emulate`: training as on hardware that this machine is not."""

import os
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from plimsoll.emulate.casting.operation_lists import CUDA, OperationLists, operation_name
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
    """Return a context in which operations compute as other hardware would, forward and backward.

    ``emulate("fp16")`` and ``emulate("bf16")``: a GPU's 16-bit numerics on torch's own 16-bit tensors. Operations are
    cast as `torch.autocast("cuda")` casts them (`lists`; None casts nothing, for a model that is 16-bit itself), and
    matrix products and convolutions compute in FP32 and round once to the 16-bit dtype, as tensor cores do, at close to
    the speed of FP32. ``emulate("fp32")`` is a region without emulation inside another.

    ``emulate(forward="e4m3", backward="e5m2")``: the operands of products are rounded to formats that the machine
    lacks, weights and activations to `forward`, gradients to `backward`; the tensors stay in their dtype. With a
    precision too, everything else is as there: ``emulate("bf16", forward="e4m3", backward="e5m2")``.

    ``emulate("plan.toml", model=model)``: each module that the plan names computes in its formats, at its scales; all
    else is as it is outside. A plan's loss scale is not applied: it belongs to the training loop (`Plan.scale`).

    A backward of what was recorded inside computes likewise, also after the context has ended. It holds for the thread
    that opened it. Nothing is left behind. Code of torch.compile runs eagerly inside.

    Args:
        precision: "fp16", "bf16" or "fp32"; or a `Plan`, or its file.
        model: the model of a plan.
        forward: any format, block formats too; None leaves the direction as it is. Blocks run along the axis that a
            product sums over.
        backward: likewise, for gradients.
        operations: where formats act. "matmul": at the operands of every product, convolution, and of attention. A name
            or several: of those products alone; the results of other operations that are named are rounded, and the
            gradients that come back to them. "all": the operands of products, and the result of every operation.
        accumulate: the format that products are summed in: "fp32", or any other, to see what it loses: slow.
        chunk: with such an accumulator, so many neighbouring products are added exactly before they are added to it
            and the sum is rounded; in order, from the first to the last.
        lists: what a 16-bit precision casts, and to what; None: nothing.
        cast_arguments: rounding, saturate, scale, scale_rule and generator of `plimsoll.cast`. `scale` may be a mapping
            too, by "weights", "activations" and "gradients"; a parameter among the operands is a weight.

    Raises `ArgumentError`, and `FormatError` for a format that does not exist.

    >>> import plimsoll as pl
    >>> x = torch.full((1, 4096), 0.1)
    >>> with pl.emulate("fp16") as e:
    ...     y = x @ x.T
    >>> y.item(), y.dtype, e.operations.emulated
    (40.9375, torch.float16, {'matmul': 1})
    >>> with pl.emulate("fp16", accumulate="fp16"):  # from 32 on, FP16 cannot add 0.01 any more
    ...     (x @ x.T).item()
    32.0
    """
    if isinstance(precision, Plan | os.PathLike) or (isinstance(precision, str) and precision.endswith(".toml")):
        given = {"forward": forward, "backward": backward, "operations": operations, "accumulate": accumulate,
                 "chunk": chunk, "lists": lists, **cast_arguments}  # fmt: skip
        return _of_plan(plan_of("emulate", precision), model, given)
    if model is not None:
        raise ArgumentError(
            f"emulate: expected a model with a plan only; got {type(model).__name__} with precision={precision!r}. "
            "Leave it out: the context holds for whatever runs inside."
        )
    low = _dtype(precision)
    found = recipe(forward, backward, accumulate, chunk, cast_arguments)
    if low is None and found is None:
        raise ArgumentError(
            "emulate: expected a precision, a format or an accumulator; got none. Write emulate('fp16'), or "
            "emulate(forward='e4m3', backward='e5m2')."
        )
    if lists is not CUDA and low in (None, torch.float32):
        raise ArgumentError(
            "emulate: expected lists with precision 'fp16' or 'bf16', which they cast to; got "
            f"precision={precision!r}. Name one, or leave lists out."
        )
    names = _selection(operations, found)
    if found is not None and found.scales and names != "matmul":
        raise ArgumentError(
            f"emulate: expected scales by role where only products are rounded; got operations={operations!r}. Give "
            "one scale, or leave operations out."
        )
    return Emulation(low=low, recipe=found, operations=names, lists=lists)


def _selection(operations: str | Iterable[object], recipe: Recipe | None) -> "str | frozenset[str]":
    if isinstance(operations, str) and operations in ("matmul", "all"):
        selected: str | frozenset[str] = operations
    else:
        given = (operations,) if isinstance(operations, str) or callable(operations) else operations
        selected = frozenset(operation_name(one, "emulate") for one in given)
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
            f"emulate: expected precision to be one of {', '.join(TRAINING)}; got {precision!r}. A format that torch "
            f"has no arithmetic for goes to forward= and backward=: emulate(forward={name!r}, ...)."
        )
    return TRAINING[name]


_ALONE: dict[str, object] = {"operations": "matmul", "accumulate": "fp32", "chunk": 1, "lists": CUDA}


def _of_plan(plan: Plan, model: object, given: dict[str, object]) -> Emulation:
    check_alone(given, _ALONE)
    if not isinstance(model, nn.Module):
        raise ArgumentError(
            f"emulate: expected the model that the plan speaks of; got {type(model).__name__}. Write emulate(plan, "
            "model=model)."
        )
    return PlannedEmulation(plan, model, of_module)


def of_module(said: ModulePlan) -> Emulation:
    """Return the context of one module of a plan: torch's own formats as such, others at the operands of products."""
    if is_native(said):
        return emulate(said.forward)
    return emulate("fp32", forward=said.forward, backward=said.backward, scale=said.scales or None)
