"""Operators ``plimsoll::*``: schemas, fakes, rules for vmap, and calls of a backend.

`measure_`, `count_nonfinite_` and `update_` mutate what they count into and return nothing; they allocate nothing of
the tensors' size. `unscale_` mutates the gradients too. The `*_out` forms mutate `out`. None of them carries a
gradient, whatever the tensors require: autograd is `plimsoll.rounding`'s business.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from plimsoll import row_layout
from plimsoll.errors import ArgumentError, UnsupportedTensorError
from plimsoll.kernels import backend
from plimsoll.kernels.dtypes import FLOATING
from plimsoll.kernels.operators import fp8_cast
from plimsoll.kernels.operators.cast_spec import BlockSpec, CastArguments, CastSpec
from plimsoll.kernels.operators.checks import check_unscale

# The operators are opaque to compilers: a graph holds the call, eager and compiled results are the same bits, and
# Inductor gets no chance to remove a rounding. Formats travel as integers (`cast_spec`), scales and keys as numbers or
# as 0-d tensors that only the kernel reads, so nothing here synchronises with a device.
_ops = torch.ops.plimsoll
_library = torch.library.Library("plimsoll", "DEF")
_MEASURE = "Tensor[] tensors, Tensor(a!) bank, int[] rows, bool accumulate, int block"
_UPDATE = "Tensor[] old, Tensor[] new, Tensor[] pushes, Tensor(a!) bank, int[] rows, Tensor(b!) moves"
# What every cast takes beside the tensor: the spec, a scale (number or tensor), a seed (number or key tensor).
_CAST = "int[] spec, float scale, Tensor? scale_tensor, int seed, Tensor? key"
_BLOCK = "int[] spec, Tensor? tensor_scale, float scale, Tensor? scale_tensor, int seed, Tensor? key"
_UNSCALE = "Tensor(a!)[] gradients, Tensor inverse_scale, Tensor(b!) found_inf, Tensor(c!)? bank, int[] rows"
_TAGS = (torch.Tag.pt2_compliant_tag,)


def _measure(tensors: Sequence[Tensor], bank: Tensor, rows: Sequence[int], accumulate: bool, block: int) -> None:
    backend.choose(bank).measure(tensors, bank, rows, accumulate, block)


def update(
    old: Sequence[Tensor],
    new: Sequence[Tensor],
    pushes: Sequence[Tensor],
    bank: Tensor,
    rows: Sequence[int],
    moves: Tensor,
) -> None:
    """Count updates as ``update_``, for eager calls past torch's dispatcher."""
    for before, after, push in zip(old, new, pushes, strict=True):
        if before.shape != after.shape or before.dtype != after.dtype or (push.numel() and push.shape != after.shape):
            raise ArgumentError(
                "update_: expected old and new values of one dtype and shape, and a push of that shape or an empty "
                f"one; got {before.dtype} {tuple(before.shape)}, {after.dtype} {tuple(after.shape)} and "
                f"{tuple(push.shape)}. Give the tensors of one parameter."
            )
    backend.choose(bank).update(old, new, pushes, bank, rows, moves)


def unscale(
    gradients: Sequence[Tensor], inverse_scale: Tensor, found_inf: Tensor, bank: Tensor | None, rows: Sequence[int]
) -> None:
    """Unscale as ``unscale_``, for eager calls past torch's dispatcher."""
    check_unscale(gradients, inverse_scale, found_inf, bank, rows)
    backend.choose(found_inf).unscale(gradients, inverse_scale, found_inf, bank, rows)
    torch.autograd.graph.increment_version(gradients)  # what autograd saved of them it must not use now


def _count_nonfinite(tensors: Sequence[Tensor], counts: Tensor, index: int) -> None:
    backend.choose(counts).count_nonfinite(tensors, counts, index)


def _element_arguments(spec: list[int], *numbers: Any) -> CastArguments[CastSpec]:
    return CastArguments(CastSpec(*spec), *numbers)


def _block_arguments(spec: list[int], tensor_scale: Tensor | None, *numbers: Any) -> CastArguments[BlockSpec]:
    return CastArguments(BlockSpec.from_ints(spec), *numbers)._replace(tensor_scale=tensor_scale)


def _cast_into(x: Tensor, *arguments: Any) -> None:
    *numbers, out = arguments
    if x.numel():
        backend.choose(x).cast(x, out, _element_arguments(*numbers))


def _block_cast_into(x: Tensor, *arguments: Any) -> None:
    *numbers, out = arguments
    if x.numel():
        backend.choose(x).block_cast(x, out, _block_arguments(*numbers))


