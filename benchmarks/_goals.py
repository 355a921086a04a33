"""What the benchmarks are to reach: each goal with the result file, the table, the rows and the column it is read from.

The first ones are the numbers that the design was drawn up for; `OWN` are those that single benchmarks set themselves.
A goal that several rows answer is met if all of them do.
"""

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """A number to reach; `rows` are columns and globs that their texts match."""

    what: str
    stem: str
    table: str
    rows: Mapping[str, str]
    column: str
    bound: Literal["at most", "at least"]
    value: float
    devices: tuple[str, ...] = ("cpu",)
    unit: str = ""
    elsewhere: str = ""
    limit: str = ""  # what the number is made of where it is missed, with the measurement that says so

    def values(self, content: Mapping[str, Any]) -> list[float]:
        """What a result file has for it; nothing where it lacks the table, the rows or the number."""
        rows = [row for t in content["tables"] if fnmatch.fnmatch(t["title"], self.table) for row in t["rows"]]
        wanted = [row for row in rows if all(fnmatch.fnmatch(str(row.get(c)), p) for c, p in self.rows.items())]
        return [value for row in wanted if (value := number(row.get(self.column))) is not None]

    def worst(self, content: Mapping[str, Any]) -> float | None:
        """The number farthest from the goal."""
        found = self.values(content)
        return (max if self.bound == "at most" else min)(found) if found else None

    def is_met(self, value: float) -> bool:
        """Whether a number reaches it."""
        return value <= self.value if self.bound == "at most" else value >= self.value


def number(value: object) -> float | None:
    """A number in a result file; some are texts of fixed length there."""
    try:
        return float(value)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError):
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Of:
    """What the goals of one table share."""

    stem: str
    table: str
    column: str
    rows: Mapping[str, str] = field(default_factory=dict)
    devices: tuple[str, ...] = ("cpu",)

    def __call__(self, what: str, bound: Any, value: float, rows: Mapping[str, str], **more: Any) -> Goal:
        place: dict[str, Any] = {"stem": self.stem, "table": self.table, "column": self.column, "devices": self.devices}
        return Goal(**{**place, **more}, what=what, bound=bound, value=value, rows={**self.rows, **rows})


_STEP = Of(stem="watch", table="One step*", column="ratio")
_GPT = Of(stem="watch", table="GPT*", column="ratio", devices=("cuda",))
_MEASURE = Of(stem="measure", table="One tensor*", column="ours/aminmax", rows={"dtype": "fp32", "values": "16M"})
_CAST = Of(stem="cast", table="16M float32 values, 2 *", column="ratio to native")
_UNSCALE = Of(stem="unscale", table="Normal values", column="ours/torch", rows={"dtype": "fp32"})
_FP8 = Of(stem="fp8", table="One linear*", column="x bfloat16", rows={"layer": "fp8 unit"}, devices=("cuda",))

# What limits the goals that are missed. Numbers in these texts are rows of the page, which they name.
_EVERYTHING = (
    "The changes of weights, which the floor has no tensors for: without them it is 1.22 here. Our kernel on the "
    "floor's tensors, without a watch, takes 1.10 of it: docs/design/watching.md has the parts, on two machines."
)
_WEIGHTS = (
    "Memory: this machine reads and multiplies faster than the AMD EPYC of 2026-11-24, where the row was 1.03, and one "
    "aminmax of all tensors is 30 % of a step here and 12 % there."
)
_IDLE = (
    "Half a millisecond of Python in a step of 101: who steps, what the loss is, whether gradients came and were "
    "cleared. A twin with nothing attached in these steps has 1.007 (naive statistics, not due): of 1.015, half is the "
    "measurement's own. 0.998 on the AMD EPYC of 2026-11-24."
)
_WRITING = "One step in ten is sampled, and a tenth of what that costs at every step is beyond the goal already."
_MEMORY = (
    "The copy of the weights from which their changes are taken, 4 bytes of each: 20 MB of this model. The row of all "
    "but updates is below the goal."
)
_LAUNCHES = (
    "Launches: each traced tap is one, 45 us of the host's time, and a step has hundreds (docs/design/watching.md)."
)
_MOMENTS = (
    "Sums of values, magnitudes, squares and fourth powers in float64: four vectors of arithmetic for each vector that "
    "torch's operator loads, multiplies and stores (docs/design/cpu-kernels.md has what was tried)."
)
_VERDICT = (
    'Reading: the row "pyarrow reads all rows" takes longer than the goal by itself, most of it for the counts by '
    "binade. Checking the columns of all parts and the rules come on top."
)
_PAGE = (
    "Underflow against scale, for a format that no rule has asked about: the scales that serve are looked for in each "
    "module at each step, 333,000 times. It is kept then. All other figures take 178 ms or less."
)
_FIGURE = (
    "Two figures of 2,000 FP16 gradients and nothing else pass over their 2 million cells each time. The live page "
    "keeps answers."
)
_SHADOW = (
    "The twin's forward and backward take one step, watching takes a fifth, and the rest compares the two, in memory "
    "that a plain step does not touch. Where products take less of a step it is more: 3.0 on an Intel Xeon with "
    "AVX-512 on 2026-11-28, where watching takes a third. In three paired runs there, keeping activations without "
    "copies and counting zeros in vectors took 3 % off a shadow step."
)

