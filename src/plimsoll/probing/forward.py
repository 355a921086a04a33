"""Weights and activations against a format: findings, scales, a forward plan."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from plimsoll.diagnosis import Finding
from plimsoll.diagnosis.finding import Severity, Spot
from plimsoll.diagnosis.planning.modules import Module
from plimsoll.formats import BlockFormat, Format, Plan
from plimsoll.probing.result import Question
from plimsoll.runs import Run
from plimsoll.spectrum import Spectrum
from plimsoll.tensor_collections import FORWARD, LABELS
from plimsoll.text import number, percent
from plimsoll.watch.taps.module_taps import SCORES

TOLERANCE = 0.01  # share of a tensor's values that may be lost, as in a plan
_LOWEST, _HIGHEST = -126, 127  # shifts of casts: float32's normal powers of two

# Of each tensor of a collection, by name: spectra by batch.
Spectra = Mapping[str, Mapping[str, Sequence[tuple[int, Spectrum]]]]


def spectra_of(run: Run) -> Spectra:
    """Return the spectra of a run's weights and activations."""
    found: dict[str, dict[str, list[tuple[int, Spectrum]]]] = {}
    for collection in FORWARD:
        if collection in run.tensors:
            for step, _, name, spectrum in run.spectra(collection):
                found.setdefault(collection, {}).setdefault(name, []).append((step, spectrum))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fault:
    """A tensor that does not fit."""

    rule: str
    collection: str
    spot: Spot


def findings(question: Question, spectra: Spectra, operands: Mapping[str, Iterable[str]]) -> list[Finding]:
    """Return findings about overflow, underflow, and values that are not finite.

    Overflow of a format that whole operations compute in is judged in every weight and output. All else is judged in
    the operands of products, which alone are cast.
    """
    faults: list[_Fault] = []
    for collection, tensors in spectra.items():
        cast = set(operands.get(collection, ()))
        for name, by_batch in _distinct(collection, tensors, cast).items():
            for step, spectrum in by_batch:
                found = _fault(question, spectrum, is_operand=name in cast)
                if found is not None:
                    rule, value = found
                    spot = Spot(name=name, since_step=step, value=value)
                    faults.append(_Fault(rule=rule, collection=collection, spot=spot))
    groups: dict[tuple[str, str], dict[str, Spot]] = {}
    for fault in faults:
        spots = groups.setdefault((fault.rule, fault.collection), {})
        first = spots.setdefault(fault.spot.name, fault.spot)
        if fault.spot.value > first.value:
            spots[first.name] = Spot(name=first.name, since_step=first.since_step, value=fault.spot.value)
    return [_finding(question, *key, list(spots.values()), spectra) for key, spots in groups.items()]


def _distinct(
    collection: str, tensors: Mapping[str, Sequence[tuple[int, Spectrum]]], cast: set[str]
) -> Mapping[str, Sequence[tuple[int, Spectrum]]]:
    """Return the tensors to judge, each once: an output is the next module's input."""
    if collection != "activations":
        return tensors
    found: dict[tuple[Spectrum, ...], str] = {}
    for name in sorted(tensors, key=lambda name: (name not in cast, ":input" in name)):
        side = name.rpartition(":")[2]
        # Scores are inside of fused attention, and masks have the lowest number of FP32.
        if side != SCORES and "mask" not in side and (name in cast or not side.startswith("input")):
            found.setdefault(tuple(spectrum for _, spectrum in tensors[name]), name)
    return {name: tensors[name] for name in found.values()}


def _fault(question: Question, s: Spectrum, *, is_operand: bool) -> tuple[str, float] | None:
    """Return what is wrong with a tensor, and the share of its values. None: nothing."""
    if s.nonfinite:
        return "nonfinite", s.nonfinite / s.count
    fmt = question.forward
    if not s.nonzero or not (is_operand or question.is_native):
        return None
    shift = 0 if question.is_native or isinstance(fmt, BlockFormat) else scale_of(s, fmt)
    fit = s.fit(fmt, shift)
    if fit.overflow.estimate > 0 and not isinstance(fmt, BlockFormat):  # blocks saturate by the rule of their scales
        return "overflow", fit.overflow.estimate
    if is_operand and fit.lost.estimate >= TOLERANCE:
        return "underflow", fit.lost.estimate
    return None


