"""Abilities of the terminal: its console, and characters to draw with.

All that a command prints goes through here. Names, settings and texts of a run are somebody else's: they are shown
without what would move the cursor, hide a line or turn its direction (`plimsoll.text.printable`).
"""

import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from plimsoll.text import printable

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


class _Console(Console):
    """A console that shows text, and does not obey it: neither escape sequences nor Rich's own markup."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """As any console does, once the text is clean; everything that is printed, cells of tables too, comes here."""
        if isinstance(renderable, str):
            renderable = printable(renderable)
        elif isinstance(renderable, Text) and (clean := printable(renderable.plain)) != renderable.plain:
            renderable = Text(  # colours of parts go: what they cover has moved
                clean, renderable.style, justify=renderable.justify, overflow=renderable.overflow,
                no_wrap=renderable.no_wrap, end=renderable.end,
            )  # fmt: skip
        return super().render(renderable, options)


def console(*, stderr: bool = False) -> Console:
    """Return the console for results. Rich honours COLUMNS and NO_COLOR, and writes no colours into a pipe."""
    return _Console(stderr=stderr)


def say(text: str) -> None:
    """Print text of any number of lines, unwrapped."""
    typer.echo(printable(text.removesuffix("\n")))


def say_line(text: str) -> None:
    """Print one line, unwrapped, whatever is in it."""
    typer.echo(printable(text, lines=False))


def as_json(data: object) -> str:
    """JSON for other programs, in printable ASCII."""
    return json.dumps(data, indent=2, allow_nan=False).replace("\x7f", "\\u007f")


def say_json(data: object) -> None:
    """Print JSON for other programs."""
    typer.echo(as_json(data))


def complain(text: str) -> None:
    """Print one line to stderr, unwrapped, so that it can be copied."""
    print(printable(f"plimsoll: {text}", lines=False), file=sys.stderr)  # noqa: T201


def glyphs(target: Console) -> Glyphs:
    """Line-drawing characters where the terminal's encoding has them, ASCII elsewhere."""
    return ASCII if target.options.ascii_only else UNICODE
