"""Plain floating data of every kind of tensor, or an error with the reason."""

import sys
from typing import Any, NoReturn, cast

import torch
from torch import Tensor

from plimsoll.errors import UnsupportedTensorError
from plimsoll.kernels.operators.checks import check_tensor, fail, refuse

# torch has no public names for these: see `_gathered` and `_check_data`.
_C = cast("Any", torch)._C  # noqa: SLF001
_is_transformed = _C._functorch.is_functorch_wrapped_tensor  # noqa: SLF001


def plain(x: object, place: str) -> Tensor:
    """Return the strided floating tensor whose values are counted, detached.

    It is empty for a replica that another rank counts.

    Args:
        x: The user's value.
        place: Position of `x` among several, for errors: " at index 1".

    Raises:
        UnsupportedTensorError: There is no floating data to count.
    """
    if not isinstance(x, Tensor):
        refuse(x, "measure", place)
    with torch.no_grad(), _C.DisableTorchFunctionSubclass():  # a subclass may override any function
        x = _gathered(x, place)
        _check_data(x, place)
        check_tensor(x, "measure", place)
        return x.detach().resolve_neg()


def _gathered(x: Tensor, place: str) -> Tensor:
    """Return the tensor, or the one in a known wrapper, as a plain tensor."""
    sharded = _kind("torch.distributed.tensor", "DTensor")
    if sharded is not None and isinstance(x, sharded):
        return _gathered(_local(x, place), place)
    waiting = _kind("torch.distributed._functional_collectives", "AsyncCollectiveTensor")
    if waiting is not None and isinstance(x, waiting):
        return _gathered(cast("Any", x).wait(), place)
    fake = _kind("torch._subclasses.fake_tensor", "FakeTensor")
    if x.is_meta or (fake is not None and isinstance(x, fake)):
        kind = "on the meta device" if x.is_meta else "a FakeTensor"
        fail(x, "measure", place, f"one without data, {kind}", "Measure it after it is materialized.")
    if type(x) is Tensor or x.is_nested:
        return x
    if torch.nn.parameter.is_lazy(x):
        _fail_lazy(x, place)
    if hasattr(type(x), "__tensor_flatten__") or _is_hollow(x):
        remedy = "Measure x.dequantize() if it has one, or the tensors that it wraps."
        fail(x, "measure", place, f"a {type(x).__qualname__}, which wraps others and has no data itself", remedy)
    return x.detach().as_subclass(Tensor)


def _fail_lazy(x: Tensor, place: str) -> NoReturn:
    raise UnsupportedTensorError(
        f"measure: expected a tensor of plain floating values; got a {type(x).__qualname__}{place} ({x.dtype}), which "
        "has no shape yet. Run the module once."
    )


def _is_hollow(x: Tensor) -> bool:
    """Return whether a subclass has a shape without data."""
    # `_make_wrapper_subclass` makes such tensors.
    if x.layout != torch.strided or x.is_quantized:
        return False
    try:
        return bool(x.numel()) and x.data_ptr() == 0
    except RuntimeError:  # some of these subclasses raise in data_ptr
        return True


def _local(x: Tensor, place: str) -> Tensor:
    sharded = cast("Any", x)
    if any(placement.is_partial() for placement in sharded.placements):
        problem = f"a DTensor with a Partial placement, {sharded.placements}, whose values are not summed yet"
        fail(x, "measure", place, problem, "Redistribute it first: x.redistribute(placements=[Replicate()]).")
    local: Tensor = sharded.detach().to_local()
    where = sharded.device_mesh.get_coordinate()
    counts = where is not None and all(
        coordinate == 0
        for coordinate, placement in zip(where, sharded.placements, strict=True)
        if placement.is_replicate()
    )
    return local if counts else local.new_empty(0)


def _check_data(x: Tensor, place: str) -> None:
    if _is_transformed(x):
        problem = "a tensor inside a torch.func transform (vmap, grad, jvp), which represents others"
        fail(x, "measure", place, problem, "Return the tensor from the transformed function and measure it there.")


# Optional parts of torch (DTensor, functional collectives, fake tensors) are not imported. If their module is not
# loaded, no such tensor exists.
def _kind(module: str, name: str) -> type | None:
    return getattr(sys.modules.get(module), name, None)
