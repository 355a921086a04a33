"""Words on figures: safe names, powers of two, percentages, collections' names."""

import math
import textwrap
from collections.abc import Iterable, Sequence

from plimsoll.diagnosis import shown
from plimsoll.diagnosis.wording import collection_words

_SIGNS = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", "$": "&#36;"})
MINUS = "\N{MINUS SIGN}"


# Plotly renders a little HTML in every text (and TeX, where a page has loaded MathJax). Names come from whoever wrote
# the run, so they are shortened, freed of control characters and escaped before they become part of any text. Nothing
# from a run stands in a `hovertemplate`, which has a language of its own: it is given as data.
def safe(text: str, most: int = 60) -> str:
    """Return a run's text for a figure: at most 60 printable characters, no markup.

    >>> safe("<b>w</b>"), safe("model.layers.11.attention.query.weight", most=24)
    ('&lt;b&gt;w&lt;/b&gt;', 'model.lay…n.query.weight')
    """
    clean = shown(text)
    if len(clean) > most:
        head = most * 2 // 5
        clean = f"{clean[:head]}…{clean[head + 1 - most :]}"
    return clean.translate(_SIGNS)


def labels(texts: Iterable[str], most: int = 40) -> list[str]:
    """Return the texts made safe, with a number where two would look alike."""
    seen: dict[str, int] = {}
    result: list[str] = []
    for text in texts:
        label = safe(text, most)
        seen[label] = seen.get(label, 0) + 1
        result.append(label if seen[label] == 1 else f"{label} ({seen[label]})")
    return result


def of(collection: str) -> str:
    """Return a collection's name within a sentence."""
    return safe(collection_words(collection))


def capital(text: str) -> str:
    """The text with a capital letter first."""
    return text[:1].upper() + text[1:]


def power(exponent: float) -> str:
    """A power of two.

    >>> power(9.5)
    '2<sup>9.5</sup>'
    """
    digits = f"{exponent:.0f}" if float(exponent).is_integer() else f"{exponent:.1f}"
    return f"2<sup>{digits.replace('-', MINUS)}</sup>"


def scale_range(low: int, high: int) -> str:
    """Return scales between two exponents, as `what_if.scale_windows.scales` does."""
    return power(low) if low == high else f"{power(low)} to {power(high)}"


def powers(low: float, high: float, most: int = 9) -> tuple[list[float], list[str]]:
    """Return about `most` ticks at powers of two: their places and texts."""
    steps = (1, 2, 4, 8, 16, 32, 64)
    span = max(high - low, 1.0)
    step = next((s for s in steps if span / s <= most), 128)
    places = [float(e) for e in range(math.ceil(low / step) * step, math.floor(high) + 1, step)]
    return places, [power(e) for e in places]


def joined(parts: Sequence[str]) -> str:
    """Half-sentences as a subtitle."""
    return " · ".join(part for part in parts if part)


def wrapped(text: str, width: int = 72, most: int = 400) -> str:
    """A sentence from a run or a rule, safe, over several lines."""
    clean = "".join(c if c.isprintable() else " " for c in text[:most])
    return "<br>".join(line.translate(_SIGNS) for line in textwrap.wrap(clean, width))
