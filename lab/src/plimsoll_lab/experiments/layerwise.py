"""Experiment `layerwise` (T7): a scale per layer against one, on a small detector.

The detector of `gradients`, whose loss is brought 2^7 lower still: divided by all default boxes, as where nobody
divides by those that match, of which there are some 2^7 times fewer. Static scales then have to be tried; the others
are given none. From the same weights and scenes, seed by seed: FP32; FP16 with four static scales; torch's GradScaler,
`DynamicScaler` and `SpectralScaler`, one scale each; and `LayerScaler`, by its own rule and by the published one.

Whether one scale could serve all layers is read from the spectra of the FP32 training.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from plimsoll.runs import Run
from plimsoll.spectrum import Spectrum
from plimsoll.text import percent
from plimsoll_lab.bench import Bench
from plimsoll_lab.models.detector.training import (
    COLLECTION,
    Job,
    Kind,
    Setup,
    counted,
    jobs_of,
    judged,
    over_seeds,
    ratio_of,
    sized,
    smoothed,
    steps_to,
    train_all,
)
from plimsoll_lab.result import Claim, Measured, Training
from plimsoll_lab.study import Experiment, settings_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans:
    """Usable scales of each tensor: no overflow and under 1 % lost; None without any."""

    windows: dict[str, tuple[int, int] | None]

    @property
    def common(self) -> tuple[int, int] | None:
        """The powers of two that serve all tensors; None where none does."""
        known = [window for window in self.windows.values() if window is not None]
        if not known or len(known) < len(self.windows):
            return None
        low, high = max(low for low, _ in known), min(high for _, high in known)
        return (low, high) if low <= high else None

    def to_dict(self) -> dict[str, float]:
        """As numbers; without the common window where there is none."""
        known = [window for window in self.windows.values() if window is not None]
        found = {"tensors": float(len(self.windows)), "no_scale_serves": float(len(self.windows) - len(known))}
        if known:
            found["tops_apart"] = float(max(high for _, high in known) - min(high for _, high in known))
        if self.common is not None:
            found |= {"window_low": float(self.common[0]), "window_high": float(self.common[1])}
        return found


def spans_of(run: Run) -> Spans:
    """Return an FP32 run's activation gradients, added up over steps by tensor."""
    whole: dict[str, Spectrum] = {}
    for _, _, name, spectrum in run.spectra(COLLECTION):
        if counted(name):
            whole[name] = whole.get(name, Spectrum.empty()) + spectrum
    return Spans(windows={name: spectrum.window("fp16") for name, spectrum in whole.items()})


_SETUP = Setup(steps=150, share=2.0**-15)
_AS_GOOD = 1.02  # of a held-out loss: "at least as good", within what three seeds can tell
_TRAILS = 1.05
_NEAR = 1.1  # of the loss that FP32 ends at, for how soon others come near it

STATIC = tuple(
    Kind(name=f"static-{shift}", title=f"FP16, static 2^{shift}", scaler="static", scale=2.0**shift)
    for shift in (0, 7, 10, 15)
)
KINDS = (
    Kind(name="fp32", title="FP32", precision="fp32"),
    Kind(name="layer-spectra", title="FP16, LayerScaler", scaler="layer-spectra"),
    Kind(name="layer-zhao", title="FP16, LayerScaler, published rule", scaler="layer-zhao"),
    Kind(name="stock", title="FP16, GradScaler", scaler="stock"),
    Kind(name="dynamic", title="FP16, DynamicScaler", scaler="dynamic"),
    Kind(name="spectral", title="FP16, SpectralScaler", scaler="spectral"),
    *STATIC,
)
_ADAPTIVE = ("layer-spectra", "layer-zhao", "stock", "dynamic", "spectral")
Jobs = Mapping[str, Sequence[Job]]
Numbers = Mapping[str, Mapping[str, float]]


