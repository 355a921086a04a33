"""What watching costs a training step: ours, and other watchers, beside an unwatched twin of the same model.

    python benchmarks/watch.py                     a 6-layer transformer on one CPU thread; half an hour
    python benchmarks/watch.py --quick             a smoke run; --only "ours*" for some rows
    python benchmarks/watch.py --profile NAME      where the extra time of one contender goes, by function
    python benchmarks/watch.py --device cuda       GPT of 124M parameters, bf16, compiled and eager; every watched step
                                                   runs under torch.cuda.set_sync_debug_mode("error")

The goals: everything at every step takes at most as much extra time as the floor, one `torch.aminmax` of each of the
same tensors. As ratios to the bare step: weights and gradients 1.05, attached but not due 1.005, everything every 10
steps with writing 1.02; under 64 MB beyond the unwatched run. On a GPU: every 10 steps 1.01, every step 1.10.

All twins have one seed and one sequence of batches. A sample is two steps of one twin, the second timed, so that the
background work which the first leaves behind runs into it, as in a run that goes on; what is left after it is finished
off the clock, lest it fall on the next twin. The files' part, a flush every five seconds, is in the second table alone.
Peers that are not installed are named with the reason: `pip install wandb transformers mindstudio-probe`.

Longer than usual, with one file beside it: `_peers_watch.py` has the model and who watches it, here are the clock and
the tables.
"""

import argparse
import contextlib
import cProfile
import fnmatch
import functools
import gc
import json
import pstats
import random
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import scipy.stats
import torch
from _harness import Results, Timing
from _peers_watch import (
    BARE,
    CPU,
    EVERY_10,
    EVERYTHING,
    FLOOR,
    GPT_124M,
    KERNEL,
    LOADED,
    TINY,
    Attached,
    Contender,
    Twin,
    bare,
    by_plimsoll,
    contenders,
    floor,
    kernel,
    loaded,
)
from torch import nn

MEMORY_GOAL_MB = 64
MEMORY_STEPS = 200
GROWTH_STEPS = 1000
_SLOW_EVERY = 4  # rounds of which a slow peer runs in one

Row = dict[str, object]


class Sample(NamedTuple):
    """Seconds of a step: of the clock, and of the training thread's own."""

    wall: float
    cpu: float


# -- step by step ------------------------------------------------------------------------------------------------------


def step_by_step(chosen: Mapping[str, Contender], options: argparse.Namespace) -> list[Row]:
    """One row a contender: paired samples, all twins in this process, in another order each round."""
    chosen = {FLOOR: floor(), KERNEL: kernel(), **chosen}
    twins = {BARE: Twin(bare, CPU)}
    rows: dict[str, Row] = {}
    for name, contender in chosen.items():
        try:
            twin = Twin(contender.attach, CPU)
            _warm_up(twin)
        except Exception as error:
            # A peer may fail in any way, and the table must say how.
            if name.startswith("ours"):
                raise
            rows[name] = _row(name, contender, why=_reason(error))
        else:
            twins[name] = twin
    _warm_up(twins[BARE])
    slow = {name for name, contender in chosen.items() if contender.slow}
    samples = _sample(twins, slow, options.rounds)
    for name, twin in twins.items():
        pairs = [(mine, samples[BARE][number]) for number, mine in samples[name].items()]
        same = twin.same_losses(twins[BARE])
        rows[name] = _row(name, chosen.get(name, Contender(attach=bare)), pairs, same, twin.attached.recorded())
        twin.attached.close()
    for name in chosen:
        _compare_to_floor(rows[name], rows[FLOOR], chosen[name])
    return [rows[name] for name in (BARE, *chosen)]


def _compare_to_floor(row: Row, beside: Row, contender: Contender) -> None:
    """Puts the extra time, as a part of the floor's, in the row."""
    ratio, least = row["ratio"], beside["ratio"]
    if isinstance(ratio, float) and isinstance(least, float):
        row["of floor"] = (ratio - 1) / (least - 1)
        if contender.floor_goal is not None:
            row |= {
                "goal": f"floor {contender.floor_goal:g}",
                "verdict": verdict(row["of floor"], contender.floor_goal),
            }


def _warm_up(twin: Twin) -> None:
    for _ in range(3):
        twin.step()
        twin.attached.drain()


