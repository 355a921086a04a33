"""Drawings of a format: bits as cells, and range along an axis of powers of two."""

import math
from dataclasses import dataclass

from rich.text import Text

from plimsoll.cli.terminal import EXPONENT, MANTISSA, SIGN, Glyphs
from plimsoll.formats import BlockFormat, Format

_STEPS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)  # binades between two ticks of an axis


# ----------------------------------------------------------------------------------------------------------------- bits


@dataclass(frozen=True, slots=True, kw_only=True)
class _Field:
    """One field of a code: its letter, name, width in bits and colour."""

    letter: str
    name: str
    short: str
    bits: int
    style: str


def fields(fmt: Format) -> list[_Field]:
    """Return the fields of a code from the highest bit down, without empty ones."""
    every = (
        _Field(letter="S", name="sign", short="s", bits=int(fmt.signed), style=SIGN),
        _Field(letter="E", name="exponent", short="exp", bits=fmt.exponent_bits, style=EXPONENT),
        _Field(letter="M", name="mantissa", short="man", bits=fmt.mantissa_bits, style=MANTISSA),
    )
    return [field for field in every if field.bits]


def bit_cells(fmt: Format, width: int, glyphs: Glyphs) -> list[Text]:
    """Return the code as cells of a bit each, or of a field each if `width` is small."""
    parts = fields(fmt)
    if 4 * fmt.bits + 1 <= width:
        cells = [(field, [f" {field.letter} "] * field.bits) for field in parts]
        inner = glyphs.corners[1], glyphs.side, glyphs.corners[4]
    elif fmt.bits + len(parts) + 1 <= width:
        cells = [(field, [field.letter] * field.bits) for field in parts]
        inner = "", "", ""
    else:
        cells = [(field, [f" {field.letter} {glyphs.times} {field.bits} "]) for field in parts]
        inner = "", "", ""
    return [
        _bit_numbers(cells, fmt.bits, bool(inner[0])),
        _border(cells, glyphs, glyphs.corners[:3], inner[0]),
        _letters(cells, glyphs, inner[1]),
        _border(cells, glyphs, glyphs.corners[3:], inner[2]),
        _names(cells, len(inner[0])),
    ]


_Cells = list[tuple[_Field, list[str]]]


def _bit_numbers(cells: _Cells, bits: int, each: bool) -> Text:
    line, bit = "", bits - 1
    for field, texts in cells:
        if each:
            line += "".join(f"{number:>3} " for number in range(bit, bit - field.bits, -1))
        else:
            span = sum(len(text) for text in texts)
            first, last = str(bit), str(bit - field.bits + 1)
            wide = field.bits > 1 and span > len(first) + len(last)
            line += " " + (first + last.rjust(span - len(first)) if wide else first.rjust(span))
        bit -= field.bits
    return Text(line.rstrip(), style="dim")


def _border(cells: _Cells, glyphs: Glyphs, corners: tuple[str, ...], inner: str) -> Text:
    segments = [inner.join(glyphs.line * len(text) for text in texts) for _, texts in cells]
    return Text(corners[0] + corners[1].join(segments) + corners[2], style="dim")


def _letters(cells: _Cells, glyphs: Glyphs, inner: str) -> Text:
    line = Text(glyphs.side, style="dim")
    for field, texts in cells:
        for index, text in enumerate(texts):
            line.append(text, style=f"bold {field.style} not dim")
            line.append(inner if index < len(texts) - 1 else glyphs.side)
    return line


def _names(cells: _Cells, inner: int) -> Text:
    line = Text()
    for field, texts in cells:
        span = sum(len(text) for text in texts) + inner * (len(texts) - 1) + 1
        room = span if field.name == "sign" else span - 1
        name = next((name for name in (field.name, field.short) if len(name) <= room), field.letter)
        line.append(f"{name:^{span}}", style=field.style)
    line.rstrip()
    return line


def block_cells(fmt: BlockFormat, glyphs: Glyphs) -> list[Text]:
    """Return one block as it lies in memory: its scale, then its elements."""
    cells = [
        ("scale", fmt.scale.name, EXPONENT),
        ("0", fmt.element.name, MANTISSA),
        ("1", fmt.element.name, MANTISSA),
        ("", "...", "default"),
        (str(fmt.block - 1), fmt.element.name, MANTISSA),
    ]
    widths = [max(len(above), len(name)) + 2 for above, name, _ in cells]
    heads, line = " ", Text(glyphs.side, style="dim")
    for (above, name, style), width in zip(cells, widths, strict=True):
        heads += f"{above:^{width}} "
        line.append(f"{name:^{width}}", style=f"not dim {style}").append(glyphs.side)
    rows = [glyphs.line * width for width in widths]
    borders = [left + tee.join(rows) + right for left, tee, right in (glyphs.corners[:3], glyphs.corners[3:])]
    return [Text(heads.rstrip(), style="dim"), Text(borders[0], style="dim"), line, Text(borders[1], style="dim")]


