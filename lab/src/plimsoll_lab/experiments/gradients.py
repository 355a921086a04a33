"""Experiment `gradients` (N3, X3, A3): a detector's gradients at a scale of 8.

The detector is trained in FP32 and its activation gradients are recorded: how many are zero, where the others lie, and
what FP16 would lose of them at the loss scales 1, 8 and 32K; of its weights' gradients, how many are updates that FP16
does not hold. Then it is trained in FP16 at these scales, from the same weights on the same scenes. Zeros that FP16 has
made are distinguished from those of FP32 by shadow steps.

Where the gradients lie is stated, not hidden. Activations are 2^10 times those of a normalised network, as a VGG under
SSD takes pixels of 0 to 255 and amplifies them; and the loss is the share that 8 pictures have of a batch of 2,048.
Together they bring the gradients 2^18 lower, to FP16's lower end. Neither changes what is learnt in FP32.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from plimsoll import row_layout
from plimsoll.diagnosis import View
from plimsoll.formats import FP16
from plimsoll.report.drawing.plotly_parts import BLUE, GREEN, GREY, ORANGE, PURPLE, Layout, Trace, build_figure, powers
from plimsoll.runs import Run
from plimsoll.spectrum import Spectrum
from plimsoll.text import percent
from plimsoll_lab.bench import Bench
from plimsoll_lab.models.detector.training import (
    Job,
    Kind,
    Setup,
    jobs_of,
    judged,
    lost,
    over_seeds,
    rate_at,
    sized,
    train_all,
    whole_spectrum,
)
from plimsoll_lab.result import Claim, Measured, claims as claims_of, of_rows
from plimsoll_lab.study import Experiment, settings_of

if TYPE_CHECKING:
    from plotly.graph_objects import Figure  # pyright: ignore[reportMissingTypeStubs]

Ints, Floats = NDArray[np.int64], NDArray[np.float64]

SHIFTS = (0, 3, 15)  # scales 1, 8 and 32K
_FLUSHED = FP16.quantum_exponent - 1  # binades below this one round to zero
_MAGNITUDE = "magnitude: each bar is a binade, from its power of two up"
_LEAST = (-46, 18)  # binades that are always shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Contents of a spectrum, as fractions.

    - `zero`: of all values. All else is of the nonzero ones, but `wide`.
    - `lost`: rounded to zero by FP16 at the scales of `SHIFTS`. `band`: in [2^-27, 2^-24).
    - `wide`: in [2^-32, 2^-20), of all values.
    """

    zero: float
    lost: tuple[float, ...]
    band: float
    wide: float

    def to_dict(self) -> dict[str, float]:
        """As numbers by name."""
        by_scale = {f"lost_at_{2**shift}": lost for shift, lost in zip(SHIFTS, self.lost, strict=True)}
        return {"zero": self.zero, "band": self.band, "wide": self.wide, **by_scale}


def shares(spectrum: Spectrum) -> Shares:
    """The shares of a spectrum that FP32 has recorded, by `Spectrum.fit`."""
    return Shares(
        zero=spectrum.zero_fraction,
        lost=tuple(spectrum.fit("fp16", shift=shift).lost.estimate for shift in SHIFTS),
        band=between(spectrum, -27, -24) / spectrum.nonzero,
        wide=between(spectrum, -32, -20) / spectrum.count,
    )


def between(spectrum: Spectrum, low: int, high: int) -> int:
    """Return the number of values with magnitudes in [2^low, 2^high)."""
    return int(spectrum.binades[low - row_layout.LOWEST_BINADE : high - row_layout.LOWEST_BINADE].sum())


def below(spectrum: Spectrum, limit: float) -> float:
    """Return the number of values with magnitudes below a limit.

    Within the limit's binade values are taken as spread evenly.
    """
    mantissa, exponent = math.frexp(limit)
    binade = exponent - 1 - row_layout.LOWEST_BINADE
    return float(spectrum.binades[:binade].sum()) + float(spectrum.binades[binade]) * (2 * mantissa - 1)


def scale_for(spectrum: Spectrum, share: float) -> int | None:
    """Return the least shift that leaves at most `share` of values in [2^-32, 2^-20)."""
    fits = (up for up in range(64) if between(spectrum, -32 - up, -20 - up) <= share * spectrum.count)
    return next(fits, None)


