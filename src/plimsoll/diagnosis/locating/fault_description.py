"""Description of an origin as a fault: names, and one sentence on what happened."""

import math
from collections.abc import Callable
from pathlib import Path

from plimsoll.diagnosis.finding import shown
from plimsoll.diagnosis.locating.fault import Fault, Operand, Source, number
from plimsoll.diagnosis.locating.tracing.nonfinite_trail import NonfiniteResult, Origin
from plimsoll.errors import FormatError
from plimsoll.formats import Format, get
from plimsoll.text import percent
from plimsoll.tracing.tensors import Names
from plimsoll.watch.call_site import Place

_STEEP = ("exp", "exp2", "expm1", "sinh", "cosh")  # finite for all finite numbers
_CONSTANTS = ("lift_fresh", "full", "full_like", "new_full", "scalar_tensor", "fill")  # of numbers in Python
_FILLING = ("masked_fill", "index_fill")
_CAST = ("_to_copy", "copy", "to", "type_as", "_copy_from")


def describe_fault(
    origin: Origin,
    reached: NonfiniteResult | None,
    names: Names,
    *,
    scale: float | None,
    error: Exception | None,
    spoiled: Origin | None = None,
) -> Fault:
    """Return an origin's fault; `spoiled`: what came of its gradient."""
    after = origin.phase in {"backward", "recomputation", "optimizer"}
    fault_scale = scale if after or origin.scaling else None
    end = None if reached is None else label(reached, names)
    module = names.module(origin.place.module)
    accumulates = origin.accumulates
    if module is None and accumulates is not None:
        module = names.owner(accumulates)
    forward = None if origin.forward is None else origin.forward.name
    return Fault(
        kind=origin.kind,
        operation=origin.facts.name,
        phase=origin.phase,
        sentence=_sentence(origin, names, module, forward, fault_scale, end, spoiled),
        module=module,
        source=source_of(origin.place),
        forward=forward,
        inputs=tuple(_called(operand, origin, names) for operand in origin.inputs),
        outputs=tuple(_called(operand, origin, names) for operand in origin.outputs),
        scalars=origin.scalars,
        count=origin.count,
        total=origin.total,
        first_index=origin.first_index,
        at=origin.at,
        expected=origin.expected,
        scale=fault_scale,
        reached=end,
        error=None if error is None else f"{type(error).__name__}: {error}",
    )


def source_of(place: Place) -> Source | None:
    """Return the line of a call site, with its text; None if no user code runs."""
    if place.file is None:
        return None
    return Source(file=place.file, line=place.line, function=place.function, text=place.text)


def label(reached: NonfiniteResult, names: Names) -> str:
    """Return the name of the result that was reached."""
    if reached.what != "gradient":
        return reached.what
    name = None if reached.owner is None else names.of(reached.owner)
    return f"the gradient of {name.removeprefix('the input ') if name else 'a tensor that requires it'}"


def _called(operand: Operand, origin: Origin, names: Names) -> Operand:
    name = names.of_memory(origin.memory.get(operand.name, ()))
    if name is None:
        return operand
    return Operand(name=operand.name, dtype=operand.dtype, shape=operand.shape, spectrum=operand.spectrum, called=name)


def _sentence(
    origin: Origin,
    names: Names,
    module: str | None,
    forward: str | None,
    scale: float | None,
    reached: str | None,
    spoiled: Origin | None,
) -> str:
    if origin.what == "held":
        happened = _held(origin, names)
    elif origin.what in {"uninitialised", "received"}:
        happened = _came(origin)
    elif origin.kind == "flush":
        happened = _flush(origin)
    else:
        happened = _made(origin)
    place = f" in {shown(module)}" if module is not None and origin.what == "made" else ""
    if origin.phase == "backward" and forward is not None and origin.what == "made":
        place = f"{place}, in the backward of {_short(forward)}"
    elif origin.phase == "recomputation":
        place += ", in a checkpoint's recomputation"
    if spoiled is not None:
        place += f"; the loss leaves it out, but not its gradient ({_made(spoiled)})"
    scaled = f"; the loss scale was {number(scale)}" if scale is not None else ""
    end = f"; it reached {reached}" if reached is not None else ""
    remedy = _remedy(origin, names)
    return f"{happened}{place}{scaled}{end}.{remedy}"


def _held(origin: Origin, names: Names) -> str:
    what = names.of_memory(origin.memory.get(origin.worst, ())) or "a tensor"
    spectrum = next((o.spectrum for o in origin.inputs if o.name == origin.worst), None)
    counts: list[str] = []
    if spectrum is not None:
        infs = spectrum.pos_infs + spectrum.neg_infs
        counts = [f"{n:,} {name}" for n, name in ((spectrum.nans, "NaN"), (infs, "Inf")) if n]
    if names.gradient_of(origin.memory.get(origin.worst, ())) is not None:
        what = f"{what}, left from an earlier backward,"
    return f"{shown(what)} held {' and '.join(counts) or 'non-finite values'} before any operation"


def _remedy(origin: Origin, names: Names) -> str:
    """Return the advice on an earlier gradient; the sentence is enough for others."""
    if origin.what != "held" or names.gradient_of(origin.memory.get(origin.worst, ())) is None:
        return ""
    return " Clear gradients before the backward (optimizer.zero_grad()); locate the step that left this one."


def _came(origin: Origin) -> str:
    if origin.what == "received":
        return f"{_base(origin)} received {_what(origin)} from another rank"
    return f"{_base(origin)} read {_what(origin)} in memory that was never written (torch.empty)"


