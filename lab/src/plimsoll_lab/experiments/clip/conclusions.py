"""Which remedy serves, in sentences that follow from the numbers."""

from collections.abc import Mapping

from plimsoll.text import percent

Numbers = Mapping[str, Mapping[str, float]]
_PARTED, _SOUND = 1.1, 0.05  # times BF16's loss; of gradients lost (T6)
_BURST = {
    "fp16": "the stock scaler", "fp16-high": "2^24 to begin with", "fp16-short": "doubling every 100 steps",
    "fp16-both": "both of these", "fp16-spectral": "SpectralScaler", "fp16-layer": "LayerScaler",
    "fp16-zhao": "the published layer rule", "fp16-parameter": "a scale per parameter",
    "fp16-element": "a scale per element",
}  # fmt: skip
_ALWAYS = {
    "fp16-both-always-hard": "2^24 and doubling every 100 steps", "fp16-layer-always-hard": "LayerScaler",
    "fp16-parameter-always-hard": "a scale per parameter",
}  # fmt: skip


def said(numbers: Numbers) -> tuple[str, ...]:
    """What was found."""
    return (
        _serving("After ten hard batches", _BURST, numbers, "bf16"),
        _serving("Where all batches are hard", _ALWAYS, numbers, "bf16-always-hard"),
        _never(numbers["fp16-never-hard"]),
        _cost(numbers["fp16-parameter"], numbers["fp16-element"]),
    )


def _never(these: Mapping[str, float]) -> str:
    grown = these["scale_end"] - these["scale_before"]
    return (
        f"Without hard batches FP16 with the stock scaler loses {percent(these['lost_before'], 1)} of gradients at "
        "first and "
        f"{percent(these['lost_after'], 0)} in the end: they shrink by {these['gradient_fell_binades']:.1f} binades, "
        "its scale "
        f"grows by {grown:.0f}."
    )


def _cost(parameter: Mapping[str, float], element: Mapping[str, float]) -> str:
    return (
        f"A scale per parameter takes {parameter['scale_bytes']:.0f} bytes, one per element "
        f"{element['scale_bytes']:,.0f}: {element['scale_bytes_per_weight']:.1f} for each weight."
    )


def _serving(where: str, names: Mapping[str, str], numbers: Numbers, bf16: str) -> str:
    """What ends with whole gradients and within 10 % of BF16, the lowest loss first, and what does not."""
    ratio = {name: numbers[name]["loss_end"] / numbers[bf16]["loss_end"] for name in names}
    order = sorted(ratio, key=lambda name: ratio[name])
    whole = [name for name in order if ratio[name] <= _PARTED and numbers[name]["lost_end"] <= _SOUND]
    serve = ", ".join(f"{names[name]} ({ratio[name]:.2f} of BF16's loss)" for name in whole)
    rest = ", ".join(
        f"{names[name]} ({ratio[name]:.2f}, {percent(numbers[name]['lost_end'], 0)} of gradients lost)"
        for name in order
        if name not in whole
    )
    return f"{where} this serves: {serve or 'nothing but BF16'}." + (f" This does not: {rest}." if rest else "")
