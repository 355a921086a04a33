"""How answers are scored: exact match and F1 over tokens, by the rules of SQuAD (Rajpurkar et al. 2016).

F1 is the harmonic mean of precision and recall of the tokens, each counted as often as it occurs, in any order. What
SQuAD does to English before (lower case, no articles, no punctuation) is left out: to source code these matter.
"""

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from plimsoll_lab.experiments.bert.data import LONGEST_ANSWER


def exact(predicted: Sequence[int], truth: Sequence[int]) -> float:
    """1 where the answer is the truth, token by token, else 0."""
    return float(tuple(predicted) == tuple(truth))


def f1(predicted: Sequence[int], truth: Sequence[int]) -> float:
    """The harmonic mean of precision and recall; where one of both is empty, 1 if the other is too.

    >>> round(f1([1, 2, 3], [2, 3, 4, 5]), 4)  # 2 of 3 are right, 2 of 4 were found
    0.5714
    """
    if not predicted or not truth:
        return float(not predicted and not truth)
    shared = sum((Counter(predicted) & Counter(truth)).values())
    return 2 * shared / (len(predicted) + len(truth))


def best_spans(first: Tensor, last: Tensor, segments: Tensor) -> tuple[Tensor, Tensor]:
    """The first and the last token of each answer: of all spans of the context that are not too long, the best.

    `first` and `last` are scores (batch, length); a span's is the sum. Of equal ones the earliest counts; where scores
    are NaN, the context's first token.
    """
    length = first.shape[1]
    places = torch.arange(length)
    behind = places[None, :] - places[:, None]
    allowed = (behind >= 0) & (behind < LONGEST_ANSWER)
    context = segments.bool()
    allowed = allowed & context[:, :, None] & context[:, None, :]
    sums = (first.double()[:, :, None] + last.double()[:, None, :]).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    best = sums.masked_fill(~allowed, -torch.inf).flatten(1).argmax(dim=1)
    return best // length, best % length
