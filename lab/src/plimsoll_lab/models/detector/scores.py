"""How good a detector is: the mean average precision of its boxes on scenes, at an overlap of half."""

from typing import cast

import torch
from torch import Tensor

from plimsoll_lab.models.detector.anchors import decoded, overlaps
from plimsoll_lab.models.detector.data import CLASSES, Scenes
from plimsoll_lab.models.detector.model import Found

_OVERLAP = 0.5  # of a box with the thing that it finds
_DUPLICATE = 0.45  # of a box with a better one of the same class, from which on it is dropped; SSD's
_KEPT = 30  # boxes a picture and class that are looked at, the surest


def mean_average_precision(found: Found, seen: Scenes, defaults: Tensor) -> float:
    """The mean over classes of the area under precision by recall, 0 to 1; 0 where an output is not finite.

    A box finds a thing if it overlaps it by half or more and no surer box has; all boxes of all pictures are ranked by
    how sure they are. The precision at a recall is the best at that recall or above.
    """
    if not all(bool(part.isfinite().all()) for part in found):
        return 0.0
    sure = found.scores.float().softmax(dim=-1)
    boxes = decoded(found.offsets.float(), defaults)
    each = [_average_precision(sure[..., place + 1], boxes, seen, place) for place in range(len(CLASSES))]
    present = [value for value in each if value is not None]
    return sum(present) / len(present) if present else 0.0


def _average_precision(sure: Tensor, boxes: Tensor, seen: Scenes, kind: int) -> float | None:
    """Of one class; None where it has no thing in any picture."""
    ranked: list[tuple[float, bool]] = []
    things = 0
    for row in range(len(sure)):
        truth = seen.boxes[row][seen.classes[row] == kind]
        things += len(truth)
        ranked += _judged(sure[row], boxes[row], truth)
    if not things:
        return None
    ranked.sort(key=lambda one: -one[0])
    right = torch.tensor([good for _, good in ranked], dtype=torch.float64).cumsum(0)
    precision = right / torch.arange(1, len(right) + 1, dtype=torch.float64)
    best = precision.flip(0).cummax(0).values.flip(0)
    gained = right.diff(prepend=torch.zeros(1, dtype=torch.float64)) / things
    return float((best * gained).sum())


def _judged(sure: Tensor, boxes: Tensor, truth: Tensor) -> list[tuple[float, bool]]:
    """The boxes of one picture that are no duplicates: how sure each is, and whether it finds a thing."""
    best = sure.topk(min(_KEPT, len(sure)))
    chosen = boxes[best.indices]
    common = cast("list[list[float]]", overlaps(chosen, chosen).tolist())
    with_truth = cast("list[list[float]]", overlaps(chosen, truth).tolist())
    kept: list[int] = []
    free = list(range(len(truth)))
    judged: list[tuple[float, bool]] = []
    for place, score in enumerate(cast("list[float]", best.values.tolist())):
        if any(common[place][other] > _DUPLICATE for other in kept):
            continue
        kept.append(place)
        hits = [thing for thing in free if with_truth[place][thing] >= _OVERLAP]
        if hits:
            free.remove(max(hits, key=with_truth[place].__getitem__))
        judged.append((score, bool(hits)))
    return judged