def _sample(twins: Mapping[str, Twin], slow: set[str], rounds: int) -> dict[str, dict[int, Sample]]:
    """The second of two steps, by contender and round."""
    samples: dict[str, dict[int, Sample]] = {name: {} for name in twins}
    order = random.Random(0)
    with _frozen():
        for number in range(rounds):
            taking_part = [name for name in twins if name not in slow or number % _SLOW_EVERY == 0]
            for name in order.sample(taking_part, len(taking_part)):
                twins[name].step()
                start, busy = time.perf_counter(), time.thread_time()
                twins[name].step()
                samples[name][number] = Sample(time.perf_counter() - start, time.thread_time() - busy)
                twins[name].attached.drain()
    return samples


@contextlib.contextmanager
def _frozen() -> Iterator[None]:
    """Garbage collection looks at what a step makes, as in training, and not at a dozen libraries beside it."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _row(
    name: str,
    contender: Contender,
    pairs: Sequence[tuple[Sample, Sample]] = (),
    same: str = "-",
    tensors: int | None = None,
    why: str | None = None,
) -> Row:
    """A row, from the contender's samples and the bare twin's of the same rounds."""
    columns = ("ms/step", "ratio", "extra %", "of floor", "quartiles", "median's 95 %", "CPU ratio")
    row: Row = {"what": name} | dict.fromkeys(columns)
    if pairs:
        ratios = [mine.wall / theirs.wall for mine, theirs in pairs]
        low, ratio, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        row |= {"ms/step": statistics.median(mine.wall for mine, _ in pairs) * 1e3, "ratio": ratio}
        row |= {"extra %": (ratio - 1) * 100, "quartiles": f"{low:.3f} to {high:.3f}"}
        row["median's 95 %"] = "{:.4f} to {:.4f}".format(*interval(ratios))
        row["CPU ratio"] = statistics.median(mine.cpu / theirs.cpu for mine, theirs in pairs)
    row |= {"samples": len(pairs), "goal": contender.goal}
    return row | {"verdict": why or verdict(row["ratio"], contender.goal), "losses": same, "tensors": tensors}


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The order statistics between which the median of all such values lies with a probability of 95 % or more."""
    ordered, outside = sorted(values), int(scipy.stats.binom.ppf(0.025, len(values), 0.5))
    first = max(0, outside - 1)
    return ordered[first], ordered[-1 - first]


def verdict(value: object, goal: float | None) -> str:
    """Whether the goal, a bound from above, is met."""
    if goal is None or not isinstance(value, float):
        return "-"
    return "reached" if value <= goal else "missed"


def _reason(error: Exception) -> str:
    first = (str(error).strip().splitlines() or [""])[0]
    return f"not measured: {type(error).__name__}: {first}"[:120]


def in_own_process(name: str, options: argparse.Namespace) -> list[Row]:
    """The bare twin's row and the contender's, of a process that has no other."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "rows.json"
        command = [sys.executable, __file__, "--device", options.device, "--pair", name, "--into", str(answer)]
        command += ["--rounds", str(options.rounds), *(["--eager"] if options.eager else [])]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{name} failed in its process:\n{done.stderr[-3000:]}")
        return json.loads(answer.read_text(encoding="utf-8"))


def step_table(results: Results, chosen: Mapping[str, Contender], options: argparse.Namespace) -> None:
    """The first table."""
    together = {name: c for name, c in chosen.items() if not (c.alone or options.apart)}
    rows = step_by_step(together, options) if together else []
    rows += [in_own_process(name, options)[-1] for name in chosen if name not in together]
    note = (
        "Medians over rounds of the step's time, and of its ratio to the bare step in the same round, with an interval "
        "that has the median with 95 %. Of floor: the extra time as a part of what one torch.aminmax of each of the "
        "same tensors takes, (ratio - 1) / (floor's ratio - 1): whoever looks at every value reads them once, and that "
        "reading costs what the machine's memory makes it cost. The weights' changes are no such tensors: ours alone "
        "has them. CPU ratio: of "
        "the training thread's own time, which other work on the machine touches less. The background "
        "threads and services of watchers have the machine's other core; what they do beyond the next step is not in "
        "these figures, and what ours have patched in torch (microseconds a step) is in the bare one too. "
        + ("Each contender in a process of its own, beside a bare twin. " if options.apart else "")
        + "msprobe and smdebug: in processes of their own, beside bare twins of their own. The naive statistics are "
        "six numbers by .item(); HF's detector has no mode that rests. Tensors: what our run holds in the end."
    )
    results.add("One step, 6-layer transformer, one CPU thread", note, rows)


# -- in one piece ------------------------------------------------------------------------------------------------------


def sustained_table(results: Results, chosen: Mapping[str, Contender], options: argparse.Namespace) -> None:
    """The second table: blocks of consecutive steps, long enough for a flush to disk, with all threads' CPU time."""
    ours = {name: c for name, c in chosen.items() if name.startswith("ours")}
    ours[EVERY_10] = Contender(attach=functools.partial(by_plimsoll, every=10), goal=1.02)
    twins = {BARE: Twin(bare, CPU)} | {name: Twin(c.attach, CPU) for name, c in ours.items()}
    wall: dict[str, list[float]] = {name: [] for name in twins}
    busy: dict[str, list[float]] = {name: [] for name in twins}
    order = random.Random(0)
    for twin in twins.values():
        _warm_up(twin)
    with _frozen():
        for _ in range(options.blocks):
            for name in order.sample(list(twins), len(twins)):
                start, busy_start = time.perf_counter(), time.process_time()
                for _ in range(options.block_steps):
                    twins[name].step()
                wall[name].append((time.perf_counter() - start) / options.block_steps)
                twins[name].attached.drain()
                busy[name].append((time.process_time() - busy_start) / options.block_steps)
    for twin in twins.values():
        twin.attached.close()
    rows = []
    for name in twins:
        mine, cpu = Timing(tuple(wall[name])), Timing(tuple(busy[name]))
        ratio, goal = mine.ratio(Timing(tuple(wall[BARE]))), ours[name].goal if name in ours else None
        row: Row = {"what": name, "ms/step": mine.median * 1e3, "ratio": ratio, "extra %": (ratio - 1) * 100}
        row |= {"CPU ms/step": cpu.median * 1e3, "CPU ratio": cpu.ratio(Timing(tuple(busy[BARE])))}
        rows.append(row | {"goal": goal, "verdict": verdict(ratio, goal)})
    note = (
        f"Means over {options.block_steps} consecutive steps, medians over {options.blocks} such blocks. CPU: of all "
        "threads of the process, with what is left to do at the block's end, the last flush included."
    )
    results.add("A run in one piece", note, rows)


