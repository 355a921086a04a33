"""Pictures: convolutions, residual networks, vision transformers, self-supervision."""

import copy

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from benchmarks.trust.registry import healthy
from benchmarks.trust.toys import Block, batches, mlp, pictures
from benchmarks.trust.training import Training


def _classify(run: Training, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 160) -> None:
    batch = batches(*pictures(), size=16)

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        return F.cross_entropy(model(x), y)

    run.train(model, optimizer, loss, steps)


@healthy("cnn-batch-norm")
def cnn(run: Training) -> None:
    """A convolutional network with batch norm."""
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(16 * 9, 8),
    )  # fmt: skip
    _classify(run, model, torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9))


class Residual(nn.Module):
    """Two convolutions around which the input goes; `zero` lets the branch begin at nothing."""

    def __init__(self, width: int, *, zero: bool) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        if zero:
            nn.init.zeros_(self.norm2.weight)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        return torch.relu(x + self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x))))))


def _resnet(*, zero: bool) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        *(Residual(16, zero=zero) for _ in range(3)), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 8)
    )  # fmt: skip


@healthy("resnet")
def resnet(run: Training) -> None:
    """Three residual blocks, SGD with momentum and decay."""
    model = _resnet(zero=False)
    _classify(run, model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4))


@healthy("resnet-zero-branches", held_back=True)
def zero_branches(run: Training) -> None:
    """Residual branches whose last factor begins at zero."""
    model = _resnet(zero=True)
    _classify(run, model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))


@healthy("depthwise-cnn")
def depthwise(run: Training) -> None:
    """Depthwise and pointwise convolutions with group norm."""

    def pair(into: int, out: int) -> list[nn.Module]:
        return [
            nn.Conv2d(into, into, 3, padding=1, groups=into), nn.Conv2d(into, out, 1), nn.GroupNorm(4, out), nn.SiLU()
        ]  # fmt: skip

    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, stride=2), nn.SiLU(), *pair(16, 32), *pair(32, 32), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(32, 8),
    )  # fmt: skip
    _classify(run, model, torch.optim.AdamW(model.parameters(), lr=4e-3), 200)


class UNet(nn.Module):
    """Down once, up once, and a bridge between."""

    def __init__(self, into: int = 1, out: int = 1, width: int = 12) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(into, width, 3, padding=1), nn.GroupNorm(3, width), nn.ReLU())
        self.middle = nn.Sequential(nn.Conv2d(width, 2 * width, 3, stride=2, padding=1), nn.ReLU())
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.last = nn.Conv2d(2 * width, out, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """One value a pixel."""
        first = self.down(x)
        return self.last(torch.cat([first, self.up(self.middle(first))], dim=1))


@healthy("unet-dice", learns=0.7)
def unet(run: Training) -> None:
    """Segmentation with dice and cross entropy."""
    model = UNet()
    x, _ = pictures(noise=0.0)
    batch = batches(x + 0.2 * torch.randn_like(x), (x > 0.4).float(), size=16)

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        logits = model(x).float()
        p = logits.sigmoid()
        dice = 1 - (2 * (p * y).sum() + 1) / (p.sum() + y.sum() + 1)
        return dice + F.binary_cross_entropy_with_logits(logits, y)

    run.train(model, torch.optim.Adam(model.parameters(), lr=3e-3), loss, 160)


class ViT(nn.Module):
    """Patches of 3 x 3, a class token, two blocks."""

    def __init__(self, outputs: int = 8, width: int = 32) -> None:
        super().__init__()
        self.patch = nn.Conv2d(1, width, 3, stride=3)
        self.token, self.positions = nn.Parameter(torch.zeros(1, 1, width)), nn.Parameter(torch.zeros(1, 17, width))
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        h = self.patch(x).flatten(2).transpose(1, 2)
        h = torch.cat([self.token.expand(len(h), -1, -1), h], dim=1) + self.positions
        return self.head(self.norm(self.blocks(h))[:, 0])


@healthy("vit", held_back=True)
def vit(run: Training) -> None:
    """A vision transformer whose class token and positions begin at zero."""
    model = ViT()
    _classify(run, model, torch.optim.AdamW(model.parameters(), lr=2e-3), 180)


@healthy("super-resolution", learns=0.7)
def super_resolution(run: Training) -> None:
    """Pictures of twice the size by pixel shuffle, the difference to plain interpolation learned."""
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(),
        nn.Conv2d(16, 4, 3, padding=1), nn.PixelShuffle(2),
    )  # fmt: skip
    sharp = torch.sign(pictures(noise=0.0)[0])
    batch = batches(sharp, size=16)

    def loss(step: int) -> Tensor:
        (y,) = batch(step)
        small = F.avg_pool2d(y, 2)
        return F.l1_loss(F.interpolate(small, scale_factor=2, mode="bilinear") + model(small), y)

    run.train(model, torch.optim.Adam(model.parameters(), lr=3e-3), loss, 200)


