"""Tensors and arrays as float64 and back, by the codec alone, and their comparison."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from plimsoll.certification.certificate import Counterexample, Outcome
from plimsoll.errors import FormatError
from plimsoll.formats import BlockFormat, Format, get_element
from plimsoll.kernels.dtypes import FORMATS

Values = NDArray[np.float64]


class CallFailedError(Exception):
    """An error of the function, or an unreadable result; the text says which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A result as values."""

    values: Values  # in the result's shape
    dtype: str  # name of the dtype that they came in, "codes" of a packed result
    scales: Values | None = None  # of a packed result: the scales of its blocks, times that of the tensor
    parts: tuple[str, ...] = ()  # roles of the parts of a packed result, in their order; a `Packed` has none


def element_of(fmt: Format | BlockFormat) -> Format:
    """Return the format of single values."""
    return fmt.element if isinstance(fmt, BlockFormat) else fmt


def read_values(returned: Any) -> Result:
    """Return the values of a tensor, an array or a number."""
    if isinstance(returned, Tensor):
        return Result(values=_of_tensor(returned), dtype=str(returned.dtype).removeprefix("torch."))
    if isinstance(returned, (np.ndarray, np.generic)):
        array: NDArray[Any] = np.asarray(cast("Any", returned))
        return Result(values=_of_array(array), dtype=array.dtype.name)
    if isinstance(returned, (int, float)) and not isinstance(returned, bool):
        dtype = "float64" if isinstance(returned, float) else "int"  # "float" is FP32 to torch
        return Result(values=np.asarray(float(returned)), dtype=dtype)
    raise CallFailedError(f"it returns {_kind(returned)}")


def read_codes(returned: Any) -> NDArray[np.int64]:
    """Return the bit patterns of a tensor or an array: integers as they are, floats of up to 16 bits by bits."""
    if isinstance(returned, Tensor):
        tensor = returned.detach().cpu().contiguous()
        if tensor.dtype.is_floating_point or tensor.dtype.itemsize == 1:
            if tensor.dtype.itemsize > 2:
                raise CallFailedError(f"it returns {tensor.dtype} where codes were expected")
            tensor = tensor.view(torch.uint8 if tensor.dtype.itemsize == 1 else torch.uint16)
        return tensor.numpy().astype(np.int64)
    if isinstance(returned, np.ndarray):
        array = cast("NDArray[Any]", returned)
        if array.dtype.kind not in "iu" or array.dtype.itemsize == 1:
            if array.dtype.itemsize > 2:
                raise CallFailedError(f"it returns {array.dtype} where codes were expected")
            array = np.ascontiguousarray(array).view(np.uint8 if array.dtype.itemsize == 1 else np.uint16)
        return array.astype(np.int64)
    raise CallFailedError(f"it returns {_kind(returned)} where codes were expected")


def format_of_dtype(name: str) -> Format | None:
    """Return the format of torch's or ml_dtypes' dtype name; None for integers."""
    try:
        return get_element(name, "certify")
    except FormatError:
        return None


def tensor_of(values: Values, dtype: torch.dtype) -> Tensor:
    """Return a new tensor of values that the dtype holds exactly."""
    return torch.from_numpy(np.array(values, np.float64)).to(dtype)


def to_numpy(tensor: Tensor) -> Any:
    """Return a tensor as a NumPy array; dtypes that NumPy lacks as those of ml_dtypes."""
    local = tensor.cpu()
    name = str(local.dtype).removeprefix("torch.")
    if local.dtype != torch.bfloat16 and not (local.dtype.is_floating_point and local.dtype.itemsize == 1):
        return local.numpy()
    # Without ml_dtypes BF16 becomes float32, which holds it.
    try:
        import ml_dtypes  # pyright: ignore[reportMissingTypeStubs]

        words = local.contiguous().view(torch.uint16 if local.dtype.itemsize == 2 else torch.uint8)
        return words.numpy().view(getattr(ml_dtypes, name))
    except (ImportError, AttributeError) as error:
        if local.dtype == torch.bfloat16:
            return local.float().numpy()
        raise CallFailedError(f"NumPy has no arrays of {name}") from error


def held(values: Values, dtype: str) -> Values:
    """Return values in a dtype: to nearest even, with its format's default overflow."""
    fmt = format_of_dtype(dtype)
    if fmt is None or fmt.bits == 64:
        return values
    if fmt.bits == 32:
        with np.errstate(over="ignore"):
            return values.astype(np.float32).astype(np.float64)
    nan = np.isnan(values)
    return np.where(nan, np.nan, fmt.decode(fmt.encode(np.where(nan, 0.0, values))))


