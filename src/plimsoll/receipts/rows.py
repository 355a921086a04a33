"""Records of a receipt: operations, tensors that last, memory, deviations."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from plimsoll.receipts.recording.operations import Cause as Cause, Kind as Kind, Phase as Phase, Where as Where
from plimsoll.results import JsonRecord

Role = Literal["weights", "masters", "buffers", "gradients", "optimizer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row(JsonRecord):
    """An operation as it ran at one place; calls that are alike are one row.

    Formats are names: "bf16", "fp32", "e4m3". Those of a row may differ from a tensor's dtype, as TF32 does.

    Attributes:
        operation: torch's name of it ("aten.mm"); of a module in a recorded run, "module".
        kind: "product", "attention", "cast", "normalization", "softmax", "loss", "reduction", "embedding",
            "collective", "pointwise", "exact" (values are moved or selected), "custom" (known by name only) or, in a
            recorded run, "module".
        phase: "forward", "recomputation" (by a checkpoint), "backward" or "optimizer" (all between a backward and the
            next forward).
        module: Module that ran it, or in the backward ran what is differentiated; None outside of all modules.
        source_line: Line of the user's code, "file:line".
        source_text: The text of that line.
        operands: Formats of the floating operands; of a product, those of its factors.
        values: Formats that the operands' values have been rounded to. They are narrower than `operands` where values
            were cast up before, or where the hardware rounds operands (TF32).
        output: Format of the result.
        accumulate: Format that products or sums are added up in. None: unknown, or nothing is added up.
        partial: Format that partial sums may be added in, by a switch of torch. None: none.
        cause: Of a cast: "script", "autocast", "torch" (as `fully_shard`), "level" (code of Plimsoll), "emulation",
            "backward" (of another cast) or "operation" (the operation at hand needs it).
        where: "eager", "compiled", or "emulated": computed in other formats than the row says, with the same rounding.
        rounded: Whether the result is rounded to `output`. Compiled code may keep it wider within a kernel.
        calls: Number of calls.
        bytes: Bytes read and written by all calls.
        note: A remark.
    """

    operation: str
    kind: Kind
    phase: Phase
    module: str | None = None
    source_line: str | None = None
    source_text: str = ""
    operands: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    output: str = ""
    accumulate: str | None = None
    partial: str | None = None
    cause: Cause | None = None
    where: Where = "eager"
    rounded: bool = True
    calls: int = 1
    bytes: int = 0
    note: str = ""

    @property
    def formats(self) -> str:
        """Operands and result in short: "bf16 x bf16 -> bf16"."""
        multiplied = self.kind in ("product", "attention")
        listed = (self.values or self.operands) if multiplied else tuple(sorted(set(self.operands)))
        operands = (" x " if multiplied else " + ").join(listed)
        return " -> ".join(part for part in (operands, self.output) if part)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRow(JsonRecord):
    """A tensor that outlives the step.

    Attributes:
        name: Name of the parameter or buffer; of optimizer state "parameter:state".
        role: "weights", "buffers", "gradients", "optimizer" (its state) or "masters" (wider copies of weights).
        format: Format of its values.
        bytes: Its size. Of a sharded tensor, this rank's part. 0 where a recorded run does not have it.
        module: Module that it belongs to.
    """

    name: str
    role: Role
    format: str
    bytes: int
    module: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse(JsonRecord):
    """Bytes of a step, of all tensors that its operations have met.

    Attributes:
        weights: Parameters.
        buffers: Buffers.
        gradients: Gradients of parameters.
        optimizer: State of the optimizers, masters included.
        activations: Results alive when the backward began: the most of all backwards.
        peak: The most that was alive at once.
        moved: Read and written by all operations.
    """

    weights: int = 0
    buffers: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    peak: int = 0
    moved: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Deviation(JsonRecord):
    """A difference between a step and what was declared of it.

    Attributes:
        kind: Kind of deviation ("product-wide", "optimizer-state", ...); `plimsoll.receipts.KINDS` explains each.
        module: Module or tensor in which it was seen; None outside of all modules.
        source_line: Line of the user's code, "file:line"; None where no operation is to blame.
        operation: The first operation that deviates; "" where it is a tensor.
        expected: What was declared.
        actual: What ran.
        advice: What to do.
        phases: Phases in which it was seen.
        calls: Number of operations or tensors.
    """

    kind: str
    module: str | None
    source_line: str | None
    operation: str
    expected: str
    actual: str
    advice: str
    phases: tuple[Phase, ...] = ()
    calls: int = 1

    def __str__(self) -> str:
        where = ", ".join(part for part in (self.module, self.source_line) if part)
        return f"{self.kind}{f' in {where}' if where else ''}: expected {self.expected}; got {self.actual}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiptRecord:
    """Facts of a receipt, for texts, page and table. Documented in `Receipt`."""

    subject: str
    did: tuple[str, ...] = ()
    declared: str | None = None
    rows: tuple[Row, ...] = ()
    deviations: tuple[Deviation, ...] = ()
    tensors: tuple[TensorRow, ...] = ()
    memory: MemoryUse = field(default_factory=MemoryUse)
    settings: Mapping[str, str] = field(default_factory=dict[str, str], hash=False)
    notes: tuple[str, ...] = ()
    parameters: int = 0
    cache_hits: int = 0
    cache_misses: int = 0
