"""Exponents of a layer scaler: the recent gradients of each unit, and the two rules.

Exponents here are whole ones, the loss scale's included: when that changes, the layers' stay what they are.
"""

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Literal, cast

from torch import Tensor, nn

from plimsoll.errors import ArgumentError, StateError
from plimsoll.formats import Format
from plimsoll.scaling.layerwise.gradient_meter import Place
from plimsoll.scaling.layerwise.scaled_modules import Layers
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
    """The binade of the largest finite value; None without nonzero ones."""
    largest = max((s.absmax for s in spectra if s.nonzero), default=0.0)
    return math.frexp(largest)[1] - 1 if largest else None


def by_spectra(
    tops: Sequence[int | None], start: int, present: Sequence[int], *, fmt: Format, margin: int, slack: int
) -> list[int]:
    """The highest exponents that leave `margin` binades above each unit's largest value, of binade ``tops[i]``.

    Up to `slack` binades lower will do, for less work: first the neighbour's exponent, as between equal ones nothing is
    done; then the present one. A unit of which nothing is known (all was flushed, say) takes its neighbour's, from
    which the next step sees further.
    """
    chosen: list[int] = []
    neighbour = start
    for top, now in zip(tops, present, strict=True):
        if top is not None:
            target = clamped(fmt.max_exponent - margin - top)
            will_do = (e for e in (neighbour, now) if target - slack <= e <= target)
            neighbour = next(will_do, target)
        chosen.append(neighbour)
    return chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """Input of the published rule for one unit: output gradient, weight, and number of products."""

    gradient: Spectrum | None
    weight: Spectrum | None  # None where the unit has no matrix
    fan: int = 1  # products added up in each value of the input's gradient


def by_moments(units: Sequence[Moments], start: int, *, fmt: Format) -> list[int]:
    """The published rule: each unit multiplies what comes to it by a power of two from 1 to 16, 1,024 in all.

    Gradient and weight are taken for independent, their product's sum over `fan` for normal with half of its terms zero
    (ReLU). The factor is the least that leaves a share of 0.001 of that distribution below the format's smallest value,
    and not so large that `fan` times the largest product would exceed its largest.
    """
    chosen: list[int] = []
    present = start
    for unit in units:
        room = TOTAL_BOUND / 2.0 ** (present - start)
        alpha = min(_alpha(unit, 2.0**present, fmt), room, LAYER_BOUND)
        # Below 1 only to avoid an overflow; the published code floors the logarithm there too.
        present = clamped(present + math.floor(math.log2(alpha)))
        chosen.append(present)
    return chosen


def _alpha(unit: Moments, carried: float, fmt: Format) -> float:
    gradient, weight = unit.gradient, unit.weight
    if gradient is None or weight is None or not gradient.nonzero or not weight.nonzero:
        return 1.0
    variance = (gradient.std**2 + gradient.mean**2) * (weight.std**2 + weight.mean**2)
    deviation = math.sqrt(0.5 * unit.fan * variance) * carried
    largest = gradient.absmax * weight.absmax * unit.fan * carried
    rescues = fmt.smallest_subnormal / (_QUANTILE * deviation) if deviation else 1.0
    return min(max(rescues, 1.0), fmt.max / largest)


def clamped(exponent: int) -> int:
    """The nearest exponent that a unit may have."""
    return min(max(exponent, LOWEST), HIGHEST)


RuleName = Literal["spectra", "zhao"]
_JUMP = 2  # a change by more binades than this asks to look again in the next step


class LayerExponents:
    """The exponents of all units, from what their gradients held in the last few samples."""

    def __init__(
        self, layers: Layers, *, rule: RuleName, fmt: Format, margin: int, slack: int, history: int, start: int
    ) -> None:
        self.layers, self.rule, self.fmt = layers, rule, fmt
        self.margin, self.slack = margin, slack
        self.whole = [start] * len(layers.names)
        self.tops: list[deque[int]] = [deque(maxlen=history) for _ in layers.names]
        self.seen: list[Spectrum | None] = [None] * len(layers.names)  # true gradients of the latest sample
        self._outputs: list[Spectrum | None] = [None] * len(layers.names)

    def sample(self, spectra: Sequence[Mapping[Place, Spectrum]]) -> None:
        """Takes what a sampled step without overflow has measured."""
        for unit in self.layers.from_the_loss():
            shift = -self.whole[unit]
            found = spectra[unit]
            top = top_of(found.values())
            if top is not None:
                self.tops[unit].append(top + shift)
            self.seen[unit] = sum(found.values(), Spectrum.empty()).scaled(shift)
            self._outputs[unit] = found["outputs"].scaled(shift)

    def overflowed(self, units: set[int]) -> None:
        """Notes that these units' gradients have reached the format's end, as one sample that will be forgotten too."""
        for unit in units:
            self.tops[unit].append(self.fmt.max_exponent + 1 - self.whole[unit])

    def forget(self, names: Iterable[str]) -> None:
        """Drops what is remembered of these units; raises `ArgumentError` for a name that none has."""
        wanted = list(names)
        strange = sorted(set(wanted) - set(self.layers.names))
        if strange:
            raise ArgumentError(
                f"look_again: expected modules that have a scale; got {', '.join(strange[:4])}. "
                f"There are {', '.join(self.layers.names[:6])}."
            )
        for name in wanted:
            self.tops[self.layers.names.index(name)].clear()

    def choose(self, start: int) -> bool:
        """Sets the exponents anew, from the loss scale's; whether one has changed so much that more may be seen now."""
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
        """Plain values, by the units' names."""
        names = self.layers.names
        return {
            "exponents": dict(zip(names, self.whole, strict=True)),
            "tops": {name: list(tops) for name, tops in zip(names, self.tops, strict=True)},
            "order": [names[unit] for unit in self.layers.from_the_loss()],
            "outputs": {name: None if s is None else s.to_dict() for name, s in zip(names, self._outputs, strict=True)},
        }

    def check(self, saved: dict[str, Any] | None) -> None:
        """Raises `StateError` for the state of a model with other units."""
        names = set(self.layers.names)
        theirs: set[str] = names if saved is None else set(saved["exponents"])
        differing = sorted(theirs ^ names)
        if differing:
            more = " and more" if len(differing) > 4 else ""
            raise StateError(
                f"load_state_dict: expected the layer scales of a model with the same modules; got a state that "
                f"differs in {', '.join(differing[:4])}{more}. Nothing was changed. Load it into a LayerScaler of the "
                "model that it was saved with."
            )

    def load(self, saved: dict[str, Any]) -> None:
        """Takes what `save` gave for a model with the same units."""
        names = self.layers.names
        self.whole = [int(saved["exponents"][name]) for name in names]
        self.tops = [deque(saved["tops"][name], maxlen=t.maxlen) for name, t in zip(names, self.tops, strict=True)]
        self._outputs = [None if s is None else Spectrum.from_dict(s) for s in (saved["outputs"][n] for n in names)]
        self.layers.set_order([names.index(name) for name in saved["order"]])


def _matrix(module: nn.Module) -> Tensor | None:
    """The weight that the input's gradient is multiplied by, if it is one with rows and columns."""
    weight = cast("Any", getattr(module, "weight", None))
    return weight if isinstance(weight, Tensor) and weight.ndim >= 2 and not isinstance(module, nn.Embedding) else None