def _flush(origin: Origin) -> str:
    share = origin.count / origin.total
    fmt = _format(origin)
    least = "" if fmt is None else f": below {fmt.name}'s smallest, {number(fmt.smallest_subnormal)}"
    example = "" if origin.expected is None else f" ({number(origin.expected)} became 0)"
    what = f"the cast to {fmt.name}" if fmt is not None and origin.facts.base in _CAST else _base(origin)
    return f"{what} flushed {percent(share)} of its values to zero{least}{example}"


def _made(origin: Origin) -> str:
    """Describe how an operation gave NaN or Inf."""
    if origin.deliberate and origin.facts.base in _CONSTANTS:
        return f"a constant was made with {_what(origin)} in it{_line(origin)}"
    if origin.deliberate and origin.facts.base in _FILLING:
        return f"{_base(origin)} wrote the constant {_what(origin)}{_line(origin)}"
    special = _SPECIAL.get(origin.facts.base)
    said = special(origin) if special is not None else None
    if said is not None:
        return said
    fmt = _format(origin)
    if fmt is not None and origin.kind == "inf" and _is_overflow(origin):
        return _overflow(origin, fmt)
    if origin.at:
        return f"{_base(origin)} of {_values(origin)} is {_what(origin)}"
    return f"{_base(origin)} gave {_what(origin)} from {_from(origin)}"


def _line(origin: Origin) -> str:
    """Return the line of the script that an operation was called from."""
    place = origin.place
    return "" if place.file is None else f" at {Path(place.file).name}:{place.line}"


def _is_overflow(origin: Origin) -> bool:
    """Return True if a wider format would hold the result."""
    if origin.facts.base in _STEEP and all(math.isfinite(value) for value in origin.at.values()):
        return True
    return origin.expected is not None and math.isfinite(origin.expected)


def _overflow(origin: Origin, fmt: Format) -> str:
    top = f"{fmt.name}'s {number(fmt.max)}"
    largest = max((o.spectrum.absmax for o in origin.inputs if o.spectrum is not None), default=0.0)
    most = f"; the largest input was 2^{math.log2(largest):.1f}" if largest > 0 else ""
    if origin.facts.base in _CAST:
        return f"the cast of {number(origin.expected or 0.0)} to {fmt.name} exceeds {top}"
    if origin.at:
        return f"{_base(origin)} of {_values(origin)} exceeds {top}{most}"
    return f"{_base(origin)} gives {number(origin.expected or 0.0)}, which exceeds {top}{most}"


def _softmax(origin: Origin) -> str | None:
    if origin.kind == "nan" and any(o.spectrum is not None and o.spectrum.neg_infs for o in origin.inputs):
        return f"{_base(origin)} of a row that is all -Inf (everything is masked) is NaN"
    return None


def _nll(origin: Origin) -> str | None:
    if origin.kind == "nan" and not any(o.spectrum is not None and o.spectrum.nonfinite for o in origin.inputs):
        return "nll_loss is a mean over no target (all are ignored), 0 / 0"
    return None


def _mean(origin: Origin) -> str | None:
    if origin.inputs and not math.prod(origin.inputs[0].shape):
        return f"{_base(origin)} of no values is NaN"
    return None


def _spread(origin: Origin) -> str | None:
    if origin.kind == "nan" and origin.outputs and origin.inputs:
        values = math.prod(origin.inputs[0].shape) // max(1, math.prod(origin.outputs[0].shape))
        if values <= 1:
            return f"{_base(origin)} of one value, which has no spread, is NaN"
    return None


_SPECIAL: dict[str, Callable[[Origin], str | None]] = {
    "_softmax": _softmax,
    "_log_softmax": _softmax,
    "nll_loss_forward": _nll,
    "nll_loss2d_forward": _nll,
    "mean": _mean,
    "std": _spread,
    "var": _spread,
    "var_mean": _spread,
    "std_mean": _spread,
}


def _base(origin: Origin) -> str:
    return _short(origin.facts.name)


def _short(name: str) -> str:
    """aten.add_ in words: add."""
    base = name.rpartition(".")[2].strip("_") or name
    return "a cast" if base in {"to_copy", "copy"} else base


def _what(origin: Origin) -> str:
    return number(origin.value)


def _values(origin: Origin) -> str:
    values = [number(value) for value in origin.at.values()]
    numbers = {"other": "by", "exponent": "to"}
    for name, value in origin.scalars.items():
        if name in numbers and isinstance(value, int | float):
            values.append(number(float(value)))
    return " and ".join(values) if len(values) < 3 else ", ".join(values[:-1]) + " and " + values[-1]


def _from(origin: Origin) -> str:
    dirty = [o for o in origin.inputs if o.spectrum is not None and o.spectrum.nonfinite]
    if not dirty:
        return "finite inputs"
    meant = next((other for other in origin.given if other.deliberate and other.what == "made"), None)
    if meant is None:
        return "an Inf that was there on purpose (a mask)"
    odd = (value for value in meant.scalars.values() if isinstance(value, float) and not math.isfinite(value))
    where = "" if meant.facts.base in _CONSTANTS else f" of {_base(meant)}"
    return f"the constant {number(next(odd, meant.value))}{where}{_line(meant)}"


def _format(origin: Origin) -> Format | None:
    out = next((o for o in origin.outputs if o.name == origin.worst), None)
    try:
        output_format = None if out is None else get(out.dtype)
    except FormatError:
        return None
    return output_format if isinstance(output_format, Format) else None
