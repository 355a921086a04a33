"""A language model of characters in FP8 with no loss scale: unit-scaled it trains as in FP32; plain, FP16 loses it."""

import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import plimsoll as pl
from plimsoll.unit import functional as U  # noqa: N812

TEXT = torch.frombuffer(bytearray(Path(F.__file__).read_bytes()), dtype=torch.uint8).clamp(max=127).long()
WIDTH, LENGTH, STEPS, MICRO_BATCHES = 64, 32, 60, 2048
RUNS = Path(tempfile.mkdtemp())


class Plain(nn.Module):
    """Of the last characters before it, what comes next."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(128, WIDTH)
        self.up, self.down = nn.Linear(4 * WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.readout = nn.Linear(WIDTH, 128, bias=False)

    def forward(self, characters: Tensor) -> Tensor:
        """The scores of the next character."""
        return self.readout(self.down(F.gelu(self.up(self.embed(characters).unfold(1, 4, 1).flatten(2)))))

    def loss(self, scores: Tensor, targets: Tensor) -> Tensor:
        """One of many micro-batches' share of the mean over all."""
        return F.cross_entropy(scores.flatten(0, 1), targets.flatten()) / MICRO_BATCHES


class Unit(Plain):
    """The same at unit scale. Its loss need not be divided: its gradient is at unit scale over any number of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = pl.unit.nn.Embedding(128, WIDTH)
        self.up = pl.unit.nn.Linear(4 * WIDTH, 4 * WIDTH, bias=False)
        self.down = pl.unit.nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.readout = pl.unit.nn.LinearReadout(WIDTH, 128, bias=False)

    def forward(self, characters: Tensor) -> Tensor:
        """Likewise."""
        return self.readout(self.down(U.gelu(self.up(self.embed(characters).unfold(1, 4, 1).flatten(2)))))

    def loss(self, scores: Tensor, targets: Tensor) -> Tensor:
        """The mean."""
        return U.cross_entropy(scores.flatten(0, 1), targets.flatten())


def trained(make: type[Plain], precision: str) -> float:
    """The mean of the last losses, in nats a character."""
    torch.manual_seed(0)
    model = make()
    if make is Unit:
        optimizer: torch.optim.Optimizer = pl.unit.optim.AdamW(model, lr=0.5)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-8 / MICRO_BATCHES)
    scaler = pl.scaling.StaticScaler(1.0, device="cpu") if precision == "amp-fp16" else None
    losses = []
    with pl.prepare(model, optimizer, precision, scaler=scaler, watch=RUNS / f"{make.__name__}-{precision}") as loop:
        for _ in range(STEPS):
            at = torch.randint(len(TEXT) - LENGTH - 1, (32, 1)) + torch.arange(LENGTH + 1)
            with loop.forward():
                loss = model.loss(model(TEXT[at][:, :-1]), TEXT[at][:, 4:])
            loop.step(loss)
            losses.append(loss.item())
    return sum(losses[-10:]) / 10 * (1 if make is Unit else MICRO_BATCHES)


ends = {(m, p): trained(m, p) for m, p in [(Plain, "fp32"), (Plain, "amp-fp16"), (Unit, "fp32"), (Unit, "fp8-unit")]}
for (made, precision), end in ends.items():
    print(f"{made.__name__:<6}{precision:<10}{end:.3f} nats a character")
print("Found in FP16:", *(f.rule for f in pl.diagnose(RUNS / "Plain-amp-fp16") if f.severity == "alarm"))
assert ends[Plain, "amp-fp16"] > 1.1 * ends[Plain, "fp32"]
assert ends[Unit, "fp8-unit"] < 1.02 * ends[Unit, "fp32"]
