"""The claims of the sweep: what was published of 2,092 trainings, of as many as were trained here."""

from collections.abc import Mapping

from plimsoll_lab.claim import Claim
from plimsoll_lab.experiments.unit_sweep.analysis import Scores, mean, share
from plimsoll_lab.experiments.unit_sweep.grid import FP16, FP32, STATIC, UNIT_FP16, UNIT_FP32, Way

TRAILS = 1.05  # of FP32's bits: from here on a training has not come to what it should
_WITHIN = 1.01
_MOST = 0.9  # of the designs: the source says "in almost all cases"
_SOUND = 0.01  # of gradients lost
Numbers = Mapping[Way, Mapping[str, float]]


def claims(found: Scores, numbers: Numbers) -> tuple[Claim, ...]:
    """What the experiment says; `numbers`: of the watched trainings. Bounds on a mean are those it keeps with 95 %."""
    return (*_of_fp16(found, numbers), *_of_remedies(found, numbers), *_of_quality(found))


def _of_fp16(found: Scores, numbers: Numbers) -> tuple[Claim, ...]:
    pairs = found.pairs(FP16, FP32)
    return (
        Claim("fp16-fails", "FP16 with no loss scale, each at its best learning rate: fails, or trails FP32",
              mean(pairs).low, at_least=TRAILS, unit="of FP32's bits, in the mean"),
        Claim("fp16-fails-widely", "FP16 with no loss scale: so it does in most designs",
              share(pairs, at_least=TRAILS), at_least=_MOST, unit="of the designs"),
        Claim("fp16-underflow", "FP16 with no loss scale: most gradients of activations are zero",
              numbers[FP16]["lost_after"], at_least=0.5, unit="of gradients"),
        Claim("fp16-told", "FP16 with no loss scale: an alarm tells of the underflow",
              numbers[FP16]["underflow_alarms"], at_least=1, unit="alarms"),
    )  # fmt: skip


def _of_remedies(found: Scores, numbers: Numbers) -> tuple[Claim, ...]:
    """At the learning rate that is best in FP32: nothing but the precision is changed."""
    static, unit = found.pairs_at_same(STATIC, FP32), found.pairs_at_same(UNIT_FP16, UNIT_FP32)
    return (
        Claim("static-repairs", "FP16 with a loss scale of 2,048: as FP32, at the same learning rate",
              mean(static).high, at_most=_WITHIN, unit="of FP32's bits, in the mean"),
        Claim("static-repairs-widely", "FP16 with a loss scale of 2,048: so it is in most designs",
              share(static, at_most=_WITHIN), at_least=_MOST, unit="of the designs"),
        Claim("unit-repairs", "unit-scaled FP16: as unit-scaled FP32, at the same learning rate",
              mean(unit).high, at_most=_WITHIN, unit="of its bits, in the mean"),
        Claim("unit-repairs-widely", "unit-scaled FP16: so it is in most designs",
              share(unit, at_most=_WITHIN), at_least=_MOST, unit="of the designs"),
        Claim("unit-nothing-lost", "unit-scaled FP16: nearly no gradient is lost",
              numbers[UNIT_FP16]["lost_after"], at_most=_SOUND, unit="of gradients"),
    )  # fmt: skip


def _of_quality(found: Scores) -> tuple[Claim, ...]:
    """Unit-scaled against unscaled, each at its best learning rate."""
    pairs = found.pairs(UNIT_FP32, FP32)
    return (
        Claim("unit-as-good", "unit-scaled FP32: as good as FP32, or better, each at its best learning rate",
              mean(pairs).high, at_most=_WITHIN, unit="of FP32's bits, in the mean"),
        Claim("unit-as-good-widely", "unit-scaled FP32: so it is in most designs",
              share(pairs, at_most=_WITHIN), at_least=_MOST, unit="of the designs"),
        Claim("unit-fp16-as-good", "unit-scaled FP16: as good as plain FP32, or better",
              mean(found.pairs(UNIT_FP16, FP32)).high, at_most=_WITHIN, unit="of FP32's bits, in the mean"),
    )  # fmt: skip
