"""Small trainings of different kinds on made data, watched for real: what the rules and `diff` are held against."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import plimsoll as pl
from plimsoll.diagnosis import Finding, diagnose

STEPS = 25
Step = Callable[[int], None]


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (y.view(b, t, 4, c // 4).transpose(1, 2) for y in self.qkv(self.first(x)).chunk(3, dim=-1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.second(x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(32, 32), nn.Sequential(Block(32, True), Block(32, True))
        self.head = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(x))).flatten(0, 1)


class ViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch, self.blocks = nn.Linear(16, 32), nn.Sequential(Block(32, False), Block(32, False))
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.patch(x)).mean(dim=1))


class LSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell, self.head = nn.Embedding(32, 16), nn.LSTMCell(16, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        embedded, state, outputs = self.embed(x), None, []
        for t in range(x.shape[1]):
            state = self.cell(embedded[:, t], state)
            outputs.append(state[0])
        return self.head(torch.stack(outputs, dim=1)).flatten(0, 1)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2), nn.ReLU(), nn.Flatten(),
        nn.Linear(16 * 25, 10),
    )  # fmt: skip


def features(*shape: int) -> Callable[[], tuple[Tensor, Tensor]]:
    """Inputs whose class is where their mean is largest."""

    def batch() -> tuple[Tensor, Tensor]:
        x = torch.randn(16, *shape)
        return x, x.flatten(1)[:, :10].argmax(dim=1)

    return batch


def text() -> tuple[Tensor, Tensor]:
    x = (torch.arange(13) + torch.randint(0, 32, (8, 1))) % 32
    return x[:, :-1], x[:, 1:].flatten()


MODELS = {
    "mlp": (mlp, features(16)), "cnn": (cnn, features(1, 14, 14)), "vit": (ViT, features(9, 16)), "gpt": (GPT, text),
    "lstm": (LSTM, text),
}  # fmt: skip


def train(
    path: Path,
    name: str,
    precision: str,
    scale: float = 2.0**12,
    around: Callable[[nn.Module, int], object] = lambda model, step: None,
) -> Path:
    """A watched training; `around` is called with the model before each step."""
    make, batch = MODELS[name]
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=precision == "fp16")
    low = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    with pl.watch(model, optimizer, run=path, every=2):
        for step in range(STEPS):
            around(model, step)
            x, y = batch()
            with torch.autocast("cpu", dtype=low) if low else nullcontext():
                loss = nn.functional.cross_entropy(model(x).float(), y)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    return path


def seeded_mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))


def adamw(model: nn.Module, **arguments: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), **{"lr": 1e-3, **arguments})


def watched(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: Step, steps: int = 12
) -> list[Finding]:
    """The findings of a training, but for notes."""
    with pl.watch(model, optimizer, run=path, every=1, quiet=True):
        for at in range(steps):
            step(at)
    return [finding for finding in diagnose(path) if finding.severity != "info"]
