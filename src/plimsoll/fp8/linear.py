"""`Linear`, with three products in FP8, and `cached_weights`, one cast a step."""

import contextlib
import math
from collections.abc import Generator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from plimsoll import checks
from plimsoll.emulate.operations.products import Products
from plimsoll.emulate.recipe import recipe as emulated
from plimsoll.errors import ArgumentError, StateError, UnsupportedTensorError
from plimsoll.formats import E4M3
from plimsoll.fp8 import casting
from plimsoll.fp8.casting import (
    DTYPES,
    FORMATS,
    ROLES,
    Codes,
    Counting,
    Role,
    absmax_of,
    check_counting,
    scale_for,
    to_codes,
)
from plimsoll.fp8.products import Constants, Fp8Product, Marks, is_autocasting
from plimsoll.fp8.recipe import NO_FACTORS, Recipe, Scaling, checked
from plimsoll.kernels.operators.checks import refuse_transforms
from plimsoll.kernels.operators.fp8_cast import INPUTS, keep, padded
from plimsoll.unit import formulas
from plimsoll.unit.formulas import Constraint, Factors, root
from plimsoll.unit.functional.ideal_factors import resolve_factors
from plimsoll.unit.functional.products import linear
from plimsoll.unit.optim.parameter_kinds import tag
from plimsoll.unit.scaled_multiply import multiplied
from plimsoll.watch.thread_casts import active_casts

_TRANSIENT = {"fp8_counting": None, "fp8_cached": None, "fp8_caching": False}  # in no copy and no pickle


