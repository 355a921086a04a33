"""What unit scaling costs, and whether a learning rate carries over width.

    python benchmarks/unit.py                   both, on this machine's CPU; some minutes
    python benchmarks/unit.py --only cost       a feed-forward block: compiled and eager, beside torch's and the peer's
    python benchmarks/unit.py --only transfer   the best learning rate at widths 64 to 512, unit-scaled and plain
    python benchmarks/unit.py --device cuda     the cost on a GPU
    python benchmarks/unit.py --quick           a smoke run

Cost: forward and backward of Linear, GELU, Linear (four times as wide between), paired and interleaved. "plain" is
torch's; "unit" is `plimsoll.unit.nn`'s with its defaults; "unit-scaling" is Graphcore's library, with its functions in
the same order. The goal: compiled, at most 1.02 times plain. torch's compiler is given the whole block in every case.

Transfer: a transformer of two layers on the standard library's own text trains at every width for a fixed number of
steps with Adam; the learning rate of the lowest final loss (mean of the last tenth, mean of the seeds) is the best.
"""

import argparse
import math
import string
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from _harness import Results, Timing, interleave
from torch import Tensor, nn

from plimsoll.unit import nn as unn, optim as uoptim

Step = Callable[[], object]
GOAL = 1.02
FILES = ("typing", "argparse", "inspect", "ast", "datetime", "tarfile", "subprocess", "socket", "pickle", "threading")
CONTEXT, BATCH, HEADS, LAYERS = 32, 8, 4, 2


def plain_block(width: int) -> nn.Module:
    """Of torch's modules."""
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


def unit_block(width: int) -> nn.Module:
    """The same of unit-scaled modules."""
    return nn.Sequential(unn.Linear(width, 4 * width), unn.GELU(), unn.Linear(4 * width, width))


def peer_block(width: int) -> nn.Module | None:
    """The same of the unit-scaling package's; None where it is not installed."""
    try:
        import unit_scaling as uu
    except ImportError:
        return None
    return nn.Sequential(uu.Linear(width, 4 * width, bias=True), uu.GELU(), uu.Linear(4 * width, width, bias=True))


def step_of(block: nn.Module, x: Tensor, compiled: bool) -> Step:
    """Forward and backward of a block, with gradients of its input and of all parameters."""
    call = torch.compile(block, fullgraph=True) if compiled else block
    x = x.clone().requires_grad_()
    gradient = torch.randn_like(x)

    def step() -> None:
        for leaf in (x, *block.parameters()):
            leaf.grad = None
        call(x).backward(gradient)

    return step


def cost_rows(shapes: Sequence[tuple[int, int]], device: str, rounds: int) -> list[dict[str, object]]:
    """One row for each shape, mode and block."""
    rows = list[dict[str, object]]()
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    for tokens, width in shapes:
        x = torch.randn(tokens, width, device=device, dtype=dtype)
        blocks = {"plain": plain_block(width), "unit": unit_block(width), "unit-scaling": peer_block(width)}
        made = {name: block.to(device, dtype) for name, block in blocks.items() if block is not None}
        for compiled in (True, False):
            torch.compiler.reset()
            calls = {name: step_of(block, x, compiled) for name, block in made.items()}
            timings = interleave(calls, device=device, rounds=rounds, sample_seconds=0.05)
            rows += [_cost_row(tokens, width, compiled, name, t, timings["plain"]) for name, t in timings.items()]
    return rows


def _cost_row(tokens: int, width: int, compiled: bool, name: str, t: Timing, plain: Timing) -> dict[str, object]:
    return {
        "block": name, "mode": "compiled" if compiled else "eager", "tokens": tokens, "width": width,
        "ms": t.median * 1e3, "of plain": f"{t.ratio(plain):.3f}", "spread": t.spread,
    }  # fmt: skip


