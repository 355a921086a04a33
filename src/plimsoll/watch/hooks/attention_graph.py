"""Attention in the autograd graph of a loss: which places see which, and what of the tokens is read."""

import contextlib
import itertools
import re
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor

from plimsoll.watch.hooks.autograd_graph import LAST, NEAREST, NLL, kept_tensor, nodes_behind, nodes_of, signed

_ATTENTION = re.compile(r"(ScaledDotProduct\w*|(Safe)?Softmax)Backward0")
_OF_BATCHES = re.compile(r"(Bmm|Baddbmm)Backward0")  # products of two batches of matrices
_OF_SCORES = re.compile(
    "(View|UnsafeView|ReshapeAlias|Squeeze|Unsqueeze|Expand|ToCopy|Clone|Mul|Div|Add|Sub|MaskedFill|Where)"
    r"Backward\d"
)
_OF_WEIGHTS = re.compile(
    "(View|UnsafeView|ReshapeAlias|Squeeze|Unsqueeze|Expand|ToCopy|Clone|Mul|Div|NativeDropout)"
    r"Backward\d"
)
_MIXES = re.compile(r"(\w*(Rnn|Lstm|Gru|Conv|Stack|Cum|Fft)\w*|ScaledDotProduct\w*|(Safe)?Softmax)Backward\d")
_ATTENTIONS = 2  # behind a loss whose weights or masks are read
_MASKED = -1e3  # that is added to a score: what is less leaves no weight


def attends_to_the_past(root: Tensor) -> Tensor | None:
    """Return whether each place attends to those before it alone, as a tensor; None without such attention."""
    for node in nodes_of([root]):
        kind, attention = type(node).__name__, cast("Any", node)
        with contextlib.suppress(AttributeError, RuntimeError):  # an earlier backward has freed them
            if kind.startswith("ScaledDotProduct"):
                mask = kept_tensor(attention, "_saved_attn_mask")
                if getattr(attention, "_saved_is_causal", False):
                    return torch.ones((), dtype=torch.bool)
            elif kind == "MaskedFillBackward0":
                mask = kept_tensor(attention, "_saved_mask")
            else:
                continue
            if isinstance(mask, Tensor) and mask.dim() > 1 and mask.shape[-1] == mask.shape[-2] > 1:
                corners = mask.detach()[..., 0, -1] != mask.detach()[..., -1, 0]
                return corners.all()
    return None


# An attention between the loss and a lookup of tokens mixes values of one place into what is put out at another. Its
# weights, or its mask, say whether a place sees the one after it. A decoder's attention to an encoder has other values.
def next_places_seen(root: Tensor) -> Iterator[tuple[Tensor, int, Tensor, Tensor]]:
    """Yield targets, the class that is left out, the tokens that are looked up, and whether attention sees the next.

    The tokens are rows by places. The last is the share of places at which it does, as a tensor.
    """
    for loss in itertools.islice(nodes_of([root]), NEAREST):
        if type(loss).__name__ not in NLL:
            continue
        behind = cast("list[Any]", list(nodes_behind([loss])))
        lookups = [node for node in behind if type(node).__name__ == "EmbeddingBackward0"]
        attentions = [node for node in behind if _ATTENTION.fullmatch(type(node).__name__)][:_ATTENTIONS]
        for attention in attentions if lookups else []:
            values = _values_of(attention, behind)
            before = set[object]() if values is None else set(nodes_behind([values]))
            with contextlib.suppress(AttributeError, RuntimeError):  # an earlier backward has freed them
                left_out = signed(cast("Any", loss)._saved_ignore_index)  # noqa: SLF001  (likewise)
                targets = kept_tensor(loss, "_saved_target")
                for lookup in lookups:
                    tokens = kept_tensor(lookup, "_saved_indices")
                    if targets is None or tokens is None or lookup not in before or tokens.dim() != 2:
                        continue
                    for rows in (tokens, tokens.T):  # either may be first
                        share = _next_seen(attention, rows.shape[1])
                        if share is not None:
                            flat = targets.reshape(-1) if rows is tokens else _transposed(targets, tokens.shape[1])
                            yield flat, left_out, rows, share