class Linear(nn.Linear):
    """`torch.nn.Linear` with products in FP8.

    Weights and activations are cast to E4M3, gradients to E5M2.

    Each tensor is cast once, to nearest even, and saturates: an overflow or an Inf becomes the largest value of the
    format. NaN stays NaN, in outputs and gradients. Products are summed in float32 and rounded once to the dtype of the
    input, or to autocast's. Gradients have the dtypes of their tensors. NVIDIA GPUs from compute capability 8.9 on
    multiply by their FP8 units. Other devices multiply the same codes in float32.

    Sizes are padded with zeros to multiples of 16. float64 is refused. Parameters and their names are
    those of `torch.nn.Linear`. The layer compiles without graph breaks, never waits for the device, works under
    activation checkpointing, DDP and FSDP2, and can be differentiated once.

    *Scaling.* "unit": all scales are 1, as suits tensors of unit scale. The factors of unit scaling are multiplied into
    the scales of the products, at no cost. "tensor": each tensor is multiplied by the largest power of two at which its
    largest magnitude fits, and the product by the inverse. With `history=0` that magnitude is computed first, so the
    tensor is read twice. With N it is the largest of the last N steps, and larger values saturate. A step is a forward
    with its backward. The first step computes its own magnitudes. A compiled layer computes them in every step, unless
    a step ran uncompiled or a state was loaded, with the same bits. Each rank has its own scales, which its products
    undo. Before histories are saved once for all ranks, call `fp8.agree`.

    Args:
        in_features: Size of the last dimension of inputs.
        out_features: Size of the last dimension of outputs.
        bias: Whether to add a bias. Default: True.
        device: Device of the parameters. Default: torch's.
        dtype: Dtype of the parameters. Default: torch's.
        scaling: "unit" (default) or "tensor".
        constraint: With unit scaling, the rule that makes one factor of those of output and input gradient, as in
            `unit.functional.linear`. Default: "gmean".
        factors: Factors in place of the ideal ones and the constraint, with either scaling. Default: the ideal ones.
        history: With "tensor", number of steps whose largest magnitude sets the scale. Default: 0, the tensor itself.
        margin: With "tensor", binades to leave free above the magnitude, 0 to 32. Default: 0.

    Raises:
        ArgumentError: An argument is out of range, or does not fit the scaling.

    >>> layer = Linear(64, 32)
    >>> layer(torch.randn(8, 64)).shape, layer.casts()["gradients"]
    (torch.Size([8, 32]), ('e5m2', 1.0))
    """

    fp8_recipe: Recipe
    fp8_first: bool  # no step so far
    fp8_counting: Counting | None = None
    fp8_caching: bool = False
    fp8_cached: tuple[Codes, int] | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        scaling: Scaling = "unit",
        constraint: Constraint | None = "gmean",
        factors: Factors | None = None,
        history: int = 0,
        margin: int = 0,
    ) -> None:
        for name, size in (("in_features", in_features), ("out_features", out_features)):
            checks.integer("fp8.Linear", name, size, low=0, remedy="Give sizes as for torch.nn.Linear.")
        scaling = checked("fp8.Linear", scaling, history, margin)
        if scaling == "unit" or factors is not None:
            factors = resolve_factors("fp8.Linear", constraint, factors, formulas.linear(in_features, out_features))
        recipe = Recipe(scaling=scaling, history=history, margin=margin, factors=factors or NO_FACTORS)
        super().__init__(in_features, out_features, bias, device, dtype)
        self.take_recipe(recipe)
        if scaling == "unit":
            tag(self, weight="weight", bias="bias")
        self.reset_parameters()

    def take_recipe(self, recipe: Recipe) -> None:
        """Use `recipe` from now on, with empty buffers."""
        self.fp8_recipe, self.fp8_first = recipe, True
        device = self.weight.device
        if recipe.follows_data:
            self.register_buffer("fp8_scales", torch.ones(2, device=device), persistent=False)
            self.register_buffer("fp8_gradient_scale", torch.ones((), device=device), persistent=False)
        if recipe.history:
            casting.add_buffers(self, recipe.history, device)

    def casts(self) -> dict[Role, tuple[str, float | Tensor]]:
        """Return the format's name and the scale of each role's cast.

        The scale multiplies values before the cast. It is a float if it is constant, otherwise a 0-d tensor with the
        last one used.
        """
        scales: tuple[float | Tensor, ...] = self.fp8_recipe.scales or (1.0, 1.0, 1.0)
        if self.fp8_recipe.follows_data:
            forward = self.get_buffer("fp8_scales")
            scales = (forward[0], forward[1], self.get_buffer("fp8_gradient_scale"))
        return {role: (FORMATS[role].name, scale) for role, scale in zip(ROLES, scales, strict=True)}

    def count_into(self, forward: Tensor | None, backward: Tensor | None, rows: Mapping[Role, int]) -> None:
        """Count the values of later casts as one spectrum per role.

        Casts count the values that they read, before the scale. Each cast empties its row first, so a row has the
        tensor of the last call, as with a tap of `watch`, and a forward that is repeated in the backward counts the
        same. A weight from `fp8.cached_weights` is not cast, so its row stays. Copies and pickles do not count. A
        compiled layer is compiled again.

        Args:
            forward: Bank for activations and weights, a `kernels.new_bank` on the layer's device.
            backward: Bank for gradients. It must be another one: compiled code loses counts if both directions share
                a bank.
            rows: Row of each counted role. An empty mapping ends the counting.

        Raises:
            ArgumentError: A role is unknown, or a bank lacks its row.
        """
        self.fp8_counting = check_counting(forward, backward, rows, self.weight.device)

    def reset_parameters(self) -> None:
        """Reinitialize the parameters, and empty the buffers of scaling.

        With unit scaling the weight is normal with unit variance and the bias zero. Otherwise both are as in
        torch.nn.Linear. Call this after `to_empty`.
        """
        recipe: Recipe | None = getattr(self, "fp8_recipe", None)
        if recipe is None:
            return  # torch's constructor calls this before the recipe is set
        self.take_recipe(recipe)
        if recipe.scaling != "unit":
            super().reset_parameters()
            return
        nn.init.normal_(self.weight)
        if cast("Tensor | None", self.bias) is not None:
            nn.init.zeros_(self.bias)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (torch's name)
        """Return the product of the input, (..., in_features), and the weight.

        It has the dtype of the input, or autocast's.
        """
        if not torch.compiler.is_compiling():
            if active_casts.reference is not None:
                return linear(input, self.weight, self.bias, factors=self.fp8_recipe.factors)
            acting = [active_casts.acts(role, FORMATS[role].name) for role in ROLES]
            if not all(acting):
                return self._forward_in_part(input)
            refuse_transforms(
                "fp8.Linear", "Take gradients with backward() or torch.autograd.grad, or leave it in BF16."
            )
        dtype = _result_dtype(input, self.in_features, self.weight)
        rows = -1 if self.in_features else math.prod(input.shape[:-1])  # of nothing, -1 might be any number
        x = input.reshape(rows, self.in_features)
        recipe, training = self.fp8_recipe, torch.is_grad_enabled()
        first = self.fp8_first
        with torch.no_grad():
            if recipe.history and training:
                casting.begin_forward(self)
                if not torch.compiler.is_compiling():  # no side effect where a compiler checkpoints
                    self.fp8_first = False
            weight = self._weight_codes(training, training and x.requires_grad, first)
            scale = self._scale(0, x, training, first)
            marks = self._marks()
        factors = recipe.factors
        of_weight = root(x.shape[0]) if factors.weight is None else factors.weight
        constants = Constants(
            factors.output,
            factors.inputs[0],
            of_weight / factors.moment,
            dtype,
            training,
            margin=recipe.margin,
            first=first,
            bias=of_weight,
            gradient=1.0 if recipe.scales is None else recipe.scales[2],
        )
        bank, row = self._row("activations")
        y = cast("Tensor", Fp8Product.apply(x, self.weight, self.bias, weight, scale, bank, row, marks, constants))
        return y.reshape(*input.shape[:-1], self.out_features)

    def _forward_in_part(self, input: Tensor) -> Tensor:  # noqa: A002
        """Return `forward` with only the casts that act (`active_casts`), in float32."""
        dtype, factors = _result_dtype(input, self.in_features, self.weight), self.fp8_recipe.factors
        # The last scales used: those of this step's weights and activations, and of the last backward's gradients.
        scales = {role: float(scale) for role, (_, scale) in self.casts().items()}
        casts = emulated("e4m3", "e5m2", "fp32", 1, {"scale": scales, "saturate": True})
        assert casts is not None
        of_weight = root(input.numel() // max(self.in_features, 1)) if factors.weight is None else factors.weight
        x = multiplied(input.float(), 1.0, factors.inputs[0])
        weight = multiplied(self.weight.float(), 1.0, of_weight / factors.moment)
        y = Products(casts).matmul(x, weight.mT, ("activations", "weights"))
        if cast("Tensor | None", self.bias) is not None:
            y = y + multiplied(self.bias.float(), 1.0, of_weight)
        return multiplied(y, factors.output, 1.0).to(dtype)

    def extra_repr(self) -> str:
        """Return torch's text, the scaling, and the padded sizes."""
        recipe = self.fp8_recipe
        parts = [super().extra_repr(), f"scaling={recipe.scaling!r}"]
        if recipe.scaling == "tensor":
            parts += [f"history={recipe.history}", f"margin={recipe.margin}"]
        if self.is_padded:
            parts.append(f"padded to {padded(self.in_features)} by {padded(self.out_features)}")
        return ", ".join(parts)

    @property
    def is_padded(self) -> bool:
        """True if a size is not divisible by 16, so that tensors are padded."""
        return bool(self.in_features % 16 or self.out_features % 16)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without banks of counts and cached weights."""
        return {name: value for name, value in self.__dict__.items() if name not in _TRANSIENT}

    def _load_from_state_dict(self, *arguments: Any, **named: Any) -> None:
        super()._load_from_state_dict(*arguments, **named)
        if self.fp8_recipe.history and bool(self.get_buffer("fp8_history").any()):
            self.fp8_first = False

    def _scale(self, index: int, x: Tensor, training: bool, first: bool) -> Tensor | None:
        """Return the scale of activations (0) or weights (1)."""
        recipe = self.fp8_recipe
        if recipe.scales is not None:
            return torch.full((), recipe.scales[index], dtype=torch.float32, device=x.device)
        if recipe.scaling == "unit":
            return None
        if recipe.history:
            scale = keep(casting.forward_scale(self, index, x, training, first, recipe.margin))
        else:
            scale = scale_for(absmax_of(x), E4M3, recipe.margin)
        self.get_buffer("fp8_scales")[index].copy_(scale)
        return scale

    def _weight_codes(self, training: bool, both: bool, first: bool) -> Codes:
        """Return the codes of the weight, from the cache if it has these layouts."""
        weight = self.weight.detach()
        if self.fp8_cached is not None and not (both and self.fp8_cached[0].columns is None):
            check_unchanged(self.weight, self.fp8_cached[1])
            return self.fp8_cached[0]
        scale = self._scale(1, weight, training, first)
        codes = to_codes(weight, DTYPES["weights"], scale, "both" if both else "rows", *self._row("weights"))
        if self.fp8_caching:
            self.fp8_cached = codes, version_of(self.weight)
        return codes

    def _row(self, role: Role) -> tuple[Tensor | None, int]:
        return (None, 0) if self.fp8_counting is None else self.fp8_counting.row(role)

    def _marks(self) -> Marks:
        bank, row = self._row("gradients")
        recipe = self.fp8_recipe
        if not recipe.follows_data:
            return Marks(bank=bank, row=row)
        marks = Marks(self.get_buffer("fp8_gradient_scale"), bank=bank, row=row)
        if not recipe.history:
            return marks
        history, absmax, step = (self.get_buffer(name) for name in casting.BACKWARD)
        forward_step = keep(self.get_buffer("fp8_step"))
        return marks._replace(history=history, absmax=absmax, step=step, forward_step=forward_step)


def _result_dtype(x: Tensor, in_features: int, weight: Tensor) -> torch.dtype:
    """Return the dtype of the product, or raise if FP8 cannot multiply the tensors."""
    if x.dim() == 0 or x.shape[-1] != in_features:
        raise ArgumentError(
            f"fp8.Linear: expected an input of (..., {in_features}); got shape {tuple(x.shape)}. Check the layer "
            "before."
        )
    for name, tensor in (("input", x), ("weight", weight)):
        if hasattr(tensor, "placements"):
            raise UnsupportedTensorError(
                f"fp8.Linear: expected plain tensors; got a DTensor as {name}. Under FSDP2 call the sharded module "
                "itself. Exclude tensor parallel layers from FP8 (exclude=...)."
            )
        if tensor.dtype not in INPUTS:
            raise UnsupportedTensorError(
                f"fp8.Linear: expected float32, bfloat16 or float16; got {name} of {tensor.dtype}, shape "
                f"{tuple(tensor.shape)}. Use .float()."
            )
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if is_autocasting(kind) else x.dtype
    return dtype if dtype in INPUTS else x.dtype


@contextlib.contextmanager
def cached_weights(model: nn.Module) -> Generator[None]:
    """Cast the weight of each `fp8.Linear` of the model once inside the block.

    For gradient accumulation: run the micro-batches inside the block and the step of the optimizer after it. Results
    have the same bits. The cache has the codes in both layouts, two bytes per weight (under FSDP2, of the whole
    weight). A compiled model has a cache too, and is compiled once more for it.

    Args:
        model: The model.

    Raises:
        StateError: The block is within another, or a weight is changed in place inside it. Changes through `.data`, or
            in compiled code, are not seen.

    >>> from plimsoll.fp8 import Linear
    >>> layer = Linear(32, 16)
    >>> with cached_weights(layer):
    ...     for batch in torch.randn(4, 8, 32):
    ...         layer(batch).square().mean().backward()
    """
    layers = [cast("Any", module) for module in model.modules() if hasattr(module, "fp8_recipe")]
    if any(layer.fp8_caching for layer in layers):
        raise StateError(
            "fp8.cached_weights: expected no block around this one; got layers whose weights are cached already. Leave "
            "the inner one out."
        )
    for layer in layers:
        layer.fp8_caching = True
    try:
        yield
    finally:
        for layer in layers:
            layer.fp8_caching, layer.fp8_cached = False, None


def version_of(weight: Tensor) -> int:
    """Return the weight's count of in-place changes, or -1 if it has none."""
    # Compiled code and inference mode have no version counter.
    return -1 if torch.compiler.is_compiling() or weight.is_inference() else weight._version  # noqa: SLF001


def check_unchanged(weight: Tensor, version: int) -> None:
    """Raise `StateError` if the weight was changed since this version."""
    now = version_of(weight)
    if now != version and -1 not in (now, version):
        raise StateError(
            "fp8.cached_weights: expected weights that do not change inside the block; got one that was changed in "
            "place since it was cast. End the block before the optimizer's step."
        )
