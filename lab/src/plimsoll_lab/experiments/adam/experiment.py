"""Experiment `adam` (T8): what FP16 makes of Adam's state and epsilon, and what serves.

Six trainings of one adapter from the same weights on the same batches (`training`). For a spell its gradients are
zero; then they are small and grow. In exact arithmetic an update of Adam's has at most 7.27 learning rates, whatever
the gradients are (`largest_ratio`), so what is far above that is rounding's doing.

Where second moments become zero: a gradient g adds 0.001 g² to them, and FP16 makes zero of what is at or below 2^-25.
So all gradients below 0.0055 leave no second moment, be it the first after a spell or the hundredth. A spell itself
takes no second moment away in FP16: 0.999 of one below 500 units of 2^-24 rounds back to it, and it stays for good.
"""

import contextlib
from collections.abc import Mapping, Sequence

from plimsoll.text import percent
from plimsoll_lab.claim import Claim
from plimsoll_lab.experiment import Bench, Experiment
from plimsoll_lab.experiments.adam.analysis import BOUND, EXPLODES, judged
from plimsoll_lab.experiments.adam.training import KINDS, Setup, described, setup_for, train
from plimsoll_lab.result import Measured, Training
from plimsoll_lab.running.workers import one_thread

Numbers = Mapping[str, float]
_LOST = 0.05  # the rule's own threshold
_SAME_RATE = 0.5  # binades between the rates of the middle nine tenths of weights: all have one rate
_OWN_RATES = 3.0  # binades: a factor of 8 from weight to weight


def measure(bench: Bench) -> Measured:
    """The six trainings, and what they show."""
    return measure_with(bench, setup_for(bench.steps, full=bench.full))


def measure_with(bench: Bench, setup: Setup) -> Measured:
    """Likewise, with sizes of one's own."""
    trainings: list[Training] = []
    with contextlib.nullcontext() if bench.full else one_thread():
        for kind in KINDS:
            train(kind, setup, bench.runs / kind.name, seed=bench.seed, device=bench.device, progress=bench.progress)
            trainings.append(judged(kind, setup, bench.runs / kind.name))
    numbers = [training.numbers for training in trainings]
    return Measured(trainings=tuple(trainings), claims=claims(*numbers), said=_said(numbers))


def claims(
    fp32: Numbers, zero: Numbers, small: Numbers, large: Numbers, guarded: Numbers, master: Numbers
) -> tuple[Claim, ...]:
    """What the experiment says, with the numbers of the six trainings, in the order of `KINDS`."""
    return (*_of_epsilon(zero), *_of_moments(fp32, small, large), *_of_rates(fp32, small, large),
            *_of_remedies(fp32, guarded, master))  # fmt: skip


def _of_epsilon(zero: Numbers) -> tuple[Claim, ...]:
    return (
        Claim(
            id="epsilon-is-zero", says="epsilon 1e-8 in FP16: a weight without gradient is NaN after one step",
            measured=zero["weights_lost"], at_least=1.0, unit="of the weights",
        ),
        Claim(
            id="epsilon-found", says="epsilon 1e-8 in FP16: the alarm nonfinite is raised",
            measured=zero["nonfinite_told"], at_least=1, unit="alarms",
        ),
    )  # fmt: skip


def _of_moments(fp32: Numbers, small: Numbers, large: Numbers) -> tuple[Claim, ...]:
    return (
        Claim(
            id="moments-vanish", says="FP16 state: second moments are zero where first ones are not, after the spell",
            measured=large["moments_zero"], at_least=_LOST, unit="of second moments",
        ),
        Claim(
            id="moments-foretold", says="an FP32 run tells beforehand that FP16 would lose them",
            measured=fp32["moments_lost_in_fp16"], at_least=_LOST, unit="of second moments",
        ),
        Claim(
            id="fp32-bounded", says="FP32: no update is above Adam's own bound",
            measured=fp32["largest_update"], at_most=BOUND, unit="learning rates",
        ),
        Claim(
            id="update-explodes", says="epsilon 1e-7: after the spell an update is ten times that bound or more",
            measured=small["largest_update"], at_least=EXPLODES, unit="learning rates",
        ),
        Claim(
            id="explosion-ends-it", says="epsilon 1e-7: the loss ends far above FP32's",
            measured=small["loss_end"] / fp32["loss_end"], at_least=2.0, unit="of FP32's loss",
        ),
        Claim(
            id="found-before", says="the alarm second-moment-lost is raised before the explosion",
            measured=small["exploded_at"] - small["told_at"], at_least=1, unit="steps before",
        ),
    )  # fmt: skip


