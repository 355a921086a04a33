"""The small detector: what its scenes show, its boxes, its loss, its score, and what loudness does to its gradients."""

import math

import pytest
import torch
from torch.nn import functional

from plimsoll.errors import ArgumentError
from plimsoll_lab.models.detector.model import (
    CLASSES,
    MOST,
    PER_CELL,
    STRIDES,
    Detector,
    Found,
    Scenes,
    anchors,
    decoded,
    detection_loss,
    encoded,
    held_out,
    matched,
    mean_average_precision,
    overlaps,
    scenes,
)
from tests.support.cases import each

# -- scenes ------------------------------------------------------------------------------------------------------------


def same(a: Scenes, b: Scenes) -> bool:
    return a.pictures.equal(b.pictures) and a.boxes.equal(b.boxes) and a.classes.equal(b.classes)


def test_scenes_follow_from_seed_and_step_and_held_out_ones_are_of_no_training() -> None:
    assert same(scenes(1, 7, 4), scenes(1, 7, 4)) and same(scenes(1, 7, 4).to("cpu"), scenes(1, 7, 4))
    assert not same(scenes(1, 7, 4), scenes(1, 8, 4)) and not same(scenes(1, 7, 4), scenes(2, 7, 4))
    assert not any(same(held_out(1, 4), scenes(1, step, 4)) for step in range(20))


def test_things_lie_in_the_picture_do_not_overlap_and_stand_first() -> None:
    seen = scenes(0, 0, 200)
    there = seen.classes >= 0
    assert set(seen.classes.unique().tolist()) == {-1, 0, 1, 2} and there[:, 0].all()
    assert set(there.sum(dim=1).tolist()) == {1, 2, MOST}
    assert (there[:, :-1].int() >= there[:, 1:].int()).all() and not seen.boxes[~there].any()
    boxes = seen.boxes[there]
    assert (boxes[:, :2] - boxes[:, 2:] / 2).min() >= 0 and (boxes[:, :2] + boxes[:, 2:] / 2).max() <= 1
    common = overlaps(seen.boxes, seen.boxes) - torch.eye(MOST)
    assert common.max() <= 1e-5


def test_a_picture_shows_its_things_where_their_boxes_are() -> None:
    seen, size = scenes(3, 0, 60, 128), 128
    for picture, boxes, classes in zip(seen.pictures, seen.boxes, seen.classes, strict=True):
        ground = picture.flatten(1).median(dim=1).values[:, None, None]
        differs = ((picture - ground).abs().amax(dim=0) > 0.25).float()
        everything = 0.0
        for box, kind in zip(boxes.tolist(), classes.tolist(), strict=True):
            if kind < 0:
                continue
            left, right = round((box[0] - box[2] / 2) * size), round((box[0] + box[2] / 2) * size)
            top, bottom = round((box[1] - box[3] / 2) * size), round((box[1] + box[3] / 2) * size)
            covered = differs[top:bottom, left:right]
            part = {"circle": math.pi / 4, "square": 1.0, "triangle": 0.5}[CLASSES[kind]]
            assert covered.mean().item() == pytest.approx(part, abs=0.08), CLASSES[kind]
            everything += covered.sum().item()
        assert everything >= 0.98 * differs.sum().item()  # and nothing elsewhere
    assert seen.pictures.shape == (60, 3, size, size) and seen.pictures.min() >= 0 and seen.pictures.max() <= 1


@each("size", [0, 16, 40])
def test_a_side_that_the_feature_maps_do_not_divide_is_refused(size: int) -> None:
    with pytest.raises(
        ArgumentError, match=f"expected a size that is a multiple of 16, and 32 or more; got size={size}"
    ):
        scenes(0, 0, 1, size)


# -- boxes -------------------------------------------------------------------------------------------------------------


def test_overlap_is_intersection_over_union() -> None:
    one, half, apart = [0.5, 0.5, 0.2, 0.2], [0.6, 0.5, 0.2, 0.2], [0.1, 0.1, 0.1, 0.1]
    found = overlaps(torch.tensor([one]), torch.tensor([one, half, apart]))
    assert found[0].tolist() == pytest.approx([1.0, 1 / 3, 0.0], abs=1e-5)


