"""Experiment `t5` (T9): a deep encoder whose residual stream passes 65,504, with clamps and without.

Four trainings from the same weights on the same batches (`model` says what makes the stream so large): FP16, FP16
with every branch's output clamped to the format's largest value, BF16, and FP32. FP16 here is that of a model that is
16 bits wide (`fp16-master`): the residual stream itself is. Under autocast it would stay in FP32.

The FP32 training's weights are then run forward in all four, on the same held-out rows: what clamping does to outputs.
"""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from plimsoll.text import percent
from plimsoll_lab.bench import Bench
from plimsoll_lab.claim import Claim, claims as claims_of
from plimsoll_lab.experiments.t5.analysis import judged, layers_of, overflowing
from plimsoll_lab.experiments.t5.model import LENGTH
from plimsoll_lab.experiments.t5.training import KINDS, Setup, setup_for, task_of
from plimsoll_lab.result import Measured
from plimsoll_lab.running.workers import carry_out, one_thread, workers_for
from plimsoll_lab.study import Experiment

Numbers = Mapping[str, float]
_AGREE = 0.99  # of places: clamping is said to have a negligible effect on results
_LOSS = 1.05  # of the loss


def measure(bench: Bench) -> Measured:
    """The four trainings, the same weights in four formats, and what they show."""
    return measure_with(bench, setup_for(bench.steps, full=bench.full), workers_for(bench.device))


def measure_with(bench: Bench, setup: Setup, workers: int) -> Measured:
    """Likewise, with sizes and a number of workers of one's own."""
    tasks = [task_of(kind, setup, bench.runs / kind.name, seed=bench.seed, device=bench.device) for kind in KINDS]
    with contextlib.nullcontext() if bench.full else one_thread():
        said = carry_out(
            "plimsoll_lab.experiments.t5.training:trained", tasks, workers=workers, progress=bench.progress
        )
    trainings = tuple(judged(kind, setup, bench.runs / kind.name, s) for kind, s in zip(KINDS, said, strict=True))
    fault, forward = said[0].get("fault", {}), said[-1]["forward"]
    foretold = overflowing(bench.runs / "bf16", setup)
    numbers = [training.numbers for training in trainings]
    return Measured(
        trainings=trainings, claims=claims(setup, numbers, fault, forward, foretold),
        said=_said(setup, numbers, fault, forward, foretold),
    )  # fmt: skip


def claims(
    setup: Setup,
    numbers: Sequence[Numbers],
    fault: Mapping[str, str],
    forward: Mapping[str, Numbers],
    foretold: Mapping[str, int],
) -> tuple[Claim, ...]:
    """What the experiment says: of the trainings in the order of `KINDS`, and of the same weights run forward."""
    fp16, clamped, bf16, fp32 = numbers
    return (
        *_of_overflow(setup, fp16, fault),
        *_of_warnings(fp16, fault, foretold),
        *_of_outputs(forward),
        *_of_training(clamped, bf16, fp32),
    )


def _of_overflow(setup: Setup, fp16: Numbers, fault: Mapping[str, str]) -> tuple[Claim, ...]:
    added = _is_sum(setup, fault)
    depth = (layers_of(setup).index(_place(fault)) + 1) / (2 * setup.layers) if added else 0.0
    return claims_of(
        f"""
        overflows | fp16.overflow_at | at least 1 and at most {setup.steps - 1} steps
            | FP16: in training, not at its beginning, the residual stream comes to Inf
        in-the-sum | in_the_sum | at least 1 operation | locate: the first Inf is the sum of the stream and a branch
        in-deep-layers | depth | at least 0.5 of the depth | locate: in the deeper half of the layers
        stops | fp16.skipped_since | at least 0.5 of the steps | FP16: from then on most steps are skipped
        """,
        depth=depth,
        fp16=fp16,
        in_the_sum=float(added),
    )


def _of_warnings(fp16: Numbers, fault: Mapping[str, str], foretold: Mapping[str, int]) -> tuple[Claim, ...]:
    return claims_of(
        """
        told-before | fp16.overflow_at - fp16.told_at | at least 1 steps before
            | the alarm overflow-ahead is raised before the first Inf
        foretold-by-bf16 | foretold_by_bf16 | at least 1 samples
            | whatif of the BF16 run names the layer that overflows first in FP16
        """,
        fp16=fp16,
        foretold_by_bf16=float(foretold.get(_place(fault), 0)),
    )