def histogram(spectrum: Spectrum, title: str) -> "Figure":
    """Return each binade's share, coloured by the scale that FP16 needs for it."""
    exponents = np.arange(len(spectrum.binades)) + row_layout.LOWEST_BINADE
    some = exponents[spectrum.binades > 0]
    low, high = min([_LEAST[0], *some.tolist()]), max([_LEAST[1], *some.tolist()])
    share = spectrum.binades / spectrum.count
    shapes, notes = _limits()
    places, texts = powers(float(low), float(high), 14)
    layout_: Layout = {
        "xaxis": {
            "title": {"text": _MAGNITUDE}, "tickvals": places, "ticktext": texts, "range": [low - 0.5, high + 0.5],
        },
        "yaxis": {"title": {"text": "share of all gradients"}, "tickformat": "~%", "rangemode": "tozero"},
        "barmode": "stack", "bargap": 0.08, "height": 420, "shapes": shapes, "annotations": notes,
    }  # fmt: skip
    meta = {"figure": "gradients", "zero": spectrum.zero_fraction}
    traces = [_bars(exponents, share, *part) for part in _parts(high)]
    return build_figure("gradients", title, _said(spectrum), [t for t in traces if t["y"].any()], layout_, meta)


def _parts(high: int) -> list[tuple[int, int, str, str]]:
    """Binades [low, high) of each colour, and what it means."""
    ends = [_FLUSHED - shift for shift in reversed(SHIFTS)]
    return [
        (row_layout.LOWEST_BINADE, ends[0], "lost even at 32K", GREY),
        (ends[0], ends[1], "32K brings them back", PURPLE),
        (ends[1], ends[2], "8 brings them back", ORANGE),
        (ends[2], FP16.min_exponent, "held, not in full precision", BLUE),
        (FP16.min_exponent, high + 1, "held", GREEN),
    ]


def _bars(exponents: Ints, share: Floats, low: int, high: int, name: str, colour: str) -> Trace:
    chosen = (exponents >= low) & (exponents < high) & (share > 0)
    return {
        "type": "bar", "x": exponents[chosen], "y": share[chosen], "name": name, "marker": {"color": colour},
        "showlegend": True, "hovertemplate": "2<sup>%{x}</sup>: %{y:.2%}<extra></extra>",
    }  # fmt: skip


def _limits() -> tuple[list[Layout], list[Layout]]:
    """Return FP16's ends, and where they would be with a loss scale."""
    marks = [
        (FP16.quantum_exponent - shift, words, "solid" if shift == 0 else "dot")
        for shift, words in zip(SHIFTS, ("FP16's least", "at 8", "at 32K"), strict=True)
    ]
    marks += [(FP16.min_exponent, "least normal", "dash"), (FP16.max_exponent + 1, "overflow", "solid")]
    shapes: list[Layout] = []
    notes: list[Layout] = []
    for row, (at, words, dash) in enumerate(marks):
        edge = at - 0.5
        shapes.append(
            {"type": "line", "x0": edge, "x1": edge, "y0": 0, "y1": 1, "yref": "paper",
             "line": {"color": GREY, "width": 1.5, "dash": dash}}
        )  # fmt: skip
        notes.append(
            {"text": words, "x": edge, "y": 1 - 0.06 * (row % 2), "yref": "paper", "yanchor": "bottom",
             "showarrow": False, "font": {"size": 11}}
        )  # fmt: skip
    return shapes, notes


def _said(spectrum: Spectrum) -> str:
    found = shares(spectrum)
    lost = [percent(each) for each in found.lost]
    return (
        f"{percent(found.zero)} of all are zero in FP32; of the others FP16 loses {lost[0]} with no loss scale, "
        f"{lost[1]} at 8 and {lost[2]} at 32K"
    )


FIGURE = "report-histogram.html"
_TRAILS = 1.05  # of FP32's held-out loss: from here on FP16 trails, and below it trains as FP32 does
_ZERO, _NEAR = (0.668, 0.68), 0.1  # published of two networks; and within ten points of it
_WIDE = 0.04  # published of one
_SMALL = 0.05  # likewise

