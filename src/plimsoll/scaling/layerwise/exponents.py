"""What a layer scaler remembers of each unit, and the exponents that follow from it.

Exponents here are whole ones, the loss scale's included: when that changes, the layers' stay what they are.
"""

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, cast

from torch import Tensor, nn

from plimsoll.errors import ArgumentError, StateError
from plimsoll.formats import Format
from plimsoll.scaling.layerwise import rule as rules
from plimsoll.scaling.layerwise.gradient_meter import Place
from plimsoll.scaling.layerwise.scaled_modules import Layers
from plimsoll.spectrum import Spectrum, measure

RuleName = Literal["spectra", "zhao"]
_JUMP = 2  # a change by more binades than this asks to look again in the next step


class Choice:
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
            top = rules.top_of(found.values())
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
            return rules.by_moments([self._moments(unit) for unit in order], start, fmt=self.fmt)
        tops = [max(self.tops[unit], default=None) for unit in order]
        present = [self.whole[unit] for unit in order]
        return rules.by_spectra(tops, start, present, fmt=self.fmt, margin=self.margin, slack=self.slack)

    def _moments(self, unit: int) -> rules.Moments:
        weight = _matrix(self.layers.modules[unit])
        if weight is None:
            return rules.Moments(gradient=None, weight=None)
        fan = weight.shape[0] * math.prod(weight.shape[2:])
        return rules.Moments(gradient=self._outputs[unit], weight=measure(weight.detach()), fan=fan)

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