def _out(cast_into: Callable[..., None]) -> Callable[..., None]:
    """Return a cast into a tensor of the caller.

    It may be `x`, or another view of its memory.
    """

    def cast_out(x: Tensor, *arguments: Any) -> None:
        *numbers, out = arguments
        one_memory = x.untyped_storage().data_ptr() == out.untyped_storage().data_ptr()
        alike = (x.data_ptr(), x.stride(), x.dtype) == (out.data_ptr(), out.stride(), out.dtype)
        # Backends may read a value of another view after they have written there.
        written = torch.empty_like(out) if one_memory and not alike else out
        cast_into(x, *numbers, written)
        if written is not out:
            out.copy_(written)
        torch.autograd.graph.increment_version(out)  # what autograd saved of it it must not use now

    return cast_out


def _cast(x: Tensor, *arguments: Any) -> Tensor:
    out = _fake_like(x, *arguments)
    _cast_into(x, *arguments[:-1], out)
    return out


def _block_cast(x: Tensor, *arguments: Any) -> Tensor:
    out = _fake_like(x, *arguments)
    _block_cast_into(x, *arguments[:-1], out)
    return out


def _pack(x: Tensor, *arguments: Any) -> Tensor:
    cast_arguments = _element_arguments(*arguments)
    codes = _empty_codes(x, cast_arguments.spec)
    if x.numel():
        backend.choose(x).pack(x, codes, cast_arguments)
    return codes


