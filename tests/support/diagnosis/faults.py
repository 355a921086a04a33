"""Faults, each with the rule that must name it, the layer it must name, and the steps within which it must be.

A new fault is a new line. `rule` must be found with at least `severity`, its first spot (or any, where several layers
have it) must be `layer`, and `since_step` must lie from `first` to `last`. A new rule has an entry in `WORDS` too.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from plimsoll.runs import Event
from tests.support.diagnosis.stories import LAYERS, SOUND, Size, Story, constant, make_story, of_layer, since

A, B = LAYERS[4], LAYERS[9]  # blocks.2.attn, blocks.4.mlp
INF, NAN = float("inf"), float("nan")


@dataclass(frozen=True, kw_only=True)
class Fault:
    name: str
    story: Story
    rule: str
    severity: str
    layer: str | None = None
    first: int = 0
    last: int = 0


def growing(binades_a_step: float, start: float = 0.0) -> Callable[[str, int], float]:
    """A size that grows, or shrinks, by so many binades a step."""
    return lambda layer, step: 2.0 ** (start + binades_a_step * step)


def put(value: float, layer: str, step: int) -> Callable[[Tensor, str, int], Tensor]:
    """One value of a layer is this from a step on."""

    def change(x: Tensor, here: str, now: int) -> Tensor:
        return torch.cat([torch.tensor([value]), x[1:]]) if here == layer and now >= step else x

    return change


def zeroed(layer: str, step: int) -> Callable[[Tensor, str, int], Tensor]:
    return lambda x, here, now: torch.zeros_like(x) if here == layer and now >= step else x


def falling(at: int, binades: int) -> Callable[[int], float]:
    """A scale of 1024 that is halved so many times from a step on."""
    return lambda step: 1024.0 * 2.0 ** -min(max(step - at + 1, 0), binades)


def sawtooth(every: int, at: int) -> Callable[[int], float]:
    return lambda step: 1024.0 if step < at else 1024.0 * (1 + (step // every) % 2)


# A unit-scaled run in FP8: every tensor at size 1, cast as it is.
IN_FP8 = {"activations": ("e4m3", 1.0), "weights": ("e4m3", 1.0), "gradients": ("e5m2", 1.0)}


def eight(**changes: object) -> Story:
    return make_story(**{
        "casts": IN_FP8, "scale": lambda step: None, "gradient_fmt": "bf16", "activation_fmt": "bf16",
        "gradient_std": constant(1.0), "weight_std": constant(1.0), **changes,
    })  # fmt: skip


def noisy(layer: str, size: Size) -> Callable[[str, int], tuple[float, float]]:
    """Errors of one layer of this size against its values, and of the others as BF16 leaves them."""
    return lambda here, step: (0.0, size(here, step) if here == layer else 0.005)


def outliers(layer: str, size: Callable[[int], float]) -> Callable[[Tensor, str, int], Tensor]:
    """One value of a layer that is so much larger than the others."""
    return lambda x, here, step: torch.cat([torch.tensor([4 * size(step)]), x[1:]]) if here == layer else x


def flips(share: float) -> dict[str, float]:
    """The scalars of a router of which so many decisions flip."""
    return {"flips:blocks.1.router": share, "ties:blocks.1.router": share / 4, "margin:blocks.1.router": 0.5 / share}


QUIET, ONE = constant(2.0**-8), constant(1.0)


def fault(name: str, story: Story, rule: str, severity: str, layer: str | None = None, **when: int) -> Fault:
    return Fault(name=name, story=story, rule=rule, severity=severity, layer=layer, **when)


def ended(reason: str, message: str, step: int = 199) -> Event:
    """What the flight recorder writes when the process ends."""
    return Event(step=step, kind="trigger", message=message, details={"reason": reason, "steps": []})


def wired(fact: str, step: int, **details: object) -> Event:
    """A fact of `plimsoll.watch.steps.wiring`."""
    return Event(step=step, kind="wiring", message=fact, details={"fact": fact, "optimizer": "AdamW", **details})


# fmt: off
FAULTS = [
    # -- underflow
    fault("no loss scale", make_story(scale=lambda s: 1.0, gradient_std=constant(2.0**-23)), "underflow-high", "alarm"),
    fault("static scale too low", make_story(scale=lambda s: 4.0, gradient_std=constant(2.0**-25)),
          "underflow-high", "alarm"),
    fault("one layer x 1e-4",
          make_story(gradient_std=of_layer(A, constant(2.0**-34), QUIET)), "underflow-high", "alarm", A),
    fault(
        "one layer shrinks at 100",
        make_story(gradient_std=of_layer(B, since(100, constant(2.0**-35), QUIET), QUIET)),
        "underflow-high", "alarm", B, first=100, last=110,
    ),
    fault(
        "one layer vanishes slowly to nothing",
        make_story(gradient_std=of_layer(A, growing(-0.2, -16), QUIET)),
        "underflow-high", "alarm", A, first=40, last=110,
    ),
    fault("scale falls to 1", make_story(scale=falling(100, 24)), "underflow-high", "alarm", first=110, last=130),
    fault(
        "activations flushed",
        make_story(activation_std=of_layer(A, constant(2.0**-25), constant(1.0))), "underflow-high", "warning", A,
    ),
    fault(
        "underflow rises in all layers",
        make_story(gradient_std=growing(-0.04, -27)), "underflow-rising", "alarm", first=30, last=160,
    ),
    fault(
        "underflow rises in one layer",
        make_story(gradient_std=of_layer(B, growing(-0.05, -26), QUIET)), "underflow-rising", "alarm", B,
        first=30, last=160,
    ),
    fault(
        "underflow rises a little",
        make_story(gradient_std=growing(-0.015, -28)), "underflow-rising", "warning", first=60, last=200,
    ),
    # -- the scale
    fault("scale frozen low", make_story(scale=lambda s: 1.0, gradient_std=constant(2.0**-22)), "scale-low", "alarm"),
    fault(
        "scale frozen low after hard batches",
        make_story(scale=falling(60, 14), gradient_std=constant(2.0**-19)), "scale-low", "alarm", first=65, last=85,
    ),
    fault("scale collapses", make_story(scale=falling(100, 10)), "scale-collapse", "alarm", first=100, last=106),
    fault("scale collapses early", make_story(scale=falling(45, 7)), "scale-collapse", "alarm", first=45, last=51),
    fault("scale below one",
          make_story(scale=lambda s: 2.0 ** (9 - s // 10)), "scale-collapse", "alarm", first=0, last=100),
    fault("scale swings", make_story(scale=sawtooth(2, 0)), "scale-oscillation", "alarm", first=0, last=20),
    fault("scale swings since 80",
          make_story(scale=sawtooth(4, 80)), "scale-oscillation", "warning", first=80, last=120),
    fault(
        "layers span more than FP16",
        make_story(gradient_std=of_layer(A, constant(2.0**-33), of_layer(B, constant(2.0**3), QUIET))),
        "no-single-scale", "alarm", A,
    ),
    fault(
        "layers part at 100",
        make_story(gradient_std=of_layer(A, since(100, constant(2.0**-36), QUIET), constant(2.0**3)),
                   gradient_fmt="bf16"), "no-single-scale", "alarm", A, first=100, last=100,
    ),
    # -- overflow
    fault(
        "attention explodes",
        make_story(activation_std=of_layer(A, growing(0.08), constant(1.0))), "overflow-ahead", "alarm", f"{A}:output",
        first=120, last=180,
    ),
    fault(
        "overflow is ahead",
        make_story(activation_std=of_layer(A, growing(0.05, 3), constant(1.0))), "overflow-ahead", "warning",
        f"{A}:output", first=50, last=195,
    ),
    fault("weights near the top",
          make_story(weight_fmt="fp16", change_weight=put(5e4, B, 50)), "overflow-ahead", "alarm", B,
          first=50, last=50),
    fault(
        "attention grows in BF16",
        make_story(activation_fmt="bf16", activation_std=of_layer(A, growing(0.07, 2), constant(1.0))),
        "activation-growth", "warning", f"{A}:output", first=80, last=199,
    ),
    fault(
        "residual sums grow",
        make_story(activation_fmt="bf16", activation_std=lambda name, s: 2.0 ** (0.045 * s + int(name.split(".")[1]))),
        "activation-growth", "warning", "blocks.5.", first=80, last=199,
    ),
    fault("FP8 activations saturate",
          make_story(activation_fmt="e4m3", activation_std=of_layer(B, constant(2000.0), constant(9.0))),
          "saturated-fp8", "alarm", f"{B}:output"),
    fault(
        "attention scores explode",
        make_story(activation_fmt="bf16", score=of_layer(A, growing(0.03, 3), constant(12.0))),
        "attention-logits", "warning", A, first=130, last=160,
    ),
    fault(
        "outliers grow",
        make_story(activation_fmt="bf16", change_activation=outliers(B, lambda step: 2.0 ** (0.05 * step))),
        "kurtosis-growth", "warning", f"{B}:output", first=60, last=199,
    ),
    # -- errors
    fault("gradients drown in rounding noise", make_story(error=noisy(A, since(60, constant(0.9), constant(0.1)))),
          "error-above-signal", "warning", A, first=60, last=60),
    fault("the error rises toward the gradient", make_story(error=noisy(B, growing(0.011, -3.3))), "error-above-signal",
          "warning", B, first=90, last=199),
    fault("casts cut off toward zero", make_story(error=lambda name, step: (-0.003 if step >= 50 else 0.0, 0.002)),
          "biased-rounding", "warning", first=50, last=50),
    fault("a kernel that truncates", make_story(error=lambda name, step: (-0.03 * (name in LAYERS[4:8]), 0.02)),
          "biased-rounding", "warning"),
    fault("norm weights in one bin of MXFP8", make_story(last_bin=of_layer(A, constant(0.9), constant(0.02))),
          "clustered-block", "info", A),
    fault("routes flip",
          make_story(decisions=lambda step: flips(0.3 if step >= 100 else 0.02)), "decision-flips", "warning",
          "blocks.1.router", first=100, last=100),
    fault("a difference of nearly equal numbers",
          make_story(events=(wired("operation inexact", 7, kind="difference", place="train.py:41", text="a - b",
                                   formats="bf16", share=0.98, since=1, modules=["blocks.1"]),)),
          "operation-inexact", "warning", "blocks.1", first=1),
    # -- casts to FP8
    fault("a cast saturates since 100", eight(activation_std=of_layer(B, since(100, constant(600.0), ONE), ONE)),
          "cast-saturates", "alarm", f"{B}:output", first=100, last=100),
    fault("a loss scale before constant casts", eight(gradient_std=constant(2.0**-3), scale=lambda s: 2.0**20),
          "cast-saturates", "alarm"),
    fault("a cast flushes a layer's gradients",
          eight(gradient_std=of_layer(A, since(60, constant(2.0**-17), ONE), ONE)), "cast-flushes",
          "alarm", f"{A}:output", first=60, last=60),
    fault("weights cast at a scale far too low",
          eight(weight_std=of_layer(B, constant(2.0**-5), ONE)), "codes-unused", "warning", B),
    fault("a delayed scale that never came",
          eight(casts={"activations": ("e4m3", lambda step: 2.0**-8)}), "codes-unused", "warning"),
    fault("activations leave unit scale", eight(activation_std=of_layer(A, growing(0.03), ONE)), "unit-drift",
          "warning", f"{A}:output", first=130, last=150),
    # -- the optimizer
    fault("updates swallowed in BF16",
          make_story(weight_fmt="bf16", unmoved=of_layer(A, constant(0.97), constant(0.1))),
          "updates-swallowed", "alarm", A),
    fault("updates swallowed since 100",
          make_story(weight_fmt="fp16", unmoved=since(100, constant(0.8), constant(0.1))),
          "updates-swallowed", "alarm", first=100, last=100),
    fault("learning rate gone",
          make_story(unmoved=since(150, constant(1.0), constant(0.0))), "updates-swallowed", "info",
          first=150, last=150),
    fault("epsilon lost",
          make_story(moment_fmt="fp16", gradient_std=constant(2.0**-14)), "second-moment-lost", "alarm"),
    fault("second moments of one layer lost",
          make_story(moment_fmt="fp16", gradient_std=of_layer(B, since(60, constant(2.0**-14), ONE), ONE)),
          "second-moment-lost", "alarm", B, first=60, last=60),
    fault("epsilon dominates", make_story(gradient_fmt="fp32", gradient_std=constant(2.0**-30)),
          "epsilon-dominates", "warning"),
    # -- non-finite values
    fault("Inf at one operation", make_story(change_activation=put(INF, A, 100)), "nonfinite", "alarm", f"{A}:output",
          first=100, last=100),
    fault("NaN in one layer's weights", make_story(change_weight=put(NAN, B, 55)),
          "nonfinite", "alarm", B, first=55, last=55),
    fault("loss is NaN", make_story(loss=lambda s: NAN if s >= 77 else 1.0), "nonfinite", "alarm", first=77, last=77),
    fault("NaN gradients without a scaler",
          make_story(scale=lambda s: None, gradient_fmt="fp32", change_gradient=put(NAN, A, 30)), "nonfinite", "alarm",
          A, first=30, last=30),
    fault("overflow on and on",
          make_story(skipped=lambda s: float(40 < s < 90)), "nonfinite", "alarm", first=41, last=41),
    # -- the loss
    fault("loss spikes",
          make_story(loss=lambda s: 30.0 if 90 <= s < 93 else 2.0 + 0.01 * (s % 7)), "loss-spike", "warning",
          first=90, last=90),
    fault("loss diverges", make_story(loss=lambda s: 2.0 + 0.01 * (s % 7) + (s > 120) * 9.0), "loss-spike", "alarm",
          first=121, last=121),
    fault("loss stays up and comes back", make_story(loss=lambda s: 9.0 if 90 <= s < 130 else 2.0 + 0.01 * (s % 7)),
          "loss-spike", "warning", first=90, last=90),
    fault("the loss falls without bound",
          make_story(loss=lambda s: 2.0 + 0.01 * (s % 7) - (s / 20.0) ** 4), "loss-unbounded",
          "warning", first=130, last=140),
    fault("a rate too high at the start",
          make_story(loss=lambda s: 3.6 if s == 0 else 3.3 + 3.0 * 0.95**s,
               update_ratio=lambda name, s: 0.9 if s < 10 else 0.01),
          "rate-too-high", "warning"),
    fault("an update explodes", make_story(update_ratio=lambda name, s: 2.0 ** (-4 if (name, s) == (B, 125) else -10)),
          "spike-forerunner", "warning", B, first=125, last=125),
    fault("a softmax over the batch", make_story(events=(wired("softmax over rows", 0, rows=32),)), "loss-wrong-axis",
          "warning"),
    fault("outputs that meet all targets",
          make_story(events=(wired("pairs", 0, rows=32),)), "loss-wrong-axis", "warning"),
    fault("targets below a ReLU", make_story(events=(wired("out of reach", 0, function="ReLU", low="0", high="inf"),)),
          "targets-out-of-reach", "warning"),
    fault("targets beyond a tanh", make_story(events=(wired("out of reach", 2, function="tanh", low="-1", high="1"),)),
          "targets-out-of-reach", "warning", first=2),
    fault("targets that are not shifted", make_story(events=(wired("not shifted", 0, share=0.04, token=1),)),
          "targets-repeat-inputs", "warning"),
    fault("targets that attention sees", make_story(events=(wired("next seen", 0, share=0.0, token=0),)),
          "targets-repeat-inputs", "warning"),
    fault("targets that are padding", make_story(events=(wired("padding counted", 0, share=0.9375, token=31),)),
          "targets-repeat-inputs", "warning"),
    fault("a mask that shows the padding alone",
          make_story(events=(wired("padding read", 0, token=0, rows=32, hidden=265),)), "tokens-hidden", "warning"),
    fault("batches sorted by class", make_story(events=(wired("one class", 90, batches=8, of=10, classes=7),)),
          "batches-of-one-class", "warning", first=90),
    fault("a loss that stays at chance",
          make_story(events=(wired("classes", 0, classes=10),), loss=lambda s: 2.303 + 0.02 * math.sin(7.3 * s)),
          "loss-at-chance", "warning", last=199),
    fault("a loss that begins far above chance",
          make_story(events=(wired("begins far off", 0, loss=60.0, classes=10),)),
          "loss-at-chance", "warning", last=0),
    # -- layers
    fault("dead ReLU layer", make_story(change_activation=zeroed(A, 80)), "dead-layer", "warning", f"{A}:output",
          first=80, last=80),
    fault("inputs divided twice",
          make_story(change_activation=zeroed(A, 80), input_size=2.0**-8), "inputs-small", "warning",
          f"{A}:output", first=80, last=80),
    fault("a norm of one value", make_story(events=(wired("norm of one value", 0, modules=[A]),)), "norm-of-few-values",
          "warning", f"{A}:output"),
    fault("a batch norm of two values", make_story(events=(wired("norm of two values", 0, modules=[A]),),
                                           change_activation=lambda x, name, s: x.sign() if name == A else x),
          "norm-of-few-values", "warning", f"{A}:output"),
    fault("a batch norm of the last batch", make_story(events=(wired("norm of the last batch", 2, modules=[A]),)),
          "norm-of-few-values", "warning", f"{A}:output", first=2),
    fault("layer cut off", make_story(change_gradient=zeroed(B, 60)), "dead-layer", "warning", B, first=60, last=60),
    fault("outputs that are one number",
          make_story(change_activation=lambda x, name, s: torch.ones_like(x) if name == A and s >= 80 else x),
          "outputs-alike", "warning", f"{A}:output", first=80, last=80),
    fault("gradients vanish in one layer",
          make_story(gradient_fmt="fp32", scale=lambda step: None, gradient_std=of_layer(A, constant(2.0**-40), QUIET),
               update_ratio=of_layer(A, constant(2.0**-30), constant(2.0**-10))),
          "gradients-vanish", "warning", A),
    fault("weights drift",
          make_story(weight_std=of_layer(B, growing(0.03, -5), constant(2.0**-5))), "distribution-drift",
          "warning", B, first=90, last=199),
    fault("activations shrink",
          make_story(activation_fmt="bf16", activation_std=of_layer(A, growing(-0.04), constant(1.0))),
          "distribution-drift", "warning", f"{A}:output", first=60, last=199),
    # -- how it is wired
    fault("a layer in no optimizer", make_story(events=(wired("in no optimizer", 9, parameters=[f"{A}.weight"]),)),
          "untrained-parameters", "warning", A, first=9, last=9),
    fault("layers in a plain list", make_story(events=(wired("in no optimizer", 9, parameters=["layers[0].weight"]),)),
          "untrained-parameters", "warning", "layers[0]", first=9, last=9),
    fault("a rate of NaN", make_story(events=(wired("groups", 100, of=1, groups=[{"rate": "nan", "parameters": []}]),)),
          "optimizer-idle", "alarm", first=100, last=100),
    fault("a rate that ran down",
          make_story(events=(wired("groups", 90, of=1, groups=[{"rate": "tiny", "parameters": []}]),)),
          "optimizer-idle", "warning", first=90, last=90),
    fault("updates undone by an average", make_story(events=(wired("updates undone", 7),)), "optimizer-idle", "warning",
          first=7, last=7),
    fault("gradients never set to zero",
          make_story(events=(wired("carried over", 3),)), "gradients-mishandled", "warning",
          first=3, last=3),
    fault("gradients never unscaled", make_story(events=(wired("not unscaled", 3),)), "gradients-mishandled", "alarm",
          first=3, last=3),
    fault("gradients unscaled among micro-batches", make_story(events=(wired("added after unscaling", 1),)),
          "gradients-mishandled", "alarm", first=1, last=1),
    fault("micro-batches rounded away in BF16",
          make_story(events=(wired("sum rounded", 2, backwards=512, format="bf16"),)),
          "gradients-mishandled", "warning", first=2, last=2),
    fault("weight decay lost in BF16",
          make_story(events=(wired("groups", 0, of=1, groups=[{"decay": 2.0**-10, "parameters": [f"{B}.weight"]}]),)),
          "decay-lost", "warning", B),
    fault("casts that autocast keeps", make_story(events=(wired("stale casts", 1, parameters=[f"{A}.weight"]),),
                                            loss=lambda s: 2.3 + 0.01 * (s % 7)),
          "casts-stale", "alarm", A, first=1, last=1),
    fault("a state cleared in each epoch", make_story(events=(wired("state cleared", 12, steps=4, times=3),)),
          "state-cleared", "warning", first=12, last=12),
    fault("frozen norms in training mode", make_story(events=(wired("frozen norms follow", 30, modules=["norm"]),)),
          "evaluation-mode", "warning", "norm", first=30),
    fault("a cosine past its end",
          make_story(events=(wired("rate rises again", 90, lowest_at=60, rate=0.03, lowest=1e-5, peak=0.1),)),
          "schedule-past-end", "warning", first=60),
    fault("a plateau of an accuracy",
          make_story(events=(wired("plateau misread", 60, mode="min", first=0.31, now=0.82, metrics=6),)),
          "schedule-misread", "warning", first=60),
    fault("a rate times itself",
          make_story(events=(wired("rate squared", 20, base=3e-3, highest=9e-6, steps=20),)), "schedule-misread",
          "warning"),
    fault("a plateau of no numbers",
          make_story(events=(wired("plateau undefined", 60, metrics=4),)), "schedule-misread",
          "warning", first=60),
    fault("a schedule made in each epoch",
          make_story(events=(wired("schedule again", 44, began_at=40, moves=20, before=1e-4, rate=5e-6, length=0),)),
          "schedule-misread", "warning", first=40),
    fault("a decay of AdamW given to Adam",
          make_story(events=(wired("decay added", 0, groups=[{"decay": 0.1, "parameters": [f"{A}.weight"]}]),),
               weight_std=of_layer(A, lambda name, s: 2.0**-5 * (0.07 + 0.93 / (1 + s / 20)), constant(2.0**-5)),
               gradient_std=of_layer(A, constant(2.0**-11), QUIET)),
          "decay-dominates", "warning", A, first=10, last=30),
    fault("an average stuck in BF16",
          make_story(events=(wired("average stuck", 128, parameters=[f"average.{B}.weight"], format="bf16"),)),
          "average-stuck", "warning", f"average.{B}", first=128, last=128),
    fault("a counter stuck in BF16",
          make_story(events=(wired("counter stuck", 150, parameters=["steps_seen"], format="bf16"),)),
          "average-stuck", "warning", "steps_seen", first=150, last=150),
    fault("units that are copies of each other",
          make_story(events=(wired("equal rows", 10, parameters=[f"{A}.weight"]),)),
          "symmetric-weights", "warning", A, first=10, last=10),
    fault("a divergence of probabilities", make_story(events=(wired("no logarithms", 0, function="kl_div"),)),
          "probabilities-as-logits", "warning"),
    fault("a softmax before the cross entropy", make_story(events=(wired("squashed twice", 0, function="softmax"),)),
          "probabilities-as-logits", "warning"),
    fault("gradients cleared between micro-batches", make_story(events=(wired("cleared between", 2, backwards=16),)),
          "gradients-mishandled", "warning", first=2),
    fault("a norm of no gradient", make_story(events=(wired("clipped nothing", 2),)), "gradients-mishandled", "warning",
          first=2),
    fault("clipped at each micro-batch",
          make_story(events=(wired("clipped early", 3),)), "gradients-mishandled", "warning",
          first=3, last=3),
    fault("a loss divided twice",
          make_story(events=(wired("divided twice", 0, by=16),)), "gradients-mishandled", "warning"),
    fault("a part of the loss unscaled", make_story(events=(wired("part unscaled", 0, parameters=["side.weight"]),)),
          "gradients-mishandled", "alarm"),
    fault("second moments in BF16", make_story(events=(wired("moments narrow", 4, format="bf16", decay=0.999),)),
          "kept-narrow", "warning", first=4, last=4),
    fault("weights rounded after each step", make_story(events=(wired("weights rounded", 3, format="bf16", lost=0.9),)),
          "kept-narrow", "warning", first=3, last=3),
    fault("gradients sent in E4M3", make_story(events=(wired("gradients rounded", 3, format="e4m3", lost=0.7),)),
          "kept-narrow", "warning", first=3, last=3),
    fault("moments saved in FP16", make_story(events=(wired("moments flushed", 150, format="fp16", lost=0.5),)),
          "kept-narrow", "warning", first=150, last=150),
    fault("a loss added up in BF16", make_story(events=(wired("loss added up", 0, format="bf16", terms=1536),)),
          "kept-narrow", "warning"),
    fault("indices cast to BF16",
          make_story(events=(wired("indices rounded", 0, format="bf16", parameters=["tokens.weight"]),)),
          "kept-narrow", "warning", "tokens.weight"),
    fault("left in evaluation mode",
          make_story(events=(wired("evaluation mode", 9, whole=True, later=False, norms=["norm"], initial=["norm"]),)),
          "evaluation-mode", "warning", "norm", first=9, last=9),
    fault("in evaluation mode since a validation",
          make_story(events=(wired("evaluation mode", 60, whole=True, later=True, dropouts=["drop"]),)),
          "evaluation-mode", "warning", "drop", first=60, last=60),
    # -- ranks
    fault("a rank with other labels",
          make_story(losses={1: lambda s: 4.0 + 0.1 * (s % 3), 2: SOUND.loss}), "rank-differs",
          "warning", first=0, last=60),
    # -- the end
    fault("an exception ends it", make_story(events=(ended("exception", "KeyError: 'lost'"),)), "run-ended", "warning",
          first=199, last=199),
]
# fmt: on

# What must be no alarm: names and stories.
INNOCENT = {
    "sound": SOUND,
    "sound in unit-scaled FP8": eight(),
    "sound in FP8 by the data": eight(
        casts={
            "activations": ("e4m3", lambda s: 2.0 ** (5 + s % 2)),
            "weights": ("e4m3", 2.0**11),
            "gradients": ("e5m2", lambda s: 2.0**20),
        },
        gradient_std=constant(2.0**-8),
        weight_std=constant(2.0**-5),
    ),
    "gradients of unit-scaled FP8 that shrink": eight(gradient_std=growing(-0.04)),
    "sound in FP32": make_story(gradient_fmt="fp32", activation_fmt="fp32", scale=lambda step: None),
    "sound in BF16": make_story(gradient_fmt="bf16", activation_fmt="bf16", scale=lambda step: None),
    "ReLU zeros": make_story(change_activation=lambda x, layer, step: x.relu()),
    "unused embedding rows": make_story(change_gradient=lambda g, layer, step: g * (torch.arange(len(g)) < 20)),
    "masked attention": make_story(change_activation=put(-INF, A, 0)),
    "scores masked by the format's minimum": make_story(change_activation=put(-65504.0, A, 0)),
    "the scale is searched from 2^24 on": make_story(
        scale=lambda s: 2.0 ** max(24 - s, 10), skipped=lambda s: float(s < 14), gradient_std=constant(2.0**-8)
    ),
    "a back-off in 100 steps": make_story(scale=lambda s: 1024.0 / (1 + (s // 100) % 2)),
    "small gradients in FP32": make_story(
        gradient_fmt="fp32", gradient_std=constant(2.0**-30), scale=lambda step: None
    ),
    "gradients that fall with the loss": make_story(gradient_std=lambda name, s: 2.0**-8 / (1 + s / 20)),
    "one value of noise": make_story(change_gradient=lambda g, name, s: torch.cat([g[:1] * 2.0**-30, g[1:]])),
    "errors of BF16": make_story(error=lambda name, step: (0.0002 * (-1) ** step, 0.005)),
    "errors of E5M2 gradients": make_story(error=lambda name, step: (-0.002, 0.12)),
    "the error of a gradient of next to nothing": make_story(
        gradient_fmt="fp32",
        scale=lambda step: None,
        gradient_std=of_layer(A, constant(2.0**-30), QUIET),
        error=noisy(A, constant(3.0)),
    ),
    "two layers whose weights are rounded one way": make_story(
        error=lambda name, step: (-0.004 * (name in (A, B)), 0.002)
    ),
    "scores that stay": make_story(score=constant(150.0)),
    "scores that settle below": make_story(score=lambda name, step: 60.0 * (1 - 0.97**step)),
    "a sparse layer": make_story(change_activation=outliers(A, lambda step: 100.0)),
    "few routes flip": make_story(decisions=lambda step: flips(0.05)),
    "norm weights that are all one": make_story(
        change_weight=lambda x, name, step: torch.ones_like(x), last_bin=constant(1.0)
    ),
    "fine-tuning with frozen norms": make_story(
        events=(wired("evaluation mode", 9, whole=True, later=False, norms=["norm"], dropouts=["drop"]),)
    ),
    "continued after an exception": make_story(events=(ended("exception", "KeyError: 'lost'", 100),)),
    "a zero-initialised branch": make_story(
        change_activation=lambda x, name, s: x * (s > 5 or name != A),
        change_gradient=lambda g, name, s: g * (s > 5 or name != A),
    ),
}

# What a verdict says of each rule's finding, whatever else it says.
WORDS: Mapping[str, str] = {
    "underflow-high": r"up to \d+ % of the (parameter gradients|activations) of .* have underflowed in FP16",
    "underflow-rising": r"the underflow of parameter gradients of .* has been rising",
    "scale-low": r"the loss scale \(2\^-?\d+\) has been too low .* are lost",
    "scale-collapse": r"the loss scale fell from 2\^\d+ to 2\^-?\d+ at steps?",
    "scale-oscillation": r"the loss scale has swung .* [\d.]+ % of steps",
    "no-single-scale": r"no single loss scale has worked .* needs 2\^19 or more, .* overflows above 2\^10",
    "overflow-ahead": r"came within .* of the format's largest value",
    "activation-growth": r"activations of .* have grown steadily",
    "attention-logits": r"attention scores of .* have grown steadily",
    "kurtosis-growth": r"outliers among the activations of .* have outgrown the rest",
    "error-above-signal": r"gradients of .* have been mostly rounding error|the rounding error of .* has grown",
    "biased-rounding": r"rounding has pulled the .* toward zero",
    "clustered-block": r"\d+ % of the weights of .* have shared the last bin",
    "operation-inexact": r"train\.py:41.* computes a difference that is rounding",
    "decision-flips": r"rounding has changed up to \d+ % of the decisions of",
    "saturated-fp8": r"\d+ % of the activations .* FP8's top binade",
    "cast-saturates": r"up to [\d.]+ % of the .* have been beyond E\dM\d",
    "cast-flushes": r"up to [\d.]+ % of the .* have been below E\dM\d",
    "codes-unused": r"up to [\d.]+ % of the .* had fewer digits than E\dM\d",
    "unit-drift": r"have been at 2\^-?\d+, out of 2\^-\d+ to 2\^\d+",
    "updates-swallowed": r"steps leave up to \d+ % of the weights of .* unchanged",
    "second-moment-lost": r"FP16 has lost up to \d+ % of Adam's second moments",
    "epsilon-dominates": r"Adam has divided by its epsilon",
    "nonfinite": r"NaN or Inf|gradients overflowed at \d+ steps",
    "loss-spike": r"the loss (spiked|rose)",
    "rate-too-high": r"the update at step 0 moved the weights by \d+ % of their size",
    "loss-unbounded": r"the loss falls without bound, from .* to -",
    "loss-wrong-axis": r"a softmax over the 32 rows of a batch|32 outputs with 32 targets of another shape",
    "targets-out-of-reach": r"targets out of reach of a (ReLU|tanh) before it",
    "targets-repeat-inputs": r"the model's own input tokens, at the same places|94 % of the targets are token 31"
    r"|the targets are the tokens at the next places, and attention sees them",
    "tokens-hidden": r"a mask lets attention read token 0 alone",
    "batches-of-one-class": r"8 of 10 sampled batches had targets of one class",
    "loss-at-chance": r"has stayed at 2\.3\d*, which guessing costs|was 60 at step 0, where guessing costs 2\.3",
    "spike-forerunner": r"an update of .* was \d+ times its usual size",
    "dead-layer": r"all (outputs|parameter gradients) of .* have been zero",
    "inputs-small": r"the model's inputs are at most 0\.00391, and all outputs of .* have been zero",
    "norm-of-few-values": r"the norm .* sees single values|the batch norm .* makes 1 and -1 of them"
    r"|the batch norm .* keeps the statistics of the last batch alone",
    "outputs-alike": r"all outputs of .* have been about 1 since step 80",
    "gradients-vanish": r"gradients vanish in .*: .* against .*",
    "distribution-drift": r"have (grown|shrunk) (\d+ times \(2\^\d+\)|2\^\d+ times)",
    "untrained-parameters": r"parameters of .* are in no optimizer",
    "optimizer-idle": r"the learning rate of AdamW (is NaN since step 100|has fallen to nearly 0 since step 90)"
    r"|the updates of AdamW are undone after each step since step 7",
    "gradients-mishandled": r"gradients are (never (set to zero|unscaled)|unscaled before all of a step|rounded away"
    r"|divided by the number of micro-batches twice|scaled in part|clipped before all micro-batches"
    r"|cleared before each micro-batch|not clipped: the norm is of no gradient)",
    "kept-narrow": r"(second moments|weights|gradients|indices|loss) .*(BF16|FP16|E4M3)\)?, seen",
    "evaluation-mode": r"trained in evaluation mode|normalise nothing"
    r"|frozen batch norms .* have followed the data since",
    "decay-lost": r"rounding has undone the weight decay of",
    "casts-stale": r"autocast keeps its old casts of .*, and no forward sees an update",
    "state-cleared": r"the state of .* is cleared every 4 steps or so",
    "decay-dominates": r"the weight decay of 0\.1 that AdamW adds to the gradients has rivalled them in",
    "schedule-misread": r"the schedule of AdamW waits for the metric to fall, and it has risen .*\(0\.31 to 0\.82\)"
    r"|the schedule has multiplied the rate of AdamW by itself since step 0: it was 9"
    r"|the schedule of AdamW has lowered the rate since step 60 after 4 metrics of NaN or Inf"
    r"|the schedule of AdamW was made again and starts over since step 40: its rate goes from 1\.00e-4 back to 5",
    "schedule-past-end": r"the rate of AdamW had come to its end and rises again since step 60",
    "average-stuck": r"rounding to BF16 (keeps the average .* where it was|has stopped the count in)",
    "symmetric-weights": r"the units of .* are copies of each other",
    "probabilities-as-logits": r"the loss applies a softmax to the results of a softmax"
    r"|kl_div takes log probabilities, and gets probabilities or scores",
    "rank-differs": r"the loss of rank 1 has stayed away",
    "run-ended": r"an exception ended the training at step \d+, KeyError",
}
