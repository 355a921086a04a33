"""Experiment `formats` (X1, T2): what the floating-point formats hold, measured by casting and by a second witness.

Nothing is read off the catalogue. A format's fields and limits are found by putting numbers into it with
`plimsoll.cast` and looking at what comes back (`measured_by_cast`). The second witness is torch's and NumPy's own
dtypes, or, for TF32, which neither has, arithmetic on FP32's bits (`independent_check`). A published figure bounds
both: a number that was printed with three digits may be off by half a unit of the third.

Beside the limits, random bit patterns of FP32 are rounded both ways; no value may differ.
"""

from collections.abc import Mapping, Sequence

import torch

from plimsoll_lab.bench import Bench
from plimsoll_lab.claim import Claim
from plimsoll_lab.experiments.formats.independent_check import by_witness, disagreements
from plimsoll_lab.experiments.formats.measured_by_cast import by_cast
from plimsoll_lab.experiments.formats.published_facts import FACTS, Fact
from plimsoll_lab.result import Measured
from plimsoll_lab.study import Experiment

BLOCKS, FULL_BLOCKS = 4, 256
BLOCK = 2**18  # random bit patterns in a block
ROUNDED = ("tf32", "fp16", "bf16")


def measure(bench: Bench) -> Measured:
    """Every fact, by both ways, and the random patterns."""
    bench.progress.begin("facts", len(FACTS))
    values: list[tuple[float, float]] = []
    for fact in FACTS:
        values.append((by_cast(fact, bench.device), by_witness(fact, bench.device)))
        bench.progress.advance()
    differing = _differing(bench)
    return Measured(trainings=(), claims=claims(values, differing), said=_table(values))


def claims(values: Sequence[tuple[float, float]], differing: Mapping[str, int]) -> tuple[Claim, ...]:
    """Two of each fact, one for each way; and one of each format that random patterns were rounded to."""
    found: list[Claim] = []
    for fact, (cast, witness) in zip(FACTS, values, strict=True):
        low, high = fact.bounds
        for suffix, by, value in (("", "", cast), ("-witness", f", by {fact.witness}", witness)):
            found.append(Claim(f"{fact.id}{suffix}", f"{fact.says}{by}",
                               value, at_least=low, at_most=high, unit=fact.unit))  # fmt: skip
    for name, count in differing.items():
        says = f"{name}: cast rounds every random FP32 pattern as the second witness does"
        found.append(Claim(f"{name}-rounding", says, float(count), at_most=0, unit="values differ"))
    return tuple(found)


def _differing(bench: Bench) -> dict[str, int]:
    """Of random bit patterns of FP32, how many the two ways round to different values, by format."""
    blocks = _blocks(bench)
    bench.progress.begin("random patterns", blocks)
    generator = torch.Generator().manual_seed(bench.seed)
    found: dict[str, int] = dict.fromkeys(ROUNDED, 0)
    for _ in range(blocks):
        bits = torch.randint(-(2**31), 2**31, (BLOCK,), dtype=torch.int64, generator=generator).to(torch.int32)
        for name in ROUNDED:
            found[name] += disagreements(bits.to(bench.device).view(torch.float32), name)
        bench.progress.advance()
    return found


def _table(values: Sequence[tuple[float, float]]) -> tuple[str, ...]:
    head = f"{'format':<7}{'what':<45}{'measured':>13}{'published':>13}"
    return (head, *(_row(fact, *both) for fact, both in zip(FACTS, values, strict=True)))


def _row(fact: Fact, cast: float, witness: float) -> str:
    """In 79 signs, so that no terminal wraps it."""
    same = "" if cast == witness else " !"
    return f"{fact.format:<7}{fact.short:<45}{_seven(cast):>13}{fact.published:>13}{same}"


def _seven(value: float) -> str:
    return f"{value:.7g}"


def _blocks(bench: Bench) -> int:
    return bench.steps or (FULL_BLOCKS if bench.full else BLOCKS)


def _settings(bench: Bench) -> Mapping[str, object]:
    return {"facts": len(FACTS), "random_patterns": _blocks(bench) * BLOCK, "device": bench.device}


FORMATS = Experiment(
    name="formats",
    claim="FP64, FP32, TF32, FP16 and BF16 have the fields, limits and rounding that the literature gives them.",
    source="X1, T2",
    settings=_settings,
    measure=measure,
)
