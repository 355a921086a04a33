"""`Linear`: a linear layer whose three products run in FP8."""

from typing import Any, Self

import torch
from torch import Tensor, nn

from plimsoll.errors import ArgumentError, UnsupportedTensorError
from plimsoll.formats import E4M3
from plimsoll.fp8._cast import cast_codes
from plimsoll.fp8._function import Constants, Fp8Product, Held
from plimsoll.fp8._recipe import Recipe, Scaling, checked
from plimsoll.fp8._scales import DTYPES, FORMATS, ROLES, Role, absmax_of, scale_for
from plimsoll.unit import _formulas
from plimsoll.unit._constraints import Constraint
from plimsoll.unit._formulas import Factors, root
from plimsoll.unit.functional._products import resolved

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Linear(nn.Linear):
    """`torch.nn.Linear` in FP8: weights and activations in E4M3, gradients in E5M2."""

    fp8_recipe: Recipe
    fp8_scales: Tensor
    fp8_seen: Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        scaling: Scaling = "unit",
        constraint: Constraint | None = "gmean",
        factors: Factors | None = None,
        history: int = 0,
        margin: int = 0,
    ) -> None:
        scaling = checked("fp8.Linear", scaling, history, margin)
        unit = scaling == "unit" or factors is not None
        ideal = _formulas.linear(in_features, out_features)
        own = {"factors": resolved("fp8.Linear", constraint, factors, ideal)} if unit else {}
        recipe = Recipe(scaling=scaling, history=history, margin=margin, **own)
        super().__init__(in_features, out_features, bias, device, dtype)
        self.take_recipe(recipe)
        if unit:
            self.reset_parameters()

    def take_recipe(self, recipe: Recipe) -> Self:
        """Makes this layer, of whatever class of linear layers it was, one that follows `recipe`; returns it."""
        self.fp8_recipe = recipe
        device = self.weight.device
        if recipe.scaling == "tensor":
            self.register_buffer("fp8_scales", torch.ones(2, device=device), persistent=False)
            self.register_buffer("fp8_seen", torch.tensor([0.0, 1.0], device=device), persistent=False)
        return self

    def casts(self) -> dict[Role, tuple[str, float | Tensor]]:
        """What is cast, by role: the format's name, and the scale that values are multiplied by before.

        The scale is a float where it is constant; else a 0-d tensor that follows the data: it holds the last one used.
        """
        scales: tuple[float | Tensor, ...] = (1.0, 1.0, 1.0)
        if self.fp8_recipe.scaling == "tensor":
            scales = (self.fp8_scales[0], self.fp8_scales[1], self.fp8_seen[1])
        return {role: (FORMATS[role].name, scale) for role, scale in zip(ROLES, scales, strict=True)}

    def reset_parameters(self) -> None:
        """Draws parameters anew: as torch.nn.Linear does, or of unit variance and zero bias for unit scaling."""
        recipe: Recipe | None = getattr(self, "fp8_recipe", None)
        if recipe is None or recipe.scaling != "unit":
            super().reset_parameters()
            return
        nn.init.normal_(self.weight)
        if self.bias is not None:  # pyright: ignore[reportUnnecessaryComparison]
            nn.init.zeros_(self.bias)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (torch's name)
        """The product, in the input's dtype, or autocast's."""
        x = self._matrix(input)
        recipe = self.fp8_recipe
        keep = torch.is_grad_enabled()
        with torch.no_grad():
            weight = self._cast_weight(recipe, keep and x.requires_grad)
            scale = self._scale_of(0, x, recipe)
        factors = recipe.factors
        of_weight = root(x.shape[0]) if factors.weight is None else factors.weight
        constants = Constants(
            factors.output, factors.inputs[0], of_weight, of_weight, recipe.scaling == "tensor", recipe.margin
        )
        seen = self.fp8_seen if recipe.scaling == "tensor" else None
        found: Any = Fp8Product.apply(
            x, self.weight, self.bias, weight.rows, weight.columns, weight.scale, scale, None, seen, constants
        )
        return found.reshape(*input.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        """The sizes, and how tensors are scaled."""
        recipe = self.fp8_recipe
        more = f", history={recipe.history}, margin={recipe.margin}" if recipe.scaling == "tensor" else ""
        return f"{super().extra_repr()}, scaling={recipe.scaling!r}{more}"

    def _matrix(self, x: Tensor) -> Tensor:
        if x.dim() == 0 or x.shape[-1] != self.in_features:
            raise ArgumentError(
                f"fp8.Linear: expected an input of (..., {self.in_features}); got {tuple(x.shape)}. Check the layer "
                "before."
            )
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        if dtype not in _DTYPES:
            raise UnsupportedTensorError(
                f"fp8.Linear: expected an input of float32, bfloat16 or float16; got {x.dtype}, shape "
                f"{tuple(x.shape)}. Use x.float(): FP8 holds no more."
            )
        return x.to(dtype).reshape(-1, self.in_features)

    def _cast_weight(self, recipe: Recipe, both: bool) -> Held:
        scale = self._scale_of(1, self.weight, recipe)
        rows, columns = cast_codes(self.weight.detach(), DTYPES["weights"], scale, "both" if both else "rows")
        return Held(rows, columns, scale)

    def _scale_of(self, index: int, x: Tensor, recipe: Recipe) -> Tensor | None:
        if recipe.scaling == "unit":
            return None
        scale = scale_for(absmax_of(x.detach()), E4M3, recipe.margin)
        self.fp8_scales[index].copy_(scale)
        return scale