def setup_for(steps: int | None, *, full: bool) -> Setup:
    """The sizes for that many steps."""
    return sized(_SETUP, "layerwise", steps, full=full)


def measure(bench: Bench) -> Measured:
    """All trainings, and what they show."""
    return measure_with(bench, setup_for(bench.steps, full=bench.full))


def measure_with(bench: Bench, setup: Setup) -> Measured:
    """Do the same with your own sizes."""
    jobs = jobs_of(bench, KINDS, setup.seeds)
    train_all(jobs, setup, bench)
    by_kind = {kind.name: [job for job in jobs if job.kind == kind] for kind in KINDS}
    numbers = numbers_of_all(by_kind)
    trainings = tuple(_training(these[0], numbers[name]) for name, these in by_kind.items())
    return Measured(trainings=trainings, claims=claims(numbers), said=said(numbers))


def numbers_of_all(by_kind: Jobs) -> dict[str, dict[str, float]]:
    """Return each kind's numbers over seeds, against the best static scale and FP32."""
    numbers = {name: over_seeds(these, by_kind["fp32"]) for name, these in by_kind.items()}
    best = best_static(numbers)
    ends = [_NEAR * float(smoothed(Run(job.run))[1][-1]) for job in by_kind["fp32"]]
    for name, these in by_kind.items():
        against = ratio_of(these, by_kind[best])
        numbers[name] |= {"of_best": against.mean, "of_best_low": against.low, "of_best_high": against.high}
        soon = [steps_to(Run(job.run), end) for job, end in zip(these, ends, strict=True)]
        numbers[name]["steps_to_near"] = float(np.mean(soon))
    numbers["fp32"] |= spans_of(Run(by_kind["fp32"][0].run)).to_dict()
    return numbers


def best_static(numbers: Numbers) -> str:
    """The static scale with the lowest held-out loss in the mean over seeds."""
    return min((kind.name for kind in STATIC), key=lambda name: numbers[name]["of_fp32"])


def _worst_static(numbers: Numbers) -> str:
    return max((kind.name for kind in STATIC), key=lambda name: numbers[name]["of_fp32"])


def _training(job: Job, numbers: Mapping[str, float]) -> Training:
    good = numbers["of_fp32"] < _TRAILS
    return judged(job, numbers, "trains" if good else "trails FP32", good=good)


def claims(numbers: Numbers) -> tuple[Claim, ...]:
    """Return the experiment's claims.

    A bound on a mean over seeds is one that it keeps with 95 %.
    """
    best, worst = best_static(numbers), _worst_static(numbers)
    return (
        Claim("static-has-to-be-tried", "the worst static scale of the four ends behind the best",
              numbers[worst]["of_best_low"], at_least=_TRAILS, unit="of its loss, at least"),
        Claim("static-as-fp32", "the best static scale ends where FP32 does",
              numbers[best]["of_fp32_high"], at_most=_AS_GOOD, unit="of FP32's loss, at most"),
        *(_as_good(numbers, name) for name in _ADAPTIVE),
        *(_as_fp32(numbers, name) for name in _ADAPTIVE),
        *(_no_batch_lost(numbers, name) for name in ("layer-spectra", "layer-zhao", "spectral")),
        Claim("layer-loses-least", "LayerScaler loses no more gradients than the best static scale",
              numbers["layer-spectra"]["lost"] - numbers[best]["lost"], at_most=0.0, unit="of the nonzero ones, more"),
        Claim("one-scale-could-serve", "some single scale would serve all layers",
              _width(numbers["fp32"]), at_least=0.0, unit="binades wide"),
    )  # fmt: skip


def _as_good(numbers: Numbers, name: str) -> Claim:
    return Claim(f"{name}-as-best", f"{_title(name)}, nothing tried: at least as good as the best static scale",
                 numbers[name]["of_best_high"], at_most=_AS_GOOD, unit="of its loss, at most")  # fmt: skip


