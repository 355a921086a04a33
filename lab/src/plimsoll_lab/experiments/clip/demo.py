"""Experiment `demo` (T3, T4): ten hard batches in a row, in FP16 and in BF16, and what keeps FP16 training.

Four trainings from the same weights on the same batches. In the hard batches an eighth of the pictures is black, as
where a shard fails to decode. The gradient of a black patch is divided by 1e-8 (`model`): far beyond FP16 at any
usual scale, and nothing to BF16.

What this needs is stated, not hidden. A stock scaler leaves 2^6 after ten halvings of 2^16. FP16 flushes what is below
2^-25, so true gradients below 2^-31 are zero from then on. A large CLIP has such gradients for its width, its depth and
its batch; a small one has them since its loss is the share of a batch of 32,768, and its activations are large.
"""

from collections.abc import Mapping

from plimsoll.runs import Run
from plimsoll.text import percent
from plimsoll_lab.bench import Bench
from plimsoll_lab.claim import Claim
from plimsoll_lab.experiments.clip.analysis import TAIL, judged
from plimsoll_lab.experiments.clip.tasks import train_all
from plimsoll_lab.experiments.clip.training import Setup, described, setup_for
from plimsoll_lab.experiments.clip.variants import DEMO_KINDS
from plimsoll_lab.result import Measured, Training
from plimsoll_lab.running.workers import workers_for
from plimsoll_lab.study import Experiment

Numbers = Mapping[str, float]


def measure(bench: Bench) -> Measured:
    """The four trainings, and what they show."""
    return measure_with(bench, setup_for(bench.steps, full=bench.full), workers=workers_for(bench.device))


def measure_with(bench: Bench, setup: Setup, workers: int) -> Measured:
    """Likewise, with sizes of one's own."""
    train_all(DEMO_KINDS, setup, bench, workers)
    trainings = [judged(kind, setup, Run(bench.runs / kind.name)) for kind in DEMO_KINDS]
    numbers = [training.numbers for training in trainings]
    return Measured(
        trainings=tuple(trainings), claims=claims(setup, *numbers), said=said(*trainings), legend=legend(setup)
    )  # fmt: skip


def claims(setup: Setup, fp16: Numbers, bf16: Numbers, spectral: Numbers, layer: Numbers) -> tuple[Claim, ...]:
    """What the experiment says, with the numbers of the four trainings."""
    return (*_of_fp16(setup, fp16, bf16), *_of_bf16(bf16), *_of_remedies(fp16, bf16, spectral, layer))


def _of_fp16(setup: Setup, fp16: Numbers, bf16: Numbers) -> tuple[Claim, ...]:
    return (
        Claim("fp16-nan", "FP16: the gradients of every hard batch are not finite",
              fp16["nonfinite_steps"], at_least=setup.hard_batches, at_most=setup.hard_batches, unit="steps"),
        Claim("fp16-scale-falls", "FP16: the stock scaler halves its scale at each of them",
              fp16["scale_before"] - fp16["scale_end"], at_least=setup.hard_batches, unit="binades"),
        Claim("fp16-sound-before", "FP16: nearly no gradient was lost before",
              fp16["lost_before"], at_most=0.05, unit="of gradients"),
        Claim("fp16-gradients-zero", "FP16: most gradients are zero from then on",
              fp16["lost_after"], at_least=0.8, unit="of gradients"),
        Claim("fp16-stalls", "FP16: training stalls; its loss ends above that of BF16",
              fp16["loss_end"] / bf16["loss_end"], at_least=1.1, unit="of BF16's loss"),
        Claim("collapse-found", "the alarm scale-collapse begins at the hard batches",
              fp16["scale-collapse_since"] - setup.hard_at, at_least=0, at_most=20, unit="steps after them"),
        Claim("underflow-found", "the alarm underflow-high follows",
              fp16["underflow-high_since"] - setup.hard_at, at_least=0, at_most=50, unit="steps after them"),
    )  # fmt: skip