# ---------------------------------------------------------------------------------------------------------------- range


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """Binades of a format's smallest, smallest normal and largest values."""

    smallest: int
    normal: int
    largest: int

    @classmethod
    def of(cls, fmt: Format) -> "Reach":
        """Return the reach of one element format."""
        return cls(
            smallest=math.frexp(fmt.smallest_subnormal)[1] - 1, normal=fmt.min_exponent, largest=fmt.max_exponent
        )

    @classmethod
    def of_block(cls, fmt: BlockFormat) -> "Reach":
        """Return a block format's reach: its elements', moved by the block's scale."""
        inside, low = cls.of(fmt.element), cls.of(fmt.scale).smallest
        top, scale_top = math.frexp(fmt.element.max), math.frexp(fmt.scale.max)
        largest = math.frexp(top[0] * scale_top[0])[1] + top[1] + scale_top[1] - 1
        return cls(smallest=inside.smallest + low, normal=inside.normal + low, largest=largest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """A stretch of binades, `low` to `high`, drawn in so many cells."""

    low: int
    high: int
    cells: int

    def cell(self, exponent: float) -> int:
        """Return the cell in which a power of two lies; it may lie outside of the axis."""
        return math.floor((exponent - self.low) * self.cells / (self.high + 1 - self.low) + 0.5)

    def bar(self, reach: Reach, glyphs: Glyphs, style: str) -> Text:
        """Return a bar of normal and subnormal binades, with arrows where they go on."""
        start, middle = self.cell(reach.smallest), self.cell(reach.normal)
        if reach.smallest < reach.normal:
            middle = max(middle, start + 1)
        end = max(self.cell(reach.largest + 1), middle + 1)
        row = [
            glyphs.normal if middle <= at < end else glyphs.subnormal if start <= at < middle else glyphs.outside
            for at in range(self.cells)
        ]
        if reach.smallest < self.low:
            row[0] = glyphs.before
        if reach.largest > self.high:
            row[-1] = glyphs.beyond
        return Text("".join(row), style=style)

    def ticks(self, glyphs: Glyphs) -> tuple[Text, Text]:
        """Return the axis line and, below it, the powers of two at its ticks."""
        room = len(f"2^{self.low}") + 2
        step = next((step for step in _STEPS if self.cell(self.low + step) >= room), _STEPS[-1])
        line, labels = [glyphs.line] * self.cells, [" "] * (self.cells + room)
        for exponent in range(-(-self.low // step) * step, self.high + 1, step):
            at = self.cell(exponent)
            if at >= self.cells:
                continue
            line[at] = glyphs.tick
            text = f"2^{exponent}"
            first = min(max(at - len(text) // 2, 0), self.cells - len(text))
            if all(cell == " " for cell in labels[max(first - 1, 0) : first + len(text) + 1]):
                labels[first : first + len(text)] = text
        return Text("".join(line), style="dim"), Text("".join(labels).rstrip(), style="dim")


def ranges(rows: list[tuple[str, Reach, str]], width: int, glyphs: Glyphs) -> list[Text]:
    """Return named reaches on one axis, one below the other, with ends as text."""
    from plimsoll.formats import FP16

    # The axis holds the first row and FP16's range; what is wider goes on with an arrow.
    shown = [rows[0][1], Reach.of(FP16)]
    name_width = max(len(name) for name, *_ in rows) + 2
    ends = [f"2^{reach.smallest} .. 2^{reach.largest}" for _, reach, _ in rows]
    cells = max(16, min(100, width - name_width - 2 - max(len(end) for end in ends)))
    axis = Axis(low=min(r.smallest for r in shown) - 2, high=max(r.largest for r in shown) + 2, cells=cells)
    lines: list[Text] = []
    for (name, reach, style), end in zip(rows, ends, strict=True):
        line = Text(f"{name:<{name_width}}", style=style)
        line.append_text(axis.bar(reach, glyphs, style))
        line.append(f"  {end}", style="not bold default dim")
        lines.append(line)
    return lines + [Text(" " * name_width).append_text(text) for text in axis.ticks(glyphs)]
