"""Consoles of Rich for results that are drawn, and the characters to draw with."""

import io
import os
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from plimsoll.cli import messages
from plimsoll.text import printable

SIGN, EXPONENT, MANTISSA = "red", "cyan", "green"
# A terminal gets text wrapped at its width. A pipe gets whole lines, neither wrapped nor padded, so that `grep` and
# `cut` work on them. The variable COLUMNS sets a width for both.
_UNLIMITED = 100_000  # columns of a pipe: no line of a result is longer
_WIDEST_DRAWING = 100  # columns of a drawing or table on a wide terminal
_DRAWING_IN_A_PIPE = 80
_PADDING = re.compile(r" +(?=\n|\Z)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Glyphs:
    """The characters of a drawing. Each is one cell wide."""

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
    """A console without others' escape sequences and Rich's markup in their texts."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Clean all text, cells of tables included, before it is rendered."""
        if isinstance(renderable, str):
            renderable = printable(renderable)
        elif isinstance(renderable, Text) and (clean := printable(renderable.plain)) != renderable.plain:
            # The styles of parts are dropped, since the positions that they cover have moved.
            renderable = Text(
                clean, renderable.style, justify=renderable.justify, overflow=renderable.overflow,
                no_wrap=renderable.no_wrap, end=renderable.end,
            )  # fmt: skip
        return super().render(renderable, options)


class _Unpadded(io.TextIOBase):
    """A stream without the spaces with which Rich fills each line up to the width."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    @property
    def encoding(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The encoding of the stream below, by which Rich chooses its characters."""
        return self._stream.encoding

    def write(self, text: str) -> int:
        """Write text without the spaces at the ends of its lines."""
        return self._stream.write(_PADDING.sub("", text))

    def flush(self) -> None:
        """Flush the stream below, unless it is closed: Python flushes this one once more as it ends."""
        if not self._stream.closed:
            self._stream.flush()


def console(*, stderr: bool = False) -> Console:
    """Return the console for results. It prints nothing under ``--quiet``."""
    # Rich honours COLUMNS, NO_COLOR and FORCE_COLOR, and writes no colours into a pipe.
    target = _Console(stderr=stderr, quiet=messages.is_quiet())
    if target.is_terminal:
        return target
    width = {} if "COLUMNS" in os.environ else {"width": _UNLIMITED}
    stream: Any = _Unpadded(sys.stderr if stderr else sys.stdout)
    return _Console(file=stream, quiet=messages.is_quiet(), **width)


def table_width(target: Console) -> int | None:
    """Return the width of tables, at most 100 cells; None in a pipe."""
    return None if target.width == _UNLIMITED else min(target.width, _WIDEST_DRAWING)


def drawing_width(target: Console) -> int:
    """Return the width for drawings, which need one in a pipe too."""
    return _DRAWING_IN_A_PIPE if target.width == _UNLIMITED else target.width


def glyphs(target: Console) -> Glyphs:
    """Return line-drawing characters if the terminal has them, else ASCII."""
    return ASCII if target.options.ascii_only else UNICODE
