"""Checks of values that are kept with fewer digits than their dtype has.

- Weights that something rounds to a 16-bit format, or to codes of 8 bits times a scale, after each step.
- Gradients that are rounded between the backward and the step, so that small ones become zero.
- Weight decay that is added to gradients while they carry the loss scale.
- Second moments in 16 bits, whose decay rounding undoes.
- Second moments that went through FP16, in a checkpoint, so that small ones became zero.
- An epsilon of Adam that is zero in the FP16 of its second moments.
- Products of gradients that an optimizer computes inside of an autocast to FP16, where they are zero.

All but the last two are read from a few values of a few FP32 weights, in the first steps or where a tensor was
replaced.
"""

import itertools
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from plimsoll.kernels.device_value import DeviceValue
from plimsoll.kernels.dtypes import FORMATS, SIXTEEN_BIT
from plimsoll.watch.hooks import torch_hooks
from plimsoll.watch.parameters.updates import OWN, kind_of
from plimsoll.watch.steps.wiring.checks import (
    REPEATS,
    Fact,
    FollowedOptimizer,
    OptimizerCheck,
    Training,
    is_plain,
    living,
    some_values,
)

_FIRST = 8  # steps in which weights and gradients are compared
_SAMPLE = 1024  # values of a weight; in FP32 nearly all differ, in BF16 some 700 of them
_CODES = 256  # of 8 bits: by chance no more of these many values are equal
_FP32_EXPONENT_BITS = 8
_HALF, _MOST = 0.5, 0.9  # of the values
_FEWEST = 16  # values
_LOST = 0.05  # of the gradients: fewer zeros do no harm
_ZERO = 0.01  # of the second moments
_LOOKS = 8  # at second moments that were replaced
_COUNTS = 5 + len(SIXTEEN_BIT)  # numbers of `_rounded`
EIGHT_BIT_CODES = "8-bit codes"  # no format: their scale is not known
_CLEAR = 2.0**12  # times its rounding: one value then shows a factor to its fourth digit
_SMALL_DECAY = 1e-5  # after the division by the loss scale; what is meant for a training is larger
_MANY = 64  # values that an addition shows in: fewer may be proportional to their weights by chance
_FP16_ZERO = 2.0**-25  # half of the smallest subnormal of FP16: this and less is rounded to zero
_ROOTED = ("exp_avg_sq", "square_avg")  # states whose root is divided by
# Bits of a significand after the first; the fewest first, since values with few digits lie on every wider grid too.
_FORMATS = {
    dtype: FORMATS[dtype]
    for dtype in sorted((torch.float8_e4m3fn, *SIXTEEN_BIT), key=lambda dtype: FORMATS[dtype].mantissa_bits)
}


class Roundings(OptimizerCheck):
    """FP32 weights that are rounded after an optimizer's first steps, and gradients before them."""

    looks_at_every_step = True

    def __init__(self, training: Training, followed: FollowedOptimizer) -> None:
        super().__init__(training, followed)
        self._weights = _plain_fp32(followed)
        self._steps = 0
        self._before: Tensor | None = None  # weights before a step, after it, and gradients after the backward
        self._after: Tensor | None = None
        self._gradients: Tensor | None = None
        self._of_weights: list[DeviceValue] = []  # counts of each step
        self._of_gradients: list[DeviceValue] = []
        self._of_decay: list[DeviceValue] = []

    def _is_over(self) -> bool:
        """Return True once the first steps have passed."""
        return self._steps >= _FIRST or not self._weights

    def backward_ends(self) -> None:
        """A backward has added to the gradients."""
        if not self._is_over():
            self._gradients = some_values(self._graded())

    def step_begins(self, optimizer: Any) -> None:
        """The optimizer's step begins."""
        if self._is_over():
            return
        now, given = some_values(living(self._weights)), some_values(self._graded())
        before, after, passed = self._before, self._after, self._gradients
        if now is not None and before is not None and after is not None and now.shape == before.shape == after.shape:
            largest = max(living(self._weights), key=torch.Tensor.numel).detach().reshape(-1)[:_SAMPLE]
            self._of_weights.append(DeviceValue(torch.cat([_rounded(before, after, now).float(), largest])))
        if given is not None and passed is not None and given.shape == passed.shape:
            self._of_gradients.append(DeviceValue(_flushed(passed, given)))
            scale = self.training.scale()
            if scale is not None and now is not None and now.shape == given.shape:
                kept = getattr(optimizer, "grad_scale", None) is not None  # the optimizer will divide by itself
                self._of_decay.append(DeviceValue(_added(passed, given, now, scale, kept=kept)))
        self._before, self._after, self._gradients = now, None, None
        self._record("weights rounded", "weights are rounded to {} after each step", self._of_weights, rounding_of)
        self._record("gradients rounded", "gradients are rounded to {} before each step", self._of_gradients, flush_of)
        self._record("decay scaled", "weight decay is added to gradients of a scaled loss", self._of_decay, decay_of)

    def step_ends(self, optimizer: Any) -> None:
        """The optimizer's step has returned."""
        if not self._is_over():
            self._steps += 1
            self._after = some_values(living(self._weights))

    def _record(
        self, fact: str, message: str, counts: list[DeviceValue],
        judge: "Callable[[Sequence[DeviceValue]], dict[str, str | float] | None]",
    ) -> None:  # fmt: skip
        """Record a rounding once it was seen at enough steps."""
        if len(counts) < REPEATS or self.facts.has(fact):
            return
        steps, name = tuple(counts), self.followed.name

        def read() -> list[Fact]:
            found = judge(steps)
            if found is None:
                return []
            return [Fact(fact, message.format(found.get("format")), {"optimizer": name, **found})]

        self.facts.record_from(read, once=True)

    def _graded(self) -> list[Tensor]:
        return [p.grad for p in living(self._weights) if p.grad is not None and p.grad.dtype == torch.float32]


