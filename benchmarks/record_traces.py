"""Records the gradient traces under benchmarks/traces: five small trainings in FP32, with fixed seeds.

    python benchmarks/record_traces.py [name ...] --out benchmarks/traces
    python benchmarks/record_traces.py --seed 100 --out FOLDER       others of the same kinds, to judge a rule by

- constant: a recurrent network says what comes after a text, at a constant learning rate, its loss summed over the
  batch. Gradients are stationary after the first steps, and vanish over time steps.
- bursty: two recurrent towers and a contrastive loss at a learned temperature, on pairs of views. Blank batches (views
  that are almost zero) come ten in a row at step 300, twenty at step 1,500, five at step 2,700: normalising an
  embedding that is almost zero multiplies its gradient, and only in the hidden part of the backward pass.
- drifting: a recurrent network learns values that grow 2^7 times over the training, as returns do while an agent
  learns, and then stay; its gradients grow with them.
- shrinking: a recurrent network learns what another one of its kind says, so that its error and its gradients fall
  over the whole training.
- heavy: a deep sigmoid network on targets with heavy tails: single batches are much harder than others, at any time.

Training itself is in FP32, so that what FP16 would have lost is in the record. Everything is computed with one thread.
"""

import argparse
import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from _traces import Population, Trace
from torch import Tensor, nn

from plimsoll import kernels

SYMBOLS = 192


class Recorder:
    """Counts a model's parameter gradients, and the gradients of its leaf modules' outputs, step by step."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.hidden: list[Tensor] = []
        self.rows: dict[str, list[np.ndarray]] = {"weights": [], "hidden": []}
        for module in model.modules():
            if not list(module.children()):
                module.register_forward_hook(self._follow)

    def _follow(self, _: nn.Module, __: object, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda gradient: self.hidden.append(gradient.detach()))

    def step(self) -> None:
        """Counts what this step's backward has left."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        for name, tensors in (("weights", gradients), ("hidden", self.hidden)):
            bank = kernels.new_bank(1)
            kernels.measure_into(tensors, bank, [0] * len(tensors))
            self.rows[name].append(bank.numpy()[0].copy())
        self.hidden.clear()

    def trace(self, name: str, about: str) -> Trace:
        """All steps so far."""
        found = {kind: Population.from_rows(np.stack(rows)) for kind, rows in self.rows.items()}
        return Trace(name=name, about=about, **found)


class Recurrent(nn.Module):
    """A plain recurrent network: its states, one for each place of [batch, time, inputs]."""

    def __init__(self, inputs: int, width: int, gain: float, bias: bool = True) -> None:
        super().__init__()
        self.read, self.carry = nn.Linear(inputs, width, bias=bias), nn.Linear(width, width, bias=bias)
        nn.init.orthogonal_(self.carry.weight, gain=gain)

    def forward(self, x: Tensor) -> Tensor:
        """All states, [batch, time, width]."""
        state, states = torch.zeros(x.shape[0], self.carry.in_features), []
        for now in self.read(x).unbind(dim=1):
            state = torch.tanh(now + self.carry(state))
            states.append(state)
        return torch.stack(states, dim=1)


class Towers(nn.Module):
    """Two encoders without biases, and the temperature at which their embeddings are compared."""

    def __init__(self, inputs: int = 8, width: int = 24) -> None:
        super().__init__()
        self.left, self.right = (Recurrent(inputs, width, gain=0.7, bias=False) for _ in range(2))
        self.left_out, self.right_out = (nn.Linear(width, 16, bias=False) for _ in range(2))
        self.log_scale = nn.Parameter(torch.tensor(math.log(10.0)))

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        """How alike each left one is to each right one."""
        a = nn.functional.normalize(self.left_out(self.left(left)[:, -1]), dim=1, eps=1e-30)
        b = nn.functional.normalize(self.right_out(self.right(right)[:, -1]), dim=1, eps=1e-30)
        return a @ b.T * self.log_scale.exp().clamp(max=100)


def text(generator: torch.Generator, symbols: int, length: int = 33, batch: int = 16) -> Iterator[Tensor]:
    """Batches of a random Markov text, in which few symbols follow each."""
    table = torch.softmax(4 * torch.randn(symbols, symbols, generator=generator), dim=-1)
    while True:
        tokens = torch.randint(symbols, (batch, 1), generator=generator)
        for _ in range(length - 1):
            nexts = torch.multinomial(table[tokens[:, -1]], 1, generator=generator)
            tokens = torch.cat([tokens, nexts], dim=1)
        yield tokens


