"""Numbers as text: shares, powers of two, counts and steps; grouped names.

And text as a terminal, a page of HTML, a table of Markdown or a warning can show it. Every surface writes its numbers
with these functions: terminal, report, Markdown, live page, findings. The scripts of the page and the report write the
same in JavaScript (`report/page/files/js/words.js`).
"""

import html
import logging
import math
import re
import warnings
from collections.abc import Collection, Iterable, Sequence

_SHORTEST = 1e-3  # numbers below it are written with an exponent
_LONGEST = 1e9  # and from here on
_LONGEST_NAME = 60  # characters of one name that a line shows
_LONGEST_MESSAGE = 160
_GAP = re.compile(r"\.(?:\0\.)+")  # where parts of a name are left out
_MARKUP = re.compile(r"([\\|<*`\[&~]|(?<![^\W_])_|_(?![^\W_]))")  # of Markdown; underscores within a word are none
_LOG = logging.getLogger("plimsoll")
_DIGITS = re.compile(r"\d+")


def capital(text: str) -> str:
    """Return the text with a capital letter first."""
    return text[:1].upper() + text[1:]


def clause(error: object) -> str:
    """Return the text of an error as a part of a sentence, without a period at its end.

    >>> clause(ValueError("expected two; got three. Leave one out."))
    'expected two; got three. Leave one out'
    """
    return str(error).rstrip().removesuffix(".")


def percent(share: float, decimals: int | None = None) -> str:
    """Write a share in per cent, in two digits, never rounded to none or all.

    Args:
        share: 0.0 to 1.0 for 0 % to 100 %.
        decimals: So many digits behind the point in place of two digits in all, for tables of measurements.

    >>> [percent(x) for x in (0.0, 0.00001, 0.0034, 0.58, 0.996, 1.0)]
    ['0 %', 'under 0.01 %', '0.34 %', '58 %', 'over 99 %', '100 %']
    >>> percent(0.9834, 1)
    '98.3 %'
    """
    if math.isnan(share):
        return "unknown"
    if decimals is not None:
        return f"{100 * share:.{decimals}f} %"
    if share >= 1:
        return f"{100 * share:,.0f} %"
    if share > 0.99:
        return "over 99 %"
    if share < 1e-4:
        return "under 0.01 %" if share > 0 else "0 %"
    return f"{100 * share:.2g} %"


def power(value: float) -> str:
    """Write a number as a power of two if it is one, and as any number otherwise.

    >>> power(1024.0), power(0.5), power(3000.0)
    ('2^10', '2^-1', '3,000')
    """
    if value > 0 and math.isfinite(value) and math.frexp(value)[0] == 0.5:
        return f"2^{math.frexp(value)[1] - 1}"
    return number(value)


def times_two_to(binades: float) -> str:
    """Write a factor given in binades as a number and as a power of two.

    >>> times_two_to(3.2), times_two_to(20), times_two_to(float("nan"))
    ('8 times (2^3)', '2^20 times', 'nan times')
    """
    if not math.isfinite(binades):
        return f"{binades} times"
    exponent = round(binades)
    return f"{2**exponent} times (2^{exponent})" if 0 <= exponent <= 10 else f"2^{exponent} times"


def number(value: float, digits: int = 3) -> str:
    """Write a number: whole ones in full, others in three digits or `digits`.

    >>> number(65504.0), number(0.015625), number(2.0**-24), number(3.4e38), number(float("nan"))
    ('65,504', '0.0156', '5.96e-8', '3.40e38', 'nan')
    >>> number(0.015625, 4), number(2.0**-24, 6), number(1234.5678, 6)
    ('0.01562', '5.96046e-8', '1,234.57')
    """
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if float(value).is_integer() and size < _LONGEST:
        return f"{int(value):,}"
    if size >= _LONGEST or size < _SHORTEST:
        # Rounded to three digits, float64's largest value would read back as infinity.
        text = f"{value:.{digits - 1}e}"
        text = text if math.isfinite(float(text)) else f"{math.copysign(1.79e308, value):.2e}"
        mantissa, exponent = text.split("e")
        return f"{mantissa}e{int(exponent)}"
    return f"{value:,.0f}" if size >= 10**digits - 0.5 else f"{value:,.{digits}g}"


def counted(many: int, noun: str) -> str:
    """Write a number of things.

    >>> counted(1, "step"), counted(2000, "step")
    ('1 step', '2,000 steps')
    """
    return f"{many:,} {noun}{'' if many == 1 else 's'}"


def size(bytes_: int) -> str:
    """Write a number of bytes in three digits.

    >>> size(512), size(1536), size(141_107_412_992)
    ('512 B', '1.5 KiB', '131 GiB')
    """
    value, units = float(bytes_), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 999.5 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:,.0f} {units[0]}" if value >= 999.5 else f"{value:.3g} {units[0]}"


def steps(first: int, last: int) -> str:
    """Write a range of steps, both ends included.

    >>> steps(301, 310), steps(1300, 1300)
    ('steps 301 to 310', 'step 1,300')
    """
    return f"step {first:,}" if first == last else f"steps {first:,} to {last:,}"


