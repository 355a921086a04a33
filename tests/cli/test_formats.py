"""`plimsoll formats`: the tables and the page, at every width and in colour, and what it says to a wrong name."""

import json
import math
import re

import pytest
from typer.testing import CliRunner, Result

from plimsoll.cli import app
from plimsoll.cli.screens.format_page import Axis, Reach
from plimsoll.cli.terminal import ASCII
from plimsoll.formats import ALIASES, BLOCKS, ELEMENTS, Format, get
from plimsoll.text import number
from tests.support.cases import each

NAMES = [fmt.name for fmt in (*ELEMENTS, *BLOCKS)]
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def formats(*arguments: str, width: int = 80, **environment: str) -> Result:
    return CliRunner(env={"COLUMNS": str(width), **environment}).invoke(app, ["formats", *arguments])


def lines(result: Result) -> list[str]:
    assert result.exit_code == 0, result.output
    return _COLOUR.sub("", result.stdout).splitlines()


@each("width", [60, 80, 200])
@each("colour", [{}, {"FORCE_COLOR": "1", "TERM": "xterm-256color"}], ids=["plain", "colour"])
@each("name", [None, *NAMES, "e5m7", "e5m0", "e2m0", "e8m13"])
def test_nothing_is_wider_than_the_terminal_or_cut_short(name: str | None, colour: dict[str, str], width: int) -> None:
    shown = lines(formats(*([name] if name else []), width=width, **colour))
    assert max(map(len, shown)) <= width
    assert not any("…" in line for line in shown)


def test_colour_is_there_when_asked_for_only() -> None:
    assert _COLOUR.search(formats("e4m3", FORCE_COLOR="1", TERM="xterm-256color").stdout)
    assert not _COLOUR.search(formats("e4m3").stdout)


def test_the_table_holds_every_format_with_its_numbers() -> None:
    rows = {line.split()[0]: line.split() for line in lines(formats()) if line.strip()}
    for fmt in ELEMENTS:
        name, bits, fields, largest, normal, subnormal, epsilon, binades, *specials = rows[fmt.name]
        assert (int(bits), int(binades)) == (fmt.bits, fmt.binades), name
        assert fields == f"{int(fmt.signed)}·{fmt.exponent_bits}·{fmt.mantissa_bits}"
        assert float(largest.replace(",", "")) == pytest.approx(fmt.max, rel=6e-3)
        assert float(normal) == pytest.approx(fmt.smallest_normal, rel=6e-3)
        if fmt.has_subnormals:
            assert float(subnormal) == pytest.approx(fmt.smallest_subnormal, rel=6e-3, abs=0.0)
        else:
            assert subnormal == "–"
        assert (1.0 if epsilon == "1" else 2.0 ** int(epsilon.removeprefix("2^"))) == fmt.epsilon
        assert [sign == "✓" for sign in specials] == [fmt.has_inf, fmt.has_nan]
    for fmt in BLOCKS:
        assert rows[fmt.name][1:4] == [
            fmt.element.name,
            str(fmt.block),
            fmt.scale.name.ljust(4)[:4] + "," * fmt.tensor_scale,
        ]
        assert float(rows[fmt.name][-1]) == fmt.bits


def test_a_narrow_table_says_what_it_left_out() -> None:
    assert "Left out at this width: bits, eps, binades." in formats(width=60).stdout.replace("\n", " ")
    assert "Left out" not in formats(width=80).stdout


def test_a_wide_table_draws_the_ranges() -> None:
    row = next(line for line in lines(formats(width=200)) if line.startswith("fp16"))
    assert row.rstrip().endswith("█") and "░" in row
    assert "█" not in formats(width=80).stdout


def test_a_page_tells_the_numbers_with_their_codes() -> None:
    page = formats("e4m3").stdout
    assert re.search(r"max +448 +1\.75 × 2\^8 +0x7e\b", page)
    assert re.search(r"smallest normal +0\.0156 +2\^-6 +0x08\b", page)
    assert re.search(r"smallest subnormal +0\.00195 +2\^-9 +0x01\b", page)
    assert re.search(r"NaN +yes +0x7f\b", page)
    assert re.search(r"Inf +no", page)
    assert "float8_e4m3fn" in page


@each("name", ["fp64", "fp32", "tf32", "fp16", "bf16", "e5m2", "e4m3", "e4m3fnuz", "e3m2", "e2m1", "e8m0"])
def test_the_codes_of_a_page_are_those_of_the_format(name: str) -> None:
    fmt = get(name)
    assert isinstance(fmt, Format)
    page = formats(name, width=120).stdout
    codes = {row: int(code, 16) for row, code in re.findall(r"^  (\S[\w -]*?)  .*(0x[0-9a-f]+)", page, re.MULTILINE)}
    assert fmt.magnitude(codes["max"]) == fmt.max
    assert fmt.magnitude(codes["smallest normal"]) == fmt.smallest_normal
    if fmt.bits <= 16:
        special = fmt.decode([codes[row] for row in ("Inf", "NaN", "-0") if row in codes])
        expected = [
            value
            for value, there in ((math.inf, fmt.has_inf), (math.nan, fmt.has_nan), (-0.0, fmt.has_negative_zero))
            if there
        ]
        assert list(map(str, special.tolist())) == list(map(str, expected))


