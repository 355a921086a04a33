"""`certify`: tries a function and writes its certificate."""

import contextlib
import datetime as dt
import functools
import importlib.metadata
import operator
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast, get_args

import numpy as np
import torch

from plimsoll import checks
from plimsoll.certification import requirements
from plimsoll.certification.blocks import RULES, element_call
from plimsoll.certification.certificate import KINDS, Counterexample, Inferred, Kind, Outcome, Row, Status
from plimsoll.certification.codes import UnpackConvention
from plimsoll.certification.elements import inference
from plimsoll.certification.elements.inference import varies
from plimsoll.certification.probing.arrays import CallFailedError, element_of
from plimsoll.certification.probing.caller import Caller, OutOfTimeError, kept_generators
from plimsoll.certification.probing.conventions import CastConvention
from plimsoll.certification.reductions.reducer import Reducer
from plimsoll.certification.registry import CASTS, Requirement
from plimsoll.certification.sheet import Certificate
from plimsoll.certification.trial import NotTriedError, Subject, Trial
from plimsoll.errors import ArgumentError, FormatError
from plimsoll.formats import BlockFormat, Format, get
from plimsoll.formats.codec import Rounding
from plimsoll.text import clause
from plimsoll.version import __version__

_WIDEST_BITS = 16  # of formats that the codec encodes and decodes


def certify(
    function: Callable[..., Any] | torch.dtype,
    fmt: object,
    *,
    kind: Kind = "cast",
    device: str | torch.device = "cpu",
    rounding: Rounding | None = None,
    scale_rule: str | None = None,
    seconds: float = 60.0,
) -> Certificate:
    """Certify a function: how it works, and if it keeps to its format's specifications.

    The function is called with tensors of every 16-bit value, with FP32 values at every boundary of the format, with
    blocks of adversarial largest magnitudes, and with sums whose result shows the order of additions. Its results are
    compared with the format's codec, in exact arithmetic. A function that raises, prints, or changes its inputs is
    reported. Random generators of torch, NumPy and Python are seeded, and restored at the end.

    Args:
        function: The function, by its kind. A cast takes a tensor and returns its values in the format, in any floating
            dtype. A pack returns a `Packed`, codes, or codes and scales (and a tensor scale) in any order. An unpack
            takes these and returns values. A matmul takes two matrices, a sum a vector. NumPy functions are found out.
            A torch dtype stands for ``x.to(dtype)``, a NumPy or ml_dtypes type for ``x.astype(type)``.
        fmt: The format: a name, a `Format`, a `BlockFormat` or a torch dtype. At most 16 bits, but for a matmul or sum.
        kind: "cast", "pack", "unpack", "matmul" or "sum". Default: "cast".
        device: Device of the tensors. Default: "cpu". CUDA is not measured yet.
        rounding: Rounding mode that a cast or pack is held to. Default: None, which means to nearest even, or
            stochastic where equal values are rounded differently.
        scale_rule: Rule for scales that a block format is held to, as of `plimsoll.cast`. Default: None, the one of
            its specification, "floor".
        seconds: Limit of the time, checked between calls. What there was no time for is listed. Default: 60.

    Raises:
        ArgumentError: The function takes no tensors of its kind, there is no time to find that out, or an argument
            contradicts another.
        FormatError: The format does not exist or does not fit the kind.

    >>> import torch
    >>> certificate = certify(torch.float8_e4m3fn, "e4m3")
    >>> certificate.conforms, certificate.inferred.rounding, certificate.inferred.subnormals
    (True, 'nearest_even', 'kept')
    >>> truncated = certify(lambda x: x.to(torch.bfloat16).float(), "fp16")
    >>> truncated.conforms
    False
    >>> truncated.row("exact").counterexample.input
    1.00390625
    """
    chosen = _checked_format(fmt, checks.one_of("certify", "kind", kind, KINDS))
    _check_choices(chosen, kind, rounding, scale_rule)
    place = _checked_device(device)
    limit = checks.number("certify", "seconds", seconds, above=0, remedy="Use 60.")
    called, name = _named(function)
    start = time.perf_counter()
    with kept_generators(place):
        caller = Caller(called, place, limit)
        try:
            trial = _trial(caller, chosen, kind, rounding, scale_rule)
        except OutOfTimeError as error:
            raise ArgumentError(
                f"certify: expected time for a few calls, which show what the function takes and returns; got "
                f"seconds={limit:g}. Give it more."
            ) from error
        rows = tuple(
            _row(requirement, trial, source)
            for requirement in requirements.REQUIREMENTS.values()
            if (source := requirement.source(trial.subject)) is not None
        )
        inferred = _inferred(trial)
    return Certificate(
        function=name, format=chosen.name, kind=kind, device=str(place), inferred=Inferred(inferred), rows=rows,
        not_tried=tuple(trial.not_tried), notes=tuple(caller.notes), calls=caller.calls,
        seconds=time.perf_counter() - start, versions=_versions(function, place),
        date=dt.datetime.now(dt.UTC).date().isoformat(),
    )  # fmt: skip


def _trial(
    caller: Caller, fmt: Format | BlockFormat, kind: Kind, rounding: Rounding | None, scale_rule: str | None
) -> Trial:
    """Find out how the function is called, and whether it rounds at random."""
    default_rounding: Rounding = rounding or "nearest_even"
    convention: CastConvention | UnpackConvention | Reducer
    if kind == "unpack":
        convention = UnpackConvention(caller, fmt)
    elif kind in ("matmul", "sum"):
        convention = Reducer(caller, kind, cast("Format", fmt))
    else:
        convention = CastConvention(caller, kind, fmt)
        if rounding is None and varies(element_call(convention, fmt)[0], element_of(fmt)):
            default_rounding = "stochastic"
    return Trial(Subject(fmt=fmt, kind=kind, rounding=default_rounding, scale_rule=scale_rule), caller, convention)


