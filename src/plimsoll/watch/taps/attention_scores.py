"""Largest attention score of each head, where fused attention hides its scores.

Every call of `scaled_dot_product_attention` in an eager forward is heard. Where activations are due, the scores of a
few rows are computed once more from queries and keys: Q K^T by the call's scale, masked as it is. What is recorded is
the largest score of each head and sample, as activations of the module that calls, under "MODULE:scores". The attention
itself stays the kernel that it is. Compiled code is not heard.
"""

import contextlib
import functools
import math
import threading
import weakref
from collections.abc import Callable, Generator
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils import _python_dispatch as dispatch

from plimsoll.watch.thread_casts import without_rounding

_C = cast("Any", torch)._C  # noqa: SLF001  (it has DisableTorchFunction, which torch offers nowhere else)
SIDE = "scores"  # of a module, as "input" and "output" are
_ROWS = 32  # queries of each head and sample that are looked at, evenly spread


class Listener(Protocol):
    """Taps that hear of attention."""

    def attends(self, query: Tensor, key: Tensor, rest: dict[str, Any]) -> None:
        """Attention is about to be computed."""
        ...


_listeners: "weakref.WeakSet[Listener]" = weakref.WeakSet()
_lock = threading.Lock()
_NAMES = ("value", "attn_mask", "dropout_p", "is_causal")


def listen(listener: Listener) -> None:
    """Tell a listener of every attention from now on."""
    with _lock:
        _listeners.add(listener)
        if not hasattr(functional.scaled_dot_product_attention, "plimsoll_original"):
            functional.scaled_dot_product_attention = _heard(functional.scaled_dot_product_attention)


def end(listener: Listener) -> None:
    """Remove a listener; with the last one torch is restored, unless wrapped since."""
    with _lock:
        _listeners.discard(listener)
        original = getattr(functional.scaled_dot_product_attention, "plimsoll_original", None)
        if original is not None and not len(_listeners):
            functional.scaled_dot_product_attention = original


def _heard(original: Callable[..., Tensor]) -> Any:
    @functools.wraps(original)
    def scaled_dot_product_attention(query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not torch.compiler.is_compiling():
            for listener in list(_listeners):
                listener.attends(query, key, {**dict(zip(_NAMES, args, strict=False)), **kwargs})
        return original(query, key, *args, **kwargs)

    scaled_dot_product_attention.plimsoll_original = original  # type: ignore[attr-defined]
    return scaled_dot_product_attention


@torch.no_grad()
def largest_scores(query: Tensor, key: Tensor, rest: dict[str, Any]) -> Tensor | None:
    """Return the largest score by head and sample, in float32; None without scores.

    Args:
        query: (..., L, E).
        key: (..., S, E); fewer heads than the query's with `enable_gqa`.
        rest: The call's other arguments by name: attn_mask, is_causal, scale, enable_gqa.
    """
    rows = query.shape[-2]
    if not rows or not key.shape[-2] or not query.numel():
        return None
    chosen = torch.linspace(0, rows - 1, min(_ROWS, rows), device=query.device).round().long()
    q, k = query.detach()[..., chosen, :].float(), key.detach().float()
    if rest.get("enable_gqa") and q.shape[-3] != k.shape[-3]:
        k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)
    scale = rest.get("scale")
    with _as_written(q.device.type):
        scores = (q @ k.mT) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
        largest = _masked(scores, chosen, rest, rows).amax((-2, -1)).reshape(-1)
        return largest[largest > -math.inf]


@contextlib.contextmanager
def _as_written(kind: str) -> Generator[None]:
    """Compute in the dtypes of the operands, hidden from every mode."""
    # Under autocast, or an emulation of it, the product would be rounded to 16 bits. In FP16 it overflows where the
    # attention does not: the kernel adds up in FP32, and scales before it rounds.
    with contextlib.ExitStack() as stack:
        if torch.amp.is_autocast_available(kind):
            stack.enter_context(torch.autocast(kind, enabled=False))
        stack.enter_context(without_rounding())
        stack.enter_context(_C.DisableTorchFunction())
        stack.enter_context(cast("Any", dispatch)._disable_current_modes())  # noqa: SLF001
        yield


def _masked(scores: Tensor, chosen: Tensor, rest: dict[str, Any], rows: int) -> Tensor:
    mask = rest.get("attn_mask")
    if rest.get("is_causal"):
        return scores.masked_fill(torch.arange(scores.shape[-1], device=scores.device) > chosen[:, None], -math.inf)
    if not isinstance(mask, Tensor):
        return scores
    mask = mask.detach()[..., chosen, :] if mask.shape[-2] == rows else mask.detach()
    return scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask.float()
