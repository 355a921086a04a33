"""What the benchmarks share: interleaved timing, peak memory, a description of the machine, and the result file.

Timing is paired: in each round every contender runs once, in an order that rotates, so that a slow spell of the machine
falls on all of them alike. A figure is the median over rounds; a ratio is the median of the rounds' own ratios.
"""

import ctypes
import datetime as dt
import gc
import importlib.metadata
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"
LIBRARIES = ("torch", "numpy", "numba", "triton", "ml_dtypes", "gfloat", "torchao", "qtorch", "pyarrow")
LIBRARIES += ("wandb", "transformers", "mindstudio-probe", "smdebug")


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds a call took, one figure a round."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, as a part of the median."""
        low, _, high = statistics.quantiles(self.seconds, n=4) if len(self.seconds) > 1 else (self.median,) * 3
        return (high - low) / 2 / self.median

    def ratio(self, baseline: "Timing") -> float:
        """The median over rounds of this time over the baseline's in the same round."""
        return statistics.median(mine / theirs for mine, theirs in zip(self.seconds, baseline.seconds, strict=True))


def interleave(
    calls: Mapping[str, Callable[[], object]], *, device: str = "cpu", rounds: int = 9, sample_seconds: float = 0.02
) -> dict[str, Timing]:
    """Times every call in every round. Short calls are repeated within a sample until it lasts `sample_seconds`."""
    clock = _time_on_cuda if device == "cuda" else _time_on_cpu
    repeats = {}
    for name, call in calls.items():
        clock(call, 1)  # compiles, warms caches and allocators
        repeats[name] = max(1, min(10_000, round(sample_seconds / max(clock(call, 1), 1e-7))))
    samples: dict[str, list[float]] = {name: [] for name in calls}
    # In another order each round: what runs before a call (whose threads may still be spinning) touches its time.
    order = random.Random(0)
    for _ in range(rounds):
        for name in order.sample(list(calls), len(calls)):
            samples[name].append(clock(calls[name], repeats[name]))
    return {name: Timing(tuple(found)) for name, found in samples.items()}


def _time_on_cpu(call: Callable[[], object], repeats: int) -> float:
    gc.disable()
    try:
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        return (time.perf_counter() - start) / repeats
    finally:
        gc.enable()


def _time_on_cuda(call: Callable[[], object], repeats: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / repeats


def peak_extra_bytes(call: Callable[[], object], device: str = "cpu") -> int:
    """How much more memory the process holds at the worst moment of `call` than before it.

    On CUDA the caching allocator's own count. On a CPU the resident set's high-water mark (Linux), which sees every
    allocator; free memory is handed back before, lest the call find room in it unseen. Resolution: some 100 KB.
    """
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # sets the high-water mark to the present size
    before = _status_bytes("VmRSS")
    result = call()
    peak = _status_bytes("VmHWM")
    del result
    return max(0, peak - before)


def _status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def read_bandwidth(values: int = 1 << 30) -> float:
    """Bytes a second of the fastest of torch's plain reductions over a tensor that no cache holds."""
    x = torch.ones(values, device="cuda")
    readers = {"sum": x.sum, "max": x.max, "bits": x.view(torch.int32).max, "half": x.view(torch.float16).max}
    found = interleave(readers, device="cuda", rounds=7)
    return x.nbytes / min(timing.median for timing in found.values())


def machine(device: str) -> dict[str, str]:
    """The hardware and the versions, as far as results depend on them."""
    found = {
        "date": dt.datetime.now(dt.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "processor": f"{_processor()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found["device"] = f"{properties.name}, {properties.total_memory >> 30} GiB, CUDA {torch.version.cuda}"
    for name in LIBRARIES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _processor() -> str:
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
        if names:
            return names[0]
    return platform.processor() or platform.machine()


class Results:
    """Tables that are printed as they are found, and written together at the end as Markdown and as JSON."""

    def __init__(self, title: str, device: str, console: Console | None = None) -> None:
        self.title, self.device = title, device
        self.machine = machine(device)
        self.console = console or Console(width=150)
        self.tables: list[tuple[str, str, Sequence[str], list[dict[str, object]]]] = []
        self.console.print(f"[bold]{title}[/bold] on {self.machine.get('device', self.machine['processor'])}")

    def add(self, title: str, note: str, rows: list[dict[str, object]]) -> None:
        """Prints one table: a row is column to value, all rows with the same columns."""
        columns = list(rows[0])
        table = Table(title=title, caption=note, title_justify="left", caption_justify="left")
        for column in columns:
            table.add_column(column, justify="left" if isinstance(rows[0][column], str) else "right")
        for row in rows:
            table.add_row(*(_shown(row[column]) for column in columns))
        self.console.print(table)
        self.tables.append((title, note, columns, rows))
        if folder := os.environ.get("BENCHMARK_PARTS"):  # for a run that may be cut short
            self.write(Path(sys.argv[0]).stem, Path(folder))

    def write(self, stem: str, folder: Path = RESULTS) -> Path:
        """Writes ``<date>-<stem>-<device>.md`` and ``.json``; returns the first's path."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.machine['date'][:10]}-{stem}-{self.device}.md"
        path.write_text(self._markdown(), encoding="utf-8")
        tables = [{"title": t, "note": n, "columns": list(c), "rows": rows} for t, n, c, rows in self.tables]
        content = {"title": self.title, "machine": self.machine, "tables": tables}
        path.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        self.console.print(f"Written: {path.name} and {path.with_suffix('.json').name}")
        return path

    def _markdown(self) -> str:
        lines = [f"# {self.title}", "", *(f"- {key}: {value}" for key, value in self.machine.items()), ""]
        for title, note, columns, rows in self.tables:
            lines += [f"## {title}", "", note, "", f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
            lines += [f"| {' | '.join(_shown(row[column]) for column in columns)} |" for row in rows]
            lines.append("")
        return "\n".join(lines)


def _shown(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def count(text: str) -> int:
    """``16M`` and the like, in binary multiples."""
    factor = {"K": 1 << 10, "M": 1 << 20}.get(text[-1].upper(), 1)
    return int(text.rstrip("kKmM")) * factor


def shown_count(values: int) -> str:
    """The inverse of `count`."""
    if values % (1 << 20) == 0:
        return f"{values >> 20}M"
    return f"{values >> 10}K" if values % (1 << 10) == 0 else str(values)
