"""Fit of a format to a module, and its losses there, by recorded values.

The cast values depend on the format. FP16, BF16 and wider are torch's own dtypes: operands and results of a product are
rounded to them. So are gradients, which all carry only the loss scale. Narrower formats are cast at the operands of
products. These are the weights and the module's input in the forward, and the gradient of its output in the backward.
Each has its own power of two, or blocks.

The gradient that a product returns to its input is not judged. The recorded gradient of that tensor is a sum over all
users of it, for instance of a residual stream.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from plimsoll.diagnosis.planning.modules import Module
from plimsoll.diagnosis.planning.series_windows import Collection, LossCounts, Window
from plimsoll.diagnosis.view import View
from plimsoll.formats import ROLES, BlockFormat, Format, Role, catalogue, get
from plimsoll.tensor_collections import BACKWARD, COLLECTIONS, FORWARD
from plimsoll.text import percent

NATIVE = tuple(fmt.name for fmt in catalogue.NATIVE)  # rounded as whole operations, without scales of casts
_WIDE = tuple(fmt.name for fmt in catalogue.WIDE)  # with FP32's range, which what is not recorded will not leave either
LOWEST, HIGHEST = -126, 127  # shifts of casts: float32's normal powers of two
_WORDS = {c.role: c.label for c in COLLECTIONS if c.role is not None}
_UNKNOWN = 300  # a shift above which it is no number of binades that is missing, but knowledge

Parts = list[tuple[Collection, tuple[str, ...]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Result for one module in one pair of formats."""

    why: str | None = None  # why it cannot compute in them; None: it can
    unknown: bool = False  # whether the reason is missing data
    shifts: dict[Role, int] = field(default_factory=dict["Role", int])  # the scale of each role, as a shift
    # Headroom that each scale leaves, in powers of two.
    spare: dict[Role, int] = field(default_factory=dict["Role", int])
    gradients: Window = field(default=Window())  # usable shifts of the gradients