NUMBERS_TO_REACH: Sequence[Goal] = (
    _STEP("watch everything, every step: extra time, to one aminmax of each tensor", "at most", 1,
          {"what": "ours: everything, every step"}, unit="x", column="of floor", limit=_EVERYTHING),
    _STEP("watch weights and gradients, every step", "at most", 1.05, {"what": "ours: weights, gradients*"}, unit="x",
          elsewhere="wandb 2.07, smdebug 3.06", limit=_WEIGHTS),
    _STEP("watch attached, not due", "at most", 1.005, {"what": "ours: attached, not due"}, unit="x",
          elsewhere="msprobe 1.73", limit=_IDLE),
    Goal(what="watch everything, every 10 steps, with writing", stem="watch", table="A run in one piece",
         rows={"what": "ours: everything, every 10 steps"}, column="ratio", bound="at most", value=1.02, unit="x",
         limit=_WRITING),
    Goal(what="watch everything: memory beyond the libraries", stem="watch", table="Memory",
         rows={"what": "ours: everything, every step"}, column="beyond libraries MB", bound="at most", value=64,
         unit=" MB", limit=_MEMORY),
    _GPT("watch a 124M GPT, every 10 steps", "at most", 1.01, {"what": "ours: everything, every 10 steps"}, unit="x",
         limit=_LAUNCHES),
    _GPT("watch a 124M GPT, every step", "at most", 1.10, {"what": "ours: everything, every step"}, unit="x",
         limit=_LAUNCHES,
         elsewhere="Megatron reports up to 30 % for activations"),
    _MEASURE("measure 16M values, to one aminmax pass", "at most", 4, {"threads": "1"}, unit="x"),
    _MEASURE("measure 16M values, faster than torch operations", "at least", 15, {"threads": "1"}, unit="x",
             column="torch/ours"),
    _MEASURE("measure, of the read bandwidth", "at least", 0.7, {}, column="of bandwidth", devices=("cuda",)),
    _CAST("cast to eXmY, to torch's native round trip", "at most", 0.40, {"what": "ours: cast e[0-9]m[0-9]"}, unit="x",
          elsewhere="plain operations compiled 0.44, ml_dtypes 2.3, qtorch 1.7, gfloat 8.5"),
    _CAST("pack MXFP8, likewise", "at most", 0.30, {"what": "ours: pack mxfp8*"}, unit="x",
          elsewhere="torchao compiled 0.3"),
    _CAST("pack MXFP4, likewise", "at most", 2, {"what": "ours: pack mxfp4"}, unit="x"),
    _CAST("stochastic rounding, to our nearest", "at most", 2, {"what": "ours: *stochastic"}, unit="x",
          column="ratio to our nearest e4m3"),
    _UNSCALE("unscale, check and spectra: 100 tensors of 100,000", "at most", 1.3, {"tensors": "100", "threads": "1"},
             unit="x", limit=_MOMENTS),
    _UNSCALE("unscale, check and spectra: one of 100 million", "at most", 1.3, {"tensors": "1", "threads": "1"},
             unit="x", limit=_MOMENTS),
    _UNSCALE("unscale, check and spectra, on a GPU", "at most", 1.1, {}, unit="x", devices=("cuda",)),
    Goal(what="the scale is back after 20 overflows: dynamic", stem="scalers", table="Recovery", unit=" steps",
         rows={"scaler": "ours, dynamic"}, column="clean steps", bound="at most", value=200,
         elsewhere="GradScaler 40,000"),
    Goal(what="the scale is back after 20 overflows: spectral", stem="scalers", table="Recovery", unit=" steps",
         rows={"scaler": "ours, spectral"}, column="clean steps", bound="at most", value=200),
    *(_FP8(f"FP8 linear layer, {size}^3, faster than bfloat16", "at least", value, {"size": f"{size}^3"}, unit="x",
           elsewhere=f"torchao {other}")
      for size, value, other in ((2048, 1.0, 0.82), (4096, 1.4, 1.24), (8192, 1.7, 1.43))),
    _FP8("FP8 linear layer, ahead of torchao", "at least", 1.15, {}, unit="x", column="x torchao"),
    Goal(what="unit-scaled feed-forward block, compiled, to the plain one", stem="unit", table="A feed-forward block",
         rows={"block": "unit", "mode": "compiled"}, column="of plain", bound="at most", value=1.02, unit="x",
         elsewhere="unit-scaling 1.02",
         limit="The median is a thousandth above the goal, and the spread beside it is larger."),
    Goal(what="a step of emulated FP16, to FP32", stem="emulate", table="A training step*", column="of fp32",
         rows={"step": "emulate fp16*"}, bound="at most", value=2.5, unit="x", elsewhere="native CPU FP16: 30"),
)  # fmt: skip

