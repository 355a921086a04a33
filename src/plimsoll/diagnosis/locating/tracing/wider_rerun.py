"""An operation again in a wider format: its result if its range were enough."""

from typing import Any, cast

import torch
from torch import Tensor

from plimsoll.tracing.operation_schema import Facts
from plimsoll.tracing.tensors import tensors_in

_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.float32: torch.float64}


def wider(dtype: torch.dtype) -> torch.dtype | None:
    """The dtype that an operation is repeated in; None of FP64."""
    return torch.float32 if dtype.is_floating_point and dtype.itemsize == 1 else _WIDER.get(dtype)


def wide_results(facts: Facts, func: Any, given: dict[str, Any], narrow: torch.dtype) -> list[Tensor]:
    """Return the operation's results in their order, in the dtype above `narrow`.

    None where it draws random numbers, or does not run in that dtype. `given` are its arguments as they were before.
    """
    dtype = wider(narrow)
    if dtype is None or facts.random or facts.collective:
        return []
    if facts.cast:
        source = given.get("src", given.get("self"))
        return [source.detach().to(dtype)] if isinstance(source, Tensor) and source.is_floating_point() else []
    wide = {name: _widened(value, dtype) for name, value in given.items()}
    try:
        result = func(**_by_place(func, wide))
    except (RuntimeError, TypeError, NotImplementedError):
        return []
    written = [wide[name] for name in facts.names if name in facts.written and name in wide]
    return unique([*tensors_in(result), *tensors_in(written)])


def unique(tensors: list[Tensor]) -> list[Tensor]:
    """Each once, in their order."""
    return list({id(x): x for x in tensors}.values())


def _by_place(func: Any, wide: dict[str, Any]) -> dict[str, Any]:
    known = {argument.name for argument in func._schema.arguments}  # noqa: SLF001
    return {name: value for name, value in wide.items() if name in known}


def _widened(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to(dtype, copy=True) if value.is_floating_point() else value.detach()
    if isinstance(value, torch.dtype):
        return dtype if value.is_floating_point else value
    if isinstance(value, list | tuple):
        return [_widened(item, dtype) for item in cast("list[Any]", value)]
    return value
