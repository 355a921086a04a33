"""Small models and made-up data that several kinds share."""

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn


def mlp(*widths: int, act: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    """Linear layers with an activation between them."""
    layers: list[nn.Module] = []
    for into, out in pairwise(widths):
        layers += [nn.Linear(into, out), act()]
    return nn.Sequential(*layers[:-1])


def clusters(features: int = 16, classes: int = 10, spread: float = 0.6, count: int = 1024) -> tuple[Tensor, Tensor]:
    """Points around one centre for each class, and their classes."""
    centres = torch.randn(classes, features)
    y = torch.randint(classes, (count,))
    return centres[y] + spread * torch.randn(count, features), y


def surface(features: int = 8, count: int = 1024, noise: float = 0.1) -> tuple[Tensor, Tensor]:
    """Points and a smooth function of them."""
    x = torch.randn(count, features)
    a, b = torch.randn(features, 3) / features**0.5, torch.randn(3, 1)
    return x, torch.sin(2 * x @ a) @ b + noise * torch.randn(count, 1)


def pictures(classes: int = 8, size: int = 12, count: int = 512, noise: float = 0.7) -> tuple[Tensor, Tensor]:
    """Grey pictures, each a smooth one of its class, moved a little, with noise; and their classes."""
    coarse = torch.randn(classes, 1, 4, 4)
    smooth = F.interpolate(coarse, size=(size, size), mode="bicubic")
    y = torch.randint(classes, (count,))
    shifts = torch.randint(-1, 2, (count,)).tolist()
    moved = torch.stack([smooth[c].roll(s, -1) for c, s in zip(y.tolist(), shifts, strict=True)])
    return moved + noise * torch.randn(count, 1, size, size), y


def batches(*tensors: Tensor, size: int = 32) -> Callable[[int], tuple[Tensor, ...]]:
    """A batch for each step, drawn at random."""

    def of(step: int) -> tuple[Tensor, ...]:
        chosen = torch.randint(len(tensors[0]), (size,))
        return tuple(t[chosen] for t in tensors)

    return of


def counting(vocabulary: int = 32, length: int = 16, count: int = 512) -> tuple[Tensor, Tensor]:
    """Sequences that count on in steps of 1 to 3, and the same one token later."""
    first, stride = torch.randint(vocabulary, (count, 1)), torch.randint(1, 4, (count, 1))
    tokens = (first + stride * torch.arange(length + 1)) % vocabulary
    return tokens[:, :-1], tokens[:, 1:]


class Attention(nn.Module):
    """Self-attention with four heads."""

    def __init__(self, width: int, *, causal: bool = False) -> None:
        super().__init__()
        self.causal = causal
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        b, t, c = x.shape
        q, k, v = (y.view(b, t, 4, c // 4).transpose(1, 2) for y in self.qkv(x).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(y.transpose(1, 2).reshape(b, t, c))


class Block(nn.Module):
    """A transformer block, its norms before the branches or after the sums."""

    def __init__(self, width: int, *, causal: bool = False, post: bool = False) -> None:
        super().__init__()
        self.post = post
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, causal=causal)
        self.mlp = mlp(width, 4 * width, width, act=nn.GELU)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        if self.post:
            x = self.norm1(x + self.attention(x))
            return self.norm2(x + self.mlp(x))
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """Tokens in, logits of each position out, or of the whole where it is a classifier."""

    def __init__(
        self,
        vocabulary: int = 32,
        width: int = 32,
        depth: int = 2,
        *,
        outputs: int = 32,
        causal: bool = True,
        post: bool = False,
        pooled: bool = False,
    ) -> None:
        super().__init__()
        self.pooled = pooled
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(64, width)
        self.blocks = nn.ModuleList([Block(width, causal=causal, post=post) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        h = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        for block in self.blocks:
            h = block(h)
        h = self.norm(h)
        return self.head(h.mean(dim=1) if self.pooled else h)


def token_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Cross entropy over all positions."""
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())
