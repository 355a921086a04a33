"""Predicted loss of a plan: divergence of loss and updates to first order.

It is computed by module. Let *g* be the gradient of a tensor, *n* its number of values, and *e* the error of a cast.
The spectra give the sum of squares of *e* for any format: over all binades, the count times a twelfth of the squared
spacing, plus what underflows and overflows. Errors are taken to be independent of each other and of the gradient. Then,
to first order,

    D = sum over the tensors cast in the forward of |g|^2 |e|^2 / n

is the mean square of the loss's divergence in one step. Its mean is zero. The loss is a mean over N samples, and for a
negative log-likelihood the second derivative is N times the mean square of a gradient, so the second order adds
N D / 2 to the loss, at every step. That is the forward's part.

A cast of the backward turns the update. A module's weight gradient, the product of its output's gradient (g) and its
input (x) over R rows, has the relative error

    rho^2 = |g|^2 |x|^2 (e_g^2 + e_x^2) / (R |G|^2)      with relative errors e_g and e_x

and the gradient that it passes on has e_g^2 + e_W^2, which all earlier modules get. An update with relative error rho
goes 1 / sqrt(1 + rho^2) as far along its gradient, so training is as if rho^2 / 2 of its steps were missing. The loss
curve says how much that is: its slope against the logarithm of the steps, over the last half. Modules share it by the
size of their updates times that of their gradients.

Values of the last gradient, that of the logits, are an exception. The small ones are the probabilities of the wrong
classes. They are of one sign, so making them zero is a bias. A row of this gradient has a sum of zero, and lacks what
is lost, less what is added to values that are raised to the format's smallest one. Let that be B, over all rows of a
step. It pulls the logits of a row up together. Softmax does not feel that, so nothing stops it.

With SGD an update is the gradient times a rate, and the pull can be followed. With C classes, N rows and the module's
input h, its gradient b in the weight has

    |b|^2 = B^2 |h|^2 / (C N)       if h is the same in all rows, which the pull itself makes it

and T steps at the rate r raise all logits by r T |b|^2 / B. In a loss of curvature c, a pull that stays moves a weight
by (1 - exp(-z)) b / c with z = r c T. That costs r T |b|^2 (1 - exp(-z))^2 / (2 z), at most 0.204 r T |b|^2 whatever c
is. The prediction is this bound. That h grows under the pull is not counted. Weight decay d forgets a pull in 1 / (r d)
steps, so T is no more than that.

An optimizer that divides by the size of gradients pays less: its updates do not grow with the activations that the pull
makes larger. There, and where the optimizer is not known, the prediction is between two cases. If each logit rises
alone until nothing is lost on average, it moves by about 1, and the loss by half of each lost value. If a class rises
by the same in all samples, its logit moves by the lost share of its probability, and the loss by half of the lost
values times that share. The prediction is the geometric mean of the two. The probabilities of the wrong classes are
half of the gradient's magnitude, as its rows have sums of zero.

Errors that are known from shadow steps calibrate the part of the updates: the squared error of each module's weight
gradient, over that of the formula in the run's own format.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import cast

import numpy as np

from plimsoll.diagnosis.planning.format_choice import NATIVE, Judge
from plimsoll.diagnosis.planning.modules import Module
from plimsoll.diagnosis.planning.series_windows import Collection
from plimsoll.diagnosis.view import View
from plimsoll.formats import BlockFormat, Format, Role, get
from plimsoll.intervals import Interval
from plimsoll.spectrum import error_sums

SPREAD = 4.0  # factor of the interval; see benchmarks/plan.py
_WORST = 0.2036  # of (1 - exp(-z))^2 / (2 z), the largest, at z = 1.256
_EVEN = 1 / 28  # squared error over squared value for one bit: a twelfth of the squared spacing, over the mean of 7/3


@dataclass(frozen=True, slots=True, kw_only=True)
class Consequence:
    """Predicted effect of one module's formats."""

    loss_divergence: float  # first-order divergence of the loss in a step: its root mean square
    update_divergence: float  # relative error of the weight's gradient by the module's own casts
    forward: float  # increase of the loss by the forward's errors
    updates: float  # increase of the loss by the errors of the updates

    @property
    def increase(self) -> float:
        """Increase of the loss."""
        return self.forward + self.updates


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    """Mean sums of squares and numbers of values of a module's tensors at a step."""

    weight: float
    inputs: float
    outputs: float
    weight_gradient: float
    input_gradient: float
    output_gradient: float
    weights: float
    input_values: float
    output_values: float

    @property
    def rows(self) -> float:
        """Number of rows that a weight multiplies. Exact for a linear layer."""
        return max(math.sqrt(self.input_values * self.output_values / self.weights), 1.0)

    @property
    def passed(self) -> float:
        """Expected sum of squares of the gradient that the module passes to its input."""
        return self.output_gradient * self.weight * self.rows / self.output_values


