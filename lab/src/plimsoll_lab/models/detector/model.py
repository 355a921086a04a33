"""Mean average precision of a detector's boxes on scenes, at an overlap of half."""

from dataclasses import dataclass, replace
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from plimsoll.errors import ArgumentError

CLASSES = ("circle", "square", "triangle")
MOST = 3  # things in a picture; there is at least one
PIXELS = 64
STRIDE = 16  # of the coarsest feature map: a picture's side is a multiple of it

_SMALLEST, _LARGEST = 10 / 64, 28 / 64  # of a picture's side
_STRETCH = 0.3  # the most that the longer side is longer
_GROUND = (0.35, 0.65)  # the range of the ground's channels
_APART = 0.35  # by how much, at least, a thing's colour differs from the ground in one channel
_NOISE = 0.04  # standard deviation of a pixel, of 1
_HELD_OUT = 50_000  # batches from this number on are of no training


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenes:
    """Pictures (n, 3, size, size) of values 0 to 1, and what is in them.

    - `boxes` (n, 3, 4): the centre, the width and the height of each thing, as fractions of the side.
    - `classes` (n, 3): its place in `CLASSES`, or -1 where there is no thing; these come last.
    """

    pictures: Tensor
    boxes: Tensor
    classes: Tensor

    def to(self, device: str) -> "Scenes":
        """The same on a device."""
        return replace(
            self,
            pictures=self.pictures.to(device),
            boxes=self.boxes.to(device),
            classes=self.classes.to(device),
        )


def scenes(seed: int, step: int, count: int, size: int = PIXELS) -> Scenes:
    """Return the step's scenes; raise `ArgumentError` for a side not divisible."""
    if size < 2 * STRIDE or size % STRIDE:
        raise ArgumentError(
            f"scenes: expected a size that is a multiple of {STRIDE}, and {2 * STRIDE} or more; got size={size}. "
            f"Use {PIXELS}."
        )
    generator = torch.Generator().manual_seed(100_003 * seed + step)
    boxes, classes = _things(count, generator)
    return Scenes(pictures=_pictures(boxes, classes, size, generator), boxes=boxes, classes=classes)


def held_out(seed: int, count: int, size: int = PIXELS) -> Scenes:
    """Scenes that no training of that seed sees."""
    return scenes(seed, _HELD_OUT, count, size)


