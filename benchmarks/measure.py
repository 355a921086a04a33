"""How fast `measure` is: against the same statistics from torch operations, and against one pass of `torch.aminmax`.

    python benchmarks/measure.py                   every size, dtype and thread count; minutes
    python benchmarks/measure.py --quick           a smoke run
    python benchmarks/measure.py --device cuda     on a GPU, with the fraction of the measured read bandwidth

The goals: at most 4 times aminmax and 15 times faster than torch operations for 16M float32 values on
one thread, under 1 MB of memory whatever the size; on a GPU 70 % of the read bandwidth.
"""

import argparse
import functools
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from _harness import Results, Timing, count, interleave, peak_extra_bytes, read_bandwidth, shown_count
from torch import Tensor

from plimsoll.kernels import measure_into, new_bank

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
}
SIZES = "1K,16K,256K,1M,16M,64M"
QUICK_SIZES = "1K,1M"
TENSORS = 1000
_BINADES, _LOWEST = 277, -149
_INTEGERS = {torch.float32: (torch.int32, 23, 127), torch.float64: (torch.int64, 52, 1023)}
_INTEGERS |= {torch.float16: (torch.int16, 10, 15), torch.bfloat16: (torch.int16, 7, 127)}


def statistics_by_torch(x: Tensor) -> dict[str, Tensor]:
    """What a row of the bank holds, from torch operations: what one would write who minds speed, but no kernel.

    The exponents are the bits', counted by `bincount`; only subnormal values go through `frexp`. 8-bit dtypes, for
    which torch has next to no arithmetic, are first made float32.
    """
    if x.dtype.itemsize == 1:
        x = x.to(torch.float32)
    finite = x.isfinite()
    held = torch.where(finite, x, 0)
    absolute = held.abs()
    nonzero = absolute != 0
    low, high = held.aminmax()
    binades = _binades_by_bits(absolute)
    return {
        "zeros": finite.sum() - nonzero.sum(),
        "nans": x.isnan().sum(),
        "pos_infs": x.isposinf().sum(),
        "neg_infs": x.isneginf().sum(),
        "min": low,
        "max": high,
        "absmin": torch.where(nonzero, absolute, torch.inf).amin(),
        "sum": held.sum(dtype=torch.float64),
        "abssum": absolute.sum(dtype=torch.float64),
        "sumsq": (squares := held.double().square_()).sum(),
        "sumfourth": squares.square_().sum(),
        "binades": binades,
    }


def _binades_by_bits(absolute: Tensor) -> Tensor:
    word, fraction_bits, bias = _INTEGERS[absolute.dtype]
    fields = absolute.view(word) >> fraction_bits
    counts = torch.bincount(fields.flatten(), minlength=2 * bias + 1)[1:]
    subnormal = absolute[(fields == 0) & (absolute != 0)].double().frexp().exponent - 1
    found = torch.zeros(_BINADES, dtype=torch.int64, device=absolute.device)
    first = 1 - bias - _LOWEST
    kept = counts[max(0, -first) :][: _BINADES - max(0, first)]
    found[max(0, first) : max(0, first) + kept.numel()] += kept
    return found + torch.bincount((subnormal - _LOWEST).clamp(0, _BINADES - 1), minlength=_BINADES)


def values(size: int, data: str, dtype: torch.dtype, device: str) -> Tensor:
    """Seeded values: ``normal``; ``wide``, log-normal over some 60 binades; ``zeros``, normal but half of them zero."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(size, generator=generator)
    if data == "wide":
        x = x * torch.exp(8 * torch.randn(size, generator=generator))
    elif data == "zeros":
        x = x * (torch.rand(size, generator=generator) < 0.5)
    return x.to(dtype).to(device)


def mixed(dtype: torch.dtype, device: str, most: int) -> list[Tensor]:
    """A thousand tensors of 16 to `most` values, spread evenly in the logarithm, as a model's are."""
    generator = torch.Generator().manual_seed(1)
    sizes = (16 * (most / 16) ** torch.rand(TENSORS, generator=generator)).long().tolist()
    return [torch.randn(size, generator=generator).to(dtype).to(device) for size in sizes]


def contenders(tensors: Sequence[Tensor], device: str) -> dict[str, Callable[[], object]]:
    """Ours into a bank; torch's statistics; one aminmax pass (where torch has one for the dtype)."""
    bank, rows = new_bank(len(tensors), device=device), list(range(len(tensors)))

    def ours() -> None:
        measure_into(tensors, bank, rows, accumulate=False)

    calls: dict[str, Callable[[], object]] = {
        "ours": ours,
        "torch": lambda: [statistics_by_torch(x) for x in tensors],
    }
    if tensors[0].dtype.itemsize > 1:
        calls["aminmax"] = lambda: [x.aminmax() for x in tensors]
    return calls


def row(tensors: Sequence[Tensor], labels: dict[str, object], found: dict[str, Timing], bandwidth: float | None):
    """One line of a table: times in microseconds, and the ratios that the goals are stated in."""
    total = sum(x.numel() for x in tensors)
    ours, aminmax = found["ours"], found.get("aminmax")
    line = labels | {
        "ours us": ours.median * 1e6,
        "ns/value": ours.median / total * 1e9,
        "torch us": found["torch"].median * 1e6,
        "aminmax us": None if aminmax is None else aminmax.median * 1e6,
        "ours/aminmax": None if aminmax is None else ours.ratio(aminmax),
        "torch/ours": found["torch"].ratio(ours),
        "spread": ours.spread,
    }
    if bandwidth is not None:
        line["of bandwidth"] = sum(x.nbytes for x in tensors) / ours.median / bandwidth
    return line


