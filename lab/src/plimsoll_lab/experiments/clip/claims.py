"""What the experiment `clip` says beyond `demo`, each with its number and its bound.

Bounds are those of `demo` where the same is asked: most gradients are lost above 0.8, nearly none below 0.05 (T6), a
loss is BF16's within 10 % and above it from 10 % on.
"""

from collections.abc import Mapping

from plimsoll_lab.claim import Claim, claims as claims_of, of_rows
from plimsoll_lab.experiments.clip.demo import claims as claims_of_demo
from plimsoll_lab.experiments.clip.training import Setup
from plimsoll_lab.experiments.clip.variants import DEMO_KINDS

Numbers = Mapping[str, Mapping[str, float]]

_MOST, _NEARLY_NONE, _PARTED = 0.8, 0.05, 1.1


def claims(setup: Setup, numbers: Numbers) -> tuple[Claim, ...]:
    """All of them, from the numbers of each training by its name."""
    return (
        *of_rows(claims_of_demo(setup, *(numbers[kind.name] for kind in DEMO_KINDS)), "T3", "T4"),
        *of_rows((*_of_burst(setup, numbers), *_of_scales(setup, numbers)), "T7"),
        *of_rows(_of_never(numbers["fp16-never-hard"]), "T3"),
        *of_rows((*_of_spans(numbers), *_of_always(numbers)), "T7"),
    )


def _of_burst(setup: Setup, numbers: Numbers) -> tuple[Claim, ...]:
    """The stock scaler otherwise set. Outside of the ten hard batches no layer spans FP16: 2^24 outlasts them."""
    falls = tuple(
        Claim(f"{name}-falls", f"{title}: the scale falls at each hard batch all the same",
              numbers[f"fp16-{name}"]["scale_fell"], at_least=setup.hard_batches, unit="binades")
        for name, title in (
            ("high", "FP16 from 2^24"), ("short", "FP16, doubles every 100 steps"), ("both", "FP16 with both of these"),
        )
    )  # fmt: skip
    return (
        *falls,
        Claim("short-still-lost", "FP16, doubles every 100 steps: too many gradients are lost after them",
              numbers["fp16-short"]["lost_after"], at_least=_NEARLY_NONE, unit="of gradients"),
        Claim("high-outlasts", "FP16 from 2^24: ten halvings are too few to stop it; it ends where BF16 does",
              numbers["fp16-high"]["loss_end"] / numbers["bf16"]["loss_end"], at_most=_PARTED, unit="of BF16's loss"),
    )  # fmt: skip


def _of_scales(setup: Setup, numbers: Numbers) -> tuple[Claim, ...]:
    """Scales for layers by the published rule, for parameters and for elements, over the ten hard batches."""
    bf16, zhao = numbers["bf16"], numbers["fp16-zhao"]
    found = claims_of(
        f"""
        zhao-falls | zhao.scale_fell | at least {setup.hard_batches} binades
            | The published rule for layers raises scales only: the loss scale falls all the same
        zhao-not-enough | zhao.lost_after | at least {_NEARLY_NONE} of gradients
            | The published rule for layers: too many gradients are lost after them
        """,
        zhao=zhao,
    )
    for name, title in (("parameter", "A scale per parameter"), ("element", "A scale per element")):
        these = numbers[f"fp16-{name}"]
        found += claims_of(
            f"""
            {name}-no-batch-lost | these.batches_lost | at most 0 batches | {title}: no batch is lost
            {name}-gradients-whole | these.lost_after | at most {_NEARLY_NONE} of gradients
                | {title}: nearly no gradient is lost
            {name}-as-bf16 | these.loss_end / bf16.loss_end | at most {_PARTED} of BF16's loss
                | {title}: it ends where BF16 does
            {name}-one-sits-out | these.sat_out | at least 1 and at most {setup.hard_batches} parameter steps
                | {title}: one parameter sits out, in hard batches only
            """,
            bf16=bf16,
            these=these,
        )
    return tuple(found)


def _of_never(these: Mapping[str, float]) -> tuple[Claim, ...]:
    return claims_of(
        f"""
        never-sound-at-first | these.lost_before | at most {_NEARLY_NONE} of gradients
            | FP16 without hard batches: nearly no gradient is lost at first
        never-often-zero | these.lost_after | at least 0.1 of gradients
            | FP16 without hard batches: later gradients are often zero
        never-scale-stays | these.gradient_fell_binades - (these.scale_end - these.scale_before)
            | at least 1 binades
            | FP16 without hard batches: gradients shrink by more than the scale has grown
        never-told | these.underflow_since | at least 0 the step it began at
            | FP16 without hard batches: a rule tells of the underflow
        """,
        these=these,
    )


def _of_spans(numbers: Numbers) -> tuple[Claim, ...]:
    burst, always = numbers["bf16"], numbers["bf16-always-hard"]
    return claims_of(
        f"""
        hard-spans | burst.spanning_hard | at least 1 layers
            | at hard batches a single layer's gradient spans more than FP16
        others-do-not | burst.spanning_others | at most 0 layers | outside of the ten hard batches none does
        always-spans | always.spanning_hard_share | at least {_MOST} of samples
            | where every batch is hard one does all along, as in the published CLIP
        """,
        always=always,
        burst=burst,
    )


def _of_always(numbers: Numbers) -> tuple[Claim, ...]:
    """Every batch is hard: neither a higher scale nor a shorter interval helps."""
    bf16, both = numbers["bf16-always-hard"], numbers["fp16-both-always-hard"]
    layer, parameter = numbers["fp16-layer-always-hard"], numbers["fp16-parameter-always-hard"]
    return claims_of(
        f"""
        always-falls-at-once | both.scale_before - both.fell_at_once | at most 15 its exponent
            | all batches hard, from 2^24: the scale falls below 2^16 within 40 steps
        always-stays-down | both.highest_later | at most 15 its exponent
            | all batches hard, doubling every 100 steps: it does not come back
        always-gradients-zero | both.lost_after | at least {_MOST} of gradients
            | all batches hard, both of these: most gradients are zero
        always-stalls | both.loss_end / bf16.loss_end | at least {_PARTED} of BF16's loss
            | all batches hard, both of these: training stalls
        always-layer | layer.loss_end / bf16.loss_end | at most {_PARTED} of BF16's loss
            | all batches hard, LayerScaler: it ends where BF16 does
        always-parameter | parameter.loss_end / bf16.loss_end | at most {_PARTED} of BF16's loss
            | all batches hard, a scale per parameter: it ends where BF16 does
        """,
        bf16=bf16,
        both=both,
        layer=layer,
        parameter=parameter,
    )
