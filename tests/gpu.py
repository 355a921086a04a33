"""Run all that needs a GPU within nine minutes: ``python tests/gpu.py [--out FOLDER] [--seconds 540]``.

The CUDA tests come first, then benchmarks, the most wanted first. Each has a budget of its own and is ended with it. A
part that fails or is ended leaves the others as they are. Every result is written as soon as it is there: one log a
part, the tables of each benchmark, and `summary.json` with the hardware, the versions and how each part ended. The
exit code is 0 if all parts succeeded, 1 if one did not, 2 without a GPU.
"""

import argparse
import datetime as dt
import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
LEAST_SECONDS = 5.0  # a part with less than this left is not begun


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A command with a name and a budget."""

    name: str
    command: Sequence[str]
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a part ended: `passed`, `failed`, `out of time` or `not begun`."""

    name: str
    state: str
    seconds: float


def benchmark(name: str, seconds: float, *options: str) -> Part:
    """A benchmark on the GPU."""
    return Part(
        name=name, command=[sys.executable, f"benchmarks/{name}.py", "--device", "cuda", *options], seconds=seconds
    )


PARTS = (
    Part(name="tests", command=[sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests"], seconds=180),
    benchmark("fp8", 120),
    benchmark("watch", 200, "--tables", "steps"),
    benchmark("measure", 60),
    benchmark("unscale", 60),
    benchmark("cast", 60),
    benchmark("unit", 60, "--only", "cost"),
)


def run_parts(
    parts: Sequence[Part], folder: Path, seconds: float, clock: Callable[[], float] = time.monotonic
) -> list[Ended]:
    """Runs parts in order within a budget; returns how each ended, which the summary says after each."""
    end, found = clock() + seconds, list[Ended]()
    for part in parts:
        begun = clock()
        budget = min(part.seconds, end - begun)
        state = "not begun" if budget < LEAST_SECONDS else run_one(part, folder, budget)
        found.append(Ended(name=part.name, state=state, seconds=round(clock() - begun, 1)))
        print(f"{part.name}: {state}, {found[-1].seconds:.0f} s", flush=True)
        write_summary(folder, found)
    return found


def run_one(part: Part, folder: Path, seconds: float) -> str:
    """Runs one part into its log; ends it, with the processes that it started, when its budget is spent."""
    environment = {**os.environ, "BENCHMARK_PARTS": str(folder)}
    with (folder / f"{part.name}.log").open("wb") as log:
        process = subprocess.Popen(
            part.command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            return "passed" if process.wait(seconds) == 0 else "failed"
        except subprocess.TimeoutExpired:
            return "out of time"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def write_summary(folder: Path, found: Sequence[Ended]) -> None:
    """Writes what is known so far."""
    content = {"machine": machine(), "parts": [asdict(part) for part in found]}
    (folder / "summary.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def machine() -> dict[str, str]:
    """The hardware and the versions."""
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    versions = {name: importlib.metadata.version(name) for name in ("torch", "triton", "plimsoll")}
    return {"gpu": gpu, "cuda": str(torch.version.cuda), "python": platform.python_version(), **versions}


def main(arguments: Sequence[str], parts: Sequence[Part] = PARTS) -> int:
    """Runs everything."""
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    today = f"{dt.datetime.now(dt.UTC):%Y-%m-%d-%H%M}-gpu"
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / today)
    parser.add_argument("--seconds", type=float, default=540.0, help="for all parts together, default 540")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print(f"make gpu: expected a CUDA device; got none by torch {torch.__version__}. Use a machine with a GPU.")
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    found = run_parts(parts, options.out, options.seconds)
    print(f"Results: {options.out}")
    return int(any(part.state != "passed" for part in found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