def _row(requirement: Requirement, trial: Trial, source: str) -> Row:
    status: Status = "conforms"
    try:
        outcome = requirement.check(trial)
    except (NotTriedError, OutOfTimeError) as error:
        outcome, status = Outcome(tried=0, detail=str(error)), "not tried"
    except CallFailedError as error:
        outcome = Outcome(tried=1, wrong=1, refused=str(error))
    if outcome.wrong:
        status = "refuses" if outcome.refused and requirement.may_refuse else "deviates"
    elif not outcome.tried and status == "conforms":
        outcome, status = Outcome(tried=0, detail="there is no such input"), "not tried"
    detail = outcome.refused or outcome.detail
    example = None
    if status == "deviates":  # an error raised without a counterexample is its own
        unknown = Counterexample(input="the inputs of this row", expected="a result", got=detail)
        example = replace(outcome.counterexample or unknown, requirement=requirement.id)
    return Row(
        requirement=requirement.id, says=trial.sentence(requirement.says), source=source, status=status,
        tried=outcome.tried, wrong=outcome.wrong, counterexample=example, detail=detail,
    )  # fmt: skip


def _inferred(trial: Trial) -> dict[str, object]:
    """Return the inferred facts, without those that there was no time for."""
    try:
        if trial.subject.kind in ("matmul", "sum"):
            return trial.reduction.facts()
        if trial.subject.kind == "unpack":
            return {"takes": str(trial.unpack.form), "returns": trial.decoded.dtype}
        facts = inference.facts(trial.observed, trial.rule)
        if trial.subject.kind == "pack":
            facts["returns"] = trial.convention.parts
        if trial.rule.name == "stochastic":
            facts["fine_noise"] = trial.draws.finest()
        if isinstance(trial.subject.fmt, BlockFormat):
            facts |= trial.blocks.facts()
    except (CallFailedError, OutOfTimeError) as error:
        trial.not_tried.append(f"What the function does in full: {clause(error)}.")
        return {}
    return facts


# ---------------------------------------------------------------------------------------------------------- arguments


def _checked_format(fmt: object, kind: Kind) -> Format | BlockFormat:
    chosen = get(fmt)
    element = element_of(chosen)
    if kind in ("matmul", "sum"):
        if isinstance(chosen, BlockFormat) or not chosen.signed:
            raise FormatError(
                f"certify: expected a signed element format for kind={kind!r}; got {chosen.name}. "
                "Name the format of the operands, as e4m3."
            )
    elif element.bits > _WIDEST_BITS:
        raise FormatError(
            f"certify: expected a format of at most {_WIDEST_BITS} bits for kind={kind!r}; got {chosen.name} "
            f"({element.bits} bits). Use kind='matmul' or kind='sum', or a narrower format."
        )
    return chosen


def _check_choices(fmt: Format | BlockFormat, kind: Kind, rounding: str | None, scale_rule: str | None) -> None:
    def refuse(name: str, value: str, wanted: str) -> ArgumentError:
        got = f"{name}={value!r} with {fmt.name}, kind={kind!r}"
        return ArgumentError(f"certify: expected {name} with a cast or pack{wanted} only; got {got}. Leave it out.")

    if rounding is not None:
        checks.one_of("certify", "rounding", rounding, get_args(Rounding))
        if kind not in CASTS:
            raise refuse("rounding", rounding, "")
    if scale_rule is not None:
        checks.one_of("certify", "scale_rule", scale_rule, RULES)
        if not isinstance(fmt, BlockFormat) or kind not in CASTS:
            raise refuse("scale_rule", scale_rule, " of a block format")


def _checked_device(device: str | torch.device) -> torch.device:
    try:
        place = torch.device(device)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError, TypeError) as error:
        reason = " ".join(str(error).split()).split(". ")[0]
        raise ArgumentError(
            f"certify: expected a device that this machine has; got device={str(device)!r} ({reason}). Use 'cpu'."
        ) from error
    return place


def _named(function: Any) -> tuple[Callable[..., Any], str]:
    """Return a callable and its name; a dtype becomes the cast to it."""
    if isinstance(function, torch.dtype):
        return operator.methodcaller("to", function), str(function)
    inner = function
    while isinstance(inner, functools.partial):
        inner = cast("functools.partial[Any]", inner).func
    module = _module(inner)
    kind: Any = inner if isinstance(inner, type) else type(inner)
    name = str(getattr(inner, "__qualname__", kind.__qualname__)).replace("<locals>.", "")
    short = str(getattr(inner, "__name__", name))
    if getattr(sys.modules.get(module), short, None) is inner:  # a built-in function's qualified name is its class's
        name = short
    shown = name if module in ("", "__main__") else f"{module}.{name}"
    if kind is function and issubclass(kind, np.generic):
        return operator.methodcaller("astype", function), shown
    if not callable(function):
        raise ArgumentError(f"certify: expected a function or a dtype; got function={function!r}. Name one.")
    return function, shown


def _module(function: object) -> str:
    return str(getattr(function, "__module__", None) or "")


def _versions(function: object, place: torch.device) -> dict[str, str]:
    """Return the versions that a result depends on, and the machine."""
    versions = {"plimsoll": __version__, "torch": torch.__version__, "python": platform.python_version()}
    package = _module(function).partition(".")[0]
    if package and package not in versions:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # a script, or a module of its own
            versions[package] = importlib.metadata.version(package)
    if place.type == "cuda":
        versions["gpu"] = torch.cuda.get_device_name(place)
    else:
        versions["cpu"] = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return versions
