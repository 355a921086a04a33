"""What the terminal can show: its console, and characters to draw with."""

import math
from dataclasses import dataclass

from rich.console import Console

SIGN, EXPONENT, MANTISSA = "red", "cyan", "green"


@dataclass(frozen=True, slots=True, kw_only=True)
class Glyphs:
    """The characters of a drawing; every one is a single cell wide."""

    normal: str
    subnormal: str
    outside: str
    before: str
    beyond: str
    line: str
    tick: str
    dot: str
    times: str
    dash: str
    corners: tuple[str, str, str, str, str, str]  # top left, tee, right; bottom left, tee, right
    side: str
    present: str
    absent: str


UNICODE = Glyphs(
    normal="█", subnormal="░", outside=" ", before="◀", beyond="▶", line="─", tick="┴", dot="·", times="×", dash="–",
    corners=("┌", "┬", "┐", "└", "┴", "┘"), side="│", present="✓", absent="–",
)  # fmt: skip
ASCII = Glyphs(
    normal="#", subnormal="-", outside=" ", before="<", beyond=">", line="-", tick="+", dot=".", times="x", dash="-",
    corners=("+", "+", "+", "+", "+", "+"), side="|", present="+", absent="-",
)  # fmt: skip


def console() -> Console:
    """The console for results. Rich honours COLUMNS and NO_COLOR, and writes no colours into a pipe."""
    return Console(highlight=False)


def glyphs(target: Console) -> Glyphs:
    """Line-drawing characters where the terminal's encoding has them, ASCII elsewhere."""
    return ASCII if target.options.ascii_only else UNICODE


def number(value: float) -> str:
    """A value in at most nine characters: exact where it is a short integer, else with three digits.

    >>> number(65504.0), number(0.015625), number(2.0**-24), number(3.4e38)
    ('65504', '0.0156', '5.96e-8', '3.40e38')
    """
    if value.is_integer() and abs(value) < 1e6:
        return str(int(value))
    if 1e-3 <= abs(value) < 1e6:
        return f"{value:.3g}"
    # Rounded to three digits, float64's largest value would read back as infinity.
    rounded = f"{value:.2e}" if float(f"{value:.2e}") < math.inf else "1.79e308"
    digits, exponent = rounded.split("e")
    return f"{digits}e{int(exponent)}"
