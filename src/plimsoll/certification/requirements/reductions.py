"""Requirements of sums and matrix products."""

import functools
import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from plimsoll.certification.certificate import ERROR_BOUND, FP32_SUMS, IEEE_754, TENSORS, Outcome
from plimsoll.certification.probing.arrays import Values, attempted, compared, deviation, held, same, shortest
from plimsoll.certification.probing.conventions import SIDE
from plimsoll.certification.reductions.observed import Reduction, Width
from plimsoll.certification.reductions.reducer import Reducer
from plimsoll.certification.registry import REDUCTIONS, requirement
from plimsoll.certification.trial import NotTriedError, Trial
from plimsoll.formats import Format

_row = functools.partial(requirement, kinds=REDUCTIONS)
_WHOLE = (16, 64, 128, 256)
_ODD = (1, 2, 3, 5, 7, 15, 17, 31, 33, 63, 65, 127, 129, 257)
_SIDES = ((1, 1), (3, 5), (17, 33))
_MOST_TERMS = 127  # so that an accumulator of 7 bits has every partial sum exactly


@_row("exact-sums", "Sums that every accumulator has exactly are exact.", general=(IEEE_754, "9.4"))
def exact_sums(trial: Trial) -> Outcome:
    """Try terms of 1 and -1 in lengths that are multiples of 16."""
    return _exact(trial, _WHOLE, ((SIDE, SIDE),))


@_row(
    "odd-lengths",
    "Lengths and sides of any number give exact sums too: no term is dropped or read twice.",
    general=(TENSORS, "shapes"),
    may_refuse=True,
)
def odd_lengths(trial: Trial) -> Outcome:
    """Try lengths from 1 to 257 as well as multiples of 16, and odd sides of matrices."""
    return _exact(trial, _ODD, _SIDES)


@_row("empty-sums", "A sum of no terms is zero.", general=(TENSORS, "shapes"))
def empty_sums(trial: Trial) -> Outcome:
    """Try a length of zero."""
    result = _result(trial.reduction.reducer, np.zeros((2, 0)), np.zeros((0, 3)))
    outcome = compared(result, np.zeros(result.shape), lambda _: ("no terms", ""), right=result == 0)
    return replace(outcome, tried=1)


@_row(
    "sum-strides",
    "Inputs give the results of their contiguous copies, whatever their strides and offsets.",
    general=(TENSORS, "strides"),
    may_refuse=True,
)
def sum_strides(trial: Trial) -> Outcome:
    """Try transposed, stepped and offset inputs."""
    reducer, outcome = trial.reduction.reducer, Outcome(tried=0)
    left, right = _signs((SIDE, SIDE), 0), _signs((SIDE, SIDE), 1)
    exact = left @ right if reducer.kind == "matmul" else left[:1].sum(axis=1)

    def of(what: str, inputs: tuple[Tensor, ...]) -> Outcome:
        sums = reducer.read(*inputs, shape=exact.shape)
        found_right = compared(sums.values, held(exact, sums.dtype), lambda _: (what, "terms of 1 and -1"))
        return replace(found_right, tried=1)

    for what, inputs in _layouts(reducer, left, right):
        outcome += attempted(what, lambda w=what, i=inputs: of(w, i))
    return outcome


@_row(
    "single-terms", "One term among zeros is the sum, rounded to the result's dtype alone.", general=(IEEE_754, "5.4.1")
)
def single_terms(trial: Trial) -> Outcome:
    """Try values of the format that are normal, alone: an operand that is used with fewer bits shows here."""
    reducer = trial.reduction.reducer
    return _alone(reducer, _values(reducer.fmt, subnormal=False))


@_row(
    "subnormal-terms",
    "Subnormal inputs count as what they are.",
    general=(IEEE_754, "3.3"),
    applies=lambda subject: subject.element.has_subnormals,
)
def subnormal_terms(trial: Trial) -> Outcome:
    """Try subnormal values of the format, alone."""
    reducer = trial.reduction.reducer
    return _alone(reducer, _values(reducer.fmt, subnormal=True))


@_row("accumulator", "Partial sums have {accumulator_bits} bits or more.", general=(FP32_SUMS, "3.3"))
def accumulator_bits(trial: Trial) -> Outcome:
    """Look for the smallest term that is kept in a sum with a larger one, in partial sums of several sizes."""
    reduction = _stable(trial)
    needed = trial.subject.accumulator_bits
    narrow = [width for width in reduction.widths if not width.open and width.bits < needed]
    if not narrow or reduction.compensated:
        return Outcome(tried=len(reduction.widths), detail=reduction.accumulator_words())
    width = narrow[0]
    terms = (width.largest, width.largest * 2.0**-width.bits, -width.largest)
    return _three_terms(trial, width, terms, expected=terms[1], wrong=len(narrow))