def _as_fp32(numbers: Numbers, name: str) -> Claim:
    """FP32 is what all aim at, and is not the best of several."""
    return Claim(f"{name}-as-fp32", f"{_title(name)}, nothing tried: ends where FP32 does",
                 numbers[name]["of_fp32_high"], at_most=_AS_GOOD, unit="of FP32's loss, at most")  # fmt: skip


def _no_batch_lost(numbers: Numbers, name: str) -> Claim:
    return Claim(f"{name}-no-batch-lost", f"{_title(name)}: no batch is lost",
                 numbers[name]["batches_lost"], at_most=0.0, unit="batches")  # fmt: skip


def _title(name: str) -> str:
    return next(kind.title for kind in KINDS if kind.name == name).removeprefix("FP16, ")


def _width(numbers: Mapping[str, float]) -> float:
    """Return the binades between the lowest and the highest scale that serve all.

    NaN where none does.
    """
    return numbers.get("window_high", float("nan")) - numbers.get("window_low", float("nan"))


def said(numbers: Numbers) -> tuple[str, ...]:
    """A table of all kinds, and what it comes to."""
    head = f"{'':<33}{'loss':>6}{'of best':>9}{'mAP':>7}{'lost':>9}{'batches':>8}{'steps':>7}"
    rows = [_row(kind.title, numbers[kind.name]) for kind in KINDS]
    return (head, *rows, _serves(numbers), _windows(numbers["fp32"]))


def _row(title: str, numbers: Mapping[str, float]) -> str:
    lost = f"{percent(numbers['lost'], 2)}" if "lost" in numbers else "-"
    return (
        f"{title:<33}{numbers['held_out_loss']:>6.3f}{numbers['of_best']:>9.3f}{numbers['held_out_map']:>7.3f}{lost:>9}"
        f"{numbers['batches_lost']:>8.0f}{numbers['steps_to_near']:>7.0f}"
    )


def _serves(numbers: Numbers) -> str:
    """Return which kinds are as good as the best static scale, and which are not."""
    good = [_title(name) for name in _ADAPTIVE if numbers[name]["of_best_high"] <= _AS_GOOD]
    bad = [_title(name) for name in _ADAPTIVE if numbers[name]["of_best_high"] > _AS_GOOD]
    best, worst = best_static(numbers), _worst_static(numbers)
    text = f"As good as the best static scale ({_title(best).removeprefix('static ')}): {', '.join(good) or 'none'}."
    text += f" Not shown to be: {', '.join(bad)}." if bad else ""
    text += f" Of FP32 itself it is shown to within {percent(numbers['fp32']['of_best_high'] - 1, 1)}."
    behind = numbers[worst]["of_best"] - 1
    return f"{text} The worst static scale ({_title(worst).removeprefix('static ')}) ends {percent(behind, 0)} behind."


def _windows(fp32: Mapping[str, float]) -> str:
    """Return what the spectra show of one scale for all layers."""
    if "window_low" not in fp32:
        return (
            f"No single scale fits all {fp32['tensors']:.0f} tensors: {fp32['no_scale_serves']:.0f} have none at all."
        )
    return (
        f"The tensors' largest gradients lie {fp32['tops_apart']:.0f} binades apart. Scales of "
        f"2^{fp32['window_low']:.0f} to 2^{fp32['window_high']:.0f} hold all {fp32['tensors']:.0f} with less than 1 % "
        "lost: a scale per layer is not needed here, a single one that finds its place is enough."
    )


def _settings(bench: Bench) -> Mapping[str, object]:
    setup = setup_for(bench.steps, full=bench.full)
    return settings_of(setup, bench.device, kinds=[kind.name for kind in KINDS])


LAYERWISE = Experiment(
    name="layerwise",
    claim="On a detector, a scale per layer is at least as good as the best static one, with nothing to try.",
    source="T7",
    settings=_settings,
    measure=measure,
)
