"""Exponents of a layer scaler: recent gradients of each unit, and two rules.

Exponents here include the loss scale's. So they do not change with the loss scale.
"""

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Literal, cast

from torch import Tensor, nn

from plimsoll.errors import StateError
from plimsoll.formats import Format
from plimsoll.scaling.layerwise.scaled_modules import Layers, Place
from plimsoll.spectrum import Spectrum, measure

# Zhao, Liang, Wen, Chu, Ding, Zhou, Anandkumar, "Adaptive Loss Scaling for Mixed Precision Training", arXiv 1910.12385,
# and the authors' code: the share that may underflow, and the bounds of one layer's factor and of all factors together.
UNDERFLOW_SHARE = 1e-3
LAYER_BOUND = 16
TOTAL_BOUND = 1024

# |x| of a normal distribution with deviation 1 is below it with that probability.
_QUANTILE = NormalDist().inv_cdf((1 + UNDERFLOW_SHARE) / 2)

# Whole exponents stay within these, so that every ratio of two is a float32 number.
LOWEST, HIGHEST = -24, 100


def top_of(spectra: Iterable[Spectrum]) -> int | None:
    """Return the binade of the largest finite value, or None if all are zero."""
    largest = max((s.absmax for s in spectra if s.nonzero), default=0.0)
    return math.frexp(largest)[1] - 1 if largest else None


def by_spectra(
    tops: Sequence[int | None], start: int, present: Sequence[int], *, fmt: Format, margin: int, slack: int
) -> list[int]:
    """Return the highest exponents with `margin` binades above the largest values.

    `tops` has the binade of each unit's largest gradient, from the loss on, or None. `start` is the exponent of the
    loss scale. The present exponents stay if they are lower than possible by at most `slack` binades.
    """
    chosen: list[int] = []
    neighbour = start
    for top, now in zip(tops, present, strict=True):
        if top is not None:
            target = clamped(fmt.max_exponent - margin - top)
            # Up to `slack` binades less are accepted to save work: first the neighbour's exponent, because equal
            # exponents need no shift, then the present one. A unit without data (all of its gradients underflowed, for
            # example) takes its neighbour's exponent, at which the next step measures more.
            accepted = (e for e in (neighbour, now) if target - slack <= e <= target)
            neighbour = next(accepted, target)
        chosen.append(neighbour)
    return chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """Input of the published rule for one unit."""

    gradient: Spectrum | None
    weight: Spectrum | None  # None if the unit has no matrix
    fan: int = 1  # number of products in each value of the input's gradient


def by_moments(units: Sequence[Moments], start: int, *, fmt: Format) -> list[int]:
    """Return the exponents of the published rule.

    Its factors are from 1 to 16 per unit, and at most 1,024 in all. The rule takes gradient and weight as independent,
    and the sum of their `fan` products as normal with half of the terms zero (ReLU). The factor is the smallest that
    leaves a share of 0.001 of that distribution below the format's smallest value. It is reduced if `fan` times the
    largest product would exceed the largest value.
    """
    chosen: list[int] = []
    present = start
    for unit in units:
        room = TOTAL_BOUND / 2.0 ** (present - start)
        alpha = min(_alpha(unit, 2.0**present, fmt), room, LAYER_BOUND)
        # Below 1 only to avoid an overflow. The published code floors the logarithm there too.
        present = clamped(present + math.floor(math.log2(alpha)))
        chosen.append(present)
    return chosen


def _alpha(unit: Moments, scale: float, fmt: Format) -> float:
    gradient, weight = unit.gradient, unit.weight
    if gradient is None or weight is None or not gradient.nonzero or not weight.nonzero:
        return 1.0
    variance = (gradient.std**2 + gradient.mean**2) * (weight.std**2 + weight.mean**2)
    deviation = math.sqrt(0.5 * unit.fan * variance) * scale
    largest = gradient.absmax * weight.absmax * unit.fan * scale
    rescues = fmt.smallest_subnormal / (_QUANTILE * deviation) if deviation else 1.0
    return min(max(rescues, 1.0), fmt.max / largest)


def clamped(exponent: int) -> int:
    """Return the nearest exponent that a unit may have."""
    return min(max(exponent, LOWEST), HIGHEST)


RuleName = Literal["spectra", "zhao"]
_JUMP = 2  # a change by more binades than this needs a measurement in the next step


