"""Decisions that rounding may change: which of several scores are the largest.

Calls of `topk` and `argmax` in a forward are recorded, as routers of experts make them. The forward runs as it was and
in the reference, and the n-th decision of one is compared with the n-th of the other. The output of a classifier is
such a decision too, of which class is the most likely.

A row of scores is *flipped* if other scores are chosen than in the reference. It is *tied* if rounding has made the
last score that is chosen and the first one that is not equal. The *margin* is the distance between these two scores in
the reference over the error of such a distance: below about 1 a decision is left to rounding.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from plimsoll.runs.records import FLIPS, MARGIN, TIES

_TOPK, _ARGMAX, _ARGMIN = ((getattr(torch, n), getattr(Tensor, n)) for n in ("topk", "argmax", "argmin"))
_unheard: Any = cast("Any", torch)._C.DisableTorchFunction  # noqa: SLF001  (torch offers it nowhere else)
_MOST = 1 << 24  # scores of one decision that are kept
_ONE_NEGATIVE = 0.99  # share of a classifier's rows whose gradient has one negative value
_NEAR_ZERO = 0.02  # sum of a row's gradient over that of its magnitudes, left by rounding


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Choice:
    """A decision: the `count` largest of the scores along the last axis are chosen."""

    module: str
    scores: Tensor
    count: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Compared:
    """A decision against that of the reference, row by row."""

    flipped: Tensor
    tied: Tensor
    margins: Tensor


class Decisions(TorchFunctionMode):
    """The decisions of a forward, recorded inside the context, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Choice] = []
        self._inside: list[str] = []

    def enter(self, module: str) -> None:
        """A module's forward begins."""
        self._inside.append(module)

    def leave(self, module: str) -> None:
        """A module's forward has ended."""
        if self._inside and self._inside[-1] == module:
            self._inside.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords: dict[str, Any] = kwargs or {}
        if func in _TOPK or func in _ARGMAX or func in _ARGMIN:
            choice = _choice(self._inside[-1] if self._inside else "", func, args, keywords)
            if choice is not None:
                self.made.append(choice)
        return func(*args, **keywords)


class Tally:
    """Compared decisions by module."""

    def __init__(self) -> None:
        self._compared: dict[str, list[Compared]] = {}

    def add(self, name: str, values: Choice, reference: Choice) -> None:
        """Compare two decisions, unless they are not the same one."""
        same = values.count == reference.count and values.scores.shape == reference.scores.shape
        if same and values.count < values.scores.shape[-1] and values.scores.numel():
            self._compared.setdefault(name, []).append(compared(values, reference))

    def add_all(self, values: Decisions, reference: Decisions) -> None:
        """Compare the decisions of two forwards in order, unless their numbers differ."""
        if len(values.made) == len(reference.made):
            for low, other in zip(values.made, reference.made, strict=True):
                self.add(other.module, low, other)

    def scalars(self) -> Mapping[str, float]:
        """Return flipped and tied rows' shares and the median margin, as a run's scalars."""
        by_name: dict[str, float] = {}
        for name, parts in self._compared.items():
            rows = sum(part.flipped.numel() for part in parts)
            by_name[f"{FLIPS}{name}"] = sum(float(part.flipped.sum()) for part in parts) / rows
            by_name[f"{TIES}{name}"] = sum(float(part.tied.sum()) for part in parts) / rows
            margin = float(torch.cat([part.margins for part in parts]).median())
            if math.isfinite(margin):
                by_name[f"{MARGIN}{name}"] = margin
        return by_name


def compared(values: Choice, reference: Choice) -> Compared:
    """Return how one decision differs from another, of the same shape."""
    with torch.no_grad(), _unheard():  # its own `topk` is no decision
        return _compared(values, reference)


def _compared(values: Choice, reference: Choice) -> Compared:
    low, high, count = _rows(values.scores), _rows(reference.scores), values.count
    own, best = (x.topk(count + 1, dim=-1) for x in (low, high))
    chosen, wanted = (
        torch.zeros(x.shape, dtype=torch.bool, device=x.device).scatter_(-1, _largest(x, count), True)
        for x in (low, high)
    )
    gap = (best.values[:, count - 1] - best.values[:, count]).double()
    finite = torch.isfinite(low) & torch.isfinite(high)
    error = torch.where(finite, low.double() - high.double(), 0.0)
    spread = math.sqrt(2) * error.square().mean(-1).sqrt()
    tied = (own.values[:, count - 1] == own.values[:, count]) & (gap > 0)
    return Compared(flipped=(chosen != wanted).any(-1), tied=tied, margins=gap / spread)


def class_axis(gradient: Tensor) -> int | None:
    """Return the class axis of an output with a cross-entropy's gradient, or None."""
    for axis in (-1, 1) if gradient.dim() > 2 else (-1,):
        if gradient.dim() < 2 or gradient.shape[axis] < 2:
            continue
        rows = gradient.detach().movedim(axis, -1).flatten(0, -2).float()
        rows = rows[rows.abs().sum(-1) > 0]
        if not len(rows):
            return None
        # Softmax minus one: one value of a row, its target's, is negative, and all add up to zero.
        has_one_negative = (rows < 0).sum(-1) == 1
        if bool(
            (has_one_negative & (rows.sum(-1).abs() <= _NEAR_ZERO * rows.abs().sum(-1))).float().mean() >= _ONE_NEGATIVE
        ):
            return axis
    return None


def class_choice(scores: Tensor, axis: int) -> Choice:
    """Return the decision for the most likely class."""
    return Choice(module="", scores=scores.detach().movedim(axis, -1), count=1)


def _choice(module: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Choice | None:
    names = ("input", "k", "dim", "largest") if func in _TOPK else ("input", "dim")
    arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    x, count, axis = arguments.get("input"), arguments.get("k", 1), arguments.get("dim", -1 if func in _TOPK else None)
    if not isinstance(x, Tensor) or not x.is_floating_point() or not 0 < x.numel() <= _MOST or not x.dim():
        return None
    scores = x.detach().clone()  # a router may go on and change its scores in place
    scores = scores.flatten() if axis is None else scores.movedim(axis, -1)
    smallest = func in _ARGMIN or not arguments.get("largest", True)
    return Choice(module=module, scores=-scores if smallest else scores, count=int(count))


def _largest(scores: Tensor, count: int) -> Tensor:
    # The functions that models call: they differ in which of several equal scores they take.
    return scores.argmax(-1, keepdim=True) if count == 1 else scores.topk(count, dim=-1).indices


def _rows(scores: Tensor) -> Tensor:
    return scores.reshape(-1, scores.shape[-1])