def check(x: Tensor, device: str) -> None:
    """Both sides count the same before they are timed."""
    bank = new_bank(1, device=device)
    measure_into([x], bank, [0], accumulate=False)
    theirs = statistics_by_torch(x)
    from plimsoll import row_layout

    assert torch.equal(bank[0, row_layout.HISTOGRAM : row_layout.HISTOGRAM + _BINADES], theirs["binades"])
    assert bank[0, row_layout.ZEROS] == theirs["zeros"]
    sums = bank[0, row_layout.SUMS].view(torch.float64)
    expected = torch.stack([theirs[name] for name in ("sum", "abssum", "sumsq", "sumfourth")])
    assert torch.allclose(sums, expected, rtol=1e-6, atol=1e-6 * theirs["abssum"].item())


def compare(tensors, labels, options, bandwidth):
    """Times one case; large ones in fewer rounds."""
    total = sum(x.numel() for x in tensors)
    rounds = 3 if options.quick or total > 1 << 24 else 5 if total == 1 << 24 else 9
    found = interleave(contenders(tensors, options.device), device=options.device, rounds=rounds)
    return row(tensors, labels, found, bandwidth)


def one_tensor(results: Results, options: argparse.Namespace, bandwidth: float | None) -> None:
    """By dtype, size and threads."""
    lines = []
    for threads in options.threads:
        torch.set_num_threads(threads)
        for name in options.dtypes:
            for size in options.sizes:
                x = values(size, "normal", DTYPES[name], options.device)
                check(x, options.device)
                labels = {"dtype": name, "values": shown_count(size), "threads": threads}
                lines.append(compare([x], labels, options, bandwidth))
    results.add("One tensor, normal values", "ours/aminmax: less is better; torch/ours: more is better.", lines)


def other_data(results: Results, options: argparse.Namespace, bandwidth: float | None) -> None:
    """Whether the values matter: many binades, and many zeros."""
    torch.set_num_threads(options.threads[0])
    lines = []
    for name in options.dtypes:
        for data in ("normal", "wide", "zeros"):
            x = values(options.data_size, data, DTYPES[name], options.device)
            labels = {"dtype": name, "data": data, "values": shown_count(options.data_size)}
            lines.append(compare([x], labels, options, bandwidth))
    note = "wide: log-normal over some 60 binades; zeros: half of the values are zero. "
    results.add("Other data", note + f"{options.threads[0]} thread(s).", lines)


def many_tensors(results: Results, options: argparse.Namespace, bandwidth: float | None) -> None:
    """A thousand tensors in one call."""
    lines = []
    for threads in options.threads:
        torch.set_num_threads(threads)
        for name in options.dtypes:
            tensors = mixed(DTYPES[name], options.device, 1 << (12 if options.quick else 18))
            total = sum(x.numel() for x in tensors)
            labels = {"dtype": name, "tensors": len(tensors), "values": total, "threads": threads}
            lines.append(compare(tensors, labels, options, bandwidth))
    results.add("A thousand tensors of mixed sizes", "Ours is one call; the others are one call a tensor.", lines)


def memory(results: Results, options: argparse.Namespace) -> None:
    """Peak memory beside the tensor itself, each figure from a fresh process."""
    lines = []
    for name in options.dtypes:
        for size in options.sizes:
            probe = functools.partial(_probe, name, size, options.device)
            lines.append(
                {"dtype": name, "values": shown_count(size), "ours KB": probe("ours"), "torch KB": probe("torch")}
            )
    results.add("Peak extra memory", "Of the process (CPU: resident set; GPU: allocator), after a warm-up.", lines)


def _probe(name: str, size: int, device: str, contender: str) -> float:
    command = [sys.executable, __file__, "--device", device, "--probe", f"{name}:{size}:{contender}"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(done.stdout)


def run_probe(text: str, device: str) -> None:
    """In the fresh process: warms up on a small tensor, then prints the kilobytes that the real one takes."""
    name, size, contender = text.split(":")
    torch.set_num_threads(1)
    small, large = (values(n, "normal", DTYPES[name], device) for n in (1 << 12, int(size)))
    contenders([small], device)[contender]()
    call = contenders([large], device)[contender]
    print(peak_extra_bytes(call, device) / 1024)


def options_from(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, lists parsed and defaults by device filled in."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--sizes", help=f"values in one tensor, default {SIZES}")
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--threads", default="1,2", help="CPU threads, default 1,2")
    parser.add_argument("--quick", action="store_true", help="small sizes, few rounds")
    parser.add_argument("--out", type=Path, help="folder of the result files; default benchmarks/results")
    parser.add_argument("--no-memory", action="store_true", help="leave the memory table out")
    parser.add_argument("--probe", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.sizes = [count(s) for s in (options.sizes or (QUICK_SIZES if options.quick else SIZES)).split(",")]
    options.dtypes = options.dtypes.split(",")
    options.threads = [1] if options.device == "cuda" else [int(n) for n in options.threads.split(",")]
    options.data_size = 1 << (18 if options.quick else 24)
    return options


def main() -> None:
    """Runs all tables and writes them, unless it is a smoke run without a folder to write to."""
    options = options_from()
    if options.probe:
        run_probe(options.probe, options.device)
        return
    results = Results("measure", options.device)
    bandwidth = None
    if options.device == "cuda":
        bandwidth = read_bandwidth()
        results.machine["read bandwidth"] = f"{bandwidth / 1e12:.2f} TB/s (fastest plain reduction)"
    one_tensor(results, options, bandwidth)
    other_data(results, options, bandwidth)
    many_tensors(results, options, bandwidth)
    if not options.no_memory:
        memory(results, options)
    if options.out or not options.quick:
        results.write("measure", *([options.out] if options.out else []))


if __name__ == "__main__":
    main()
