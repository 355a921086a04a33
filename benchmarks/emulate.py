"""What emulation costs a training step on a CPU: emulated FP16, native FP16, torch's CPU autocast, beside FP32.

    python benchmarks/emulate.py                     a transformer and a convolutional network, one thread
    python benchmarks/emulate.py --quick             a smoke run
    python benchmarks/emulate.py --only transformer  one of the two

The goal: an emulated FP16 step at most 2.5 times the FP32 step. Every contender trains its own copy of the model from
the same weights on the same batch; a sample is one step: forward, loss, backward, SGD. "amp" keeps FP32 weights and
casts by the lists; "half" is a model of FP16 weights. Native FP16 is far slower, and runs in a quarter of the rounds
(every sample of it beside FP32 samples of its own).
"""

import argparse
import contextlib
import copy
import itertools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from _harness import Results, interleave
from torch import Tensor, nn

import plimsoll as pl

Context = Callable[[], AbstractContextManager[object]]
Step = Callable[[], object]
BASE = "fp32"


class Transformer(nn.Module):
    """A language model of six layers, 256 wide."""

    def __init__(self, width: int = 256, layers: int = 6, tokens: int = 512) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(tokens, width), nn.Linear(width, tokens)
        settings = {"dropout": 0.0, "batch_first": True, "norm_first": True, "activation": "gelu"}
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(width, 4, 4 * width, **settings) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        """Logits, one row a token."""
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).flatten(0, 1)


class Convolutional(nn.Module):
    """Three blocks of convolution, batch norm and pooling."""

    def __init__(self, channels: Sequence[int] = (3, 32, 64, 128)) -> None:
        super().__init__()
        parts = list[nn.Module]()
        for before, after in itertools.pairwise(channels):
            convolution = nn.Conv2d(before, after, 3, padding=1)
            parts += [convolution, nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)]
        self.body, self.head = nn.Sequential(*parts), nn.Linear(channels[-1] * 16, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits, one row an image."""
        return self.head(self.body(x).flatten(1))


def problems(quick: bool) -> dict[str, tuple[nn.Module, Tensor, Tensor]]:
    """Name to model, inputs, classes."""
    generator = torch.Generator().manual_seed(0)
    batch, length, images = (1, 16, 2) if quick else (4, 64, 16)
    tokens = torch.randint(512, (batch, length), generator=generator)
    pictures = torch.randn(images, 3, 32, 32, generator=generator)
    return {
        "transformer": (Transformer(layers=1 if quick else 6), tokens, tokens.flatten()),
        "convolutional": (Convolutional(), pictures, torch.randint(10, (images,), generator=generator)),
    }


def autocast(dtype: torch.dtype) -> Context:
    """Torch's own, for the CPU."""
    return lambda: torch.autocast("cpu", dtype=dtype)


# Name to context, whether the model is half, and whether it is too slow for every round.
CONTENDERS: dict[str, tuple[Context, bool, bool]] = {
    BASE: (contextlib.nullcontext, False, False),
    "emulate fp16, amp": (lambda: pl.emulate("fp16"), False, False),
    "emulate fp16, half": (lambda: pl.emulate("fp16"), True, False),
    "emulate bf16, amp": (lambda: pl.emulate("bf16"), False, False),
    "emulate e4m3/e5m2": (lambda: pl.emulate(forward="e4m3", backward="e5m2"), False, False),
    "emulate mxfp8": (lambda: pl.emulate(forward="mxfp8_e4m3", backward="mxfp8_e5m2"), False, False),
    "torch.autocast cpu bf16": (autocast(torch.bfloat16), False, False),
    "torch.autocast cpu fp16": (autocast(torch.float16), False, True),
    "native fp16, half": (contextlib.nullcontext, True, True),
}


def step_of(model: nn.Module, x: Tensor, classes: Tensor, context: Context, half: bool) -> Step:
    """One training step of a copy of the model."""
    model = copy.deepcopy(model)
    if half:
        model, x = model.half(), x.half() if x.is_floating_point() else x
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        with context():
            loss = nn.functional.cross_entropy(model(x).float(), classes)
        loss.backward()
        optimizer.step()

    return step


def rows_of(problem: tuple[nn.Module, Tensor, Tensor], rounds: int) -> list[dict[str, object]]:
    """One row a contender."""
    rows = list[dict[str, object]]()
    for slow, count in ((False, rounds), (True, max(3, rounds // 4))):
        chosen = {n: step_of(*problem, c, half) for n, (c, half, is_slow) in CONTENDERS.items() if is_slow == slow}
        chosen[BASE] = step_of(*problem, contextlib.nullcontext, False)
        timings = interleave(chosen, rounds=count)
        rows += [
            {"step": name, "ms": t.median * 1e3, "of fp32": t.ratio(timings[BASE]), "spread": t.spread, "rounds": count}
            for name, t in timings.items()
            if name != BASE or not slow
        ]
    return rows


def options_from(arguments: Iterable[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--only", choices=("transformer", "convolutional"))
    parser.add_argument("--note", default="", help="a word on the machine's state, for the table")
    parser.add_argument("--quick", action="store_true", help="small models, few rounds")
    parser.add_argument("--out", type=Path, help="folder of the result files; default benchmarks/results")
    return parser.parse_args(None if arguments is None else list(arguments))


def main() -> None:
    """Times and writes the tables, unless it is a smoke run without a folder to write to."""
    options = options_from()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    results = Results("emulation", "cpu")
    for name, problem in problems(options.quick).items():
        if options.only in (None, name):
            note = f"Median of rounds, interleaved, one thread. Goal: emulated FP16 at most 2.5. {options.note}".strip()
            results.add(f"A training step, {name}", note, rows_of(problem, 3 if options.quick else options.rounds))
    if options.out or not options.quick:
        results.write("emulate", *([options.out] if options.out else []))


if __name__ == "__main__":
    main()