@_row("accumulator-rounding", "Partial sums are rounded to the nearest, and not cut off.", general=(IEEE_754, "4.3.1"))
def accumulator_rounding(trial: Trial) -> Outcome:
    """Look at terms of 1/4, 1/2 and 3/4 of the last place of a partial sum."""
    seen = [width for width in _stable(trial).widths if not width.open]
    if not seen:
        raise NotTriedError("terms of the format show no loss")
    wrong = [width for width in seen if not width.rounding.startswith("nearest")]
    if not wrong:
        return Outcome(tried=len(seen))
    width = wrong[0]
    for sign, part, expected in ((1.0, 0.75, 1.0), (-1.0, 0.75, -1.0), (1.0, 0.25, 0.0), (-1.0, 0.25, 0.0)):
        last = width.last_place
        terms = (sign * width.largest, sign * part * last, -sign * width.largest)
        outcome = _three_terms(trial, width, terms, expected=expected * last, wrong=len(wrong))
        example = outcome.counterexample
        if example is not None and example.got != example.expected:
            return outcome
    return Outcome(tried=len(seen), wrong=len(wrong), detail=f"rounding: {width.rounding}")


@_row(
    "accumulator-range",
    "A partial sum beyond FP16's range does not overflow where the result is within it.",
    general=(FP32_SUMS, "3.3"),
)
def accumulator_range(trial: Trial) -> Outcome:
    """Try two terms of 2**15 and one of -2**15."""
    reduction = _stable(trial)
    if reduction.overflows_early is None:
        raise NotTriedError("the format has no such terms")
    if not reduction.overflows_early:
        return Outcome(tried=1)
    width = reduction.widths[0]
    return _three_terms(trial, width, (2.0**15, 2.0**15, -(2.0**15)), expected=2.0**15, wrong=1)


@_row(
    "special-values",
    "NaN and infinities reach the result: a NaN gives NaN, Inf - Inf gives NaN, and so does Inf times 0.",
    general=(IEEE_754, "6.1, 6.2"),
    applies=lambda subject: subject.element.has_nan,
)
def special_values(trial: Trial) -> Outcome:
    """Try a few sums with NaN and, where the format has them, infinities."""
    reducer = trial.reduction.reducer
    cases: list[tuple[list[float], list[float], float]] = [([math.nan, 1.0], [1.0, 1.0], math.nan)]
    if reducer.fmt.has_inf:
        cases += [
            ([math.inf, 1.0], [1.0, 1.0], math.inf),
            ([1.0, -math.inf], [1.0, 1.0], -math.inf),
            ([math.inf, -math.inf], [1.0, 1.0], math.nan),
        ]
        cases += [([math.inf, 1.0], [0.0, 1.0], math.nan)] if reducer.kind == "matmul" else []
    for left, right, expected in cases:
        row, column = np.ones((SIDE, SIDE)), np.ones((SIDE, SIDE))
        row[0, :2], column[:2, :] = left, np.array(right)[:, None]
        got = float(_result(reducer, row, column).flat[0])
        if not same(np.array(got), np.array(expected)):
            terms = left if reducer.kind == "sum" else [f"{a:g} * {b:g}" for a, b in zip(left, right, strict=True)]
            return deviation(terms, expected, got, "the other terms are 1", tried=len(cases))
    return Outcome(tried=len(cases))


@_row(
    "own-row",
    "A result depends on its own row and column alone: NaN in one row does not reach the others.",
    kinds=("matmul",),
    general=(TENSORS, "no side effects"),
    applies=lambda subject: subject.element.has_nan,
)
def own_row(trial: Trial) -> Outcome:
    """Put NaN into one row of the left matrix and one column of the right one."""
    left, right = _signs((SIDE, SIDE), 2), _signs((SIDE, SIDE), 3)
    expected = held(left @ right, trial.reduction.reducer.result)
    left[1], right[:, 2] = math.nan, math.nan
    products = trial.reduction.reducer.product(left, right).values
    other = np.ones(products.shape, np.bool_)
    other[1], other[:, 2] = False, False
    where = "NaN in row 1 of the left matrix and column 2 of the right one"
    return compared(products, expected, lambda at: (where, f"result at index {at}"), where=other)