KINDS = (
    Kind(name="fp32", title="FP32", precision="fp32"),
    Kind(name="fp16", title="FP16, no loss scale", scaler="static"),
    Kind(name="fp16-8", title="FP16, loss scale 8", scaler="static", scale=2.0 ** SHIFTS[1]),
    Kind(name="fp16-32k", title="FP16, loss scale 32K", scaler="static", scale=2.0 ** SHIFTS[2]),
)
Numbers = Mapping[str, Mapping[str, float]]


def setup_for(steps: int | None, *, full: bool) -> Setup:
    """The sizes for that many steps."""
    return sized(Setup(), "gradients", steps, full=full)


def measure(bench: Bench) -> Measured:
    """All trainings, and what they show."""
    return measure_with(bench, setup_for(bench.steps, full=bench.full))


def measure_with(bench: Bench, setup: Setup) -> Measured:
    """Do the same with your own sizes."""
    jobs = jobs_of(bench, KINDS, setup.seeds)
    train_all(jobs, setup, bench)
    by_kind = {kind.name: [job for job in jobs if job.kind == kind] for kind in KINDS}
    numbers = {name: over_seeds(these, by_kind["fp32"]) for name, these in by_kind.items()}
    spectrum = sum((whole_spectrum(Run(job.run)) for job in by_kind["fp32"]), Spectrum.empty())
    numbers["fp32"] |= shares(spectrum).to_dict()
    numbers["fp32"]["updates_small"] = small_updates(by_kind["fp32"], setup)
    numbers["fp16-8"] |= foretold(by_kind["fp32"][0], by_kind["fp16-8"][0])
    histogram(spectrum, "Activation gradients of the detector in FP32").write_html(bench.runs.parent / FIGURE)
    trains = {name: numbers[name]["of_fp32"] < _TRAILS for name in numbers}
    trainings = tuple(
        judged(by_kind[name][0], numbers[name], "trains" if trains[name] else "trails FP32", good=trains[name])
        for name in numbers
    )
    return Measured(trainings=trainings, claims=claims(numbers), said=said(numbers, scale_for(spectrum, _WIDE)))


def foretold(wide: Job, narrow: Job) -> dict[str, float]:
    """Return FP16's loss at scale 8 as foretold by FP32's first step, and the error.

    The weights of both first steps are the same.
    """
    record = whole_spectrum(Run(wide.run), slice(0, 1))
    said = record.fit("fp16", shift=SHIFTS[1]).lost.estimate
    return {"foretold": said, "foretold_off": abs(lost(View(Run(narrow.run), 0))["lost"] - said)}


def small_updates(jobs: Sequence[Job], setup: Setup) -> float:
    """Return the part of nonzero weight gradients below 2^-24 times the rate."""
    small, all_of_them = 0.0, 0
    for job in jobs:
        for step, _, _, spectrum in Run(job.run).spectra("gradients"):
            small += below(spectrum, 2.0**FP16.quantum_exponent / rate_at(step, setup))
            all_of_them += spectrum.nonzero
    return small / max(all_of_them, 1)


def claims(numbers: Numbers) -> tuple[Claim, ...]:
    """Return the experiment's claims.

    A bound on a mean over seeds is one that it keeps with 95 %.
    """
    return (
        *of_rows(_of_zeros(numbers), "N3", "X3"),
        *of_rows(_of_values(numbers), "N3"),
        *of_rows(_of_updates(numbers), "A3"),
        *of_rows(_of_band(numbers), "X3"),
        *of_rows(_of_trainings(numbers), "N3"),
    )


def _of_zeros(numbers: Numbers) -> tuple[Claim, ...]:
    fp32 = numbers["fp32"]
    return claims_of(
        f"""
        zeros | fp32.zero | at least {_ZERO[0] - _NEAR} and at most {_ZERO[1] + _NEAR} of gradients
            | two thirds of the activation gradients are zero, in FP32 too (published: 66.8 %, 68 %)
        """,
        fp32=fp32,
    )


