"""One format on a page: bits, numbers, and place against FP16, BF16 and FP32."""

import math
from dataclasses import dataclass

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from plimsoll.cli.terminal import EXPONENT, MANTISSA, SIGN, Glyphs, drawing_width, glyphs
from plimsoll.formats import BF16, FP16, FP32, BlockFormat, Format
from plimsoll.text import number

# -- drawings: bits as cells, and range along an axis of powers of two -------------------------------------------------

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


# -- the page ----------------------------------------------------------------------------------------------------------

_SPECIALS = {
    "ieee": "the highest exponent is reserved for Inf and NaN, as in IEEE 754",
    "fn": "no Inf; only the code of all ones is NaN",
    "fnuz": "no Inf and no -0; the code of -0 is the only NaN",
    "none": "neither Inf nor NaN; every code is a number",
}


def print_page(fmt: Format | BlockFormat, other_names: list[str], target: Console) -> None:
    """Print everything about one format."""
    if isinstance(fmt, BlockFormat):
        _print_block(fmt, target)
    else:
        _print_element(fmt, other_names, target)


def _print_element(fmt: Format, other_names: list[str], target: Console) -> None:
    draw = glyphs(target)
    target.print(_title(fmt.name, f"{fmt.bits} bits"))
    target.print(Text(_SPECIALS[fmt.specials], style="dim"))
    if other_names:
        target.print(Text(f"also called {', '.join(other_names)}", style="dim"))
    _section(target, "Bits")
    _print_lines(target, bit_cells(fmt, drawing_width(target) - 2, draw))
    target.print()
    _print_lines(target, [Text(line) for line in _formula(fmt, draw)])
    _section(target, "Numbers")
    _print_numbers(target, _numbers(fmt))
    _print_range(target, draw, [(fmt.name, Reach.of(fmt), "bold cyan")])


def _print_block(fmt: BlockFormat, target: Console) -> None:
    draw = glyphs(target)
    element, scale = fmt.element, fmt.scale
    target.print(_title(fmt.name, f"{fmt.bits:g} bits a value"))
    tensor = " and one fp32 scale a tensor" if fmt.tensor_scale else ""
    target.print(Text(f"{fmt.block} {element.name} elements share one {scale.name} scale{tensor}", style="dim"))
    _section(target, "Bits of a block")
    _print_lines(target, block_cells(fmt, draw))
    for part, what in ((scale, "scale"), (element, "element")):
        _section(target, f"Bits of the {what}, {part.name}")
        _print_lines(target, bit_cells(part, drawing_width(target) - 2, draw))
    _section(target, "Numbers")
    _print_numbers(target, _block_numbers(fmt))
    rows = [(fmt.name, Reach.of_block(fmt), "bold cyan"), ("one block", Reach.of(element), "cyan")]
    _print_range(target, draw, rows)
    if fmt.tensor_scale:
        target.print(Text("The tensor's fp32 scale moves this window as a whole.", style="dim"))


def _title(name: str, size: str) -> Text:
    return Text.assemble((name.upper(), "bold"), ("  " + size, "dim"))


def _section(target: Console, title: str) -> None:
    target.print()
    target.print(Text(title, style="bold"))


def _print_lines(target: Console, lines: list[Text]) -> None:
    for line in lines:
        target.print(Text("  ").append_text(line), no_wrap=True, crop=True)


def _formula(fmt: Format, draw: Glyphs) -> list[str]:
    times = f" {draw.times} "
    if not fmt.signed:
        return [f"value = 2^(E - {fmt.bias})"]
    if not fmt.has_subnormals:
        return [f"value = (-1)^S{times}2^(E - {fmt.bias})", f"      = (-1)^S{times}0 where E = 0"]
    return [
        f"value = (-1)^S{times}2^(E - {fmt.bias}){times}1.M",
        f"      = (-1)^S{times}2^{fmt.min_exponent}{times}0.M where E = 0",
    ]


_Row = tuple[str, str, str, str]  # name, value, the value as a power of two, the code


