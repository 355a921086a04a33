"""Settings of a layer in FP8: how its tensors are scaled, and the constants of unit scaling."""

from dataclasses import dataclass
from typing import Literal, cast, get_args

from plimsoll.errors import ArgumentError
from plimsoll.unit.factors.formulas import Factors

Scaling = Literal["unit", "tensor"]
_NAMES: tuple[str, ...] = get_args(Scaling)
_MOST_MARGIN = 32

NO_FACTORS = Factors(output=1.0, inputs=(1.0,), weight=1.0)  # of a layer that is not unit-scaled


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Recipe for the scales of a layer's tensors.

    - `scaling`: "unit": as they are, times 1; "tensor": times a power of two from their largest magnitude.
    - `history`: with "tensor": 0 takes the magnitude of the tensor itself, N that of the last N steps.
    - `margin`: with "tensor": binades that the scale leaves above the largest magnitude.
    - `factors`: the constants of unit scaling; all 1 for a layer that is not unit-scaled.
    - `scales`: with "tensor": constants for activations, weights and gradients, in place of what the data say; powers
      of two, as a plan has them.
    """

    scaling: Scaling
    history: int = 0
    margin: int = 0
    factors: Factors = NO_FACTORS
    scales: tuple[float, float, float] | None = None

    @property
    def follows_data(self) -> bool:
        """Whether scales come from the tensors."""
        return self.scaling == "tensor" and self.scales is None


def checked(operation: str, scaling: object, history: object, margin: object) -> Scaling:
    """Return the scaling, all three checked; `ArgumentError` for what does not fit together."""
    if scaling not in _NAMES:
        raise ArgumentError(
            f"{operation}: expected scaling to be one of {', '.join(_NAMES)}; got {scaling!r}. Take 'unit' for a "
            "unit-scaled model, 'tensor' for any other."
        )
    _check_count(operation, "history", history, "steps")
    _check_count(operation, "margin", margin, "binades")
    if isinstance(margin, int) and margin > _MOST_MARGIN:
        raise ArgumentError(
            f"{operation}: expected a margin of at most {_MOST_MARGIN} binades; got {margin}. E4M3 has 18 in all."
        )
    if scaling == "unit" and (history or margin):
        raise ArgumentError(
            f"{operation}: expected history and margin with scaling='tensor' only; got history={history}, "
            f"margin={margin} with 'unit', whose scales are constants. Leave them out."
        )
    return cast("Scaling", scaling)


def _check_count(operation: str, name: str, value: object, unit: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ArgumentError(
            f"{operation}: expected {name} to be a number of {unit}, 0 or more; got {value!r}. Give an int."
        )