@_row(
    "error-bound",
    "The error of a sum stays below the bound for any order of additions in the accumulator that was found.",
    general=(ERROR_BOUND, "4.2"),
)
def error_bound(trial: Trial) -> Outcome:
    """Try sums of 256 random terms, fewer in a narrow accumulator, and compare with the exact sums."""
    reducer = trial.reduction.reducer
    bits = min(width.bits if not width.open else trial.subject.accumulator_bits for width in trial.reduction.widths)
    length = min(256, 1 << max(1, bits - 3))  # so that the bound is a small part of the terms' sum
    left, right = _random(reducer, (SIDE, length), 4), _random(reducer, (length, SIDE), 5)
    result = _result(reducer, left, right)
    if reducer.kind == "sum":
        exact, size = np.array([math.fsum(left[0])]), np.abs(left[:1]).sum(axis=1)
    else:
        exact, size = (left.astype(np.longdouble) @ right).astype(np.float64), np.abs(left) @ np.abs(right)
    step = length * 2.0 ** (1 - bits)  # twice what rounding to nearest needs: an accumulator may cut off
    bound = step / (1 - step) * size + 2.0**-(reducer.result_format.mantissa_bits) * np.abs(exact)
    error = np.abs(result.reshape(exact.shape) - exact)
    detail = f"bound {float(np.max(bound)):.2g}, largest error {float(np.max(error)):.2g}"
    wrong = np.argwhere(~(error <= bound))
    if not len(wrong):
        return Outcome(tried=exact.size, detail=detail)
    place = tuple(wrong[0])
    expected, got = f"{exact[place]:g} within {bound[place]:.2g}", float(result.reshape(exact.shape)[place])
    return deviation(f"{length} random terms", expected, got, tried=exact.size, wrong=len(wrong), detail=detail)


@_row("same-sum-twice", "Two calls with the same inputs give the same result.", general=(TENSORS, "determinism"))
def same_sum_twice(trial: Trial) -> Outcome:
    """Call twice with random terms."""
    reducer = trial.reduction.reducer
    left, right = _random(reducer, (SIDE, 256), 6), _random(reducer, (256, SIDE), 7)
    first, second = (_result(reducer, left, right) for _ in range(2))
    return compared(second, first, lambda _: ("256 random terms", "in a second call"))


def _stable(trial: Trial) -> Reduction:
    """Return the reduction if its order is stable, since only then it can be measured."""
    if not trial.reduction.order.stable:
        raise NotTriedError(f"the order of additions is {trial.reduction.order.words}")
    return trial.reduction


def _exact(trial: Trial, lengths: tuple[int, ...], sides: tuple[tuple[int, int], ...]) -> Outcome:
    """Compare sums of 1 and -1 with the exact ones, short sums first."""
    reducer, outcome = trial.reduction.reducer, Outcome(tried=0)

    def of(length: int, rows: int, columns: int) -> Outcome:
        left, right = _signs((rows, length), length), _signs((columns, length), length + 1).T
        exact = left @ right if reducer.kind == "matmul" else left[0].sum(keepdims=True)
        result = _result(reducer, left, right)

        def shown(at: tuple[int, ...]) -> tuple[object, str]:
            terms = left[at[0]] * right[:, at[1]] if reducer.kind == "matmul" else left[0]
            note = f", result of shape ({rows}, {columns})" if reducer.kind == "matmul" else ""
            return terms.tolist() if length <= 33 else f"{length} terms of 1 and -1", f"{length} terms{note}"

        right_or_zero = same(result, held(exact, reducer.result)) | ((result == 0) & (exact == 0))
        return compared(result, exact, shown, right=right_or_zero)

    for index, length in enumerate(lengths):
        side = sides[index % len(sides)]
        outcome += attempted(f"length {length}", lambda n=length, s=side: of(n, *s))
    return outcome