def _of_bf16(bf16: Numbers) -> tuple[Claim, ...]:
    return (
        Claim("bf16-gradient-rises", "BF16, same batches: the gradient rises",
              bf16["gradient_rise"], at_least=1.2, unit="times the usual norm"),
        Claim("bf16-goes-on", "BF16: then training goes on",
              bf16["progress"], at_least=0.05, unit="of the loss before"),
        Claim("bf16-nothing-found", "BF16: no rule tells of underflow or of the scale",
              bf16["underflow_findings"], at_most=0, unit="findings"),
    )  # fmt: skip


def _of_remedies(fp16: Numbers, bf16: Numbers, spectral: Numbers, layer: Numbers) -> tuple[Claim, ...]:
    return (
        Claim("spectral-no-batch-lost", "SpectralScaler: no batch is lost",
              spectral["batches_lost"], at_most=0, unit="batches"),
        Claim("spectral-recovers", "SpectralScaler: the scale is back soon",
              spectral["scale_back_after"], at_most=80, unit="steps"),
        Claim("spectral-goes-on", "SpectralScaler: training goes on",
              spectral["loss_end"] / fp16["loss_end"], at_most=0.92, unit="of stock FP16's loss"),
        Claim("layer-no-batch-lost", "LayerScaler: no batch is lost",
              layer["batches_lost"], at_most=0, unit="batches"),
        Claim("layer-scale-stays", "LayerScaler: one layer's scale falls, the loss scale stays",
              layer["scale_before"] - layer["scale_lowest"], at_most=0, unit="binades"),
        Claim("layer-gradients-whole", "LayerScaler: nearly no gradient is lost",
              layer["lost_after"], at_most=0.05, unit="of gradients"),
        Claim("layer-as-bf16", "LayerScaler: it ends where BF16 does",
              layer["loss_end"] / bf16["loss_end"], at_most=1.1, unit="of BF16's loss"),
        Claim("layer-no-alarm", "LayerScaler: nothing grave is found",
              layer["alarms"], at_most=0, unit="alarms"),
    )  # fmt: skip


def legend(setup: Setup) -> str:
    """What the columns of the table hold."""
    return (
        f"lost: of the activation gradient values that FP16 held, at steps after the {setup.hard_batches} hard batches "
        f"(from {setup.hard_end}, repetitions apart). loss: the median of the last {TAIL} steps."
    )


def said(fp16: Training, bf16: Training, spectral: Training, layer: Training) -> tuple[str, ...]:
    """What was found, and the advice that the measurement gives."""
    serves, wholly = spectral.good, layer.good and layer.numbers["lost_for_steps"] == 0
    found = (
        f"In FP16 the scale falls from 2^{fp16.numbers['scale_before']:.0f} to 2^{fp16.numbers['scale_end']:.0f}, and "
        f"{percent(fp16.numbers['lost_after'])} of the activation gradient values underflow from then on. No error, no "
        "NaN in a weight."
    )
    advice = {
        (True, True): "LayerScaler is best here: one layer's scale falls, all others keep theirs. SpectralScaler "
        f"recovers too, after {spectral.numbers['lost_for_steps']:.0f} steps of lost gradients. Or train in BF16.",
        (True, False): "SpectralScaler gets FP16 out; LayerScaler did not here. Or train in BF16.",
        (False, True): "LayerScaler keeps FP16 going; SpectralScaler did not here. Or train in BF16.",
        (False, False): "Neither scaler kept FP16 going here: train in BF16.",
    }[serves, wholly]
    return (found, advice) if bf16.good else (found,)


def settings(bench: Bench) -> Mapping[str, object]:
    """What the demonstration trains, and on what."""
    return described(setup_for(bench.steps, full=bench.full), bench.device)


DEMO = Experiment(
    name="demo",
    claim=(
        "Ten bad batches silently stall a small CLIP in FP16. In BF16, or with Plimsoll's scalers, it keeps learning."
    ),
    source="T3, T4",
    settings=settings,
    measure=measure,
)