def _rounded(before: Tensor, after: Tensor, now: Tensor) -> Tensor:
    """Count updates, writes since, updates that these undid, and values off each 16-bit format's rounding of them.

    Last the product of what is left of the updates with them, and their square.
    """
    updated, update = after != before, after - before
    off = [(now != after.to(dtype).float()).sum() for dtype in SIXTEEN_BIT]
    left = [((now - before) * update).sum(), update.square().sum()]
    return torch.stack([updated.sum(), (now != after).sum(), (updated & (now == before)).sum(), *off, *left])


def rounding_of(steps: Sequence[DeviceValue]) -> dict[str, str | float] | None:
    """Return the format that weights are rounded to between steps, and the share of updates lost, by name.

    None if they are not at the last `REPEATS` steps.
    """
    rows = [step.tensor() for step in steps[-REPEATS:]]
    counts = [cast("list[float]", row[:_COUNTS].tolist()) for row in rows]
    if not all(c[1] >= _HALF * c[0] and c[0] >= _FEWEST for c in counts):
        return None
    samples = [row[_COUNTS:] for row in rows]
    codes = all(len(x) == _SAMPLE and len(cast("Tensor", x.unique())) <= _CODES for x in samples)
    if codes:  # a scale that moves changes every value by a little: what is left of the updates counts
        left = sum(c[-2] for c in counts) / sum(c[-1] for c in counts)
        return {"format": EIGHT_BIT_CODES, "lost": min(max(1 - left, 0.0), 1.0)}
    lost = sum(c[2] for c in counts) / sum(c[0] for c in counts)
    kinds = [FORMATS[dtype].name for place, dtype in enumerate(SIXTEEN_BIT) if all(c[3 + place] == 0 for c in counts)]
    return {"format": kinds[0], "lost": lost} if kinds else None


def _flushed(passed: Tensor, given: Tensor) -> Tensor:
    """Count nonzero gradients, those that became zero, values off each grid before and after, and off each format."""
    masks = [(1 << (23 - fmt.mantissa_bits)) - 1 for fmt in _FORMATS.values()]
    off = [((x.view(torch.int32) & mask) != 0).sum() for x in (passed, given) for mask in masks]
    held = [(given != given.to(dtype).float()).sum() for dtype in _FORMATS]
    return torch.stack([(passed != 0).sum(), ((passed != 0) & (given == 0)).sum(), *off, *held])


# Values on a narrower grid than the backward left them on were cast in between. Masks and clipping leave the rest as it
# is, or multiply it by a number that takes it off any grid.
def flush_of(steps: Sequence[DeviceValue]) -> dict[str, str | float] | None:
    """Return the format that gradients are left with, the share that became zero, and if it is certain, by name.

    If no format holds all values as they are, they were scaled in between, and only their digits show it.
    """
    counts = [cast("list[int]", step.tensor().tolist()) for step in steps[-REPEATS:]]
    nonzero, lost = sum(c[0] for c in counts), sum(c[1] for c in counts)
    if nonzero - lost < _FEWEST or lost < _LOST * nonzero:
        return None
    formats, many = list(_FORMATS.values()), len(_FORMATS)
    fewer = [
        place for place in range(many) if all(c[2 + many + place] == 0 and c[2 + place] >= _HALF * c[0] for c in counts)
    ]
    if not fewer:
        return None
    # FP16's smallest values have as few digits as E4M3's, which has none of that size. BF16 holds them too, but makes
    # no zeros: it has the range of FP32.
    holds = [
        place
        for place in range(many)
        if all(c[2 + 2 * many + place] == 0 for c in counts) and formats[place].exponent_bits < _FP32_EXPONENT_BITS
    ]
    return {"format": formats[(holds or fewer)[0]].name, "lost": lost / nonzero, "certain": bool(holds)}