def _print_numbers(target: Console, rows: list[_Row]) -> None:
    """The rows in columns; a narrow terminal gets them without the codes."""
    times = glyphs(target).times
    for width in (4, 3):
        grid = Table.grid(padding=(0, 2, 0, 0), pad_edge=False)
        for index in range(width):
            grid.add_column(no_wrap=True, justify="right" if index == 1 else "left", style="dim" if index > 1 else None)
        for name, *cells in rows:
            grid.add_row(f"  {name}", *(cell.replace("*", times) for cell in cells[: width - 1]))
        if Measurement.get(target, target.options.update(max_width=1000), grid).maximum <= target.width:
            break
    target.print(grid)


def _numbers(fmt: Format) -> list[_Row]:
    normal = 0 if not fmt.signed else 1 << fmt.mantissa_bits
    rows = [
        _row("max", fmt.max, _hex(fmt, fmt.max_code)),
        _row("smallest normal", fmt.smallest_normal, _hex(fmt, normal)),
    ]
    if fmt.has_subnormals:
        rows.append(_row("smallest subnormal", fmt.smallest_subnormal, _hex(fmt, 1)))
    rows.append(_row("epsilon", fmt.epsilon, ""))
    rows.append(("binades", str(fmt.binades), f"2^{Reach.of(fmt).smallest} to 2^{fmt.max_exponent}", ""))
    rows.append(("bias", str(fmt.bias), "", ""))
    for name, code in _special_codes(fmt):
        rows.append((name, "yes" if code is not None else "no", "", "" if code is None else _hex(fmt, code)))
    overflow = "Inf" if fmt.has_inf else number(fmt.max)
    rows.append(("overflow gives", overflow, "by default", ""))
    return rows


def _row(name: str, value: float, code: str) -> _Row:
    return name, number(value), _power(value), code


def _power(value: float) -> str:
    """Return a value as a significand times a power of two, exactly.

    >>> _power(448.0), _power(2.0**-24), _power(65504.0)
    ('1.75 * 2^8', '2^-24', '(2 - 2^-10) * 2^15')
    """
    mantissa, exponent = math.frexp(value)
    significand = 2 * mantissa
    if significand == 1:
        return f"2^{exponent - 1}"
    below_two = math.frexp(2 - significand)
    short = f"{significand:.6g}"
    exact = float(short) == significand or below_two[0] != 0.5
    return f"{short if exact else f'(2 - 2^{below_two[1] - 1})'} * 2^{exponent - 1}"


def _hex(fmt: Format, code: int) -> str:
    return f"0x{code:0{-(-fmt.bits // 4)}x}"


def _special_codes(fmt: Format) -> list[tuple[str, int | None]]:
    """Return Inf, NaN (the first) and -0 with their codes, None if it has none."""
    magnitudes = 1 << (fmt.exponent_bits + fmt.mantissa_bits)
    nan = {"ieee": fmt.max_code + 2, "fn": magnitudes - 1, "fnuz": magnitudes, "none": None}[fmt.specials]
    return [
        ("Inf", fmt.max_code + 1 if fmt.has_inf else None),
        ("NaN", nan if fmt.has_nan else None),
        ("-0", magnitudes if fmt.has_negative_zero else None),
    ]


def _block_numbers(fmt: BlockFormat) -> list[_Row]:
    element, scale = fmt.element, fmt.scale
    top, bottom = element.max * scale.max, element.smallest_subnormal * scale.smallest_subnormal
    return [
        _row("element max", element.max, ""),
        _row("element smallest", element.smallest_subnormal, ""),
        ("binades in a block", str(element.binades), "largest to smallest element", ""),
        _row("largest scale", scale.max, ""),
        _row("smallest scale", scale.smallest_subnormal, ""),
        _row("largest value", top, ""),
        _row("smallest value", bottom, ""),
        ("bits of a block", f"{fmt.bits * fmt.block:g}", f"{fmt.block} elements and their scale", ""),
    ]


def _print_range(target: Console, draw: Glyphs, rows: list[tuple[str, Reach, str]]) -> None:
    _section(target, "Range")
    names = [name for name, *_ in rows]
    others = [(fmt.name, Reach.of(fmt), "dim") for fmt in (FP16, BF16, FP32) if fmt.name not in names]
    _print_lines(target, ranges(rows + others, drawing_width(target) - 2, draw))
    target.print(Text(f"  {draw.normal * 2} normal   {draw.subnormal * 2} subnormal", style="dim"))