def aligned(rows: Sequence[Sequence[str]], right: Collection[str] = ()) -> list[str]:
    """Return rows of cells as lines with aligned columns. The first row has heads.

    Args:
        rows: Equally many cells each.
        right: Heads of the columns that end below each other.

    >>> for line in aligned([("share", "module"), ("9 %", "head"), ("91 %", "blocks.0.up")], right=["share"]):
    ...     print(line)
    share  module
      9 %  head
     91 %  blocks.0.up
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    forms = [f"{{:{'>' if head in right else '<'}{width}}}" for head, width in zip(rows[0], widths, strict=True)]
    return ["  ".join(forms).format(*row).rstrip() for row in rows]


def printable(text: str, *, lines: bool = True) -> str:
    r"""Write any text so that a terminal shows it and does nothing else.

    Control characters, escape sequences, marks that turn the direction of writing, half characters: all that is not
    to be seen appears as its escape.

    Args:
        text: Any text.
        lines: Whether a line may end within the text.

    >>> print(printable("a\x1b[31mred\u202e\nb"))
    a\x1b[31mred\u202e
    b
    >>> print(printable("a\nb", lines=False))
    a\nb
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or (lines and c == "\n") else c.encode("unicode_escape").decode() for c in text)


def warn_user(message: str) -> None:
    """Warn from any thread, without raising.

    Where warnings are errors (``-W error``) or cannot be shown, the message is logged instead.
    """
    message = printable(message, lines=False)
    try:
        warnings.warn(message, RuntimeWarning, stacklevel=3)
    except Exception:  # noqa: BLE001  (watching never stops training: a filter or a closed stderr can raise anything)
        _LOG.warning("%s", message)


def in_html(text: str) -> str:
    """Return text for a page of HTML, on one line, without markup of its own.

    >>> in_html("a<b>")
    'a&lt;b&gt;'
    """
    return html.escape(printable(text, lines=False))


def escaped_cell(text: str) -> str:
    r"""Return text for a Markdown table's cell: one line, without own markup.

    >>> print(escaped_cell("a|b *c*"))
    a\|b \*c\*
    """
    return _MARKUP.sub(r"\\\1", printable(text, lines=False))


def grouped(names: Sequence[str], most: int = 3) -> str:
    """Write names of layers in few words: those that differ in one number are one.

    >>> grouped([f"blocks.{i}.attn.qkv" for i in range(12)] + ["head"])
    'blocks.{0-11}.attn.qkv, head'
    >>> grouped(["a", "b", "c", "d", "e"])
    'a, b, c and 2 more'
    """
    found: dict[str, list[tuple[str, str]]] = {}
    left = dict.fromkeys(names)
    for name in left:
        for pattern, number in _patterns(name):
            found.setdefault(pattern, []).append((name, number))
    parts: list[tuple[str, int]] = []
    while left:
        name = next(iter(left))
        alike = [found[pattern] for pattern, _ in _patterns(name)]
        best = max(alike, key=lambda members: sum(n in left for n, _ in members)) if alike else []
        members = [(n, number) for n, number in best if n in left]
        if len(members) > 1:
            pattern = next(p for p, _ in _patterns(name) if found[p] is best)
            parts.append((shown(pattern.replace("\0", _ranges(int(number) for _, number in members))), len(members)))
        else:
            members = [(name, "")]
            parts.append((shown(name), 1))
        for member, _ in members:
            del left[member]
    rest = sum(count for _, count in parts[most:])
    return ", ".join(text for text, _ in parts[:most]) + (f" and {rest} more" if rest else "")


def shown(name: str) -> str:
    """Write a name for a line: control characters escaped, and not longer than a line."""
    return shortened(printable(name, lines=False), _LONGEST_NAME)


# The number of a layer says more than what it is wrapped in: `base_model...layers.1.self_attn.q_proj.lora_A.default`.
def shortened(name: str, most: int) -> str:
    """Return a name of at most `most` characters: parts between dots left out, numbers and what they count last.

    >>> shortened("base_model.model.model.layers.11.self_attn.q_proj.lora_A.default", 48)
    'base_model...layers.11...q_proj.lora_A.default'
    """
    if len(name) <= most:
        return name
    parts = name.split(".")
    kept: list[str | None] = list(parts)
    for i in range(1, len(parts) - 1):
        if any(part[:1].isdigit() or part[:1] == "{" for part in parts[i : i + 2]):
            continue
        kept[i] = None
        short = _GAP.sub("...", ".".join("\0" if part is None else part for part in kept))
        if len(short) <= most:
            return short
    half = most // 2 - 2
    return f"{name[:half]}...{name[-half:]}"


def one_line(message: str) -> str:
    r"""Write an error's message for a line: its first line, control characters escaped, a long end left out.

    >>> one_line("CUDA out of memory.\nTried to allocate 3 GiB")
    'CUDA out of memory. ...'
    """
    first, *others = message.splitlines() or [""]
    clean = printable(first, lines=False)
    if len(clean) > _LONGEST_MESSAGE:
        return f"{clean[:_LONGEST_MESSAGE]}..."
    return f"{clean} ..." if others else clean


def _patterns(name: str) -> list[tuple[str, str]]:
    """Return a name with each of its numbers left out in turn, and that number."""
    if len(name) > 10 * _LONGEST_NAME:
        return []
    return [
        (f"{name[: m.start()]}\0{name[m.end() :]}", m.group())
        for m in _DIGITS.finditer(name)
        if len(m.group()) < 10 and m.group().isascii()
    ]


def _ranges(numbers: Iterable[int]) -> str:
    """Write numbers as ranges in braces: {0-3,7}."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return "{" + ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs) + "}"