def _of_rates(fp32: Numbers, small: Numbers, large: Numbers) -> tuple[Claim, ...]:
    return (
        Claim(
            id="fp32-adapts", says="FP32: after the spell weights have rates of their own",
            measured=fp32["rate_spread"], at_least=_OWN_RATES, unit="binades apart",
        ),
        Claim(
            id="epsilon-hides", says="epsilon 1e-7: they all have the same",
            measured=small["rate_spread"], at_most=_SAME_RATE, unit="binades apart",
        ),
        Claim(
            id="large-epsilon-hides", says="epsilon 1e-4: likewise",
            measured=large["rate_spread"], at_most=_SAME_RATE, unit="binades apart",
        ),
        Claim(
            id="large-epsilon-holds", says="epsilon 1e-4: and no update explodes",
            measured=large["largest_update"], at_most=EXPLODES, unit="learning rates",
        ),
    )  # fmt: skip


def _of_remedies(fp32: Numbers, guarded: Numbers, master: Numbers) -> tuple[Claim, ...]:
    return (
        Claim(
            id="guard-bounds", says="guard_adam: FP16 state, and no update is above the bound, up to rounding",
            measured=guarded["largest_update"], at_most=1.1 * BOUND, unit="learning rates",
        ),
        Claim(
            id="guard-trains", says="guard_adam: training goes on: the loss ends below that of the spell",
            measured=guarded["loss_end"] / guarded["loss_spell"], at_most=1.0, unit="of the spell's loss",
        ),
        Claim(
            id="master-bounds", says="FP32 state and masters: no update is above the bound, up to rounding",
            measured=master["largest_update"], at_most=1.1 * BOUND, unit="learning rates",
        ),
        Claim(
            id="master-trains", says="FP32 state and masters: it ends where FP32 does",
            measured=master["loss_end"] / fp32["loss_end"], at_most=1.05, unit="of FP32's loss",
        ),
        Claim(
            id="master-nothing-found", says="FP32 state and masters: no second moment is found lost",
            measured=master["told"], at_most=0, unit="findings",
        ),
    )  # fmt: skip


def _said(numbers: Sequence[Numbers]) -> tuple[str, ...]:
    fp32, _, small, large, guarded, _ = numbers
    found = (
        f"After the spell {percent(large['moments_zero'], 0)} of FP16's second moments are zero beside first ones "
        "that are "
        f"not. With epsilon 1e-7 an update has {small['largest_update']:,.0f} learning rates, where FP32's largest "
        f"is {fp32['largest_update']:.1f}: told of at step {small['told_at']:.0f}, exploded at step "
        f"{small['exploded_at']:.0f}."
    )
    advice = (
        f"With FP32 state, or guard_adam (largest update {guarded['largest_update']:.1f}), training goes on. Raising "
        "epsilon does not serve: 1e-7 does not bound the update, and below 1e-4 all weights have one rate."
    )
    return found, advice


def _settings(bench: Bench) -> Mapping[str, object]:
    return described(setup_for(bench.steps, full=bench.full), bench.device)


ADAM = Experiment(
    name="adam",
    claim="Adam's state in FP16 loses second moments and epsilon: after a spell of zero gradients an update explodes.",
    source="T8",
    settings=_settings,
    measure=measure,
)
