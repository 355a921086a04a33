"""Twenty sound trainings of different kinds, watched for real: none may raise an alarm; faults put into real ones."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import plimsoll as pl
from plimsoll.diagnosis import diagnose

STEPS = 25


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
KINDS = [(name, precision, 0) for name in MODELS for precision in ("fp32", "bf16", "fp16")]
KINDS += [("mlp", "fp16", 1), ("gpt", "fp16", 1), ("vit", "fp16", 2), ("cnn", "fp16", 3), ("gpt", "fp32", 4)]


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


@pytest.mark.parametrize(("name", "precision", "seed"), KINDS)
def test_a_sound_training_is_no_alarm(name: str, precision: str, seed: int, tmp_path: Path) -> None:
    torch.manual_seed(seed)
    found = diagnose(train(tmp_path / "run", name, precision))
    assert [str(f) for f in found if f.severity == "alarm"] == []


def test_there_are_twenty() -> None:
    assert len(KINDS) == 20


@pytest.mark.parametrize("name", ["mlp", "gpt"])
def test_a_scale_far_too_low_is_named_in_a_real_training(name: str, tmp_path: Path) -> None:
    findings = diagnose(train(tmp_path / "run", name, "fp16", scale=2.0**-16))
    alarms = {f.rule: f.since_step for f in findings if f.severity == "alarm"}
    assert alarms["underflow-high"] <= 4 and alarms["scale-low"] <= 4


def test_a_layer_that_dies_in_a_real_training_is_named(tmp_path: Path) -> None:
    def kill(model: nn.Module, step: int) -> None:
        if step == 10:
            model[0].bias.data.fill_(-1e3)

    dead = [f for f in diagnose(train(tmp_path / "run", "mlp", "fp32", around=kill)) if f.rule == "dead-layer"]
    assert {f.where[0] for f in dead} == {"1:output", "0.weight"} and {f.since_step for f in dead} == {10}


def test_an_operation_that_makes_infinities_in_a_real_training_is_named(tmp_path: Path) -> None:
    def break_it(model: nn.Module, step: int) -> None:
        if step == 12:
            model[2].weight.data[0] = 1e6  # FP16 overflows in this layer's output

    findings = diagnose(train(tmp_path / "run", "mlp", "fp16", around=break_it))
    first = next(f for f in findings if f.rule == "nonfinite" and f.severity == "alarm")
    assert first.evidence["first_seen_in"] == "activations 2:output" and first.since_step == 12
