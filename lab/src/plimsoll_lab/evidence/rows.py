"""Rows of the evidence base: earlier reports, and what in Plimsoll shows them.

An experiment says itself which rows it belongs to (`Experiment.source`). What no experiment shows is an interface or a
rule; tests stand for it, by their files in the repository. `gpu` is what of a row only a GPU can show.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row: `id`, sentence, test files that show it, and what needs a GPU."""

    id: str
    says: str
    tests: tuple[str, ...] = ()
    gpu: str = ""


_ROWS = (
    Row(
        id="T1", says="A hook collects summaries of weights, gradients, losses, inputs, outputs and optimizer state.",
        tests=("watch/test_taps.py", "watch/test_parameters.py", "runs/sinks/test_tensorboard.py"),
    ),
    Row(
        id="T2", says="FP16 holds 5.96e-8 to 65,504; BF16 has FP32's range; TF32 is 19 bits.",
        tests=("formats/test_catalogue.py", "emulate/test_sixteen_bits.py"),
    ),
    Row(
        id="T3", says="The stock scaler sees overflow only: after hard batches its scale is low, gradients are zero.",
        tests=("scaling/test_gradscaler.py", "diagnosis/test_faults.py"),
    ),
    Row(id="T4", says="CLIP, ten hard batches at step 300: FP16's gradients become zero, BF16 goes on."),
    Row(id="T5", says="Underflow over time: CLIP in FP16 5 to 20 % of layers, rising; a detector, BF16 below 1 %."),
    Row(
        id="T6", says="The early rule: below 1 % and flat, stay; 5 to 10 % and rising by step 1,000, change to BF16.",
        tests=("diagnosis/test_rules.py",),
    ),
    Row(
        id="T7", says="A higher initial scale or a shorter interval does not help; a scale per layer or parameter may.",
        tests=("scaling/test_layers_exact.py",),
    ),
    Row(
        id="T8", says="Adam in FP16: epsilon 1e-8 is zero, second moments vanish, an update explodes after zeros.",
        tests=("precision/test_remedies_adam.py",),
    ),
    Row(
        id="T9", says="Deep T5: values add up past 65,504 to Inf; clamping them has a negligible effect.",
        tests=("precision/test_remedies_clamp.py",),
    ),
    Row(
        id="T10", says="BF16 is one changed argument, TF32 two lines; TF32's rate is half of FP16's, above FP32's.",
        tests=("precision/test_prepare_tf32.py",), gpu="the rates",
    ),
    Row(
        id="U1", says="Every tensor begins at unit scale; FP16 and FP8 train with no loss scale.",
        tests=("unit/nn/test_training.py", "unit/convert/test_training.py"),
    ),
    Row(
        id="U2", says="A factor for each operation, by formula or measured; shared off cut edges; weighted additions.",
        tests=("unit/test_formulas.py", "unit/analysis/test_rules.py"),
    ),
    Row(
        id="U3", says="From scaled(x, alpha, beta): projection, GELU, LayerNorm, a feed-forward network.",
        tests=("unit/test_scaled.py", "unit/functional/test_scales.py", "unit/nn/test_modules.py"),
    ),
    Row(
        id="U4", says="FP8: operands of products are cast, E4 forward and E5 backward; nothing else changes.",
        tests=("fp8/test_linear.py", "fp8/test_product.py"), gpu="the speed of FP8 products",
    ),
    Row(id="U5", says="Factors are fixed and scales drift: the headroom suffices; 0.2 % more operations."),
    Row(id="U6", says="2,092 character models, and BERT: FP16 fails alone; unit scaling is as good as FP32."),
    Row(
        id="U7", says="Its rivals: static and automatic loss scales, and scales per tensor at run time.",
        tests=("scaling/test_spectral.py", "fp8/test_scales.py"), gpu="what scales per tensor cost",
    ),
    Row(
        id="A1", says="Five changed lines: autocast and a scaler; which operations run low, and which stay high.",
        tests=("emulate/test_autocast.py", "emulate/test_lists.py"),
    ),
    Row(
        id="A2", says="The scaler has state, which belongs in the checkpoint; underflow it does not see.",
        tests=("scaling/test_state.py", "precision/test_prepare_checkpoint.py"),
    ),
    Row(
        id="A3", says="Several GPUs; some 5 % of updates lie below 2^-24; binary cross-entropy takes logits.",
        tests=("scaling/distributed/test_ranks.py", "emulate/test_autocast.py", "diagnosis/test_swallowed.py"),
    ),
    Row(
        id="A4", says="Three networks, time and memory, with losses that agree: tabular, UNet, BERT-base.",
        gpu="times and device memory",
    ),
    Row(id="N1", says="Three techniques: FP32 accumulation, loss scaling, FP32 master weights."),
    Row(
        id="N2", says="The iteration by hand: FP16 copy, scaled loss, unscaled gradients, FP32 update, copy back.",
        tests=("precision/test_by_hand.py",),
    ),
    Row(id="N3", says="In an SSD detector 66.8 % of activation gradients are zero; a scale of 8 is enough."),
    Row(id="N4", says="A large LSTM language model diverges without loss scaling, and lies on FP32's curve with it."),
    Row(
        id="N5", says="The scale: a constant, by statistics below 65,504, or searched for; clip after unscaling.",
        tests=("scaling/test_rule.py", "scaling/test_spectral_rule.py", "precision/test_prepare.py"),
    ),
    Row(
        id="N6", says="Losses are computed in FP32; inference in FP16 takes less memory and time.",
        tests=("emulate/test_lists.py", "precision/test_levels.py"), gpu="the time of inference",
    ),
    Row(id="X1", says="FP64, FP32 and FP16: fields, limits, rounding.", tests=("formats/test_oracles.py",)),
    Row(
        id="X2", says="Master weights cost memory; activations take several times the static memory: the total halves.",
        tests=("precision/test_compact.py",),
    ),
    Row(id="X3", says="In one network 68 % of activation gradients are zero, 4 % lie in 2^-32 to 2^-20."),
    Row(
        id="X4", says="The dynamic scale begins high, halves on overflow, grows every 2,000 clean steps, ends higher.",
        tests=("scaling/test_rule.py", "scaling/test_gradscaler.py", "lab/test_rows.py"),
    ),
    Row(
        id="X5", says="Levels O0 to O3; the lists of operations are a user's to change.",
        tests=("precision/test_levels.py", "precision/test_policy.py"),
    ),
    Row(
        id="X6", says="Gradients of half the width halve communication.", tests=("precision/test_communication.py",),
        gpu="the time that it saves",
    ),
    Row(id="X7", says="Accuracy in mixed precision equals FP32's; the loss scale's effect on one training."),
    Row(
        id="X8", says="The best precision may change over a run: a schedule of precisions.",
        tests=("precision/test_schedule.py",),
    ),
    Row(
        id="E1", says="BF16 flash attention: where scores tie, P V rounds one way; that adds up in the weights.",
    ),
    Row(id="E2", says="MX: the weights of a norm that lie close end in one bin, and bias the gradients of all layers."),
    Row(id="E3", says="FP4 training is less effective where the gradient is below sqrt(3) times its rounding noise."),
)  # fmt: skip

ROWS = {row.id: row for row in _ROWS}