def _things(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Boxes and classes; each thing is in a quarter of its own."""

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator)

    larger = _SMALLEST * (_LARGEST / _SMALLEST) ** uniform(count, MOST)
    flat, squeezed = uniform(count, MOST) < 0.5, larger / (1 + _STRETCH * uniform(count, MOST))
    sides = torch.stack([torch.where(flat, larger, squeezed), torch.where(flat, squeezed, larger)], dim=-1)
    quarter = uniform(count, 4).argsort(dim=1)[:, :MOST]
    corner = torch.stack([quarter % 2, quarter // 2], dim=-1) * 0.5
    centre = corner + sides / 2 + uniform(count, MOST, 2) * (0.5 - sides)
    classes = torch.randint(len(CLASSES), (count, MOST), generator=generator)
    there = torch.arange(MOST) < torch.randint(1, MOST + 1, (count, 1), generator=generator)
    boxes = torch.cat([centre, sides], dim=-1)
    return torch.where(there[..., None], boxes, 0.0), torch.where(there, classes, -1)


def _pictures(boxes: Tensor, classes: Tensor, size: int, generator: torch.Generator) -> Tensor:
    count = len(boxes)
    ground = _GROUND[0] + (_GROUND[1] - _GROUND[0]) * torch.rand(count, 3, 1, 1, generator=generator)
    canvas = ground.expand(count, 3, size, size)
    for place in range(MOST):
        colour = _apart(ground, torch.rand(count, 3, 1, 1, generator=generator), generator)
        mask = _mask(boxes[:, place], classes[:, place], size)
        canvas = torch.where(mask[:, None], colour, canvas)
    noise = _NOISE * torch.randn(count, 3, size, size, generator=generator)
    return (canvas + noise).clamp(0, 1)


def _apart(ground: Tensor, colour: Tensor, generator: torch.Generator) -> Tensor:
    """Return the colour, with a channel moved from the ground's if all are near."""
    channel = torch.randint(3, (len(colour), 1, 1, 1), generator=generator)
    far = torch.where(ground < 0.5, ground + _APART, ground - _APART)
    near = ((colour - ground).abs() < _APART).all(dim=1, keepdim=True)
    chosen = torch.arange(3).view(1, 3, 1, 1) == channel
    return torch.where(near & chosen, far, colour)


def _mask(box: Tensor, kind: Tensor, size: int) -> Tensor:
    """Return the mask of the pixels whose middles the thing covers."""
    at = (torch.arange(size) + 0.5) / size
    y, x = torch.meshgrid(at, at, indexing="ij")
    half = box[:, 2:, None, None].clamp_min(1e-6) / 2
    dx, dy = (x - box[:, 0, None, None]) / half[:, 0], (y - box[:, 1, None, None]) / half[:, 1]
    square = (dx.abs() <= 1) & (dy.abs() <= 1)
    shapes = torch.stack([dx.square() + dy.square() <= 1, square, square & (dx.abs() <= (dy + 1) / 2)], dim=1)
    return shapes[torch.arange(len(kind)), kind.clamp_min(0)] & (kind >= 0)[:, None, None]


STRIDES = (4, 8, 16)  # of the feature maps, pixels
PER_CELL = 2
_SIZES = ((10 / 64, 13 / 64), (16 / 64, 19 / 64), (23 / 64, 27 / 64))  # of a picture's side, by map
_OVERLAP = 0.5
_VARIANCES = (0.1, 0.2)  # SSD's units of offsets: of the centre, in box sides, and of the sides' logarithms


def anchors(size: int) -> Tensor:
    """Return the default boxes (anchors, 4) of pictures of that size."""
    rows: list[Tensor] = []
    for stride, sides in zip(STRIDES, _SIZES, strict=True):
        cells = size // stride
        at = (torch.arange(cells) + 0.5) / cells
        y, x = torch.meshgrid(at, at, indexing="ij")
        centre = torch.stack([x, y], dim=-1).view(-1, 1, 2).expand(-1, PER_CELL, 2)
        side = torch.tensor(sides).view(1, PER_CELL, 1).expand(cells * cells, PER_CELL, 2)
        rows.append(torch.cat([centre, side], dim=-1).reshape(-1, 4))
    return torch.cat(rows)


def overlaps(these: Tensor, those: Tensor) -> Tensor:
    """Return intersections over unions of boxes (..., n, 4) and (..., m, 4)."""
    low = torch.maximum(_low(these)[..., :, None, :], _low(those)[..., None, :, :])
    high = torch.minimum(_high(these)[..., :, None, :], _high(those)[..., None, :, :])
    common = (high - low).clamp_min(0).prod(dim=-1)
    whole = these[..., 2:].prod(dim=-1)[..., :, None] + those[..., 2:].prod(dim=-1)[..., None, :] - common
    return common / whole.clamp_min(1e-12)


def matched(boxes: Tensor, classes: Tensor, defaults: Tensor) -> tuple[Tensor, Tensor]:
    """Return the class and the box that each default box is to find.

    The class (n, anchors) is 0 for none and else one above it.

    Things are `boxes` (n, things, 4) of `classes` (n, things), -1 for none.
    """
    found = overlaps(defaults.expand(len(boxes), -1, -1), boxes).masked_fill((classes < 0)[:, None, :], -1.0)
    best, thing = found.max(dim=2)
    # The default box that overlaps a thing most is that thing's, however little it does.
    most = found.argmax(dim=1)
    rows = torch.arange(len(boxes), device=boxes.device)
    for place in range(boxes.shape[1]):
        there = classes[:, place] >= 0
        thing[rows[there], most[there, place]] = place
        best[rows[there], most[there, place]] = 1.0
    target = torch.where(best >= _OVERLAP, classes.gather(1, thing) + 1, 0)
    return target, boxes.gather(1, thing[..., None].expand(-1, -1, 4))


def encoded(boxes: Tensor, defaults: Tensor) -> Tensor:
    """Return the offsets from default boxes to boxes of one shape; sides over zero."""
    centre = (boxes[..., :2] - defaults[..., :2]) / defaults[..., 2:] / _VARIANCES[0]
    sides = (boxes[..., 2:].clamp_min(1e-6) / defaults[..., 2:]).log() / _VARIANCES[1]
    return torch.cat([centre, sides], dim=-1)


def decoded(offsets: Tensor, defaults: Tensor) -> Tensor:
    """The boxes that offsets lead to; the inverse of `encoded`."""
    centre = offsets[..., :2] * _VARIANCES[0] * defaults[..., 2:] + defaults[..., :2]
    return torch.cat([centre, (offsets[..., 2:] * _VARIANCES[1]).exp() * defaults[..., 2:]], dim=-1)


def _low(boxes: Tensor) -> Tensor:
    return boxes[..., :2] - boxes[..., 2:] / 2


def _high(boxes: Tensor) -> Tensor:
    return boxes[..., :2] + boxes[..., 2:] / 2


_NEGATIVES = 3  # for each box that matches a thing
_EPSILON = 1e-4


class Found(NamedTuple):
    """Predictions for each default box.

    Scores are (n, anchors, 1 + classes), none's first; offsets (n, anchors, 4).
    """

    scores: Tensor
    offsets: Tensor


class Normed(nn.Module):
    """Norm of each cell's channels to unit mean square, with gains; in FP32."""

    def __init__(self, channels: int, loudness: float) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(channels))
        self.epsilon = _EPSILON * loudness**2

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        wide = x.float()
        return wide * (wide.square().mean(dim=1, keepdim=True) + self.epsilon).rsqrt() * self.gain.view(1, -1, 1, 1)


