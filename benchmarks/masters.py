"""16-bit weights and their masters: the loss that they reach, the bytes that they take, the time of a step.

    python benchmarks/masters.py           a character-level language model, two seeds; some minutes
    python benchmarks/masters.py --quick   a smoke run

The text is the standard library's own source, so nothing is fetched. Every way starts from the same weights, sees the
same batches and takes the same AdamW; they differ in how weights are kept and written. The forward pass runs in the
dtype of the weights, the loss in float32.
"""

import argparse
import statistics
import string
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from _harness import Results, interleave
from torch import Tensor, nn

from plimsoll.precision import KahanWeights, MasterWeights, StochasticWeights

Optimizer = torch.optim.Optimizer
Make = Callable[[Optimizer], Optimizer]
FILES = ("typing", "argparse", "inspect", "ast", "datetime", "tarfile", "subprocess", "socket", "pickle", "threading")
CONTEXT, BATCH, WIDTH, LAYERS = 48, 16, 64, 2

WAYS: dict[str, tuple[torch.dtype, Make]] = {
    "fp32": (torch.float32, lambda o: o),
    "bf16 alone": (torch.bfloat16, lambda o: o),
    "bf16, full masters": (torch.bfloat16, lambda o: MasterWeights(o, compact=False)),
    "bf16, compact masters": (torch.bfloat16, lambda o: MasterWeights(o, compact=True)),
    "bf16-stochastic": (torch.bfloat16, StochasticWeights),
    "bf16-kahan": (torch.bfloat16, KahanWeights),
}


class Block(nn.Module):
    """Causal attention and a feed-forward part, norms first."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(2)])
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """The residual stream after both parts."""
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(batch, length, 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


class Characters(nn.Module):
    """A language model of printable characters; embedding and head share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(string.printable), WIDTH)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.position = nn.Parameter(torch.randn(CONTEXT, WIDTH) * 0.02)
        self.blocks = nn.Sequential(*[Block() for _ in range(LAYERS)])
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits of the character after each."""
        x = self.blocks(self.embedding(tokens) + self.position)
        return nn.functional.linear(self.norm(x), self.embedding.weight)


def text() -> Tensor:
    """The characters of some modules of the standard library, by their place in `string.printable`."""
    library = Path(sysconfig.get_paths()["stdlib"])
    joined = "".join((library / f"{name}.py").read_text(encoding="utf-8") for name in FILES)
    places = {character: place for place, character in enumerate(string.printable)}
    return torch.tensor([places[character] for character in joined if character in places])


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """The mean cross entropy of the next character, computed in float32."""
    logits = model(tokens[:, :-1]).float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def batches(data: Tensor, count: int, seed: int) -> list[Tensor]:
    """Passages of the text, at random places."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(data) - CONTEXT - 1, (count, BATCH), generator=generator)
    return list(data[starts.unsqueeze(-1) + torch.arange(CONTEXT + 1)])


def train(way: str, data: Tensor, steps: int, seed: int, lr: float) -> tuple[float, float]:
    """The loss on text that was held out, and the bytes of weights and what is kept beside them, a parameter."""
    dtype, make = WAYS[way]
    torch.manual_seed(seed)
    model = Characters().to(dtype)
    optimizer = make(torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1, betas=(0.9, 0.95)))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=lr, total_steps=steps, pct_start=0.1, cycle_momentum=False
    )
    split = len(data) * 9 // 10
    for tokens in batches(data[:split], steps, seed):
        optimizer.zero_grad()
        loss_of(model, tokens).backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        held_out = statistics.fmean(loss_of(model, tokens).item() for tokens in batches(data[split:], 60, 0))
    weights = sum(p.nbytes for p in model.parameters()) + getattr(optimizer, "nbytes", 0)
    return held_out, weights / sum(p.numel() for p in model.parameters())


def losses(steps: int, seeds: Sequence[int], lr: float) -> list[dict[str, object]]:
    """The table of losses, and of bytes."""
    data, rows = text(), []
    reference: list[float] = []
    for way in WAYS:
        found = [train(way, data, steps, seed, lr) for seed in seeds]
        reference = reference or [loss for loss, _ in found]
        above = [loss / base - 1 for (loss, _), base in zip(found, reference, strict=True)]
        rows.append(
            {
                "weights": way,
                "loss, held out": statistics.fmean(loss for loss, _ in found),
                "above fp32, %": 100 * statistics.fmean(above),
                "worst seed, %": 100 * max(above),
                "bytes a parameter": found[0][1],
            }
        )
    return rows


def step_times(parameters: int, rounds: int) -> list[dict[str, object]]:
    """The time of an AdamW step over that many parameters, gradients given in the weights' dtype."""

    def steps_of(way: str) -> Callable[[], object]:
        dtype, make = WAYS[way]
        torch.manual_seed(0)
        weights = [nn.Parameter(torch.randn(512, parameters // 16 // 512).to(dtype)) for _ in range(16)]
        for p in weights:
            p.grad = torch.randn(p.shape).to(dtype)
        return make(torch.optim.AdamW(weights, lr=1e-4, fused=True)).step

    timings = interleave({way: steps_of(way) for way in WAYS}, rounds=rounds)
    base = timings["fp32"]
    return [
        {"weights": way, "ms": t.median * 1e3, "of fp32": t.ratio(base), "spread": t.spread}
        for way, t in timings.items()
    ]


def options_from(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--parameters", type=int, default=1 << 23, help="of the optimizer's step that is timed")
    parser.add_argument("--quick", action="store_true", help="few steps and parameters")
    parser.add_argument("--out", type=Path, help="folder of the result files; default benchmarks/results")
    options = parser.parse_args(arguments)
    if options.quick:
        options.steps, options.seeds, options.parameters = 20, 1, 1 << 16
    return options


def main() -> None:
    """Trains and times, and writes the tables, unless it is a smoke run without a folder to write to."""
    options = options_from()
    torch.set_num_threads(min(2, torch.get_num_threads()))
    results = Results("master weights", "cpu")
    note = f"{options.steps} steps of AdamW, {options.seeds} seeds. Goal: within 1 % of fp32 at 4 bytes or less."
    results.add("Loss", note, losses(options.steps, range(options.seeds), options.lr))
    note = f"{options.parameters:,} parameters, fused AdamW, threads: {torch.get_num_threads()}."
    results.add("Time of a step", note, step_times(options.parameters, 3 if options.quick else 9))
    if options.out or not options.quick:
        results.write("masters", *([options.out] if options.out else []))


if __name__ == "__main__":
    main()