def _views(x: Tensor) -> Tensor:
    """Another look at the same pictures: moved, mirrored, noisy."""
    x = x.roll(int(torch.randint(-1, 2, ())), -1)
    return (x.flip(-1) if torch.rand(()) < 0.5 else x) + 0.2 * torch.randn_like(x)


def _encoder() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, stride=2), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Flatten(),
        nn.Linear(32 * 9, 32),
    )  # fmt: skip


@healthy("simclr", learns=0.8)
def simclr(run: Training) -> None:
    """Two views of a picture are alike, all others are not."""
    model = nn.Sequential(_encoder(), nn.ReLU(), nn.Linear(32, 16))
    batch = batches(pictures(noise=0.2)[0], size=24)

    def loss(step: int) -> Tensor:
        (x,) = batch(step)
        z = F.normalize(model(torch.cat([_views(x), _views(x)])).float(), dim=-1)
        logits = z @ z.T / 0.2
        logits.fill_diagonal_(-1e4)
        return F.cross_entropy(logits, torch.arange(len(z)).roll(len(x)))

    run.train(model, torch.optim.Adam(model.parameters(), lr=2e-3), loss, 200)


@healthy("byol", held_back=True, learns=0.8)
def byol(run: Training) -> None:
    """A network predicts what its own moving average makes of another view."""
    online = nn.ModuleDict({"encoder": _encoder(), "predictor": mlp(32, 32, 32)})
    target = copy.deepcopy(online["encoder"]).requires_grad_(False)
    model = nn.ModuleDict({"online": online, "target": target})
    optimizer = torch.optim.AdamW(online.parameters(), lr=1e-3)
    batch = batches(pictures(noise=0.2)[0], size=24)

    def loss(step: int) -> Tensor:
        (x,) = batch(step)
        one, other = _views(x), _views(x)
        said = F.normalize(online["predictor"](online["encoder"](one)).float(), dim=-1)
        with torch.no_grad():
            wanted = F.normalize(target(other).float(), dim=-1)
        return 2 - 2 * (said * wanted).sum(dim=-1).mean()

    def follow(step: int) -> None:
        with torch.no_grad():
            for slow, fast in zip(target.parameters(), online["encoder"].parameters(), strict=True):
                slow.lerp_(fast, 0.03)

    run.train(model, optimizer, loss, 200, after=follow)


@healthy("clip-like", learns=0.8)
def clip_like(run: Training) -> None:
    """Pictures and captions meet in one space, at a temperature that is learned."""

    class Clip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.image, self.text = _encoder(), nn.EmbeddingBag(24, 32)
            self.temperature = nn.Parameter(torch.tensor(2.0))

        def forward(self, image: Tensor, text: Tensor) -> Tensor:
            i, t = F.normalize(self.image(image).float(), dim=-1), F.normalize(self.text(text).float(), dim=-1)
            return self.temperature.exp() * i @ t.T

    model = Clip()
    x, y = pictures(classes=24)
    batch = batches(x, y, size=64)

    def loss(step: int) -> Tensor:
        images, classes = batch(step)
        first = {int(c): i for i, c in reversed(list(enumerate(classes.tolist())))}
        chosen = torch.tensor(sorted(first.values()))
        logits = model(images[chosen], classes[chosen, None])
        labels = torch.arange(len(logits))
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2

    run.train(model, torch.optim.AdamW(model.parameters(), lr=2e-3), loss, 200)