def _of_outputs(forward: Mapping[str, Numbers]) -> tuple[Claim, ...]:
    fp32, clamped = forward["fp32"], forward["fp16-clamped"]
    return claims_of(
        f"""
        outputs-lost | 1 - forward.fp16.finite | at least 0.01 of the outputs
            | same weights, FP16 without clamps: outputs are NaN
        clamped-outputs-agree | clamped.agreement | at least {_AGREE} of the places
            | same weights, FP16 with clamps: predictions are FP32's
        clamped-outputs-near | clamped.error | at most 0.05 of their norm
            | same weights, FP16 with clamps: logits are near FP32's
        clamped-accuracy | clamped.accuracy - fp32.accuracy | at least {-0.01} of the places
            | same weights, FP16 with clamps: as accurate as FP32
        """,
        clamped=clamped,
        forward=forward,
        fp32=fp32,
    )


def _of_training(clamped: Numbers, bf16: Numbers, fp32: Numbers) -> tuple[Claim, ...]:
    return claims_of(
        f"""
        clamps-act | clamped.clamped | at least 1e-06 and at most 0.01 of the stream
            | FP16 with clamps: values are clamped in training, and they are few
        clamped-trains | clamped.held_out_loss / fp32.held_out_loss | at most {_LOSS} of FP32's loss
            | trained in FP16 with clamps: held-out loss as in FP32
        bf16-trains | bf16.held_out_loss / fp32.held_out_loss | at most {_LOSS} of FP32's loss
            | trained in BF16, without clamps: likewise
        """,
        bf16=bf16,
        clamped=clamped,
        fp32=fp32,
    )


def _is_sum(setup: Setup, fault: Mapping[str, str]) -> bool:
    """Whether it is an addition to the stream: in a branch, and of its shape (scores get a bias added too)."""
    added = fault.get("operation", "").startswith("aten.add") and fault.get("kind") == "inf"
    whole = fault.get("shape") == f"{setup.batch}x{LENGTH}x{setup.width}"
    return added and whole and _place(fault) in layers_of(setup)


def _place(fault: Mapping[str, str]) -> str:
    """What the module of the fault returns, by its name in a run; empty where there is none."""
    return f"{fault['module']}:output" if fault.get("module") else ""


def _said(
    setup: Setup,
    numbers: Sequence[Numbers],
    fault: Mapping[str, str],
    forward: Mapping[str, Numbers],
    foretold: Mapping[str, int],
) -> tuple[str, ...]:
    fp16, clamped, bf16, fp32 = numbers
    places = layers_of(setup)
    first = next((places.index(name) // 2 + 1 for name in places if name in foretold), 0)
    agree = ", ".join(f"{name} {percent(forward[name]['agreement'], 2)}" for name in ("fp16", "fp16-clamped", "bf16"))
    when = (
        f"overflow-ahead was raised at step {fp16['told_at']:.0f}, the first Inf came at step "
        f"{fp16['overflow_at']:.0f}. By the BF16 run FP16 overflows from layer {first} of {setup.layers} on."
    )
    losses = (
        f"Held-out loss: FP32 {fp32['held_out_loss']:.3f}, BF16 {bf16['held_out_loss']:.3f}, FP16 clamped "
        f"{clamped['held_out_loss']:.3f}; {percent(clamped['clamped'], 3)} of the stream was clamped in training."
    )
    overflow = f"FP16: {fault.get('sentence', 'nothing overflowed.')}"
    return overflow, when, losses, f"Same weights, predictions as FP32's: {agree}."


def _settings(bench: Bench) -> Mapping[str, Any]:
    fp16 = "emulated" if bench.device == "cpu" else "the device's own"
    return {**setup_for(bench.steps, full=bench.full).to_dict(), "device": bench.device, "fp16": fp16}


T5 = Experiment(
    name="t5",
    claim="A deep encoder's residual stream passes 65,504 and turns to Inf in FP16; clamped, it gives what FP32 gives.",
    source="T9",
    settings=_settings,
    measure=measure,
)
