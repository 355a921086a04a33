"""The three networks with their data, optimizer and sizes: what is counted, timed and trained of each."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from plimsoll_lab.experiments.amp import data
from plimsoll_lab.experiments.amp.models import FeedForward, UNet, bert

Batch = Sequence[Tensor] | Mapping[str, Tensor]
WORDS = 30_522  # of BERT-base's vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """A network of the benchmark at some size.

    - `make`: the model. `draw`: a batch of so many samples, of a seed and a step. `loss`: of the model and a batch.
    - `batch`: the samples of a step. `rate`: Adam's learning rate.
    """

    name: str
    title: str
    make: Callable[[], nn.Module]
    draw: Callable[[int, int, int], Batch]
    loss: Callable[[nn.Module, Batch], Tensor]
    batch: int
    rate: float = 1e-3

    def optimizer(self, model: nn.Module, rate: float | None = None) -> torch.optim.Optimizer:
        """Adam, as in the benchmark; its two moments are part of what memory holds."""
        return torch.optim.Adam(model.parameters(), lr=self.rate if rate is None else rate)


def feed_forward(batch: int, widths: tuple[int, ...] = (1000, 500), rate: float = 3e-3) -> Network:
    """Embeddings and three linear layers, on rows of a table."""
    return Network(
        name="feed-forward", title="feed-forward with embeddings", make=lambda: FeedForward(widths),
        draw=data.make_rows, loss=_of_rows, batch=batch, rate=rate,
    )  # fmt: skip


def unet(batch: int, pixels: int, width: int = 64, rate: float = 1e-3) -> Network:
    """The UNet, on scenes."""
    return Network(
        name="unet", title="UNet", make=lambda: UNet(width), loss=_of_scenes, batch=batch, rate=rate,
        draw=lambda seed, step, size: data.make_scenes(seed, step, size, pixels),
    )  # fmt: skip


def spans(batch: int, length: int, rate: float = 3e-5, **sizes: Any) -> Network:
    """BERT-base with a head for spans, on texts of so many tokens; `sizes`: of its configuration."""
    return Network(
        name="bert", title="BERT-base for spans", make=lambda: bert(**sizes), loss=_of_spans, batch=batch, rate=rate,
        draw=lambda seed, step, size: data.make_spans(seed, step, size, length, sizes.get("vocab_size", WORDS)),
    )  # fmt: skip


def published() -> tuple[Network, Network, Network]:
    """At the sizes of the benchmark's own code: 512 rows, 8 pictures of 256 x 256, 64 texts of 128 tokens."""
    return feed_forward(512), unet(8, 256), spans(64, 128)


def moved(batch: Batch, device: str) -> Batch:
    """The batch on a device."""
    if isinstance(batch, Mapping):
        return {name: x.to(device) for name, x in batch.items()}
    return [x.to(device) for x in batch]


def _of_rows(model: nn.Module, batch: Any) -> Tensor:
    categories, numbers, target = batch
    return nn.functional.mse_loss(model(categories, numbers).float(), target)


def _of_scenes(model: nn.Module, batch: Any) -> Tensor:
    pictures, classes = batch
    return nn.functional.cross_entropy(model(pictures).float(), classes)


def _of_spans(model: nn.Module, batch: Any) -> Tensor:
    """The mean of two cross-entropies, in FP32: of where the span begins and of where it ends."""
    texts = {name: batch[name] for name in ("input_ids", "token_type_ids")}
    found = model(**texts)
    begins = nn.functional.cross_entropy(found.start_logits.float(), batch["start_positions"])
    return (begins + nn.functional.cross_entropy(found.end_logits.float(), batch["end_positions"])) / 2