def constant(seed: int, steps: int = 4000) -> Trace:
    """A reader of texts with a summed loss at a constant learning rate."""
    torch.manual_seed(seed + 1)
    model = nn.Sequential(nn.Embedding(SYMBOLS, 32), Recurrent(32, 32, gain=0.7), nn.Linear(32, SYMBOLS))
    recorder, batches = Recorder(model), text(torch.Generator().manual_seed(seed + 2), SYMBOLS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        tokens = next(batches)
        nn.functional.cross_entropy(model(tokens[:, :-1])[:, -1], tokens[:, -1], reduction="sum").backward()
        recorder.step()
        optimizer.step()
        optimizer.zero_grad()
    return recorder.trace("constant", "recurrent reader of 32 symbols, summed loss, AdamW 1e-3")


def bursty(seed: int, steps: int = 4000) -> Trace:
    """Two towers that meet runs of blank batches."""
    torch.manual_seed(seed + 3)
    model, generator = Towers(), torch.Generator().manual_seed(seed + 4)
    mixing = torch.randn(2, 8, 8, generator=generator) / 8**0.5
    recorder = Recorder(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    blank = {*range(300, 310), *range(1500, 1520), *range(2700, 2705)}
    for step in range(steps):
        loudness = 2.0**-16 if step in blank else 1.0
        seen, noise = (torch.randn(n, 24, 16, 8, generator=generator) for n in (1, 2))
        left, right = loudness * (seen @ mixing[:, None] + 0.7 * noise)
        likeness, pairs = model(left, right), torch.arange(24)
        loss = (nn.functional.cross_entropy(likeness, pairs) + nn.functional.cross_entropy(likeness.T, pairs)) / 2
        loss.backward()
        recorder.step()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return recorder.trace("bursty", "contrastive towers, blank batches in runs of 10, 20 and 5, clipped, AdamW 1e-3")


def drifting(seed: int, steps: int = 4000) -> Trace:
    """A recurrent network that learns growing values."""
    torch.manual_seed(seed + 5)
    model, generator = (
        nn.Sequential(Recurrent(4, 24, gain=0.7), nn.Linear(24, 1)),
        torch.Generator().manual_seed(seed + 6),
    )
    recorder = Recorder(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        x = torch.randn(16, 24, 4, generator=generator)
        values = x[:, -8:].sum(dim=(1, 2)).tanh() * 2.0 ** min(7 * step / 3000, 7)
        (model(x)[:, -1, 0] - values).square().mean().backward()
        recorder.step()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return recorder.trace("drifting", "recurrent network of 24 steps, values growing 2^7 times, clipped, AdamW 1e-3")


def shrinking(seed: int, steps: int = 4000) -> Trace:
    """A recurrent network that learns to be another one."""
    torch.manual_seed(seed + 7)
    teacher, model = (nn.Sequential(Recurrent(4, 16, gain=0.9), nn.Linear(16, 4)) for _ in range(2))
    generator = torch.Generator().manual_seed(seed + 8)
    recorder = Recorder(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=6e-3)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)
    for _ in range(steps):
        x = torch.randn(32, 24, 4, generator=generator)
        with torch.no_grad():
            values = 8 * teacher(x)[:, -1]
        (8 * model(x)[:, -1] - values).square().sum().backward()
        recorder.step()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return recorder.trace("shrinking", "recurrent network taught by another, summed squared error, Adam 6e-3 decaying")


def heavy(seed: int, steps: int = 4000) -> Trace:
    """A deep sigmoid network on targets with heavy tails."""
    torch.manual_seed(seed + 9)
    model, generator = _perceptron([32] * 10 + [1], nn.Sigmoid, gain=1.0), np.random.default_rng(seed + 10)
    weights = torch.from_numpy(generator.standard_normal(32)).float()
    recorder = Recorder(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        x = torch.from_numpy(generator.standard_normal((32, 32))).float()
        noise = torch.from_numpy(generator.standard_t(1.5, size=32)).float()
        (model(x)[:, 0] - torch.tanh(x @ weights) - noise).square().mean().backward()
        recorder.step()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return recorder.trace("heavy", "sigmoid network of ten layers, Student-t noise (1.5 degrees), clipped, AdamW 1e-3")


def _perceptron(widths: Sequence[int], activation: type[nn.Module], gain: float, bias: bool = True) -> nn.Sequential:
    """Linear layers with an activation between each two."""
    layers: list[nn.Module] = []
    for inside, outside in pairwise(widths):
        layers += [nn.Linear(inside, outside, bias=bias), activation()]
        nn.init.xavier_normal_(layers[-2].weight, gain=gain)  # type: ignore[arg-type]
    return nn.Sequential(*layers[:-1])


TRAININGS = (constant, bursty, drifting, shrinking, heavy)


def main() -> None:
    """Records the named traces, or all."""
    names = [training.__name__ for training in TRAININGS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(names)}; default all")
    parser.add_argument("--seed", type=int, default=0, help="added to all seeds; the committed traces have 0")
    parser.add_argument("--out", type=Path, help="folder to write to; nothing is written without")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for training in TRAININGS:
        if training.__name__ in (options.names or names):
            trace = training(options.seed)
            peak = np.log2(np.maximum(trace.weights.absmax, trace.hidden.absmax))
            print(f"{trace.name}: {len(trace):,} steps, largest gradient 2^{peak.min():.1f} to 2^{peak.max():.1f}")
            if options.out:
                path = trace.save(options.out)
                print(f"written: {path}, {path.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