def _added(passed: Tensor, given: Tensor, weights: Tensor, scale: Tensor, *, kept: bool) -> Tensor:
    """Return the factor of the weights that was added to scaled gradients, the scale, and how many values show it.

    Last how many contradict it. The value that shows it most clearly gives the factor. `kept`: the gradients still
    carry the scale.
    """
    factor = scale.detach().to(passed.device, torch.float32).reshape(())
    full = given if kept else given * factor
    added = full - passed
    rounding = (passed.abs() + full.abs()) * torch.finfo(torch.float32).eps
    clear = (added.abs() / rounding).where((rounding > 0) & (weights != 0), torch.zeros_like(added))
    best = clear.argmax()
    decay = added[best] / weights[best]
    shows = clear >= _FEWEST
    off = (added - decay * weights).abs() > 4 * rounding + (decay * weights).abs() * (8 / _CLEAR)
    return torch.stack([decay, factor, clear[best], shows.sum().float(), (shows & off).sum().float()])


# A decay that was multiplied by the loss scale, or was added after the division, is a round number once it is divided.
def decay_of(steps: Sequence[DeviceValue]) -> dict[str, str | float] | None:
    """Return a decay that the loss scale has divided, what is left of it, and the scale, by name; None for others."""
    rows = [cast("list[float]", step.tensor().tolist()) for step in steps[-REPEATS:]]
    if not all(clear >= _CLEAR and shown >= _MANY and not off for _, _, clear, shown, off in rows):
        return None
    decays, left = [row[0] for row in rows], [row[0] / row[1] for row in rows]
    decay = decays[-1]
    alike = all(abs(each - decay) <= decay * 8 / _CLEAR for each in decays)
    if not alike or not _is_round(decay) or any(_is_round(each) or not 0 < each <= _SMALL_DECAY for each in left):
        return None
    return {"decay": float(f"{decay:.2g}"), "left": left[-1], "scale": rows[-1][1]}


def _is_round(number: float) -> bool:
    """Return True for a number that is written with two digits."""
    return abs(float(f"{number:.1e}") - number) <= abs(number) * 4 / _CLEAR


