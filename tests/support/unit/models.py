"""Small models of many makes, each with an example, for whoever converts, audits or trains one.

`MODELS` maps a name to a function that makes a fresh `Case`; seeds are fixed. Examples are a tensor, a tuple or a
mapping of keyword arguments, as the model is called.
"""

import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (torch's custom)

import plimsoll as pl

# Of files that share them: torch.export takes a second or more for each model.
CONVERTED = pytest.mark.xdist_group("converted models")
CAPTURED = pytest.mark.xdist_group("captured models")


@dataclass(frozen=True)
class Case:
    model: nn.Module
    example: Any

    @property
    def call(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if isinstance(self.example, Tensor):
            return (self.example,), {}
        return ((), dict(self.example)) if isinstance(self.example, Mapping) else (tuple(self.example), {})


class MatmulMLP(nn.Module):
    """``x @ self.w``, `F.linear` by keywords, einsum, a bias added by hand."""

    def __init__(self, width: int = 32, hidden: int = 48, out: int = 16) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(width, hidden) * width**-0.5)
        self.b = nn.Parameter(torch.zeros(hidden))
        self.v = nn.Parameter(torch.randn(hidden, hidden) * hidden**-0.5)
        self.u = nn.Parameter(torch.randn(hidden, out) * hidden**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(x @ self.w + self.b)
        x = F.silu(F.linear(x, weight=self.v, bias=None))
        return torch.einsum("...h,ho->...o", x, self.u)


class Attention(nn.Module):
    """Heads split by hand; `fused` takes torch's attention, otherwise it is written out with its own 1/sqrt(d)."""

    def __init__(self, width: int, heads: int, *, fused: bool = True, causal: bool = True) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads, self.fused, self.causal = heads, fused, causal

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = (part.view(b, t, self.heads, d // self.heads).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        else:
            scores = (q @ k.transpose(-2, -1)) / (d // self.heads) ** 0.5
            if self.causal:
                later = torch.ones(t, t, dtype=torch.bool, device=x.device).triu(1)
                scores = scores.masked_fill(later, float("-inf"))
            y = scores.softmax(-1) @ v
        return self.out(y.transpose(1, 2).reshape(b, t, d))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, *, pre: bool, fused: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, fused=fused)
        self.up, self.down, self.dropout = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.Dropout(dropout)
        self.pre = pre

    def mlp(self, x: Tensor) -> Tensor:
        return self.dropout(self.down(F.gelu(self.up(x))))

    def forward(self, x: Tensor) -> Tensor:
        if self.pre:
            x = x + self.attention(self.norm1(x))
            return x + self.mlp(self.norm2(x))
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.mlp(x))


class GPT(nn.Module):
    """Tied or not, positions as a parameter; the loss inside where targets are given."""

    def __init__(self, vocabulary: int = 64, width: int = 32, layers: int = 2, length: int = 16, *, heads: int = 4,
                 tied: bool = False, pre: bool = True, fused: bool = True, dropout: float = 0.0) -> None:  # fmt: skip
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(length, width) * 0.02)
        made = [Block(width, heads, pre=pre, fused=fused, dropout=dropout) for _ in range(layers)]
        self.blocks, self.norm = nn.ModuleList(made), nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Any:
        x = self.tokens(tokens) + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten()), logits


class RMSNorm(nn.Module):
    """By hand, as many models write it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Gated(nn.Module):
    """A Llama-like block without attention: norms by hand, a gate, rotated halves."""

    def __init__(self, width: int = 32, hidden: int = 64, length: int = 16) -> None:
        super().__init__()
        self.norm, self.gate = RMSNorm(width), nn.Linear(width, hidden, bias=False)
        self.up, self.down = nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width, bias=False)
        angle = torch.arange(length)[:, None] * 100.0 ** -torch.linspace(0, 1, width // 2)[None]
        self.register_buffer("cos", torch.cat([angle.cos()] * 2, -1))
        self.register_buffer("sin", torch.cat([angle.sin()] * 2, -1))

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        x = x * self.cos[: x.shape[1]] + torch.cat((-b, a), -1) * self.sin[: x.shape[1]]
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class SelfAttention(nn.Module):
    """`nn.MultiheadAttention` behind a norm, on a residual path."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), nn.MultiheadAttention(width, heads, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.attention(y, y, y, need_weights=False)[0]


class Residual(nn.Module):
    """torchvision's basic block."""

    def __init__(self, inner: int, out: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inner, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.conv2, self.bn2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or inner != out:
            self.downsample = nn.Sequential(nn.Conv2d(inner, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += identity
        return self.relu(y)


class ResNet(nn.Module):
    """torchvision's, small: stem, four basic blocks, pooling, a classifier."""

    def __init__(self, classes: int = 10, width: int = 8) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width)
        self.relu, self.maxpool = nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        self.layer1 = nn.Sequential(Residual(width, width), Residual(width, width))
        self.layer2 = nn.Sequential(Residual(width, 2 * width, 2), Residual(2 * width, 2 * width))
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(2 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer2(self.layer1(x))
        return self.fc(torch.flatten(self.avgpool(x), 1))


def _double(inner: int, out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inner, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU(inplace=True),
        nn.Conv2d(out, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU(inplace=True),
    )  # fmt: skip


class UNet(nn.Module):
    """Two levels: pooling down, transposed convolutions up, skips by concatenation, a pixelwise loss."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.down1, self.down2, self.bottom = (
            _double(3, width),
            _double(width, 2 * width),
            _double(2 * width, 4 * width),
        )
        self.pool = nn.MaxPool2d(2)
        self.up2, self.dec2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2), _double(4 * width, 2 * width)
        self.up1, self.dec1 = nn.ConvTranspose2d(2 * width, width, 2, 2), _double(2 * width, width)
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        one = self.down1(x)
        two = self.down2(self.pool(one))
        y = self.bottom(self.pool(two))
        y = self.dec2(torch.cat([self.up2(y), two], 1))
        y = self.dec1(torch.cat([self.up1(y), one], 1))
        logits = self.head(y)
        return logits if mask is None else F.binary_cross_entropy_with_logits(logits, mask)


class HandLSTM(nn.Module):
    """A cell by hand, so many steps as the example has."""

    def __init__(self, inner: int = 16, width: int = 16, steps: int = 4) -> None:
        super().__init__()
        self.x, self.h, self.steps, self.width = nn.Linear(inner, 4 * width), nn.Linear(width, 4 * width), steps, width
        self.out = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        h, c = x.new_zeros(x.shape[0], self.width), x.new_zeros(x.shape[0], self.width)
        for step in range(self.steps):
            i, f, g, o = (self.x(x[:, step]) + self.h(h)).chunk(4, -1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
        return self.out(h)


class Regressor(nn.Module):
    """A mean squared error inside, of a tensor target."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.body(x), y)


class TwoLosses(nn.Module):
    """Two heads on one trunk, and a loss that sums theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 8), nn.Linear(32, 4)

    def forward(self, x: Tensor, labels: Tensor, target: Tensor) -> Tensor:
        h = F.gelu(self.trunk(x))
        return F.cross_entropy(self.a(h), labels) + 0.5 * F.mse_loss(self.b(h), target)


class DataDependent(nn.Module):
    """A branch on values: nothing that can be captured."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), Branching())

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return x * 2
        return x


def _tokens(vocabulary: int = 64, batch: int = 4, length: int = 16) -> dict[str, Tensor]:
    tokens = torch.randint(0, vocabulary, (batch, length + 1))
    return {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}


def _bert() -> Case:
    import transformers

    config = transformers.BertConfig(
        vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    ids = torch.randint(0, 96, (4, 12))
    example = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}
    return Case(transformers.BertForMaskedLM(config), example)


def _gpt2() -> Case:
    import transformers

    config = transformers.GPT2Config(
        vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=32, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, loss_type="ForCausalLM",
    )  # fmt: skip
    ids = torch.randint(0, 96, (4, 12))
    return Case(transformers.GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids.clone(), "use_cache": False})


def _rows(*shape: int) -> Tensor:
    return torch.randn(shape)


_MAKE: dict[str, Callable[[], Case]] = {
    "linear": lambda: Case(nn.Linear(32, 16), _rows(64, 32)),
    "sequential": lambda: Case(
        nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 16)), _rows(64, 32)
    ),
    "matmul": lambda: Case(MatmulMLP(), _rows(64, 32)),
    "pre_norm": lambda: Case(GPT(), _tokens()["tokens"]),
    "post_norm": lambda: Case(GPT(pre=False), _tokens()["tokens"]),
    "gpt": lambda: Case(GPT(), _tokens()),
    "gpt_by_hand": lambda: Case(GPT(fused=False), _tokens()),
    "tied": lambda: Case(GPT(tied=True), _tokens()),
    "gated": lambda: Case(Gated(), _rows(8, 16, 32)),
    "multihead": lambda: Case(SelfAttention(), _rows(8, 16, 32)),
    "encoder_layer": lambda: Case(
        nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, activation="gelu", batch_first=True), _rows(8, 16, 32)
    ),
    "resnet": lambda: Case(ResNet(), _rows(8, 3, 32, 32)),
    "unet": lambda: Case(UNet(), {"x": _rows(4, 3, 16, 16), "mask": torch.randint(0, 2, (4, 1, 16, 16)).float()}),
    "lstm": lambda: Case(HandLSTM(), _rows(64, 4, 16)),
    "regressor": lambda: Case(Regressor(), (_rows(64, 16), _rows(64, 4))),
    "two_losses": lambda: Case(TwoLosses(), (_rows(64, 16), torch.randint(0, 8, (64,)), _rows(64, 4))),
    "bert": _bert,
    "gpt2": _gpt2,
}


def _seeded(make: Callable[[], Case]) -> Callable[[], Case]:
    def made() -> Case:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            return make()

    return made


MODELS: dict[str, Callable[[], Case]] = {name: _seeded(make) for name, make in _MAKE.items()}


def converted(name: str) -> tuple[Case, nn.Module]:
    """Return a case of `MODELS` and its model, converted: a copy of what is converted once in a process."""
    return copy.deepcopy(_converted(name))


@functools.cache
def _converted(name: str) -> tuple[Case, nn.Module]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        case = MODELS[name]()
        return case, pl.unit.convert(case.model, case.example, seed=0)
