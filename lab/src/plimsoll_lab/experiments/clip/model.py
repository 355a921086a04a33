"""A small CLIP (Radford et al. 2021): a transformer for pictures, one for captions, and a contrastive loss.

Three things make its numbers lie where those of large trained networks lie. None of them changes what it computes, or
how well it learns; all of them matter to FP16:

- *Loud activations.* Normed activations are multiplied by 2^11, as large networks' activations lie far above 1. What
  follows is linear, ReLU or normalised, so that the factor cancels in the output, and gradients of activations are
  2^-11 times as large.
- *The mean over a large batch.* CLIP's loss is a mean over 32,768 pairs. A device that holds 32 of them reports their
  mean, as training scripts do; of the gradient of the whole mean its part is 2^-10 of its own mean's.
- *Patches count by direction only*: their embeddings are normalised, with an epsilon of 1e-8. The gradient of a patch
  is divided by its brightness, and by 1e-8 if it is black.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from plimsoll_lab.experiments.clip.data import LENGTH, PIXELS, VOCABULARY

PATCH = 8
GLOBAL_BATCH = 32_768
EPSILON = 1e-8


class Embed(nn.Module):
    """The linear map from a patch's pixels; a module, so that a watch sees the gradient that comes back to it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, 3 * PATCH**2))

    def forward(self, cut: Tensor) -> Tensor:
        """The last dimension, of pixels, becomes `width`."""
        return functional.linear(cut, self.weight)


class Patches(nn.Module):
    """Cuts pictures into patches and embeds each: a direction of length sqrt(width), whatever its brightness."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = Embed(width)

    def forward(self, pictures: Tensor) -> Tensor:
        """The embedded patches (batch, patches, width)."""
        size, side = len(pictures), PIXELS // PATCH
        cut = pictures.view(size, 3, side, PATCH, side, PATCH).permute(0, 2, 4, 1, 3, 5).reshape(size, side**2, -1)
        seen: Tensor = self.embed(cut)
        return functional.normalize(seen, dim=-1, eps=EPSILON) * math.sqrt(seen.shape[-1])


class Block(nn.Module):
    """Attention and a two-layer network, each behind a norm and beside a residual."""

    def __init__(self, width: int, heads: int, gain: float, layers: int) -> None:
        super().__init__()
        self.heads, self.gain = heads, gain
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = _linear(width, 3 * width), _linear(width, width, layers)
        self.up, self.down = _linear(width, 4 * width), _linear(4 * width, width, layers)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape, (batch, tokens, width)."""
        size, length, width = x.shape
        mixed = self.qkv(self.norm1(x) * self.gain)
        q, k, v = mixed.view(size, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        # Scores as without the gain, which both sides have.
        scale = 1.0 / (self.gain**2 * math.sqrt(width / self.heads))
        attended = functional.scaled_dot_product_attention(q, k, v, scale=scale)
        x = x + self.out(attended.transpose(1, 2).reshape(size, length, width))
        return x + self.down(functional.relu(self.up(self.norm2(x) * self.gain)))


class Tower(nn.Module):
    """Blocks over tokens of one kind; their mean, normed and projected, is the feature."""

    def __init__(self, tokens: int, width: int, layers: int, heads: int, gain: float) -> None:
        super().__init__()
        self.gain = gain
        self.places = nn.Parameter(torch.randn(tokens, width))
        self.norm_before = nn.LayerNorm(width)
        self.blocks = nn.Sequential(*[Block(width, heads, gain, layers) for _ in range(layers)])
        self.norm, self.project = nn.LayerNorm(width), _linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """The feature (batch, width) of embedded tokens (batch, tokens, width)."""
        found = self.blocks(self.norm_before(x + self.places) * self.gain)
        return self.project(self.norm(found.mean(dim=1)) * self.gain)


class Clip(nn.Module):
    """Pictures and captions, as features that are close where they belong together."""

    def __init__(self, *, width: int = 64, layers: int = 2, heads: int = 4, gain: float = 2.0**11) -> None:
        super().__init__()
        self.patches = Patches(width)
        self.words = nn.Embedding(len(VOCABULARY), width)
        self.image = Tower((PIXELS // PATCH) ** 2, width, layers, heads, gain)
        self.text = Tower(LENGTH, width, layers, heads, gain)
        self.temperature = nn.Parameter(torch.tensor(math.log(1 / 0.07)))  # CLIP's own beginning, as a logarithm

    def forward(self, pictures: Tensor, captions: Tensor) -> Tensor:
        """The similarity of each picture to each caption, times the learned temperature."""
        image, text = self.image(self.patches(pictures)), self.text(self.words(captions))
        image, text = functional.normalize(image, dim=-1), functional.normalize(text, dim=-1)
        return self.temperature.exp() * image @ text.T


def contrastive_loss(similarity: Tensor) -> Tensor:
    """Which caption belongs to each picture, and which picture to each caption: the mean over this device's pairs.

    Its gradient is this device's part of that of the mean over the whole batch.
    """
    pairs = torch.arange(len(similarity), device=similarity.device)
    both = [functional.cross_entropy(side, pairs, reduction="sum") for side in (similarity, similarity.T)]
    mean = (both[0] + both[1]) / (2 * len(similarity))
    part = mean * (len(similarity) / GLOBAL_BATCH)
    return mean.detach() + (part - part.detach())


def _linear(inputs: int, outputs: int, layers: int | None = None) -> nn.Linear:
    """Without a bias; of unit gain, or of GPT-2's for the ends of residual branches, whose sum then stays near 1."""
    made = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(made.weight, std=inputs**-0.5 / (1.0 if layers is None else math.sqrt(2 * layers)))
    return made