def _alone(reducer: Reducer, values: Values) -> Outcome:
    """Compare sums of one value and zeros with the value."""
    expected = held(values, reducer.result)
    if reducer.kind == "sum":
        totals = np.array([float(reducer.total(np.array([0.0, 0.0, value, 0.0])).values) for value in values])
    else:
        diagonals = np.zeros((-(-len(values) // SIDE), SIDE))
        diagonals.reshape(-1)[: len(values)] = values
        columns = [reducer.product(np.diag(each), np.ones((SIDE, 16))).values[:, 0] for each in diagonals]
        totals = np.concatenate(columns)[: len(values)]
    reachable = np.isfinite(expected)
    tried, wrong = int(np.count_nonzero(reachable)), np.flatnonzero(reachable & ~same(totals, expected))
    if not len(wrong):
        return Outcome(tried=tried)
    index = int(wrong[shortest(values[wrong])])
    value, exact, got = (float(each[index]) for each in (values, expected, totals))
    return deviation(value, exact, got, "the other terms are 0", tried=tried, wrong=len(wrong))


def _three_terms(
    trial: Trial, width: Width, terms: tuple[float, float, float], *, expected: float, wrong: int
) -> Outcome:
    reduction = trial.reduction
    got = float(reduction.three(width.places, terms)[0])
    note = f"terms {', '.join(map(str, width.places))} of {reduction.order.length}, the others are 0"
    return deviation(list(terms), expected, got, note, tried=len(reduction.widths), wrong=wrong)


def _result(reducer: Reducer, left: Values, right: Values) -> Values:
    """Return the product of two matrices; of a sum, that of the left one's first row."""
    return reducer.product(left, right).values if reducer.kind == "matmul" else reducer.total(left[0]).values.reshape(1)


def _layouts(reducer: Reducer, left: Values, right: Values) -> Iterator[tuple[str, tuple[Tensor, ...]]]:
    """Yield inputs of unusual strides with two matrices' values, or the left's row."""

    def stepped(tensor: Tensor) -> Tensor:
        room = torch.empty((*tensor.shape[:-1], 2 * tensor.shape[-1]), dtype=tensor.dtype, device=tensor.device)
        room.view(torch.uint8).fill_(1)
        view = room[..., ::2]
        view.copy_(tensor)
        return view

    a, b = reducer.tensor(left), reducer.tensor(right)
    if reducer.kind == "sum":
        yield "a vector with a step of 2", (stepped(a[0]),)
        yield "a vector that starts inside its memory", (torch.cat([a[1], a[0]])[SIDE:],)
        yield "a column of a matrix", (reducer.tensor(left.T.copy())[:, 0],)
        return
    yield "a left matrix that is transposed", (reducer.tensor(left.T.copy()).t(), b)
    yield "a right matrix that is transposed", (a, reducer.tensor(right.T.copy()).t())
    yield "a left matrix with a step of 2", (stepped(a), b)
    yield "a right matrix with a step of 2", (a, stepped(b))


def _signs(shape: tuple[int, int], seed: int) -> Values:
    """Return random 1 and -1, with zeros first in rows longer than `_MOST_TERMS`."""
    signs = np.where(np.random.default_rng(seed).integers(0, 2, shape) == 1, 1.0, -1.0)
    signs[:, : max(0, shape[1] - _MOST_TERMS)] = 0.0
    return signs


def _random(reducer: Reducer, shape: tuple[int, int], seed: int) -> Values:
    """Return random values of the format, of both signs, between 1/8 and 1."""
    bits = min(reducer.fmt.mantissa_bits, 20)
    rng = np.random.default_rng(seed)
    significand = 1 + rng.integers(0, 1 << bits, shape) / (1 << bits)
    values = np.ldexp(significand, rng.integers(-3, 0, shape)) * np.where(rng.integers(0, 2, shape) == 1, 1.0, -1.0)
    return np.where(np.abs(values) >= reducer.fmt.smallest_normal, values, np.copysign(1.0, values))


def _values(fmt: Format, *, subnormal: bool) -> Values:
    """Return finite values of the format: all up to 8 bits, else a spread with the ends of each binade."""
    if fmt.bits <= 8:
        values = fmt.decode(np.arange(fmt.max_code + 1))
    else:
        fractions = np.array([0.0, 2.0**-fmt.mantissa_bits, 1 - 2.0**-fmt.mantissa_bits, 0.5, 0.3125])
        exponents = np.arange(
            fmt.min_exponent, fmt.max_exponent + 1, max(1, (fmt.max_exponent - fmt.min_exponent) // 60)
        )
        normal = np.ldexp(1 + fractions[None], exponents[:, None]).reshape(-1)
        steps = np.unique(2 ** np.arange(fmt.mantissa_bits)[:, None] + np.array([0, 1])[None])
        tiny = np.ldexp(steps[steps < 2**fmt.mantissa_bits].astype(np.float64), fmt.quantum_exponent)
        values = np.concatenate([normal, tiny])
    chosen = values[(values < fmt.smallest_normal) == subnormal]
    chosen = chosen[chosen != 0]
    return np.concatenate([chosen, -chosen])