class Characters(nn.Module):
    """A language model of printable characters, in unit-scaled modules or in torch's."""

    def __init__(self, width: int, unit: bool) -> None:
        super().__init__()
        made = unn if unit else nn
        settings = {"dropout": 0.0, "batch_first": True, "norm_first": True, "activation": "gelu"}
        layer = made.TransformerEncoderLayer(width, HEADS, 4 * width, **settings)
        self.unit, self.embedding = unit, made.Embedding(len(string.printable), width)
        self.position = made.Embedding(CONTEXT, width)
        self.layers = made.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.norm = made.LayerNorm(width)
        self.head = unn.LinearReadout(width, len(string.printable)) if unit else nn.Linear(width, len(string.printable))
        if not unit:
            for table in (self.embedding, self.position):
                nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits of the character after each."""
        places = torch.arange(tokens.shape[1])
        if self.unit:
            x = (self.embedding(tokens) + self.position(places)) * math.sqrt(0.5)
        else:
            x = self.embedding(tokens) + self.position(places)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.norm(self.layers(x, mask, is_causal=True)))


def text() -> Tensor:
    """The characters of some modules of the standard library, by their place in `string.printable`."""
    library = Path(sysconfig.get_paths()["stdlib"])
    joined = "".join((library / f"{name}.py").read_text(encoding="utf-8") for name in FILES)
    places = {character: place for place, character in enumerate(string.printable)}
    return torch.tensor([places[character] for character in joined if character in places])


def final_loss(width: int, unit: bool, lr: float, steps: int, seed: int, data: Tensor) -> float:
    """The mean loss of the last tenth of a training; Inf where it diverged."""
    torch.manual_seed(seed)
    model = Characters(width, unit)
    optimizer = uoptim.Adam(model, lr=lr) if unit else torch.optim.Adam(model.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10) * (1 - step / steps))
    cross_entropy = unn.CrossEntropyLoss() if unit else nn.CrossEntropyLoss()
    generator = torch.Generator().manual_seed(seed)
    losses = list[float]()
    for _ in range(steps):
        starts = torch.randint(len(data) - CONTEXT - 1, (BATCH, 1), generator=generator)
        batch = data[starts + torch.arange(CONTEXT + 1)]
        optimizer.zero_grad()
        loss = cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    tail = losses[-max(1, steps // 10) :]
    found = sum(tail) / len(tail)
    return found if math.isfinite(found) else math.inf


def transfer_rows(
    widths: Sequence[int], rates: dict[bool, Sequence[float]], steps: int, seeds: int
) -> list[dict[str, object]]:
    """One row for each kind of model and width: the loss at every rate, and the best rate."""
    data, rows = text(), list[dict[str, object]]()
    for unit in (True, False):
        narrow: float | None = None
        for width in widths:
            losses = [
                sum(final_loss(width, unit, lr, steps, seed, data) for seed in range(seeds)) / seeds
                for lr in rates[unit]
            ]
            best = rates[unit][losses.index(min(losses))]
            narrow = narrow or best
            carried = losses[rates[unit].index(narrow)]
            rows.append({
                "model": "unit" if unit else "plain", "width": width, "best rate": f"{best:.4g}",
                "loss there": min(losses), "loss at the narrowest's rate": carried,
                "losses": " ".join(f"{lr:.4g}:{loss:.2f}" for lr, loss in zip(rates[unit], losses, strict=True)),
            })  # fmt: skip
            print(rows[-1], flush=True)
    return rows


def options_from(arguments: Iterable[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--only", choices=("cost", "transfer"))
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--note", default="", help="a word on the machine's state, for the tables")
    parser.add_argument("--quick", action="store_true", help="small blocks, few rounds")
    parser.add_argument("--out", type=Path, help="folder of the result files; default benchmarks/results")
    return parser.parse_args(None if arguments is None else list(arguments))


def add_cost(results: Results, options: argparse.Namespace) -> None:
    """The table of the block's times."""
    shapes = [(64, 64)] if options.quick else [(512, 256), (512, 768), (2048, 512)]
    if options.device == "cuda" and not options.quick:
        shapes = [(8192, 1024), (8192, 4096)]
    rows = cost_rows(shapes, options.device, 3 if options.quick else options.rounds)
    note = f"Forward + backward, medians of interleaved rounds. Goal: compiled, at most {GOAL} of plain. {options.note}"
    results.add("A feed-forward block", note.strip(), rows)
    if options.device == "cpu":
        results.add(
            "The same on a GPU", "`--device cuda` measures it.", [{"device": "cuda", "of plain": "not measured yet"}]
        )


def add_transfer(results: Results, options: argparse.Namespace) -> None:
    """The table of the best learning rates."""
    widths = (16, 32) if options.quick else (64, 128, 256, 512)
    count = 2 if options.quick else 5
    rates = {True: [2.0**k for k in range(-4, 1)][:count], False: [2.0**k for k in range(-10, -5)][:count]}
    note = f"{options.steps} steps, {options.seeds} seed(s), Adam. Rates are powers of two. {options.note}".strip()
    results.add(
        "The best learning rate",
        note,
        transfer_rows(widths, rates, 5 if options.quick else options.steps, options.seeds),
    )


def main() -> None:
    """Measures and writes the tables, unless it is a smoke run without a folder to write to."""
    options = options_from()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    parts = {"cost": ("unit scaling: its cost", "unit", add_cost)}
    if options.device == "cpu":
        parts["transfer"] = ("unit scaling: learning rates over width", "unit-transfer", add_transfer)
    for name, (title, stem, add) in parts.items():
        if options.only in (None, name):
            results = Results(title, options.device)
            add(results, options)
            if options.out or not options.quick:
                results.write(stem, *([options.out] if options.out else []))


if __name__ == "__main__":
    main()
