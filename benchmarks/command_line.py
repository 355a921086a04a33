"""How long commands take that are typed many times a day, and what the verdict at the end of a training costs.

    python benchmarks/command_line.py               two minutes on an idle machine
    python benchmarks/command_line.py --quick       a smoke run

The goals: `plimsoll --help` under 0.15 s, and `plimsoll check` of a small run (40 samples of 21 tensors) under 0.5 s,
from the start of the process to its end. Each command is a new process, with compiled bytecode as an installed package
has it. Python itself and the import of pyarrow, which reads runs, are there for comparison: nothing can be faster.

The table has the time of the processor (user and system) and that on the wall. On a machine with other work only the
former is the cost of a command.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import run_log
import torch
from _harness import Results, interleave

import plimsoll as pl

COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "import pyarrow.parquet, pyarrow.compute": ["-c", "import pyarrow.parquet, pyarrow.compute"],
    "plimsoll --help": ["-m", "plimsoll", "--help"],
    "plimsoll check --help": ["-m", "plimsoll", "check", "--help"],
    "plimsoll formats": ["-m", "plimsoll", "formats"],
    "plimsoll check": ["-m", "plimsoll", "check", "RUN"],
    "plimsoll check --json": ["-m", "plimsoll", "check", "RUN", "--json"],
    "plimsoll whatif --format e4m3": ["-m", "plimsoll", "whatif", "RUN", "--format", "e4m3"],
    "plimsoll plan --target bf16": ["-m", "plimsoll", "plan", "RUN", "--target", "bf16"],
    "plimsoll diff": ["-m", "plimsoll", "diff", "RUN", "RUN"],
    "plimsoll report -o report.md": ["-m", "plimsoll", "report", "RUN", "-o", "OUT.md"],
    "plimsoll report -o report.html": ["-m", "plimsoll", "report", "RUN", "-o", "OUT.html"],
    "plimsoll ls, 20 runs": ["-m", "plimsoll", "ls", "RUNS"],
    "plimsoll ls --fast, 20 runs": ["-m", "plimsoll", "ls", "RUNS", "--fast"],
}
_BARE = "python -c pass"


def train(run: Path, *, quiet: bool, steps: int = 40) -> float:
    """Trains a small model under a watch; returns the seconds that closing the watch took."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    watch = pl.watch(model, optimizer, run=run, every=1, quiet=quiet)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(16, 32)).square().mean().backward()
        optimizer.step()
    start = time.perf_counter()
    watch.close()
    return time.perf_counter() - start


def start_commands(place: Path, rounds: int) -> list[dict[str, object]]:
    """How long each command takes, in rounds in which each runs once."""
    runs = place / "runs"
    for number in range(20):
        train(runs / f"run-{number}", quiet=True)
    words = {
        "RUN": str(runs / "run-0"),
        "RUNS": str(runs),
        "OUT.md": str(place / "r.md"),
        "OUT.html": str(place / "r.html"),
    }
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment |= {"PYTHONPYCACHEPREFIX": str(place / "bytecode"), "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in COMMANDS}
    for number in range(rounds + 1):  # the first compiles
        for name, arguments in COMMANDS.items():
            command = [sys.executable, *(words.get(word, word) for word in arguments)]
            found = _run(command, environment)
            if number:
                times[name].append(found)
    return [_row(name, each, times[_BARE]) for name, each in times.items()]


def _run(command: Sequence[str], environment: Mapping[str, str]) -> tuple[float, float]:
    """Seconds of the processor and on the wall."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    result = subprocess.run(command, env=environment, capture_output=True, check=False)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    if result.returncode not in (0, 1):  # 1: an alarm, or a difference
        raise SystemExit(f"{' '.join(command)}: {result.stderr.decode()}")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall


def _row(name: str, times: Sequence[tuple[float, float]], bare: Sequence[tuple[float, float]]) -> dict[str, object]:
    processor, wall = zip(*times, strict=True)
    return {
        "command": name,
        "processor s": statistics.median(processor),
        "least processor s": min(processor),
        "wall s": statistics.median(wall),
        "x bare Python": statistics.median(a / b for a, (b, _) in zip(processor, bare, strict=True)),
    }


def close_watches(place: Path, rounds: int) -> list[dict[str, object]]:
    """How long `Watch.close` takes with the verdict and without, in turns."""
    stderr, sys.stderr = sys.stderr, open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115
    try:
        found = {"without the verdict": [], "with the verdict": []}
        train(place / "warm", quiet=False)  # imports what judges, once a process
        for number in range(rounds):
            for name, times in found.items():
                times.append(train(place / f"close-{number}-{name.split()[0]}", quiet=name.startswith("without")))
    finally:
        sys.stderr.close()
        sys.stderr = stderr
    quiet = found["without the verdict"]
    return [
        {
            "Watch.close": name,
            "s": statistics.median(times),
            "more s": statistics.median(mine - theirs for mine, theirs in zip(times, quiet, strict=True)),
        }
        for name, times in found.items()
    ]


def judge_at_the_end(place: Path, quick: bool) -> list[dict[str, object]]:
    """How long the verdict takes for a run near the size up to which it is given, and how large that run is."""
    from plimsoll.report.verdicts.verdict_sentence import MOST_BYTES, verdict_at_end

    folder = place / "large"
    run_log.write(folder, 60 if quick else 300, 50 if quick else 1000)
    size = sum(path.stat().st_size for path in folder.rglob("*.parquet"))
    timing = interleave({"verdict": lambda: verdict_at_end(folder)}, rounds=3, sample_seconds=0.0)["verdict"]
    judged = verdict_at_end(folder) is not None
    return [{"run, MB": size / 1e6, "verdict s": timing.median, "limit, MB": MOST_BYTES / 1e6, "judged": str(judged)}]


def main() -> None:
    """Measures and writes the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--note", default="", help="what is to be known of the machine: a sentence in the tables")
    arguments = parser.parse_args()
    rounds = 2 if arguments.quick else 15
    results = Results("The command line", "cpu")
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        note = f"{arguments.note} The goals are 0.15 s for --help and 0.5 s for check.".strip()
        results.add("Commands", note, start_commands(place, rounds))
        note = f"A run of 40 samples. The import of the packages that judge is not in it. {arguments.note}".strip()
        results.add("The end of a watch", note, close_watches(place, rounds))
        results.add("The verdict on a large run", arguments.note, judge_at_the_end(place, arguments.quick))
    if not arguments.quick:
        results.write("command-line")


if __name__ == "__main__":
    main()
