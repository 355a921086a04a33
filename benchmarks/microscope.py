"""What errors cost: a shadow step over a plain one, and one look of `plimsoll.microscope` with its blame.

    python benchmarks/microscope.py                 a 6-layer transformer, d=256, batch 4 x 64, one thread; five minutes
    python benchmarks/microscope.py --quick         a smoke run

A shadow step is the step, its repetition in FP32, and the comparison of all activations, their gradients and the
parameters' gradients. The goal: at most 2.6 times the plain step. It is due at few steps of a training; the others cost
what watching costs. Blame has 60 seconds for this model.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from _harness import Results, interleave, peak_extra_bytes
from torch import Tensor, nn

import plimsoll as pl

WAYS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "FP32": nullcontext,
    "BF16 autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


def trained(layers: int, batch: tuple[int, int]) -> tuple[nn.Module, torch.optim.Optimizer, Tensor]:
    """A transformer encoder, its optimizer, and a batch with its targets."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(256, 4, 1024, activation="gelu", batch_first=True)
    model = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    return model, torch.optim.SGD(model.parameters(), lr=1e-3), torch.randn(2, *batch, 256)


def steps(way: str, layers: int, batch: tuple[int, int], rounds: int, folder: Path) -> list[dict[str, object]]:
    """A step plain, watched, and with a shadow, interleaved."""

    def of(**options: int) -> tuple[Callable[[], None], Callable[[], None]]:
        model, optimizer, (x, y) = trained(layers, batch)
        watch = (
            pl.watch(model, optimizer, run=folder / f"{way}-{len(made)}", quiet=True, **options) if options else None
        )

        def step() -> None:
            with WAYS[way]():
                loss = F.mse_loss(model(x).float(), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        made.append(watch)
        return step, (lambda: None) if watch is None else watch.close

    made: list[object] = []
    ways = {"the step alone": of(), "watched, all of it": of(every=1), "a shadow step": of(every=1, shadow_every=1)}
    calls: dict[str, Callable[[], object]] = {name: step for name, (step, _) in ways.items()}
    found = interleave(calls, rounds=rounds, sample_seconds=0.0)
    bytes_ = {name: peak_extra_bytes(call) for name, call in calls.items()}
    for _, close in ways.values():
        close()
    bare = found["the step alone"]
    return [
        {
            "precision": way, "what": name, "ms": timing.median * 1e3, "spread": timing.spread,
            "x the step": timing.ratio(bare), "memory at its peak, MB": bytes_[name] / 1e6,
        }
        for name, timing in found.items()
    ]  # fmt: skip


def looks(layers: int, batch: tuple[int, int]) -> list[dict[str, object]]:
    """One report and its blame, in seconds and in steps."""
    model, optimizer, _ = trained(layers, batch)
    optimizer.zero_grad()
    batches = [torch.randn(2, *batch, 256) for _ in range(8)]

    def step(batch: Tensor) -> Tensor:
        with WAYS["BF16 autocast"]():
            return F.mse_loss(model(batch[0]).float(), batch[1])

    def seconds(call: Callable[[], object]) -> tuple[float, object]:
        start = time.perf_counter()
        result = call()
        return time.perf_counter() - start, result

    plain = sorted(seconds(lambda x=x: step(x).backward())[0] for x in batches)[len(batches) // 2]
    reporting, report = seconds(lambda: pl.microscope(model, [lambda x=x: step(x) for x in batches]))
    blaming, blame = seconds(report.blame)  # type: ignore[attr-defined]
    return [
        {"what": "microscope, 8 draws", "seconds": reporting, "steps": reporting / plain, "shares add up to": None},
        {"what": "blame", "seconds": blaming, "steps": blaming / plain, "shares add up to": blame.explained},  # type: ignore[attr-defined]
    ]


def main() -> None:
    """Measures and writes the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    layers, batch, rounds = (1, (2, 8), 2) if arguments.quick else (6, (4, 64), 9)
    size = f"A transformer encoder of {layers} layers, d=256, batch {batch[0]} x {batch[1]}, one thread."
    results = Results("Errors: shadow steps and the microscope", "cpu")
    with tempfile.TemporaryDirectory() as folder:
        rows = [row for way in WAYS for row in steps(way, layers, batch, rounds, Path(folder))]
    results.add("A step with errors", f"{size} SGD; all collections.", rows)
    results.add("One look", f"{size} BF16 autocast, on a model at its start.", looks(layers, batch))
    if not arguments.quick:
        results.write("microscope")


if __name__ == "__main__":
    main()
