"""Functions that raise, print, change their inputs, take long, return strange things, or need what is not there."""

import functools
import math
import random
import sys
import time
import warnings

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

import plimsoll as pl
from plimsoll.certification.probing.caller import Caller
from plimsoll.errors import ArgumentError, FormatError
from tests.support import cases
from tests.support.cases import each
from tests.support.certification.casts import TableCast


def test_a_function_that_never_works_is_refused_with_its_errors() -> None:
    def fails(x: Tensor) -> Tensor:
        raise TypeError("expected a tensor on the GPU")

    with pytest.raises(
        ArgumentError,
        match=r"a function of one tensor .* \(bfloat16, float16, float32, .*: TypeError: expected a tensor",
    ):
        pl.certify(fails, "e4m3")

    def needs_cuda(x: Tensor) -> Tensor:
        raise RuntimeError("Expected all tensors to be on cuda:0")

    with pytest.raises(ArgumentError, match="Call it with device='cuda'"):
        pl.certify(needs_cuda, "e4m3")
    with pytest.raises(ArgumentError, match=r"two matrices, of shapes \(M, K\) and \(K, N\).*cuda.*device='cuda'"):
        pl.certify(lambda a, b: needs_cuda(a), "fp16", kind="matmul")
    with pytest.raises(ArgumentError, match="a function of a Packed, of codes, or of codes and scales"):
        pl.certify(needs_cuda, "mxfp4", kind="unpack")


@each(
    "returned",
    [
        None,
        "text",
        (1, 2),
        torch.ones(3),
        torch.ones(8, 128, dtype=torch.complex64),
        torch.ones(8, 128) > 0,
        torch.ones(8, 128, device="meta"),
        torch.ones(8, 128).to_sparse(),
    ],
)
def test_what_is_no_result_is_refused(returned: object) -> None:
    with pytest.raises(ArgumentError, match="it returns"):
        pl.certify(lambda x: returned, "e4m3")


@each("returned", [(), {}, (torch.ones(8, 128), torch.ones(3)), pl.pack(torch.ones(8, 128), "e4m3")])
def test_what_is_no_packed_result_is_refused(returned: object) -> None:
    with pytest.raises(ArgumentError, match="of what it returns no part has the size of"):
        pl.certify(lambda x: returned, "mxfp8_e4m3", kind="pack")


def test_scales_that_are_padded_in_small_tensors_are_refusals() -> None:
    def padded(x: Tensor) -> tuple[Tensor, Tensor]:
        packed = pl.pack(x, "mxfp8_e4m3")
        assert packed.scales is not None
        rows = -(-packed.scales.shape[0] // 128) * 128
        return packed.codes, torch.cat([packed.scales, packed.scales.new_zeros(rows, packed.scales.shape[1])])[:rows]

    found = pl.certify(padded, "mxfp8_e4m3", kind="pack")
    assert found.conforms
    assert {row.requirement for row in found.rows if row.status == "refuses"} >= {"odd-shapes", "ragged-block"}


def test_an_exit_is_an_error_like_others() -> None:
    def leaves(x: Tensor) -> Tensor:
        if not x.numel():
            sys.exit(3)
        return TableCast()(x)

    found = pl.certify(leaves, "e4m3")
    assert [row.requirement for row in found.deviations] == ["empty"]
    assert "SystemExit: 3" in str(found.counterexamples[0].got)


def test_classes_of_values_that_raise_are_named() -> None:
    def no_subnormals(x: Tensor) -> Tensor:
        size = x.abs().float()
        if ((size > 0) & (size < 2.0**-14)).any():
            raise FloatingPointError("subnormal operand")
        return TableCast()(x)

    def no_nan(x: Tensor) -> Tensor:
        if x.isnan().any():
            raise ValueError("NaN")
        return TableCast(nan=0.0)(x)

    nan = pl.certify(no_nan, "e4m3")
    assert [row.requirement for row in nan.deviations] == ["nan"] and nan.inferred.nan == "an error"
    assert nan.counterexamples[0].got == "ValueError: NaN"
    tiny = pl.certify(no_subnormals, "e4m3")
    assert "subnormal-results" in [row.requirement for row in tiny.deviations]


def test_what_is_printed_and_warned_of_is_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    def talks(x: Tensor) -> Tensor:
        sys.stdout.write("compiling the kernel\n")
        sys.stderr.write("on stderr\n")
        warnings.warn("a slow path", UserWarning, stacklevel=1)
        return TableCast()(x)

    found = pl.certify(talks, "e4m3")
    assert found.conforms
    assert found.notes == ("It prints: compiling the kernel on stderr", "It warns: UserWarning: a slow path")
    assert capsys.readouterr() == ("", "")


def test_warnings_that_differ_in_numbers_are_one_note() -> None:
    def warns(x: Tensor) -> Tensor:
        warnings.warn(f"an output of {x.numel()} values was resized", UserWarning, stacklevel=1)
        return TableCast()(x)

    assert pl.certify(warns, "e4m3").notes == ("It warns: UserWarning: an output of 1024 values was resized",)


def test_results_of_a_fixed_shape_are_deviations() -> None:
    found = pl.certify(lambda x: torch.ones(8, 128), "e4m3")
    assert {"empty", "odd-shapes"} <= {row.requirement for row in found.deviations}
    assert found.row("exact").status == "not tried"


def test_half_way_values_that_never_go_up_say_nothing_of_fresh_noise() -> None:
    def half_of_the_noise(x: Tensor) -> Tensor:
        bits = x.float().view(torch.int32)
        noise = torch.randint_like(bits, 1 << 15)
        return ((bits + noise) & -(1 << 16)).view(torch.float32).where(~x.isnan(), x.float())

    found = pl.certify(half_of_the_noise, "bf16", rounding="stochastic")
    assert [row.requirement for row in found.deviations] == ["unbiased"]
    assert found.row("fresh-noise").status == "not tried"
    assert found.inferred.fine_noise == "biased at every fraction"


def test_a_partial_has_the_name_of_its_function() -> None:
    cast = functools.partial(torch.Tensor.to, dtype=torch.float8_e5m2)
    assert pl.certify(functools.partial(cast), "e5m2").function == "TensorBase.to"


def test_a_slow_function_is_sampled_and_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    def slow(x: Tensor) -> Tensor:
        clock[0] += 1e-3 * x.numel()
        return TableCast()(x)

    found = pl.certify(slow, "e4m3", seconds=60)
    assert found.conforms and found.inferred.rounding == "nearest_even"
    (first, *_) = found.not_tried
    assert first.startswith("bfloat16 inputs: ") and first.endswith(
        " of 65,536 values were tried, since a value takes 1 ms, and the limit is 60 s."
    )
    assert clock[0] < 70
    assert found.row("ties").tried > 100  # the format's own boundaries come first


def test_nothing_is_tried_beyond_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    def slower(x: Tensor) -> Tensor:
        clock[0] += 5e-3 * x.numel()
        return TableCast()(x)

    found = pl.certify(slower, "e4m3", seconds=11)
    untried = [row for row in found.rows if row.status == "not tried"]
    assert found.conforms and untried and "the limit of 11 s was reached" in untried[-1].detail


@each("kind", ["cast", "unpack", "sum", "matmul"])
def test_a_limit_before_the_first_results_is_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)

    def slow(*given: Tensor) -> Tensor:
        nonlocal now
        now += 2
        return given[0].float()

    with pytest.raises(ArgumentError, match=r"certify: expected time for a few calls, .*; got seconds=1. Give it more"):
        pl.certify(slow, "fp16", kind=kind, seconds=1)