# -- memory ------------------------------------------------------------------------------------------------------------


def memory_table(results: Results, chosen: Mapping[str, Contender], options: argparse.Namespace) -> None:
    """The third table: resident memory, each figure from a fresh process."""
    steps, growth = (20, 40) if options.quick else (MEMORY_STEPS, GROWTH_STEPS)
    names = [BARE, LOADED, *(name for name in chosen if "torch operations" not in name)]
    found = {name: _memory_of(name, growth if name in {BARE, EVERYTHING} else steps) for name in names}
    results.add(
        "Memory",
        f"Of the whole process. Peak: the resident set's high-water mark after {steps} steps; beyond libraries: over a "
        "bare twin's in a process that has loaded NumPy, Numba, pyarrow and Plimsoll, and measured one tensor. Grown: "
        f"of the resident set from step {growth // 10} to {growth}. Holds: the flight recorder's own figure; the goal "
        f"is {MEMORY_GOAL_MB} MB and that.",
        [_memory_row(name, found) for name in names],
    )
    if not options.quick:
        long = _memory_of(EVERYTHING, 10_000, tiny=True)
        if not isinstance(long, str):
            row: Row = {"what": EVERYTHING, "at step 1,000 MB": long["middle"], "at step 10,000 MB": long["end"]}
            note = "Resident set. The flush every five seconds makes waves of some megabytes."
            results.add("Growth over 10,000 steps of a tiny model", note, [row])


def _memory_row(name: str, all_found: Mapping[str, dict[str, float] | str]) -> Row:
    found, beside, loaded = all_found[name], all_found[BARE], all_found[LOADED]
    columns = ("peak MB", "over bare MB", "beyond libraries MB", "attaching MB", "grown MB", "holds MB", "goal")
    row: Row = {"what": name} | dict.fromkeys(columns)
    if isinstance(found, str) or isinstance(beside, str) or isinstance(loaded, str):
        return row | {"verdict": found if isinstance(found, str) else "-"}
    over, beyond = found["peak"] - beside["peak"], found["peak"] - loaded["peak"]
    row |= {"peak MB": found["peak"], "over bare MB": over, "attaching MB": found["attached"] - found["before"]}
    row |= {"beyond libraries MB": beyond if name.startswith("ours") else None, "holds MB": found["held"]}
    if name in {BARE, EVERYTHING}:
        row["grown MB"] = found["end"] - found["middle"]
    if name != EVERYTHING:
        return row | {"verdict": "-"}
    goal = MEMORY_GOAL_MB + found["held"]
    return row | {"goal": goal, "verdict": f"{verdict(over, goal)}; beyond libraries {verdict(beyond, goal)}"}