def scale_of(s: Spectrum, fmt: Format) -> int:
    """Return the shift that brings the largest value into the binade below overflow."""
    window = s.window(fmt, 1.0)
    if not s.nonzero or window is None:
        return 0
    return min(max(window[1] - 1, _LOWEST), _HIGHEST)


def _finding(question: Question, rule: str, collection: str, spots: list[Spot], spectra: Spectra) -> Finding:
    spots = sorted(spots, key=lambda spot: -spot.value)
    worst, tensors = spots[0], spectra[collection]
    largest = max((s.absmax for spot in spots for _, s in tensors[spot.name] if s.nonzero), default=0.0)
    fmt, label, title = question.forward, LABELS[collection], question.title
    limit = fmt.max if isinstance(fmt, Format) else fmt.element.max
    share = f"up to {percent(worst.value)} of the values of {worst.name}"
    severity: Severity = "warning" if rule == "underflow" else "alarm"
    if rule == "nonfinite":
        meaning = f"{label} are NaN or infinite as recorded, whatever the format: {share}."
        advice = "Repair these first: pl.locate names the operation."
    elif rule == "overflow":
        meaning = f"{label} of up to {number(largest)} exceed {title}, which ends at {number(limit)}: {share}."
        advice = "Keep these in BF16 or FP32, or clamp them." if question.is_native else "Choose a wider format."
    else:
        blocks = " in blocks with scales of their own"
        scaled = blocks if isinstance(fmt, BlockFormat) else " at the largest scale that does not overflow"
        scaled = "" if question.is_native else scaled
        meaning = f"{label} round to zero in {title}{scaled}: {share}."
        advice = "Keep these in BF16." if question.name != "bf16" else "Keep these in FP32."
    evidence: dict[str, float | int | str] = {"worst": worst.name, "share": worst.value, "tensors": len(spots)}
    if rule == "overflow":
        evidence |= {"largest": float(largest), "limit": float(limit)}
    return Finding(
        rule=rule,
        severity=severity,
        since_step=min(spot.since_step for spot in spots),
        until_step=max(step for spot in spots for step, _ in tensors[spot.name]),
        where=tuple(spot.name for spot in spots),
        spots=tuple(spots),
        evidence=evidence,
        meaning=meaning[0].upper() + meaning[1:],
        advice=advice,
        collection=collection,
        figure="heatmap",
    )


def operands_of(modules: Iterable[Module], *, outputs: bool) -> Mapping[str, list[str]]:
    """Return the names of the operands of products, and with `outputs` of their results, by collection."""
    listed = list(modules)
    activations = [name for m in listed for name in (*m.inputs, *(m.outputs if outputs else ()))]
    return {"weights": [name for m in listed for name in m.weight], "activations": activations}


def uniform(question: Question, modules: Sequence[Module], spectra: Spectra) -> Plan:
    """Return the plan of all modules in the format, with scales for forward casts."""
    scales: dict[str, dict[str, float]] = {}
    fmt = question.forward
    if isinstance(fmt, Format) and not question.is_native:
        for module in (m for m in modules if not m.opaque):
            parts = {"weights": module.weight, "activations": module.inputs}
            scales[module.name] = {
                role: 2.0 ** min(scale_of(s, fmt) for name in names for _, s in spectra[role][name])
                for role, names in parts.items()
                if role in spectra and names
            }
    return Plan(
        target=question.target or question.name,
        formats={m.name: fmt.name for m in modules},
        backward={m.name: question.backward.name for m in modules if question.backward != fmt},
        scales={name: table for name, table in scales.items() if table},
        tolerance=TOLERANCE,
    )
