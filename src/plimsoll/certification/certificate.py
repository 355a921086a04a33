"""Facts of a certificate: the specifications that it cites, and its rows with counterexamples."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from plimsoll.formats import BF16, BLOCKS, E2M1, E2M3, E3M2, E4M3, E5M2, E8M0, FP16, FP32, FP64, BlockFormat, Format
from plimsoll.results import NotebookRepr, as_data, fields_of
from plimsoll.text import counted

# -- specifications, and the one that governs each format --------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Specification:
    """A text that says what an implementation must do."""

    name: str  # how a row cites it
    title: str  # its full title, with the place where it is found


IEEE_754 = Specification(name="IEEE 754-2019", title="IEEE Standard for Floating-Point Arithmetic, 2019")
OFP8 = Specification(name="OFP8 1.0", title="OCP 8-bit Floating Point Specification 1.0, 2023")
OCP_MX = Specification(name="OCP MX 1.0", title="OCP Microscaling Formats (MX) Specification 1.0, 2023")
FNUZ = Specification(
    name="FNUZ", title="Noune et al., 8-bit Numerical Formats for Deep Neural Networks, arXiv:2206.02915"
)
NVFP4_RECIPE = Specification(
    name="NVFP4", title="NVIDIA, Pretraining Large Language Models with NVFP4, arXiv:2509.25149"
)
FP32_SUMS = Specification(name="FP32 sums", title="Micikevicius et al., Mixed Precision Training, arXiv:1710.03740")
ERROR_BOUND = Specification(
    name="error bound", title="Higham, Accuracy and Stability of Numerical Algorithms, 2nd edition, 2002"
)
STOCHASTIC = Specification(
    name="stochastic rounding", title="Croci et al., Stochastic rounding, Royal Society Open Science 9, 2022"
)
BYTE_ORDER = Specification(
    name="4-bit layout", title="PyTorch's torch.float4_e2m1fn_x2, ONNX's FLOAT4E2M1 and Triton's dot_scaled"
)
TENSORS = Specification(name="tensor operation", title="Every operation of PyTorch on tensors keeps to it")

SPECIFICATIONS = (
    IEEE_754, OFP8, OCP_MX, FNUZ, NVFP4_RECIPE, FP32_SUMS, ERROR_BOUND, STOCHASTIC, BYTE_ORDER, TENSORS,
)  # fmt: skip

_GOVERNED: dict[Specification, tuple[Format, ...]] = {
    IEEE_754: (FP16, BF16, FP32, FP64),
    OFP8: (E4M3, E5M2),
    OCP_MX: (E3M2, E2M3, E2M1, E8M0),
}


def governing(fmt: Format | BlockFormat) -> Specification:
    """Return the specification that governs conversions to a format."""
    if isinstance(fmt, BlockFormat):
        return OCP_MX if fmt in BLOCKS and not fmt.scale.signed else NVFP4_RECIPE
    for specification, formats in _GOVERNED.items():
        if fmt in formats:
            return specification
    # BF16 and a generic `eXmY` have none of their own. They are held to IEEE 754's rules.
    return FNUZ if fmt.specials == "fnuz" else IEEE_754


def allowed_saturation(fmt: Format) -> tuple[bool, ...]:
    """Return the allowed values of `saturate` by the specification, the usual first."""
    # IEEE 754 (7.4) knows overflow alone, the formats of OCP MX without Inf and NaN saturation alone. OFP8 (5.2, table
    # 3) and the FNUZ formats have both.
    if not (fmt.has_inf or fmt.has_nan):
        return (True,)
    return (False,) if governing(fmt) is IEEE_754 else (False, True)


# -- rows --------------------------------------------------------------------------------------------------------------

Kind = Literal["cast", "pack", "unpack", "matmul", "sum"]
KINDS: tuple[Kind, ...] = ("cast", "pack", "unpack", "matmul", "sum")
Status = Literal["conforms", "deviates", "refuses", "not tried"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Counterexample(NotebookRepr):
    """An input on which the function does not do what a requirement says.

    Attributes:
        input: The input: a number, a list of numbers, or a sentence on a tensor.
        expected: The conforming result.
        got: The function's result, or the error that it raised.
        requirement: Id of the requirement.
        note: Where the input is from, as its dtype and bits.
    """

    input: object
    expected: object
    got: object
    requirement: str = ""
    note: str = ""

    def __str__(self) -> str:
        """Return one line: input, expected and got."""
        note = f" ({self.note})" if self.note else ""
        return f"input {written(self.input)}{note}, expected {written(self.expected)}, got {written(self.got)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of one check.

    Args:
        tried: Number of inputs that were tried.
        wrong: Number of them with another result than expected.
        counterexample: The smallest of these. Default: None, there is none.
        refused: The error, if the function raises one and gives no result. Default: None.
        detail: A computed bound or the like, for the sheet. Default: none.
    """

    tried: int
    wrong: int = 0
    counterexample: Counterexample | None = None
    refused: str | None = None
    detail: str = ""

    def __add__(self, other: "Outcome") -> "Outcome":
        """Return the outcome of both parts; wrong results count more than refusals."""
        wrong = [outcome for outcome in (self, other) if outcome.wrong]
        shown = next((outcome for outcome in wrong if outcome.refused is None), wrong[0] if wrong else self)
        return Outcome(
            tried=self.tried + other.tried, wrong=self.wrong + other.wrong, counterexample=shown.counterexample,
            refused=shown.refused, detail=self.detail or other.detail,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One requirement, and whether the function keeps to it.

    Attributes:
        requirement: Id of the requirement.
        says: The requirement as a sentence.
        source: The specification and section that ask for it.
        status: "conforms", "deviates", "refuses" (the function raises an error where it may) or "not tried".
        tried: Number of inputs that were tried.
        wrong: Number of them with another result than expected.
        counterexample: The smallest of these, or None.
        detail: A computed bound, the error of a refusal, or why the requirement was not tried.
    """

    requirement: str
    says: str
    source: str
    status: Status
    tried: int
    wrong: int
    counterexample: Counterexample | None
    detail: str = ""


class Inferred(dict[str, Any]):
    """The inferred facts, by name: ``inferred["rounding"]`` or ``inferred.rounding``."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(f"Inferred has no fact {name!r}")

    def __dir__(self) -> list[str]:  # completion and the hint of an AttributeError know the facts by it
        return [*super().__dir__(), *self]

    def __repr__(self) -> str:
        return f"Inferred({dict(self)!r})"


@dataclass(frozen=True, kw_only=True)
class CertificateRecord:
    """Facts of a certificate, for its sheets. Documented in `Certificate`."""

    function: str
    format: str
    kind: Kind
    device: str
    inferred: Inferred
    rows: tuple[Row, ...]
    not_tried: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    calls: int = 0
    seconds: float = 0.0
    versions: Mapping[str, str] = field(default_factory=dict[str, str])
    date: str = ""

    @property
    def conforms(self) -> bool:
        """True if no row deviates. Untried rows and allowed refusals do not count."""
        return not self.deviations

    @property
    def deviations(self) -> tuple[Row, ...]:
        """The rows that deviate."""
        return tuple(row for row in self.rows if row.status == "deviates")

    @property
    def counterexamples(self) -> tuple[Counterexample, ...]:
        """The smallest counterexample of each row that deviates."""
        return tuple(row.counterexample for row in self.deviations if row.counterexample is not None)

    @property
    def verdict(self) -> str:
        """The verdict on the function, in one sentence."""
        name = f"{self.function} ({self.kind}, {self.format})"
        tried = sum(row.status in ("conforms", "deviates") for row in self.rows)
        if self.conforms:
            return f"{name} conforms in all {counted(tried, 'row')} that were tried."
        named = ", ".join(row.requirement for row in self.deviations)
        return f"{name} deviates in {len(self.deviations)} of {counted(tried, 'row')}: {named}."

    def row(self, requirement: str) -> Row:
        """Return the row of a requirement.

        Raises:
            KeyError: The certificate has no such row.
        """
        for row in self.rows:
            if row.requirement == requirement:
                return row
        raise KeyError(requirement)

    def to_dict(self) -> dict[str, object]:
        """Return the certificate as JSON-able data, with NaN and infinities as text."""
        data: dict[str, object] = fields_of(self)
        counterexamples = as_data(self.counterexamples)
        summed_up = {"conforms": self.conforms, "verdict": self.verdict, "counterexamples": counterexamples}
        return data | summed_up | {"seconds": round(self.seconds, 3)}


def written(value: object) -> str:
    """Write a counterexample's value: all digits of numbers, long lists shortened.

    >>> written(464.0), written(2.0**-149), written([1.0, 0.0])
    ('464', '1.401298464324817e-45', '[1, 0]')
    """
    if isinstance(value, float):
        return f"{value:.17g}" if value.is_integer() and abs(value) < 1e16 else repr(value)
    if isinstance(value, (list, tuple)):
        items = [written(item) for item in cast("Sequence[object]", value)]
        return f"[{', '.join(items)}]"
    return str(value)