def _memory_of(name: str, steps: int, *, tiny: bool = False) -> dict[str, float] | str:
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "memory.json"
        command = [sys.executable, __file__, "--memory", name, "--steps", str(steps), "--into", str(answer)]
        done = subprocess.run([*command, *(["--tiny"] * tiny)], capture_output=True, text=True, check=False)
        if done.returncode:
            return f"not measured: {(done.stderr.strip().splitlines() or ['?'])[-1]}"[:120]
        return json.loads(answer.read_text(encoding="utf-8"))


def memory_probe(options: argparse.Namespace) -> dict[str, float]:
    """In the fresh process: trains so many steps, and notes the resident set on the way."""
    found: dict[str, float] = {}

    def attach(model: nn.Module, optimizer: torch.optim.Optimizer) -> Attached:
        found["before"] = _megabytes("VmRSS")
        attached = _contender(options.memory, options.device).attach(model, optimizer)
        found["attached"] = _megabytes("VmRSS")
        return attached

    twin = Twin(attach, TINY if options.tiny else CPU)
    peak_at = min(options.steps, 20 if options.steps < MEMORY_STEPS else MEMORY_STEPS)
    for number in range(1, options.steps + 1):
        twin.step()
        if number == peak_at:
            found["peak"] = _megabytes("VmHWM")
        if number == max(1, options.steps // 10):
            found["middle"] = _megabytes("VmRSS")
    found |= {"end": _megabytes("VmRSS"), "held": twin.attached.held_bytes() / 2**20}
    twin.attached.close()
    return found


def _megabytes(field: str) -> float:
    """A figure of this process's memory (Linux): VmRSS, VmHWM."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{field}:"))


# -- by function -------------------------------------------------------------------------------------------------------


def profile(options: argparse.Namespace) -> None:
    """Prints where the training thread's own time goes, bare and with the contender, in milliseconds a step."""
    steps = options.steps or (10 if options.quick else 50)
    for name in (BARE, options.profile):
        twin = Twin(_contender(name, options.device).attach, CPU)
        _warm_up(twin)
        profiler = cProfile.Profile(time.thread_time)
        for _ in range(steps):
            profiler.runcall(twin.step)
        twin.attached.close()
        entries = [(t, c, calls, f) for f, (_, calls, t, c, _) in pstats.Stats(profiler).stats.items()]  # type: ignore[attr-defined]
        total = sum(own for own, *_ in entries)
        print(f"\n{name}: {total / steps * 1e3:.2f} ms a step under the profiler, of {steps} steps")
        for title, key in (("own time", 0), ("with what they call, Plimsoll's only", 1)):
            kept = [e for e in entries if key == 0 or "plimsoll" in e[3][0]]
            print(f"  {title}\n  {'own ms':>9} {'all ms':>9} {'calls':>8}")
            for own, whole, calls, (file, line, function) in sorted(kept, key=lambda e: -e[key])[:25]:
                where = f"{'/'.join(Path(file).parts[-2:])}:{line} {function}" if line else function
                print(f"  {own / steps * 1e3:9.3f} {whole / steps * 1e3:9.3f} {calls / steps:8.1f}  {where[:110]}")


# -- on a GPU ----------------------------------------------------------------------------------------------------------


def on_gpu(contender: Contender, name: str, options: argparse.Namespace) -> list[Row]:
    """The bare twin's row and the contender's: blocks of steps between two events on the stream."""
    torch.set_float32_matmul_precision("high")
    torch._inductor.config.emulate_precision_casts = True  # noqa: SLF001  (in both: see promise P1)
    # The twins share their code. As the compiler is set by default, each could get the graph of the other, which has
    # taps or has none.
    torch._dynamo.config.skip_nnmodule_hook_guards = False  # noqa: SLF001
    attaches = {BARE: bare, name: contender.attach}
    twins = {each: Twin(attach, GPT_124M, "cuda", eager=options.eager) for each, attach in attaches.items()}
    for twin in twins.values():
        for _ in range(22):  # past the second sampled step of every 10: all graphs are compiled, all taps tried
            twin.step()
        twin.attached.drain()
    samples: dict[str, list[Sample]] = {name: [] for name in twins}
    order = random.Random(0)
    for _ in range(options.rounds):
        for each in order.sample(list(twins), len(twins)):
            samples[each].append(_block_on_gpu(twins[each], options.gpu_block_steps))
            twins[each].attached.drain()
    rows = []
    for each, twin in twins.items():
        pairs = list(zip(samples[each], samples[BARE], strict=True))
        same, tensors = twin.same_losses(twins[BARE]), twin.attached.recorded()
        if each == name and (tensors or 0) < len(list(twin.model.modules())):
            raise RuntimeError(f"{name}: {tensors} tensors recorded, fewer than the model has modules")
        rows.append(_row(each, contender if each == name else Contender(attach=bare), pairs, same, tensors))
        twin.attached.close()
    return rows


def _block_on_gpu(twin: Twin, steps: int) -> Sample:
    """Seconds a step, on the stream and of the host's thread; whatever waits for the device inside raises."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        busy = time.thread_time()
        start.record()
        for _ in range(steps):
            twin.step()
        end.record()
        busy = time.thread_time() - busy
    finally:
        torch.cuda.set_sync_debug_mode("default")
    end.synchronize()
    return Sample(start.elapsed_time(end) / 1e3 / steps, busy / steps)


def gpu_table(results: Results, chosen: Mapping[str, Contender], options: argparse.Namespace) -> None:
    """The GPU's table, each contender in a process of its own."""
    rows: list[Row] = []
    for name in chosen:
        pair = in_own_process(name, options)
        rows += pair if not rows else pair[1:]
    note = (
        f"Blocks of {options.gpu_block_steps} steps, timed on the stream, under set_sync_debug_mode('error'); medians "
        f"over rounds. bf16 autocast, {'eager code' if options.eager else 'torch.compile'}, fused AdamW, "
        "emulate_precision_casts in both twins."
    )
    results.add(f"GPT of 124M parameters, {'eager, ' if options.eager else ''}batch 16 x 1024", note, rows)


# -- the command line --------------------------------------------------------------------------------------------------


def _contender(name: str, device: str) -> Contender:
    known = {BARE: Contender(attach=bare), LOADED: Contender(attach=loaded), **contenders(device)}
    if name not in known:
        raise SystemExit(f"watch: expected a contender's name; got {name!r}. There are: {', '.join(known)}.")
    return known[name]


def options_from(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, with the defaults by device filled in."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--quick", action="store_true", help="few rounds and steps")
    parser.add_argument("--only", default="*", help="a glob over the contenders' names")
    parser.add_argument("--rounds", type=int, help="default 200; 4 with --quick; 15 on a GPU")
    parser.add_argument(
        "--apart", action="store_true", help="every contender in a process of its own, beside a bare twin"
    )
    parser.add_argument("--tables", default="steps,sustained,memory", help="which, of steps, sustained, memory")
    parser.add_argument("--profile", metavar="NAME", help="print where the time of this contender's step goes")
    parser.add_argument("--steps", type=int, help="of --profile and --memory")
    parser.add_argument("--memory", metavar="NAME", help="print the memory of this contender as JSON")
    parser.add_argument("--out", type=Path, help="folder of the result files; default benchmarks/results")
    parser.add_argument("--pair", help=argparse.SUPPRESS)
    parser.add_argument("--eager", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.rounds = options.rounds or (4 if options.quick else 200 if options.device == "cpu" else 15)
    options.blocks, options.block_steps = (2, 10) if options.quick else (10, 50)
    options.gpu_block_steps = 20
    options.tables = options.tables.split(",")
    return options


def _answer(content: object, into: Path | None) -> None:
    text = json.dumps(content)
    print(text) if into is None else into.write_text(text, encoding="utf-8")


def main() -> None:
    """Runs all tables and writes them, unless it is a smoke run without a folder to write to."""
    options = options_from()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # peers', about each other's hooks
    if options.memory:
        options.steps = options.steps or MEMORY_STEPS
        _answer(memory_probe(options), options.into)
        return
    if options.profile:
        profile(options)
        return
    if options.pair:
        contender = _contender(options.pair, options.device)
        measured = on_gpu(contender, options.pair, options) if options.device == "cuda" else None
        _answer(measured or step_by_step({options.pair: contender}, options), options.into)
        return
    chosen = {name: c for name, c in contenders(options.device).items() if fnmatch.fnmatch(name, options.only)}
    results = Results("watch", options.device)
    if options.device == "cuda":
        for options.eager in (False, True):
            gpu_table(results, chosen, options)
    else:
        for name, table in (("steps", step_table), ("sustained", sustained_table), ("memory", memory_table)):
            if name in options.tables:
                table(results, chosen, options)
    if options.out or not options.quick:
        results.write("watch", *([options.out] if options.out else []))


if __name__ == "__main__":
    main()