class Judge:
    """Judge of a run's modules. `margin`: binades that scales leave; None: 1, and more for sparse samples."""

    def __init__(self, view: View, *, tolerance: float, margin: int | None) -> None:
        self.tolerance, self.margin, self.follows = tolerance, 1 if margin is None else margin, margin is None
        self.view = view
        self.trained = len(view.scalar("loss")[0])
        self.collections = {name: Collection.of(view, name, tolerance) for name in (*FORWARD, *BACKWARD)}

    def verdict(self, module: Module, forward: str, backward: str) -> Verdict:
        """Return whether the module can compute in these formats.

        For gradients in FP16 the result has their window, since they need a loss scale.
        """
        if module.opaque and forward not in _WIDE:
            return Verdict(why="its internal products (queries, keys, hidden states) are not recorded", unknown=True)
        missing = next((role for role in ROLES if not self.series(module, role, forward, backward)), None)
        if missing is not None:
            return Verdict(why=f"its {_WORDS[missing]} were not recorded", unknown=True)
        shifts: dict[Role, int] = {}
        left: dict[Role, int] = {}
        gradients = Window()
        for role in ROLES:
            fmt = get(backward if role == "gradients" else forward)
            parts = self.series(module, role, forward, backward)
            unknown = False
            if isinstance(fmt, BlockFormat):
                why = self._why_not_in_blocks(parts, fmt, role)
            else:
                window = self._window(parts, fmt)
                unknown = window.low > _UNKNOWN
                if fmt.name == "fp16" and role == "gradients":
                    gradients, why = window, self.why_none(window, fmt, role, LOWEST, HIGHEST)
                elif fmt.name in NATIVE:
                    why = self.why_none(window, fmt, role, 0, 0)
                else:
                    why = self.why_none(window, fmt, role, LOWEST, HIGHEST)
                    shifts[role] = self.best(window, self._wanted(parts))
                    left[role] = window.high - shifts[role]
            if why is not None:
                return Verdict(why=why, unknown=unknown)
        return Verdict(shifts=shifts, spare=left, gradients=gradients)

    def why_not_at(self, module: Module, role: Role, formats: tuple[str, str], shift: int) -> str | None:
        """Return why a role does not work in its format at this shift. None if it does."""
        fmt = get(formats[1] if role == "gradients" else formats[0])
        parts = self.series(module, role, *formats)
        if not parts:
            return f"its {_WORDS[role]} were not recorded"
        if isinstance(fmt, BlockFormat):
            return self._why_not_in_blocks(parts, fmt, role)
        window, name = self._window(parts, fmt), fmt.name.upper()
        if shift > window.high:
            return f"{_WORDS[role]} overflow {name} at 2^{shift} (step {window.high_step:,} allows 2^{window.high})"
        if shift >= window.low:
            return None
        if window.low > _UNKNOWN:
            return f"{_WORDS[role]}: zeros of the narrow format that they were recorded in may be losses"
        needs = f"step {window.low_step:,} needs 2^{window.low}"
        return f"{percent(self.tolerance)} or more of its {_WORDS[role]} may be lost in {name} at 2^{shift} ({needs})"

    def best(self, window: Window, spare: int) -> int:
        """Return the highest shift with so much headroom, or with little loss; 0 for tensors of zeros."""
        if not window.bounded:
            return 0
        return min(max(window.high - spare, min(window.low, window.high - self.margin), LOWEST), HIGHEST)

    def why_none(self, window: Window, fmt: Format, role: Role, lowest: int, highest: int) -> str | None:
        """Return why no shift from `lowest` to `highest` works; None if one does."""
        room = min(window.high - self.margin, highest)
        if max(window.low, lowest) <= room:
            return None
        name, words = fmt.name.upper(), _WORDS[role]
        if window.low > _UNKNOWN:
            step = f"step {window.low_step:,}"
            return f"{words}: the format that they were recorded in may itself have lost too many of them ({step})"
        spare = f" with {self.margin} binade{'s' * (self.margin > 1)} to spare" if self.margin else ""
        if lowest == highest:
            need = (window.low, window.low_step) if window.low > lowest else (room, window.high_step)
            return f"{words} do not fit {name} unscaled{spare}: 2^{need[0]} would be needed at step {need[1]:,}"
        return (
            f"{words}: no scale works in {name} at all steps{spare}: at least 2^{window.low} at step "
            f"{window.low_step:,}, at most 2^{room} at step {window.high_step:,}"
        )

    def series(self, module: Module, role: Role, forward: str, backward: str) -> Parts:
        """Return the recorded series to judge a role by. Empty if a needed one is missing."""
        if role == "weights":
            return self._recorded("weights", module.weight)
        if role == "activations":
            inputs = self._recorded("activations", module.inputs)
            return inputs and inputs + (self._recorded("activations", module.outputs) if forward in NATIVE else [])
        outputs = self._recorded("activation_gradients", module.outputs)
        if not outputs or backward not in NATIVE:
            return outputs
        own = self._recorded("gradients", module.weight)
        return own and outputs + own

    def loss_counts(self, module: Module, role: Role, formats: tuple[str, str], shift: int) -> LossCounts | None:
        """Return a role's losses in its format over the run. None if it was not recorded."""
        parts = self.series(module, role, *formats)
        fmt = get(formats[1] if role == "gradients" else formats[0])
        found = [collection.loss_counts(names, fmt, shift) for collection, names in parts]
        return sum(found, LossCounts()) if found else None

    def values(self, module: Module) -> tuple[float, float]:
        """Return how many values a step casts in the forward and in the backward."""
        weights, activations, gradients = (self.count(module, role) for role in ROLES)
        return weights + activations, gradients

    def count(self, module: Module, role: Role) -> float:
        """Return how many values of a role a step casts."""
        return sum(collection.count(names) for collection, names in self.series(module, role, "e4m3", "e5m2"))

    def _recorded(self, collection: str, names: Sequence[str]) -> Parts:
        found = self.collections[collection]
        there = () if found is None else tuple(name for name in names if found.has(name))
        return [(found, there)] if found is not None and there else []

    def _window(self, parts: Parts, fmt: Format) -> Window:
        result = Window()
        for collection, names in parts:
            result = result & collection.window(names, fmt)
        return result

    def _wanted(self, parts: Parts) -> int:
        """Return the headroom to leave: the margin, or for None what the steps between samples need."""
        needed = max(collection.spare(names, self.trained) for collection, names in parts) if self.follows else 0.0
        return max(self.margin, math.ceil(needed))

    def _why_not_in_blocks(self, parts: Parts, fmt: BlockFormat, role: Role) -> str | None:
        worst, step, recorded = max(collection.worst_of_blocks(names, fmt) for collection, names in parts)
        if worst < self.tolerance:
            return None
        why = f"{_WORDS[role]}: up to {percent(worst)} may be lost in {fmt.name.upper()} (step {step:,})"
        if recorded:
            return why
        return f"{why}; block records are missing, so this follows from the range of whole tensors"


def outward(low: float, estimate: float, high: float) -> tuple[float, float, float]:
    """Return an interval in three digits that contains the exact one."""
    lower, upper = _rounded(low, math.floor), min(_rounded(high, math.ceil), 1.0)
    return lower, min(max(_rounded(estimate, round), lower), upper), upper


def _rounded(value: float, direction: Callable[[float], int]) -> float:
    if not value > 0:
        return 0.0
    unit = math.floor(math.log10(value)) - 2
    return float(f"{direction(value / 10.0**unit)}e{unit}")