# A mask of the other convention lets attention read the padding and nothing else. Of all places of all queries only
# those of the first and the last query are read: under a causal mask, too, the last one sees all that is not hidden.
# What has mixed places before, a recurrence or another attention, may have brought all tokens to those that are read.
def places_read(root: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield tokens that are looked up, rows by places, and at which of these places attention reads something."""
    attentions = [node for node in nodes_of([root]) if _ATTENTION.fullmatch(type(node).__name__)]
    for attention in attentions[-_ATTENTIONS:]:  # the first ones of the forward
        with contextlib.suppress(AttributeError, RuntimeError):  # an earlier backward has freed them
            read = _first_and_last_read(attention)
            behind = [] if read is None else list(nodes_behind([attention]))[1:]
            if read is None or any(_MIXES.fullmatch(type(node).__name__) for node in behind):
                continue
            for lookup in [node for node in behind if type(node).__name__ == "EmbeddingBackward0"]:
                tokens = kept_tensor(lookup, "_saved_indices")
                for rows in (tokens, tokens.T) if tokens is not None and tokens.dim() == 2 else ():
                    if rows.shape[1] == read.shape[1] > 1 and len(rows) and not len(read) % len(rows):
                        yield rows, read[:: len(read) // len(rows)]  # of the first head


def _first_and_last_read(attention: Any) -> Tensor | None:
    """Return which places the first or the last query of each row and head reads; None where nothing says it."""
    if "Softmax" in type(attention).__name__:
        weights, least = kept_tensor(attention, "_saved_result"), 0.0
        weights = weights if _is_of_products(attention) else None
    else:
        weights = kept_tensor(attention, "_saved_attn_mask")
        weights = kept_tensor(attention, "_saved_attn_bias") if weights is None else weights
        least = 0.0 if weights is not None and weights.dtype == torch.bool else _MASKED
    if weights is None or weights.dim() < 3:
        return None
    ends = weights[..., :: max(weights.shape[-2] - 1, 1), :] > least
    return ends.any(dim=-2).reshape(-1, weights.shape[-1])


def _values_of(attention: Any, behind: list[Any]) -> Any:
    """Return the operation that made the values of an attention; None if it is not found."""
    if "Softmax" not in type(attention).__name__:
        return attention.next_functions[2][0]
    for product in behind:
        if _OF_BATCHES.fullmatch(type(product).__name__) and len(product.next_functions) == 2:
            weights, values = (maker for maker, _ in product.next_functions)
            for _ in range(LAST):  # through views, and a dropout
                if weights is attention:
                    return values
                if weights is None or not _OF_WEIGHTS.fullmatch(type(weights).__name__):
                    break
                weights = weights.next_functions[0][0]
    return None


def _transposed(targets: Tensor, rows: int) -> Tensor:
    """Return flat targets of places by rows as rows by places, flat."""
    return targets.reshape(-1, rows).T.reshape(-1) if targets.numel() % rows == 0 else targets.reshape(-1)


# The weights of all heads may be gigabytes: only those right above the diagonal are read.
def _next_seen(attention: Any, places: int) -> Tensor | None:
    """Return the share of places that see the one after them; None for another number of places."""
    if "Softmax" in type(attention).__name__:
        scores, least = kept_tensor(attention, "_saved_result"), 0.0
        if scores is None or not _is_of_products(attention):
            return None
    else:
        query, key = kept_tensor(attention, "_saved_query"), kept_tensor(attention, "_saved_key")
        if query is None or key is None or query.shape[-2] != places or key.shape[-2] != places:
            return None
        if attention._saved_is_causal:  # noqa: SLF001  (likewise)
            return None
        mask = kept_tensor(attention, "_saved_attn_mask")
        mask = kept_tensor(attention, "_saved_attn_bias") if mask is None else mask
        if mask is None:
            return torch.ones((), device=query.device)
        scores, least = mask, 0.0 if mask.dtype == torch.bool else _MASKED
        if scores.dim() > 1 and scores.shape[-2] == 1:  # of keys alone
            scores = scores.expand(*scores.shape[:-2], places, scores.shape[-1])
    if scores.dim() < 2 or scores.shape[-1] != places or scores.shape[-2] != places or places < 2:
        return None
    return (scores.diagonal(offset=1, dim1=-2, dim2=-1) > least).float().mean()


# A router's softmax, or a classifier's, is of the results of a layer: a product with weights, not one of batches.
def _is_of_products(softmax: Any) -> bool:
    """Return whether a softmax is of scores: products of queries and keys, scaled, masked, or with something added."""
    wave = [softmax]
    for _ in range(LAST):
        makers = [maker for node in wave for maker, _ in node.next_functions if maker is not None]
        if any(_OF_BATCHES.fullmatch(type(maker).__name__) for maker in makers):
            return True
        wave = [maker for maker in makers if _OF_SCORES.fullmatch(type(maker).__name__)]
    return False