def test_the_bits_are_drawn_under_their_numbers() -> None:
    shown = lines(formats("e4m3"))
    cells = next(line for line in shown if "│ S │" in line)
    numbers = shown[shown.index(cells) - 2]
    assert [letter for letter in cells if letter in "SEM"] == list("SEEEEMMM")
    assert numbers.split() == [str(bit) for bit in range(7, -1, -1)]
    for bit, letter in zip(range(7, -1, -1), "SEEEEMMM", strict=True):
        assert cells[numbers.index(str(bit))] == letter


def test_a_code_too_wide_for_cells_is_drawn_by_fields() -> None:
    assert "│S│" + "E" * 11 + "│" + "M" * 52 + "│" in formats("fp64", width=80).stdout
    assert "│ S × 1 │ E × 11 │ M × 52 │" in formats("fp64", width=60).stdout


def test_the_range_shows_subnormals_apart_and_goes_on_with_arrows() -> None:
    rows = {line.split()[0]: line for line in lines(formats("e4m3")) if ".. 2^" in line}
    assert list(rows) == ["e4m3", "fp16", "bf16", "fp32"]
    e4m3, fp16 = rows["e4m3"], rows["fp16"]
    assert re.fullmatch(r"  e4m3 +░+█+ +2\^-9 \.\. 2\^8", e4m3)
    assert fp16.index("░") < e4m3.index("░") and e4m3.rindex("█") < fp16.rindex("█")
    assert "◀" in rows["bf16"] and "▶" in rows["bf16"]


@each("cells", [16, 40, 70])
@each("fmt", ELEMENTS, ids=lambda fmt: fmt.name)
def test_a_bar_covers_the_binades_of_the_format(fmt: Format, cells: int) -> None:
    reach = Reach.of(fmt)
    axis = Axis(low=reach.smallest - 3, high=reach.largest + 3, cells=cells)
    bar = axis.bar(reach, ASCII, "").plain
    assert len(bar) == cells
    assert bar.strip(" ").strip("-").strip("#") == ""
    assert "#" in bar and ("-" in bar) == fmt.has_subnormals
    per_cell = cells / (reach.largest - reach.smallest + 7)
    assert bar.count("#") == pytest.approx((reach.largest - reach.normal + 1) * per_cell, abs=2)


def test_block_formats_reach_as_far_as_their_largest_product() -> None:
    for fmt in BLOCKS:
        largest = fmt.element.max * fmt.scale.max
        assert Reach.of_block(fmt).largest == math.floor(math.log2(largest))
        assert f"2^{Reach.of_block(fmt).largest}" in formats(fmt.name).stdout


def test_a_block_page_shows_scale_elements_and_size() -> None:
    page = formats("nvfp4").stdout
    assert "16 e2m1 elements share one e4m3 scale and one fp32 scale a tensor" in page
    assert "│ e4m3  │ e2m1 │ e2m1 │ ... │ e2m1 │" in page
    assert re.search(r"bits of a block +72", page)


def test_json_holds_every_format_and_parses() -> None:
    listed = json.loads(formats("--json").stdout)
    assert [entry["name"] for entry in listed] == NAMES
    for entry in listed:
        fmt = get(entry["name"])
        assert entry["bits"] == fmt.bits
        if entry["kind"] == "element":
            assert {key: getattr(fmt, key) for key in entry if key not in ("kind", "aliases")} == {
                key: value for key, value in entry.items() if key not in ("kind", "aliases")
            }
    assert json.loads(formats("MXFP4", "--json").stdout)["element"]["max"] == 6.0


def test_every_alias_is_told() -> None:
    for alias, fmt in ALIASES.items():
        assert alias in json.loads(formats(fmt.name, "--json").stdout)["aliases"]


@each(("name", "said"), [("e4m3x", "Nearest: e4m3"), ("bfloat", "bfloat16"), ("e0m7", "at least one exponent bit")])
def test_a_wrong_name_is_a_message_and_exit_code_2(name: str, said: str) -> None:
    result = formats(name)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("plimsoll: formats: ") and said in result.stderr
    assert "Traceback" not in result.stderr and result.stderr.count("\n") == 1


def test_a_terminal_without_unicode_gets_ascii() -> None:
    result = CliRunner(charset="ascii", env={"COLUMNS": "80"}).invoke(app, ["formats", "e4m3"])
    assert result.exit_code == 0
    assert result.stdout.isascii() and "| S | E |" in result.stdout


@each("fmt", ELEMENTS, ids=lambda fmt: fmt.name)
def test_numbers_are_short_and_near(fmt: Format) -> None:
    for value in (fmt.max, fmt.smallest_normal, fmt.smallest_subnormal, fmt.epsilon):
        assert len(number(value)) <= 9
        assert float(number(value).replace(",", "")) == pytest.approx(value, rel=6e-3, abs=0.0)
