"""Memory of a training step, static and dynamic apart (X2), counted to the byte.

Counted on "meta", where a tensor has a shape, a dtype and a storage, and no values: so BERT-base at 64 texts of 128
tokens takes seconds, and the level casts as it does on a GPU, with no emulation to widen anything.

- Static: weights, gradients, masters and the optimizer's state, by their tensors after a step.
- Dynamic: what autograd keeps for the backward, by `saved_tensors_hooks`, each storage once, parameters left out. It is
  a constant (16-bit copies of the weights, statistics of norms) and so much for each sample: two batches give both.

What kernels need while they run, and what an allocator adds, is in neither. TF32 is a way to multiply: its memory is
FP32's.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from plimsoll.errors import MissingExtraError
from plimsoll.extras import install_line
from plimsoll.precision import Loop, prepare
from plimsoll.precision.weights.base import SixteenBitOptimizer

UNET_PARAMETERS = 7_703_497
CLASSES = 9
CATEGORIES = (1000, 7, 3, 12, 31, 2, 25, 26, 4, 3, 4, 23, 8, 12, 52, 22)  # the values of each categorical column
NUMBERS = 16  # numerical columns
_LEAST = 92  # the smallest picture that leaves a row after all convolutions without padding


class FeedForward(nn.Module):
    """Embedded categories and normed numbers through three layers: a number a row."""

    def __init__(self, widths: Sequence[int] = (1000, 500)) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(count, min(50, (count + 1) // 2)) for count in CATEGORIES)
        self.norm = nn.BatchNorm1d(NUMBERS)
        inputs = sum(min(50, (count + 1) // 2) for count in CATEGORIES) + NUMBERS
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise((inputs, *widths)):
            layers += [nn.Linear(before, after), nn.ReLU(), nn.BatchNorm1d(after)]
        self.layers = nn.Sequential(*layers, nn.Linear(widths[-1], 1))

    def forward(self, categories: Tensor, numbers: Tensor) -> Tensor:
        """Return the prediction for each row, (n,)."""
        embedded = [embed(categories[:, column]) for column, embed in enumerate(self.embeddings)]
        return self.layers(torch.cat([*embedded, self.norm(numbers)], dim=1)).squeeze(1)


class UNet(nn.Module):
    """The benchmark's UNet; `width`: channels of the first depth, doubled at each."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        widths = [width * 2**depth for depth in range(4)]
        self.down = nn.ModuleList(_block(before, after) for before, after in itertools.pairwise([3, *widths]))
        up = list(itertools.pairwise(widths[::-1]))
        self.rise = nn.ModuleList(nn.ConvTranspose2d(before, after, 2, stride=2) for before, after in up)
        self.up = nn.ModuleList(_block(before, after) for before, after in up)
        self.head = nn.Conv2d(width, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return each class's scores at each place of the middle, (n, 9, side, side)."""
        kept: list[Tensor] = []
        for depth, block in enumerate(self.down):
            x = block(nn.functional.max_pool2d(x, 2) if depth else x)
            kept.append(x)
        for rise, block, beside in zip(self.rise, self.up, kept[-2::-1], strict=True):
            x = rise(x)
            x = block(torch.cat([middle(beside, x.shape[-1]), x], dim=1))
        return self.head(x)


def _block(inputs: int, outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before in (inputs, outputs):
        layers += [nn.Conv2d(before, outputs, 3), nn.ReLU(), nn.BatchNorm2d(outputs)]
        nn.init.kaiming_normal_(layers[-3].weight)  # pyright: ignore[reportArgumentType]
    return nn.Sequential(*layers)


def middle(x: Tensor, side: int) -> Tensor:
    """The middle of so many places in both of the last dimensions."""
    start = (x.shape[-1] - side) // 2
    return x[..., start : start + side, start : start + side]


def side_of(pixels: int) -> int:
    """The side of what the UNet gives for pictures of so many pixels a side.

    >>> side_of(256)
    164
    """
    side = pixels
    for _ in range(3):
        side = (side - 4) // 2
    side -= 4
    for _ in range(3):
        side = side * 2 - 4
    return side


def bert(**sizes: Any) -> nn.Module:
    """Return transformers' BERT-base with a head for spans, of random weights.

    `sizes` are of its configuration. Attention is computed by separate products, as it was in the benchmark's time.
    """
    transformers = needed_transformers()
    config = transformers.BertConfig(attn_implementation="eager", **sizes)
    return transformers.BertForQuestionAnswering(config)


def needed_transformers() -> Any:
    """The package, or an error that names the extra it belongs to."""
    try:
        import transformers  # optional, and slow to import
    except ImportError as e:
        raise MissingExtraError(
            "lab amp: expected the package transformers, whose BERT is measured; got none. "
            f"Install it: {install_line('transformers')}"
        ) from e
    return transformers


def count(model: nn.Module) -> int:
    """Return the number of its parameters."""
    return sum(p.numel() for p in model.parameters())


_EFFECTS = 20  # the seed of the rule that tables follow, the same one for all seeds
_THINGS = 6  # discs in a scene
_KINDS = 8  # of spans that may be asked for
_CLS, _SEP = 101, 102  # of BERT's vocabulary
_FIRST_WORD = 1000  # below it are special tokens and characters


def make_rows(seed: int, step: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return categories (n, 16), numbers (n, 16), and targets: effects and noise."""
    generator, rule = _generator(seed, step), torch.Generator().manual_seed(_EFFECTS)
    categories = torch.stack([torch.randint(many, (size,), generator=generator) for many in CATEGORIES], dim=1)
    numbers = torch.randn(size, NUMBERS, generator=generator)
    target = 0.1 * torch.randn(size, generator=generator)
    for column, many in enumerate(CATEGORIES):
        target += 0.25 * torch.randn(many, generator=rule)[categories[:, column]]
    weights = torch.randn(NUMBERS, 4, generator=rule) / NUMBERS**0.5
    target += torch.tanh(numbers @ weights).sum(dim=1)
    return categories, numbers, target


def make_scenes(seed: int, step: int, size: int, pixels: int) -> tuple[Tensor, Tensor]:
    """Return pictures (n, 3, pixels, pixels), and the classes in their middles.

    The UNet gives scores for these places. Sky above ground, and discs of seven other classes before them, each class
    in a colour of its own, under noise.
    """
    generator = _generator(seed, step)
    y, x = torch.meshgrid(torch.arange(pixels), torch.arange(pixels), indexing="ij")
    horizon = pixels * (0.3 + 0.4 * torch.rand(size, 1, 1, generator=generator))
    classes = (y > horizon).long()
    for _ in range(_THINGS):
        across, down, radius = torch.rand(3, size, 1, 1, generator=generator)
        inside = (x - across * pixels).square() + (y - down * pixels).square() < (pixels * (0.05 + 0.12 * radius)) ** 2
        kind = torch.randint(2, CLASSES, (size, 1, 1), generator=generator)
        classes = torch.where(inside, kind, classes)
    colours = torch.randn(CLASSES, 3, generator=torch.Generator().manual_seed(_EFFECTS))
    pictures = colours[classes].permute(0, 3, 1, 2) + 0.5 * torch.randn(size, 3, pixels, pixels, generator=generator)
    return pictures, middle(classes, side_of(pixels)).contiguous()


def make_spans(seed: int, step: int, size: int, length: int, words: int) -> dict[str, Tensor]:
    """Return BERT's texts of `length` tokens, with a kind to find and its span.

    All other words are of other kinds. `words`: of the vocabulary.
    """
    generator = _generator(seed, step)
    kinds = torch.randint(_KINDS, (size, 1), generator=generator)
    many = (words - _FIRST_WORD) // _KINDS
    drawn = torch.randint(many, (size, length), generator=generator)
    others = (kinds + torch.randint(1, _KINDS, (size, length), generator=generator)) % _KINDS
    start = torch.randint(3, length - 6, (size, 1), generator=generator)
    end = start + torch.randint(5, (size, 1), generator=generator)
    places = torch.arange(length)
    tokens = _FIRST_WORD + torch.where((places >= start) & (places <= end), kinds, others) + drawn * _KINDS
    tokens[:, 0], tokens[:, 1:2], tokens[:, 2], tokens[:, -1] = _CLS, _FIRST_WORD + kinds, _SEP, _SEP
    kinds_of_text = (places > 2).long().expand(size, length).contiguous()
    return {
        "input_ids": tokens, "token_type_ids": kinds_of_text,
        "start_positions": start.squeeze(1), "end_positions": end.squeeze(1),
    }  # fmt: skip


def _generator(seed: int, step: int) -> torch.Generator:
    return torch.Generator().manual_seed(100_003 * seed + step)


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
        draw=make_rows, loss=_of_rows, batch=batch, rate=rate,
    )  # fmt: skip


def unet(batch: int, pixels: int, width: int = 64, rate: float = 1e-3) -> Network:
    """The UNet, on scenes."""
    return Network(
        name="unet", title="UNet", make=lambda: UNet(width), loss=_of_scenes, batch=batch, rate=rate,
        draw=lambda seed, step, size: make_scenes(seed, step, size, pixels),
    )  # fmt: skip


def spans(batch: int, length: int, rate: float = 3e-5, **sizes: Any) -> Network:
    """Return BERT-base for spans, on texts of `length` tokens; `sizes`: its own."""
    return Network(
        name="bert", title="BERT-base for spans", make=lambda: bert(**sizes), loss=_of_spans, batch=batch, rate=rate,
        draw=lambda seed, step, size: make_spans(seed, step, size, length, sizes.get("vocab_size", WORDS)),
    )  # fmt: skip


def published() -> tuple[Network, Network, Network]:
    """Return the networks at the benchmark's sizes.

    512 rows, 8 pictures of 256 x 256, 64 texts of 128 tokens.
    """
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
    """Return the mean of two FP32 cross-entropies: the span's first and last token."""
    texts = {name: batch[name] for name in ("input_ids", "token_type_ids")}
    found = model(**texts)
    begins = nn.functional.cross_entropy(found.start_logits.float(), batch["start_positions"])
    return (begins + nn.functional.cross_entropy(found.end_logits.float(), batch["end_positions"])) / 2


_BATCHES = (16, 32)  # FP8 products pad to multiples of 16 rows, where none are padded
_GIBI = 2.0**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Bytes of a network's training step at a level.

    `fixed`: what is kept for the backward whatever the batch. `per_sample`: what is kept for each sample; `wide`: the
    part of it that has 4 bytes a value or more.
    """

    weights: int
    gradients: int
    masters: int
    state: int
    fixed: int
    per_sample: int
    wide: int

    @property
    def static(self) -> int:
        """Bytes that stay from step to step."""
        return self.weights + self.gradients + self.masters + self.state

    def dynamic(self, batch: float) -> float:
        """Return the bytes kept from the forward to the backward of so many samples."""
        return self.fixed + self.per_sample * batch

    def total(self, batch: float) -> float:
        """Both."""
        return self.static + self.dynamic(batch)

    def batch_at(self, times: float) -> float:
        """The batch at which the dynamic memory is so many times the static one."""
        return (times * self.static - self.fixed) / self.per_sample


def footprint(network: Network, level: str) -> Footprint:
    """The memory of the network's step at that level."""
    with torch.device("meta"):
        model = network.make()
    with prepare(model, network.optimizer(model), level) as loop:
        (few, few_wide), (many, many_wide) = (_kept(network, loop, batch) for batch in _BATCHES)
        static = _static(model, loop)
    more = _BATCHES[1] - _BATCHES[0]
    per_sample = (many - few) // more
    return Footprint(
        fixed=few - per_sample * _BATCHES[0], per_sample=per_sample, wide=(many_wide - few_wide) // more, **static
    )  # fmt: skip


def _kept(network: Network, loop: Loop, batch: int) -> tuple[int, int]:
    """Return the bytes that autograd keeps of a forward, and those in wide dtypes."""
    kept: list[Tensor] = []
    parameters = {_place(p) for p in loop.model.parameters()}
    inputs = moved(network.draw(0, 0, batch), "meta")
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x),
        _DropoutAsOnGpus(),
        loop.forward(),
    ):
        loss = network.loss(loop.model, inputs)
    activations = [x for x in kept if _place(x) not in parameters]
    loss.backward()
    return _bytes(activations), _bytes(x for x in activations if x.itemsize >= 4)


def _static(model: nn.Module, loop: Loop) -> dict[str, int]:
    """Return the bytes by purpose after a step of the optimizer."""
    gradients = _bytes(p.grad for p in model.parameters() if p.grad is not None)
    for optimizer in loop.optimizers:
        optimizer.step()
    masters = [
        x
        for optimizer in loop.optimizers
        if isinstance(optimizer, SixteenBitOptimizer)
        for pair in optimizer.pairs
        for x in pair.store.kept
    ]
    state = [
        x
        for optimizer in loop.optimizers
        for values in optimizer.state.values()
        for x in values.values()
        if isinstance(x, Tensor) and x.dim()
    ]
    return {
        "weights": _bytes(model.parameters()), "gradients": gradients, "masters": _bytes(masters),
        "state": _bytes(state),
    }  # fmt: skip


class _DropoutAsOnGpus(TorchFunctionMode):
    """Dropout as GPUs' kernel: it keeps a mask of bytes, not of the input's dtype."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given: dict[str, Any] = kwargs or {}
        if func is nn.functional.dropout and given.get("training", True):
            return torch.native_dropout(args[0], given.get("p", 0.5), True)[0]
        return func(*args, **given)


def _place(x: Tensor) -> int:
    """Return the storage itself, which views share; "meta" has no addresses."""
    return x.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]  # noqa: SLF001


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of all storages, each once, while they are alive together."""
    held = list(tensors)
    return sum({_place(x): x.untyped_storage().nbytes() for x in held}.values())


def gibibytes(count: float) -> str:
    """In words."""
    return f"{count / _GIBI:.2f} GiB"