OWN: Sequence[Goal] = (
    Goal(what="2,000 series x 1,000 samples on disk", stem="run-log", table="Writing", rows={}, column="MB on disk",
         bound="at most", value=1000, unit=" MB"),
    Goal(what="opened, and one of its tensors read over all steps", stem="run-log", table="Reading", column="s",
         rows={"question": "open, one tensor's*"}, bound="at most", value=2, unit=" s"),
    Goal(what="500 spectra of a step made columns", stem="run-log", table="The background*", column="ms", unit=" ms",
         rows={"work": "*: merge a step, make its columns"}, bound="at most", value=2),
    Goal(what="300 tensors x 1,000 samples diagnosed", stem="diagnose", table="*", column="s", unit=" s",
         rows={"question": "*: diagnose, all rules"}, bound="at most", value=2),
    Goal(what="its report as one HTML file", stem="report", table="To write", column="MB", rows={"form": "*: HTML"},
         bound="at most", value=10, unit=" MB"),
    Goal(what="its report's verdict in the browser", stem="report", table="To open", column="verdict s", rows={},
         bound="at most", value=3, unit=" s"),
    Goal(what="the live page: any figure of 2,000 tensors x 1,000 samples", stem="serve", table="One run", column="ms",
         rows={"goal ms": "200*"}, bound="at most", value=200, unit=" ms", limit=_PAGE),
    Goal(what="the first verdict of such a run", stem="serve", table="One run", column="ms",
         rows={"what": "open cold, with its verdict"}, bound="at most", value=2000, unit=" ms", limit=_VERDICT),
    Goal(what="a figure of such a run, once it is read", stem="figures", table="*", column="again ms", rows={},
         bound="at most", value=200, unit=" ms", limit=_FIGURE),
    Goal(what="its JSON", stem="figures", table="*", column="JSON KB", rows={}, bound="at most", value=300,
         unit=" KB"),
    *(Goal(what=f"{command}, of the processor", stem="command-line", table="Commands", rows={"command": command},
           column="processor s", bound="at most", value=value, unit=" s")
      for command, value in (("plimsoll --help", 0.15), ("plimsoll check", 0.5))),
    Goal(what="a shadow step, all errors recorded, over a plain step", stem="microscope", table="A step*", unit="x",
         rows={"precision": "FP32", "what": "a shadow step"}, column="x the step", bound="at most", value=2.6,
         limit=_SHADOW),
    Goal(what="blame of a 6-layer transformer", stem="microscope", table="One look", unit=" s",
         rows={"what": "blame"}, column="seconds", bound="at most", value=60),
    Goal(what="plans by consequence: Kendall's tau of predicted and measured order", stem="plan",
         table="Plans: against the goals", rows={"models": "all"}, column="mean tau", bound="at least", value=0.8),
    Goal(what="plans by consequence: share of penalties in the interval", stem="plan",
         table="Plans: against the goals", rows={"models": "all"}, column="share in interval", bound="at least",
         value=0.9),
    Goal(what="4 bytes a parameter, 16-bit weights: above FP32's loss", stem="masters", table="Loss", unit=" %",
         rows={"weights": "bf16[, -][cks]*", "bytes a parameter": "[24]*"}, column="above fp32, %", bound="at most",
         value=1),
)  # fmt: skip