def test_anchors_are_in_the_order_of_the_outputs_and_offsets_lead_to_boxes_and_back() -> None:
    defaults = anchors(64)
    assert len(defaults) == PER_CELL * sum((64 // stride) ** 2 for stride in STRIDES)
    assert defaults[0].tolist() == pytest.approx([2 / 64, 2 / 64, 10 / 64, 10 / 64])
    assert defaults[PER_CELL].tolist() == pytest.approx([6 / 64, 2 / 64, 10 / 64, 10 / 64])  # along the row first
    assert defaults[-1].tolist() == pytest.approx([56 / 64, 56 / 64, 27 / 64, 27 / 64])
    boxes = scenes(0, 0, 8).boxes[:, :1].expand(-1, len(defaults), -1)
    torch.testing.assert_close(decoded(encoded(boxes, defaults), defaults), boxes)
    # SSD's units: a tenth of a side, and a fifth of a side's logarithm.
    box, default = torch.tensor([[0.52, 0.5, 0.2, 0.2 * math.exp(0.2)]]), torch.tensor([[0.5, 0.5, 0.2, 0.2]])
    assert encoded(box, default)[0].tolist() == pytest.approx([1.0, 0.0, 0.0, 1.0], abs=1e-5)


def test_each_thing_has_its_best_box_and_all_that_overlap_it_by_half() -> None:
    defaults, seen = anchors(64), scenes(0, 0, 50)
    target, boxes = matched(seen.boxes, seen.classes, defaults)
    common = overlaps(defaults.expand(50, -1, -1), seen.boxes)
    for row in range(50):
        for place in range(MOST):
            mine = (target[row] > 0) & (boxes[row] == seen.boxes[row, place]).all(dim=1)
            if seen.classes[row, place] < 0:
                assert not mine.any()
                continue
            assert mine[common[row, :, place].argmax()] and mine[common[row, :, place] >= 0.5].all()
            assert (target[row][mine] == seen.classes[row, place] + 1).all()
            assert (common[row, :, place][mine] >= 0.5).sum() >= mine.sum() - 1
    assert 0.003 < (target > 0).float().mean() < 0.03  # nearly all match nothing


def test_a_thing_that_no_box_overlaps_by_half_has_one_still() -> None:
    box, kind = torch.tensor([[[0.5, 0.5, 0.9, 0.05]]]), torch.tensor([[2]])
    target, _ = matched(box, kind, anchors(64))
    assert (target > 0).sum() == 1 and target.max() == 3


# -- loss --------------------------------------------------------------------------------------------------------------


def test_the_loss_is_of_what_matches_and_of_three_times_as_many_hard_boxes() -> None:
    defaults, seen = anchors(32), scenes(0, 0, 2, 32)
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(2, len(defaults), 4, generator=generator)
    offsets = torch.randn(2, len(defaults), 4, generator=generator)
    target, boxes = matched(seen.boxes, seen.classes, defaults)
    total, matches = 0.0, 0
    for row in range(2):
        of_class = [
            functional.cross_entropy(s[None], t[None]).item() for s, t in zip(scores[row], target[row], strict=True)
        ]
        positive = [i for i, t in enumerate(target[row].tolist()) if t > 0]
        others = sorted((of_class[i] for i in range(len(of_class)) if i not in positive), reverse=True)
        total += sum(of_class[i] for i in positive) + sum(others[: 3 * len(positive)])
        wanted = encoded(boxes[row], defaults)
        total += sum(functional.smooth_l1_loss(offsets[row, i], wanted[i], reduction="sum").item() for i in positive)
        matches += len(positive)
    assert detection_loss(Found(scores, offsets), seen, defaults).item() == pytest.approx(total / matches, rel=1e-5)
    half = detection_loss(Found(scores.half(), offsets.half()), seen, defaults)
    assert half.dtype is torch.float32


def test_most_boxes_have_no_gradient() -> None:
    torch.manual_seed(0)
    model, seen = Detector(width=4), scenes(0, 0, 4)
    found = model(seen.pictures)
    for part in found:
        part.retain_grad()
    detection_loss(found, seen, model.anchors).backward()
    target, _ = matched(seen.boxes, seen.classes, model.anchors)
    moved = found.scores.grad.abs().amax(dim=-1) > 0
    assert moved[target > 0].all() and moved.sum() == 4 * (target > 0).sum()
    assert ((found.offsets.grad.abs().amax(dim=-1) > 0) == (target > 0)).all()


# -- loudness ----------------------------------------------------------------------------------------------------------


def test_loudness_changes_gradients_of_activations_and_nothing_else() -> None:
    results = []
    for loudness in (1.0, 2.0**10):
        torch.manual_seed(0)
        model, seen = Detector(width=4, loudness=loudness), scenes(0, 0, 2)
        inner: list[torch.Tensor] = []
        model.middle[0].register_full_backward_hook(lambda _m, _i, out, inner=inner: inner.append(out[0]))
        loss = detection_loss(model(seen.pictures), seen, model.anchors)
        loss.backward()
        results.append((loss.detach(), [p.grad for p in model.parameters()], inner[0]))
    (loss, weights, inner), (loud_loss, loud_weights, loud_inner) = results
    # Powers of two: but for the square root's rounding everything is the same.
    torch.testing.assert_close(loud_loss, loss)
    for one, other in zip(weights, loud_weights, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(loud_inner * 2.0**10, inner, rtol=1e-4, atol=1e-8)
    assert inner.abs().max() > 0


# -- score -------------------------------------------------------------------------------------------------------------


def truth_told(seen: Scenes, defaults: torch.Tensor) -> Found:
    """What a detector would say that knows everything."""
    target, boxes = matched(seen.boxes, seen.classes, defaults)
    scores = functional.one_hot(target, 1 + len(CLASSES)).float() * 10
    return Found(scores, torch.where((target > 0)[..., None], encoded(boxes, defaults), 0.0))


def test_the_truth_scores_one_and_each_error_costs() -> None:
    seen = scenes(0, 0, 20)
    defaults = anchors(64)
    reported = truth_told(seen, defaults)
    assert mean_average_precision(reported, seen, defaults) == pytest.approx(1.0)
    wrong = Found(reported.scores.roll(1, dims=-1), reported.offsets)
    assert mean_average_precision(wrong, seen, defaults) < 0.05
    shifted = Found(reported.scores, reported.offsets + torch.tensor([8.0, 0.0, 0.0, 0.0]))  # nearly a box's width
    assert mean_average_precision(shifted, seen, defaults) < 0.2
    blind = Found(reported.scores * 0, reported.offsets)
    assert mean_average_precision(blind, seen, defaults) < 0.3
    broken = Found(reported.scores * math.nan, reported.offsets)
    assert mean_average_precision(broken, seen, defaults) == 0.0


def test_average_precision_by_hand() -> None:
    # One class, two things, three boxes by sureness: right, wrong, right: 1/2 * 1 + 1/2 * 2/3; duplicates do not count.
    boxes = torch.tensor([[[0.2, 0.2, 0.2, 0.2], [0.7, 0.7, 0.2, 0.2]]])
    seen = Scenes(pictures=torch.zeros(1, 3, 64, 64), boxes=boxes, classes=torch.tensor([[0, 0]]))
    defaults = torch.tensor([[0.2, 0.2, 0.2, 0.2], [0.2, 0.8, 0.1, 0.1], [0.7, 0.7, 0.2, 0.2], [0.21, 0.2, 0.2, 0.2]])
    scores = torch.full((1, 4, 4), -20.0)
    scores[0, :, 1] = torch.tensor([4.0, 3.0, 2.0, 3.5])
    scores[..., 0] = 0.0
    found = Found(scores, torch.zeros(1, 4, 4))
    assert mean_average_precision(found, seen, defaults) == pytest.approx(0.5 + 0.5 * 2 / 3)