def _of_tensor(tensor: Tensor) -> Values:
    local = tensor.detach() if tensor.is_meta else tensor.detach().cpu()
    if local.is_meta or local.dtype.is_complex or local.dtype == torch.bool or local.layout != torch.strided:
        raise CallFailedError(
            f"it returns a tensor of {local.dtype}, layout {local.layout}, device {local.device.type}"
        )
    fmt = FORMATS.get(local.dtype)
    if fmt is not None and fmt.bits <= 8:
        return fmt.decode(local.contiguous().view(torch.uint8).numpy())
    try:
        return local.to(torch.float64).numpy()
    except (RuntimeError, TypeError) as error:
        raise CallFailedError(f"it returns a tensor of {local.dtype}, which has no values") from error


def _of_array(array: NDArray[Any]) -> Values:
    fmt = format_of_dtype(array.dtype.name)
    if fmt is not None and fmt.bits <= 8:
        return fmt.decode(np.ascontiguousarray(array).view(np.uint8).reshape(array.shape))
    try:
        with np.errstate(invalid="ignore"):  # signalling NaN
            return array.astype(np.float64)  # the other floats of ml_dtypes too
    except (TypeError, ValueError) as error:
        raise CallFailedError(f"it returns an array of {array.dtype}, which has no values") from error


def _kind(returned: object) -> str:
    if isinstance(returned, (tuple, list)):
        count = len(returned)  # pyright: ignore[reportUnknownArgumentType]
        return f"a {type(returned).__name__} of {count}"  # pyright: ignore[reportUnknownArgumentType]
    return f"an object of type {type(returned).__name__}"


# -- comparisons: right places, the number wrong, and the best input ---------------------------------------------------

Mask = NDArray[np.bool_]
Place = tuple[int, ...]


def same(found: Values, expected: Values) -> Mask:
    """Return where two arrays are equal; a NaN equals a NaN, and zero's sign counts."""
    both_nan = np.isnan(found) & np.isnan(expected)
    return both_nan | ((found == expected) & (np.signbit(found) == np.signbit(expected)))


def compared(
    found: Values,
    expected: Values,
    shown: Callable[[Place], tuple[object, str]],
    *,
    where: Mask | None = None,
    right: Mask | None = None,
    order: Values | None = None,
) -> Outcome:
    """Return the outcome of a comparison, with one wrong result as its counterexample.

    `shown` returns input and note of a counterexample at an index of the results. Judged are the results at `where`;
    those at `right` are right, by default where both are the same. Shown is the wrong result of the shortest value in
    `order`, by default the first one.
    """
    right = same(found, expected) if right is None else right
    where = np.ones(right.shape, np.bool_) if where is None else where
    tried, wrong = int(np.count_nonzero(where)), np.argwhere(where & ~right)
    if not len(wrong):
        return Outcome(tried=tried)
    place: Place = tuple(wrong[0 if order is None else shortest(order[tuple(wrong.T)])].tolist())
    value, note = shown(place)
    return deviation(value, float(expected[place]), float(found[place]), note, tried=tried, wrong=len(wrong))


def deviation(
    input: object,  # noqa: A002  (the field's name)
    expected: object,
    got: object,
    note: str = "",
    *,
    tried: int = 1,
    wrong: int = 1,
    detail: str = "",
) -> Outcome:
    """Return the outcome of a check that failed, with its counterexample."""
    example = Counterexample(input=input, expected=expected, got=got, note=note)
    return Outcome(tried=tried, wrong=wrong, counterexample=example, detail=detail)


def attempted(what: str, check: Callable[[], Outcome]) -> Outcome:
    """Return a check's outcome, or a refusal if the function raises an error."""
    try:
        return check()
    except CallFailedError as error:
        return replace(deviation("a tensor", "a result", str(error), what), refused=f"{what}: {error}")


def shortest(values: Values, *ties: NDArray[np.generic]) -> int:
    """Return the index of the value that is shortest to write, always the same one.

    Finite values come first. Of these the ones with the fewest significant bits do, where eight powers of two away
    from 1 count as much as a bit. Then positive ones and the keys in `ties` decide.

    >>> shortest(np.array([1.3, -2.5, 2.5, 1e30]))
    2
    """
    finite = np.where(np.isfinite(values), np.abs(values), 0.0)
    mantissa, exponent = np.frexp(finite)
    whole = np.ldexp(mantissa, 53).astype(np.int64)
    lowest = (whole & -whole).astype(np.float64)
    significant = 53 - np.log2(np.where(lowest > 0, lowest, 2.0**53)).astype(np.int64)
    keys = [~np.isfinite(values), 8 * significant + np.abs(exponent - 1), np.signbit(values), *ties]
    return int(np.lexsort(keys[::-1])[0])
