"""What tests of plans share: a small transformer and its training, with the tensors that its run recorded; and runs
written from tensors.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import plimsoll as pl
from plimsoll.kernels import measure_into, new_bank
from plimsoll.runs import Batch, RunWriter, Scalars

Key = tuple[str, str]  # collection and name


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln1, self.attn, self.ln2 = nn.LayerNorm(width), Attention(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln1(x))
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class Transformer(nn.Module):
    def __init__(self, width: int = 32, vocabulary: int = 32) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocabulary, width), nn.Parameter(torch.randn(16, width) * 0.02)
        self.blocks = nn.ModuleList([Block(width) for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        h = self.tok(x) + self.pos
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


MULTIPLY = [f"blocks.{i}.{part}" for i in range(2) for part in ("attn.qkv", "attn.out", "up", "down")] + ["head"]


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    """Sequences that count on in steps of 1 to 3, modulo 32."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for _ in range(count):
        first = torch.randint(0, 32, (16, 1), generator=generator)
        stride = torch.randint(1, 4, (16, 1), generator=generator)
        sequence = (first + stride * torch.arange(17)) % 32
        found.append((sequence[:, :-1], sequence[:, 1:]))
    return found


def train(
    precision: object, steps: int, run: Path | None = None, every: int = 1
) -> tuple[list[float], dict[Key, list[Tensor]]]:
    """The losses; and with a run, every tensor of the modules that multiply, in order."""
    torch.manual_seed(0)
    model, tensors, losses = Transformer(), {}, []
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    watch = None if run is None else pl.watch(model, optimizer, run=run, every=every)
    handles = [] if run is None else [_noting(dict(model.named_modules())[name], name, tensors) for name in MULTIPLY]
    with pl.prepare(model, optimizer, precision) as loop:
        for x, y in batches(steps):
            with loop.forward():
                loss = F.cross_entropy(model(x).flatten(0, 1).float(), y.flatten())
            loop.step(loss)
            losses.append(loss.item())
    for handle in handles:
        handle.remove()
    if watch is not None:
        watch.close()
    return losses, tensors


def _noting(module: nn.Module, name: str, tensors: dict[Key, list[Tensor]]) -> object:
    def note(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        tensors.setdefault(("weights", name), []).append(module.weight.detach().clone())
        tensors.setdefault(("activations", name), []).append(args[0].detach().clone())
        output.register_hook(lambda g: tensors.setdefault(("gradients", name), []).append(g.clone()))

    return module.register_forward_hook(note)


def written(
    path: Path,
    steps: Sequence[Mapping[Key, Tensor]],
    *,
    fmt: str = "fp32",
    scale: float = 1.0,
    losses: Sequence[float] = (),
    **writer: object,
) -> Path:
    """A run that recorded these tensors (as stored: gradients carry the scale), and losses."""
    with RunWriter(path, flush_seconds=600, **writer) as run:
        for step, tensors in enumerate(steps):
            ids = np.array([run.series(collection, name, format=fmt) for collection, name in tensors])
            bank = new_bank(len(tensors))
            measure_into(list(tensors.values()), bank, list(range(len(tensors))), accumulate=False)
            scales = np.array([scale if "gradients" in collection else 1.0 for collection, _ in tensors])
            rows = bank.numpy()[: len(tensors)]
            run.write(Batch(step=step, rows=rows, index=np.arange(len(ids)), series=ids, scales=scales))
        for step, loss in enumerate(losses):
            run.write(Scalars(step=step, values={"loss": loss}))
    return path


def layers(
    sizes: Mapping[str, float], *, step: int = 0, activation: float = 1.0, weight: float = 2.0**-5
) -> dict[Key, Tensor]:
    """The series of linear layers whose gradients are normal with these deviations."""
    generator = torch.Generator().manual_seed(step)
    found: dict[Key, Tensor] = {}
    for name, size in sizes.items():
        normal = torch.randn(4, 64, 16, generator=generator)
        found["weights", f"{name}.weight"] = normal[0] * weight
        found["gradients", f"{name}.weight"] = normal[1] * size
        found["activations", f"{name}:input"] = normal[2] * activation
        found["activations", f"{name}:output"] = normal[2] * activation
        found["activation_gradients", f"{name}:output"] = normal[3] * size
    return found