def _block_pack(x: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    cast_arguments = _block_arguments(*arguments)
    codes, scales = _empty_codes(x, cast_arguments.spec.element), _empty_scales(x, cast_arguments.spec)
    if x.numel():
        backend.choose(x).block_pack(x, codes, scales, cast_arguments)
    return codes, scales


def _absmax(x: Tensor) -> Tensor:
    """Return the largest finite magnitude or 0, as a float64 on x's device.

    It allocates no more than a row.
    """
    if x.device.type == "cpu" and x.dtype in FLOATING and x.numel():
        lowest, highest = torch.aminmax(x)
        largest = torch.maximum(-lowest, highest).to(torch.float64)
        if largest.isfinite():  # else there are NaN or Inf among the values, which a measurement leaves out
            return largest
    bank = torch.zeros((1, row_layout.NARROW), dtype=torch.int64, device=x.device)
    _measure([x], bank, [0], True, 0)
    return bank[0, row_layout.POSITIVE : row_layout.NEGATIVE + 1].amax().view(torch.float64)


def _empty_codes(x: Tensor, spec: CastSpec) -> Tensor:
    """Return room for codes: two a byte of 4 bits, one a byte to 8, else 16 bits."""
    bits = spec.format.bits
    columns = (x.shape[1] + 1) // 2 if bits == 4 else x.shape[1]
    return torch.empty((x.shape[0], columns), dtype=torch.uint8 if bits <= 8 else torch.uint16, device=x.device)


def _empty_scales(x: Tensor, block: BlockSpec) -> Tensor:
    return torch.empty((x.shape[0], -(-x.shape[1] // block.block)), dtype=torch.uint8, device=x.device)


def _fake_nothing(*_: object) -> None:
    return None


def _fake_absmax(x: Tensor) -> Tensor:
    return torch.empty((), dtype=torch.float64, device=x.device)


def _fake_like(x: Tensor, *arguments: object) -> Tensor:
    dtype = arguments[-1]
    assert isinstance(dtype, torch.dtype)  # the schema says so
    return torch.empty(x.shape, dtype=dtype, device=x.device)


def _fake_pack(x: Tensor, spec: list[int], *_: object) -> Tensor:
    return _empty_codes(x, CastSpec(*spec))


def _fake_block_pack(x: Tensor, spec: list[int], *_: object) -> tuple[Tensor, Tensor]:
    block = BlockSpec.from_ints(spec)
    return _empty_codes(x, block.element), _empty_scales(x, block)


# -- rules for `torch.func.vmap`: the batch becomes a dimension, or rows, of a call ------------------------------------

# With stochastic rounding each example of a batch draws noise of its own, by its place in the batch.


def _front(info: Any, dims: tuple[Any, ...], arguments: tuple[Any, ...], operation: str) -> Tensor:
    """The batched tensor with the batch first; scales and keys may not be batched."""
    for dim, value in zip(dims[1:], arguments[1:], strict=True):
        if isinstance(value, Tensor) and dim is not None:
            raise UnsupportedTensorError(
                f"{operation}: expected one scale and one key for the whole batch under vmap; got one for each of "
                f"{info.batch_size} examples. Multiply before and divide after instead."
            )
    return arguments[0].movedim(dims[0], 0)


def _vmap_cast(info: Any, dims: tuple[Any, ...], *arguments: Any) -> tuple[Tensor, int]:
    return _ops.cast(_front(info, dims, arguments, "cast"), *arguments[1:]), 0


def _vmap_pack(info: Any, dims: tuple[Any, ...], *arguments: Any) -> tuple[Tensor, int]:
    x = _front(info, dims, arguments, "pack")
    return _ops.pack(x.flatten(0, 1), *arguments[1:]).unflatten(0, x.shape[:2]), 0


def _vmap_absmax(_: Any, dims: tuple[Any, ...], x: Tensor) -> tuple[Tensor, int]:
    return torch.stack([_ops.absmax(example) for example in x.unbind(dims[0])]), 0


def _over_blocks(operation: Callable[..., Any]) -> Callable[..., Any]:
    def rule(info: Any, dims: tuple[Any, ...], *arguments: Any) -> Any:
        _, spec, over, scale, scale_tensor, seed, key, *dtype = arguments
        x = _front(info, (*dims[:2], None, *dims[3:]), arguments, "cast")
        if dims[2] is not None:  # each example has a tensor scale of its own, and a key
            results = [
                operation(example, spec, own, scale, scale_tensor, seed ^ i, None if key is None else key ^ i, *dtype)
                for i, (example, own) in enumerate(zip(x, over.unbind(dims[2]), strict=True))
            ]
            if isinstance(results[0], Tensor):
                return torch.stack(results), 0
            return tuple(torch.stack(parts) for parts in zip(*results, strict=True)), (0, 0)
        result = operation(x.flatten(0, 1), spec, over, scale, scale_tensor, seed, key, *dtype)
        if isinstance(result, Tensor):
            return result.unflatten(0, x.shape[:2]), 0
        return tuple(part.unflatten(0, x.shape[:2]) for part in result), (0, 0)

    return rule


# -- registration ------------------------------------------------------------------------------------------------------


def without_autograd(library: torch.library.Library, name: str, implementation: Callable[..., Any]) -> None:
    """Register an operator's implementation, whose results require no gradient.

    Those of the arguments do not matter.
    """
    # Without a kernel for autograd, torch's fallback gives floating-point results a gradient function that only warns.
    # Falling through avoids that. Autograd is then still on inside the implementation, and would record what a backend
    # computes with torch's operators: `no_grad` keeps it from that.
    library.impl(name, torch.library.fallthrough_kernel, "Autograd")
    library.impl(name, torch.no_grad()(implementation), "CompositeExplicitAutograd")


_OPERATORS = (
    ("measure_", f"({_MEASURE}) -> ()", _measure, _fake_nothing),
    ("count_nonfinite_", "(Tensor[] tensors, Tensor(a!) counts, int index) -> ()", _count_nonfinite, _fake_nothing),
    ("unscale_", f"({_UNSCALE}) -> ()", unscale, _fake_nothing),
    ("update_", f"({_UPDATE}) -> ()", update, _fake_nothing),
    ("absmax", "(Tensor x) -> Tensor", _absmax, _fake_absmax),
    ("cast", f"(Tensor x, {_CAST}, ScalarType dtype) -> Tensor", _cast, _fake_like),
    ("cast_out", f"(Tensor x, {_CAST}, Tensor(a!) out) -> ()", _out(_cast_into), _fake_nothing),
    ("block_cast", f"(Tensor x, {_BLOCK}, ScalarType dtype) -> Tensor", _block_cast, _fake_like),
    ("block_cast_out", f"(Tensor x, {_BLOCK}, Tensor(a!) out) -> ()", _out(_block_cast_into), _fake_nothing),
    ("pack", f"(Tensor x, {_CAST}) -> Tensor", _pack, _fake_pack),
    ("block_pack", f"(Tensor x, {_BLOCK}) -> (Tensor, Tensor)", _block_pack, _fake_block_pack),
    ("fp8_cast", fp8_cast.SCHEMA, fp8_cast.run_cast, fp8_cast.empty_codes),
    ("keep", "(Tensor x) -> Tensor", torch.clone, torch.empty_like),
)  # fmt: skip

for _name, _schema, _implementation, _fake in _OPERATORS:
    _library.define(_name + _schema, tags=_TAGS)
    without_autograd(_library, _name, _implementation)
    torch.library.register_fake(f"plimsoll::{_name}", _fake, lib=_library)

_VMAP_RULES = {
    "cast": _vmap_cast,
    "pack": _vmap_pack,
    "absmax": _vmap_absmax,
    "block_cast": _over_blocks(_ops.block_cast),
    "block_pack": _over_blocks(_ops.block_pack),
}
for _name, _rule in _VMAP_RULES.items():
    torch.library.register_vmap(f"plimsoll::{_name}", _rule, lib=_library)