class Detector(nn.Module):
    """Pictures (n, 3, size, size) of values 0 to 1 to what is `Found` in them."""

    anchors: Tensor

    def __init__(self, *, width: int = 12, size: int = PIXELS, loudness: float = 1.0) -> None:
        super().__init__()
        self.loudness = loudness
        self.fine = nn.Sequential(
            *_block(3, width, 2), *_block(width, 2 * width, 1), nn.MaxPool2d(2), *_block(2 * width, 2 * width, 1)
        )  # fmt: skip
        self.middle = nn.Sequential(*_block(2 * width, 4 * width, 2), *_block(4 * width, 4 * width, 1))
        self.coarse = nn.Sequential(*_block(4 * width, 4 * width, 2), *_block(4 * width, 4 * width, 1))
        channels = (2 * width, 4 * width, 4 * width)
        self.norms = nn.ModuleList(Normed(each, loudness) for each in channels)
        self.heads = nn.ModuleList(_head(each) for each in channels)
        self.register_buffer("anchors", anchors(size), persistent=False)

    def forward(self, pictures: Tensor) -> Found:
        """Scores and offsets of all default boxes, in the order of `anchors`."""
        fine = self.fine((pictures - 0.5) * self.loudness)
        middle = self.middle(fine)
        maps = (fine, middle, self.coarse(middle))
        rows = [head(norm(each)) for each, norm, head in zip(maps, self.norms, self.heads, strict=True)]
        flat = torch.cat([row.permute(0, 2, 3, 1).reshape(len(row), -1, 5 + len(CLASSES)) for row in rows], dim=1)
        return Found(flat[..., :-4], flat[..., -4:])


def detection_loss(found: Found, seen: Scenes, defaults: Tensor) -> Tensor:
    """Return SSD's loss in FP32: of class, and of matching boxes' offsets.

    It is a mean over these boxes. `defaults` are the detector's `anchors`. Of the boxes that match nothing, only the
    hardest count: in each picture three times as many as match.
    """
    target, boxes = matched(seen.boxes, seen.classes, defaults)
    matches = target > 0
    of_class = functional.cross_entropy(found.scores.float().flatten(0, 1), target.flatten(), reduction="none")
    of_class = of_class.view_as(target)
    hardness = of_class.detach().masked_fill(matches, -1.0)
    rank = hardness.argsort(dim=1, descending=True).argsort(dim=1)
    counted = matches | (rank < _NEGATIVES * matches.sum(dim=1, keepdim=True))
    offsets = encoded(boxes, defaults)[matches]
    of_box = functional.smooth_l1_loss(found.offsets.float()[matches], offsets, reduction="sum")
    return (of_class[counted].sum() + of_box) / matches.sum()


def _block(inputs: int, outputs: int, stride: int) -> tuple[nn.Module, nn.Module]:
    convolution = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
    nn.init.kaiming_normal_(convolution.weight)
    return convolution, nn.ReLU()


def _head(channels: int) -> nn.Conv2d:
    head = nn.Conv2d(channels, PER_CELL * (5 + len(CLASSES)), 3, padding=1)
    nn.init.normal_(head.weight, std=0.01)
    nn.init.zeros_(head.bias)  # pyright: ignore[reportArgumentType]
    return head


_DUPLICATE = 0.45  # of a box with a better one of the same class, from which on it is dropped; SSD's
_KEPT = 30  # boxes a picture and class that are looked at, the surest


def mean_average_precision(found: Found, seen: Scenes, defaults: Tensor) -> float:
    """Return the mean over classes of the area under precision by recall, 0 to 1.

    It is 0 where an output is not finite.

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
    """Return a picture's distinct boxes: how sure each is, and if it finds a thing."""
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
