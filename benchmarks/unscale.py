"""How fast `unscale_into` is: against torch's unscaling alone, and against that and a measurement after each other.

    python benchmarks/unscale.py                   every case, dtype and thread count; minutes, 1 GB
    python benchmarks/unscale.py --quick           a smoke run
    python benchmarks/unscale.py --device cuda     on a GPU

The goals, for float32: unscaling, the check for overflow and the spectra of all gradients take at most 1.3 times what
torch's unscaling with its check takes (1.1 times on a GPU), for 100 tensors of 100,000 values and for one of 100
million; without spectra no more time than torch.

The inverse scale is the largest number below 1, so that values are as good as the same after many calls.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from _harness import Results, Timing, interleave
from torch import Tensor

from plimsoll.kernels import measure_into, new_bank, unscale_into

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
CASES = ((100, 100_000), (1, 100_000_000), (1000, 10_000))
QUICK_CASES = ((10, 10_000), (1, 1_000_000))
INVERSE = 1 - 2.0**-24


def gradients(count: int, length: int, data: str, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Seeded values: ``normal``; ``wide``, log-normal over some 60 binades; ``zeros``, normal but half of them zero."""
    generator = torch.Generator().manual_seed(0)
    found: list[Tensor] = []
    for _ in range(count):
        x = torch.randn(length, generator=generator)
        if data == "wide":
            x *= torch.exp(8 * torch.randn(length, generator=generator))
        elif data == "zeros":
            x *= torch.rand(length, generator=generator) < 0.5
        found.append(x.to(dtype).to(device))
    return found


def contenders(tensors: Sequence[Tensor], device: str) -> dict[str, Callable[[], object]]:
    """Ours with spectra and without; torch's operator; torch's operator after a measurement."""
    bank, rows = new_bank(len(tensors), device=device), list(range(len(tensors)))
    inverse, found = torch.full((1,), INVERSE, device=device), torch.zeros(1, device=device)

    def torchs() -> None:
        torch._amp_foreach_non_finite_check_and_unscale_(tensors, found, inverse)

    def apart() -> None:
        measure_into(tensors, bank, rows, accumulate=False)
        torchs()

    return {
        "torch": torchs,
        "ours": lambda: unscale_into(tensors, inverse, found, bank, rows),
        "bare": lambda: unscale_into(tensors, inverse, found),
        "apart": apart,
    }


def check(dtype: torch.dtype, device: str) -> None:
    """Both sides do the same before they are timed."""
    ours, theirs = (gradients(3, 10_000, "normal", dtype, device) for _ in range(2))
    measured, bank = new_bank(3, device=device), new_bank(3, device=device)
    measure_into(ours, measured, range(3))
    inverse, found = torch.full((1,), 0.3, device=device), torch.zeros(1, device=device)
    unscale_into(ours, inverse, found, bank, range(3))
    torch._amp_foreach_non_finite_check_and_unscale_(theirs, found, inverse)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3 if dtype.itemsize == 2 else 0, atol=0)
    for fields in (slice(0, 8), slice(11, None)):  # all but the sums
        assert torch.equal(bank[:, fields], measured[:, fields])


def row(values: int, labels: dict[str, object], found: dict[str, Timing]) -> dict[str, object]:
    """One line of a table: times in microseconds, and the ratios that the goals are stated in."""
    ours, bare, torchs = found["ours"], found["bare"], found["torch"]
    return labels | {
        "torch us": torchs.median * 1e6,
        "ours us": ours.median * 1e6,
        "ns/value": ours.median / values * 1e9,
        "ours/torch": ours.ratio(torchs),
        "without spectra": bare.ratio(torchs),
        "apart/torch": found["apart"].ratio(torchs),
        "spread": ours.spread,
    }


def compare(
    case: tuple[int, int], data: str, dtype: str, labels: dict[str, object], options: argparse.Namespace
) -> dict[str, object]:
    """Times one case; large ones in fewer rounds."""
    count, length = case
    tensors = gradients(count, length, data, DTYPES[dtype], options.device)
    rounds = 3 if options.quick else 9 if count * length > 1 << 25 else 21
    found = interleave(contenders(tensors, options.device), device=options.device, rounds=rounds)
    return row(count * length, labels, found)


def by_case(results: Results, options: argparse.Namespace) -> None:
    """By dtype, number of tensors and threads."""
    lines: list[dict[str, object]] = []
    for threads in options.threads:
        torch.set_num_threads(threads)
        for dtype in options.dtypes:
            check(DTYPES[dtype], options.device)
            for case in options.cases:
                count, length = case
                labels = {"dtype": dtype, "tensors": count, "values of each": length, "threads": threads}
                lines.append(compare(case, "normal", dtype, labels, options))
    note = "ours: unscaling, check and spectra; without spectra: the same operator without a bank; apart: measured, "
    results.add("Normal values", note + "then torch's operator. Ratios to torch's operator: less is better.", lines)


def by_data(results: Results, options: argparse.Namespace) -> None:
    """Whether the values matter."""
    torch.set_num_threads(options.threads[0])
    lines: list[dict[str, object]] = []
    for dtype in options.dtypes:
        for data in ("normal", "zeros", "wide"):
            case = options.cases[0]
            labels: dict[str, object] = {"dtype": dtype, "data": data, "tensors": case[0], "values of each": case[1]}
            lines.append(compare(case, data, dtype, labels, options))
    note = "zeros: half of the values are zero; wide: log-normal over some 60 binades. "
    results.add("Other data", note + f"{options.threads[0]} thread(s).", lines)


def options_from(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, lists parsed and defaults by device filled in."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--threads", default="1,2", help="CPU threads, default 1,2")
    parser.add_argument("--quick", action="store_true", help="small sizes, few rounds")
    parser.add_argument("--out", type=Path, help="folder of the result files; default benchmarks/results")
    parser.add_argument("--note", default="", help="a line about the machine's state, kept in the result")
    options = parser.parse_args(arguments)
    options.cases = QUICK_CASES if options.quick else CASES
    options.dtypes = options.dtypes.split(",")
    options.threads = [1] if options.device == "cuda" else [int(n) for n in options.threads.split(",")]
    return options


def main() -> None:
    """Runs all tables and writes them, unless it is a smoke run without a folder to write to."""
    options = options_from()
    results = Results("unscale", options.device)
    if options.note:
        results.machine["note"] = options.note
    by_case(results, options)
    by_data(results, options)
    if options.out or not options.quick:
        results.write("unscale", *([options.out] if options.out else []))


if __name__ == "__main__":
    main()
