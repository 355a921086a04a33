"""What can be measured: brings each kind of tensor to plain floating data, or says why there is none.

Optional parts of torch (DTensor, functional collectives, fake tensors) are looked up only where they are imported
already: a tensor of a kind cannot be at hand before its module is.
"""

import sys
from typing import Any, NoReturn, cast

import torch
from torch import Tensor

from plimsoll.errors import UnsupportedTensorError
from plimsoll.kernels.operators.checks import check_tensor, fail, refuse

# Two facts that torch tells nowhere in public: see `_gathered` and `_check_data`.
_C = cast("Any", torch)._C  # noqa: SLF001
_is_transformed = _C._functorch.is_functorch_wrapped_tensor  # noqa: SLF001


def plain(x: object, place: str) -> Tensor:
    """The strided floating tensor, detached, whose values are to be counted; `place` says where `x` stands, for errors.

    Of a replica that another rank counts, none of the values.
    """
    if not isinstance(x, Tensor):
        refuse(x, "measure", place)
    with torch.no_grad(), _C.DisableTorchFunctionSubclass():  # a subclass's own functions may do anything
        x = _gathered(x, place)
        _check_data(x, place)
        check_tensor(x, "measure", place)
        return x.detach().resolve_neg()


def _gathered(x: Tensor, place: str) -> Tensor:
    """The tensor itself, or the one that a known wrapper stands for; a plain subclass without its own behaviour."""
    sharded = _kind("torch.distributed.tensor", "DTensor")
    if sharded is not None and isinstance(x, sharded):
        return _gathered(_local(x, place), place)
    waiting = _kind("torch.distributed._functional_collectives", "AsyncCollectiveTensor")
    if waiting is not None and isinstance(x, waiting):
        return _gathered(cast("Any", x).wait(), place)
    fake = _kind("torch._subclasses.fake_tensor", "FakeTensor")
    if x.is_meta or (fake is not None and isinstance(x, fake)):
        fail(x, "measure", place, "one without data" + (", on the meta device" if x.is_meta else ", a FakeTensor"),
              "Measure it once it is materialised.")  # fmt: skip
    if type(x) is Tensor or x.is_nested:
        return x
    if torch.nn.parameter.is_lazy(x):
        _fail_lazy(x, place)
    if hasattr(type(x), "__tensor_flatten__") or _is_hollow(x):
        remedy = "Measure x.dequantize() if it has one, or the tensors that it wraps."
        fail(x, "measure", place, f"a {type(x).__qualname__}, which wraps others and has no data of its own", remedy)
    return x.detach().as_subclass(Tensor)


def _fail_lazy(x: Tensor, place: str) -> NoReturn:
    raise UnsupportedTensorError(
        f"measure: expected a tensor of plain floating values; got a {type(x).__qualname__}{place} ({x.dtype}), which "
        "has no shape yet. Run the module once."
    )


def _is_hollow(x: Tensor) -> bool:
    """Whether a subclass only pretends to a shape, as those made by ``_make_wrapper_subclass`` do."""
    if x.layout != torch.strided or x.is_quantized:
        return False
    try:
        return bool(x.numel()) and x.data_ptr() == 0
    except RuntimeError:  # what some of them answer
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
        remedy = "Return the tensor from the transformed function and measure it there."
        fail(
            x,
            "measure",
            place,
            "a tensor inside a torch.func transform (vmap, grad, jvp), which stands for others",
            remedy,
        )


def _kind(module: str, name: str) -> type | None:
    return getattr(sys.modules.get(module), name, None)