class Moments(OptimizerCheck):
    """Second moments of a few FP32 weights: their dtype, and whether they were replaced."""

    looks_at_every_step = True

    def __init__(self, training: Training, followed: FollowedOptimizer) -> None:
        super().__init__(training, followed)
        self._weights = _plain_fp32(followed)
        self._mark: tuple[int, int] | None = None  # identity and version of one, as the last step has left it
        self._looks = 0
        self._old: tuple[Tensor, Tensor, float] | None = None  # moments and gradients before a step, and the decay
        self._format, self._decay = "", 0.0
        self._stepped: list[DeviceValue] = []

    def step_begins(self, optimizer: Any) -> None:
        """The optimizer's step begins."""
        name, steps = self.followed.name, tuple(self._stepped)
        if (replaced := self._replaced(optimizer)) is not None:

            def read() -> list[Fact]:
                details = {"optimizer": name, "lost": _share_of_zeros(replaced), "format": "fp16"}
                message = f"second moments of {name} went through FP16, and some became zero"
                return [Fact("moments flushed", message, details)] if details["lost"] else []

            self.facts.record_from(read)
        if len(steps) == REPEATS:
            message = f"second moments of {name} are kept in {self._format}, and their decay is rounded away"
            self.facts.record_if(
                "moments narrow", message, lambda: _are_nearest(steps), optimizer=name, format=self._format,
                decay=self._decay,
            )  # fmt: skip

    # One tensor shows whether the state was replaced: it is loaded as a whole. That is looked at before each step.
    def _replaced(self, optimizer: Any) -> DeviceValue | None:
        """Note the moments before a step. Return counts of those that were replaced since the last one."""
        x = self._first_of(optimizer)
        if x is None:
            return None
        if x.dtype in SIXTEEN_BIT:
            if len(self._stepped) < REPEATS:
                self._follow(optimizer, self._found(optimizer))
            return None
        if (id(x), x._version) == self._mark or self._looks >= _LOOKS:  # noqa: SLF001  (public in all but name)
            return None
        found = self._found(optimizer)
        if (values := some_values([x for _, x in found])) is None:
            return None
        self._looks += 1
        # Where all second moments became zero, the first ones show through which format both went.
        firsts = some_values([x for p, _ in found if isinstance(x := optimizer.state[p].get("exp_avg"), Tensor)])
        firsts = values if firsts is None or firsts.shape != values.shape else firsts
        off = (values != values.half()).sum() + (firsts != firsts.half()).sum()
        zeros = (values == 0) & ((firsts != 0) | (firsts is values))
        return DeviceValue(torch.stack([(firsts != 0).sum(), (values != 0).sum(), zeros.sum(), off]))

    # The next value is known but for its rounding: the one before, the decay and the gradient give it. Where it is the
    # nearest to that at all of three steps, nothing rounds it at random.
    def step_ends(self, optimizer: Any) -> None:
        """The optimizer's step has returned."""
        x, old = self._first_of(optimizer), self._old
        self._mark = None if x is None else (id(x), x._version)  # noqa: SLF001  (likewise)
        if old is None:
            return
        found = self._found(optimizer)
        new = some_values([x for _, x in found])
        if new is not None and new.shape == old[0].shape:
            nearest = (old[0] * old[2] + (1 - old[2]) * old[1].square()).to(found[0][1].dtype).float()
            moved = new != old[0]
            self._stepped.append(DeviceValue(torch.stack([moved.sum(), (moved & (new == nearest)).sum()])))
        self._old = None

    def _first_of(self, optimizer: Any) -> Tensor | None:
        p = self._weights[0]() if self._weights else None
        state: Mapping[str, object] | None = None if p is None else optimizer.state.get(p)
        x = None if not state else state.get(_ROOTED[0], state.get(_ROOTED[1]))
        return x if isinstance(x, Tensor) else None

    def _follow(self, optimizer: Any, found: list[tuple[Tensor, Tensor]]) -> None:
        if not found:
            return
        dtype, group = found[0][1].dtype, _group_of(optimizer, found[0][0])
        decay = group.get("betas", (0.0, group.get("alpha", 0.0)))[1]
        gradients = [p.grad for p, _ in found if p.grad is not None and p.grad.dtype == torch.float32]
        # At the lower end of a binade half a unit in the last place is this part of a value: a decay that takes less is
        # rounded away there, and no value gets past it.
        half = 2.0 ** -(FORMATS[dtype].mantissa_bits + 1)
        if not isinstance(decay, float) or not 0 < 1 - decay < half or len(gradients) != len(found):
            return
        old, given = some_values([x for _, x in found]), some_values(gradients)
        if old is not None and given is not None and old.shape == given.shape:
            self._format, self._decay, self._old = FORMATS[dtype].name, decay, (old, given, decay)

    def _found(self, optimizer: Any) -> list[tuple[Tensor, Tensor]]:
        found: list[tuple[Tensor, Tensor]] = []
        for ref in self._weights:
            p = ref()
            state: Mapping[str, object] = {} if p is None else optimizer.state.get(p, {})
            for key in _ROOTED if state else ():
                x = state.get(key)
                if p is not None and isinstance(x, Tensor) and x.shape == p.shape and is_plain(x):
                    found.append((p, x))
        return found


# With an epsilon of 2^-25 or less and its state in FP16, Adam divides by zero from the first step on: too soon for a
# rule that wants two samples.
class LostEpsilon(OptimizerCheck):
    """An epsilon of Adam that is zero in the format of its second moments."""

    looks_at_every_step = True

    def step_ends(self, optimizer: Any) -> None:
        """The optimizer's step has returned; the first one makes its state."""
        if self.followed.steps != 1:
            return
        names, lost, least = self.training.names(), list[str](), math.inf
        for group in optimizer.param_groups if kind_of(optimizer) == OWN else ():
            epsilon = group.get("eps")
            if not isinstance(epsilon, int | float):
                continue
            for p in group["params"]:
                state: Mapping[str, object] = optimizer.state.get(p, {})
                moments = [state.get(key) for key in _ROOTED]
                halves = [x for x in moments if isinstance(x, Tensor) and x.dtype == torch.float16]
                if halves and epsilon <= _FP16_ZERO and id(p) in names:
                    lost.append(names[id(p)])
                    least = min(least, float(epsilon))
        if lost:
            name = self.followed.name
            self.facts.record(
                "epsilon lost",
                f"{name} keeps second moments in FP16, where its epsilon of {least:g} is zero: it divides by zero "
                "where a second moment is zero.",
                key=f"epsilon lost: {name}",
                optimizer=name,
                epsilon=least,
                parameters=lost,
            )