def _of_values(numbers: Numbers) -> tuple[Claim, ...]:
    fp32, none, eight = numbers["fp32"], numbers["fp16"], numbers["fp16-8"]
    return claims_of(
        """
        fp16-turns-most-to-zero | none.lost | at least 0.5 of the nonzero ones
            | FP16 with no loss scale turns most of the others to zero
        band-tells | fp32.band | at least 0.05 of the nonzero ones
            | values in [2^-27, 2^-24), which a scale of 8 brings back, are not few
        32k-nothing-lost | numbers['fp16-32k'].lost | at most 0.01 of the nonzero ones
            | FP16 at 32K: nearly no gradient is lost
        foretold | eight.foretold_off | at most 0.05 of the nonzero ones, off
            | the FP32 record says beforehand what FP16 at 8 loses
        """,
        eight=eight,
        fp32=fp32,
        none=none,
        numbers=numbers,
    )


def _of_updates(numbers: Numbers) -> tuple[Claim, ...]:
    fp32 = numbers["fp32"]
    return claims_of(
        f"""
        small-updates | fp32.updates_small | at least {_SMALL / 2} and at most {_SMALL * 2} of the nonzero ones
            | 5 % of weights' gradients, times the learning rate, lie below 2^-24 (published)
        """,
        fp32=fp32,
    )


def _of_band(numbers: Numbers) -> tuple[Claim, ...]:
    fp32 = numbers["fp32"]
    return claims_of(
        f"""
        published-band | fp32.wide | at least {_WIDE / 2} and at most {_WIDE * 2} of gradients
            | 4 % of all lie in 2^-32 to 2^-20, as in one published network
        """,
        fp32=fp32,
    )


def _of_trainings(numbers: Numbers) -> tuple[Claim, ...]:
    none, eight, more = numbers["fp16"], numbers["fp16-8"], numbers["fp16-32k"]
    return claims_of(
        f"""
        none-trails | none.of_fp32_low | at least {_TRAILS} of FP32's loss, at least
            | FP16 with no loss scale ends behind FP32
        8-trains | eight.of_fp32_high | at most {_TRAILS} of FP32's loss, at most | FP16 at 8 trains as FP32 does
        below-does-not-matter | eight.lost | at least 0.1 of the nonzero ones
            | FP16 at 8 does so though it loses many: those below 2^-27 do not matter
        32k-trains | more.of_fp32_high | at most {_TRAILS} of FP32's loss, at most | FP16 at 32K trains as FP32 does
        """,
        eight=eight,
        more=more,
        none=none,
    )


def said(numbers: Numbers, larger: int | None) -> tuple[str, ...]:
    """Return the findings in sentences.

    `larger`: powers of two by which gradients would have to be larger for the published band.
    """
    fp32, eight = numbers["fp32"], numbers["fp16-8"]
    held = (
        f"In FP32 {percent(fp32['zero'], 1)} of the activation gradients are zero. Of the others FP16 would lose "
        f"{percent(fp32['lost_at_1'], 1)} with no loss scale, {percent(fp32['lost_at_8'], 1)} at 8 and "
        f"{percent(fp32['lost_at_32768'], 2)} at "
        f"32K; {percent(fp32['band'], 1)} lie in [2^-27, 2^-24). {FIGURE} shows it."
    )
    words = {"fp16": "with no loss scale", "fp16-8": "at 8", "fp16-32k": "at 32K"}
    text = ", ".join(f"{scale} {_ended(numbers[name])}" for name, scale in words.items())
    trained = f"Held-out loss in FP16, in units of FP32's (mAP {fp32['held_out_map']:.3f}): {text}."
    made = percent(eight["zeros_by_fp16"], 0)
    zeros = f"Of the zeros in FP16 at 8, {made} were made by FP16; the others are zero in FP32 too."
    wide = f"{percent(fp32['wide'], 1)} of all lie in 2^-32 to 2^-20"
    wide += "." if larger is None else f"; it would be 4 % if all gradients were 2^{larger} times as large."
    return held, trained, zeros, wide


def _ended(numbers: Mapping[str, float]) -> str:
    return f"{numbers['of_fp32']:.3f} (mAP {numbers['held_out_map']:.3f}, {percent(numbers['lost'], 1)} lost)"


def _settings(bench: Bench) -> Mapping[str, object]:
    return settings_of(setup_for(bench.steps, full=bench.full), bench.device)


GRADIENTS = Experiment(
    name="gradients",
    claim="Most activation gradients of a detector are zero, FP16 flushes most others; a loss scale of 8 is enough.",
    source="N3, X3, A3",
    settings=_settings,
    measure=measure,
)
