"""Where the tensors of a training lie in FP16: the loss scales that serve each of them, and that serve them all."""

from dataclasses import dataclass

from plimsoll.runs import Run
from plimsoll.spectrum import Spectrum
from plimsoll_lab.models.detector.analysis import COLLECTION, counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans:
    """By tensor: the powers of two at which nothing overflows and less than 1 % is lost; None where no one serves."""

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
    """Of all activation gradients of a run in FP32, each tensor's added up over its steps."""
    whole: dict[str, Spectrum] = {}
    for _, _, name, spectrum in run.spectra(COLLECTION):
        if counted(name):
            whole[name] = whole.get(name, Spectrum.empty()) + spectrum
    return Spans(windows={name: spectrum.window("fp16") for name, spectrum in whole.items()})