# Shampoo and SOAP keep sums of products of a gradient with itself, of the rows and of the columns. A product of a row
# with itself is a sum of squares: zero for a gradient that is not, if the product is taken in FP16 and is too small.
class NarrowProducts(OptimizerCheck):
    """States of an optimizer that are products of gradients, taken inside of an autocast to FP16."""

    def __init__(self, training: Training, followed: FollowedOptimizer) -> None:
        super().__init__(training, followed)
        self._looks = 0  # at steps inside of an autocast
        self._is_inside = False

    def step_begins(self, optimizer: Any) -> None:
        """The optimizer's step begins."""
        self._is_inside = self._looks < REPEATS and _casts_to_fp16(self.followed)

    def step_ends(self, optimizer: Any) -> None:
        """The optimizer's step has returned."""
        if not self._is_inside:
            return
        self._looks += 1
        names, kind = self.training.names(), self.followed.name
        for p, key, state, products in _of_products(optimizer):
            own = state.diagonal().float()
            lost = (own == 0) & (products > 0)
            too_small = (products < _FP16_ZERO) | ~lost  # that FP16 explains
            counts = DeviceValue(torch.stack([(products > 0).sum(), lost.sum(), too_small.all().sum()]))
            place = f"state {key} of {names.get(id(p), 'a parameter')}"

            def read(counts: DeviceValue = counts, place: str = place) -> list[Fact]:
                some, zeros, explained = cast("list[int]", counts.tensor().tolist())
                if some < _FEWEST or zeros < _HALF * some or not explained:
                    return []
                details = {"optimizer": kind, "format": "fp16", "lost": zeros / some, "state": place}
                message = f"{kind} steps inside of an autocast to FP16, and products of gradients in {place} are zero"
                return [Fact("products flushed", message, details)]

            self.facts.record_from(read, once=True)


def _casts_to_fp16(followed: FollowedOptimizer) -> bool:
    """Return True if products on the device of the optimizer's weights are taken in FP16 now."""
    device = next((p.device.type for p in living(followed.weights)), "cpu")
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device) == torch.float16
    return any(dtype() == torch.float16 for dtype in torch_hooks.casting)


def _of_products(optimizer: Any) -> Iterator[tuple[Tensor, str, Tensor, Tensor]]:
    """Yield the first weights with square states of another shape, those states, and sums of squares of the gradient.

    A square weight is left out: its momentum has the same shape, and rows and columns are not to be distinguished.
    """
    given = (p for group in optimizer.param_groups for p in group["params"])
    weights = (p for p in given if p.dim() == 2 and p.shape[0] != p.shape[1] and p.grad is not None)
    for p in itertools.islice(weights, _LOOKS):
        gradient = p.grad
        state: Mapping[str, object] = optimizer.state.get(p, {})
        if not is_plain(gradient) or gradient.dtype != torch.float32:
            continue
        for key, x in state.items():
            if not isinstance(x, Tensor) or x.dim() != 2 or x.shape[0] != x.shape[1] or not is_plain(x):
                continue
            if x.shape[0] in p.shape and x.device == gradient.device:
                yield p, key, x, gradient.square().sum(1 - p.shape.index(x.shape[0]))


def _plain_fp32(followed: FollowedOptimizer) -> list[weakref.ref[Tensor]]:
    weights = living(followed.weights)
    return [weakref.ref(p) for p in weights if p.dtype == torch.float32 and is_plain(p)]


def _are_nearest(steps: Sequence[DeviceValue]) -> bool:
    """Return True if moments were rounded to nearest at these steps."""
    counts = [cast("list[int]", step.tensor().tolist()) for step in steps]
    return all(changed >= _FEWEST and nearest >= _MOST * changed for changed, nearest in counts)


def _share_of_zeros(counts: DeviceValue) -> float:
    """Return the share of zeros among moments that FP16 holds exactly, else 0."""
    firsts, nonzero, zeros, off = cast("list[int]", counts.tensor().tolist())
    share = zeros / max(zeros + nonzero, 1)
    return share if not off and firsts >= _FEWEST and share >= _ZERO else 0.0


def _group_of(optimizer: Any, p: Tensor) -> Mapping[str, Any]:
    groups: list[dict[str, Any]] = optimizer.param_groups
    return next((group for group in groups if any(x is p for x in group["params"])), dict[str, Any]())