class Forecast:
    """Prediction for the modules of a run."""

    def __init__(self, view: View, judge: Judge, modules: Sequence[Module]) -> None:
        self._view, self._judge = view, judge
        first = {name: place for place, name in enumerate(view.run.tensors.get("activations", ()))}
        ordered = sorted(modules, key=lambda module: min((first.get(n, -1) for n in module.inputs), default=-1))
        sizes = {module.name: self._sizes_of(module) for module in ordered}
        self._sizes = _with_data({name: each for name, each in sizes.items() if each is not None})
        self._modules = {module.name: module for module in ordered}
        self._known: dict[tuple[str, str, str, tuple[int | None, ...]], Consequence | None] = {}

    @property
    def possible(self) -> bool:
        """True if the run has what a prediction needs: losses, and all tensors of a module."""
        return self.loss > 0 and bool(self._sizes)

    @cached_property
    def loss(self) -> float:
        """The loss at the end: the median of the last tenth. 0: unknown."""
        losses = self._losses[1]
        return float(np.median(losses[-max(len(losses) // 10, 1) :])) if len(losses) else 0.0

    @cached_property
    def slope(self) -> float:
        """Fall of the loss with the logarithm of the steps, over their last half."""
        steps, losses = self._losses
        late = steps >= (steps[-1] + 1) / 2
        if late.sum() < 3:
            return 0.0
        return max(-float(np.polyfit(np.log(steps[late] + 1.0), losses[late], 1)[0]), 0.0)

    @cached_property
    def samples(self) -> float:
        """Number of samples that the loss is a mean over: the fewest rows of a module."""
        return min(sizes.rows for sizes in self._sizes.values())

    def of(self, name: str, forward: str, backward: str, shifts: Mapping[Role, int]) -> Consequence | None:
        """Return a module's consequence; None if its tensors or blocks were not recorded."""
        key = (name, forward, backward, tuple(shifts.get(role) for role in ("weights", "activations", "gradients")))
        if key not in self._known:
            self._known[key] = self._computed(name, forward, backward, shifts) if name in self._sizes else None
        return self._known[key]

    def total(self, consequences: Iterable[Consequence]) -> Interval:
        """Return the predicted increase of the loss, as a share of the loss."""
        return self.interval(sum(each.increase for each in consequences))

    def interval(self, increase: float) -> Interval:
        """Return an increase of the loss as a share of the loss, with its interval."""
        share = increase / self.loss
        return Interval(low=share / SPREAD, estimate=share, high=share * SPREAD)

    @cached_property
    def calibration(self) -> tuple[float, int]:
        """Recorded over predicted squared error of weight gradients, and their number.

        Both are in the run's own format. It is the geometric mean over the modules of which a shadow step recorded
        errors. (1, 0) without any.
        """
        found: list[float] = []
        passed = 0.0
        errors = _recorded_errors(self._view)
        for name in reversed(self._sizes):
            module, sizes = self._modules[name], self._sizes[name]
            own = self._own_format(module)
            if own is None:
                continue
            one = _EVEN * 4.0**-own.mantissa_bits
            predicted = self._own(sizes, one, one) + passed
            passed += 2 * one * self._reaches(sizes)
            recorded = errors.get(module.weight[0], 0.0)
            if recorded > 0 and predicted > 0:
                found.append(math.log(recorded / predicted))
        return (math.exp(sum(found) / len(found)), len(found)) if found else (1.0, 0)

    def _computed(self, name: str, forward: str, backward: str, shifts: Mapping[Role, int]) -> Consequence | None:
        module, sizes = self._modules[name], self._sizes[name]
        weight, inputs, gradients = (
            self._collection("weights").relative_error(module.weight, get(forward), shifts.get("weights", 0)),
            self._collection("activations").relative_error(module.inputs, get(forward), shifts.get("activations", 0)),
            self._collection("activation_gradients").relative_error(
                module.outputs, get(backward), shifts.get("gradients", 0)
            ),
        )
        if weight is None or inputs is None or gradients is None:
            return None
        divergence = sizes.weight_gradient * sizes.weight * weight / sizes.weights
        divergence += sizes.input_gradient * sizes.inputs * inputs / sizes.input_values
        if forward in NATIVE:
            rounded = self._collection("activations").relative_error(module.outputs, get(forward), 0) or 0.0
            divergence += sizes.output_gradient * sizes.outputs * rounded / sizes.output_values
        own = self._own(sizes, gradients, inputs)
        onward = (gradients + weight) * self._reaches(sizes)
        lost = self.slope * (self._shares[name] * _missing(own) + self._before[name] * _missing(onward))
        cut = 0.0
        if name == next(reversed(self._sizes)):
            cut = self._cut(module, sizes, get(backward), shifts.get("gradients", 0))
        return Consequence(
            loss_divergence=math.sqrt(divergence),
            update_divergence=math.sqrt(own),
            forward=self.samples * divergence / 2,
            updates=lost * self.calibration[0] + cut,
        )

    def _cut(self, module: Module, sizes: _Sizes, fmt: Format | BlockFormat, shift: int) -> float:
        """Return the increase of the loss by small values of the last gradient."""
        lost, added, whole = self._collection("activation_gradients").sums(module.outputs, fmt, shift)
        if self._rate is None:
            return 0.5 * lost * math.sqrt(min(2 * lost / whole, 1.0)) if whole else 0.0
        return _WORST * abs((lost - added) * self._drift(sizes, lost - added))

    def _drift(self, sizes: _Sizes, pull: float) -> float:
        """How far SGD moves all logits together by the end, if the last gradient's cast takes `pull` at each step."""
        rate, decay = self._rate or 0.0, _setting(self._view, "weight_decay")
        steps = float(self._losses[0][-1] + 1)
        if rate * decay > 0:
            steps = min(steps, 1 / (rate * decay))
        return rate * steps * pull * sizes.inputs / sizes.output_values

    @cached_property
    def _rate(self) -> float | None:
        """Distance that SGD moves a weight along a gradient that stays, per step and gradient.

        It is known from the updates. Of gradients that differ at each step, momentum adds up the squares, and of one
        that stays the values. None: another optimizer.
        """
        settings = self._view.run.settings.get("optimizer")
        if not isinstance(settings, Mapping) or settings.get("name") != "SGD":
            return None
        momentum = min(max(_setting(self._view, "momentum"), 0.0), 1 - 2.0**-20)
        name = next(reversed(self._sizes))
        weight, gradient = self._modules[name].weight, self._sizes[name].weight_gradient
        updates = Collection.of(self._view, "updates", self._judge.tolerance)
        if updates is None or not updates.has(weight[0]) or not gradient:
            return _setting(self._view, "lr") / (1 - momentum)
        return math.sqrt(updates.energy(weight) / gradient * (1 + momentum) / (1 - momentum))

    def _own(self, sizes: _Sizes, gradients: float, inputs: float) -> float:
        """Return the weight gradient's squared relative error, by its operands' errors."""
        if not sizes.weight_gradient:
            return 0.0
        return sizes.output_gradient * sizes.inputs * (gradients + inputs) / (sizes.rows * sizes.weight_gradient)

    def _reaches(self, sizes: _Sizes) -> float:
        """Return the module's share of its input's gradient, which others may use too."""
        return min(sizes.passed / sizes.input_gradient, 1.0) if sizes.input_gradient else 1.0

    @cached_property
    def _shares(self) -> dict[str, float]:
        """Share of each module in the progress of training."""
        updates = Collection.of(self._view, "updates", self._judge.tolerance)
        found: dict[str, float] = {}
        for name, sizes in self._sizes.items():
            weight = self._modules[name].weight
            moved = updates.energy(weight) if updates is not None and updates.has(weight[0]) else sizes.weight_gradient
            found[name] = math.sqrt(moved * sizes.weight_gradient)
        whole = sum(found.values()) or 1.0
        return {name: each / whole for name, each in found.items()}

    @cached_property
    def _before(self) -> dict[str, float]:
        """Share of the modules before each one."""
        found, before = dict[str, float](), 0.0
        for name in self._sizes:
            found[name] = before
            before += self._shares[name]
        return found

    @cached_property
    def _losses(self) -> "tuple[np.ndarray, np.ndarray]":
        steps, losses = self._view.scalar("loss")
        finite = np.isfinite(losses)
        return steps[finite], losses[finite]

    def _sizes_of(self, module: Module) -> _Sizes | None:
        series = {
            "weights": module.weight, "gradients": module.weight, "activations": (*module.inputs, *module.outputs),
            "activation_gradients": module.outputs,
        }  # fmt: skip
        found = {name: self._judge.collections[name] for name in series}
        if any(c is None or not series[n] or not all(map(c.has, series[n])) for n, c in found.items()):
            return None
        weights, gradients, activations, backward = (self._collection(name) for name in series)
        counts = [weights.count(module.weight), activations.count(module.inputs), activations.count(module.outputs)]
        if not all(counts):
            return None
        return _Sizes(
            weight=weights.energy(module.weight),
            inputs=activations.energy(module.inputs),
            outputs=activations.energy(module.outputs),
            weight_gradient=gradients.energy(module.weight),
            input_gradient=backward.energy(module.inputs),
            output_gradient=backward.energy(module.outputs),
            weights=counts[0],
            input_values=counts[1],
            output_values=counts[2],
        )

    def _own_format(self, module: Module) -> Format | None:
        known = self._view.formats("activations")
        return next((known[name] for name in module.outputs if name in known), None)

    def _collection(self, name: str) -> Collection:
        found = self._judge.collections[name]
        assert found is not None  # `_sizes_of` has looked
        return found


def _with_data(found: dict[str, _Sizes]) -> dict[str, _Sizes]:
    """Return the sizes, in the order of the forward, with gradients for inputs that are data.

    These have none, and their cast is felt all the same. A gradient lies along a trained weight, and more so the
    earlier the module is: it is by so much larger than `passed` as that of the next module which has one.
    """
    sizes, larger = dict(found), 1.0
    for name in reversed(found):
        each = found[name]
        if not each.input_gradient:
            sizes[name] = replace(each, input_gradient=each.passed * larger)
        elif each.passed:
            larger = max(each.input_gradient / each.passed, 1.0)
    return sizes


def _setting(view: View, name: str) -> float:
    """Return a number of the optimizer's settings, 0 if it is not recorded."""
    settings = view.run.settings.get("optimizer")
    value = cast("Mapping[str, object]", settings).get(name) if isinstance(settings, Mapping) else None
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else 0.0


def _missing(squared: float) -> float:
    """Return the share of an update that its relative error costs."""
    return 1 - 1 / math.sqrt(1 + squared)


def _recorded_errors(view: View) -> dict[str, float]:
    """Return each weight gradient's squared relative error, over all shadow steps."""
    cells = view.cells("gradients")
    if cells is None:
        return {}
    errors, sizes = (np.nansum(cells.error_sum(name), axis=1) for name in ("errorsq", "referencesq"))
    ratios = error_sums.relative_error(errors, sizes) ** 2
    return {name: float(r) for name, r in zip(cells.names, ratios, strict=True) if np.isfinite(r)}