class LayerExponents:
    """Exponents of all units, from the gradients of the last samples."""

    def __init__(
        self, layers: Layers, *, rule: RuleName, fmt: Format, margin: int, slack: int, history: int, start: int
    ) -> None:
        self.layers, self.rule, self.fmt = layers, rule, fmt
        self.margin, self.slack = margin, slack
        self.whole = [start] * len(layers.names)
        self.tops: list[deque[int]] = [deque(maxlen=history) for _ in layers.names]
        self.latest: list[Spectrum | None] = [None] * len(layers.names)  # true gradients of the latest sample
        self._outputs: list[Spectrum | None] = [None] * len(layers.names)

    def sample(self, spectra: Sequence[Mapping[Place, Spectrum]]) -> None:
        """Add the spectra of a sampled step without overflow."""
        for unit in self.layers.from_the_loss():
            shift = -self.whole[unit]
            by_place = spectra[unit]
            top = top_of(by_place.values())
            if top is not None:
                self.tops[unit].append(top + shift)
            self.latest[unit] = sum(by_place.values(), Spectrum.empty()).scaled(shift)
            self._outputs[unit] = by_place["outputs"].scaled(shift)

    def overflowed(self, units: set[int]) -> None:
        """Add a sample in which these units' gradients reach the format's end."""
        for unit in units:
            self.tops[unit].append(self.fmt.max_exponent + 1 - self.whole[unit])

    def forget(self, names: Iterable[str]) -> None:
        """Drop the samples of these units, or raise an error for an unknown name."""
        wanted = list(names)
        self.layers.check_names("look_again", wanted)
        for name in wanted:
            self.tops[self.layers.names.index(name)].clear()

    def choose(self, start: int) -> bool:
        """Set all exponents. Return whether one changed so much that a sample is needed."""
        order = self.layers.from_the_loss()
        chosen = self._by_rule(order, start)
        jumped = any(abs(new - self.whole[unit]) > _JUMP for unit, new in zip(order, chosen, strict=True))
        for unit, new in zip(order, chosen, strict=True):
            self.whole[unit] = new
        return jumped

    def _by_rule(self, order: list[int], start: int) -> list[int]:
        if self.rule == "zhao":
            return by_moments([self._moments(unit) for unit in order], start, fmt=self.fmt)
        tops = [max(self.tops[unit], default=None) for unit in order]
        present = [self.whole[unit] for unit in order]
        return by_spectra(tops, start, present, fmt=self.fmt, margin=self.margin, slack=self.slack)

    def _moments(self, unit: int) -> Moments:
        weight = _matrix(self.layers.modules[unit])
        if weight is None:
            return Moments(gradient=None, weight=None)
        fan = weight.shape[0] * math.prod(weight.shape[2:])
        return Moments(gradient=self._outputs[unit], weight=measure(weight.detach()), fan=fan)

    def save(self) -> dict[str, Any]:
        """Return the state as plain values, by the units' names."""
        names = self.layers.names
        return {
            "exponents": dict(zip(names, self.whole, strict=True)),
            "tops": {name: list(tops) for name, tops in zip(names, self.tops, strict=True)},
            "order": [names[unit] for unit in self.layers.from_the_loss()],
            "outputs": {name: None if s is None else s.to_dict() for name, s in zip(names, self._outputs, strict=True)},
        }

    def check(self, saved: dict[str, Any]) -> None:
        """Raise `StateError` for the state of a model with other units."""
        differing = sorted(set(saved["exponents"]) ^ set(self.layers.names))
        if differing:
            more = " and more" if len(differing) > 4 else ""
            raise StateError(
                f"load_state_dict: expected the layer scales of a model with the same modules; got a state that "
                f"differs in {', '.join(differing[:4])}{more}. Nothing was changed. Load it into a LayerScaler of the "
                "model that it was saved with."
            )

    def load(self, saved: dict[str, Any]) -> None:
        """Load the result of `save` for a model with the same units."""
        names = self.layers.names
        self.whole = [int(saved["exponents"][name]) for name in names]
        self.tops = [
            deque(map(int, saved["tops"][name]), maxlen=t.maxlen) for name, t in zip(names, self.tops, strict=True)
        ]
        self._outputs = [None if s is None else Spectrum.from_dict(s) for s in (saved["outputs"][n] for n in names)]
        self.layers.set_order([names.index(name) for name in saved["order"]])


def _matrix(module: nn.Module) -> Tensor | None:
    """Return the weight that multiplies the input's gradient, if it is a matrix."""
    weight = cast("Any", getattr(module, "weight", None))
    return weight if isinstance(weight, Tensor) and weight.ndim >= 2 and not isinstance(module, nn.Embedding) else None
