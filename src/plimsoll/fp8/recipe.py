"""Settings of a layer in FP8: scaling of its tensors, constants of unit scaling."""

from dataclasses import dataclass
from typing import Literal, cast, get_args

from plimsoll import checks
from plimsoll.errors import ArgumentError
from plimsoll.unit.formulas import Factors

Scaling = Literal["unit", "tensor"]
_NAMES: tuple[str, ...] = get_args(Scaling)
_MOST_MARGIN = 32

NO_FACTORS = Factors(output=1.0, inputs=(1.0,), weight=1.0)  # for a layer that is not unit-scaled


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Recipe for the scales of a layer's tensors."""

    scaling: Scaling  # "unit" for the scale 1, "tensor" for a power of two from the largest magnitude
    history: int = 0  # with "tensor", 0 for the magnitude of the tensor itself, N for that of the last N steps
    margin: int = 0  # with "tensor", binades that the scale leaves above the largest magnitude
    factors: Factors = NO_FACTORS  # constants of unit scaling, all 1 for a layer that is not unit-scaled
    # With "tensor", constant powers of two for activations, weights and gradients, as a plan has them. None: from the
    # data.
    scales: tuple[float, float, float] | None = None

    @property
    def follows_data(self) -> bool:
        """True if scales come from the tensors."""
        return self.scaling == "tensor" and self.scales is None


def checked(operation: str, scaling: object, history: object, margin: object) -> Scaling:
    """Return the scaling after a check of all three settings."""
    remedy = "Use 'unit' for a unit-scaled model, 'tensor' for any other."
    checks.one_of(operation, "scaling", scaling, _NAMES, remedy=remedy)
    checks.integer(operation, "history", history, low=0, remedy="Use a number of steps, such as 16, or 0 for none.")
    checks.integer(operation, "margin", margin, low=0, high=_MOST_MARGIN, remedy="Use 0 or 1: E4M3 has 18 binades.")
    if scaling == "unit" and (history or margin):
        raise ArgumentError(
            f"{operation}: expected history and margin with scaling='tensor' only; got history={history}, "
            f"margin={margin} with 'unit', whose scales are constants. Leave them out."
        )
    return cast("Scaling", scaling)
