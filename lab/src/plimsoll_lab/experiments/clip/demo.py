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
from plimsoll_lab.claim import Claim, claims as claims_of
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
    return claims_of(
        f"""
        fp16-nan | fp16.nonfinite_steps | at least {setup.hard_batches} and at most {setup.hard_batches} steps
            | FP16: the gradients of every hard batch are not finite
        fp16-scale-falls | fp16.scale_before - fp16.scale_end | at least {setup.hard_batches} binades
            | FP16: the stock scaler halves its scale at each of them
        fp16-sound-before | fp16.lost_before | at most 0.05 of gradients | FP16: nearly no gradient was lost before
        fp16-gradients-zero | fp16.lost_after | at least 0.8 of gradients
            | FP16: most gradients are zero from then on
        fp16-stalls | fp16.loss_end / bf16.loss_end | at least 1.1 of BF16's loss
            | FP16: training stalls; its loss ends above that of BF16
        collapse-found | collapse_found | at least 0 and at most 20 steps after them
            | the alarm scale-collapse begins at the hard batches
        underflow-found | underflow_found | at least 0 and at most 50 steps after them
            | the alarm underflow-high follows
        """,
        bf16=bf16,
        fp16=fp16,
        collapse_found=fp16["scale-collapse_since"] - setup.hard_at,
        underflow_found=fp16["underflow-high_since"] - setup.hard_at,
    )


def _of_bf16(bf16: Numbers) -> tuple[Claim, ...]:
    return claims_of(
        """
        bf16-gradient-rises | bf16.gradient_rise | at least 1.2 times the usual norm
            | BF16, same batches: the gradient rises
        bf16-goes-on | bf16.progress | at least 0.05 of the loss before | BF16: then training goes on
        bf16-nothing-found | bf16.underflow_findings | at most 0 findings
            | BF16: no rule tells of underflow or of the scale
        """,
        bf16=bf16,
    )


def _of_remedies(fp16: Numbers, bf16: Numbers, spectral: Numbers, layer: Numbers) -> tuple[Claim, ...]:
    return claims_of(
        """
        spectral-no-batch-lost | spectral.batches_lost | at most 0 batches | SpectralScaler: no batch is lost
        spectral-recovers | spectral.scale_back_after | at most 80 steps | SpectralScaler: the scale is back soon
        spectral-goes-on | spectral.loss_end / fp16.loss_end | at most 0.92 of stock FP16's loss
            | SpectralScaler: training goes on
        layer-no-batch-lost | layer.batches_lost | at most 0 batches | LayerScaler: no batch is lost
        layer-scale-stays | layer.scale_before - layer.scale_lowest | at most 0 binades
            | LayerScaler: one layer's scale falls, the loss scale stays
        layer-gradients-whole | layer.lost_after | at most 0.05 of gradients
            | LayerScaler: nearly no gradient is lost
        layer-as-bf16 | layer.loss_end / bf16.loss_end | at most 1.1 of BF16's loss
            | LayerScaler: it ends where BF16 does
        layer-no-alarm | layer.alarms | at most 0 alarms | LayerScaler: nothing grave is found
        """,
        bf16=bf16,
        fp16=fp16,
        layer=layer,
        spectral=spectral,
    )


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
