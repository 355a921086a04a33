"""What the terminal can show: its console, and characters to draw with."""

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