def test_sums_that_are_no_floating_numbers_are_refused() -> None:
    for function in (lambda x: int(x.sum()), lambda x: x.sum().long()):
        with pytest.raises(ArgumentError, match=r"expected a function of a vector .* returns int\d*, which is no floa"):
            pl.certify(function, "fp32", kind="sum")


def test_pythons_numbers_are_in_fp64() -> None:
    found = pl.certify(lambda x: math.fsum(x.tolist()), "fp64", kind="sum")
    assert found.row("single-terms").status == found.row("subnormal-terms").status == "conforms"
    assert found.inferred.returns == "float64"


def test_generators_are_as_before() -> None:
    def draw() -> tuple[float, float, float]:
        return torch.rand(()).item(), random.random(), np.random.rand()  # noqa: NPY002  (the global generator)

    cases.seed()
    expected = draw()
    cases.seed()
    pl.certify(lambda x: pl.cast(x + 0 * torch.rand(()), "e2m1"), "e2m1")
    assert draw() == expected


def test_a_buffer_that_is_used_again_does_no_harm() -> None:
    held: dict[tuple[int, ...], Tensor] = {}

    def reuses(x: Tensor) -> Tensor:
        out = held.setdefault(tuple(x.shape), torch.empty(x.shape))
        return out.copy_(TableCast()(x))

    assert pl.certify(reuses, "e4m3").conforms


def test_numpy_functions_get_arrays() -> None:
    def of_arrays(x: np.ndarray) -> np.ndarray:
        assert isinstance(x, np.ndarray)
        return x.astype(ml_dtypes.float8_e4m3fn)

    assert pl.certify(of_arrays, "e4m3").conforms
    assert pl.certify(lambda a, b: np.dot(np.asarray(a, np.float32), b), "fp32", kind="matmul").conforms


def test_arguments_are_checked() -> None:
    with pytest.raises(ArgumentError, match="certify: expected kind to be 'cast'"):
        pl.certify(torch.float16, "fp16", kind="convolution")
    with pytest.raises(ArgumentError, match="certify: expected a function or a dtype; got function=3"):
        pl.certify(3, "fp16")
    with pytest.raises(ArgumentError, match="expected rounding to be 'nearest_even'"):
        pl.certify(torch.float16, "fp16", rounding="nearest")
    with pytest.raises(ArgumentError, match="rounding with a cast or pack only"):
        pl.certify(torch.sum, "fp16", kind="sum", rounding="up")
    with pytest.raises(ArgumentError, match="scale_rule with a cast or pack of a block format only"):
        pl.certify(torch.float16, "fp16", scale_rule="floor")
    with pytest.raises(ArgumentError, match="expected seconds to be a number above 0"):
        pl.certify(torch.float16, "fp16", seconds=0)
    with pytest.raises(ArgumentError, match=r"a device that this machine has; got device='nonsense'"):
        pl.certify(torch.float16, "fp16", device="nonsense")
    with pytest.raises(FormatError, match=r"at most 16 bits for kind='cast'; got tf32 \(19 bits\)"):
        pl.certify(torch.float16, "tf32")
    with pytest.raises(FormatError, match="a signed element format for kind='sum'; got mxfp4"):
        pl.certify(torch.sum, "mxfp4", kind="sum")


def test_changed_memory_beside_a_view_is_seen() -> None:
    """What a view does not show is memory of somebody else."""

    def writes_beside(x: Tensor) -> Tensor:
        torch.empty(0).set_(x.untyped_storage())[0] = 7.0
        return x

    caller = Caller(writes_beside, torch.device("cpu"), 60.0)
    caller(torch.zeros(10)[4:])
    assert caller.changed is not None
    assert (caller.changed.input, caller.changed.got) == (0.0, 7.0)
