"""The kinds of deviations, each with its meaning and a remedy; the worst first."""

from collections.abc import Mapping
from dataclasses import dataclass

from plimsoll.receipts.rows import Deviation


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviationKind:
    """A kind of deviation."""

    name: str
    meaning: str
    advice: str


_ALL = (
    DeviationKind(
        name="level", meaning="the run was trained at another level",
        advice="Declare the level that it was trained at, or train it again.",
    ),
    DeviationKind(
        name="accumulate", meaning="products or sums are added up in fewer bits than FP32",
        advice="Leave accumulation in FP32: switch reduced-precision accumulation off.",
    ),
    DeviationKind(
        name="masters", meaning="16-bit weights are updated without wider masters",
        advice="Wrap the optimizer in plimsoll.MasterWeights, or train with plimsoll.prepare.",
    ),
    DeviationKind(
        name="update", meaning="16-bit weights are updated plainly, and not as the level says",
        advice="Train with plimsoll.prepare, which makes the optimizer of the level.",
    ),
    DeviationKind(
        name="optimizer-state", meaning="an optimizer's state has another format",
        advice="Make the optimizer from FP32 parameters, or give its state the declared dtype.",
    ),
    DeviationKind(
        name="loss", meaning="the loss is computed in 16 bits",
        advice="Cast the model's output with .float() before the loss.",
    ),
    DeviationKind(
        name="loss-scale", meaning="the loss is not scaled, so that small gradients become zero",
        advice="Use a loss scaler: plimsoll.scaling.DynamicScaler, or plimsoll.prepare.",
    ),
    DeviationKind(
        name="gradient-reduction", meaning="gradients are added up across ranks in another format",
        advice="Remove the compressing hook, or set reduce_dtype=torch.float32 in MixedPrecisionPolicy.",
    ),
    DeviationKind(
        name="product-narrow", meaning="a product's operands have fewer bits than declared",
        advice="Remove the cast of its operands, or of its weight.",
    ),
    DeviationKind(
        name="product-format", meaning="a product's operands have another 16-bit format than declared",
        advice="Use one 16-bit dtype: that of autocast, of casts in the script and of the weights.",
    ),
    DeviationKind(
        name="tf32", meaning="FP32 operands are rounded to TF32 or BF16 by the device",
        advice='Set fp32_precision = "ieee" (torch.backends.cuda.matmul, torch.backends.cudnn.conv).',
    ),
    DeviationKind(
        name="softmax", meaning="a softmax runs in 16 bits",
        advice="Cast its input with .float(), or leave it to autocast: remove the cast before it.",
    ),
    DeviationKind(
        name="normalization", meaning="a normalization runs in 16 bits",
        advice="Keep the module in FP32, and give it FP32 values.",
    ),
    DeviationKind(
        name="reduction", meaning="a sum or mean runs in 16 bits",
        advice="Reduce with dtype=torch.float32, or remove the cast before it.",
    ),
    DeviationKind(
        name="operation", meaning="an operation runs in 16 bits that is declared to run in FP32",
        advice="Remove the cast of its input, or put the operation on the policy's low list.",
    ),
    DeviationKind(
        name="weights", meaning="parameters have another format than declared",
        advice="Cast the module's parameters before the optimizer is made.",
    ),
    DeviationKind(
        name="buffers", meaning="a buffer has another format than declared",
        advice="Keep the buffer in its module's format; module.to(dtype) casts buffers too.",
    ),
    DeviationKind(
        name="double-rounding", meaning="values are rounded to one 16-bit format and then to another",
        advice="Cast once, from the wider format.",
    ),
    DeviationKind(
        name="round-trip", meaning="values are rounded to 16 bits and then computed with in FP32",
        advice="Remove the cast down, or compute in 16 bits behind it.",
    ),
    DeviationKind(
        name="compiled-cast", meaning="compiled code has removed a cast down and up again, so that nothing is rounded",
        advice="Set torch._inductor.config.emulate_precision_casts = True.",
    ),
    DeviationKind(
        name="fp8-missing", meaning="a layer that is declared to multiply in FP8 does not",
        advice="Convert the layer with plimsoll.fp8.convert, or use plimsoll.prepare.",
    ),
    DeviationKind(
        name="autocast-disabled", meaning="a region switches autocast off, and products in it run in FP32",
        advice="Remove autocast(enabled=False), or declare the module in a policy.",
    ),
    DeviationKind(
        name="custom-function", meaning="the backward of an autograd.Function runs outside of autocast",
        advice="Decorate its forward with torch.amp.custom_fwd and its backward with torch.amp.custom_bwd.",
    ),
    DeviationKind(
        name="upcast", meaning="a product's 16-bit operands are cast up, so that it runs in FP32",
        advice="Remove the cast up of its operands.",
    ),
    DeviationKind(
        name="product-wide", meaning="a product runs in more bits than declared",
        advice="Run it under autocast, or cast its operands; or declare the module in a policy or plan.",
    ),
    DeviationKind(
        name="operation-wide", meaning="an operation that a policy has on its low list runs in FP32",
        advice="Run it under Plimsoll's lists: plimsoll.prepare(policy=...).",
    ),
    DeviationKind(
        name="promotion", meaning="16-bit values are promoted to FP32 by an operand that is FP32",
        advice="Cast the FP32 operand (a buffer, a mask, a constant) to the dtype of the others.",
    ),
    DeviationKind(
        name="fp64", meaning="an operation runs in FP64",
        advice="Cast its FP64 operand to FP32; NumPy's numbers are FP64.",
    ),
    DeviationKind(
        name="fallback", meaning="code runs eagerly, since its compilation failed",
        advice="Repair what the compiler refuses; torch._dynamo.config.suppress_errors hides it.",
    ),
)  # fmt: skip
KINDS: Mapping[str, DeviationKind] = {kind.name: kind for kind in _ALL}
ORDER = {kind.name: place for place, kind in enumerate(_ALL)}


def deviation(kind: str, module: str | None, expected: str, actual: str) -> Deviation:
    """Return a deviation of a kind that no operation is to blame for."""
    return Deviation(
        kind=kind, module=module, source_line=None, operation="", expected=expected, actual=actual,
        advice=KINDS[kind].advice,
    )  # fmt: skip
