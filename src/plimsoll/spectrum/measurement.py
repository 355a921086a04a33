"""`measure`: one launch and one copy to the host per device, for all tensors.

`plain` returns the floating data of every kind of tensor, or raises an error with the reason.
"""

import functools
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, TypeVar, cast, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from plimsoll import kernels
from plimsoll.errors import ArgumentError, UnsupportedTensorError
from plimsoll.kernels.operators.checks import check_tensor, fail, refuse
from plimsoll.spectrum.source_format import Source, narrowest
from plimsoll.spectrum.spectrum import Spectrum

# -- the data of a tensor ----------------------------------------------------------------------------------------------

# torch has no public names for these: see `plain`.
_C = cast("Any", torch)._C  # noqa: SLF001
_is_transformed = _C._functorch.is_functorch_wrapped_tensor  # noqa: SLF001


def plain(x: object, place: str) -> Tensor:
    """Return the strided floating tensor whose values are counted, detached.

    It is empty for a replica that another rank counts. `place` is the position of `x` among several, for errors (" at
    index 1").
    """
    if not isinstance(x, Tensor):
        refuse(x, "measure", place)
    with torch.no_grad(), _C.DisableTorchFunctionSubclass():  # a subclass may override any function
        x = _gathered(x, place)
        if _is_transformed(x):
            problem = "a tensor inside a torch.func transform (vmap, grad, jvp), which represents others"
            fail(x, "measure", place, problem, "Return the tensor from the transformed function and measure it there.")
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


# Optional parts of torch (DTensor, functional collectives, fake tensors) are not imported. If their module is not
# loaded, no such tensor exists.
def _kind(module: str, name: str) -> type | None:
    return getattr(sys.modules.get(module), name, None)


# -- its spectrum ------------------------------------------------------------------------------------------------------

Key = TypeVar("Key")


@overload
def measure(x: Tensor, *, block: int | None = None, source: Source | None = None) -> Spectrum: ...
@overload
def measure(
    x: Mapping[Key, Tensor],
    *,
    block: int | None = None,
    source: Source | Mapping[Key, Source | None] | None = None,
) -> dict[Key, Spectrum]: ...
@overload
def measure(
    x: Sequence[Tensor], *, block: int | None = None, source: Source | Sequence[Source | None] | None = None
) -> list[Spectrum]: ...
def measure(x: object, *, block: int | None = None, source: object = None) -> object:
    """Return the spectrum of a tensor, or of each in a list, tuple or mapping.

    Counts and extremes are exact. It reads the result and so waits for the device: in a training step, and under
    `torch.compile`, use `plimsoll.watch`. Of a DTensor it measures the local shard. A replica that another rank counts
    gives an empty spectrum, so that the spectra of all ranks add up to that of the whole tensor.

    Args:
        x: float64, float32, bfloat16, float16 or float8 tensors of any shape, strides and device.
        block: Block length along the last axis (of a shard, for DTensor) for the record that block formats need: 32 for
            MX, 16 for NVFP4, a power of two of at least 2. Default: None, no record.
        source: A narrower format that the values passed through before, one for all or one for each in the same form as
            `x`. Values count as numbers of that format unless the extremes contradict it. Default: None, unknown.

    Returns:
        A `Spectrum`. A list of them for a list or tuple, a dict for a mapping.

    Raises:
        ArgumentError: `block` or `source` does not fit.
        UnsupportedTensorError: A tensor has no floating data. The message names a tensor to measure instead.

    >>> s = measure(torch.tensor([0.0, 0.75, -3.0, float("nan")]))
    >>> s
    <Spectrum: 4 values, |x| 2^-0.415 (0.75) .. 2^1.585 (3), 25 % zero, 1 nonfinite, from fp32>
    >>> (s.min, s.max, s.mean), s.binades[149 - 1], s.binades[149 + 1]
    ((-3.0, 0.75, -0.75), np.int64(1), np.int64(1))
    """
    _check_block(block)
    if isinstance(x, Tensor):
        return _measure_all([x], [""], [_one_source(source)], block)[0]
    if isinstance(x, Mapping):
        named = cast("Mapping[object, object]", x)
        places = [f" under {key!r}" for key in named]
        spectra = _measure_all(list(named.values()), places, _sources_by_key(source, named), block)
        return dict(zip(named, spectra, strict=True))
    if isinstance(x, list | tuple):
        listed = cast("Sequence[object]", x)
        places = [f" at index {index}" for index in range(len(listed))]
        return _measure_all(listed, places, _sources_in_order(source, len(listed)), block)
    return refuse(x, "measure")


def _measure_all(
    tensors: Sequence[object], places: Sequence[str], sources: Sequence[Source | None], block: int | None
) -> list[Spectrum]:
    values = [plain(x, place) for x, place in zip(tensors, places, strict=True)]
    on_device: dict[torch.device, list[int]] = {}
    for index, value in enumerate(values):
        on_device.setdefault(value.device, []).append(index)
    spectra: dict[int, Spectrum] = {}
    for device, indices in on_device.items():
        bank = kernels.new_bank(len(indices), block or 0, device)
        kernels.measure_into([values[i] for i in indices], bank, range(len(indices)), block=block or 0)
        for index, row in zip(indices, bank.cpu().numpy(), strict=True):
            spectra[index] = _from_row(row, values[index].dtype, sources[index], block)
    return [spectra[index] for index in range(len(values))]


def _from_row(row: NDArray[np.int64], dtype: torch.dtype, source: Source | None, block: int | None) -> Spectrum:
    own = _source_of(dtype)
    grid, narrower = own.grid, narrowest(own, source)
    if source is not None and source.grid is not None and grid is not None:
        # The values are numbers of their dtype, and also of the source's format unless the extremes contradict it.
        claimed = Spectrum.from_row(row, narrower, block, grid.intersection(source.grid))
        if claimed.grid is not None:
            return claimed
    return Spectrum.from_row(row, narrower, block, grid)


@functools.cache
def _source_of(dtype: torch.dtype) -> Source:
    return Source(dtype)


def _check_block(block: object) -> None:
    if block is None:
        return
    if isinstance(block, bool) or not isinstance(block, int) or block < 2 or block & (block - 1):
        raise ArgumentError(
            f"measure: expected block to be None or a power of two of 2 or more; got block={block!r}. "
            "MX formats need 32, NVFP4 needs 16."
        )


def _one_source(source: object) -> Source | None:
    if source is None or isinstance(source, Source):
        return source
    raise ArgumentError(
        f"measure: expected source to be a Source or None, or one for each tensor in the same form as x; got "
        f'source={source!r}. Write Source("fp16", scale).'
    )


def _sources_in_order(source: object, number: int) -> list[Source | None]:
    if not isinstance(source, list | tuple):
        return [_one_source(source)] * number
    listed = cast("Sequence[object]", source)
    if len(listed) != number:
        raise ArgumentError(
            f"measure: expected one source for each of {number} tensors; got {len(listed)} sources. "
            "Pass None where nothing is known."
        )
    return [_one_source(item) for item in listed]


def _sources_by_key(source: object, named: Mapping[object, object]) -> list[Source | None]:
    if not isinstance(source, Mapping):
        return [_one_source(source)] * len(named)
    by_key = cast("Mapping[object, object]", source)
    unknown = sorted(repr(key) for key in by_key if key not in named)
    if unknown:
        raise ArgumentError(
            f"measure: expected sources for tensors that are measured; got sources for {', '.join(unknown)}. "
            "A tensor without one needs no key."
        )
    return [_one_source(by_key.get(key)) for key in named]
