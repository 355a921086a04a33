"""What `plimsoll.locate` costs: a step inside it, over the same step alone.

    python benchmarks/locate.py                     a 6-layer transformer, d=256, batch 4 x 64, one thread; two minutes
    python benchmarks/locate.py --quick             a smoke run
    python benchmarks/locate.py --device cuda       on a GPU, with a longer batch

There is no goal: it is called when something has broken. The loss is finite, so nothing is reported; where something is
found, the records of it come on top once.
"""

import argparse
from collections.abc import Callable

import torch
from _harness import Results, interleave
from torch import Tensor, nn

from plimsoll.diagnosis import locate


def trained(device: str, *, layers: int, width: int, batch: tuple[int, int]) -> tuple[nn.Module, Callable[[], Tensor]]:
    """A transformer encoder, and its training step without the optimizer's."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)
    model = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).to(device)
    x = torch.randn(*batch, width, device=device)

    def step() -> Tensor:
        model.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    return model, step


def measure(device: str, rounds: int, *, layers: int, width: int, batch: tuple[int, int]) -> list[dict[str, object]]:
    """The step alone and inside `locate`, interleaved."""
    model, step = trained(device, layers=layers, width=width, batch=batch)
    calls: dict[str, Callable[[], object]] = {
        "the step alone": step,
        "inside locate": lambda: locate(step),
        "inside locate, model=": lambda: locate(step, model=model),
        "inside locate, flush_share=0.5": lambda: locate(step, flush_share=0.5),
    }
    found = interleave(calls, device=device, rounds=rounds, sample_seconds=0.0)
    bare = found["the step alone"]
    return [
        {"what": what, "ms": timing.median * 1e3, "spread": timing.spread, "x the step": timing.ratio(bare)}
        for what, timing in found.items()
    ]


def main() -> None:
    """Measures and writes the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    batch = (4, 64) if arguments.device == "cpu" else (16, 512)
    size = (
        {"layers": 2, "width": 32, "batch": (2, 8)} if arguments.quick else {"layers": 6, "width": 256, "batch": batch}
    )
    results = Results("Locating a fault", arguments.device)
    rounds = 2 if arguments.quick else 15
    note = "Forward and backward of a transformer encoder, eager, FP32. Spread: as in every table."
    results.add("A step inside locate", note, measure(arguments.device, rounds, **size))
    if not arguments.quick:
        results.write("locate")


if __name__ == "__main__":
    main()
