"""Calls of an unpack in each form of its arguments, and its results for all codes."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from plimsoll.certification.certificate import Outcome
from plimsoll.certification.probing.arrays import (
    CallFailedError,
    Mask,
    Result,
    Values,
    compared,
    element_of,
    format_of_dtype,
    held,
    read_values,
    same,
)
from plimsoll.certification.probing.caller import Caller, refusal
from plimsoll.certification.probing.conventions import SIDE, HalfOrder
from plimsoll.formats import BlockFormat, Format
from plimsoll.rounding import Packed

Codes = NDArray[np.int64]
_ROWS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeTensors:
    """Codes of a matrix, with their scales."""

    codes: Codes  # one code for each value, in rows
    scales: Codes | None  # codes of the blocks' scales, blocks along the rows; None for element formats
    tensor_scale: float  # the tensor's scale; 1 for formats that have none

    def values(self, fmt: Format | BlockFormat) -> Values:
        """Return what the codes stand for, exactly."""
        if not isinstance(fmt, BlockFormat) or self.scales is None:
            return element_of(fmt).decode(self.codes)
        scales = np.repeat(fmt.scale.decode(self.scales), fmt.block, axis=-1)
        with np.errstate(invalid="ignore"):  # an infinite element times a scale of zero
            return fmt.element.decode(self.codes) * scales * self.tensor_scale


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """The form in which codes are given."""

    codes: str  # dtype of the codes: "uint8", "uint16", a torch dtype, or "Packed"
    scales: str = ""  # dtype of the scales: "uint8", a torch dtype, or "float32" for their values
    scales_first: bool = False  # whether scales come before codes
    first: HalfOrder | None = None  # half byte of the first of two 4-bit codes; None where each code has a byte

    def __str__(self) -> str:
        """Return the arguments in words."""
        halves = "" if self.first is None else f", two a byte, the first in the {self.first} half"
        if not self.scales:
            return f"{self.codes}{halves}"
        parts = [f"codes ({self.codes}{halves})", f"scales ({self.scales})"]
        return ", ".join(parts[::-1] if self.scales_first else parts)


class UnpackConvention:
    """Calls of an unpack, in the form in which it takes codes; `ArgumentError` if it takes none."""

    def __init__(self, caller: Caller, fmt: Format | BlockFormat) -> None:
        self.caller = caller
        self.fmt = fmt
        self.form = self._settled()

    def __call__(self, given: CodeTensors) -> Result:
        """Return the values that the function makes of codes, in their shape; CallFailedError if it does not."""
        return self._called(given, self.form)

    def _called(self, given: CodeTensors, form: Form) -> Result:
        result = read_values(self.caller(*_arguments(given, self.fmt, form)))
        if result.values.size != given.codes.size:
            raise CallFailedError(f"it returns {result.values.size} values for {given.codes.size} codes")
        return Result(values=result.values.reshape(given.codes.shape), dtype=result.dtype)

    def _settled(self) -> Form:
        """Return the form in which most of some ordinary codes come back right."""
        codes = ordinary_codes(self.fmt)
        expected = codes.values(self.fmt)
        best, most, errors = None, -1, dict[str, str]()
        for form in _forms(self.fmt):
            for numpy in (False, True) if form.codes != "Packed" else (False,):
                self.caller.numpy = numpy
                try:
                    result = self._called(codes, form)
                except CallFailedError as error:
                    errors.setdefault(str(form), str(error))
                    continue
                right = int(np.count_nonzero(same(result.values, held(expected, result.dtype))))
                if right > most:
                    best, most = (form, numpy), right
                if right == expected.size:
                    return form
        if best is None:
            raise refusal("a function of a Packed, of codes, or of codes and scales that returns values", errors)
        form, self.caller.numpy = best
        return form


def ordinary_codes(fmt: Format | BlockFormat) -> CodeTensors:
    """Return finite codes of both signs, no pattern of two, with scales around 1."""
    element = element_of(fmt)
    count = _ROWS * SIDE
    magnitude = np.arange(count) * 5 % (element.max_code + 1)
    sign = (np.arange(count) % 3 == 1).astype(np.int64) << (element.bits - 1) if element.signed else 0
    sign = np.where(magnitude == 0, 0, sign)
    codes = (magnitude | sign).reshape(_ROWS, SIDE)
    if not isinstance(fmt, BlockFormat):
        return CodeTensors(codes=codes, scales=None, tensor_scale=1.0)
    code_of_one = int(fmt.scale.encode(1.0))
    scales = (code_of_one + np.arange(count // fmt.block) % 5).reshape(_ROWS, -1)
    return CodeTensors(codes=codes, scales=scales, tensor_scale=0.5 if fmt.tensor_scale else 1.0)


def _forms(fmt: Format | BlockFormat) -> Iterator[Form]:
    yield Form(codes="Packed")
    element = element_of(fmt)
    words = ["uint8" if element.bits <= 8 else "uint16", *_own_dtype(element)]
    halves: tuple[HalfOrder | None, ...] = ("low", None, "high") if element.bits == 4 else (None,)
    if element.bits == 4:
        words += ["float4_e2m1fn_x2"]
    for word in words:
        for first in halves if word != "float4_e2m1fn_x2" else halves[:1]:
            if not isinstance(fmt, BlockFormat):
                yield Form(codes=word, first=first)
                continue
            for scales in ("uint8", *_own_dtype(fmt.scale), "float32"):
                for scales_first in (False, True):
                    yield Form(codes=word, scales=scales, scales_first=scales_first, first=first)


def _own_dtype(fmt: Format) -> list[str]:
    return [fmt.torch_dtype] if fmt.torch_dtype is not None and hasattr(torch, fmt.torch_dtype) else []


def _arguments(given: CodeTensors, fmt: Format | BlockFormat, form: Form) -> tuple[object, ...]:
    if form.codes == "Packed":
        return (_packed(given, fmt),)
    codes = _bytes_of(given.codes, form)
    codes = codes if form.codes in ("uint8", "uint16") else codes.view(getattr(torch, form.codes))
    if not isinstance(fmt, BlockFormat) or given.scales is None:
        return (codes,)
    if form.scales == "float32":
        scales = torch.from_numpy(fmt.scale.decode(given.scales)).float()
    else:
        scales = torch.from_numpy(given.scales.astype(np.uint8))
        scales = scales if form.scales == "uint8" else scales.view(getattr(torch, form.scales))
    parts: list[object] = [scales, codes] if form.scales_first else [codes, scales]
    return (*parts, torch.tensor(given.tensor_scale, device="cpu")) if fmt.tensor_scale else tuple(parts)


def _bytes_of(codes: Codes, form: Form) -> Tensor:
    if form.first is None:
        return torch.from_numpy(
            codes.astype(np.uint16 if form.codes in ("uint16", "float16", "bfloat16") else np.uint8)
        )
    low, high = (0, 1) if form.first == "low" else (1, 0)
    return torch.from_numpy((codes[..., low::2] | codes[..., high::2] << 4).astype(np.uint8))


def _packed(given: CodeTensors, fmt: Format | BlockFormat) -> Packed:
    element = element_of(fmt)
    form = Form(codes="uint8" if element.bits <= 8 else "uint16", first="low" if element.bits == 4 else None)
    return Packed(
        codes=_bytes_of(given.codes, form),
        scales=None if given.scales is None else torch.from_numpy(given.scales.astype(np.uint8)),
        tensor_scale=(
            torch.tensor(given.tensor_scale, device="cpu")
            if isinstance(fmt, BlockFormat) and fmt.tensor_scale
            else None
        ),
        scale=None, format=fmt, shape=torch.Size(given.codes.shape), axis=-1, dtype=torch.float32,
    )  # fmt: skip


class Decoded:
    """Codes with what the function makes of them."""

    def __init__(self, convention: UnpackConvention, fmt: Format | BlockFormat) -> None:
        self.fmt = fmt
        self.element = element_of(fmt)
        self.given = _all_codes(fmt)
        result = convention(self.given)
        self.y = result.values
        self.dtype = result.dtype
        self.exact = self.given.values(fmt)
        self.expected = held(self.exact, self.dtype)

    @cached_property
    def elements(self) -> Values:
        """Values of the element codes."""
        return self.element.decode(self.given.codes)

    @cached_property
    def scales(self) -> Values:
        """The scale of each value; ones for element formats."""
        if not isinstance(self.fmt, BlockFormat) or self.given.scales is None:
            return np.ones(self.elements.shape)
        return np.repeat(self.fmt.scale.decode(self.given.scales), self.fmt.block, axis=-1)

    @property
    def smallest_normal(self) -> float:
        """Smallest normal value of the results' dtype."""
        fmt = format_of_dtype(self.dtype)
        return 0.0 if fmt is None else fmt.smallest_normal

    @cached_property
    def finite(self) -> Mask:
        """The places with a finite element and scale, and a product within range."""
        return np.isfinite(self.elements) & np.isfinite(self.scales) & np.isfinite(self.expected)

    def compare(self, where: Mask) -> Outcome:
        """Compare the results with exact products, rounded once to the results' dtype."""
        return compared(self.y, self.expected, self._shown, where=where)  # codes and scales ascend

    def _shown(self, place: tuple[int, ...]) -> tuple[object, str]:
        row, column = place
        code = int(self.given.codes[place])
        note = f"code 0x{code:x}"
        if isinstance(self.fmt, BlockFormat) and self.given.scales is not None:
            scale = int(self.given.scales[row, column // self.fmt.block])
            note = f"{note} = {self.elements[place]:g}, scale 0x{scale:02x} = {self.scales[place]:g}"
        return code, note


def _all_codes(fmt: Format | BlockFormat) -> CodeTensors:
    if not isinstance(fmt, BlockFormat):
        codes = np.arange(max(1 << fmt.bits, SIDE)) % (1 << fmt.bits)
        return CodeTensors(codes=codes.reshape(-1, SIDE), scales=None, tensor_scale=1.0)
    # A scale with a sign is never negative: its sign bit is clear in every code tried.
    scales = np.arange(1 << (fmt.scale.bits - fmt.scale.signed))
    values = math.lcm(1 << fmt.element.bits, fmt.block)  # every code under every scale, in whole blocks
    blocks = values // fmt.block
    codes = np.tile(np.arange(values) % (1 << fmt.element.bits), len(scales))
    tensor_scale = 0.125 if fmt.tensor_scale else 1.0
    return CodeTensors(
        codes=codes.reshape(-1, SIDE), scales=np.repeat(scales, blocks).reshape(-1, SIDE // fmt.block),
        tensor_scale=tensor_scale,
    )  # fmt: skip
